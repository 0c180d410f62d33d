"""Tiles: how a unit's targets are cut into pieces that fit the memory. The cut depends on the recipe and the budget only.

A tile is a range of flat rows of one target, or the whole unit at once, where the recipe cannot be cut or is small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from attrs import frozen

from quantrules.lower.program import Program, legal, span
from quantrules.types import Type, rows_of

# Measured for references on two cores: tiles of 32 to 128 MB in memory take the same time, those of 512 MB half as much
# again (every temporary is mapped and zeroed anew), those of 4 MB too (calls of torch).
TILE = 16 << 20  # bytes of output of a tile
HELD = 64 << 20  # bytes of memory of a tile, where it may be cut
WHOLE = -1  # as an item: all items of a unit


@frozen
class Tile:
    """Rows [lo, hi) of a target. cost: bytes of memory at the peak while it is made; weight: bytes written."""

    item: int
    lo: int
    hi: int
    cost: int
    weight: int

    @property
    def whole(self) -> bool:
        return self.item == WHOLE


@frozen
class Layout:
    """tiles: what a unit is cut into. surveys: for each surveying call, (item, lo, hi) of its inputs to fold before."""

    tiles: tuple[Tile, ...]
    surveys: tuple[tuple[int, tuple[tuple[int, int, int], ...]], ...] = ()
    survey_cost: int = 0

    @property
    def whole(self) -> bool:
        return any(t.whole for t in self.tiles)


def layout(program: Program, share: int) -> Layout:
    """How a unit is run with at most `share` bytes for a tile. Where that cannot be, costs say what it takes."""
    made, share = program.recipe.made.items, min(share, HELD)
    if not made:  # drop
        return Layout(())
    weight = sum(t.nbytes for t in made)
    whole = Layout((Tile(WHOLE, 0, 0, program.whole_bytes, weight),))
    if program.whole_bytes <= share and (program.surveys or weight <= TILE):
        return whole
    tiles: list[Tile] = []
    for item, type in enumerate(made):
        found = cuts(program, len(program.calls), item, share)
        if found is None:
            return whole
        tiles += [Tile(item, lo, hi, cost, sum(span(type, p.role, lo, hi) for p in type.parts)) for lo, hi, cost in found]
    surveys, survey_cost = [], 0
    for k, call in enumerate(program.calls):
        if not call.surveys:
            continue
        ranges = []
        for item in range(len(call.step.takes.items)):
            found = cuts(program, k, item, share, call.scratch)
            if found is None:
                return whole
            ranges += [(item, lo, hi) for lo, hi, _ in found]
            survey_cost = max([survey_cost, *(cost for _, _, cost in found)])
        surveys.append((k, tuple(ranges)))
    return Layout(tuple(tiles), tuple(surveys), survey_cost)


def tiled(program: Program) -> bool:
    """Whether a unit can be cut at all, so that its memory follows the budget and not its size."""
    if program.copies:
        return True
    cut = layout(program, max(1, program.whole_bytes // 8))
    return not cut.whole and max(t.weight for t in cut.tiles) < sum(t.weight for t in cut.tiles)


def describe(program: Program) -> str:
    """The kernel or reference of each step, and how units run: for `plan --steps`."""
    if program.copies:
        return "\n".join([f"{step}: {how}" for step, how in program.how] + ["bytes are copied"])
    way = "runs in tiles" if tiled(program) else f"runs whole, {program.whole_bytes:,} bytes of memory a unit"
    twice = "; reads its sources twice" if program.surveys else ""
    return "\n".join([*(f"{step}: {how}" for step, how in program.how), way + twice])


def cuts(program: Program, stage: int, item: int, share: int, scratch: int = 0) -> list[tuple[int, int, int]] | None:
    """(lo, hi, cost) of tiles that cover an item of a stage, each at most `share` where grains allow; None: no cut is legal.

    scratch: bytes an element that whoever reads the tile needs on top.
    """
    type = program.stages[stage].items[item]
    outer, n, k = rows_of(type.shape)

    def cost(lo: int, hi: int) -> int | None:
        found = program.cost(stage, item, lo, hi)
        return None if found is None else found + scratch * (hi - lo) * k

    def fits(rows: int) -> bool:
        if not legal(type, 0, rows) or sum(span(type, p.role, 0, rows) for p in type.parts) > TILE:
            return False
        found = cost(0, rows)
        return found is not None and found <= share

    def checked(rows: int) -> list[tuple[int, int, int]] | None:
        pieces = [(lo, hi, cost(lo, hi)) for lo, hi in _ranges(outer, n, rows)]
        return None if any(c is None for _, _, c in pieces) else pieces

    total = outer * n
    if total == 0 or fits(total):
        return checked(total)
    if fits(n):
        found = checked(n * _largest(lambda m: fits(m * n), outer))
    else:
        grain = min(grain_of(program, stage), n)
        found = checked(grain * _largest(lambda m: fits(m * grain), n // grain))
    return found or checked(n)


def grain_of(program: Program, stage: int) -> int:
    """Rows that every tile boundary of a stage is a multiple of, so that each call below begins on its own grain."""
    grains = [block_rows(t) for t in program.stages[stage].items]
    for call in program.calls[:stage]:
        grains += [call.grain(i) for i in range(len(call.step.made.items))]
    return math.lcm(*grains)


def block_rows(type: Type) -> int:
    """Rows of a slice that share one row of some part: tiles that are written must not share one."""
    specs = [type.spelling.part(p.role) for p in type.parts]
    return math.lcm(*(s.grid[0].divisor for s in specs if s.grid and s.grid[0].letter == "N"))


def _largest(fits, most: int) -> int:
    """The largest m in 1…most that fits, or 1 where none does."""
    low, high = 1, max(1, most)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _ranges(outer: int, n: int, rows: int) -> Iterator[tuple[int, int]]:
    """Ranges of `rows` flat rows: of whole slices where rows ≥ n, else within each slice."""
    if rows >= n or n == 0:
        for lo in range(0, max(1, outer * n), max(1, rows)):
            yield lo, min(lo + rows, outer * n)
        return
    for start in range(0, outer * n, n):
        for lo in range(start, start + n, rows):
            yield lo, min(lo + rows, start + n)
