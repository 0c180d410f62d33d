"""Runs a plan on this machine: tasks on a pool of threads, within a memory budget, written by position.

A task is a tile of a unit, a survey that has to come before a unit's tiles, or a run of units whose bytes are copied. The
main thread starts tasks in plan order and counts what each shard still lacks; nothing else is shared but the output.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from attrs import define, field, frozen

from quantrules.checkpoint import Output, Placing, Source, Targets, place
from quantrules.diagnostics import Diagnostic, RunError
from quantrules.diagnostics import define as define_code
from quantrules.lower import Layout, Program, Tile, layout, lower
from quantrules.ops.base import Value
from quantrules.plan.model import Plan, Units
from quantrules.run.evaluate import Unit
from quantrules.run.manifest import manifest
from quantrules.run.preflight import preflight
from quantrules.types import part_bytes

TOO_LARGE = define_code("QR610", "A unit needs more memory than the budget")

BATCH = 64 << 20  # bytes of kept units that one task copies
BUFFER = 8 << 20  # bytes in memory where a copy goes through it

Progress = Callable[[int, int, str], None]


@frozen
class Result:
    """What a run wrote, or with dry_run would write. warnings: what preflight found that is no error."""

    path: Path
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    warnings: tuple[Diagnostic, ...] = ()


def execute(plan: Plan, source: Source, out: str | os.PathLike, *, memory: int = 2 << 30, jobs: int | None = None,
            shard_size: int = 5_000_000_000, progress: Progress | None = None, overwrite: bool = False, dry_run: bool = False,
            allow_nonfinite: bool = False, backend: str = "cpu") -> Result:  # fmt: skip
    """Write the checkpoint that `plan` makes of `source` into the directory `out`.

    memory: bytes of buffers of all tasks at once. progress: called with (bytes done, bytes in all, "check" | "write").
    Raises PlanError, RunError or CheckpointError; whatever it raises, nothing that looks like a checkpoint is left.
    """
    plan.raise_for_errors()
    progress = progress or (lambda done, total, phase: None)
    jobs = jobs or len(os.sched_getaffinity(0))
    works = _works(plan, source, memory, jobs, backend)
    placing = place(_targets(works), _groups(works), shard_size, plan.metadata)
    total = sum(w.weight for w in works)
    progress(0, total, "check")
    found = preflight(plan, source, allow_nonfinite=allow_nonfinite, jobs=jobs)
    if errors := [d for d in found if d.severity == "error"]:
        raise RunError(errors)
    result = Result(Path(out), placing.files, len(placing.shard), int(placing.nbytes.sum()), tuple(found))
    if dry_run:
        return result
    progress(0, total, "write")
    with Output(out, placing, sides=source.side_files(), configs=plan.config_files, sources=[source], overwrite=overwrite) as output:
        with _threads_of_torch(jobs, any(w.program.references for w in works)):
            _run(works, placing, output, memory, jobs, lambda done: progress(done, total, "write"))
        output.finish(manifest(plan))
    return result


# ---------------------------------------------------------------------------------------------------------- the work


@define(eq=False)
class _Work:
    """The units of one recipe: how they run, and where their first target stands among all targets."""

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
        return len(self) * (self.unit_bytes if self.program.copies else sum(t.weight for t in self.cut.tiles))

    def row(self, unit: int, slot: int) -> int:
        """Which of all targets."""
        return self.base + unit * len(self.slots) + slot

    def written(self) -> np.ndarray:
        """How many tasks write each target of a unit."""
        items = [t.item for t in self.cut.tiles]
        return np.array([1 if self.program.copies or self.cut.whole else items.count(i) for i, _ in self.slots])


def _works(plan: Plan, source: Source, memory: int, jobs: int, backend: str) -> list[_Work]:
    works, base, errors = [], 0, []
    for units in plan.units:
        if not units.recipe.made.items or not len(units):
            continue
        program = lower(units.recipe, backend)
        cut = Layout(()) if program.copies else layout(program, memory // jobs)
        works.append(_Work(units, program, cut, source, base))
        base += len(units) * len(works[-1].slots)
        cost = max([t.cost for t in cut.tiles] + [cut.survey_cost])
        if cost > memory:
            way = "cannot run in tiles" if cut.whole else "has tiles that are too large"
            key = units.target_keys(0)[0][0]
            message = f"`{key}` needs {cost:,} bytes of memory at once, of {memory:,}: its rule {way}"
            errors.append(Diagnostic(TOO_LARGE, message, units.rule.span, count=len(units), help=f"--memory {-(-cost >> 20)}MiB"))
    if errors:
        raise RunError(errors)
    return works


def _targets(works: list[_Work]) -> Targets:
    names: list[str] = []
    ids: dict[tuple[str, tuple[int, ...]], int] = {}
    kinds = []
    for w in works:
        made = w.units.recipe.made.items
        columns = []
        for i, role in w.slots:
            suffix = made[i].spelling.part(role).suffix
            columns.append([w.units.targets[i][u] + suffix for u in range(len(w))])
        names += [name for unit in zip(*columns, strict=True) for name in unit]
        part_kinds = [ids.setdefault((p.dtype, p.shape), len(ids)) for i, role in w.slots for p in (made[i].part(role),)]
        kinds.append(np.tile(np.array(part_kinds, np.int32), len(w)))
    return Targets(names, tuple(ids), np.concatenate(kinds) if kinds else np.zeros(0, np.int32))


def _groups(works: list[_Work]) -> np.ndarray:
    """A number for each unit: what keeps its targets in one shard."""
    counts = [len(w.slots) for w in works for _ in range(len(w))]
    return np.repeat(np.arange(len(counts)), counts)


# --------------------------------------------------------------------------------------------------------- the tasks


@frozen(eq=False)
class _Task:
    """run: what to do on a thread. cost: bytes of memory; weight: bytes written; rows: targets that it writes (to)."""

    run: Callable[[], None]
    cost: int = 0
    weight: int = 0
    rows: tuple[int, ...] | range = ()
    after: Future | None = None
    begins: list | None = None  # takes the future of a survey


def _tasks(works: list[_Work], placing: Placing, output: Output, stop: threading.Event) -> Iterator[_Task]:
    for w in works:
        if w.program.copies:
            step = max(1, BATCH // max(1, w.unit_bytes))
            for lo in range(0, len(w), step):
                hi = min(lo + step, len(w))
                rows = range(w.row(lo, 0), w.row(hi, 0))
                yield _Task(_copier(w, lo, hi, placing, output, stop), BUFFER, (hi - lo) * w.unit_bytes, rows)
        else:
            yield from _unit_tasks(w, placing, output)


def _unit_tasks(w: _Work, placing: Placing, output: Output) -> Iterator[_Task]:
    """Tiles of each unit; where they need a survey, it starts one unit ahead."""
    units: dict[int, tuple[Unit, list[Future]]] = {}

    def begin(index: int) -> Iterator[_Task]:
        if index < len(w):
            unit, survey = units[index] = Unit(w.units, index, w.program, w.source), []
            if w.cut.surveys:
                yield _Task(_noted(unit, lambda: unit.survey(w.cut)), w.cut.survey_cost, begins=survey)

    yield from begin(0)
    for index in range(len(w)):
        yield from begin(index + 1)
        unit, survey = units.pop(index)
        for tile in w.cut.tiles:
            rows = tuple(w.row(index, s) for s, (i, _) in enumerate(w.slots) if tile.whole or i == tile.item)
            run = _maker(w, unit, tile, placing, output)
            yield _Task(_noted(unit, run), tile.cost, tile.weight, rows, after=survey[0] if survey else None)


def _noted(unit: Unit, run: Callable[[], None]) -> Callable[[], None]:
    def noted() -> None:
        try:
            run()
        except Exception as error:
            error.add_note(f"while making {unit.units.target_keys(unit.index)[0][0]}")
            raise

    return noted


def _maker(w: _Work, unit: Unit, tile: Tile, placing: Placing, output: Output) -> Callable[[], None]:
    """Makes a tile and writes it. Parts that cover all rows are written by each tile, always with the same bytes."""

    def put(item: int, value: Value, lo: int, hi: int) -> None:
        for s, (i, role) in enumerate(w.slots):
            if i == item:
                row = w.row(unit.index, s)
                at = part_bytes(w.units.recipe.made.items[item], role, lo, hi)[0] if not tile.whole else 0
                output.write_at(int(placing.shard[row]), int(placing.offset[row]) + at, value.parts[role])

    def make() -> None:
        if tile.whole:
            for item, value in enumerate(unit.make_all()):
                put(item, value, 0, 0)
        else:
            put(tile.item, unit.make(len(unit.program.calls), tile.item, tile.lo, tile.hi), tile.lo, tile.hi)

    return make


def _copier(w: _Work, lo: int, hi: int, placing: Placing, output: Output, stop: threading.Event) -> Callable[[], None]:
    """Copies the tensors of units [lo, hi) as they are."""
    slots = {slot: column for column, slot in enumerate(w.units.recipe.slots)}
    columns = [slots[slot] for slot in w.slots]

    def copy() -> None:
        for unit in range(lo, hi):
            for s, column in enumerate(columns):
                if stop.is_set():
                    return
                row, target = int(w.units.sources[unit, column]), w.row(unit, s)
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


# --------------------------------------------------------------------------------------------------------- the threads


def _run(works: list[_Work], placing: Placing, output: Output, memory: int, jobs: int, progress: Callable[[int], None]) -> None:
    """Run all tasks; shards are finished as their last target is."""
    lacking = np.zeros(len(placing.files), np.int64)  # tasks that have still to write into each shard
    for w in works:
        rows = slice(w.row(0, 0), w.row(len(w), 0))
        np.add.at(lacking, placing.shard[rows], np.tile(w.written(), len(w)))
    stop, flying, held, done = threading.Event(), {}, 0, 0
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="quantrules")

    def settle(everything: bool = False, only: Future | None = None) -> None:
        """Wait for a task to end, or for all; raise what it raised."""
        nonlocal held, done
        while flying:
            ended, _ = wait([only] if only else flying, return_when=FIRST_COMPLETED)
            for future in ended:
                task = flying.pop(future, None)
                future.result()
                if task is None:
                    continue
                held, done = held - task.cost, done + task.weight
                shards, counts = np.unique(placing.shard[list(task.rows)], return_counts=True)
                lacking[shards] -= counts
                for shard in shards[lacking[shards] == 0].tolist():
                    start(_Task(lambda shard=shard: output.finish_shard(shard)))
                if task.weight:
                    progress(done)
            if not everything:
                return

    def start(task: _Task) -> None:
        nonlocal held
        held += task.cost
        future = pool.submit(task.run)
        flying[future] = task
        if task.begins is not None:
            task.begins.append(future)

    try:
        for task in _tasks(works, placing, output, stop):
            if task.after is not None and not task.after.done():
                settle(only=task.after)
            while flying and (held + task.cost > memory or len(flying) > jobs):
                settle()
            start(task)
        settle(everything=True)
    finally:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _threads_of_torch(jobs: int, needed: bool) -> Iterator[None]:
    """While `jobs` threads run references, each has its share of the cores and no more."""
    if not needed:
        yield
        return
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(max(1, before // jobs))
    try:
        yield
    finally:
        torch.set_num_threads(before)
