"""Small cases from the field, by their numbers: each was worked by hand, and none comes from our own output.

A code is a number q, a block scale s, a global scale g. The numbers are those of COVERAGE.md's entries.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import quantrules
from quantrules import QuantrulesError, RunError, load
from quantrules.checkpoint import Raw, StateDictSource
from quantrules.ops import REGISTRY
from quantrules.plan import view
from quantrules.testing import run

from .make import as_bytes, decoded, e8m0, f8, f32, fp8, made, mxfp4, nvfp4, nvfp4_ct, pairs, planned, stored

# ------------------------------------------------------------------------------------------------- fused global scales

FUSED = {
    # members: (spelling, q, s, g); what they share: g, each s; what each is worth
    "B007 gate and up, divisors": ([(nvfp4_ct, 6, 1, 2), (nvfp4_ct, 6, 1, 4)], 2.0, [1.0, 0.5], [3.0, 1.5]),
    "B008 q and k, multipliers": ([(nvfp4, 1, 2, 0.5), (nvfp4, 1, 2, 0.25)], 0.5, [2.0, 1.0], [1.0, 0.5]),
    "B035 w1 and w3 of an expert": ([(nvfp4, 2, 1, 0.5), (nvfp4, 2, 1, 0.25)], 0.5, [1.0, 0.5], [1.0, 0.5]),
    "B010 any names": ([(nvfp4, 1, 1, 1), (nvfp4, 1, 1, 2), (nvfp4, 1, 1, 4)], 4.0, [0.25, 0.5, 1.0], [1.0, 2.0, 4.0]),
}
MEMBERS = ("a.to_q", "a.to_k", "a.to_v")


@pytest.mark.parametrize("title", FUSED)
@pytest.mark.parametrize("how", ["align", "align(exact)"])
def test_fused_members_share_a_global_scale_and_keep_their_numbers(title, how):
    """B007, B008, B010, B035: the largest multiplier, the smallest divisor, and block scales that make up for it."""
    members, shared, scales, worth = FUSED[title]
    tensors = {k: v for path, (form, *q_s_g) in zip(MEMBERS, members) for k, v in form(path, *q_s_g).items()}
    names = ",".join(m.removeprefix("a.") for m in MEMBERS[: len(members)])
    out = made(f"*.{{{names}}} → unpack | {how} | cat → *.fused", tensors)
    codes, scale, shared_scale = out.values()
    assert codes.tolist() == [row for t in tensors.values() if t.dtype == torch.uint8 for row in t.tolist()], "bytes are copied"
    assert (scale.float().flatten().tolist(), shared_scale.flatten().tolist()) == (scales, [shared])
    assert decoded(out)["a.fused.weight"][:, 0].tolist() == worth


@pytest.mark.parametrize("title", FUSED)
def test_fused_members_that_are_decoded_keep_their_numbers(title):
    """B007: each by its own global scale, before or after they are joined."""
    members, _, _, worth = FUSED[title]
    tensors = {k: v for path, (form, *q_s_g) in zip(MEMBERS, members) for k, v in form(path, *q_s_g).items()}
    names = ",".join(m.removeprefix("a.") for m in MEMBERS[: len(members)])
    for steps in ("dequant(f32) | cat", "cat | dequant(f32)"):
        assert made(f"*.{{{names}}} → unpack | {steps} → *.fused", tensors)["a.fused.weight"][:, 0].tolist() == worth


def test_experts_share_a_global_scale_each():
    """B035: expert 0 has 0.5 and 0.25, expert 1 has 1 and 2; none takes another's."""
    tensors = nvfp4("0.w1", 2, 1, 0.5) | nvfp4("0.w3", 2, 1, 0.25) | nvfp4("1.w1", 2, 1, 1) | nvfp4("1.w3", 2, 1, 2)
    out = made("{E}.{w1,w3} → unpack | align | cat | stack(E) → w13", tensors)
    assert out["w13.weight_scale_2"].tolist() == [0.5, 2.0]
    assert decoded(out)["w13.weight"][:, :, 0].tolist() == [[1.0, 0.5], [2.0, 4.0]]


def test_what_cannot_be_shared_exactly_is_refused_or_rounded_as_asked():
    """B007, B008: under 0.5 instead of 0.375 a scale of 1.125 would be 0.84375, which E4M3 does not hold."""
    tensors = nvfp4("a.q", 1, 1.125, 0.5) | nvfp4("a.k", 1, 1.125, 0.375)
    said = r"`a\.k\.weight_scale`\[0, 0\] has no exact value under the global scale 0.5; its own is 0.375"
    with pytest.raises(RunError, match=said):
        made("*.{q,k} → unpack | align(exact) | cat → *.qk", tensors)
    out = made("*.{q,k} → unpack | align | cat → *.qk", tensors)
    assert out["a.qk.weight_scale"].float().flatten().tolist() == [1.125, 0.140625], "0.421875 / (6 · 0.5)"
    assert decoded(out)["a.qk.weight"][:, 0].tolist() == [0.5625, 0.421875], "with code 6 instead of 1 the number is the same"


@pytest.mark.parametrize("how", ["align", "align(exact)"])
@pytest.mark.parametrize("given", ["dense", "fp8"])
def test_members_may_be_quantised_and_then_share_a_global_scale(how, given):
    """B007, B008: 1 and 2 in one matrix: g is 2 / 2688, and the scales are 448 / 2 and 448. What is checked ahead are the
    scales of the source, which has none of these."""
    of = lambda path, w: fp8(path, 1, w, 2, 16) if given == "fp8" else {path: f32(w, 2, 16)}  # noqa: E731
    tensors = of("a.q", 1.0) | of("a.k", 2.0)
    out = made(f"a.{{q,k}} → unpack | requant(nvfp4) | {how} | cat → a.qk", tensors)
    codes, scale, shared = out.values()
    assert shared.item() == np.float32(2 / 2688) and scale.float().flatten().tolist() == [224, 224, 448, 448]
    assert codes.unique().tolist() == [0x77]


def test_a_spelling_that_is_there_already_is_not_turned_again():
    """B077: ModelOpt's 4 is compressed-tensors' 0.25, and stays 0.25 when the rule runs on its own output."""
    rules = load("nvfp4_modelopt_to_compressed_tensors")
    once = run(rules.bind(StateDictSource(nvfp4("a.q_proj", 2, 1, 4.0), {})))
    assert once["a.q_proj.weight_global_scale"].tolist() == [0.25]
    twice = run(rules.bind(StateDictSource(once, {})))
    assert {k: as_bytes(v) for k, v in twice.items()} == {k: as_bytes(v) for k, v in once.items()}
    back = run(load("nvfp4_compressed_tensors_to_modelopt").bind(StateDictSource(twice, {})))
    assert back["a.q_proj.weight_scale_2"].item() == 4.0


# ------------------------------------------------------------------------------------------------------ what a scale is


def test_deepseek_v3_2_s_indexer_is_decoded_and_no_scale_is_left():
    """B013: three tensors in, two out, and the third is used."""
    projection = torch.ones(4, 128, dtype=torch.bfloat16)
    tensors = fp8("l.self_attn.indexer.wk", 1.0, 0.25) | {"l.self_attn.indexer.weights_proj.weight": projection}
    out = run(load("fp8_block_to_bf16").bind(StateDictSource(tensors, {})))
    assert sorted(out) == ["l.self_attn.indexer.weights_proj.weight", "l.self_attn.indexer.wk.weight"]
    assert {t.dtype for t in out.values()} == {torch.bfloat16}
    assert out["l.self_attn.indexer.wk.weight"].float().unique().tolist() == [0.25]


def test_an_inverse_scale_multiplies_whatever_its_name_says():
    """B014"""
    out = made("* → unpack | dequant", fp8("a", 1.0, 0.5, 2, 2))
    assert {k: v.float().tolist() for k, v in out.items()} == {"a.weight": [[0.5, 0.5], [0.5, 0.5]]}


def test_the_last_group_may_be_partial():
    """B019: 72 columns have three scales, the last for eight values."""
    tensors = mxfp4("a", 0x22, 127, 1, 72)
    tensors["a.scale"] = torch.tensor([[127, 128, 129]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    assert made("* → unpack | dequant", tensors)["a.weight"].tolist() == [[1.0] * 32 + [2.0] * 32 + [4.0] * 8]


def test_an_e8m0_scale_becomes_a_number_or_keeps_its_byte():
    """B029: byte 120 is 2^-7 and never 120."""
    block = {"e.0.w1.weight": f8(1, 128, 128), "e.0.w1.scale": e8m0(120, 1, 1)}
    assert made("* → unpack | pack(scale=f32)", block)["e.0.w1.scale"].tolist() == [[0.0078125]]
    assert decoded(block)["e.0.w1.weight"].unique().tolist() == [0.0078125]
    packed = mxfp4("e.0.w1", 0x22, 120)
    assert made("* → unpack | pack(scale=u8)", packed)["e.0.w1.scale"].tolist() == [[120]]
    assert decoded(made("* → unpack | pack(scale=u8)", packed))["e.0.w1.weight"].unique().tolist() == [0.0078125]


def test_another_spelling_s_bytes_have_its_dtype():
    """B029: a reader whose parameter is U8 copies F8_E8M0 as numbers (formats.md 0.1), so U8 is what is written for it."""
    out = made("* → unpack | pack(compressed_tensors)", mxfp4("e", 0x22, 120))
    assert {k: (v.dtype, v.unique().tolist()) for k, v in out.items()} == {
        "e.weight_packed": (torch.uint8, [0x22]), "e.weight_scale": (torch.uint8, [120])}  # fmt: skip
    held = nvfp4("e", 1, 1, 1) | {"e.weight": pairs(1, 1, 8, dtype=torch.int8)}
    assert made("* → unpack | pack(compressed_tensors)", held)["e.weight_packed"].dtype == torch.uint8
    assert made("* → keep", held)["e.weight"].dtype == torch.int8


def test_the_scale_1_is_the_byte_127():
    """B031"""
    assert as_bytes(made("* → unpack | pack(scale=f8_e8m0)", fp8("a", 1, 1.0))["a.weight_scale_inv"]) == b"\x7f"


def test_an_activation_scale_is_kept_left_behind_with_a_note_or_an_error():
    """B034: 1/2688 that nothing takes would be a factor of 2688."""
    tensors = nvfp4("a", 2, 1, 0.5, act=1 / 2688)
    assert made("* → keep", tensors)["a.input_scale"].item() == np.float32(1 / 2688)
    plan = planned("* → unpack | dequant", tensors)
    assert [d.message for d in plan.diagnostics if d.code == "QR139"] == ["the activation scales of a are left behind"]
    assert list(run(plan)) == ["a.weight"]
    (error,) = planned("* → keep", {"a.input_scale": f32(1 / 2688), "a.weight": torch.ones(2, 2)}).errors
    assert "a" in error.message and ".input_scale" in error.message
    with pytest.raises(QuantrulesError, match="input_scale"):
        made("* → keep", {"a.input_scale": f32(1 / 2688)})


@pytest.mark.parametrize("scale, format", [(e8m0(126, 1, 1), "e8m0"), (f32(0.5, 1, 1), "f32")])
def test_the_rule_names_the_dtype_of_the_result_and_not_the_scale(scale, format):
    """B058"""
    tensors = {"a.weight": f8(1.5, 2, 2), "a.weight_scale_inv": scale}
    out = made("* → unpack | dequant(bf16)", tensors)["a.weight"]
    assert (out.dtype, out.tolist()) == (torch.bfloat16, [[0.75, 0.75], [0.75, 0.75]])
    assert made("* → unpack | dequant(f32)", tensors)["a.weight"].dtype == torch.float32


def test_one_byte_a_number_is_no_format():
    """B083: packed I8 experts beside FP8 blocks, both with `.scale`."""
    tensors = mxfp4("experts.0.w1", 0x31, 128, 4, 32)
    tensors |= {"shared_experts.w1.weight": f8(3, 4, 32), "shared_experts.w1.scale": e8m0(126, 1, 1)}
    out = made("* → unpack | dequant", tensors)
    assert out["experts.0.w1.weight"][0, :4].tolist() == [1.0, 3.0, 1.0, 3.0]
    assert out["shared_experts.w1.weight"].unique().tolist() == [1.5]


def test_low_nibble_first_under_a_power_of_two():
    """B106: I8 0x21 is 0.5 and then 1, under 2^1."""
    assert made("* → unpack | dequant", mxfp4("e", 0x21, 128))["e.weight"][0, :4].tolist() == [1.0, 2.0, 1.0, 2.0]


HIGH_FIRST = """
format swapped
    element  e2m1, 2 in u8, {order} first, along -1
    block    [1, 32]
    value    codes * scale
    spelling swapped
        codes  .weight_nibbles  u8[N, K/2]   dense .weight
        scale  .weight_quantizer.scale  f8_e8m0[N, K/32]
* → unpack(swapped) | dequant
"""


@pytest.mark.parametrize("order, expected", [("low", [0.5, 1.0]), ("high", [1.0, 0.5])])
def test_the_order_of_nibbles_and_the_names_of_scales_are_data(order, expected):
    """B133, B131: a format of the rule file's own, for a producer with other nibbles or names."""
    tensors = {"a.weight_nibbles": torch.full((1, 16), 0x21, dtype=torch.uint8), "a.weight_quantizer.scale": e8m0(127, 1, 1)}
    assert made(HIGH_FIRST.replace("{order}", order), tensors)["a.weight"][0, :2].tolist() == expected


def test_a_scale_called_scale_is_used():
    """B118: 448 · 2^-12, not 448."""
    out = made("* → unpack | dequant", {"wo_b.weight": f8(448, 128, 128), "wo_b.scale": e8m0(115, 1, 1)})
    assert {k: v.float().unique().tolist() for k, v in out.items()} == {"wo_b.weight": [0.109375]}


def test_the_smallest_block_scales_are_read():
    """B040: 2^-9 is a subnormal E4M3 number, and no zero."""
    assert decoded(nvfp4("a", 1, 2**-9, 1))["a.weight"].unique().tolist() == [2**-9]


# ---------------------------------------------------------------------------------------------------- how scales are made


def test_block_scales_saturate_and_none_is_nan():
    """B038: whatever the weights, no scale is 0x7F; the largest block has 448, 0x7E."""
    x = torch.tensor([[1e30] * 16 + [3.0] * 16, [-1e-30] * 16 + [0.0] * 16])
    scale = made("* → unpack | quant(nvfp4)", {"a.weight": x})["a.weight_scale"].view(torch.uint8)
    assert scale[0, 0] == 0x7E and scale[1, 1] == 0 and scale.max() <= 0x7E


@pytest.mark.parametrize("weight, code", [(300.0, 288.0), (448.0, 448.0), (-300.0, -288.0)])
def test_the_scale_is_rounded_before_it_divides(weight, code):
    """B121: 300 / 448 is rounded up to 1, and then 300 / 1 to 288. With 300 / 0.6696 the code would be 448."""
    out = made("* → unpack | quant(fp8_block, scale=f8_e8m0)", {"a.weight": f32(weight, 128, 128)})
    assert out["a.weight"].float().unique().tolist() == [code]
    assert as_bytes(out["a.weight_scale_inv"]) == b"\x7f"


def test_codes_are_made_with_the_scale_that_is_stored():
    """B062: amax 1 under g = 1 has s = 1/6, stored as 0.171875; 0.42 / 0.171875 = 2.44 is 2, and 0.42 / 0.1667 would be 3."""
    x = torch.zeros(2, 16)
    x[0], x[1, 0], x[1, 1] = 2688.0, 1.0, 0.42
    out = made("* → unpack | quant(nvfp4)", {"a.weight": x})
    assert out["a.weight_scale_2"].item() == 1.0
    assert out["a.weight_scale"].float().tolist() == [[448.0], [0.171875]]
    assert out["a.weight"][1].tolist() == [0x47, 0, 0, 0, 0, 0, 0, 0], "6 and 2"


def test_fp8_codes_round_half_to_even():
    """B079: the grid is 32 wide from 256 on; the amax of 448 makes a scale of 1."""
    given, expected = [448.0, 256, 288, 300, 272, 304, -300], [448.0, 256, 288, 288, 256, 320, -288]
    out = made("* → unpack | quant(fp8_block)", {"a.weight": torch.tensor([given])})
    assert out["a.weight_scale_inv"].item() == 1.0
    assert out["a.weight"].float().tolist() == [expected]
    assert as_bytes(out["a.weight"])[1] == 0x78


def test_a_scale_that_is_no_power_of_two_is_requantised_or_refused():
    """B052: under 1 instead of 0.75 the code 448, worth 336, is 320; as it stands it has no E8M0."""
    tensors = fp8("a", 448.0, 0.75)
    out = made("* → unpack | requant(fp8_block, scale=f8_e8m0)", tensors)
    assert as_bytes(out["a.weight_scale_inv"]) == b"\x7f"
    assert out["a.weight"].float().unique().tolist() == [320.0]
    with pytest.raises(RunError, match="scale 0.75 has no f8_e8m0"):
        made("* → unpack | pack(scale=f8_e8m0)", tensors)


@pytest.mark.parametrize("scale, what", [(-1.0, "negative"), (float("nan"), "NaN"), (float("inf"), "infinite")])
@pytest.mark.parametrize("op", ["dequant", "requant(fp8_block, scale=f8_e8m0)", "requant(nvfp4)"])
def test_a_scale_that_is_no_scale_is_refused_with_key_and_index(scale, what, op):
    """B052, B038, B128"""
    tensors = fp8("a", 1.0, 0.5, 256, 128)
    tensors["a.weight_scale_inv"][1, 0] = scale
    with pytest.raises(RunError, match=rf"`a\.weight_scale_inv`\[1, 0\] is {what}"):
        made(f"* → unpack | {op}", tensors)


def test_a_scale_of_zero_is_a_block_of_zeros():
    """B052: legal, since quantisers write it for such blocks; nothing divides by it."""
    assert decoded(fp8("a", 448.0, 0.0))["a.weight"].abs().max() == 0
    out = made("* → unpack | requant(fp8_block, scale=f8_e8m0)", fp8("a", 448.0, 0.0))
    assert out["a.weight"].float().abs().max() == 0 and torch.isfinite(out["a.weight_scale_inv"].float()).all()


# ----------------------------------------------------------------------------------------------------- axes and members


def test_nothing_guesses_an_orientation():
    """B047: square matrices stay as they lie; [[1, 2], [3, 4]] is turned by no rule that does not say so."""
    down = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]], dtype=torch.bfloat16)
    for rules in ("down_proj → unpack | dequant | unstack(E) → {E}.down_proj", "down_proj → unstack(E) → {E}.down_proj"):
        assert made(rules, {"down_proj": down})["0.down_proj"].tolist() == [[1.0, 2.0], [3.0, 4.0]]
    codes = torch.zeros(1, 32, 16, dtype=torch.uint8)
    codes[0, 1, 0], codes[0, 0, 1] = 0x02, 0x70  # row 1, column 0 is 1; row 0, column 3 is 6
    tensors = {"e.weight": codes.view(torch.int8), "e.scale": e8m0(127, 1, 32, 1)}
    out = made("* → unpack | dequant", tensors)["e.weight"][0]
    assert (out.nonzero().tolist(), out[0, 3].item(), out[1, 0].item()) == ([[0, 3], [1, 0]], 6.0, 1.0)


def test_experts_stand_in_numeric_order_and_the_first_is_0():
    """B085, B134: expert 0 is no "none", and 10 comes after 9."""
    tensors = {k: v for e in (10, 3, 0, *range(4, 10), 2, 1) for k, v in mxfp4(f"x.{e}.w1", 0x22, 120 + e).items()}
    out = made("x.{E}.w1 → unpack | stack(E) → x.w1", tensors)
    assert out["x.w1.scale"].view(torch.uint8).flatten().tolist() == list(range(120, 131))
    back = made("x.w1 → unpack | unstack(E) → x.{E}.w1", out)
    assert {k: as_bytes(v) for k, v in back.items()} == {k: as_bytes(v) for k, v in tensors.items()}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("rules, tensors, said", [
    ("x.{E}.w → stack(E) → y", {"x.0.w": f32(1, 1), "x.999999999999.w": f32(1, 1)}, "missing: 1, 2, 3, 4, 5, …"),
    ("x → unstack(E) → {E}.x", {"x": Raw("bf16", (10**12, 0), b"")}, "too many members"),
    ("x → unstack(E) → {E}.x", {"x": Raw("bf16", (0, 4), b"")}, "no members"),
    ("x.{a,b} → split → y.{c,d}", {"x.a": f32(1, 2), "x.b": f32(1, 2)}, "no braces that this split could make"),
])  # fmt: skip
def test_numbers_of_strangers_are_not_counted_to(rules, tensors, said):
    """B085: a number in a name or a shape may be anything; what has no place is refused before it is made."""
    (error,) = planned(rules, tensors).errors
    assert said in error.message


def test_columns_of_f4_are_parted_at_whole_bytes():
    """B149: columns 4 to 8 of eight are the second two bytes; from column 3 on they would begin inside a byte."""
    tensors = {"w": Raw("f4", (1, 8), bytes([0x21, 0x43, 0x65, 0x07]))}
    out = made("w → split(1, [4, 4]) → {a,b}", tensors)
    assert {k: as_bytes(v) for k, v in out.items()} == {"a": b"\x21\x43", "b": b"\x65\x07"}
    (error,) = planned("w → split(1, [3, 5]) → {a,b}", tensors).errors
    assert "3 columns" in error.message and "bytes" in error.message
    (error,) = planned("w → unpack | split(1, [8, 24]) → {a,b}", nvfp4("w", 2, 1, 1, 1, 32)).errors
    assert "8 columns are 0.5 blocks of 16" in error.message


F4 = {name: Raw("f4", (2, 16), bytes(range(i, i + 16))) for name, i in (("a", 0), ("b", 16))}


@pytest.mark.parametrize("rules, tensors, expected", [
    ("{a,b} → cat → c", F4, {"c": [*range(32)]}),
    ("{a,b} → cat(1) → c", F4, {"c": [*range(8), *range(16, 24), *range(8, 16), *range(24, 32)]}),
    ("{p:a,b} → stack(p) → c", F4, {"c": [*range(32)]}),
    ("a → split → {x,y}\nb → keep", F4, {"x": [*range(8)], "y": [*range(8, 16)], "b": [*range(16, 32)]}),
    ("a → split(1) → {x,y}\nb → drop", F4, {"x": [0, 1, 2, 3, 8, 9, 10, 11], "y": [4, 5, 6, 7, 12, 13, 14, 15]}),
    ("c → unstack(E) → {E}.c", {"c": Raw("f4", (2, 2, 4), bytes(range(8)))}, {"0.c": [0, 1, 2, 3], "1.c": [4, 5, 6, 7]}),
])  # fmt: skip
def test_dense_f4_is_moved_in_bytes(rules, tensors, expected):
    """B148, B149"""
    assert {k: list(as_bytes(v)) for k, v in made(rules, tensors).items()} == expected


@pytest.mark.parametrize("rules, shape", [
    ("a → split → {x,y}", (16,)), ("a → split → {x,y}", (2, 7)),
    ("a → unstack(E, 1) → a.{E}", (2, 2)), ("a → unstack(E) → a.{E}", (16,)), ("a → unstack(E) → a.{E}", (2, 8)),
])  # fmt: skip
def test_half_bytes_are_refused(rules, shape):
    """B149: rows that end inside a byte, and elements of half a byte, are no pieces."""
    assert planned(rules, {"a": Raw("f4", shape, bytes(range(int(np.prod(shape)) // 2)))}).errors


# ------------------------------------------------------------------------------------------------------ bytes and owners


def test_what_is_kept_is_not_decoded(monkeypatch, tmp_path):
    """B115: no op runs, and every byte, NaN of any kind too, is the one that was read."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.uint16)
    tensors = nvfp4("a", 6, 1, 0.3, 4, 32, act=0.1) | {"b.weight": every.view(torch.bfloat16), "c.weight": torch.full((3,), -0.0)}
    tensors["a.weight_scale"] = torch.arange(120, 128, dtype=torch.uint8).view(torch.float8_e4m3fn).reshape(4, 2)
    plan = planned("a → keep → x.a\n* → keep", tensors)
    for op in set(map(type, REGISTRY.values())):
        monkeypatch.setattr(op, "reference", lambda *_: pytest.fail("an op ran"))
    assert {(g.action, g.label) for g in view.groups(plan)} == {("keep", "exact")}
    quantrules.apply(plan, tmp_path / "out")
    renamed = {k if k[0] != "a" else f"x.{k}": as_bytes(v) for k, v in tensors.items()}
    assert {k: data for k, (_, _, data) in stored(tmp_path / "out").items()} == renamed


def test_streamed_tensors_own_their_data():
    """B110: all are kept, compared at the end, and written over one after the other."""
    tensors = {k: v for i in range(4) for k, v in nvfp4(f"l.{i}.q", 2, 1, i + 1, 16, 32).items()} | {"n.weight": torch.ones(7)}
    expected = {f"l.{i}.q.weight": 2.0 * (i + 1) for i in range(4)} | {"n.weight": 1.0}
    held = dict(quantrules.stream(planned("* → unpack | dequant", tensors)))
    assert {k: v.unique().tolist() for k, v in held.items()} == {k: [x] for k, x in expected.items()}
    for name in held:
        held[name].fill_(99)
        others = {k: v.unique().tolist() for k, v in held.items() if v.max() != 99}
        assert others == {k: [x] for k, x in expected.items() if k in others}
    assert tensors["n.weight"].tolist() == [1.0] * 7


def test_a_number_that_is_none_stops_the_run_and_is_named(tmp_path):
    """B128: what no header shows, a rule may ask for."""
    x = torch.ones(4, 4, dtype=torch.bfloat16)
    x[2, 1] = float("inf")
    plan = planned("* → assert_finite", {"a.weight": torch.ones(2), "b.weight": x})
    with pytest.raises(RunError, match=r"b(\.weight)?\[2, 1\] is inf"):
        quantrules.apply(plan, tmp_path / "out")
    assert not (tmp_path / "out").exists()
