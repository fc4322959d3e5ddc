"""Fetches data sets and models into the Hugging Face cache, on a login node, for compute nodes without network.

    python -m otb.prefetch --dataset openai/gsm8k --config main --model Qwen/Qwen2.5-7B

Afterwards HF_HUB_OFFLINE=1 with the same HF_HOME finds them. `hf download` is not enough: offline, `datasets` finds
only what it has prepared itself. And of a model it takes the weights in every format that there is.
"""

from __future__ import annotations

import argparse
import sys

from huggingface_hub import constants

from otb.errors import CRASHED, first_line

# What transformers loads; the same weights in other formats would double the download.
MODEL_FILES = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]


def fetch_dataset(hub_id: str, config: str | None, revision: str | None) -> str:
    """Downloads and prepares all splits. Returns a line that says what is there."""
    from datasets import load_dataset

    splits = load_dataset(hub_id, config, revision=revision)
    return f"data set {hub_id}: " + ", ".join(f"{name} {len(rows)} rows" for name, rows in splits.items())


def fetch_model(hub_id: str, revision: str | None, gguf_file: str | None = None) -> str:
    """Downloads weights, configuration and tokenizer, or one GGUF file. Returns a line that says where they lie."""
    from huggingface_hub import snapshot_download

    patterns = MODEL_FILES if gguf_file is None else [gguf_file]
    return f"model {hub_id}: " + snapshot_download(hub_id, revision=revision, allow_patterns=patterns)


def parse_arguments(arguments: list[str] | None) -> argparse.Namespace:
    """Reads the command line; ends the process with 2, as argparse does, where it makes no sense."""
    parser = argparse.ArgumentParser(prog="python -m otb.prefetch", description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", metavar="ID", help="hub id of a data set, e.g. openai/gsm8k (task.path)")
    parser.add_argument("--config", help="the data set's configuration, e.g. main (task.config)")
    parser.add_argument("--dataset-revision", metavar="REVISION", help="branch, tag or commit (task.revision)")
    parser.add_argument("--model", metavar="ID", help="hub id of a model, e.g. Qwen/Qwen2.5-7B (model.name)")
    parser.add_argument("--model-revision", metavar="REVISION", help="branch, tag or commit (model.revision)")
    parser.add_argument("--gguf-file", metavar="NAME", help="of the model, instead of its weights (model.gguf_file)")
    parser.add_argument("--revision", help="the revision, where only a data set or only a model is fetched")
    options = parser.parse_args(arguments)
    if options.dataset is None and options.model is None:
        parser.error("nothing to fetch. Give --dataset ID, --model ID or both.")
    if options.config is not None and options.dataset is None:
        parser.error(f"--config {options.config} belongs to a data set. Give --dataset ID too.")
    if options.gguf_file is not None and options.model is None:
        parser.error(f"--gguf-file {options.gguf_file} belongs to a model. Give --model ID too.")
    if options.revision is not None and options.dataset is not None and options.model is not None:
        parser.error(f"--revision {options.revision} could be either's. Give --dataset-revision or --model-revision.")
    return options


def main(arguments: list[str] | None = None) -> int:
    """Fetches what the arguments name. Returns the exit code: 0, or CRASHED where something could not be fetched."""
    options = parse_arguments(arguments)
    if constants.HF_HUB_OFFLINE:
        print(
            "HF_HUB_OFFLINE is set: prefetching needs the network. Run it where there is one, as `HF_HUB_OFFLINE=0 "
            "python -m otb.prefetch ...`.",
            file=sys.stderr,
        )
        return CRASHED
    fetches = []
    if options.dataset is not None:
        revision = options.dataset_revision or options.revision
        fetches.append((options.dataset, lambda: fetch_dataset(options.dataset, options.config, revision)))
    if options.model is not None:
        model_revision = options.model_revision or options.revision
        fetches.append((options.model, lambda: fetch_model(options.model, model_revision, options.gguf_file)))
    failed = False
    for hub_id, fetch in fetches:
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
