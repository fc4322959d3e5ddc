#!/usr/bin/env bash
# Makes the environment of the tests marked needs_vllm and prints its folder: vLLM for CPUs and DeepSpeed on top of .venv.
#
#   export OTB_VLLM_ENV="$(tests/vllm_environment.sh [FOLDER])"      # default: .venv-vllm
#
# Packages of requirements.lock are those of .venv; only what is beside them is installed, and again where a pin changes,
# so that the folder may be kept from one CI run to the next.
set -euo pipefail
cd "$(dirname "$0")/.."
base=${OTB_VENV:-$PWD/.venv}
folder=$(realpath -m "${1:-.venv-vllm}")
pins=$(cat requirements.lock tests/vllm_requirements.txt tests/vllm_environment.sh | sha256sum)
if [ "$(cat "$folder/pins" 2> /dev/null)" != "$pins" ]; then
  rm -rf "$folder"
  "$base/bin/python" -m venv --without-pip "$folder"
fi
packages=$("$base/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
own=$("$folder/bin/python" -c "import sysconfig; print(sysconfig.get_path('purelib'))")
echo "import site; site.addsitedir('$packages')" > "$own/project.pth"
if [ ! -e "$folder/pins" ]; then
  # no isolation: DeepSpeed's own build, without kernels, asks for the torch that is there
  DS_BUILD_OPS=0 "$folder/bin/python" -m pip install --quiet --no-deps --no-build-isolation \
    -r tests/vllm_requirements.txt >&2
  echo "$pins" > "$folder/pins"
fi
echo "$folder"
