"""quant, requant and cast: scales first, edges, refusals, and how far the result may be from what went in."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantrules.ops import REGISTRY
from quantrules.ops.base import Refused
from quantrules.types import Grid
from tests.ops import forms as f


def quantised(x: torch.Tensor, format: str, dtype: str = "f32", **args):
    return f.one("quant", f.of(x, dtype), format=format, **args)


def nearest(x: float) -> float:
    """The e4m3 number that x becomes, from a list of all."""
    known = [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)] + [
        m * 2.0**-9 for m in range(8)
    ]
    return min(known, key=lambda k: (abs(k - x), k))


def test_the_scale_is_rounded_before_the_division():
    """B121: amax 300 gives scale 2^0, and 300 becomes 288, not 448."""
    x = torch.zeros(128, 128)
    x[0, 0], x[5, 7] = 300.0, -100.0
    made = quantised(x, "fp8_block", scale="f8_e8m0")
    assert made.tensor("scale").float().tolist() == [[1.0]]
    assert f.numbers(made)[0, 0] == 288 and f.numbers(made)[5, 7] == -96
    # nvfp4: global 1, so a block with amax 6.4 has scale e4m3(6.4 / 6) = 1.125, not 1.0667
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16], x[0, 17] = 2688.0, 6.4, 1.7
    made = quantised(x, "nvfp4")
    assert made.tensor("global") == 1.0 and made.tensor("scale").float().tolist() == [[448.0, 1.125]]
    assert f.numbers(made)[0, 16:18].tolist() == [6.75, 1.6875]


def test_codes_belong_to_the_stored_scale():
    """B062: under global 1, amax 1.0 has scale 0.171875, not 1/6; 0.42 is then 2.44 steps and code 2, where 2.52 would be 3."""
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16], x[0, 17] = 2688.0, 1.0, 0.42
    made = quantised(x, "nvfp4")
    assert made.tensor("scale").float()[0, 1] == 0.171875
    assert (f.numbers(made)[0, 16:18] / 0.171875).tolist() == [6.0, 2.0]


def test_ue8m0_example():
    """formats.md 5.2: block amax 1.0 → 2^-8, and 1.0 is code 0x78."""
    made = quantised(torch.ones(128, 128), "fp8_block", scale="f8_e8m0")
    assert made.parts["scale"].tolist() == [127 - 8] and set(made.parts["codes"].tolist()) == {0x78}


def test_block_scales_saturate_and_are_never_nan():
    """B038: where f32 rounding takes a block scale above 448 it is 448 (0x7E), never 0x7F."""
    for seed in range(50):
        made = quantised(torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)) * 10.0 ** (seed % 9 - 4), "nvfp4")
        assert max(made.parts["scale"]) == 0x7E


def test_all_zero_tensors_and_blocks():
    for spelling in ("modelopt", "compressed_tensors"):
        made = quantised(torch.zeros(4, 32), "nvfp4", spelling=spelling)
        assert made.tensor("global").reshape(-1).tolist() == [1.0]
        assert not made.parts["scale"].any() and not made.parts["codes"].any() and not f.numbers(made).any()
    x = torch.zeros(1, 32)
    x[0, 16:] = 1.0
    assert quantised(x, "nvfp4").tensor("scale").float().tolist() == [[0.0, 448.0]]
    made = quantised(torch.zeros(128, 128), "fp8_block", scale="f8_e8m0")
    assert made.parts["scale"].tolist() == [127 - 22], "formats.md 5.2: a zero block has scale 2^-22"
    for format in ("fp8_block", "mxfp4"):
        made = quantised(torch.zeros(4, 128), format, floor=0)
        assert not f.numbers(made).any() and torch.isfinite(made.tensor("scale").float()).all()


def test_blocks_far_below_the_largest_keep_their_ratio_to_the_smallest_scale():
    x = torch.full((1, 32), 1.0)
    x[0, 16:] = 2.0**-20
    made = quantised(x, "nvfp4")
    assert made.parts["scale"].tolist() == [0x7E, 1], "not below the smallest number of the scale's dtype"
    assert f.numbers(made)[0, 16] > 0


def test_the_floor_zeroes_small_blocks_and_an_exact_mode_keeps_them():
    x = torch.full((128, 128), 2.0**-34)
    assert not f.numbers(quantised(x, "fp8_block", scale="f8_e8m0")).any()
    assert torch.equal(f.numbers(quantised(x, "fp8_block", scale="f8_e8m0", floor=0)), x)
    assert torch.equal(f.numbers(quantised(x[:, :32], "mxfp4")), x[:, :32])


@pytest.mark.parametrize("magnitude", [3e-44, 1e-38, 1e-36, 3e38])
@pytest.mark.parametrize("spelling", ["modelopt", "compressed_tensors"])
def test_extreme_magnitudes_have_finite_scales(magnitude, spelling):
    made = quantised(torch.full((1, 16), magnitude), "nvfp4", spelling=spelling)
    assert torch.isfinite(made.tensor("global")).all() and (made.tensor("global") > 0).all()
    assert torch.isfinite(f.numbers(made)).all()


@pytest.mark.parametrize("format", ["nvfp4", "fp8_block", "mxfp4"])
@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinities_are_refused_with_key_and_index(format, number):
    x = torch.ones(3, 40, 64)
    x[2, 17, 5] = number
    for cuts in (None, (16,)):
        v = f.of(x, "bf16", name="a.weight")
        with pytest.raises(Refused, match=r"a\.weight\[2, 17, 5\] is (nan|inf|-inf)") as refused:
            f.run(f.step("quant", Grid.one(v.type), format=format), [v], cuts)
        assert refused.value.code == "QR213"


def test_activation_scales_are_kept_and_never_invented():
    from attrs import evolve

    from quantrules.types import Part, PartType

    assert [p.role for p in quantised(torch.ones(2, 32), "nvfp4").type.parts] == ["codes", "scale", "global"]
    t = f.dense("bf16", 2, 32)
    act = Part("act", ".input_scale", ("f32",), (), optional=True, cat="max")
    t = evolve(t, spelling=evolve(t.spelling, parts=(*t.spelling.parts, act)), parts=(*t.parts, PartType("act", "f32", ())))
    v = f.value(t, codes=torch.ones(2, 32, dtype=torch.bfloat16), act=torch.tensor(0.25))
    assert f.one("quant", v, format="nvfp4").tensor("act") == 0.25
    assert f.one("quant", v, format="nvfp4", spelling="compressed_tensors").tensor("act").tolist() == [4.0]
    assert [p.role for p in f.one("quant", v, format="fp8_block").type.parts] == ["codes", "scale"]


def test_the_spelling_keeps_the_name_of_the_dense_tensor_and_formats_take_their_first_scale_dtype():
    s = f.step("quant", Grid.one(f.dense("bf16", 256, 256)), format="fp8_block")
    assert s.made.items[0].spelling.name == "deepseek" and s.made.items[0].part("scale").dtype == "f32"
    s = f.step("quant", Grid.one(f.dense("bf16", 256, 256)), format="fp8_block", spelling="v4", scale="f8_e8m0")
    assert str(s.made.items[0].part("scale")) == "f8_e8m0[2, 2]"


@pytest.mark.parametrize(("t", "args", "code", "says"), [
    (f.packed(f.FP8_BLOCK, 128, 128), {"format": "nvfp4"}, "QR204", "quantised already"),
    (f.dense("f8_e4m3", 4, 16), {"format": "nvfp4"}, "QR204", "not floating point"),
    (f.dense("i64", 4, 16), {"format": "nvfp4"}, "QR204", "not floating point"),
    (f.dense("bf16", 64), {"format": "nvfp4"}, "QR207", "1 dimensions"),
    (f.dense("bf16", 4, 24), {"format": "nvfp4"}, "QR201", "24 columns are 1.5 blocks of 16"),
    (f.dense("bf16", 4, 72), {"format": "mxfp4"}, "QR201", "72 columns are 2.25 blocks of 32"),
    (f.dense("bf16", 4, 16), {"format": "dense"}, "QR211", "dense is not a quantised format"),
    (f.dense("bf16", 4, 16), {"format": "nvfp5"}, "QR211", "nvfp5 is not a quantised format"),
    (f.dense("bf16", 4, 16), {"format": "fp8_block", "scale": "f8_e4m3"}, "QR211", "f32 or f8_e8m0, not f8_e4m3"),
    (f.dense("bf16", 4, 16), {"format": "nvfp4", "spelling": "gguf"}, "QR211", "no spelling gguf"),
    (f.dense("bf16", 4, 16), {"format": "mxfp4", "rule": "up"}, "QR211", "no scale rule up"),
])  # fmt: skip
def test_refusals(t, args, code, says):
    """B104 among them: what is quantised already is not quantised again."""
    with pytest.raises(Refused, match=says) as refused:
        f.step("quant", Grid.one(t), **args)
    assert refused.value.code == code


def test_formats_that_quant_cannot_make():
    from attrs import evolve

    from quantrules.types import Part

    odd = evolve(f.MXFP4.spellings[0], parts=(*f.MXFP4.spellings[0].parts, Part("perm", ".g_idx", ("i32",), f.grid("K"))))
    with pytest.raises(Refused, match="does not make") as refused:
        f.step("quant", Grid.one(f.dense("bf16", 2, 32)), format=evolve(f.MXFP4, spellings=(odd,)))
    assert refused.value.code == "QR212"


def test_requant_rounds_once():
    """It stands for dequant(f32) | quant: an f32 product that bf16 would round first ends elsewhere."""
    expanded = REGISTRY["requant"].expand({"format": "fp8_block", "scale": "f8_e8m0"})
    assert expanded == (("dequant", {"dtype": "f32"}), ("quant", {"format": "fp8_block", "scale": "f8_e8m0"}))
    v = f.random(f.packed(f.NVFP4, 256, 256), 5)
    once = f.one("quant", f.one("dequant", v, dtype="f32"), format="fp8_block")
    twice = f.one("quant", f.one("dequant", v), format="fp8_block")
    assert (once.parts["codes"] != twice.parts["codes"]).any()


def test_requant_to_powers_of_two_is_the_identity_where_it_can_be():
    """formats.md 5.2: power-of-two scales and block amax codes above 224 come back bit for bit."""
    v = f.random(f.packed(f.FP8_BLOCK, 300, 200, scale="f8_e8m0"), 2)
    for row in (0, 128, 256):
        for column in (0, 128):
            v.tensor("codes").view(torch.uint8)[row, column] = 0x7E
    back = f.one("quant", f.one("dequant", v, dtype="f32"), format="fp8_block", scale="f8_e8m0")
    f.same([back], [v])


BOUNDS = {"nvfp4": 1 / 6 * 1.0625, "mxfp4": 1 / 3, "fp8_block": 1 / 28}  # half a step of the largest code, of the block's amax


@settings(deadline=None, max_examples=60)
@given(
    format=st.sampled_from(sorted(BOUNDS)),
    rows=st.integers(1, 150),
    blocks=st.integers(1, 5),
    seed=st.integers(0, 99),
    scale=st.sampled_from([1e-3, 1.0, 300.0]),
    spelling=st.sampled_from(["modelopt", "compressed_tensors"]),
    rule=st.sampled_from(["ceil", "even"]),
)
def test_what_comes_back_is_near(format, rows, blocks, seed, scale, spelling, rule):
    columns = blocks * 32
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale
    args = {"spelling": spelling} if format == "nvfp4" else {"rule": rule} if format == "mxfp4" else {}
    made = f.numbers(quantised(x, format, **args))
    width = f.FORMATS[format].block[1]
    high = min(f.FORMATS[format].block[0], rows)
    grid = (
        torch.nn.functional.pad((made - x).abs(), (0, -columns % width, 0, -rows % high))
        .unfold(0, high, high)
        .unfold(1, width, width)
        .amax((2, 3))
    )
    amax = (
        torch.nn.functional.pad(x.abs(), (0, -columns % width, 0, -rows % high))
        .unfold(0, high, high)
        .unfold(1, width, width)
        .amax((2, 3))
    )
    assert (grid <= amax * BOUNDS[format] + 1e-30).all()
    again = quantised(made, format, **args)
    assert torch.equal(f.numbers(again).sign() * (made != 0), made.sign()), "quantising what was quantised keeps signs"


def test_the_bound_is_not_vacuous():
    x = torch.randn(4, 64)
    made = f.numbers(quantised(x, "nvfp4"))
    assert ((made - x).abs() > 0.02 * x.abs().amax()).any()


# --------------------------------------------------------------------------------------------------------------- cast


def test_cast_by_value():
    assert f.one("cast", f.of(torch.tensor([1.0, 1.00390625, 1.01171875]), "f32"), dtype="bf16").tensor().tolist() == [
        1.0,
        1.0,
        1.015625,
    ]
    assert f.one("cast", f.of(torch.tensor([[1, -2], [3, 70000]]), "i64"), dtype="i32").tensor().tolist() == [[1, -2], [3, 70000]]
    assert f.one("cast", f.of(torch.tensor([0.0, 1.0]), "f32"), dtype="bool").tensor().tolist() == [False, True]
    assert f.one("cast", f.of(torch.tensor([3, 5], dtype=torch.int32), "i32"), dtype="u16").tensor().tolist() == [3, 5]


@pytest.mark.parametrize(("tensor", "dtype", "to", "says"), [
    (torch.tensor([[1, 70000]]), "i64", "i16", r"m\[0, 1\] is 70000, which i16 cannot hold"),
    (torch.tensor([1.5]), "f32", "i32", r"m\[0\] is 1.5"),
    (torch.tensor([-1]), "i64", "u8", r"m\[0\] is -1"),
    (torch.tensor([float("nan")]), "f32", "i32", "is nan"),
])  # fmt: skip
def test_integers_hold_the_value_or_refuse(tensor, dtype, to, says):
    with pytest.raises(Refused, match=says) as refused:
        f.one("cast", f.of(tensor, dtype), dtype=to)
    assert refused.value.code == "QR216"


def test_a_cast_makes_no_scales():
    """B118: one-byte floats on either side of a cast would be wrong by their scale."""
    for t, to in ((f.dense("bf16", 2, 2), "f8_e4m3"), (f.dense("f8_e4m3", 2, 2), "bf16"), (f.packed(f.NVFP4, 2, 16), "bf16")):
        with pytest.raises(Refused):
            f.step("cast", Grid.one(t), dtype=to)


@pytest.mark.parametrize(
    ("old", "new", "label"),
    [
        ("bf16", "f32", "exact"),
        ("f32", "bf16", "lossy"),
        ("f16", "bf16", "lossy"),
        ("bf16", "f16", "lossy"),
        ("i32", "f64", "exact"),
        ("i32", "f32", "exact in a range"),
        ("i64", "i32", "exact in a range"),
        ("u8", "i16", "exact"),
        ("i8", "u8", "exact in a range"),
        ("i8", "bf16", "exact"),
        ("f32", "i32", "exact in a range"),
        ("f32", "f32", "exact"),
    ],
)
def test_labels_of_casts(old, new, label):
    s = f.step("cast", Grid.one(f.dense(old, 2)), dtype=new)
    assert s.op.label(s) == label


def test_assert_finite_passes_values_and_stops_at_the_first_that_is_none():
    x = torch.ones(4, 32)
    f.same([f.one("assert_finite", f.of(x, "f32"))], [f.of(x, "f32")])
    x[1, 3] = float("inf")
    with pytest.raises(Refused, match=r"m\[1, 3\] is inf"):
        f.one("assert_finite", f.of(x, "f32"))
    v = f.random(f.packed(f.NVFP4, 4, 32))
    f.same([f.one("assert_finite", v)], [v])
    v.tensor("scale").view(torch.uint8)[2, 1] = 0x7F
    with pytest.raises(Refused, match=r"m\[2, 16\] is nan"):
        f.one("assert_finite", v)
    f.one("assert_finite", f.of(torch.tensor([1, 2]), "i64"))
