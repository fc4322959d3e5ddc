"""Fetches data sets and models into the Hugging Face cache, on a login node, for compute nodes without network.

    python experiments/prefetch.py --task dapo_math aime25 --model Qwen/Qwen2.5-7B
    python experiments/prefetch.py --dataset openai/gsm8k --config main

Afterwards HF_HUB_OFFLINE=1 with the same HF_HOME finds them. `hf download` is not enough: offline, `datasets` finds
only what it has prepared itself. And of a model it takes the weights in every format that there is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from huggingface_hub import constants

from otb.errors import CRASHED, first_line
from otb.tasks.loading import fetch_rows
from otb.tasks.sources import ONLY, Source

# What transformers loads; the same weights in other formats would double the download.
MODEL_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


def fetch_model(hub_id: str, revision: str | None, gguf_file: str | None = None) -> str:
    """Downloads weights, configuration and tokenizer, or one GGUF file. Returns a line that says where they lie."""
    from huggingface_hub import snapshot_download

    patterns = MODEL_FILES if gguf_file is None else [gguf_file]
    return f"model {hub_id}: " + snapshot_download(hub_id, revision=revision, allow_patterns=patterns)


def cached_file(hub_id: str, file: str, revision: str | None = None) -> Path | None:
    """Returns a file of a model in the cache, of its newest revision with None; None where it is not there."""
    from huggingface_hub import try_to_load_from_cache  # a tenth of a second

    try:
        found = try_to_load_from_cache(hub_id, file, revision=revision)
    except ValueError:  # no name that the hub could have
        return None
    return Path(found) if isinstance(found, str) else None


def sources_of(task: str) -> list[Source]:
    """Returns the hub's data sets that a task of conf/task reads, those of its evaluation included.

    Raises ValueError for a name that is no task.
    """
    from hydra import compose, initialize_config_dir

    from experiments.running.build import build
    from experiments.running.command_line import CONF, near_miss

    known = sorted(path.stem for path in (CONF / "task").glob("*.yaml"))
    if task not in known:
        raise ValueError(f"--task {task} is no task.{near_miss(task, known)} Known: {', '.join(known)}.")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        built = build(compose("evaluate", overrides=[f"task={task}"]), "task")
    return [source for source in getattr(built, "sources", list)() if source.local is None]


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line; ends the process with 2, as argparse does, where it makes no sense."""
    parser = argparse.ArgumentParser(prog="python experiments/prefetch.py", description=__doc__.splitlines()[0])
    parser.add_argument("--task", metavar="NAME", nargs="+", default=[], help="tasks of conf/task, with all they read")
    parser.add_argument("--dataset", metavar="ID", help="hub id of a data set, e.g. openai/gsm8k (task.path)")
    parser.add_argument("--config", help="the data set's configuration, e.g. main (task.config)")
    parser.add_argument("--files", metavar="PATTERN", help="of the data set only these, e.g. 'train/*' (task.files)")
    parser.add_argument("--dataset-revision", metavar="REVISION", help="branch, tag or commit (task.revision)")
    parser.add_argument("--model", metavar="ID", help="hub id of a model, e.g. Qwen/Qwen2.5-7B (model.name)")
    parser.add_argument("--model-revision", metavar="REVISION", help="branch, tag or commit (model.revision)")
    parser.add_argument("--gguf-file", metavar="NAME", help="of the model, instead of its weights (model.gguf_file)")
    parser.add_argument("--revision", help="the revision, where only a data set or only a model is fetched")
    options = parser.parse_args(arguments)
    if options.dataset is None and options.model is None and not options.task:
        parser.error("nothing to fetch. Give --task NAME, --dataset ID or --model ID.")
    for option in ("config", "files"):
        if getattr(options, option) is not None and options.dataset is None:
            parser.error(f"--{option} {getattr(options, option)} belongs to a data set. Give --dataset ID too.")
    if options.gguf_file is not None and options.model is None:
        parser.error(f"--gguf-file {options.gguf_file} belongs to a model. Give --model ID too.")
    if options.revision is not None and options.dataset is not None and options.model is not None:
        parser.error(f"--revision {options.revision} could be either's. Give --dataset-revision or --model-revision.")
    try:
        options.sources = [source for task in options.task for source in sources_of(task)]
    except ValueError as error:
        parser.error(str(error))
    return options


def fetches(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields hub id and what fetches it, each once."""
    sources = list(options.sources)
    if options.dataset is not None:
        revision = options.dataset_revision or options.revision
        sources.append(Source(options.dataset, ONLY, options.config, revision, options.files))
    for source in dict.fromkeys(Source(s.path, ONLY, s.config, s.revision, s.files) for s in sources):
        yield source.path, partial(fetch_rows, source)
    if options.model is not None:
        revision = options.model_revision or options.revision
        yield options.model, partial(fetch_model, options.model, revision, options.gguf_file)


def main(arguments: list[str] | None = None) -> int:
    """Fetches what the arguments name. Returns the exit code: 0, or CRASHED where something could not be fetched."""
    options = parse_arguments(arguments)
    if constants.HF_HUB_OFFLINE:
        print(
            "HF_HUB_OFFLINE is set: prefetching needs the network. Run it where there is one, as `HF_HUB_OFFLINE=0 "
            "python experiments/prefetch.py ...`.",
            file=sys.stderr,
        )
        return CRASHED
    failed = False
    for hub_id, fetch in fetches(options):
        try:
            print(fetch())
        except (OSError, ValueError) as error:  # both libraries' network and not-found errors are among these
            failed = True
            reason = first_line(error)[:200]
            print(
                f"{hub_id} could not be fetched ({type(error).__name__}: {reason}). It needs network, a hub id that "
                f"exists and, for a gated one, HF_TOKEN; behind a mirror set HF_ENDPOINT.",
                file=sys.stderr,
            )
    return CRASHED if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
