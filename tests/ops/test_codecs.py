"""Codecs: tables against torch, rounding of every tie, saturation, powers of two."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantrules.ops.codecs import LARGEST, decode_codes, encode_codes, power_of_two, round_to, table
from quantrules.ops.torch_views import torch_dtype
from quantrules.types import Element

E2M1, E4M3 = Element("e2m1", 2), Element("f8_e4m3")


def bits(x: torch.Tensor) -> list[int]:
    return x.view(torch.uint8).flatten().tolist()


@pytest.mark.parametrize("codec", ["f8_e4m3", "f8_e8m0"])
def test_tables_are_what_torch_decodes(codec):
    mine, theirs = torch.from_numpy(table(codec)), torch.arange(256, dtype=torch.uint8).view(torch_dtype(codec)).float()
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(torch.signbit(mine), torch.signbit(theirs)) or codec == "f8_e4m3"


def test_e8m0_has_a_smallest_number_and_no_number_for_255():
    assert table("f8_e8m0")[0] == 2.0**-127 and table("f8_e8m0")[127] == 1 and table("f8_e8m0")[254] == 2.0**127
    assert np.isnan(table("f8_e8m0")[255])


def test_e2m1_ties_go_to_even_codes_and_large_numbers_saturate():
    # midpoints and what formats.md 0.1 says of them, then the neighbours of each on either side
    ties, wanted = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0)
    exact = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
    for i, (tie, value) in enumerate(zip(ties, wanted, strict=True)):
        below, above = (float(np.nextafter(np.float32(tie), np.float32(to))) for to in (0, 9))
        row = torch.tensor([tie, below, above, -tie])
        assert decode_codes(encode_codes(row, E2M1), E2M1, 4).tolist() == [value, exact[i], exact[i + 1], -value]
    assert bits(encode_codes(torch.tensor([7.0, 1e30, -float("inf"), 6.0]), E2M1)) == [0x77, 0x7F]


def test_zero_of_either_sign_is_code_0_and_what_rounds_to_zero_keeps_its_sign():
    assert bits(encode_codes(torch.tensor([0.0, -0.0, -0.1, 0.1]), E2M1)) == [0x00, 0x08]


def test_nibbles_low_first_and_high_first():
    """B106, B133: byte 0x21 is [0.5, 1.0] low first and [1.0, 0.5] high first; high first packs [0.5, 1.0] as 0x12."""
    byte = torch.tensor([[0x21]], dtype=torch.uint8)
    high = Element("e2m1", 2, low_first=False)
    assert decode_codes(byte, E2M1, 2).tolist() == [[0.5, 1.0]]
    assert decode_codes(byte, high, 2).tolist() == [[1.0, 0.5]]
    assert bits(encode_codes(torch.tensor([[0.5, 1.0]]), high)) == [0x12]
    assert decode_codes(byte.view(torch.int8), E2M1, 2).tolist() == [[0.5, 1.0]], "signed containers are bytes all the same"


def test_e4m3_casts_round_half_to_even_and_saturate():
    """B079: 256, 288, 300, 272, 304, and what lies above the largest number."""
    x = torch.tensor([256.0, 288, 300, 272, 304, 448, 463.9, 464, 480, 1e9, float("inf"), -1e9])
    assert decode_codes(encode_codes(x, E4M3), E4M3, 12).tolist() == [256, 288, 288, 256, 320, *[448] * 6, -448]
    every = torch.from_numpy(table("f8_e4m3"))
    known = every[~torch.isnan(every)]
    assert torch.equal(decode_codes(encode_codes(known, E4M3), E4M3, len(known)), known)


@pytest.mark.parametrize(("rule", "amax", "byte"), [
    ("floor", 6.0, 127), ("floor", 7.0, 127), ("floor", 3.6, 126), ("ceil", 6.0, 127), ("ceil", 7.0, 128), ("ceil", 3.6, 127),
    ("even", 6.0, 127), ("even", 7.0, 128), ("even", 3.6, 127), ("ceil", 0.0, 1), ("floor", 0.0, 1), ("ceil", 3e38, 253),
])  # fmt: skip
def test_power_of_two_scales(rule, amax, byte):
    """formats.md 3: amax → byte for FLOOR, RCEIL and EVEN."""
    assert bits(power_of_two(torch.tensor([amax]), LARGEST["e2m1"], rule).to(torch.float8_e8m0fnu)) == [byte]


@pytest.mark.parametrize(("dtype", "quiet"), [("bf16", 0x7FC0), ("f16", 0x7E00)])
def test_every_nan_becomes_the_quiet_one(dtype, quiet):
    x = torch.tensor([1.0] + [float("nan"), -float("nan")] * 20)
    assert set(round_to(x, dtype)[1:].view(torch.int16).tolist()) == {quiet}
    assert round_to(x, "f32")[1:].view(torch.int32).unique().tolist() == [0x7FC00000]
