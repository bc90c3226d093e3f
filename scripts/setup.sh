# What demo.sh, test.sh and .ci/run share: packages, the search for a GPU, how many jobs. Sourced, never run.
# shellcheck shell=bash disable=SC2034

# Debian 12 and Ubuntu 24.04 call them alike.
kvtier_demo_packages=(g++ cmake ninja-build ccache pkg-config libtbb-dev libisal-dev libopenblas-dev
  libcli11-dev nlohmann-json3-dev)
# For all programs, tests and benchmarks, and the Python packages: nothing that starts a server.
kvtier_build_packages=("${kvtier_demo_packages[@]}" git libboost-dev libssl-dev libgrpc++-dev libprotobuf-dev prometheus-cpp-dev
  liburing-dev protobuf-compiler protobuf-compiler-grpc libgtest-dev libgmock-dev libbenchmark-dev libspdlog-dev
  libmemcached-dev libhiredis-dev libnghttp2-dev python3-venv)
# To run the tests, and check.sh. memcached and redis-server start when they are installed, and listen on this machine.
kvtier_test_packages=("${kvtier_build_packages[@]}" memcached redis-server clang-format-14 dpkg-dev)
# For the tests of the status page, of the rules for Prometheus and of completions, and for the API reference, which are
# skipped without: CI has them.
kvtier_ci_packages=(chromium prometheus doxygen zsh fish groff-base)
# Debian 12 has libFuzzer with clang; Ubuntu 24.04 too.
kvtier_fuzz_packages=(clang-14 libclang-rt-14-dev)

# The compiler cache takes paths relative to the checkout, so that one checkout's results serve another.
export CCACHE_BASEDIR=$PWD CCACHE_NOHASHDIR=1

say() { printf '\n== %s\n' "$*"; }

# copy_python DIR: the client's sources, to be built there, since building leaves files behind. Not those of an earlier
# build, which setuptools would install where they are newer.
copy_python() {
  cp -r python "$1"
  rm -rf "$1/python/build"
}

# need_packages PACKAGE...: installs with apt those that are missing. KVTIER_SKIP_SETUP=1 takes the machine as
# it is.
need_packages() {
  if [[ ${KVTIER_SKIP_SETUP:-0} == 1 ]]; then return; fi
  if ! command -v apt-get >/dev/null || ! command -v dpkg-query >/dev/null; then
    {
      echo "This machine has no apt. Install what Debian 12 calls"
      printf '    %s\n' "$*"
      echo "(g++ >= 12, CMake >= 3.25), then run again with KVTIER_SKIP_SETUP=1."
    } >&2
    exit 1
  fi
  local package missing=()
  for package in "$@"; do
    # shellcheck disable=SC2016  # a format of dpkg-query
    if [[ $(dpkg-query -W -f='${Status}' "$package" 2>/dev/null) != "install ok installed" ]]; then
      missing+=("$package")
    fi
  done
  if ((${#missing[@]} == 0)); then return; fi

  local as_root=()
  if ((EUID != 0)); then
    if ! command -v sudo >/dev/null; then
      echo "Missing packages, and neither root nor sudo: ${missing[*]}" >&2
      exit 1
    fi
    as_root=(sudo)
  fi
  say "installing with apt: ${missing[*]}"
  "${as_root[@]}" apt-get update -qq
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing[@]}" </dev/null
}

# find_nvcc: prints the path of an nvcc that can build kvtier (CUDA 13), or fails.
find_nvcc() {
  local nvcc
  nvcc=$(command -v nvcc || true)
  if [[ -z $nvcc && -x /usr/local/cuda/bin/nvcc ]]; then nvcc=/usr/local/cuda/bin/nvcc; fi
  [[ -n $nvcc ]] && "$nvcc" --version | grep -qE 'release (1[3-9]|[2-9][0-9])\.' && echo "$nvcc"
}

has_gpu() {
  [[ -e /dev/nvidiactl ]] || nvidia-smi -L >/dev/null 2>&1
}

# use_cuda: succeeds when a GPU can be used, CUDACXX then being set; otherwise says why not.
use_cuda() {
  if ! has_gpu; then
    echo "No NVIDIA GPU found: the CPU backend is used."
    return 1
  fi
  if ! nvidia-smi -L >/dev/null 2>&1; then
    echo "An NVIDIA GPU is there, but its driver does not answer (nvidia-smi): the CPU backend is used."
    return 1
  fi
  if ! CUDACXX=$(find_nvcc); then
    echo "An NVIDIA GPU is there, but no nvcc of CUDA 13 or later: the CPU backend is used."
    echo "Install the CUDA toolkit to use the GPU; this script does not."
    return 1
  fi
  export CUDACXX
  echo "Using $(nvidia-smi -L | head -n 1) with $CUDACXX."
}

# num_jobs: one per core, as long as each has 1.5 GiB.
num_jobs() {
  local cores memory_mb
  cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)  # which heeds them otherwise
  memory_mb=$(awk '/MemAvailable/ {print int($2 / 1024)}' /proc/meminfo)
  local by_memory=$((memory_mb / 1536))
  if ((by_memory < 1)); then by_memory=1; fi
  echo $((cores < by_memory ? cores : by_memory))
}

# cmake_options: prints, one a line, what this machine's compiler and cache ask for.
cmake_options() {
  if command -v ccache >/dev/null; then
    echo -DCMAKE_CXX_COMPILER_LAUNCHER=ccache
    echo -DCMAKE_CUDA_COMPILER_LAUNCHER=ccache
  fi
}

# strict_options: prints the same for those who change the tree. It is kept free of the warnings of g++ 12; other
# compilers have others.
strict_options() {
  cmake_options
  if [[ $(c++ -dumpversion) == 12* ]]; then echo -DKVTIER_WERROR=ON; fi
}
