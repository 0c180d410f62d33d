"""Rewrites: which steps a program leaves out or hands to a kernel. Each row states the identity that makes it right.

A new kernel is a row here and a function in kernels/; ops and executors do not change. Rows are tried in order at each
step; what no row takes runs by its op's reference.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import frozen

from quantrules.lower.program import Call, Program
from quantrules.ops.base import Step
from quantrules.plan.model import Recipe
from quantrules.types import Type

CONTAINERS = ("u8", "i8", "f4")  # dtypes that say nothing about the bits that they hold


@frozen
class Rewrite:
    """Steps whose ops' names are `pattern` (alternatives by `|`) → calls, or None where the identity does not hold for their types."""

    name: str
    pattern: tuple[str, ...]
    function: Callable[[tuple[Step, ...], str], tuple[Call, ...] | None]

    def fits(self, steps: tuple[Step, ...]) -> bool:
        return len(steps) == len(self.pattern) and all(s.op.name in p.split("|") for s, p in zip(steps, self.pattern))


def same_bytes(a: Type, b: Type) -> bool:
    """Whether each part that `b` has is a part of `a`, byte for byte; only names and dtypes of containers may differ."""
    if (a.format, a.shape, a.layout) != (b.format, b.shape, b.layout):
        return False
    for part in b.parts:
        found, spec = a.part(part.role), b.spelling.part(part.role)
        if found is None or found.nbytes != part.nbytes or a.spelling.part(part.role).inverse != spec.inverse:
            return False
        if found.dtype != part.dtype and not {found.dtype, part.dtype} & set(CONTAINERS):
            return False
        if found.shape != part.shape and "f4" not in (found.dtype, part.dtype) and len(part.shape) > 1:
            return False
    return True


def _no_bytes_move(steps: tuple[Step, ...], backend: str) -> tuple[Call, ...] | None:
    (step,) = steps
    if step.takes.axes == step.made.axes and all(map(same_bytes, step.takes.items, step.made.items)):
        return ()
    return None


def _members_in_place(steps: tuple[Step, ...], backend: str) -> tuple[Call, ...] | None:
    (step,) = steps
    made = step.made.items
    first = step.args.get("dim") in (None, 0) and all(len(t.shape) <= 2 + (step.op.name == "stack") for t in made)
    return (Call(steps, step.op.reference, scratch=0, joins=True),) if first else None


def _moves_rows(steps: tuple[Step, ...], backend: str) -> tuple[Call, ...] | None:
    return (Call(steps, steps[0].op.reference, scratch=0),)


def _decode(steps: tuple[Step, ...], backend: str) -> tuple[Call, ...] | None:
    if backend != "cpu":
        return None
    from quantrules.kernels import cpu

    return (Call(steps, cpu.decode, "kernels.cpu.decode", scratch=0),) if cpu.decodes(steps[-1]) else None


REWRITES = (
    # unpack(x) = x, keep(x) = x, pack(x) = x where the other spelling stores the same bytes in every part
    Rewrite("no_bytes_move", ("unpack|keep|pack",), _no_bytes_move),
    # dequant(x)[n, k] = round(element(codes[n, k]) * (scale · global)): one pass, nothing in between is stored
    Rewrite("decode", ("dequant",), _decode),
    # cat(a, b) = the bytes of a, then those of b; stack the same: members are made where they will lie
    Rewrite("members_in_place", ("cat|stack",), _members_in_place),
    # what only moves rows works in no memory of its own
    Rewrite("moves_rows", ("cat|stack|split|unstack",), _moves_rows),
)


def lower(recipe: Recipe, backend: str = "cpu") -> Program:
    """A typed recipe as a program for one backend: rewrites where they fit, else the ops' references."""
    calls, at = [], 0
    while at < len(recipe.steps):
        for rewrite in REWRITES:
            steps = recipe.steps[at : at + len(rewrite.pattern)]
            if rewrite.fits(steps) and (found := rewrite.function(steps, backend)) is not None:
                break
        else:
            steps = recipe.steps[at : at + 1]
            found = (Call(steps, steps[0].op.reference),)
        calls += found
        at += len(steps)
    stages = (*(c.step.takes for c in calls), recipe.made)
    return Program(recipe, tuple(calls), stages)
