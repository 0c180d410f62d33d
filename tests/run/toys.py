"""Ops and formats of no use but to tests of the runner: bytes in, bytes out, each with one awkward property.

A `blocks` value has codes u8[N, K] and scale u8[N/4, K], one for four rows, and its own byte as a global.
"""

from __future__ import annotations

import numpy as np
from attrs import frozen

from quantrules.checkpoint import Raw, StateDictSource
from quantrules.diagnostics import define
from quantrules.lang.ast import Lit, Pattern, Pipeline, Rule, SourcePattern
from quantrules.names import families
from quantrules.ops.base import Op, Refused, Step
from quantrules.plan.model import Plan, Recipe, Units
from quantrules.types import Axis, Element, Format, Grid, GridDim, Part, Spelling, Type, make_type, rows_of
from quantrules.types import dense as dense_type

define("QR900", "A toy op's refusal")

SPELLED = Spelling("weight", (Part("codes", ".weight", (), None),), dense=".weight")
DENSE = Format("dense", None, (), "codes", (SPELLED,))
BLOCKS = Format("blocks", Element("byte"), (4, 1), ("codes", "scale"), (Spelling("blocks", (
    Part("codes", ".weight", ("u8",), None), Part("scale", ".scale", ("u8",), (GridDim("N", 4), GridDim("K"))),
    Part("global", ".global", ("f32",), ())), dense=".weight"),))  # fmt: skip


def dense(*shape, dtype="u8"):
    return make_type(DENSE, SPELLED, shape, {"codes": dtype})


def blocks(*shape):
    return make_type(BLOCKS, BLOCKS.spellings[0], shape)


def same(type: Type, *shape) -> Type:
    return make_type(type.format, type.spelling, shape, {p.role: p.dtype for p in type.parts})


def matrix(value, role="codes"):
    """A part as a numpy view of its shape (u8 only)."""
    return value.parts[role].reshape(value.type.part(role).shape)


class Toy(Op):
    """One item in, one out, same type."""

    def one(self, x, value):
        return x

    def reference(self, step, x, state, out):
        for a, b in zip(x, out, strict=True):
            if b is not None:
                matrix(b)[...] = self.one(matrix(a), a)


class Add(Toy):
    name = "add"

    def one(self, x, value):
        return x + np.uint8(1)


class Refuse(Toy):
    """Refuses the byte 255, as assert_finite would a NaN."""

    name = "refuse"

    def one(self, x, value):
        bad = np.argwhere(x == 255)
        if len(bad):
            *_, row, column = bad[0]
            raise Refused("QR900", f"{value.name}[{value.start + row}, {column}] is 255")
        return x


class Ramp(Toy):
    """Each row less the first row of its four: right in tiles of multiples of four rows only."""

    name = "ramp"

    def one(self, x, value):
        n = x.shape[-2]
        return x - np.take(x, np.arange(n) // 4 * 4, axis=-2)

    def grain(self, step, item):
        return 4


class Above(Toy):
    """Less the largest byte of all items: has to see everything first."""

    name = "above"
    surveys = True

    def survey(self, step, x, state):
        return max([state or 0, *(int(v.parts["codes"].max(initial=0)) for v in x if v is not None)])

    def reference(self, step, x, state, out):
        for a, b in zip(x, out, strict=True):
            if b is not None:
                matrix(b)[...] = np.uint8(state) - matrix(a)


class Turn(Toy):
    """Rows in reverse: cannot run in tiles."""

    name = "turn"

    def rows(self, step, item, lo, hi):
        return None

    def one(self, x, value):
        return x[..., ::-1, :]


class Cat(Op):
    """Along rows, one slice."""

    name = "cat"

    def grain(self, step, item):
        return 1

    def rows(self, step, item, lo, hi):
        result, at = [], 0
        for type in step.takes.items:
            n = type.shape[0]
            a, b = max(lo, at) - at, min(hi, at + n) - at
            result.append((a, b) if a < b else None)
            at += n
        return tuple(result)

    def reference(self, step, x, state, out):
        for role in out[0].parts:
            out[0].parts[role][:] = np.concatenate([v.parts[role] for v in x if v is not None])


class Stack(Op):
    name = "stack"

    def rows(self, step, item, lo, hi):
        n = step.takes.items[0].shape[0]
        ranges = [(max(lo - e * n, 0), min(hi - e * n, n)) for e in range(len(step.takes.items))]
        return tuple((a, b) if a < b else None for a, b in ranges)

    def reference(self, step, x, state, out):
        for role in out[0].parts:
            out[0].parts[role][:] = np.concatenate([v.parts[role] for v in x if v is not None])


class Unstack(Op):
    name = "unstack"

    def rows(self, step, item, lo, hi):
        n = rows_of(step.takes.items[0].shape)[1]
        return ((item * n + lo, item * n + hi),)

    def reference(self, step, x, state, out):
        n = rows_of(step.takes.items[0].shape)[1]
        whole = x[0].type == step.takes.items[0]
        for e, b in enumerate(out):
            if b is not None:
                source = x[0].parts["codes"]
                b.parts["codes"][:] = source[e * len(b.parts["codes"]) :][: len(b.parts["codes"])] if whole and n else source


class Decode(Op):
    """blocks → dense: code + scale of its four rows; begins anywhere in a block."""

    name = "decode"

    def reference(self, step, x, state, out):
        for a, b in zip(x, out, strict=True):
            if b is not None:
                n, k = matrix(b).shape[-2:]
                scale = matrix(a, "scale").reshape(*matrix(b).shape[:-2], -1, k)
                matrix(b)[...] = matrix(a) + np.take(scale, (np.arange(n) + a.phase) // 4, axis=-2)


class Encode(Op):
    """dense → blocks: the scale is the least of four rows, the global the first byte of all."""

    name = "encode"

    def grain(self, step, item):
        return 4

    surveys = True

    def survey(self, step, x, state):
        return max([state or 0, *(int(v.parts["codes"].max(initial=0)) for v in x if v is not None)])

    def reference(self, step, x, state, out):
        for a, b in zip(x, out, strict=True):
            if b is not None:
                *lead, n, k = matrix(a).shape
                padded = np.full((*lead, -(-n // 4) * 4, k), 255, np.uint8)
                padded[..., :n, :] = matrix(a)
                scale = padded.reshape(*lead, -1, 4, k).min(axis=-2)
                matrix(b, "scale")[...] = scale
                matrix(b)[...] = matrix(a) - np.repeat(scale, 4, axis=-2)[..., :n, :]
                b.parts["global"][:] = np.full(int(np.prod(lead, dtype=int)), state, np.float32).view(np.uint8)


OPS = {cls.name: cls() for cls in (Add, Refuse, Ramp, Above, Turn, Cat, Stack, Unstack, Decode, Encode)}


def recipe(took: Grid, *ops: str, checks=()) -> Recipe:
    """A recipe of toy ops with the obvious types."""
    types, steps = took, []
    for name in ops:
        first = types.items[0]
        if name == "cat":
            made = Grid.one(same(first, sum(t.shape[0] for t in types.items), *first.shape[1:]))
        elif name == "stack":
            made = Grid.one(same(first, len(types.items), *first.shape))
        elif name == "unstack":
            made = Grid((Axis("E", tuple(range(first.shape[0]))),), (dense(*first.shape[1:]),) * first.shape[0])
        elif name == "decode":
            made = types.map(lambda t: dense_type(t, DENSE, "u8"))
        elif name == "encode":
            made = types.map(lambda t: blocks(*t.shape))
        else:
            made = types
        steps.append(Step(OPS[name], {}, types, made))
        types = made
    return Recipe(took, tuple(steps), types, tuple(checks))


@frozen
class Job:
    """One group of units for `plan_of`: n units of a recipe, sources and targets named by templates with {u} and {i}."""

    recipe: Recipe
    n: int = 1
    source: str = "s.{u}.{i}"
    target: str = "t.{u}.{i}"


def members(*types) -> Grid:
    return Grid((Axis("p", tuple(f"m{i}" for i in range(len(types)))),), types) if len(types) > 1 else Grid.one(types[0])


def plan_of(source, *jobs: Job) -> Plan:
    """The plan that binding would make of the jobs."""
    rows = {name: i for i, name in enumerate(source.table.names())}
    return Plan(source.table, tuple(_units(job, rows) for job in jobs), {"config.json": {"model": "toy"}}, rules=("toy.rules",))


def _units(job: Job, rows: dict[str, int]) -> Units:
    took = job.recipe.took.items

    def names(template: str, i: int):
        ((found, _),) = families([template.format(u=u, i=i) for u in range(job.n)])
        return found

    keys = [(job.source + took[i].spelling.part(role).suffix, i) for i, role in job.recipe.slots]
    sources = [[rows[key.format(u=u, i=i)] for key, i in keys] for u in range(job.n)]
    rule = Rule((SourcePattern(Pattern((Lit(job.source),))),), Pipeline(()))
    targets = tuple(names(job.target, i) for i in range(len(job.recipe.made.items)))
    return Units(rule, job.recipe, np.array(sources, np.int32), targets, tuple(names(job.source, i) for i in range(len(took))))


def source_of(*jobs: Job, seed: int = 0, largest: int = 200, config=None) -> StateDictSource:
    """Random bytes for all that the jobs take."""
    random, tensors = np.random.default_rng(seed), {}
    for job in jobs:
        for u in range(job.n):
            for i, type in enumerate(job.recipe.took.items):
                for part in type.parts:
                    key = job.source.format(u=u, i=i) + type.spelling.part(part.role).suffix
                    tensors[key] = Raw(part.dtype, part.shape, random.integers(0, largest, part.nbytes, np.uint8).tobytes())
    return StateDictSource(tensors, config={} if config is None else config)
