"""stack: members of an axis as a new dimension."""

from __future__ import annotations

from itertools import islice, pairwise

from attrs import evolve

from quantrules.diagnostics import define
from quantrules.ops.base import Op, Param, Refused, register
from quantrules.ops.blocks import raw
from quantrules.ops.lift import DIMS, WRONG_DIMENSION, alike, append, gather, overlap, pick_axis, pick_dim, span_of
from quantrules.types import flat_rows

HOLE = define("QR209", "The members of a stack have a hole")


@register
class Stack(Op):
    name = "stack"
    summary = "members of an axis become a new dimension"
    help = """Removes an axis: E times f[N, K] → f[E, N, K], in numeric order of a capture, in the order of a list. Parts of
packed values are stacked alike: one global scale for each member. A capture must run without a hole from 0, or from the lower
bound of its range. The new dimension is the first unless given. Refused: members of different types, a hole, a packed value
along another dimension."""
    params = (Param("axis", "axis", help="the axis to remove"), Param("dim", "int", 0, "where the new dimension stands"))
    example = "*.experts.{E}.{w1,w3}.weight → cat | stack(E) → *.experts.gate_up_proj"

    def infer(self, x, args, context):
        at = pick_axis(x, args["axis"], "stack")
        axis = x.axes[at]
        low = context.lows.get(axis.name, 0)
        if all(isinstance(label, int) for label in axis.labels):
            runs = pairwise((low - 1, *sorted(axis.labels)))
            missing = list(islice((n for a, b in runs for n in range(a + 1, b)), 6))  # names are from strangers
            if missing or any(label < low for label in axis.labels):
                lost = ", ".join(map(str, missing[:5])) + (", …" if len(missing) > 5 else "")
                reason = f"{axis.name} has {len(axis.labels)} members up to {max(axis.labels)}; missing: {lost or 'none'}"
                raise Refused(HOLE, reason, f"it must run from {low} without a hole")

        def made(types, labels):
            first, n = types[0], len(types)
            alike(types, labels, None, spans=False)
            dim = _dim(args, first)
            parts = tuple(evolve(p, shape=(*p.shape[:dim], n, *p.shape[dim:])) for p in first.parts)
            kept = tuple(a for a in first.aligned if a != axis.name and all(a in t.aligned for t in types))
            return evolve(first, shape=(*first.shape[:dim], n, *first.shape[dim:]), parts=parts, aligned=kept)

        return gather(x, at, made)

    def rows(self, step, item, lo, hi):
        line = self._lines(step)[item]
        first = step.takes.items[line[0]]
        if _dim(step.args, first) != 0:
            return None
        wanted: list[tuple[int, int] | None] = [None] * len(step.takes.items)
        for i, a, b in overlap(_sizes(first, len(line)), lo, hi):
            wanted[line[i]] = (a, b) if len(first.shape) > 1 else (0, flat_rows(first.shape))
        return tuple(wanted)

    def reference(self, step, x, state, out):
        import torch

        for line, target in zip(self._lines(step), out, strict=True):
            if target is None:
                continue
            first = step.takes.items[line[0]]
            if (dim := _dim(step.args, first)) != 0:
                target.tensor().copy_(torch.stack([x[i].tensor() for i in line], dim))
                continue
            members = [x[line[i]] for i, _, _ in overlap(_sizes(first, len(line)), *span_of(target))]
            for p in target.type.parts:
                if len(first.shape) > 1:
                    append(raw(target, p.role), [raw(v, p.role) for v in members], DIMS["lead"])
                else:  # members of rank 0 and 1 are rows of the result
                    append(raw(target, p.role), [raw(v, p.role).reshape(1, 1, -1) for v in members], DIMS["rows"])

    def inverse(self, step):
        return (("unstack", {"axis": step.args["axis"], "dim": _dim(step.args, step.takes.items[0])}),)

    @staticmethod
    def _lines(step):
        return step.takes.lines(pick_axis(step.takes, step.args["axis"], "stack"))


def _dim(args, member) -> int:
    dim = pick_dim(args.get("dim") or 0, member, "stack", len(member.shape) + 1)
    if dim and not member.is_dense:
        reason = f"{member} is packed; the new dimension must be the first"
        raise Refused(WRONG_DIMENSION, reason, "`dequant` first", argument="dim")
    return dim


def _sizes(member, n: int) -> list[int]:
    """Flat rows of the result that each member makes."""
    return [flat_rows(member.shape) if len(member.shape) > 1 else 1] * n
