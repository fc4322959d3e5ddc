#!/usr/bin/env bash
# Half an hour on one borrowed GPU: checks, benchmarks, a training run, and everything measured in one file.
#
#   benchmarks/gpu_session.sh [--cpu] [--parts PART ...] [--vectors FILE] [--out FOLDER]
#   WHEELS=FOLDER benchmarks/gpu_session.sh ...   a machine with PyTorch and no network: what else is needed, as wheels
#   benchmarks/gpu_session.sh wheels FOLDER [3.12] fetches those for a version of Python, on a machine with network (17 MiB)
#
# Where a command may take only minutes, name the parts, one call each: `--parts machine conformance tests`, `--parts
# step`, `--parts memory`, `--parts training`. Copy FOLDER/session.json to benchmarks/results/ and commit it.
set -euo pipefail
cd "$(dirname "$0")/.."
if [ "${1:-}" = wheels ]; then
  # What an image with PyTorch and transformers usually lacks; the pins are those of requirements.lock.
  pins() { grep -E "^($1)==" requirements.lock; }
  to=(--quiet --no-deps --dest "$2" --python-version "${3:-3.12}" --only-binary=:all:)
  pins 'trl|transformers|accelerate|datasets|multiprocess|dill|xxhash|hydra-core|omegaconf|math-verify|latex2sympy2_extended|peft|submitit|hydra-submitit-launcher' |
    xargs python3 -m pip download "${to[@]}"
  pins antlr4-python3-runtime | xargs python3 -m pip wheel --quiet --no-deps --wheel-dir "$2" # has no wheel of its own
  exit
fi
if [ -n "${WHEELS:-}" ]; then
  python3 -m pip install --quiet --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site "$WHEELS"/*.whl
  export PYTHONPATH="/tmp/site${PYTHONPATH:+:$PYTHONPATH}"
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
exec "${PYTHON:-python3}" benchmarks/gpu_session.py "$@"
