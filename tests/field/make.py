"""Hand-worked tensors and checkpoints, and a reader of files that shares nothing with the product."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from quantrules import Plan, parse
from quantrules.checkpoint import StateDictSource
from quantrules.testing import run

E2M1 = {0.0: 0, 0.5: 1, 1.0: 2, 1.5: 3, 2.0: 4, 3.0: 5, 4.0: 6, 6.0: 7}  # number -> code

# ------------------------------------------------------------------------------------------------------------ in memory


def f8(number: float, *shape: int) -> torch.Tensor:
    return torch.full(shape, float(number)).to(torch.float8_e4m3fn)


def e8m0(byte: int, *shape: int) -> torch.Tensor:
    """2^(byte - 127)"""
    return torch.full(shape, byte, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def f32(number: float, *shape: int) -> torch.Tensor:
    return torch.full(shape, float(number))


def pairs(q: float, *shape: int, dtype=torch.uint8) -> torch.Tensor:
    """Packed FP4 where every code is the number q."""
    return torch.full(shape, E2M1[q] * 0x11, dtype=dtype)


def nvfp4(path: str, q: float, s: float, g: float, n: int = 1, k: int = 16, act: float | None = None) -> dict:
    """ModelOpt's spelling, w = q · s · g."""
    acts = {} if act is None else {f"{path}.input_scale": f32(act)}
    codes, scale = {f"{path}.weight": pairs(q, n, k // 2)}, {f"{path}.weight_scale": f8(s, n, k // 16)}
    return codes | scale | {f"{path}.weight_scale_2": f32(g)} | acts


def nvfp4_ct(path: str, q: float, s: float, g: float, n: int = 1, k: int = 16) -> dict:
    """compressed-tensors' spelling, w = q · s / g."""
    codes, scale = f"{path}.weight_packed", f"{path}.weight_scale"
    return {codes: pairs(q, n, k // 2), scale: f8(s, n, k // 16), f"{path}.weight_global_scale": f32(g, 1)}


def mxfp4(path: str, byte: int, scale: int, n: int = 1, k: int = 32) -> dict:
    """DeepSeek-V4's experts: I8 codes (every byte alike), E8M0 scales."""
    codes = torch.full((n, k // 2), byte, dtype=torch.uint8).view(torch.int8)
    return {f"{path}.weight": codes, f"{path}.scale": e8m0(scale, n, -(-k // 32))}


def fp8(path: str, q: float, s: float, n: int = 128, k: int = 128) -> dict:
    """DeepSeek-V3's blocks, w = q · s."""
    return {f"{path}.weight": f8(q, n, k), f"{path}.weight_scale_inv": f32(s, -(-n // 128), -(-k // 128))}


def planned(rules: str, tensors: dict, config: dict | None = None, **params) -> Plan:
    return parse(rules, "t.rules").bind(StateDictSource(tensors, config), **params)


def made(rules: str, tensors: dict, config: dict | None = None, **params) -> dict[str, torch.Tensor]:
    """What rules make of tensors, by name, after the checks of a run."""
    return run(planned(rules, tensors, config, **params))


def decoded(tensors: dict) -> dict[str, torch.Tensor]:
    return {name: t.float() for name, t in made("* → unpack | dequant(f32)", tensors).items()}


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# -------------------------------------------------------------------------------------------------------------- on disk


def bf16(*numbers: float, shape: tuple[int, ...] | None = None):
    """A tensor for `save`: numbers that BF16 holds."""
    data = (np.array(numbers, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    assert (data.astype(np.uint32) << 16).view(np.float32).tolist() == list(numbers)
    return "BF16", shape or (len(numbers),), data.tobytes()


def full(dtype: str, byte: int | bytes, *shape: int, size: int = 1):
    """A tensor for `save` whose elements all have these bytes."""
    one = byte if isinstance(byte, bytes) else bytes([byte]) * size
    return dtype, shape, one * int(np.prod(shape))


def file(tensors: dict, metadata: dict | None = None, width: int | None = None) -> bytes:
    """A safetensors file of {name: (dtype, shape, bytes)}; `width` is the length of its header."""
    header, at = {} if metadata is None else {"__metadata__": metadata}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    text = text.ljust(width or len(text))
    return len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values())


def save(folder: Path, shards: dict[str, dict], config: dict | None = None, metadata: dict | None = None, index=False) -> Path:
    """A checkpoint of {file name: tensors}, with an index where it has several files."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, tensors in shards.items():
        (folder / name).write_bytes(file(tensors, metadata))
    if len(shards) > 1 or index:
        weight_map = {key: name for name, tensors in shards.items() for key in tensors}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config or {}))
    return folder


def header_of(path: Path) -> tuple[dict, int]:
    """(header, where data begins)"""
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + n]), 8 + n


def stored(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Every tensor that the index of a checkpoint lists, from the file it names."""
    found = {}
    for key, name in json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].items():
        header, begin = header_of(folder / name)
        a, b = header[key]["data_offsets"]
        found[key] = header[key]["dtype"], tuple(header[key]["shape"]), (folder / name).read_bytes()[begin + a : begin + b]
    return found


def numbers(tensor) -> list[float]:
    """The numbers of a BF16 or F32 tensor that `stored` gave."""
    dtype, _, data = tensor
    if dtype == "BF16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).tolist()
    return np.frombuffer(data, {"F32": np.float32, "U8": np.uint8}[dtype]).tolist()
