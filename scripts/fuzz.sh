#!/usr/bin/env bash
# Builds the fuzz targets with clang's libFuzzer, AddressSanitizer and UndefinedBehaviorSanitizer and runs each over its
# corpus and what libFuzzer makes of it, as many at a time as there are cores.
#
#   scripts/fuzz.sh [--keep] [SECONDS]
#   scripts/fuzz.sh --built FOLDER [SECONDS]
#
# SECONDS (60) is the time of each target. What is found ends the script with the output and the name of the input,
# in build/fuzz/found. --keep adds inputs that reach new code to tests/fuzz/corpus. --built takes the targets of another
# build, with AddressSanitizer say, and makes inputs of the corpora by chance: no clang, and no look at what they reach.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup.sh
source scripts/setup.sh

keep=0
built=
if [[ ${1:-} == --keep ]]; then
  keep=1
  shift
elif [[ ${1:-} == --built ]]; then
  built=$2
  shift 2
fi
seconds=${1:-60}

if [[ -z $built ]]; then
  need_packages "${kvtier_build_packages[@]}" "${kvtier_fuzz_packages[@]}"
  mapfile -t options < <(cmake_options)
  cmake --preset fuzz "${options[@]}"
  cmake --build build/fuzz --target fuzzers --parallel "$(num_jobs)"
fi

mkdir -p build/fuzz/found
# by_chance NAME: a target of another build.
by_chance() {
  local name=$1
  if ! "$built/tests/fuzz/$name" --mutate "$seconds" --last "build/fuzz/found/$name" "tests/fuzz/corpus/$name" \
    >"build/fuzz/$name.log" 2>&1; then
    tail -n 60 "build/fuzz/$name.log"
    echo "$name: found an input that it does not survive, see above and build/fuzz/found/$name" >&2
    return 1
  fi
  rm -f "build/fuzz/found/$name"
  grep -a 'inputs made' "build/fuzz/$name.log" | sed "s/^/$name  /"
}

fuzz() {  # NAME
  local name=$1 fresh=build/fuzz/fresh/$1
  mkdir -p "$fresh"
  if ! "build/fuzz/tests/fuzz/$name" -max_total_time="$seconds" -max_len=8192 -timeout=20 -rss_limit_mb=4096 \
    -artifact_prefix="build/fuzz/found/$name-" -print_final_stats=1 "$fresh" "tests/fuzz/corpus/$name" \
    >"build/fuzz/$name.log" 2>&1; then
    tail -n 60 "build/fuzz/$name.log"
    echo "$name: found an input that it does not survive, see above and build/fuzz/found" >&2
    return 1
  fi
  grep -aE 'number_of_executed_units|new_units_added|peak_rss' "build/fuzz/$name.log" | sed "s/^/$name  /"
  if ((keep)); then
    "build/fuzz/tests/fuzz/$name" -merge=1 -max_len=4096 "tests/fuzz/corpus/$name" "$fresh" \
      >"build/fuzz/$name.merge.log" 2>&1
  fi
}

failed=0
names=()
for source in tests/fuzz/*_fuzz.cc; do names+=("$(basename "$source" .cc)"); done
say "${#names[@]} fuzz targets, $seconds s each"
cores=$(nproc)
for ((i = 0; i < ${#names[@]}; i += cores)); do
  jobs=()
  for name in "${names[@]:i:cores}"; do
    if [[ -n $built ]]; then by_chance "$name" & else fuzz "$name" & fi
    jobs+=($!)
  done
  for job in "${jobs[@]}"; do wait "$job" || failed=1; done
done
exit "$failed"
