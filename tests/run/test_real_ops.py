"""Tiles give the bits of whole values, for the ops and formats that there are: random bytes, rows that fit no block."""

import numpy as np
import pytest
import torch

from quantrules.api import builtin_formats, parse
from quantrules.checkpoint import Raw, StateDictSource
from quantrules.lower import describe, layout, lower
from quantrules.run.evaluate import Unit
from quantrules.run.local import execute
from quantrules.run.stream import in_memory, whole
from quantrules.testing import keys
from quantrules.types import nbytes
from tests.run.test_local import loaded

DENSE = "config.quantization_config = null"
EXPERTS = "\n".join(f"e.{i}.{p} nvfp4[24, 64]" for i in range(5) for p in ("w1", "w3"))
CASES = {
    "decode and join": ("a.{q,k} → unpack | dequant | cat → a.qk", "a.q nvfp4[48, 64]\na.k nvfp4[20, 64]", DENSE),
    "decode blocks and join inside one": (
        "a.{q,k} → unpack | dequant | cat → a.qk",
        "a.q fp8_block[200, 256]\na.k fp8_block[130, 256]", DENSE),
    "one format to another": (
        "a.{q,k} → unpack | dequant | cat | quant(fp8_block) → a.qk",
        "a.q nvfp4[200, 256]\na.k nvfp4[150, 256]", ""),
    "requant": ("*.q → unpack | requant(fp8_block, scale=f8_e8m0) → *.o", "a.q nvfp4[300, 256]\nb.q nvfp4[300, 256]", ""),
    "quantise": ("*.q.weight → quant(nvfp4) → *.q", "a.q.weight bf16[70, 64]", ""),
    "quantise slices": ("*.q.weight → quant(nvfp4) → *.q", "a.q.weight bf16[3, 30, 64]", ""),
    "quantise slices in blocks": ("*.q.weight → quant(fp8_block) → *.q", "a.q.weight bf16[3, 200, 256]", ""),
    "join packed rows": ("a.{q,k} → unpack | cat → a.qk", "a.q fp8_block[256, 256]\na.k fp8_block[130, 256]", ""),
    "join under one scale": (
        "a.{q,k,v} → unpack | align | cat | pack → a.qkv",
        "a.q nvfp4[48, 64]\na.k nvfp4[20, 64]\na.v nvfp4[20, 64]", ""),
    "join with an activation scale": (
        "a.{q,k} → unpack | align | cat | pack → a.qk",
        "a.q nvfp4[48, 64] +act\na.k nvfp4[20, 64] +act", ""),
    "stack experts": ("e.{E}.{w1,w3} → unpack | dequant | cat | stack(E) → e.up", EXPERTS, DENSE),
    "stack packed experts": ("e.{E}.w1 → unpack | stack(E) → e.up\ne.* → drop", EXPERTS, ""),
    "unstack and split": ("e.up → unpack | unstack(E) | split → e.{E}.{w1,w3}", "e.up.weight bf16[4, 36, 8]", ""),
    "unstack packed experts": ("e.up → unpack | dequant | unstack(E) → e.{E}.w1", "e.up nvfp4[4, 36, 64]", DENSE),
    "columns": ("a.{q,k}.weight → cat(1) → a.qk.weight", "a.q.weight bf16[50, 6]\na.k.weight bf16[50, 10]", ""),
    "rows of slices": ("a.{q,k}.weight → cat(1) → a.qk.weight", "a.q.weight bf16[3, 20, 6]\na.k.weight bf16[3, 10, 6]", ""),
    "split rows": ("a.qk.weight → split → a.{q,k}.weight", "a.qk.weight bf16[60, 6]", ""),
    "vectors": ("a.{q,k}.bias → cast(f32) | cat → a.qk.bias", "a.q.bias bf16[50]\na.k.bias bf16[7]", ""),
    "stack vectors": ("a.{E}.bias → stack(E) → a.bias", "\n".join(f"a.{i}.bias bf16[50]" for i in range(4)), ""),
    "another spelling": ("* → unpack | pack(compressed_tensors) → *", "a.q nvfp4[48, 64]\na.k nvfp4[20, 64]", ""),
    "asserted": ("* → unpack | dequant | assert_finite → *", "a.q nvfp4[48, 64]", DENSE),
}  # fmt: skip


def random_source(lines: str, seed: int = 0) -> StateDictSource:
    """Any codes, scales that are finite and positive, dense numbers of a normal distribution."""
    random, tensors = np.random.default_rng(seed), {}
    for key, (dtype, shape) in keys(lines, builtin_formats()).items():
        n = nbytes(dtype, shape)
        if dtype == "bf16":
            data = (random.standard_normal(n // 2).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        elif dtype == "f32":
            data = random.random(n // 4, np.float32) * 4 + 0.01
        elif dtype == "f8_e4m3":
            data = random.integers(8, 0x7F, n, np.uint8)
        else:
            data = random.integers(100, 140, n, np.uint8) if dtype == "f8_e8m0" else random.integers(0, 256, n, np.uint8)
        tensors[key] = Raw(dtype, shape, data.tobytes())
    return StateDictSource(tensors, config={})


def bound(name: str):
    rules, lines, edits = CASES[name]
    return parse(f"{rules}\n{edits}").bind(random_source(lines))


@pytest.mark.parametrize("name", CASES)
def test_tiles_give_the_bits_of_whole_values(name, monkeypatch):
    plan = bound(name)
    plan.raise_for_errors()
    cut = 0
    for units in plan.units:
        if not units.recipe.made.items:
            continue
        program = lower(units.recipe)
        expected = [v.parts for v in Unit(units, 0, program, plan.source).make_all()]
        for tile in (1 << 8, 1 << 10, 1 << 13):
            monkeypatch.setattr("quantrules.lower.tiles.TILE", tile)
            for share in (1 << 10, 1 << 17):
                tiles = layout(program, share)
                cut = max(cut, len(tiles.tiles))
                for a, b in zip(expected, whole(Unit(units, 0, program, plan.source), tiles), strict=True):
                    assert a.keys() == b.parts.keys()
                    for role in a:
                        np.testing.assert_array_equal(a[role], b.parts[role], f"{role} {share} {tile}")
    assert cut > 1 or lower(plan.units[0].recipe).copies


@pytest.mark.parametrize("name", CASES)
def test_a_run_writes_what_is_computed_whole(name, tmp_path, monkeypatch):
    plan = bound(name)
    expected = in_memory(plan, plan.source)
    monkeypatch.setattr("quantrules.lower.tiles.TILE", 1000)
    execute(plan, plan.source, tmp_path / "out", jobs=3, memory=6_000_000, shard_size=5000)
    found = loaded(tmp_path / "out")
    assert expected.keys() == found.keys()
    for key in expected:
        assert torch.equal(expected[key].reshape(-1).view(torch.uint8), found[key].reshape(-1).view(torch.uint8)), key


def test_a_program_is_described_step_by_step():
    assert describe(lower(bound("stack experts").units[0].recipe)).splitlines() == [
        "dequant: kernels.cpu.decode (decode)",
        "cat: reference (members_in_place)",
        "stack(E): reference (members_in_place)",
        "runs in tiles",
    ]


def test_members_are_decoded_where_they_will_lie(monkeypatch):
    """The references of cat and stack are never called: what they would copy is made in its place."""
    plan = bound("stack experts")
    program = lower(plan.units[0].recipe)
    call, called = Unit.call, []
    monkeypatch.setattr(Unit, "call", lambda self, made, *rest: (called.append(made.step.op.name), call(self, made, *rest)))
    whole(Unit(plan.units[0], 0, program, plan.source), layout(program, 20_000))
    assert set(called) == {"dequant"}
