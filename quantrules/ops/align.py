"""align: one global scale for members that a cat will join."""

from __future__ import annotations

import numpy as np
from attrs import evolve

from quantrules.diagnostics import define
from quantrules.ops.base import Need, Op, Param, Refused, Step, Value, register
from quantrules.ops.blocks import copy, cube, decoded, raw, require_finite, slices
from quantrules.ops.codecs import codec_of, table
from quantrules.ops.lift import MEMBERS_DIFFER, alike, is_named, named, pick_axis, resized, scale_needs
from quantrules.ops.quant import fill
from quantrules.types import Grid, Type, rows_of

NOT_EXACT = define("QR214", "Members cannot share a global scale without rounding")


@register
class Align(Op):
    name = "align"
    summary = "one global scale for members that are joined next"
    help = """Before a `cat`: format[N, K] of each member → the same, all with one global scale, so that the `cat` keeps
one. Without a name the only unnamed axis is meant; other axes (experts) stay apart. The largest multiplier (smallest divisor)
is taken. A block whose scale can be rescaled without rounding, as when the ratio is a power of two and the scale stays
normal, keeps its codes and its values; any other is quantised again from its f32 values under the new global. `align(exact)`
refuses these instead. Activation scales join by the larger range. Dense values, and formats without a global scale, pass as
they are. Refused: members of different formats or spellings, or with different parts."""
    params = (
        Param("axis", "axis", None, "the axis that the cat will remove; the only unnamed one unless given"),
        Param("mode", "word", None, "exact: refuse to round", ("exact",)),
    )
    example = "*.self_attn.{q_proj,k_proj,v_proj} → unpack | align | cat → *.self_attn.qkv_proj"
    surveys = True

    def infer(self, x, args, context):
        labels = [".".join(map(str, label)) for label in x.labels()]
        for line in lines(x, args):
            types, names = [x.items[i] for i in line], [labels[i] for i in line]
            alike(types, names, None, spans=True, shapes=False)
            if len({t.shape[:-2] for t in types if _shared(t)}) > 1:
                raise Refused(MEMBERS_DIFFER, f"members have different leading dimensions: {named(types, names)}")
        axis = _axis(x, args)
        names = () if axis is None else (x.axes[axis].name,)
        return x.map(lambda t: evolve(resized(t, len(t.shape) - 2, t.shape[-2], ()), aligned=names) if _shared(t) else t)

    def needs(self, step):
        exact = lines(step.takes, step.args) if _exact(step.args) and not self.identity(step) else []
        return (*scale_needs(step), *(Need("exact-align", line, ("scale", "global"), step.span) for line in exact))

    def label(self, step):
        return "exact" if _exact(step.args) or self.identity(step) else "lossy"

    def identity(self, step):
        return not any(map(_shared, step.takes.items))

    def needs_survey(self, step):
        return not self.identity(step)

    def survey(self, step, x, state):
        """{item: {(slice, global): bool[256], which block scales there are under it}, and (item, "act"): f32[outer]}"""
        state = dict(state or {})
        for i, value in enumerate(x):
            if value is None or not _shared(value.type):
                continue
            first = slices(value, rows_of(step.takes.items[i].shape)[1]).start
            seen, old, scales = dict(state.get(i, {})), _globals(value), raw(value, "scale").cpu().numpy()
            for k in range(len(scales)):
                for g in np.unique(old[k]):
                    there = np.bincount(scales[k][old[k] == g].reshape(-1), minlength=256) > 0
                    seen[first + k, float(g)] = seen.get((first + k, float(g)), False) | there
            state[i] = seen
            if value.type.part("act"):
                total = state.get((i, "act"), np.full(rows_of(step.takes.items[i].shape)[0], np.nan, np.float32)).copy()
                total[first : first + len(scales)] = cube(value, "act").cpu().numpy()[:, 0, 0]
                state[i, "act"] = total
        return state

    def report(self, step: Step, state) -> tuple[tuple[str, bool], ...]:
        """(label, whether it was rescaled without rounding) of every member, from the state of the survey."""
        found, labels = {}, list(step.takes.labels())
        for line in lines(step.takes, step.args):
            for i in (i for i in line if i in state):
                spec, t = step.takes.items[i].spelling.part("global"), step.takes.items[i]
                codec = codec_of(t.format, "scale", t.part("scale").dtype)
                found[i] = all(
                    rescaled(codec, g, joint(state, line, outer, spec.inverse), spec.inverse)[1][there].all()
                    for (outer, g), there in state[i].items()
                )
        return tuple((".".join(map(str, labels[i])), ok) for i, ok in sorted(found.items()))

    def reference(self, step, x, state, out):
        for line in lines(step.takes, step.args):
            for i in (i for i in line if out[i] is not None):
                if not _shared(step.takes.items[i]):
                    copy(x[i], out[i])
                else:
                    self._member(step, x[i], out[i], state, line, i)

    def _member(self, step: Step, source: Value, target: Value, state, line: tuple[int, ...], item: int) -> None:
        import torch

        whole, inverse = step.takes.items[item], source.type.spelling.part("global").inverse
        first = slices(source, rows_of(whole.shape)[1]).start
        codec, old, scales = codec_of(whole.format, "scale", whole.part("scale").dtype), _globals(source), raw(source, "scale")
        new, exact = scales.clone(), torch.zeros_like(scales, dtype=torch.bool)
        for k in range(len(scales)):
            g = joint(state, line, first + k, inverse)
            cube(target, "global")[k].fill_(g)
            for was in np.unique(old[k]):
                here = torch.from_numpy(old[k] == was).to(scales.device)
                codes, same = (torch.from_numpy(a).to(scales.device) for a in rescaled(codec, float(was), g, inverse))
                new[k][here] = codes[scales[k][here].int()]
                exact[k][here] = same[scales[k][here].int()]
            if target.type.part("act"):
                acts = [state[i, "act"][first + k] for i in line]
                cube(target, "act")[k].fill_(float(min(acts) if source.type.spelling.part("act").inverse else max(acts)))
        raw(target, "codes").copy_(raw(source, "codes"))
        raw(target, "scale").copy_(new)
        if not exact.all():
            if _exact(step.args):
                reason = f"{source.name or 'a member'}: {int((~exact).sum())} block scales cannot be rescaled without rounding"
                raise Refused(NOT_EXACT, reason, "`align` rounds them, `dequant` removes them")
            _again(source, target, whole, exact)


def _again(source: Value, target: Value, whole: Type, exact) -> None:
    """Quantise anew, under the global of `target`, the blocks that are not exact [outer, block rows, block columns]."""
    numbers, t = decoded(source), target.type
    require_finite(source, whole, numbers)
    fresh = evolve(target, parts={r: p.copy() if isinstance(p, np.ndarray) else p.clone() for r, p in target.parts.items()})
    fill(fresh, numbers, "ceil", 0.0)
    raw(target, "scale")[~exact] = raw(fresh, "scale")[~exact]
    rows, bytes_ = numbers.shape[1], raw(target, "codes").shape[-1]
    redo = (~exact).repeat_interleave(t.format.block[0], 1)[:, :rows]
    redo = redo.repeat_interleave(t.format.block[1] // t.format.element.per, 2)[..., :bytes_]
    raw(target, "codes")[redo] = raw(fresh, "codes")[redo]


def rescaled(codec: str, old: float, new: float, inverse: bool) -> tuple[np.ndarray, np.ndarray]:
    """(u8[256], bool[256]): the nearest scale byte under the global `new` of each one under `old`, and whether it is exact.

    Products of a scale (4 bits) and a global (24 bits) are exact in f64, so exactness is decided without rounding; equal
    products round to equal factors. A byte with no place (NaN, a negative number) stays and counts as exact.
    """
    values, codes, exact = table(codec).astype(np.float64), np.arange(256, dtype=np.uint8), np.ones(256, bool)
    a, b = (new, old) if inverse else (old, new)
    if a == b:
        return codes, exact
    there = np.flatnonzero(np.isfinite(values) & (values >= 0) & ~np.signbit(values))
    known = values[there]
    wanted = known * a / b
    right = np.searchsorted(known, wanted).clip(1, len(known) - 1)
    near = np.where(wanted - known[right - 1] <= known[right] - wanted, right - 1, right)
    codes[there], exact[there] = there[near], known[near] * b == known * a
    return codes, exact


def joint(state, line: tuple[int, ...], outer: int, inverse: bool) -> float:
    """The global scale of a line of members in one slice: the one that covers the larger range."""
    every = [g for i in line for o, g in state.get(i, {}) if o == outer]
    return min(every) if inverse else max(every)


def lines(grid: Grid[Type], args) -> list[tuple[int, ...]]:
    """The members that share a scale, as items of the grid."""
    axis = _axis(grid, args)
    return [(i,) for i in range(len(grid.items))] if axis is None else grid.lines(axis)


def _axis(grid: Grid[Type], args) -> int | None:
    name = args.get("axis") if args.get("axis") != "exact" else None
    if name is None and all(is_named(a) for a in grid.axes) and all(t.spans for t in grid.items):
        return None  # nothing to join: each value by itself
    return pick_axis(grid, name, "align")


def _exact(args) -> bool:
    return "exact" in (args.get("axis"), args.get("mode"))


def _shared(type: Type) -> bool:
    return type.part("global") is not None


def _globals(value: Value) -> np.ndarray:
    """f32 [outer, rows of blocks]: the global that each row of block scales is under."""
    g, rows, bn = cube(value, "global").cpu().numpy()[..., 0], raw(value, "scale").shape[1], value.type.format.block[0]
    if value.type.spans:
        g = g.repeat(value.type.spans, 1)[:, (np.arange(rows) * bn - value.phase).clip(0)]
    return np.broadcast_to(g, (len(g), rows))
