"""split: a value into the members of a new axis."""

from __future__ import annotations

from collections.abc import Sequence

from quantrules.ops.base import Context, Op, Param, Refused, Step, Value, register
from quantrules.ops.blocks import raw
from quantrules.ops.lift import DIMS, WRONG_SIZES, parted, pick_dim, rule, scatter, way
from quantrules.types import Axis, Dim, Grid, Type, ceil_div, div, divisible, flat_rows, rows_of, span_range


@register
class Split(Op):
    name = "split"
    summary = "parts a value along a dimension"
    help = """Adds an axis: f[N1+N2, K] → f[N1, K], f[N2, K], the inverse of `cat`. The members are those of the target's
braces, or names given with sizes (`split(1, nope=128, pe=64)`) for an axis that a later `cat` removes. Sizes are equal unless
given. The dimension is 0 unless given, and must be given from rank 3 on. Packed values are parted part by part; of several
global scales each piece keeps its own, and a single one is copied to all. Refused: sizes that do not add up, pieces that
begin inside a block, pieces that cut the rows of one of several global scales."""
    params = (
        Param("dim", "int", None, "the dimension to part"),
        Param("sizes", "sizes", None, "a list, or name=size for each member; equal unless given"),
    )
    example = "*.mlp.gate_up_proj → unpack | split → *.mlp.{gate_proj,up_proj}"

    def infer(self, x, args, context):
        axis = _axis(x, args.get("sizes"), context)

        def pieces(t: Type):
            dim = pick_dim(args.get("dim"), t, "split")
            return parted(t, axis, dim, _sizes(t, dim, axis, args.get("sizes")))

        return scatter(x, axis, pieces)

    def rows(self, step, item, lo, hi):
        source, pieces, dim, k = _pieces(step, item)
        how, before = way(source.shape, dim), sum(p.shape[dim] for p in pieces[:k])
        if how == "inner":
            return None
        if how == "rows":
            n, size = source.shape[dim], pieces[k].shape[dim]
            first = lo // size if size else 0
            inside = hi <= (first + 1) * size
            lo, hi = (first * n + before + at - first * size if inside else at // size * n for at in (lo, hi))
        elif how == "lead":
            before = sum(flat_rows(p.shape) for p in pieces[:k])
            lo, hi = lo + before, hi + before
        return tuple((lo, hi) if i == item // len(pieces) else None for i in range(len(step.takes.items)))

    def reference(self, step, x, state, out):
        for item, target in enumerate(out):
            if target is None:
                continue
            source, pieces, dim, k = _pieces(step, item)
            value, how = x[item // len(pieces)], way(source.shape, dim)
            before, size = sum(p.shape[dim] for p in pieces[:k]), pieces[k].shape[dim]
            ahead = sum(flat_rows(p.shape) for p in pieces[:k]) + target.start - value.start  # flat rows, for "lead"
            for p in target.type.parts:
                if how == "inner":
                    target.tensor(p.role).copy_(value.tensor(p.role).narrow(dim, before, size))
                    continue
                made, given = raw(target, p.role), raw(value, p.role)
                start = ahead // max(1, rows_of(source.shape)[1])
                start = start if how == "lead" else _start(source, value, target, p.role, how, before, size)
                made.copy_(given if start is None else given.narrow(DIMS[how], start, made.shape[DIMS[how]]))

    def inverse(self, step):
        return (("cat", {"axis": step.made.axes[-1].name or None, "dim": _pieces(step, 0)[2]}),)


def _start(source: Type, value: Value, target: Value, role: str, how: str, before: int, size: int) -> int | None:
    """Where the piece begins along its dimension in the part that was given of the source; None: all of it is taken."""
    spec = source.spelling.part(role)
    kind = rule(spec, how, shared=not source.spans)
    if kind not in ("follow", "collect"):
        return None
    by = {g.letter: g.divisor for g in spec.grid or ()}
    if how == "columns":
        step = by.get("K", 1)
        return before // step * raw(value, role).shape[2] // max(1, ceil_div(source.shape[-1], step))  # f4: less than a byte each
    given = value.start % max(1, rows_of(source.shape)[1])
    wanted = before + (target.start % size if size else 0)
    if kind == "collect":
        return span_range(source, wanted, wanted + 1)[0] - span_range(source, given, given + 1)[0]
    return wanted // by.get("N", 1) - given // by.get("N", 1)


def _pieces(step: Step, item: int) -> tuple[Type, Sequence[Type], int, int]:
    """(the source's type, the types of all its pieces, the dimension, which piece `item` is)"""
    count = len(step.made.axes[-1].labels)
    source = step.takes.items[item // count]
    return source, step.made.items[item // count * count :][:count], pick_dim(step.args.get("dim"), source, "split"), item % count


def _axis(grid: Grid[Type], sizes, context: Context) -> Axis:
    """The axis that a split adds: the first of the target's that the unit does not have yet and that fits the sizes."""
    taken = [a.name for a in grid.axes]
    missing = [a for a in context.target_axes if a.labels and a not in grid.axes and a.name not in taken]
    lists = [a for a in missing if all(isinstance(label, str) for label in a.labels)] or missing
    if isinstance(sizes, dict):
        return next((a for a in lists if set(a.labels) == set(sizes)), Axis("", tuple(sizes)))
    if lists:
        return lists[0]
    if sizes is None:
        reason = "the target has no braces that this split could make"
        raise Refused(WRONG_SIZES, reason, "write the members in the target, `{a,b}`, or sizes")
    return Axis("", tuple(range(len(sizes))))


def _sizes(type: Type, dim: int, axis: Axis, sizes) -> tuple[Dim, ...]:
    whole, n, noun = type.shape[dim], len(axis.labels), f"dimension {dim} of {type}"
    if sizes is None:
        if not divisible(whole, n):
            raise Refused(WRONG_SIZES, f"{noun} is {whole}, which is not {n} equal parts", "give the sizes", label=f"{n} members")
        return (div(whole, n),) * n
    sizes = tuple(sizes[label] for label in axis.labels) if isinstance(sizes, dict) else tuple(sizes)
    if len(sizes) != n:
        raise Refused(WRONG_SIZES, f"{len(sizes)} sizes for the {n} members {', '.join(map(str, axis.labels))}", argument="sizes")
    if wrong := [s for s in sizes if not isinstance(s, Dim) or isinstance(s, bool) or isinstance(s, int) and s < 0]:
        raise Refused(WRONG_SIZES, f"a size is a whole number that is not negative, and not {wrong[0]!r}", argument="sizes")
    if sum(sizes[1:], sizes[0]) != whole:
        reason = f"{' + '.join(map(str, sizes))} is {sum(sizes[1:], sizes[0])}; {noun} is {whole}"
        raise Refused(WRONG_SIZES, reason, argument="sizes")
    return sizes
