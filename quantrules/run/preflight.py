"""Preflight: the facts that only bytes tell (`Need`s of recipes), checked for all units before the first byte is written.

Small parts (globals, scales of a tensor) are read once, in file order, and checked as columns; block scales stream
through a few megabytes. Plain numpy on bits, so that no float conversion can hide what is on disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
from attrs import define, field

from quantrules.checkpoint import Source
from quantrules.diagnostics import Diagnostic
from quantrules.diagnostics import define as define_code
from quantrules.ops.align import rescaled
from quantrules.ops.base import Need
from quantrules.ops.codecs import codec_of
from quantrules.plan.model import Plan, Units
from quantrules.types import DTYPE_BITS, part_bytes, rows_of

SCALE = define_code("QR601", "A scale is not finite, negative, or a divisor of zero")
UNEQUAL = define_code("QR602", "Parts that have to be equal differ")
INEXACT = define_code("QR603", "Globals cannot be aligned without rounding")

SMALL = 4096  # bytes of a part that is read as a column
CHUNK = 4 << 20  # bytes of a large part in memory, a thread

# codec -> (bits as, pattern of the sign, first pattern without it that is no finite number); 0 where there is no sign
BITS = {
    "f64": (np.uint64, 1 << 63, 0x7FF0 << 48), "f32": (np.uint32, 1 << 31, 0x7F80 << 16), "bf16": (np.uint16, 1 << 15, 0x7F80),
    "f16": (np.uint16, 1 << 15, 0x7C00), "f8_e4m3": (np.uint8, 0x80, 0x7F), "f8_e5m2": (np.uint8, 0x80, 0x7C),
    "f8_e8m0": (np.uint8, 0, 0xFF), "f8_e4m3fnuz": (np.uint8, 0, 0x80), "f8_e5m2fnuz": (np.uint8, 0, 0x80),
}  # fmt: skip
INFINITE = ("f64", "f32", "bf16", "f16", "f8_e5m2")  # codecs whose first such pattern is infinity, and not NaN


def preflight(plan: Plan, source: Source, *, allow_nonfinite: bool = False, blocks: bool = True, kept: bool = False,
              jobs: int | None = None) -> list[Diagnostic]:  # fmt: skip
    """What the bytes of `source` say against the plan, folded by rule and template. Nothing is written, nothing raised.

    allow_nonfinite: scales that are NaN, infinite or negative are warnings. blocks: read block scales too, not scalars only.
    kept: check the scales of modules that are only copied or respelled as well.
    """
    with ThreadPoolExecutor(jobs or min(8, 2 * (os.cpu_count() or 1))) as pool:
        checks = [_Check(plan, units, need, source, pool, blocks) for units in plan.units for need in _needs(units, kept)]
        small = [c.rows(i, role) for c in checks for i in c.need.items for role in c.roles(i) if c.is_small(i, role)]
        scalars = _Scalars(source, np.concatenate(small) if small else np.zeros(0, np.int32), pool)
        findings: list[Diagnostic] = []
        for check in checks:
            check.scalars = scalars
            found = KINDS[check.need.kind](check)
            soft = allow_nonfinite and check.need.kind == "scales"
            findings += _fold(check, found, "warning" if soft else "error")
    return list(dict.fromkeys(findings))


def _needs(units: Units, kept: bool) -> tuple[Need, ...]:
    """The checks of a recipe, and with `kept` the scales of sources that none of them looks at."""
    checks = units.recipe.checks
    seen = {i for need in checks if need.kind == "scales" for i in need.items}
    rest = [(i, tuple(p.role for p in t.parts if p.role in ("scale", "global"))) for i, t in enumerate(units.recipe.took.items) if i not in seen]
    return (*checks, *(Need("scales", (i,), roles, units.rule.span) for i, roles in rest if kept and roles))


class _Scalars:
    """The bytes of small tensors, read once and in file order; `take` gives them as rows of a matrix."""

    def __init__(self, source: Source, rows: np.ndarray, pool: ThreadPoolExecutor):
        table, rows = source.table, np.unique(rows)
        rows = rows[np.lexsort((table.begin[rows], table.file[rows]))]
        ends = np.cumsum(table.nbytes[rows])
        starts = ends - table.nbytes[rows]
        self.start = np.zeros(len(table), np.int64)
        self.start[rows] = starts
        self.buffer = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)

        def read(part: np.ndarray) -> None:
            for row, a, b in zip(rows[part].tolist(), starts[part].tolist(), ends[part].tolist(), strict=True):
                source.read_into(row, 0, b - a, self.buffer[a:b])

        list(pool.map(read, np.array_split(np.arange(len(rows)), 64)))

    def take(self, rows: np.ndarray, size: int) -> np.ndarray:
        return self.buffer[self.start[rows][:, None] + np.arange(size)]


@define(eq=False)
class _Check:
    """One need of the units of one recipe."""

    plan: Plan
    units: Units
    need: Need
    source: Source
    pool: ThreadPoolExecutor
    blocks: bool
    scalars: _Scalars | None = None
    columns: dict[tuple[int, str], int] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.columns = {slot: c for c, slot in enumerate(self.units.recipe.slots)}

    def part(self, item: int, role: str):
        return self.units.recipe.took.items[item].part(role)

    def roles(self, item: int) -> list[str]:
        return [r for r in self.need.roles if self.part(item, r) is not None]

    def is_small(self, item: int, role: str) -> bool:
        return self.part(item, role).nbytes <= SMALL

    def rows(self, item: int, role: str) -> np.ndarray:
        return self.units.sources[:, self.columns[item, role]]

    def codec(self, item: int, role: str) -> str:
        """How the part's numbers are stored."""
        return codec_of(self.units.recipe.took.items[item].format, role, self.part(item, role).dtype)

    def divides(self, item: int, role: str) -> bool:
        return self.units.recipe.took.items[item].spelling.part(role).inverse

    def first(self, item: int, role: str, bad: Callable[[np.ndarray], np.ndarray]) -> Iterable[tuple[int, int]]:
        """(row, index of the first bad element) of each unit's part that has one. `bad`: bytes [n] -> mask [elements]."""
        rows, part = self.rows(item, role), self.part(item, role)
        if not part.nbytes:
            return ()
        if self.is_small(item, role):
            mask = bad(self.scalars.take(rows, part.nbytes).reshape(-1)).reshape(len(rows), -1)
            hits = np.flatnonzero(mask.any(axis=1))
            return zip(rows[hits].tolist(), mask[hits].argmax(axis=1).tolist(), strict=True)
        if not self.blocks:
            return ()
        order = rows[np.lexsort((self.plan.table.begin[rows], self.plan.table.file[rows]))].tolist()
        found = self.pool.map(lambda row: _scan(self.source, row, 0, part.nbytes, bad), order)
        return ((row, at) for row, at in zip(order, found, strict=True) if at is not None)


def _scan(source: Source, row: int, begin: int, end: int, bad: Callable[[np.ndarray], np.ndarray]) -> int | None:
    """Index, from `begin` on, of the first bad element in bytes [begin, end) of a tensor."""
    buffer, seen = np.empty(min(CHUNK, end - begin), np.uint8), 0
    for lo in range(begin, end, CHUNK):
        view = buffer[: min(CHUNK, end - lo)]
        source.read_into(row, lo, lo + len(view), view)
        mask = bad(view)
        if mask.any():
            return seen + int(mask.argmax())
        seen += len(mask)
    return None


# --------------------------------------------------------------------------------------------------------- the kinds

Finding = tuple[str, int, int, str]  # code, row, element, what is wrong with it


def _scales(check: _Check) -> Iterable[Finding]:
    """Each number is finite and not negative; one that divides is not zero."""
    for item in check.need.items:
        for role in check.roles(item):
            codec, divides = check.codec(item, role), check.divides(item, role)
            if codec in BITS:
                for row, at in check.first(item, role, partial(_bad, codec=codec, divides=divides)):
                    yield SCALE, row, at, _what(check.source, row, at, codec)


def _bad(raw: np.ndarray, codec: str, divides: bool) -> np.ndarray:
    kind, sign, limit = BITS[codec]
    bits = raw.view(kind)
    mask = bits >= kind(limit)  # a set sign bit is above every magnitude
    if sign and mask.any():
        mask &= bits != kind(sign)  # -0 is zero
    return mask | ((bits & ~kind(sign)) == 0) if divides and sign else mask


def _what(source: Source, row: int, at: int, codec: str) -> str:
    kind, sign, limit = BITS[codec]
    raw = np.empty(np.dtype(kind).itemsize, np.uint8)
    source.read_into(row, at * len(raw), (at + 1) * len(raw), raw)
    bits = int(raw.view(kind)[0])
    magnitude = bits & ~sign
    if sign and not magnitude:
        return "is zero and divides"
    if magnitude < limit or codec.endswith("fnuz") and bits != limit:
        return "is negative"
    return "is infinite" if magnitude == limit and codec in INFINITE else "is NaN"


def _equal(check: _Check) -> Iterable[Finding]:
    """The parts of all items are the same bytes."""
    first, *others = check.need.items
    for role in check.roles(first):
        mine, part = check.rows(first, role), check.part(first, role)
        for item in others:
            theirs, other = check.rows(item, role), check.part(item, role)
            if other is None or other.nbytes != part.nbytes:
                different = np.arange(len(mine))
            elif check.is_small(first, role):
                a, b = check.scalars.take(mine, part.nbytes), check.scalars.take(theirs, part.nbytes)
                different = np.flatnonzero((a != b).any(axis=1))
            else:
                pairs = list(zip(mine.tolist(), theirs.tolist(), strict=True))
                same = check.pool.map(partial(_same, check.source, part.nbytes), *zip(*pairs, strict=True))
                different = np.flatnonzero(~np.fromiter(same, bool, len(pairs)))
            for u in different.tolist():
                yield UNEQUAL, int(mine[u]), -1, f"differs from `{check.plan.table.name(int(theirs[u]))}`"


def _same(source: Source, nbytes: int, a: int, b: int) -> bool:
    one, two = np.empty(min(CHUNK, nbytes), np.uint8), np.empty(min(CHUNK, nbytes), np.uint8)
    for lo in range(0, nbytes, CHUNK):
        n = min(CHUNK, nbytes - lo)
        source.read_into(a, lo, lo + n, one[:n])
        source.read_into(b, lo, lo + n, two[:n])
        if not np.array_equal(one[:n], two[:n]):
            return False
    return True


def _exact_align(check: _Check) -> Iterable[Finding]:
    """In each slice, every block scale of the items has an exact one under the global scale that they will share."""
    items, took = check.need.items, check.units.recipe.took.items
    inverse = check.divides(items[0], "global")
    outer, _, _ = rows_of(took[items[0]].shape)
    numbers = [check.scalars.take(check.rows(i, "global"), check.part(i, "global").nbytes).view(np.float32) for i in items]
    every = np.stack([n.reshape(len(check.units), outer, -1) for n in numbers], axis=2)  # [units, slices, items, spans]
    shared = every.min(axis=(2, 3), keepdims=True) if inverse else every.max(axis=(2, 3), keepdims=True)
    for unit, slice_, k, span in np.argwhere(every != shared).tolist():
        item, old, new = items[k], float(every[unit, slice_, k, span]), float(shared[unit, slice_, 0, 0])
        type, row = took[item], int(check.rows(item, "scale")[unit])
        _, exact = rescaled(check.codec(item, "scale"), old, new, inverse)
        _, n, _ = rows_of(type.shape)
        edges = np.cumsum([0, *(type.spans or (n,))]).tolist()
        begin, end = part_bytes(type, "scale", slice_ * n + edges[span], slice_ * n + edges[span + 1])
        at = _scan(check.source, row, begin, end, lambda raw, exact=exact: ~exact[raw])
        if at is not None:
            yield INEXACT, row, begin + at, f"has no exact value under the global scale {new:g}; its own is {old:g}"


KINDS: dict[str, Callable[[_Check], Iterable[Finding]]] = {"scales": _scales, "equal": _equal, "exact-align": _exact_align}

HELP = {
    SCALE: "--allow-nonfinite converts such scales as they are",
    UNEQUAL: "`dequant` the members first, or `align` them to one global scale",
    INEXACT: "`align` without `exact` rounds the block scales, and the plan says so",
}


def _fold(check: _Check, found: Iterable[Finding], severity: str) -> list[Diagnostic]:
    """One diagnostic for the tensors of one template that are wrong in one way."""
    table, groups = check.plan.table, {}
    for code, row, at, what in found:
        group = groups.setdefault((code, int(table.family[row]), what.split("`")[0]), [])
        group.append((row, at, what))
    result = []
    for (code, _, _), group in groups.items():
        row, at, what = group[0]
        shape = table.shapes[table.shape[row]]
        place = f"[{', '.join(map(str, map(int, np.unravel_index(at, shape))))}]" if at >= 0 and shape else ""
        one = f"`{table.name(row)}`{place} {what}"
        message = one if len(group) == 1 else f"{len(group)} tensors, for example {one}"
        result.append(Diagnostic(code, message, check.need.span, help=HELP[code], severity=severity, count=len(group)))
    return result


assert all(np.dtype(kind).itemsize * 8 == DTYPE_BITS[codec] for codec, (kind, _, _) in BITS.items())
