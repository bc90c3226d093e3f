#!/usr/bin/env bash
# Packs programs of a build into one folder that runs on another Linux machine (x86-64) which has a C library
# at least as new as this one's and, for the GPU, an NVIDIA driver. Nothing else is needed there: the CUDA
# runtime is linked statically, the other shared libraries are in the folder.
#
#   scripts/bundle.sh [--limit MIB] BUILD_DIR OUTPUT_DIR [BINARY...]
#
# BINARY is a path, or one relative to BUILD_DIR. Without any: BUILD_DIR/tests/gpu_tests (every kernel suite in one
# program), kvtier-llama and the benchmarks, as far as they are built and have code for a GPU. Above the limit
# (default 18 MiB) nothing is written and the sizes are listed; the preset `cuda` compresses GPU code, which makes
# it seven times smaller. OUTPUT_DIR must not exist, or be an earlier bundle, which is replaced.
#
#   OUTPUT_DIR/run.sh BINARY [ARGUMENT...]      runs a program there, from any directory
set -euo pipefail

fail() {
  echo "bundle.sh: $*" >&2
  exit 1
}

usage() {
  sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"
}

is_program() {  # an ELF file with an interpreter, so neither a script nor a shared library
  readelf --program-headers "$1" 2>/dev/null | grep -q 'Requesting program interpreter'
}

has_gpu_code() {
  readelf --sections --wide "$1" | grep -q '\.nv_fatbin'
}

# default_binaries BUILD_DIR: what is built of the default list.
default_binaries() {
  local folder file
  for folder in tests examples benchmarks; do
    [[ -d $1/$folder ]] || continue
    while IFS= read -r -d '' file; do
      case $folder in
        # gpu_tests holds every kernel suite; the suites one by one would carry the kernels many times.
        tests) [[ ${file##*/} == gpu_tests || ! -e $1/tests/gpu_tests ]] || continue ;;
        examples) [[ ${file##*/} == kvtier-llama ]] || continue ;;
      esac
      if is_program "$file" && has_gpu_code "$file"; then printf '%s\n' "$file"; fi
    done < <(find "$1/$folder" -type f -perm -u+x -not -path '*/CMakeFiles/*' -print0 | sort -z)
  done
}

# needed_libraries FILE...: paths of the shared libraries that travel along. Parts of the C library and the
# driver belong to the machine that runs the programs.
needed_libraries() {
  local listing
  listing=$(for file in "$@"; do ldd "$file"; done)
  if grep 'not found' <<<"$listing" | grep -v '^[[:space:]]*libcuda\.so' >&2; then
    fail "a shared library was not found here"
  fi
  awk '$2 == "=>" && $3 ~ /^\// { print $1, $3 }' <<<"$listing" | sort -u |
    grep -vE '^(ld-linux.*|lib(c|m|pthread|dl|rt|resolv|util|anl|nsl|cuda|nvidia-.*)\.so[^ ]*) ' |
    cut -d ' ' -f 2
}

# newest_glibc FILE...: the newest version of the C library that any of them refers to.
newest_glibc() {
  for file in "$@"; do readelf --version-info --wide "$file"; done |
    grep -oE 'GLIBC_[0-9]+(\.[0-9]+)+' | cut -d _ -f 2 | sort -uV | tail -n 1
}

write_run_script() {
  cat >"$1" <<'RUN'
#!/usr/bin/env bash
# Runs a program of this folder with the libraries beside it: run.sh BINARY [ARGUMENT...]
set -euo pipefail
here=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd)
if (($# == 0)) || [[ ! -x $here/bin/${1##*/} ]]; then
  echo "usage: run.sh BINARY [ARGUMENT...], with BINARY one of:" >&2
  ls "$here/bin" >&2
  exit 2
fi
program=$here/bin/${1##*/}
shift
export LD_LIBRARY_PATH=$here/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
exec "$program" "$@"
RUN
  chmod +x "$1"
}

limit_mib=18
if [[ ${1:-} == --help || ${1:-} == -h ]]; then
  usage
  exit 0
fi
if [[ ${1:-} == --limit ]]; then
  limit_mib=${2:?--limit needs a number of MiB}
  shift 2
fi
if (($# < 2)); then
  usage >&2
  exit 2
fi
build=$1
output=$2
shift 2
[[ -d $build ]] || fail "no such build directory: $build"
if [[ -e $output && ! -e $output/run.sh ]]; then fail "$output exists and is not a bundle"; fi

binaries=()
if (($# == 0)); then
  mapfile -t binaries < <(default_binaries "$build")
  ((${#binaries[@]} > 0)) || fail "nothing with code for a GPU is built in $build"
fi
for name in "$@"; do
  if [[ $name != /* && -f $build/$name ]]; then name=$build/$name; fi
  [[ -f $name ]] || fail "no such program: $name"
  is_program "$name" || fail "not a program: $name"
  binaries+=("$name")
done
twice=$(printf '%s\n' "${binaries[@]##*/}" | sort | uniq -d)
[[ -z $twice ]] || fail "two programs have the same name: $twice"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$work/bin" "$work/lib"
for binary in "${binaries[@]}"; do strip -o "$work/bin/${binary##*/}" "$binary"; done
mapfile -t libraries < <(needed_libraries "${binaries[@]}")
for library in "${libraries[@]}"; do
  # Under the name that programs ask for, which is often a link to another.
  strip --strip-unneeded -o "$work/lib/${library##*/}" "$(readlink -f "$library")"
done
write_run_script "$work/run.sh"

bytes=$(find "$work" -type f -printf '%s\n' | awk '{ sum += $1 } END { print sum }')
if ((bytes > limit_mib * 1024 * 1024)); then
  find "$work" -type f -printf '%s %P\n' | sort -rn |
    awk '{ printf "%8.2f MiB  %s\n", $1 / 1048576, $2 }' >&2
  fail "$(awk -v b="$bytes" 'BEGIN { printf "%.2f", b / 1048576 }') MiB, above the limit of $limit_mib MiB;" \
    "name fewer programs"
fi

rm -rf "$output"
mkdir -p "$output"
cp -a "$work/." "$output"
printf '%s: %d programs, %d libraries, %.2f MiB; needs glibc %s or newer\n' "$output" "${#binaries[@]}" \
  "${#libraries[@]}" "$(awk -v b="$bytes" 'BEGIN { print b / 1048576 }')" \
  "$(newest_glibc "$work"/bin/* "$work"/lib/*)"
