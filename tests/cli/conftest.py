"""Tiny checkpoints, written byte by byte, and the command line in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from quantrules.cli import app


def write(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], np.ndarray]], config: dict) -> Path:
    """A checkpoint of one file: name -> (dtype, shape, bytes)."""
    header, data = {}, b""
    for name, (dtype, shape, values) in tensors.items():
        raw = values.tobytes()
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (path / "config.json").write_text(json.dumps(config))
    return path


def bf16(*shape: int):
    return "BF16", shape, np.full(shape, 0x3F80, np.uint16)  # ones


def nvfp4(path: str, n: int, k: int, scale: float = 0.5) -> dict:
    """A module in ModelOpt's spelling: every code is 1.0, every block scale 1.0, so every weight is `scale`."""
    return {
        f"{path}.weight": ("U8", (n, k // 2), np.full((n, k // 2), 0x22, np.uint8)),
        f"{path}.weight_scale": ("F8_E4M3", (n, k // 16), np.full((n, k // 16), 0x38, np.uint8)),
        f"{path}.weight_scale_2": ("F32", (), np.float32(scale)),
    }


MODELOPT = {"hidden_size": 32, "quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}}


@pytest.fixture
def quantised(tmp_path) -> Path:
    """Two layers with an NVFP4 projection and a norm each, and a dense head."""
    tensors = {"lm_head.weight": bf16(8, 32)}
    for layer in range(2):
        tensors |= nvfp4(f"model.layers.{layer}.q_proj", 16, 32) | {f"model.layers.{layer}.norm.weight": bf16(32)}
    return write(tmp_path / "quantised", tensors, MODELOPT)


@pytest.fixture
def dense(tmp_path) -> Path:
    return write(
        tmp_path / "dense",
        {"a.q_proj.weight": bf16(16, 32), "a.k_proj.weight": bf16(16, 32), "norm.weight": bf16(32)},
        {"hidden_size": 32},
    )


@pytest.fixture
def rules(tmp_path) -> Callable[[str], str]:
    """rules("* → keep") is the path of a file with that text."""

    def make(text: str) -> str:
        path = tmp_path / "my.rules"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return make


@pytest.fixture
def run():
    """run("plan", RULES, SRC) -> result with .exit_code, .stdout, .stderr; a traceback fails the test."""

    def call(*args):
        result = CliRunner().invoke(app, [str(a) for a in args], prog_name="quantrules")
        if result.exception and not isinstance(result.exception, SystemExit):
            raise result.exception
        return result

    return call
