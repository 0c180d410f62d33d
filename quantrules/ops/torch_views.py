"""Torch views of flat byte buffers: no copy, no numeric conversion (formats.md 0.1: never move bytes with a numeric copy)."""

from __future__ import annotations

from functools import cache

import numpy as np

from quantrules.types import DTYPE_BITS, PartType


@cache
def torch_dtype(dtype: str):
    """The torch dtype of a safetensors one; f4 and f6 have none that computes and are seen as bytes."""
    import torch

    named = {"bool": "bool", "bf16": "bfloat16", "c64": "complex64", "f8_e4m3": "float8_e4m3fn", "f8_e8m0": "float8_e8m0fnu"}
    kinds = {"f": "float", "u": "uint", "i": "int"}  # f32, u8, f8_e5m2 …
    if DTYPE_BITS[dtype] < 8:
        return torch.uint8
    return getattr(torch, named.get(dtype) or kinds[dtype[0]] + dtype[1:])


def flat(buffer):
    """A flat u8 buffer (numpy, or a tensor already) as a tensor of bytes."""
    import torch

    if isinstance(buffer, np.ndarray):
        return torch.from_numpy(buffer) if len(buffer) else torch.empty(0, dtype=torch.uint8)  # numpy's has stride 0
    return buffer


def view(buffer, type: PartType):
    """A flat u8 buffer as a tensor of the part's dtype and shape; f4 and f6 as bytes, their last dimension in bytes."""
    bits, shape = DTYPE_BITS[type.dtype], tuple(type.shape)
    if bits < 8:
        shape = (*shape[:-1], shape[-1] * bits // 8)
    return flat(buffer).view(torch_dtype(type.dtype)).reshape(shape)
