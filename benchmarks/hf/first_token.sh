#!/usr/bin/env bash
# Times what a new user waits for: pip install of the wheels of scripts/wheels.sh, with what they need but PyTorch and
# transformers, and the first token of a model. Writes a row of JSON.
#
#   benchmarks/hf/first_token.sh [PYTHON [MODEL [WHEEL...]]]
#
# PYTHON has PyTorch and transformers (default: build/torch/bin/python, which .ci/run makes); MODEL is a folder of
# scripts/real_model.sh (default: build/real-model/model). Without a WHEEL those in build/wheels are taken, and made
# where there are none. They are installed into a folder of their own, which is removed.
set -euo pipefail
python=${1:-build/torch/bin/python} model=${2:-build/real-model/model}
shift "$(($# < 2 ? $# : 2))"
for needed in "$python" "$model/config.json"; do
  if [[ ! -e $needed ]]; then
    echo "expected $needed, found none" >&2
    exit 2
  fi
done
if (($# == 0)); then
  compgen -G "build/wheels/*.whl" >/dev/null || scripts/wheels.sh --out build/wheels >&2
  set -- build/wheels/*.whl
fi
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

now() { date +%s.%N; }
load=$(cut -d ' ' -f 1 /proc/loadavg)
start=$(now)
"$python" -m pip install --quiet --no-warn-conflicts --target "$folder" "$@"
installed=$(now)
PYTHONPATH=$folder PYTHONWARNINGS=ignore "$python" -m kvtier.chat --model "$model" --device cpu --dtype float32 \
  --max-tokens 512 --prompt "What is the capital of France?" --new-tokens 1 >&2
answered=$(now)
awk -v a="$start" -v b="$installed" -v c="$answered" -v load="$load" \
  'BEGIN {printf "{\"load\": %.1f, \"install_seconds\": %.1f, \"first_token_seconds\": %.1f, \"seconds\": %.1f}\n", load, b - a, c - b, c - a}'
