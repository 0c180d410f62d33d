"""What a run consists of: tasks that make tiles of units, fold surveys, or copy units whose bytes stay as they are.

Tasks are closures; an executor decides when and on which thread they run. They come in the order of the plan, and the
same plan and memory give the same tasks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
from attrs import define, field, frozen

from quantrules.checkpoint import Output, Placing, Source, Targets
from quantrules.diagnostics import Diagnostic, RunError
from quantrules.diagnostics import define as define_code
from quantrules.lower import Layout, Program, Tile, layout, lower
from quantrules.names import HOLE, Names
from quantrules.plan.model import Plan, Units
from quantrules.run.evaluate import Unit
from quantrules.types import flat_rows, part_bytes

TOO_LARGE = define_code("QR610", "A unit needs more memory than the budget")

BATCH = 64 << 20  # bytes of kept units that one task copies
BUFFER = 8 << 20  # bytes in memory where a copy goes through it


@define(eq=False)
class Work:
    """The units of one recipe: how they run, and (base) where their first target stands among all targets of the plan."""

    units: Units
    program: Program
    cut: Layout
    source: Source
    base: int
    slots: list[tuple[int, str]] = field(init=False)  # (item of made, role) of each target of a unit
    unit_bytes: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        made = self.units.recipe.made.items
        self.slots = [(i, p.role) for i, t in enumerate(made) for p in t.parts]
        self.unit_bytes = sum(t.nbytes for t in made)

    def __len__(self) -> int:
        return len(self.units)

    @property
    def weight(self) -> int:
        """Bytes that its tasks write."""
        return len(self) * (self.unit_bytes if self.program.copies else sum(t.weight for t in self.cut.tiles))

    def row(self, unit: int, slot: int) -> int:
        """Which of all targets."""
        return self.base + unit * len(self.slots) + slot

    def writers(self) -> np.ndarray:
        """How many tasks write to each target, in order."""
        items = [t.item for t in self.cut.tiles]
        once = self.program.copies or self.cut.whole
        return np.tile([1 if once else items.count(i) for i, _ in self.slots], len(self))


def works_of(plan: Plan, source: Source, memory: int, jobs: int, backend: str) -> list[Work]:
    """How each recipe of a plan runs; RunError (QR610) for all that the memory does not suffice for."""
    works, base, errors = [], 0, []
    for units in plan.units:
        if not units.recipe.made.items or not len(units):
            continue
        program = lower(units.recipe, backend)
        cut = Layout(()) if program.copies else layout(program, memory // jobs)
        works.append(Work(units, program, cut, source, base))
        base = works[-1].row(len(units), 0)
        cost = max([cut.survey_cost, *(t.cost for t in cut.tiles)])
        if cost > memory:
            way = "cannot run in tiles" if cut.whole else "has no smaller tiles"
            message = f"`{units.target_keys(0)[0][0]}` needs {cost:,} bytes of memory at once, of {memory:,}: its rule {way}"
            errors.append(Diagnostic(TOO_LARGE, message, units.rule.span, count=len(units), help=f"--memory {-(-cost >> 20)}MiB"))
    if errors:
        raise RunError(errors)
    return works


def targets_of(works: Sequence[Work]) -> tuple[Targets, np.ndarray]:
    """All targets as columns, and a number for each unit: what keeps its targets in one shard."""
    names: list[str] = []
    ids: dict[tuple[str, tuple[int, ...]], int] = {}
    kinds, counts = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)]
    for w in works:
        made = w.units.recipe.made.items
        columns = [_filled(w.units.targets[i], made[i].spelling.part(role).suffix) for i, role in w.slots]
        names += [name for unit in zip(*columns, strict=True) for name in unit]
        parts = [made[i].part(role) for i, role in w.slots]
        kinds.append(np.tile([ids.setdefault((p.dtype, p.shape), len(ids)) for p in parts], len(w)).astype(np.int32))
        counts.append(np.full(len(w), len(w.slots)))
    counts = np.concatenate(counts)
    return Targets(names, tuple(ids), np.concatenate(kinds)), np.repeat(np.arange(len(counts)), counts)


def _filled(names: Names, suffix: str) -> list[str]:
    """All names, each with a suffix: one format string for 300,000 of them."""
    pattern = (names.template + suffix).replace("%", "%%").replace(HOLE, "%d")
    return [pattern % tuple(digits) for digits in names.digits.tolist()]


# --------------------------------------------------------------------------------------------------------- the tasks


@frozen(eq=False)
class Task:
    """run: what to do on a thread. cost: bytes of memory; weight: bytes written; rows: the targets that it writes to.

    survey: of a task that folds one, where its future goes; of a tile that needs one, where it is found.
    """

    run: Callable[[], None]
    cost: int = 0
    weight: int = 0
    rows: Sequence[int] = ()
    survey: list[Future] | None = None


def tasks(works: Sequence[Work], placing: Placing, output: Output, stop: threading.Event) -> Iterator[Task]:
    """All tasks of a run; those that copy look at `stop` between tensors."""
    for w in works:
        if not w.program.copies:
            yield from _unit_tasks(w, placing, output)
            continue
        step = max(1, BATCH // max(1, w.unit_bytes))
        for lo in range(0, len(w), step):
            hi = min(lo + step, len(w))
            rows = range(w.row(lo, 0), w.row(hi, 0))
            yield Task(_copier(w, lo, hi, placing, output, stop), BUFFER, (hi - lo) * w.unit_bytes, rows)


def _unit_tasks(w: Work, placing: Placing, output: Output) -> Iterator[Task]:
    """Tiles of each unit. A survey that they need comes one unit ahead, so that no thread waits for it."""
    ahead: dict[int, tuple[Unit, list[Future]]] = {}
    for index in range(-1, len(w)):
        if index + 1 < len(w):
            unit, survey = ahead[index + 1] = Unit(w.units, index + 1, w.program, w.source), []
            if w.cut.surveys:
                yield Task(_noted(unit, partial(unit.survey, w.cut)), w.cut.survey_cost, survey=survey)
        if index >= 0:
            unit, survey = ahead.pop(index)
            for tile in w.cut.tiles:
                rows = [w.row(index, s) for s, (i, _) in enumerate(w.slots) if tile.whole or i == tile.item]
                run = _maker(w, unit, tile, placing, output)
                yield Task(run, tile.cost, tile.weight, rows, survey if w.cut.surveys else None)


def _maker(w: Work, unit: Unit, tile: Tile, placing: Placing, output: Output) -> Callable[[], None]:
    """Makes a tile and writes it. Parts that cover all rows are written by each tile, always with the same bytes."""
    made = w.units.recipe.made.items

    def make() -> None:
        if tile.whole:
            pieces = [(i, value, 0, flat_rows(made[i].shape)) for i, value in enumerate(unit.make_all())]
        else:
            value = unit.make(len(unit.program.calls), tile.item, tile.lo, tile.hi)
            pieces = [(tile.item, value, tile.lo, tile.hi)]
        for item, value, lo, hi in pieces:
            for s, (i, role) in enumerate(w.slots):
                if i == item:
                    row, (at, _) = w.row(unit.index, s), part_bytes(made[item], role, lo, hi)
                    output.write_at(int(placing.shard[row]), int(placing.offset[row]) + at, value.parts[role])

    return _noted(unit, make)


def _noted(unit: Unit, run: Callable[[], None]) -> Callable[[], None]:
    """Whatever goes wrong names the target."""

    def noted() -> None:
        try:
            run()
        except Exception as error:
            error.add_note(f"while making {unit.units.target_keys(unit.index)[0][0]}")
            raise

    return noted


def _copier(w: Work, lo: int, hi: int, placing: Placing, output: Output, stop: threading.Event) -> Callable[[], None]:
    """Copies the tensors of units [lo, hi) as they are."""
    columns = {slot: column for column, slot in enumerate(w.units.recipe.slots)}

    def copy() -> None:
        for unit in range(lo, hi):
            for s, slot in enumerate(w.slots):
                if stop.is_set():
                    return
                row, target = int(w.units.sources[unit, columns[slot]]), w.row(unit, s)
                _copy(w.source, row, int(placing.shard[target]), int(placing.offset[target]), int(placing.nbytes[target]), output)

    return copy


def _copy(source: Source, row: int, shard: int, offset: int, count: int, output: Output) -> None:
    opened = source.opened(row)
    if opened is not None:
        with opened as (fd, at):
            output.copy(fd, at, shard, offset, count, source.table.files[source.table.file[row]])
        return
    buffer = np.empty(min(count, BUFFER), np.uint8)
    for lo in range(0, count, BUFFER):
        view = buffer[: min(BUFFER, count - lo)]
        source.read_into(row, lo, lo + len(view), view)
        output.write_at(shard, offset + lo, view)
