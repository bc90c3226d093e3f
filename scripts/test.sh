#!/usr/bin/env bash
# Checks the sources, builds everything and runs every test that this machine can run; ctest's summary comes last. With
# --build-only, builds. Needs Debian 12 or Ubuntu 24.04, git and a shell.
#
#   scripts/test.sh [--preset NAME] [--build-only | options of ctest]
#
# The preset is `cuda` on a machine with a usable GPU and `release` elsewhere.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup.sh
source scripts/setup.sh

preset=
if [[ ${1:-} == --preset ]]; then
  preset=${2:?--preset needs a name}
  shift 2
fi

need_packages "${kvtier_test_packages[@]}"
if [[ ${CI:-} == true ]]; then need_packages "${kvtier_ci_packages[@]}"; fi
if use_cuda; then : "${preset:=cuda}"; else : "${preset:=release}"; fi

if [[ ${1:-} != --build-only ]]; then scripts/check.sh; fi

say "building preset $preset"
mapfile -t options < <(strict_options)
options+=(-DKVTIER_UNITY=ON)  # on a fresh machine less to compile
if [[ ${CI:-} == true ]]; then options+=(-DKVTIER_QUICK=ON); fi  # no user gets these programs
cmake --preset "$preset" "${options[@]}"
cmake --build "build/$preset" --parallel "$(num_jobs)"
if [[ ${1:-} == --build-only ]]; then exit 0; fi

say "testing preset $preset"
exec ctest --test-dir "build/$preset" --parallel "$(num_jobs)" --output-on-failure --no-tests=error "$@"
