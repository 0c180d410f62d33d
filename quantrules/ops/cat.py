"""cat: members of an axis one after the other along a dimension."""

from __future__ import annotations

from quantrules.ops.base import Need, Op, Param, Step, register
from quantrules.ops.blocks import cube, raw
from quantrules.ops.lift import (
    DIMS,
    append,
    gather,
    joined,
    larger_range,
    pick_axis,
    pick_dim,
    rule,
    span_of,
    touched,
    way,
)
from quantrules.types import Type, flat_rows


@register
class Cat(Op):
    name = "cat"
    summary = "joins the members of an axis along a dimension"
    help = """Removes an axis: f[N1, K], f[N2, K] → f[N1+N2, K]. `cat` takes the only axis without a name, `cat(p)` the axis
p; the dimension is 0 unless given, and must be given from rank 3 on. Packed values are joined part by part: codes and block
scales follow, a global scale becomes one for each member (`f[6144, 7168; 2]`) unless `align` came before, activation scales
join by the larger range. Refused: members of different types, a member that ends inside a block (only the last one may),
packed columns with a global scale each, a unit without the axis."""
    params = (
        Param("axis", "axis", None, "the axis to remove; the only unnamed one unless given"),
        Param("dim", "int", None, "the dimension to join along"),
    )
    example = "*.mlp.{gate_proj,up_proj} → unpack | dequant | cat → *.mlp.gate_up_proj"

    def infer(self, x, args, context):
        axis, dim = _arguments(args)
        at = pick_axis(x, axis, "cat")
        return gather(x, at, lambda types, labels: joined(types, labels, x.axes[at].name, pick_dim(dim, types[0], "cat")))

    def needs(self, step):
        found = []
        for item, line in enumerate(_lines(step)):
            (first, *_), _, how, shared = self._how(step, item)
            roles = tuple(p.role for p in first.parts if rule(first.spelling.part(p.role), how, shared) == "equal")
            found += [Need("equal", line, roles, step.span)] if roles else []
        return tuple(found)

    def rows(self, step, item, lo, hi):
        line = _lines(step)[item]
        types, dim, how, shared = self._how(step, item)
        if how == "inner":
            return None
        wanted: list[tuple[int, int] | None] = [None] * len(step.takes.items)
        for i, a, b in touched(types, dim, lo, hi) or [(i, 0, 0) for i in range(len(line))]:
            wanted[line[i]] = (a, b)
        if any(rule(t.spelling.part(p.role), how, shared) == "max" for t in types[:1] for p in t.parts):
            n = step.made.items[item].shape[-2]
            for i, t in zip(line, types, strict=True):  # one row brings the numbers that every tile needs of all members
                if wanted[i] is None and flat_rows(t.shape):
                    wanted[i] = (lo // n * t.shape[-2], lo // n * t.shape[-2] + 1)
        return tuple(wanted)

    def reference(self, step, x, state, out):
        import torch

        for item, (line, target) in enumerate(zip(_lines(step), out, strict=True)):
            if target is None:
                continue
            types, dim, how, shared = self._how(step, item)
            values = [x[i] for i in line]
            if how == "inner":
                for p in target.type.parts:
                    target.tensor(p.role).copy_(torch.cat([v.tensor(p.role) for v in values], dim))
                continue
            members = [values[i] for i, _, _ in touched(types, dim, *span_of(target))] or values
            for p in target.type.parts:
                spec = target.type.spelling.part(p.role)
                made = rule(spec, how, shared)
                if made == "max":
                    numbers = torch.stack([cube(v, p.role) for v in values if v is not None])
                    cube(target, p.role).copy_(larger_range(numbers, spec.inverse))
                elif made in ("first", "equal"):
                    raw(target, p.role).copy_(raw(members[0], p.role))
                else:
                    append(raw(target, p.role), [raw(v, p.role) for v in members], DIMS[how])

    def inverse(self, step):
        found = [self._how(step, item) for item in range(len(step.made.items))]
        sizes = {(dim, tuple(t.shape[dim] for t in types)) for types, dim, _, _ in found}
        dim, each = sizes.pop()
        return None if sizes else (("split", {"dim": dim, "sizes": each}),)

    @staticmethod
    def _how(step: Step, item: int) -> tuple[list[Type], int, str, bool]:
        """(the members' types, the dimension, its way, whether the result has one of each collected number)"""
        types = [step.takes.items[i] for i in _lines(step)[item]]
        dim = pick_dim(_arguments(step.args)[1], types[0], "cat")
        return types, dim, way(types[0].shape, dim), not step.made.items[item].spans


def _arguments(args) -> tuple[str | None, int | None]:
    axis, dim = args.get("axis"), args.get("dim")
    return (None, axis) if isinstance(axis, int) else (axis, dim)


def _lines(step: Step) -> list[tuple[int, ...]]:
    return step.takes.lines(pick_axis(step.takes, _arguments(step.args)[0], "cat"))
