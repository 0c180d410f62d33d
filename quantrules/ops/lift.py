"""What cat, stack, split and unstack do to the parts of a packed value, derived from the format's data; and axes of grids.

A dimension of the weight is one of: rows (the last but one, or the only one), columns (the last), lead (the first of three
or more), inner (another leading one). Each part follows it, or is one number for the value and then is collected, kept from
the first member, required to be equal, or joined by the larger range.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from attrs import evolve

from quantrules.diagnostics import define
from quantrules.ops.base import Context, Need, Refused, Step, Value
from quantrules.types import (
    DTYPE_BITS,
    Axis,
    Dim,
    Format,
    Grid,
    Part,
    PartType,
    Type,
    divisible,
    flat_rows,
    part_type,
    stored_shapes,
)

BLOCK_CUT = define("QR201", "An op would cut blocks or packed bytes")
MEMBERS_DIFFER = define("QR202", "Members that an op joins have different types")
WRONG_PART = define("QR203", "A module's part is missing, or has a shape or dtype that its format does not have")
NO_SCALES = define("QR204", "A dense integer, boolean or one-byte value has no scales to be read with")
WRONG_AXIS = define("QR206", "An op needs an axis that the unit does not have")
WRONG_DIMENSION = define("QR207", "A dimension is missing or out of range")
SEVERAL_SCALES = define("QR208", "A value has more global scales than the op or the spelling can keep")
WRONG_SIZES = define("QR210", "Sizes or members do not fit a dimension")
WRONG_ARGUMENT = define("QR211", "An argument of an op is not one that it takes")

DIMS = {"lead": 0, "rows": 1, "columns": 2}  # of blocks.cube


# -------------------------------------------------------------------------------------------------------------- axes


def is_named(axis: Axis) -> bool:
    """The first list without a name is an axis called "", the second "#1"."""
    return axis.name[:1] not in ("", "#")


def pick_axis(grid: Grid, name: str | None, op: str) -> int:
    """Which axis an op means: the named one, or the only one without a name."""
    names = [a.name for a in grid.axes]
    known = ", ".join(a.name if is_named(a) else "{" + ",".join(map(str, a.labels)) + "}" for a in grid.axes) or "none"
    if name is not None:
        if name not in names:
            raise Refused(WRONG_AXIS, f"the unit has no axis {name}; its axes: {known}", argument="axis")
        return names.index(name)
    unnamed = [i for i, a in enumerate(grid.axes) if not is_named(a)]
    if len(unnamed) != 1:
        reason = f"the unit has {'several axes' if unnamed else 'no axis'} without a name; its axes: {known}"
        help = f"write `{op}(name)` with the axis that it means" if names else f"`{op}` takes the members of braces, `{{a,b}}`"
        raise Refused(WRONG_AXIS, reason, help)
    return unnamed[0]


def pick_dim(dim: int | None, type: Type, op: str, rank: int | None = None) -> int:
    """The dimension an op works on, not negative. Without one it is 0, up to rank 2."""
    rank = len(type.shape) if rank is None else rank
    if dim is None:
        if rank > 2:
            reason = f"{type} has {rank} dimensions"
            raise Refused(WRONG_DIMENSION, reason, f"write `{op}(1)` for the rows, `{op}(0)` for the first dimension (experts)")
        dim = 0
    if not -rank <= dim < rank:
        raise Refused(WRONG_DIMENSION, f"{type} has no dimension {dim}", argument="dim")
    dim %= rank
    if type.is_dense and (per := _per_byte(type.dtype)) > 1:
        last = op in ("stack", "unstack") and (dim == rank - 1 or op == "unstack" and rank < 3)
        if last or len(type.shape) < 2 or not divisible(type.shape[-1], per):
            raise Refused(BLOCK_CUT, f"{op} would cut the bytes of {type}, which hold {per} elements", "`keep` it")
    return dim


def _per_byte(dtype: str) -> int:
    """The least number of elements that are whole bytes."""
    return 8 // math.gcd(8, DTYPE_BITS[dtype])


def way(shape: Sequence[Dim], dim: int) -> str:
    """rows | columns | lead | inner"""
    rank = len(shape)
    if dim == max(0, rank - 2):
        return "rows"
    return "columns" if dim == rank - 1 else "lead" if dim == 0 else "inner"


def find_format(value: Format | str, context: Context) -> Format | None:
    """The format that an argument means."""
    return context.formats.get(value) if isinstance(value, str) else value


def named(types: Sequence[Type], labels: Sequence) -> str:
    return ", ".join(f"{label} {t}" for label, t in zip(labels, types, strict=True))


def gather(grid: Grid[Type], axis: int, join: Callable[[list[Type], tuple], Type]) -> Grid[Type]:
    """The grid without an axis, each line of it joined to one."""
    made = tuple(join([grid.items[i] for i in line], grid.axes[axis].labels) for line in grid.lines(axis))
    return Grid(grid.without(axis), made)


def scatter(grid: Grid[Type], axis: Axis, part: Callable[[Type], Sequence[Type]]) -> Grid[Type]:
    """The grid with a new last axis, each item parted along it."""
    return Grid((*grid.axes, axis), tuple(p for t in grid.items for p in part(t)))


# ------------------------------------------------------------------------------------------------------------- parts


def collected(type: Type) -> tuple[Part, ...]:
    """Parts with one number for the whole value, of which a cat along the rows makes several."""
    return tuple(s for s in type.spelling.parts if s.cat == "collect" and type.part(s.role))


def rule(spec: Part, how: str, shared: bool) -> str:
    """What a cat does to a part: follow | collect | first | equal | max."""
    letter = {"rows": "N", "columns": "K"}.get(how)
    if letter is None or spec.grid is None or letter in [g.letter for g in spec.grid]:
        return "equal" if letter and spec.cat == "equal" else "follow"
    if spec.cat == "collect":
        return "first" if shared or how == "columns" else "collect"
    return "max" if spec.cat == "max" or spec.role == "act" else "equal"


def check_parts(type: Type) -> None:
    """Refuse a module whose parts are not what its format says: missing, of a wrong dtype, or on a wrong grid."""
    rank = len(type.shape)
    if not type.is_dense and rank < 2:
        raise Refused(WRONG_PART, f"{type} has {rank} dimensions; blocks need rows and columns")
    for spec in type.spelling.parts:
        p, called = type.part(spec.role), f"{spec.role} ({spec.suffix})"
        if p is None:
            if not spec.optional:
                reason = f"{type} has no {called}"
                raise Refused(WRONG_PART, reason, f"{type.format.name} in the spelling {type.spelling.name} requires it")
            continue
        fit = part_type(type.format, spec, type.shape, p.dtype).shape
        fits = stored_shapes(spec, fit, type.shape)
        if type.spans and spec.cat == "collect":
            fit = (*type.shape[:-2], len(type.spans))
            fits = {fit}
        if p.shape not in fits or spec.dtypes and p.dtype not in spec.dtypes:
            need = PartType(spec.role, " or ".join(spec.dtypes) or p.dtype, fit)
            blocks = " × ".join(map(str, type.format.block))
            help = f"{type} needs {need}" + (f": one number for each block of {blocks}" if spec.role == "scale" else "")
            raise Refused(WRONG_PART, f"{called} is {p}", help, label=f"needs {need}")


def scale_needs(step: Step) -> tuple[Need, ...]:
    """That the scales of packed members are numbers, and not negative."""
    found = ((i, tuple(p.role for p in t.parts if p.role in ("scale", "global"))) for i, t in enumerate(step.takes.items))
    return tuple(Need("scales", (i,), roles, step.span) for i, roles in found if roles)


def whole_blocks(type: Type, how: str, size: Dim, label: object, what: str) -> None:
    """Refuse to begin something after `size` rows or columns where that is inside a block or a byte."""
    letter, noun = ("N", "rows") if how == "rows" else ("K", "columns")
    for spec in type.spelling.parts:
        n = max((g.divisor for g in spec.grid or () if g.letter == letter), default=1)
        if type.is_dense and how == "columns":
            n = _per_byte(type.dtype)
        if type.part(spec.role) and not divisible(size, n):
            unit = "bytes" if spec.role == "codes" else "blocks"
            share = f"{size / n:g} {unit} of {n}" if isinstance(size, int) else f"not whole {unit} of {n}"
            reason = f"{size} {noun} are {share}"
            help = f"`dequant` first and `quant({type.format.name})` after, or an order in which only the last member is partial"
            help = f"give sizes that are whole bytes of {n} elements" if type.is_dense else help
            raise Refused(BLOCK_CUT, reason, help, label=f"{label} {what}")


def alike(types: Sequence[Type], labels: Sequence, free: int | None, spans: bool, shapes: bool = True) -> None:
    """Refuse members that differ in more than the dimension `free` (and in spans or shapes, where they may)."""
    first = types[0]
    for t in types:
        parts = [(p.role, p.dtype) for p in t.parts] == [(p.role, p.dtype) for p in first.parts]
        pairs = enumerate(zip(t.shape, first.shape, strict=False))
        fits = not shapes or len(t.shape) == len(first.shape) and all(a == b or i == free for i, (a, b) in pairs)
        same = t.format == first.format and t.layout == first.layout and fits
        if same and t.spelling == first.spelling and parts and (spans or t.spans == first.spans):
            continue
        reason, help = named(types, labels), "members must have one type"
        if t.is_dense != first.is_dense or t.format != first.format or t.is_dense and not parts:
            help = "write `dequant` or `requant(…)` before it, or `cast` where the dtypes differ"
        elif same and t.spelling != first.spelling:
            reason, help = f"{reason}; they are spelled {first.spelling.name} and {t.spelling.name}", "write `pack(…)` before it"
        elif same and not parts:
            listed = (", ".join(f"{p.role} {p.dtype}" for p in m.parts) for m in (first, t))
            reason, help = f"{reason}; their parts are {' and '.join(listed)}", "give each member the same parts, or `dequant`"
        raise Refused(MEMBERS_DIFFER, f"members are {reason}", help)


def joined(types: Sequence[Type], labels: Sequence, axis: str, dim: int) -> Type:
    """The type of a cat of members along a dimension."""
    first, how = types[0], way(types[0].shape, dim)
    alike(types, labels, dim, spans=how == "rows")
    for t, after in zip(types, labels[1:], strict=False):
        if how in ("rows", "columns"):
            whole_blocks(t, how, t.shape[dim], after, "would begin inside one")
    shared = all(axis in t.aligned for t in types)
    spans = first.spans
    if how == "rows" and collected(first):
        spans = () if shared else tuple(s for t in types for s in t.spans or (t.shape[dim],) if s != 0)
        spans = spans if len(spans) > 1 else ()
    elif how == "columns" and collected(first) and (spans or not shared):
        reason = f"members along the columns have a {collected(first)[0].role} scale each: {named(types, labels)}"
        raise Refused(SEVERAL_SCALES, reason, "write `align` before the cat")
    kept = tuple(a for a in first.aligned if a != axis and all(a in t.aligned for t in types))
    size = sum((t.shape[dim] for t in types[1:]), first.shape[dim])
    return evolve(resized(first, dim, size, spans), aligned=kept)


def resized(type: Type, dim: int, size: Dim, spans: tuple[Dim, ...]) -> Type:
    """The type with another size of a dimension, and the numbers of collected parts that `spans` says."""
    shape, parts = (*type.shape[:dim], size, *type.shape[dim + 1 :]), []
    for p in type.parts:
        spec = type.spelling.part(p.role)
        if way(type.shape, dim) in ("lead", "inner"):
            parts.append(evolve(p, shape=(*p.shape[:dim], size, *p.shape[dim + 1 :])))
        elif spans and spec.cat == "collect":
            parts.append(PartType(p.role, p.dtype, (*type.shape[:-2], len(spans))))
        else:
            parts.append(part_type(type.format, spec, shape, p.dtype))
    return evolve(type, shape=shape, parts=tuple(parts), spans=spans)


def parted(type: Type, axis: Axis, dim: int, sizes: Sequence[Dim]) -> tuple[Type, ...]:
    """The types of the pieces of a split along a dimension."""
    how, at, made = way(type.shape, dim), 0, []
    edges = [sum(type.spans[:k]) for k in range(len(type.spans) + 1)]
    for label, size in zip(axis.labels, sizes, strict=True):
        if how in ("rows", "columns"):
            whole_blocks(type, how, at, label, "would begin inside one")
        spans = type.spans
        if spans and how == "rows":
            if at not in edges or at + size not in edges:
                reason = f"rows {at}:{at + size} cut the rows of one scale; each covers {', '.join(map(str, spans))}"
                raise Refused(SEVERAL_SCALES, reason, "`align` before the `cat`, or `dequant`", label=f"{label} would cut one")
            spans = type.spans[edges.index(at) : edges.index(at + size)]
            spans = spans if len(spans) > 1 else ()
        aligned = () if type.spans or how in ("lead", "inner") or not collected(type) else (axis.name,)
        made.append(evolve(resized(type, dim, size, spans), aligned=(*type.aligned, *aligned)))
        at = at + size
    return tuple(made)


# ------------------------------------------------------------------------------------------------------------- bytes


def overlap(sizes: Sequence[int], lo: int, hi: int) -> Iterator[tuple[int, int, int]]:
    """(member, lo, hi) of each of consecutive members that [lo, hi) touches, in rows of the member."""
    start = 0
    for i, size in enumerate(sizes):
        a, b = max(lo, start), min(hi, start + size)
        if a < b:
            yield i, a - start, b - start
        start += size


def touched(types: Sequence[Type], dim: int, lo: int, hi: int) -> list[tuple[int, int, int]]:
    """(member, lo, hi): flat rows of the members of a cat (or pieces of a split) behind flat rows [lo, hi) of the whole."""
    how = way(types[0].shape, dim)
    if how == "columns":
        return [(i, lo, hi) for i in range(len(types))]
    if how == "lead":
        return list(overlap([flat_rows(t.shape) for t in types], lo, hi))
    sizes = [t.shape[dim] for t in types]
    n = sum(sizes)
    first = lo // n if n else 0
    if hi <= (first + 1) * n:
        return [(i, first * sizes[i] + a, first * sizes[i] + b) for i, a, b in overlap(sizes, lo - first * n, hi - first * n)]
    return [(i, first * s, hi // n * s) for i, s in enumerate(sizes) if s]


def append(target, pieces, dim: int) -> None:
    """Fill a cube with cubes, one after the other along a dimension."""
    at = 0
    for piece in pieces:
        target.narrow(dim, at, piece.shape[dim]).copy_(piece)
        at += piece.shape[dim]


def span_of(value: Value) -> tuple[int, int]:
    """Flat rows [lo, hi) of the whole value that a tile is."""
    return value.start, value.start + flat_rows(value.type.shape)


def larger_range(numbers, inverse: bool):
    """Of numbers stacked along dimension 0 the one with the larger range: the largest multiplier, the smallest divisor."""
    return numbers.amin(0) if inverse else numbers.amax(0)
