"""A Program: the few calls that turn the tensors of a unit into its targets, each a kernel or an op's reference.

The types between calls are stages: stage 0 is what is read, stage k what call k makes, the last what is written. A call
is run on whole values or on tiles of flat rows; rows are asked for backwards, from a target to the sources.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from attrs import evolve, field, frozen

from quantrules.ops.base import Step, Value
from quantrules.plan.model import Recipe
from quantrules.types import Grid, Type, flat_rows, part_bytes, rows_of, tileable

# working memory of a reference, bytes an element of its larger side: what eager torch holds in f32 and masks on the way
SCRATCH = 32

Run = Callable[[Step, tuple[Value | None, ...], Any, tuple[Value | None, ...]], None]
Rows = tuple[int, int]


@frozen(eq=False)
class Call:
    """One or more steps done at once by `run`, which has the signature of `Op.reference`.

    name: "reference", or the kernel's. scratch: bytes of working memory an element. joins: the rows of its inputs follow
    each other in its output, so what makes an input may write into the output's buffer.
    """

    steps: tuple[Step, ...]
    run: Run
    name: str = "reference"
    scratch: int = SCRATCH
    joins: bool = False
    step: Step = field(init=False)  # what `run` is given: the last step, from the types that the first takes

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "step", evolve(self.steps[-1], takes=self.steps[0].takes))

    @property
    def surveys(self) -> bool:
        return any(s.op.needs_survey(s) for s in self.steps)

    def grain(self, item: int) -> int:
        """Rows of a slice that tiles of output `item` begin on a multiple of."""
        between = [s.op.grain(s, i) for s in self.steps[:-1] for i in range(len(s.made.items))]
        return math.lcm(self.steps[-1].op.grain(self.steps[-1], item), *between)

    def rows(self, item: int, lo: int, hi: int) -> tuple[Rows | None, ...] | None:
        """Rows of each input behind rows [lo, hi) of output `item`, None where it is not needed; None alone: no tiles."""
        needed: dict[int, Rows] = {item: (lo, hi)}
        for step in reversed(self.steps):
            below: dict[int, Rows] = {}
            for i, (a, b) in needed.items():
                ranges = step.op.rows(step, i, a, b)
                if ranges is None:
                    return None
                for j, r in enumerate(ranges):
                    if r is not None:
                        below[j] = (min(r[0], below[j][0]), max(r[1], below[j][1])) if j in below else r
            needed = below
        return tuple(needed.get(i) for i in range(len(self.step.takes.items)))

    def pieces(self, item: int, lo: int, hi: int, ranges: tuple[Rows | None, ...]) -> bool:
        """Whether the inputs' buffers, one after the other, are the bytes of rows [lo, hi) of the output, in every part."""
        if not self.joins:
            return False
        made, takes = self.step.made.items[item], self.step.takes.items
        for part in made.parts:
            total = 0
            for type, r in zip(takes, ranges, strict=True):
                if r is not None:
                    if (found := type.part(part.role)) is None or found.dtype != part.dtype:
                        return False
                    total += span(type, part.role, *r)
            if total != span(made, part.role, lo, hi):
                return False
        return True


@frozen(eq=False)
class Program:
    """recipe: what it runs. calls: in order. stages: types before the first call and after each, as the next one reads them.

    how: (steps, what runs them), for people.
    """

    recipe: Recipe
    calls: tuple[Call, ...]
    stages: tuple[Grid[Type], ...]
    how: tuple[tuple[str, str], ...] = ()

    @property
    def copies(self) -> bool:
        """Whether the targets are the sources' bytes under other names."""
        return not self.calls

    @property
    def surveys(self) -> bool:
        return any(c.surveys for c in self.calls)

    @property
    def references(self) -> bool:
        """Whether any call needs torch."""
        return any(c.name == "reference" for c in self.calls)

    @property
    def whole_bytes(self) -> int:
        """Memory that a unit takes when it is not run in tiles: the largest call's input, output and working memory."""
        def held(call: Call, before: Grid[Type]) -> int:
            takes, made = call.step.takes.items, call.step.made.items
            elements = max(sum(math.prod(t.shape) for t in takes), sum(math.prod(t.shape) for t in made))
            return sum(t.nbytes for t in (*before.items, *made)) + call.scratch * elements

        return max((held(c, s) for c, s in zip(self.calls, self.stages[:-1], strict=True)), default=0)

    def cost(self, stage: int, item: int, lo: int, hi: int) -> int | None:
        """Bytes held at the peak while rows [lo, hi) of an item of a stage are made; None where these rows are no legal tile."""
        type = self.stages[stage].items[item]
        if not legal(type, lo, hi):
            return None
        own = sum(span(type, p.role, lo, hi) for p in type.parts)
        if stage == 0:
            return own
        call = self.calls[stage - 1]
        ranges = call.rows(item, lo, hi) if on_grain(type, call.grain(item), lo, hi) else None
        if ranges is None:
            return None
        needed = [(i, r) for i, r in enumerate(ranges) if r is not None]
        before = self.stages[stage - 1].items
        costs = [self.cost(stage - 1, i, *r) for i, r in needed]
        if None in costs:
            return None
        sizes = [sum(span(before[i], p.role, *r) for p in before[i].parts) for i, r in needed]
        if call.pieces(item, lo, hi, ranges):  # each input lies in the output's buffer
            return own + max((c - s for c, s in zip(costs, sizes, strict=True)), default=0)
        held = [sum(sizes[:k]) + c for k, c in enumerate(costs)]
        elements = max([(hi - lo) * width(type), sum((r[1] - r[0]) * width(before[i]) for i, r in needed)])
        return max([*held, sum(sizes) + own + call.scratch * elements])


def span(type: Type, role: str, lo: int, hi: int) -> int:
    """Bytes of a part of rows [lo, hi)."""
    a, b = part_bytes(type, role, lo, hi)
    return b - a


def width(type: Type) -> int:
    """Elements of a row."""
    return rows_of(type.shape)[2]


def legal(type: Type, lo: int, hi: int) -> bool:
    """Whether rows [lo, hi) are all rows, or one byte range of every part: rows of one slice, or whole slices."""
    total, n = flat_rows(type.shape), rows_of(type.shape)[1]
    if (lo, hi) == (0, total):
        return True
    return tileable(type) and 0 <= lo < hi <= total and (lo // n == (hi - 1) // n or lo % n == hi % n == 0)


def on_grain(type: Type, grain: int, lo: int, hi: int) -> bool:
    """Whether rows [lo, hi) begin and end on multiples of `grain` rows of a slice, or at its end."""
    n = rows_of(type.shape)[1]
    return n == 0 or lo % n % grain == 0 and (hi % n % grain == 0)
