"""unstack: a dimension as the members of a new axis."""

from __future__ import annotations

from attrs import evolve

from quantrules.ops.base import Context, Op, Param, Refused, Step, register
from quantrules.ops.blocks import raw
from quantrules.ops.lift import WRONG_AXIS, WRONG_DIMENSION, WRONG_SIZES, pick_dim, scatter
from quantrules.types import Axis, Grid, Type, flat_rows

MOST = 1_000_000  # members of an axis; an empty tensor may have a dimension of any size


@register
class Unstack(Op):
    name = "unstack"
    summary = "a dimension becomes the members of a new axis"
    help = """Adds the axis `{E}` of the target: f[E, N, K] → E times f[N, K], the inverse of `stack`. The dimension is the
first unless given. Parts of packed values are taken apart alike, each member with its own global scale. Refused: a list in
the target with another number of members than the dimension has, and a packed value along its rows or columns."""
    params = (Param("axis", "axis", help="the axis of the target to add"), Param("dim", "int", 0, "the dimension to remove"))
    example = "*.experts.gate_up_proj → unstack(E) | split → *.experts.{E}.{w1,w3}.weight"

    def infer(self, x, args, context):
        axis = _axis(x, args, context)

        def made(t: Type):
            dim = pick_dim(args.get("dim") or 0, t, "unstack")
            if not t.is_dense and (dim or len(t.shape) < 3):
                reason = f"{t} is packed; only a dimension before its rows can become members"
                raise Refused(WRONG_DIMENSION, reason, "`dequant` first", argument="dim")
            parts = tuple(evolve(p, shape=(*p.shape[:dim], *p.shape[dim + 1 :])) for p in t.parts)
            return (evolve(t, shape=(*t.shape[:dim], *t.shape[dim + 1 :]), parts=parts),) * len(axis.labels)

        return scatter(x, axis, made)

    def rows(self, step, item, lo, hi):
        source, dim, k, i = _source(step, item)
        if dim != 0:
            return None
        size = flat_rows(step.made.items[item].shape)
        taken = (k * size + lo, k * size + hi) if len(source.shape) > 2 else (k, k + 1)
        return tuple(taken if j == i else None for j in range(len(step.takes.items)))

    def reference(self, step, x, state, out):
        for item, target in enumerate(out):
            if target is None:
                continue
            source, dim, k, i = _source(step, item)
            if dim != 0:
                target.tensor().copy_(x[i].tensor().select(dim, k))
                continue
            for p in target.type.parts:
                made, given = raw(target, p.role), raw(x[i], p.role)
                if len(source.shape) > 2:
                    first = (k * flat_rows(step.made.items[item].shape) + target.start - x[i].start) // max(1, source.shape[-2])
                    made.copy_(given.narrow(0, first, made.shape[0]))
                else:  # members of rank 0 and 1 are rows of the source
                    row, width = given[0, k - x[i].start], made.shape[2]
                    made.reshape(-1).copy_(row[target.start * width :][: made.numel()])

    def inverse(self, step):
        return (("stack", {"axis": step.args["axis"], "dim": step.args.get("dim") or 0}),)


def _axis(grid: Grid[Type], args, context: Context) -> Axis:
    name = args["axis"]
    if name in [a.name for a in grid.axes]:
        raise Refused(WRONG_AXIS, f"the unit has the axis {name} already", argument="axis")
    axis = next((a for a in context.target_axes if a.name == name), None)
    if axis is None:
        known = ", ".join(a.name for a in context.target_axes if a.name) or "none with a name"
        raise Refused(WRONG_AXIS, f"the target has no axis {name}; it has {known}", argument="axis")
    sizes = {t.shape[pick_dim(args.get("dim") or 0, t, "unstack")] for t in grid.items}
    size = sizes.pop()
    if sizes or not isinstance(size, int):
        found = " and ".join(map(str, (size, *sizes)))
        raise Refused(WRONG_SIZES, f"the dimension is {found}; members are known only where it is one number")
    if not 0 < size <= MOST:
        raise Refused(WRONG_SIZES, f"the dimension is {size:,}, which makes {'too many' if size else 'no'} members")
    low = context.lows.get(name, 0)
    if not axis.labels:
        return Axis(name, tuple(range(low, low + size)))
    if len(axis.labels) != size:
        reason = f"the dimension has {size} entries, {name} of the target {len(axis.labels)} members"
        raise Refused(WRONG_SIZES, reason, label=f"{size} entries")
    return axis


def _source(step: Step, item: int) -> tuple[Type, int, int, int]:
    """(type of the source, the dimension, which member `item` is, which item of the grid the source is)"""
    n = len(step.made.axes[-1].labels)
    source = step.takes.items[item // n]
    return source, pick_dim(step.args.get("dim") or 0, source, "unstack"), item % n, item // n
