#!/usr/bin/env bash
# Builds kvtier-llama and shows what sparse attention does to a small model that really retrieves: a table of
# accuracy over sparsity, sparse against dense. Needs Debian 12 or Ubuntu 24.04, git and a shell.
#
#   scripts/demo.sh [options of `kvtier-llama eval`]
#
# An option given replaces the demo's own, for example: scripts/demo.sh --cases n32768.d100 --sparsity 20,100
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup.sh
source scripts/setup.sh

need_packages "${kvtier_demo_packages[@]}"

cuda=OFF
architectures=()
if use_cuda; then
  cuda=ON
  architectures=(-DCMAKE_CUDA_ARCHITECTURES=native)  # one architecture, to build sooner
fi

say "building kvtier-llama"
mapfile -t options < <(cmake_options)
cmake -S . -B build/demo -G Ninja -DCMAKE_BUILD_TYPE=Release -DKVTIER_CUDA=$cuda "${architectures[@]}" -DKVTIER_BUILD_TESTS=OFF \
  -DKVTIER_BUILD_SERVICES=OFF -DKVTIER_BUILD_EXAMPLES=ON -DKVTIER_INSTALL=OFF "${options[@]}"
cmake --build build/demo --target kvtier_llama --parallel "$(num_jobs)"
program=$(find build/demo -type f -name kvtier-llama -perm -u+x -print -quit)

defaults=(
  --model data/needle-llama/model
  --tasks data/needle-llama/tasks/dev.safetensors
  --cases n8192.d100
  --sequences 1
  --preset "default,socket"
  --sparsity "0,10,33,100"
)
method_options='^--(estimator|value-weighting|selection|rule|code|bits|query-bits|error-target|coarse-bits|planes-per-table|tables|tau|plane-kind)'
arguments=()
for ((i = 0; i < ${#defaults[@]}; i += 2)); do
  given=0
  for argument in "$@"; do
    if [[ $argument == "${defaults[i]}" || $argument == "${defaults[i]}="* ]]; then given=1; fi
    # What is said of a method replaces the presets.
    if [[ ${defaults[i]} == --preset && $argument =~ $method_options ]]; then given=1; fi
  done
  if ((!given)); then arguments+=("${defaults[i]}" "${defaults[i + 1]}"); fi
done

say "$program eval ${arguments[*]} $*"
exec "$program" eval "${arguments[@]}" "$@"
