"""Tiles give the bits of whole values; what cannot be cut is run whole; memory is as said."""

import random

import numpy as np
import pytest

from quantrules.lower import layout, lower, tiled
from quantrules.lower.tiles import WHOLE
from quantrules.run.evaluate import Unit
from quantrules.types import part_bytes
from tests.run.toys import Job, blocks, dense, members, plan_of, recipe, source_of

RECIPES = {
    "one row after the other": recipe(members(dense(40, 3)), "add"),
    "a vector": recipe(members(dense(50)), "cat"),
    "steps on a grain": recipe(members(dense(41, 3)), "add", "ramp"),
    "members of unequal rows": recipe(members(dense(12, 3), dense(20, 3), dense(7, 3)), "add", "cat"),
    "a grain after unequal members": recipe(members(dense(12, 3), dense(20, 3), dense(7, 3)), "cat", "ramp"),
    "a grain before members that it fits": recipe(members(dense(12, 3), dense(20, 3), dense(7, 3)), "ramp", "cat"),
    "a grain before members that it does not fit": recipe(members(dense(10, 3), dense(20, 3)), "ramp", "cat"),
    "a stack": recipe(members(*[dense(12, 3)] * 5), "add", "stack"),
    "a stack of decoded members": recipe(members(*[blocks(13, 3)] * 5), "decode", "stack"),
    "decoded, then another grain": recipe(members(blocks(10, 3), blocks(14, 3)), "decode", "cat", "ramp"),
    "slices": recipe(members(dense(5, 9, 3)), "ramp"),
    "unstacked slices": recipe(members(dense(5, 9, 3)), "unstack", "ramp"),
    "the largest of all": recipe(members(dense(12, 3), dense(20, 3)), "above", "cat"),
    "two surveys": recipe(members(dense(12, 3), dense(20, 3)), "above", "cat", "add", "above"),
    "encoded": recipe(members(dense(37, 3)), "encode"),
    "encoded slices": recipe(members(dense(3, 10, 2)), "encode"),
    "encoded again": recipe(members(blocks(9, 3), blocks(15, 3)), "decode", "cat", "encode"),
    "rows in reverse": recipe(members(dense(40, 3)), "turn", "add"),
    "no rows": recipe(members(dense(0, 3)), "add"),
    "no columns": recipe(members(dense(6, 0)), "add"),
}
WHOLE_ONLY = {"rows in reverse", "a grain before members that it does not fit"}


def unit_of(recipe):
    job = Job(recipe)
    source = source_of(job, seed=1)
    return Unit(plan_of(source, job).units[0], 0, lower(recipe), source)


def assembled(unit, cut):
    """The targets' parts, put together from a layout's tiles in a random order."""
    if cut.whole:
        return [v.parts for v in unit.make_all()]
    unit.survey(cut)
    made = [{p.role: np.full(p.nbytes, 0xEE, np.uint8) for p in t.parts} for t in unit.units.recipe.made.items]
    for tile in random.Random(0).sample(cut.tiles, len(cut.tiles)):
        value = unit.make(len(unit.program.calls), tile.item, tile.lo, tile.hi)
        for role, data in value.parts.items():
            a, b = part_bytes(unit.units.recipe.made.items[tile.item], role, tile.lo, tile.hi)
            made[tile.item][role][a:b] = data
    return made


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("share", [1, 300, 1000, 3000, 1 << 30])
def test_tiles_give_the_bits_of_whole_values(name, share, monkeypatch):
    monkeypatch.setattr("quantrules.lower.tiles.TILE", 10 if share < 1 << 20 else 1 << 24)
    unit = unit_of(RECIPES[name])
    whole = [v.parts for v in unit.make_all()]
    cut = layout(unit.program, share)
    for a, b in zip(whole, assembled(unit, cut), strict=True):
        for role in a:
            np.testing.assert_array_equal(a[role], b[role], role)


@pytest.mark.parametrize("name", RECIPES)
def test_a_program_says_whether_it_runs_in_tiles(name):
    program = lower(RECIPES[name])
    if "no " not in name:
        assert tiled(program) == (name not in WHOLE_ONLY)


@pytest.mark.parametrize("name", sorted(set(RECIPES) - WHOLE_ONLY))
def test_tiles_cover_each_row_of_each_target_once(name, monkeypatch):
    monkeypatch.setattr("quantrules.lower.tiles.TILE", 10)
    made = RECIPES[name].made.items
    for share in (1, 200, 500, 2000):
        cut = layout(lower(RECIPES[name]), share)
        if cut.whole:
            continue
        for item, type in enumerate(made):
            ranges = sorted((t.lo, t.hi) for t in cut.tiles if t.item == item)
            assert [lo for lo, _ in ranges] == [0] + [hi for _, hi in ranges[:-1]]
            assert ranges[-1][1] == int(np.prod(type.shape[:-1])) if len(type.shape) > 1 else type.shape[0]


def test_a_unit_that_fits_is_one_tile():
    cut = layout(lower(RECIPES["a stack"]), 1 << 30)
    assert [t.item for t in cut.tiles] == [WHOLE]


def test_members_are_made_where_they_lie_in_the_output():
    """A stack of decoded members holds one output tile and one member's codes, not two copies."""
    program = lower(recipe(members(*[dense(1000, 1000)] * 8), "stack"))
    assert program.cost(1, 0, 0, 8000) == 8_000_000
    copying = lower(recipe(members(*[dense(1000, 1000)] * 8), "above"))
    assert copying.cost(1, 0, 0, 1000) > 2_000_000


@pytest.mark.parametrize("share", [2_000, 20_000, 200_000])
def test_no_tile_holds_more_than_its_share(share):
    """Where the smallest tile fits at all."""
    for name in set(RECIPES) - WHOLE_ONLY - {"no rows", "no columns"}:
        cut = layout(lower(RECIPES[name]), share)
        assert all(t.cost <= share for t in cut.tiles), name
