"""The stream gives whole tensors in plan order, the same whatever the memory."""

import pytest
import torch

from quantrules.checkpoint import StateDictSource
from quantrules.diagnostics import RunError
from quantrules.plan.model import Recipe
from quantrules.run import stream as room
from quantrules.run.stream import in_memory as run
from quantrules.types import Axis, Grid
from tests.run.toys import Job, blocks, dense, members, plan_of, recipe, source_of


def test_the_stream_is_in_plan_order_and_owned():
    kept = Job(recipe(members(dense(6, 2))), 2, "a.{u}.{i}", "b.{u}")
    joined = Job(recipe(members(dense(4, 2), dense(2, 2)), "cat"), 1, "c.{i}", "d")
    tensors = {f"a.{u}.0.weight": torch.full((6, 2), u, dtype=torch.uint8) for u in range(2)}
    tensors |= {f"c.{i}.weight": torch.full((n, 2), 7 + i, dtype=torch.uint8) for i, n in enumerate((4, 2))}
    source = StateDictSource(tensors)
    found = list(room.stream(plan_of(source, kept, joined), source))
    assert [name for name, _ in found] == ["b.0.weight", "b.1.weight", "d.weight"]
    assert torch.equal(found[2][1], torch.cat([tensors["c.0.weight"], tensors["c.1.weight"]]))
    found[0][1].fill_(9)
    assert tensors["a.0.0.weight"].max() == 0  # what was given out is the taker's, not the source's


@pytest.mark.parametrize("memory", [1, 100, 1 << 20])
def test_memory_changes_no_bit(memory, monkeypatch):
    job = Job(recipe(members(blocks(9, 3), blocks(15, 3)), "decode", "cat", "encode"), 3)
    source = source_of(job)
    expected = run(plan_of(source, job), source)
    monkeypatch.setattr(room, "MEMORY", memory)
    monkeypatch.setattr("quantrules.lower.tiles.TILE", 10 * memory)
    for name, tensor in room.stream(plan_of(source, job), source):
        assert torch.equal(tensor, expected[name]), name


def test_a_refused_value_names_key_and_index():
    job = Job(recipe(members(dense(5, 2)), "add", "refuse"), 1, "layers.3.x")
    tensor = torch.zeros(5, 2, dtype=torch.uint8)
    tensor[3, 1] = 254
    source = StateDictSource({"layers.3.x.weight": tensor})
    with pytest.raises(RunError) as error:
        list(room.stream(plan_of(source, job), source))
    assert error.value.diagnostics[0].message == "layers.3.x[3, 1] is 255"
    assert error.value.diagnostics[0].notes == ("while making t.0.0.weight",)


def test_a_dropped_tensor_is_not_streamed():
    job = Job(Recipe(Grid.one(dense(2, 2)), (), Grid((Axis("", ()),), ())))
    source = source_of(job)
    assert list(room.stream(plan_of(source, job), source)) == []
