#!/usr/bin/env bash
# Builds programs, installing with apt what is missing: in build/cuda on a machine with a usable GPU, for that GPU, and in
# build/release elsewhere; build/current leads to the folder. Needs Debian 12 or Ubuntu 24.04, git and a shell.
#
#   scripts/build.sh [TARGET...]        default: kvtier_cli kvtier_llama
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup.sh
source scripts/setup.sh

targets=("$@")
if ((${#targets[@]} == 0)); then targets=(kvtier_cli kvtier_llama); fi

need_packages "${kvtier_build_packages[@]}"
mapfile -t options < <(cmake_options)
preset=release
if use_cuda; then
  preset=cuda
  options+=(-DCMAKE_CUDA_ARCHITECTURES=native)  # one architecture, to build sooner
fi

say "building ${targets[*]} in build/$preset"
cmake --preset "$preset" -DKVTIER_UNITY=ON "${options[@]}"
cmake --build "build/$preset" --parallel "$(num_jobs)" --target "${targets[@]}"
ln -sfnT "$preset" build/current
