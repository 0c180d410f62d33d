"""Preflight: the facts that only bytes tell (`Need`s of recipes), checked for all units before the first byte is written.

Small parts (globals, scales of a tensor) are read once, in file order, and checked as columns; block scales stream
through a few megabytes. Plain numpy on bits, so that no float conversion can hide what is on disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from attrs import define, field

from quantrules.checkpoint.source import Source
from quantrules.diagnostics import Diagnostic
from quantrules.diagnostics import define as define_code
from quantrules.ops.base import Need
from quantrules.plan.model import Plan, Units
from quantrules.types import DTYPE_BITS

SCALE = define_code("QR601", "A scale is not finite, negative, or a divisor of zero")
UNEQUAL = define_code("QR602", "Parts that have to be equal differ")
INEXACT = define_code("QR603", "Globals cannot be aligned without rounding")

SMALL = 4096  # bytes of a part that is read as a column
CHUNK = 4 << 20  # bytes of a large part in memory, a thread

# dtype -> (bits as, pattern of the sign or 0, first magnitude that is no finite number); u8 holds e8m0 scales
BITS = {
    "f64": (np.uint64, 1 << 63, 0x7FF0 << 48), "f32": (np.uint32, 1 << 31, 0x7F80 << 16), "bf16": (np.uint16, 1 << 15, 0x7F80),
    "f16": (np.uint16, 1 << 15, 0x7C00), "f8_e4m3": (np.uint8, 0x80, 0x7F), "f8_e5m2": (np.uint8, 0x80, 0x7C),
    "f8_e8m0": (np.uint8, 0, 0xFF), "u8": (np.uint8, 0, 0xFF),
}  # fmt: skip


def preflight(plan: Plan, source: Source, *, allow_nonfinite: bool = False, blocks: bool = True, jobs: int | None = None) -> list[Diagnostic]:
    """What the bytes of `source` say against the plan, folded by rule and template. Nothing is written, nothing raised.

    allow_nonfinite: scales that are NaN, infinite or negative are warnings. blocks: read block scales too, not scalars only.
    """
    with ThreadPoolExecutor(jobs or min(8, 2 * (os.cpu_count() or 1))) as pool:
        checks = [_Check(plan, units, need, source, pool, blocks) for units in plan.units for need in units.recipe.checks]
        small = [c.rows(i, role) for c in checks for i in c.need.items for role in c.roles(i) if c.is_small(i, role)]
        scalars = _Scalars(source, np.concatenate(small) if small else np.zeros(0, np.int32), pool)
        findings: list[Diagnostic] = []
        for check in checks:
            check.scalars = scalars
            found = KINDS[check.need.kind](check)
            soft = allow_nonfinite and check.need.kind == "scales"
            findings += _fold(check, found, "warning" if soft else "error")
    return list(dict.fromkeys(findings))


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
            for row, a, b in zip(rows[part].tolist(), starts[part].tolist(), ends[part].tolist()):
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

    def divides(self, item: int, role: str) -> bool:
        return self.units.recipe.took.items[item].spelling.part(role).inverse

    def first(self, item: int, role: str, bad: Callable[[np.ndarray], np.ndarray]) -> Iterable[tuple[int, int]]:
        """(row, index of the first bad element) of each unit's part that has one. `bad`: bytes [n] -> mask [elements]."""
        rows, part = self.rows(item, role), self.part(item, role)
        if self.is_small(item, role):
            mask = bad(self.scalars.take(rows, part.nbytes).reshape(-1)).reshape(len(rows), -1)
            hits = np.flatnonzero(mask.any(axis=1))
            return zip(rows[hits].tolist(), mask[hits].argmax(axis=1).tolist())
        if not self.blocks:
            return ()
        order = rows[np.lexsort((self.plan.table.begin[rows], self.plan.table.file[rows]))].tolist()
        found = self.pool.map(lambda row: self.scan(row, part.nbytes, bad), order)
        return ((row, at) for row, at in zip(order, found) if at is not None)

    def scan(self, row: int, nbytes: int, bad: Callable[[np.ndarray], np.ndarray]) -> int | None:
        buffer, seen = np.empty(min(CHUNK, nbytes), np.uint8), 0
        for lo in range(0, nbytes, CHUNK):
            view = buffer[: min(CHUNK, nbytes - lo)]
            self.source.read_into(row, lo, lo + len(view), view)
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
            dtype, divides = check.part(item, role).dtype, check.divides(item, role)
            if dtype in BITS:
                for row, at in check.first(item, role, lambda raw: _bad(raw, dtype, divides)):
                    yield SCALE, row, at, _what(check, row, at, dtype)


def _bad(raw: np.ndarray, dtype: str, divides: bool) -> np.ndarray:
    kind, sign, limit = BITS[dtype]
    bits = raw.view(kind)
    mask = bits >= kind(limit)  # a set sign bit is above every magnitude
    if sign and mask.any():
        mask &= bits != kind(sign)  # -0 is zero
    return mask | ((bits & ~kind(sign)) == 0) if divides and sign else mask


def _what(check: _Check, row: int, at: int, dtype: str) -> str:
    kind, sign, limit = BITS[dtype]
    raw = np.empty(np.dtype(kind).itemsize, np.uint8)
    check.source.read_into(row, at * len(raw), (at + 1) * len(raw), raw)
    bits = int(raw.view(kind)[0])
    if bits & ~sign == 0 and sign:
        return "is zero and divides"
    if bits & ~sign < limit:
        return "is negative"
    if bits & ~sign == limit and dtype not in ("f8_e4m3", "f8_e8m0", "u8"):
        return "is infinite"
    return "is NaN"


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
                different = np.flatnonzero((check.scalars.take(mine, part.nbytes) != check.scalars.take(theirs, part.nbytes)).any(axis=1))
            else:
                pairs = list(zip(mine.tolist(), theirs.tolist()))
                same = check.pool.map(lambda pair: _same(check.source, *pair, part.nbytes), pairs)
                different = np.flatnonzero(~np.fromiter(same, bool, len(pairs)))
            for u in different.tolist():
                yield UNEQUAL, int(mine[u]), -1, f"differs from `{check.plan.table.name(int(theirs[u]))}`"


def _same(source: Source, a: int, b: int, nbytes: int) -> bool:
    one, two = np.empty(min(CHUNK, nbytes), np.uint8), np.empty(min(CHUNK, nbytes), np.uint8)
    for lo in range(0, nbytes, CHUNK):
        n = min(CHUNK, nbytes - lo)
        source.read_into(a, lo, lo + n, one[:n])
        source.read_into(b, lo, lo + n, two[:n])
        if not np.array_equal(one[:n], two[:n]):
            return False
    return True


def _exact_align(check: _Check) -> Iterable[Finding]:
    """With g the largest multiplier of the items, each s·gᵢ is s'·g for some scale s' of the scales' dtype.

    Products of a 4-bit and a 24-bit significand are exact in f64, so the comparison is.
    """
    items, table = check.need.items, _e4m3()
    globals_ = np.stack([check.scalars.take(check.rows(i, "global"), 4).view(np.float32)[:, 0].astype(np.float64) for i in items], axis=1)
    divides = check.divides(items[0], "global")
    shared = globals_.min(axis=1) if divides else globals_.max(axis=1)
    for k, item in enumerate(items):
        rows, part = check.rows(item, "scale"), check.part(item, "scale")
        for u in np.flatnonzero(globals_[:, k] != shared).tolist():
            a, b = (shared[u], globals_[u, k]) if divides else (globals_[u, k], shared[u])
            with np.errstate(all="ignore"):
                wanted = table * a  # = s'·b
                near = np.clip(np.searchsorted(table[:127], wanted / b), 1, 126)
                exact = (table[near] * b == wanted) | (table[near - 1] * b == wanted)
            row = int(rows[u])
            at = check.scan(row, part.nbytes, lambda raw: ~exact[raw & 0x7F])
            if at is not None:
                yield INEXACT, row, at, f"times {a / b:g} is no {part.dtype} number"


def _e4m3() -> np.ndarray:
    """The 128 magnitudes of e4m3 as f64; the last is NaN."""
    b = np.arange(128)
    values = np.where(b >= 8, (8 + b % 8) * 2.0 ** (b // 8 - 10), (b % 8) * 2.0**-9)
    values[127] = np.nan
    return values


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


assert all(np.dtype(kind).itemsize * 8 == DTYPE_BITS[dtype] for dtype, (kind, _, _) in BITS.items())
