"""The numba kernel makes the bits of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantrules.kernels import cpu
from quantrules.ops.codecs import table
from quantrules.types import Grid, Type
from tests.ops import forms as f
from tests.ops.test_dequant import every_pair


def both(step, v, lo=0, hi=None):
    outs = []
    for run in (step.op.reference, cpu.decode):
        out = f.Value.empty(step.made.items[0], lo, hi)
        out.parts["codes"][:] = 0xA5
        run(step, (v,), None, (out,))
        outs.append(out.parts["codes"].view(np.uint16))
    return outs


@pytest.mark.parametrize("g", [1.0, 0.3, 3e-38, 1e38])
@pytest.mark.parametrize(
    "t",
    [f.packed(f.NVFP4, 256, 4096), f.packed(f.NVFP4, 256, 4096, spelling="compressed_tensors"), f.packed(f.MXFP4, 256, 8192)],
    ids=str,
)
def test_every_byte_under_every_scale_byte(t, g):
    codes, scales, _ = every_pair(t.format)
    v = f.value(t, codes=codes, scale=scales, **({"global": [g]} if t.part("global") else {}))
    s = f.step("dequant", Grid.one(t))
    assert cpu.decodes(s)
    reference, kernel = both(s, v)
    assert np.array_equal(reference, kernel)
    nan = np.isnan((kernel.astype(np.uint32) << 16).view(np.float32))
    assert nan.any() and set(kernel[nan]) == {0x7FC0}
    kernel[5] ^= 1
    assert not np.array_equal(reference, kernel), "the comparison sees one wrong bit"


@settings(deadline=None, max_examples=40)
@given(
    lead=st.sampled_from([(), (1,), (3,), (2, 2)]),
    rows=st.integers(1, 40),
    columns=st.integers(1, 70),
    seed=st.integers(0, 99),
    format=st.sampled_from([("nvfp4", "modelopt"), ("nvfp4", "compressed_tensors"), ("mxfp4", "deepseek")]),
    cut=st.integers(0, 40),
    members=st.integers(1, 3),
)
def test_tiles_leading_dimensions_and_several_globals(lead, rows, columns, seed, format, cut, members):
    t = f.packed(f.FORMATS[format[0]], *lead, rows, 2 * columns, spelling=format[1])
    v = f.random(t, seed)
    if members > 1:
        c = f.step("cat", Grid((f.Axis("", tuple(range(members))),), (t,) * members), dim=len(lead))
        v = f.run(c, [f.random(t, seed + i) for i in range(members)])[0]
    s = f.step("dequant", Grid.one(v.type))
    assert cpu.decodes(s)
    tiles = f.boundaries(v.type, 1, (cut,))
    for lo, hi in tiles:
        reference, kernel = both(s, v.rows(v.type, lo, hi), lo, hi)
        assert np.array_equal(reference, kernel)


def test_the_documented_call():
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(0, 256, (6, 16), np.uint8), rng.integers(1, 127, (6, 2), np.uint8)
    out = np.zeros((6, 32), np.uint16)
    factor = np.array([0.5, 0.5, 0.25, 3.0, 3.0, 0.5], np.float32)
    cpu.decode_fp4_bf16(codes, scales, table("f8_e4m3"), factor, True, out)
    worth = torch.from_numpy(table("f8_e4m3")[scales] / factor[:, None]).repeat_interleave(16, 1)
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(6, 32)
    wanted = (torch.from_numpy(table("e2m1")[nibbles]) * worth).to(torch.bfloat16)
    assert np.array_equal(out, wanted.view(torch.uint16).numpy())


@pytest.mark.parametrize(("t", "args"), [
    (f.packed(f.FP8_BLOCK, 128, 128), {}), (f.packed(f.NVFP4, 4, 32), {"dtype": "f32"}), (f.dense("bf16", 4, 4), {}),
])  # fmt: skip
def test_what_it_leaves_to_the_reference(t: Type, args):
    assert not cpu.decodes(f.step("dequant", Grid.one(t), **args))


def test_high_nibble_first_is_left_to_the_reference():
    from attrs import evolve

    from quantrules.types import Element

    t = f.packed(f.NVFP4, 4, 32)
    assert not cpu.decodes(f.step("dequant", Grid.one(evolve(t, format=evolve(t.format, element=Element("e2m1", 2, False))))))


def test_bf16_rounding_is_torchs():
    x = np.random.default_rng(1).integers(0, 2**32, 1 << 20, np.uint64).astype(np.uint32).view(np.float32)
    real = ~np.isnan(x)
    assert np.array_equal(cpu.to_bf16(x)[real], torch.from_numpy(x[real]).to(torch.bfloat16).view(torch.uint16).numpy())
