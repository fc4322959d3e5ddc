"""Downloads data sets and models into the Hugging Face cache, on a login node, for compute nodes without network.

    python experiments/prefetch.py --task dapo_math aime25 --model Qwen/Qwen2.5-7B
    python experiments/prefetch.py --dataset openai/gsm8k --config main

Runs with HF_HUB_OFFLINE=1 and the same HF_HOME then find them. `hf download` is not enough: offline, `datasets` finds
only data that it has prepared itself. And for a model, `hf download` fetches the weights in every available format.
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

# The files that transformers loads; the same weights in other formats would double the download.
MODEL_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


def fetch_model(hub_id: str, revision: str | None, gguf_file: str | None = None) -> str:
    """Downloads weights, configuration and tokenizer, or one GGUF file. Returns a line that says where they are."""
    from huggingface_hub import snapshot_download

    patterns = MODEL_FILES if gguf_file is None else [gguf_file]
    return f"model {hub_id}: " + snapshot_download(hub_id, revision=revision, allow_patterns=patterns)


def cached_file(hub_id: str, file: str, revision: str | None = None) -> Path | None:
    """Returns the cached path of a model's file, None if there is none. revision: None for the newest one cached."""
    from huggingface_hub import try_to_load_from_cache  # importing takes a tenth of a second

    try:
        found = try_to_load_from_cache(hub_id, file, revision=revision)
    except ValueError:  # not a valid name on the hub
        return None
    return Path(found) if isinstance(found, str) else None


def sources_of(task: str) -> list[Source]:
    """Returns the hub's data sets that a task of conf/task reads, including those for its evaluation.

    Raises ValueError for an unknown task.
    """
    from hydra import compose, initialize_config_dir

    from experiments.running.build import build
    from experiments.running.command_line import CONF, near_miss

    known = sorted(path.stem for path in (CONF / "task").glob("*.yaml"))
    if task not in known:
        raise ValueError(f"--task {task} is not a task.{near_miss(task, known)} Known: {', '.join(known)}.")
    with initialize_config_dir(str(CONF), version_base="1.3"):
        built = build(compose("evaluate", overrides=[f"task={task}"]), "task")
    return [source for source in getattr(built, "sources", list)() if source.local is None]


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line; if it is invalid, ends the process with 2, as argparse does."""
    parser = argparse.ArgumentParser(prog="python experiments/prefetch.py", description=__doc__.splitlines()[0])
    parser.add_argument("--task", metavar="NAME", nargs="+", default=[], help="tasks of conf/task, with all their data")
    parser.add_argument("--dataset", metavar="ID", help="hub id of a data set, e.g. openai/gsm8k (task.path)")
    parser.add_argument("--config", help="the data set's configuration, e.g. main (task.config)")
    parser.add_argument("--files", metavar="PATTERN", help="only these of the data set, e.g. 'train/*' (task.files)")
    parser.add_argument("--dataset-revision", metavar="REVISION", help="branch, tag or commit (task.revision)")
    parser.add_argument("--model", metavar="ID", help="hub id of a model, e.g. Qwen/Qwen2.5-7B (model.name)")
    parser.add_argument("--model-revision", metavar="REVISION", help="branch, tag or commit (model.revision)")
    parser.add_argument("--gguf-file", metavar="NAME", help="fetch it instead of the model's weights (model.gguf_file)")
    parser.add_argument("--revision", help="the revision, if only a data set or only a model is fetched")
    options = parser.parse_args(arguments)
    if options.dataset is None and options.model is None and not options.task:
        parser.error("nothing to fetch. Give --task NAME, --dataset ID or --model ID.")
    for option in ("config", "files"):
        if getattr(options, option) is not None and options.dataset is None:
            parser.error(f"--{option} {getattr(options, option)} belongs to a data set. Also give --dataset ID.")
    if options.gguf_file is not None and options.model is None:
        parser.error(f"--gguf-file {options.gguf_file} belongs to a model. Also give --model ID.")
    if options.revision is not None and options.dataset is not None and options.model is not None:
        parser.error(f"--revision {options.revision} is ambiguous. Give --dataset-revision or --model-revision.")
    try:
        options.sources = [source for task in options.task for source in sources_of(task)]
    except ValueError as error:
        parser.error(str(error))
    return options


def fetches(options: argparse.Namespace) -> Iterator[tuple[str, Callable[[], str]]]:
    """Yields each hub id once, with a function that downloads it."""
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
    """Downloads what the arguments name. Returns the exit code: 0, or CRASHED if a download failed."""
    options = parse_arguments(arguments)
    if constants.HF_HUB_OFFLINE:
        print(
            "HF_HUB_OFFLINE is set, but prefetching needs the network. On a machine with network access, run "
            "`HF_HUB_OFFLINE=0 python experiments/prefetch.py ...`.",
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
                f"{hub_id} could not be fetched ({type(error).__name__}: {reason}). This needs network access, an "
                "existing hub id and, for a gated one, HF_TOKEN; behind a mirror, set HF_ENDPOINT.",
                file=sys.stderr,
            )
    return CRASHED if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
