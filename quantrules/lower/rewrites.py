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
from quantrules.types import DTYPE_BITS


@frozen
class Rewrite:
    """Steps whose ops' names are `pattern` → calls, or None where the identity does not hold for their types.

    A name of a pattern may be alternatives, "cat|stack", or "*" for any op.
    """

    name: str
    pattern: tuple[str, ...]
    function: Callable[[tuple[Step, ...], str], tuple[Call, ...] | None]

    def fits(self, steps: tuple[Step, ...]) -> bool:
        return len(steps) == len(self.pattern) and all(
            p == "*" or s.op.name in p.split("|") for s, p in zip(steps, self.pattern, strict=True)
        )


def _identity(steps: tuple[Step, ...], backend: str) -> tuple[Call, ...] | None:
    return () if steps[0].op.identity(steps[0]) else None


def _members_in_place(steps: tuple[Step, ...], backend: str) -> tuple[Call, ...] | None:
    (step,) = steps
    takes, made = step.takes.items, step.made.items
    if step.op.name == "stack":
        first = not step.args.get("dim")
    else:  # along the first dimension all others stay
        first = all(t.shape[1:] == made[0].shape[1:] for t in (*takes, *made))
    return (Call(steps, step.op.reference, scratch=0, joins=True),) if first and made else None


def _moves(steps: tuple[Step, ...], backend: str) -> tuple[Call, ...] | None:
    return (Call(steps, steps[0].op.reference, scratch=max(DTYPE_BITS[t.dtype] for t in steps[0].made.items) // 8 or 1),)


def _decode(steps: tuple[Step, ...], backend: str) -> tuple[Call, ...] | None:
    if backend != "cpu":
        return None
    from quantrules.kernels import cpu

    return (Call(steps, cpu.decode, "kernels.cpu.decode", scratch=0),) if cpu.decodes(steps[-1]) else None


REWRITES = (
    # unpack(x) = x, dequant of a dense x = x, pack(x) = x where the other spelling stores the same bytes in every part
    Rewrite("no_bytes_move", ("*",), _identity),
    # dequant(x)[n, k] = round(element(codes[n, k]) * (scale · global)): one pass, nothing in between is stored
    Rewrite("decode", ("dequant",), _decode),
    # cat(a, b) = the bytes of a, then those of b; stack the same: members are made where they will lie
    Rewrite("members_in_place", ("cat|stack",), _members_in_place),
    # what only moves bytes holds one copy of them at most
    Rewrite("moves", ("cat|stack|split|unstack|pack",), _moves),
)


def lower(recipe: Recipe, backend: str = "cpu") -> Program:
    """A typed recipe as a program for one backend: rewrites where they fit, else the ops' references.

    With backend "reference" no kernel is looked for, and so none is imported: enough to see whether units run in tiles.
    """
    calls: list[Call] = []
    how: list[tuple[str, str]] = []
    at = 0
    while at < len(recipe.steps):
        steps, rewrite, found = _first_fit(recipe.steps[at:], backend)
        calls += found
        names = ", ".join(c.name for c in found) or "nothing to do"
        how.append((" | ".join(map(str, steps)), f"{names} ({rewrite})" if rewrite else names))
        at += len(steps)
    stages = (*(c.step.takes for c in calls), recipe.made)
    return Program(recipe, tuple(calls), stages, tuple(how))


def _first_fit(steps: tuple[Step, ...], backend: str) -> tuple[tuple[Step, ...], str, tuple[Call, ...]]:
    """(steps taken, the rewrite's name or "", calls) of the first row that fits at the first of `steps`."""
    for rewrite in REWRITES:
        head = steps[: len(rewrite.pattern)]
        if rewrite.fits(head) and (found := rewrite.function(head, backend)) is not None:
            return head, rewrite.name, found
    return steps[:1], "", (Call(steps[:1], steps[0].op.reference),)
