"""What the references of packed values share: parts seen as [outer, rows, columns], and the factor that codes are multiplied by.

A factor is a pair: f32 [outer, rows or 1, columns / step or 1], and the number of columns that one of its entries covers
(0: all). It is folded at block granularity, which gives the same bits as folding full tensors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from quantrules.diagnostics import define
from quantrules.ops.base import Op, Refused, Value
from quantrules.ops.codecs import codec_of, decode_codes, decode_numbers
from quantrules.ops.torch_views import flat
from quantrules.types import Type, rows_of

NOT_FINITE = define("QR213", "A number is NaN or infinite")

Factor = tuple[Any, int]


def cube(value: Value, role: str = "codes"):
    """A part as a view [outer, rows, columns]. What covers all rows has one row, or one for each span."""
    x, spec, shape = value.tensor(role), value.type.spelling.part(role), value.type.shape
    outer, n, _ = rows_of(shape)
    rest = x.shape[max(0, len(shape) - 2) :]
    if spec.grid is None:
        return x.reshape(outer, n, x.shape[-1] if len(shape) > 1 else 1)  # of f4 in bytes
    if spec.grid and spec.grid[0].letter == "N" or value.type.spans and spec.cat == "collect":
        return x.reshape(outer, rest[0], math.prod(rest[1:]))
    return x.reshape(outer, 1, math.prod(rest))


def _operand(value: Value, role: str) -> Factor:
    import torch

    t, spec = value.type, value.type.spelling.part(role)
    x = decode_numbers(cube(value, role), codec_of(t.format, role, t.part(role).dtype))
    by = {g.letter: g.divisor for g in spec.grid or ()}
    if "N" in by:
        rows = torch.arange(value.phase, value.phase + rows_of(t.shape)[1], device=x.device) // by["N"]
        x = x.index_select(1, rows - value.phase // by["N"])
    elif t.spans and spec.cat == "collect":
        x = x.repeat_interleave(torch.tensor(t.spans, device=x.device), 1)
    return x, by.get("K", 0)


def spread(factor: Factor, columns: int):
    """A factor over all columns (or one for all)."""
    x, step = factor
    return x if step in (0, 1) else x.repeat_interleave(step, -1)[..., :columns]


def product(value: Value, tree: object, codes: Factor) -> Factor:
    """The format's product, in its order; parts that are stored inverted divide. `codes` stands for the role of this name."""
    if isinstance(tree, str):
        return codes if tree == "codes" else _operand(value, tree)
    columns = value.type.shape[-1]
    total = None
    for branch in tree:
        (x, step), spec = product(value, branch, codes), value.type.spelling.part(branch) if isinstance(branch, str) else None
        if total is None:
            total = (1 / x if spec is not None and spec.inverse else x), step
            continue
        y, at = total
        if step != at and step and at:
            x, y, step, at = spread((x, step), columns), spread((y, at), columns), 1, 1
        total = (y / x if spec is not None and spec.inverse else y * x), step or at
    return total


def factor(value: Value) -> Factor:
    """What a code of 1 is worth."""
    import torch

    return product(value, value.type.format.value, (torch.ones(1, 1, 1), 0))


def decoded(value: Value):
    """f32 [outer, rows, columns] of a value, dense or packed."""
    import torch

    t = value.type
    if t.is_dense:
        return cube(value).float()
    if not math.prod(t.shape):  # 10^12 rows of nothing are no bytes, and would be 10^12 factors
        return torch.empty(rows_of(t.shape))
    codes = decode_codes(cube(value), t.format.element, t.shape[-1])
    x, step = product(value, t.format.value, (codes, 1))
    return spread((x, step), t.shape[-1])


def slices(value: Value, n: int) -> slice:
    """Which outer slices of a whole of n rows each this tile lies in."""
    first = value.start // n if n else 0
    return slice(first, first + max(1, rows_of(value.type.shape)[0]))


def place(value: Value, whole: Type, bad) -> str:
    """Name and index, within the value of type `whole`, of the first True of bad [outer, rows, columns] of a tile."""
    outer, row, column = (int(i) for i in bad.nonzero()[0])
    at = value.start + outer * rows_of(value.type.shape)[1] + row
    index = np.unravel_index(at * bad.shape[-1] + column, whole.shape) if whole.shape else ()
    return f"{value.name or 'value'}[{', '.join(map(str, index))}]"


def require_finite(value: Value, whole: Type, x) -> None:
    """Refuse f32 x [outer, rows, columns] of a tile of `whole` that holds NaN or an infinity, with the key and the index."""
    import torch

    bad = ~torch.isfinite(x)
    if bad.any():
        number = float(x[tuple(bad.nonzero()[0])])
        reason = f"{place(value, whole, bad)} is {number}"
        raise Refused(NOT_FINITE, reason, "`keep`, `cast` and `dequant` pass such a number on; nothing else does")


def raw(value: Value, role: str):
    """`cube` in bytes, for ops that move parts and compute nothing."""
    import torch

    return cube(value, role).view(torch.uint8)


def copy(source: Value, target: Value) -> None:
    """All parts, byte for byte."""
    for p in target.type.parts:
        flat(target.parts[p.role]).copy_(flat(source.parts[p.role]))


class Unchanged(Op):
    """An op after which every byte is as it was: it changes names at most."""

    def identity(self, step):
        return True

    def reference(self, step, x, state, out):
        for source, target in zip(x, out, strict=True):
            if target is not None:
                copy(source, target)
