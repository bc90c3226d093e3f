#!/usr/bin/env bash
# Holds the connectors to the engines themselves: makes a virtual environment with vLLM, SGLang and LMCache, without
# what they need of a GPU, and runs tests/python/{vllm,sglang,lmcache}*_test.py against `kvtier serve`, on a CPU. The
# environment takes 9 GB and some minutes.
#
#   scripts/engines.sh [--venv DIR] [--vllm VERSION] [--prepare] [ENGINE...]
#
# ENGINE: vllm, sglang, lmcache; all when none is named. --venv is where the environment is, or is made (default
# build/engines/venv); --vllm is the release of vLLM (default 0.33.0). --prepare makes it and stops. KVTIER_BINARY names the server, which is built
# otherwise. Needs a network to make the environment.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup.sh
source scripts/setup.sh

venv=build/engines/venv
vllm=0.33.0
prepare=0
engines=()
while (($# > 0)); do
  case $1 in
    --venv) venv=${2:?--venv: expected a folder} && shift ;;
    --vllm) vllm=${2:?--vllm: expected a version} && shift ;;
    --prepare) prepare=1 ;;
    vllm | sglang | lmcache) engines+=("$1") ;;
    *)
      echo "expected --venv, --vllm, --prepare, vllm, sglang or lmcache, found: $1" >&2
      exit 2
      ;;
  esac
  shift
done
if ((${#engines[@]} == 0)); then engines=(vllm sglang lmcache); fi

say "the environment"
ready=$venv/ready
if [[ ! -e $ready ]]; then
  python3 -m venv --upgrade-deps "$venv"
  # The engines' own lists, of some 200 packages, contradict each other.
  "$venv/bin/python" -m pip install --quiet --no-deps --requirement tests/python/engines.txt
  "$venv/bin/python" -m pip install --quiet --no-deps sglang==0.5.23 lmcache==0.5.6
  touch "$ready"
fi
"$venv/bin/python" -m pip install --quiet --no-deps "vllm==$vllm"
if ((prepare)); then exit 0; fi
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
copy_python "$copy"
"$venv/bin/python" -m pip install --quiet --force-reinstall --no-deps "$copy/python"

if [[ -z ${KVTIER_BINARY:-} ]]; then
  say "the server"
  need_packages "${kvtier_build_packages[@]}"
  mapfile -t options < <(cmake_options)
  cmake --preset release "${options[@]}"
  cmake --build build/release --parallel "$(num_jobs)" --target kvtier_cli
  KVTIER_BINARY=$PWD/build/release/services/kvtier
fi

for engine in "${engines[@]}"; do
  say "$engine"
  for test in "tests/python/${engine}"*_test.py; do
    KVTIER_BINARY=$KVTIER_BINARY PYTHONDONTWRITEBYTECODE=1 "$venv/bin/python" "$test"
  done
done
