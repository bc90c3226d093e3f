#!/usr/bin/env bash
# The cheap checks: format, shell scripts, figures that are those of the results, the language of the documents, the
# API reference, headers that compile alone, and the rules of the whole tree (who may include whom, what the documents
# promise). The first stage of test.sh, and a pre-commit hook:
#
#   ln -s ../../scripts/check.sh .git/hooks/pre-commit
#
#   scripts/check.sh [--tidy [BASE]]
#
# --tidy adds clang-tidy over the sources that differ from BASE (default HEAD). Installs nothing; a tool that
# is not there is named.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
# shellcheck source=scripts/setup.sh
source scripts/setup.sh

tidy=0
base=HEAD
if [[ ${1:-} == --tidy ]]; then
  tidy=1
  base=${2:-HEAD}
elif (($# > 0)); then
  echo "unknown argument: $1" >&2
  exit 2
fi

# The tree may belong to another user, as in a container.
tracked() {
  local file
  git -c safe.directory='*' ls-files -- "$@" | while read -r file; do
    if [[ -e $file ]]; then echo "$file"; fi  # a file deleted, but not yet in the index, is left out
  done
}

say "format"
mapfile -t sources < <(tracked '*.h' '*.cc' '*.c' '*.cu' '*.cuh')
if command -v clang-format-14 >/dev/null; then
  clang-format-14 --dry-run --Werror "${sources[@]}"
  echo "${#sources[@]} files"
else
  echo "clang-format-14 is not installed: the format is not checked"
fi

say "shell scripts"
mapfile -t shell_scripts < <(tracked '*.sh' .ci/run)
for script in "${shell_scripts[@]}"; do bash -n "$script"; done
if command -v shellcheck >/dev/null; then shellcheck -x "${shell_scripts[@]}"; fi
echo "${#shell_scripts[@]} files"

say "figures"
if command -v python3 >/dev/null; then
  python3 benchmarks/performance.py --check
  echo "docs/performance.md and its plot are those of benchmarks/results"
  python3 benchmarks/quality/report.py --check
  echo "docs/quality.md is that of benchmarks/results"
  python3 benchmarks/quality/real_model.py --check
  echo "the tables of docs/method.md are those of benchmarks/results"
else
  echo "python3 is not installed: docs/performance.md and docs/quality.md are not compared with the results"
fi

say "language of the documents"
if command -v python3 >/dev/null; then
  scripts/check_prose.py
  echo "sentences are short, and words are those of the field"
else
  echo "python3 is not installed: the language of the documents is not checked"
fi

say "API reference"
if command -v doxygen >/dev/null; then
  mkdir -p build
  doxygen docs/Doxyfile
  echo "doxygen has no warning"
else
  echo "doxygen is not installed: the comments of the public headers are not read"
fi

say "headers and tree"
mkdir -p build
mapfile -t options < <(cmake_options)
cmake --preset dev -B build/check -DKVTIER_BUILD_SERVICES=OFF -DKVTIER_BUILD_EXAMPLES=OFF "${options[@]}" \
  >build/check.log 2>&1 || { cat build/check.log >&2; exit 1; }
cmake --build build/check --target tree_test all_verify_interface_header_sets \
  >build/check.log 2>&1 || { cat build/check.log >&2; exit 1; }
build/check/tests/tree/tree_test --gtest_brief=1

if ((tidy)); then
  say "clang-tidy, against $base"
  mapfile -t changed < <(git diff --name-only --diff-filter=d "$base" -- '*.cc')
  cmake --preset dev "${options[@]}" >build/check.log 2>&1 || { cat build/check.log >&2; exit 1; }
  cmake --build --preset dev  # generated headers
  if ! command -v clang-tidy-14 >/dev/null; then
    echo "clang-tidy-14 is not installed" >&2
    exit 1
  fi
  if ((${#changed[@]} > 0)); then clang-tidy-14 -p build/dev --quiet --extra-arg=-Wno-unknown-warning-option "${changed[@]}"; fi
  echo "${#changed[@]} files"
fi
