"""Kernels for CPUs, in numba: the same bits as the references of the ops. Import this file only where one is run.

A packed 4-bit value has 16 codes and 256 scale bytes, so all products of one global scale are a table of 4096 numbers.
numpy makes it, rounded as the reference rounds, and the loop only looks up: there is no arithmetic left to differ in.
Kernels run on one core and release the GIL; whoever has several tiles runs them on threads.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np

from quantrules.ops.base import Step, Value
from quantrules.ops.codecs import codec_of, table
from quantrules.types import Type, rows_of

ORDERS = ("codes", "scale"), ("codes", ("scale", "global"))  # products that the table holds, without and with a global


def _jit(function):
    """Compiled on first use and kept on disk, where there is a place to keep it."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # neither the package nor the home directory can be written
        return numba.njit(nogil=True)(function)


@_jit
def _look_up(codes, scales, pairs, half, out):
    full = codes.shape[1] // half
    for r in range(codes.shape[0]):
        row, made = codes[r], out[r]
        for b in range(full):
            words = pairs[scales[r, b]]
            for c in range(half):
                made[b * half + c] = words[row[b * half + c]]
        for c in range(full * half, codes.shape[1]):
            made[c] = pairs[scales[r, full], row[c]]


def to_bf16(x: np.ndarray) -> np.ndarray:
    """u16 bits of f32 rounded half to even to bf16; every NaN is the positive quiet one."""
    bits = x.view(np.uint32)
    return np.where(np.isnan(x), 0x7FC0, bits + 0x7FFF + (bits >> 16 & 1) >> 16).astype(np.uint16)


def decode_fp4_bf16(codes: np.ndarray, scales: np.ndarray, scale_table: np.ndarray, factor: np.ndarray, divide: bool,
                    out: np.ndarray, group: int | None = None) -> None:  # fmt: skip
    """out[r, k] = bf16(e2m1(codes)[r, k] · (scale_table[scales[r, k // group]] · or / factor[r])), low nibble first.

    codes u8[rows, K/2], scales u8[rows, ⌈K/group⌉], scale_table f32[256], factor f32[1] or f32[rows], out u16[rows, K].
    group is K / columns of `scales` unless given. Each run of rows with one factor costs a table of 65536 pairs.
    """
    group = group or 2 * codes.shape[1] // max(1, scales.shape[1])
    bits = factor.view(np.uint32)
    starts = [0, *(np.flatnonzero(bits[1:] != bits[:-1]) + 1).tolist()]
    low, high = np.arange(256) & 15, np.arange(256) >> 4
    for lo, hi in zip(starts, [*starts[1:], len(codes)], strict=True):
        with np.errstate(all="ignore"):
            worth = scale_table / factor[lo] if divide else scale_table * factor[lo]
            products = to_bf16(worth[:, None] * table("e2m1")).astype(np.uint32)
        pairs = products[:, low] | products[:, high] << 16
        _look_up(codes[lo:hi], scales[lo:hi], pairs, group // 2, out[lo:hi].view(np.uint32))


def decodes(step: Step) -> bool:
    """Whether `decode` runs this step: packed e2m1 in groups along the columns, with one-byte scales, to bf16."""
    return step.op.name == "dequant" and all(
        _fits(t) and m.dtype == "bf16" for t, m in zip(step.takes.items, step.made.items, strict=True)
    )


def _fits(t: Type) -> bool:
    element, scale, shared = t.format.element, t.part("scale"), t.part("global")
    if element is None or (element.codec, element.per, element.low_first) != ("e2m1", 2, True) or scale is None:
        return False
    spec, group = t.spelling.part("scale"), t.format.block[1]
    along = [(g.letter, g.divisor) for g in spec.grid or ()] == [("N", 1), ("K", group)] and group % 2 == 0 and not spec.inverse
    known = codec_of(t.format, "scale", scale.dtype) in ("f8_e4m3", "f8_e8m0") and (shared is None or shared.dtype == "f32")
    return along and known and t.format.value == ORDERS[shared is not None] and not t.layout


def decode(step: Step, x: tuple[Value | None, ...], state: Any, out: tuple[Value | None, ...]) -> None:
    """The reference of dequant on the types that `decodes` takes."""
    for source, target in zip(x, out, strict=True):
        if target is None:
            continue
        t, (outer, n, k) = source.type, rows_of(source.type.shape)
        rows, group, spec = outer * n, t.format.block[1], t.spelling.part("global")
        if rows and k:
            factor = np.ones(1, np.float32)
            if spec is not None:
                factor = source.parts["global"].view(np.float32).reshape(outer, -1).repeat(t.spans or n, axis=1).reshape(-1)
            codes, made = source.parts["codes"].reshape(rows, k // 2), target.parts["codes"].view(np.uint16).reshape(rows, k)
            scales, worth = source.parts["scale"].reshape(rows, -1), table(codec_of(t.format, "scale", t.part("scale").dtype))
            decode_fp4_bf16(codes, scales, worth, factor, spec is not None and spec.inverse, made, group)
