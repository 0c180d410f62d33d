"""Runs a plan on this machine: tasks on a pool of threads, within a memory budget, written by position.

The main thread starts tasks in plan order and counts what each shard still lacks; threads share nothing but the output.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from attrs import frozen

from quantrules.checkpoint import Output, Placing, Source, place
from quantrules.checkpoint.write import refuse_sources
from quantrules.diagnostics import Diagnostic, RunError
from quantrules.plan.model import Plan
from quantrules.run.manifest import manifest
from quantrules.run.preflight import preflight
from quantrules.run.tasks import Task, Work, targets_of, tasks, works_of

LOG = logging.getLogger("quantrules")
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

    memory: bytes of buffers of all tasks at once. jobs: threads, as many as cores unless given. progress: called with
    (bytes done, bytes in all, "check" | "write"). Raises PlanError, RunError or CheckpointError; whatever it raises,
    nothing that looks like a checkpoint is left.
    """
    plan.raise_for_errors()
    refuse_sources(Path(os.path.realpath(out)), [source])  # Output does so too; here before values are read, and for a dry run
    progress = progress or (lambda done, total, phase: None)
    jobs = jobs or len(os.sched_getaffinity(0))
    works = works_of(plan, source, memory, jobs, backend)
    placing = place(*targets_of(works), shard_size, plan.metadata)
    total = sum(w.weight for w in works)
    LOG.info("%d units, %d bytes to write in %d files; checking values", sum(map(len, works)), placing.nbytes.sum(), len(placing.files))
    progress(0, total, "check")
    found = preflight(plan, source, allow_nonfinite=allow_nonfinite, jobs=jobs)
    if errors := [d for d in found if d.severity == "error"]:
        raise RunError(errors)
    result = Result(Path(out), placing.files, len(placing.shard), int(placing.nbytes.sum()), tuple(found))
    if dry_run:
        return result
    progress(0, total, "write")
    sides, configs = source.side_files(), plan.config_files
    with Output(out, placing, sides=sides, configs=configs, sources=[source], overwrite=overwrite) as output:
        with _threads_of_torch(jobs, any(w.program.references for w in works)):
            _run(works, placing, output, memory, jobs, lambda done: progress(done, total, "write"))
        source.recheck()  # a file that is written to while it is open would go unnoticed
        output.finish(manifest(plan))
    LOG.info("%s is complete", out)
    return result


def _run(works: list[Work], placing: Placing, output: Output, memory: int, jobs: int, progress: Callable[[int], None]) -> None:
    """Run all tasks; a shard is finished as soon as its last target is."""
    lacking = np.zeros(len(placing.files), np.int64)  # tasks that have still to write into each shard
    for w in works:
        np.add.at(lacking, placing.shard[w.row(0, 0) : w.row(len(w), 0)], w.writers())
    stop, flying, held, done = threading.Event(), {}, 0, 0
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="quantrules")

    def start(task: Task) -> None:
        nonlocal held
        held += task.cost
        future = pool.submit(task.run)
        flying[future] = task
        if task.survey is not None and not task.rows:
            task.survey.append(future)

    def settle(awaited: Future | None = None) -> None:
        """Wait until a task ends (or the given one), raise what it raised, and finish shards that are complete."""
        nonlocal held, done
        ended, _ = wait([awaited] if awaited else flying, return_when=FIRST_COMPLETED)
        for future in ended:
            future.result()
            task = flying.pop(future)
            held, done = held - task.cost, done + task.weight
            shards, counts = np.unique(placing.shard[np.asarray(task.rows, np.int64)], return_counts=True)
            lacking[shards] -= counts
            for shard in shards[lacking[shards] == 0].tolist():
                LOG.debug("%s has all its tensors", placing.files[shard])
                start(Task(lambda shard=shard: output.finish_shard(shard)))
            if task.weight:
                progress(done)

    try:
        for task in tasks(works, placing, output, stop):
            if task.survey and task.survey[0] in flying:
                settle(task.survey[0])
            while flying and (held + task.cost > memory or len(flying) > jobs):
                settle()
            start(task)
        while flying:
            settle()
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
