#!/usr/bin/env bash
# Times what a new user waits for: pip install of the wheels of scripts/wheels.sh, with what they need but PyTorch and
# transformers, and the first token of a model.
#
#   benchmarks/hf/first_token.sh PYTHON MODEL WHEEL...
#
# PYTHON has PyTorch and transformers; the wheels go to a folder of their own, which is removed.
set -euo pipefail
python=${1:?expected a Python} model=${2:?expected a folder of a model}
shift 2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT

now() { date +%s.%N; }
start=$(now)
"$python" -m pip install --quiet --no-warn-conflicts --target "$folder" "$@"
installed=$(now)
PYTHONPATH=$folder PYTHONWARNINGS=ignore "$python" -m kvtier.chat --model "$model" --device cpu --dtype float32 \
  --max-tokens 512 --prompt "What is the capital of France?" --new-tokens 1
answered=$(now)
awk -v a="$start" -v b="$installed" -v c="$answered" \
  'BEGIN {printf "install %.1f s, first token %.1f s, together %.1f s\n", b - a, c - b, c - a}'
