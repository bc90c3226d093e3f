#!/usr/bin/env bash
# Builds the server and runs what takes long: 1,000 killed clients, 10,000 sessions, slow readers, 100 SIGTERMs under
# load, every answer of a bystander compared with double precision; then the tests labelled slow, among them a million
# random calls on page tables and tiers, and the hostile load of tests/hostile at full size.
#
#   scripts/soak.sh [--small] [--json FILE] [CASE...]
#   scripts/soak.sh hostile [--small] [--json FILE] [CASE...]
#   scripts/soak.sh engines
#
# Cases: kills, sessions, slow_readers, terms; all of them, the attacks and the tests, when none is named. "hostile": the
# attacks alone, which are frames, calls, kills, tiers, descriptors, headers, replies, together. "engines": the
# connectors on every release of vLLM that they support, and on SGLang and LMCache (scripts/engines.sh).
# --json writes the figures.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup.sh
source scripts/setup.sh

need_packages "${kvtier_test_packages[@]}"
mapfile -t options < <(cmake_options)
cmake --preset release "${options[@]}"
cmake --build build/release --parallel "$(num_jobs)"

venv=build/release/tests/python/venv
say "the Python environment"
python3 tests/python/environment.py "$venv" python || {
  echo "the soak is driven from Python and needs its packages, see above" >&2
  exit 1
}

export KVTIER_BINARY=$PWD/build/release/services/kvtier
export KVTIER_ENDLESS_CLIENT=$PWD/build/release/tests/services/endless_client
if [[ ${1:-} == hostile ]]; then
  say "attacks"
  exec "$venv/bin/python" tests/python/attacks.py "${@:2}"
fi

if [[ ${1:-} == engines ]]; then
  for vllm in 0.25.1 0.26.0 0.27.1 0.28.0 0.29.0 0.30.0 0.31.0 0.32.0; do scripts/engines.sh --vllm "$vllm" vllm; done
  exec scripts/engines.sh
fi

say "soak"
"$venv/bin/python" tests/python/soak.py "$@"

if (($# == 0)); then
  say "attacks"
  "$venv/bin/python" tests/python/attacks.py
  say "tests labelled slow"
  KVTIER_MODEL_CALLS=1000000 ctest --test-dir build/release --label-regex slow --output-on-failure --no-tests=error
  say "hostile load, long"
  KVTIER_HOSTILE_LONG=1 ctest --test-dir build/release --verbose --no-tests=error --tests-regex StarvationTest
  KVTIER_MODEL_CALLS=1000000 ctest --test-dir build/release --output-on-failure --no-tests=error \
    --tests-regex 'PageTableModelTest|RowCacheSet.ChoosesAsThePlainModelDoes'
fi
