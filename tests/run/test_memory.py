"""Memory is the budget and not the checkpoint: several GB pass under a limit on the process's data segment.

RLIMIT_DATA counts every private writable page that a process may touch: imports, thread stacks, buffers, what the
allocator keeps. The sources are sparse files, made on the spot.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quantrules.types import nbytes

ROOT = Path(__file__).parent.parent.parent
SCRIPT = """
import resource, sys
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
import numba, torch  # so that they count, whether a step needs them or not
from quantrules import api
from quantrules.run.local import execute
plan = api.parse(sys.argv[2]).bind(sys.argv[3])
execute(plan, plan.source, sys.argv[4], memory=int(sys.argv[5]), jobs=2)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


def sparse(folder: Path, tensors: dict[str, tuple[str, tuple[int, ...]]], config: dict) -> Path:
    """A checkpoint of zeros that takes no room on the disk."""
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = at + nbytes(dtype, shape)
        header[name] = {"dtype": dtype.upper(), "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    folder.mkdir()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def nvfp4(name: str, n: int, k: int) -> dict:
    codes, scale, shared = ("u8", (n, k // 2)), ("f8_e4m3", (n, k // 16)), ("f32", ())
    return {f"{name}.weight": codes, f"{name}.weight_scale": scale, f"{name}.weight_scale_2": shared}


def fp8_block(name: str, n: int, k: int) -> dict:
    return {f"{name}.weight": ("f8_e4m3", (n, k)), f"{name}.weight_scale_inv": ("f32", (-(-n // 128), -(-k // 128)))}


MODELOPT = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}}
CASES = {
    "a stack of 4 GB, decoded by a kernel": (
        {k: v for e in range(64) for k, v in nvfp4(f"experts.{e}.up", 4096, 8192).items()}, MODELOPT,
        "experts.{E}.up → unpack | dequant | stack(E) → experts.up\nconfig.quantization_config = null", 4 << 30),
    "a stack of 1 GB, decoded by a reference": (
        {k: v for e in range(32) for k, v in fp8_block(f"experts.{e}.up", 2048, 8192).items()}, FP8,
        "experts.{E}.up → unpack | dequant | stack(E) → experts.up\nconfig.quantization_config = null", 1 << 30),
    "a matrix of 1 GB, quantised with a survey": (
        {"a.weight": ("bf16", (65536, 8192)), "b.weight": ("bf16", (1024, 8192))}, {},
        "*.weight → quant(nvfp4) → *", (1024 + 65536) * 4096),
    "members of 512 MB, joined": (
        {f"{m}.weight": ("bf16", (32768, 8192)) for m in ("gate", "up")}, {}, "{gate,up}.weight → cat → gate_up.weight", 1 << 30),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_memory_holds(name, tmp_path):
    tensors, config, rules, least = CASES[name]
    source, budget = sparse(tmp_path / "source", tensors, config), 256 << 20
    arguments = [str((1 << 30) + budget), rules, str(source), str(tmp_path / "out"), str(budget)]
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "2", "OMP_NUM_THREADS": "2"}  # their buffers are per core of the machine
    done = subprocess.run([sys.executable, "-c", SCRIPT, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    print(name, done.stdout)
    assert sum(p.stat().st_size for p in (tmp_path / "out").glob("*.safetensors")) > least
    for path in (tmp_path / "out").iterdir():
        path.unlink()  # pytest keeps the folders of its last runs


@pytest.mark.slow
def test_the_limit_is_one(tmp_path):
    """Shown to fail: the same conversion with a budget that the limit has no room for."""
    source = sparse(tmp_path / "source", {"a.weight": ("bf16", (65536, 8192))}, {})
    arguments = [str(1 << 30), "* → cast(f32)", str(source), str(tmp_path / "out"), str(64 << 30)]
    larger = "import quantrules.lower.tiles as t; t.TILE = t.HELD = 1 << 40\n"
    script = SCRIPT.replace("from quantrules.run", larger + "from quantrules.run")
    done = subprocess.run([sys.executable, "-c", script, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "memory" in done.stderr.lower()
    assert not (tmp_path / "out").exists()
