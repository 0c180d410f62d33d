"""Runs a program on one unit: rows of a target are asked for, and the rows behind them are read and computed on the way.

Buffers live as long as the call that reads them. An executor decides which rows, on which thread, and where they go.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from attrs import define, field

from quantrules.checkpoint import Source
from quantrules.diagnostics import Diagnostic, RunError
from quantrules.lower.program import Call, Program, span
from quantrules.lower.tiles import Layout
from quantrules.ops.base import Refused, Value, phase_of
from quantrules.plan.model import Units
from quantrules.types import Type, flat_rows, part_bytes, tile

PAGE = 4096


@define(eq=False)
class Unit:
    """Unit `index` of `units`, being run. states: what surveys found, by call."""

    units: Units
    index: int
    program: Program
    source: Source
    states: dict[int, Any] = field(factory=dict)
    rows: dict[tuple[int, str], int] = field(init=False)  # (item of took, role) -> row of the source's table

    def __attrs_post_init__(self) -> None:
        self.rows = dict(zip(self.units.recipe.slots, self.units.sources[self.index].tolist(), strict=True))

    def name(self, stage: int, item: int) -> str:
        """What to call an item of a stage in messages: the source's path while there is one item for each, else the target's."""
        count = len(self.program.stages[stage].items)
        if count == len(self.units.paths):
            return self.units.paths[item][self.index]
        return self.units.targets[item if count == len(self.units.targets) else 0][self.index]

    def read(self, item: int, lo: int, hi: int, into: dict[str, np.ndarray] | None = None) -> Value:
        """Rows [lo, hi) of source `item`, into the given buffers or fresh ones."""
        type, stored = self.program.stages[0].items[item], self.units.recipe.took.items[item]
        value = empty(type, lo, hi, self.name(0, item), into)
        for role, buffer in value.parts.items():
            a, b = part_bytes(stored, role, lo, hi)
            self.source.read_into(self.rows[item, role], a, b, buffer)
        return value

    def make(self, stage: int, item: int, lo: int, hi: int, into: dict[str, np.ndarray] | None = None) -> Value:
        """Rows [lo, hi) of an item of a stage, in the given buffers or fresh ones."""
        if stage == 0:
            return self.read(item, lo, hi, into)
        call, type = self.program.calls[stage - 1], self.program.stages[stage].items[item]
        takes, made, name = call.step.takes.items, call.step.made.items, self.name(stage, item)
        ranges = call.rows(item, lo, hi)
        if call.pieces(item, lo, hi, ranges):  # what makes an input writes it where it lies in the output
            out = empty(made[item], lo, hi, name, into)
            at = dict.fromkeys(out.parts, 0)
            for i, r in enumerate(ranges):
                if r is not None:
                    ends = {role: a + span(takes[i], role, *r) for role, a in at.items()}
                    self.make(stage - 1, i, *r, {role: out.parts[role][a : ends[role]] for role, a in at.items()})
                    at = ends
        else:
            x = tuple(self.make(stage - 1, i, *r) if r is not None else None for i, r in enumerate(ranges))
            out = empty(made[item], lo, hi, name, into)
            self.call(call, x, self.states.get(stage - 1), only(item, out, len(made)))
        return relabel(out, type, lo, hi)

    def make_all(self) -> list[Value]:
        """All targets, whole: for recipes that cannot run in tiles, and small units."""
        program = self.program
        values = [self.read(i, 0, flat_rows(t.shape)) for i, t in enumerate(program.stages[0].items)]
        for k, call in enumerate(program.calls):
            state = self.survey_tile(call, tuple(values), None) if call.surveys else None
            out = tuple(Value.empty(t, name=self.name(k + 1, i)) for i, t in enumerate(call.step.made.items))
            ranges = [call.rows(i, 0, flat_rows(t.shape)) for i, t in enumerate(call.step.made.items)]
            if None in ranges:
                self.call(call, tuple(values), state, out)
            else:  # one output after the other, each with its rows only, as in tiles
                for i, r in enumerate(ranges):
                    x = tuple(v.rows(t, *at) if at else None for v, t, at in zip(values, call.step.takes.items, r, strict=True))
                    self.call(call, x, state, only(i, out[i], len(out)))
            values = [relabel(v, t, 0, flat_rows(t.shape)) for v, t in zip(out, program.stages[k + 1].items, strict=True)]
        return values

    def survey(self, layout: Layout) -> None:
        """Fold the inputs of every surveying call, tile by tile; later surveys see what earlier ones found."""
        for k, ranges in layout.surveys:
            call, state = self.program.calls[k], None
            for item, lo, hi in ranges:
                x = only(item, self.make(k, item, lo, hi), len(call.step.takes.items))
                state = self.survey_tile(call, x, state)
            self.states[k] = state

    def survey_tile(self, call: Call, x: tuple[Value | None, ...], state: Any) -> Any:
        try:
            return call.step.op.survey(call.step, x, state)
        except Refused as refused:
            raise self.refusal(call, refused) from None

    def call(self, call: Call, x: tuple[Value | None, ...], state: Any, out: tuple[Value | None, ...]) -> None:
        try:
            call.run(call.step, x, state, out)
        except Refused as refused:
            raise self.refusal(call, refused) from None

    def refusal(self, call: Call, refused: Refused) -> RunError:
        """The error for a value that an op refuses, with the step's place in the rules and the target."""
        note = f"while making {self.units.target_keys(self.index)[0][0]}"
        return RunError(Diagnostic(refused.code, str(refused), call.step.span, refused.label, (note,), refused.help))


def empty(type: Type, lo: int, hi: int, name: str, into: dict[str, np.ndarray] | None) -> Value:
    """A value for rows [lo, hi) of `type` in the buffers that are given, and fresh ones for other parts."""
    cut, given = tile(type, lo, hi), into or {}
    parts = {p.role: given[p.role] if p.role in given else paged(p.nbytes) for p in cut.parts}
    return Value(cut, parts, phase_of(type, lo), lo, name)


def paged(size: int) -> np.ndarray:
    """u8[size] that begins on a page, as the data of a shard does: what direct I/O asks for. Small ones need not."""
    if size < PAGE:
        return np.empty(size, np.uint8)
    room = np.empty(size + PAGE, np.uint8)
    start = -room.ctypes.data % PAGE
    return room[start : start + size]


def only(item: int, value: Value, count: int) -> tuple[Value | None, ...]:
    """`count` items, of which one is there."""
    return tuple(value if i == item else None for i in range(count))


def relabel(value: Value, type: Type, lo: int, hi: int) -> Value:
    """The same bytes as rows [lo, hi) of `type`, which may leave parts out."""
    cut = tile(type, lo, hi)
    if cut == value.type:
        return value
    return Value(cut, {p.role: value.parts[p.role] for p in cut.parts}, value.phase, lo, value.name)
