"""The fifth fault: block scales filled with ones. What `quant` makes follows the weights, whatever their size."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quantrules as qr
from quantrules.checkpoint import StateDictSource
from quantrules.testing import run


def quantised(weight: torch.Tensor, step: str) -> dict[str, torch.Tensor]:
    source = StateDictSource({"a.weight": weight.bfloat16()})
    return run(qr.parse(f"a → unpack | {step}", "t.rules").bind(source), source)


@settings(max_examples=20, deadline=None)
@given(st.integers(-12, 8), st.integers(0, 1000), st.sampled_from(["f32", "f8_e8m0"]))
def test_scales_of_fp8_blocks_follow_the_weights(power, seed, dtype):
    """A weight that is 2^k times another has scales 2^k times as large (over 1e-4, the floor that engines have)."""
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(seed))
    one = quantised(weight, f"quant(fp8_block, scale={dtype})")["a.weight_scale_inv"].float()
    other = quantised(weight * 2.0**power, f"quant(fp8_block, scale={dtype})")["a.weight_scale_inv"].float()
    assert torch.equal(other, one * 2.0**power)
    assert len(one.unique()) > 1 or dtype == "f8_e8m0"
    largest = weight.bfloat16().float().reshape(2, 128, 3, 128).abs().amax((1, 3))
    assert (one * 448 >= largest * (1 - 2**-20)).all() and (one * 448 <= largest * 2.001).all()


@settings(max_examples=20, deadline=None)
@given(st.integers(-12, 8), st.integers(0, 1000))
def test_scales_of_nvfp4_follow_the_weights(power, seed):
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(seed)) * 2.0**power
    got = quantised(weight, "quant(nvfp4)")
    scales = got["a.weight_scale"].float() * got["a.weight_scale_2"]
    largest = weight.bfloat16().float().reshape(32, 4, 16).abs().amax(-1)
    assert ((scales * 6 - largest).abs() <= largest / 15).all()  # e4m3 rounds by a sixteenth at most
    assert len(scales.unique()) > 1
