"""dequant: known answers of formats.md, every byte under every scale byte, blocks, leading dimensions, several globals."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quantrules.ops.base import Need, Refused
from quantrules.types import Expr, Grid, PartType
from tests.ops import forms as f

KNOWN = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
LADDER = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nvfp4(spelling, codes, scale, shared, *shape, **more):
    return f.value(f.packed(f.NVFP4, *shape, spelling=spelling, **more), codes=codes, scale=scale, **{"global": shared})


def u8(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.uint8)


@pytest.mark.parametrize(("spelling", "shared"), [("modelopt", 0.25), ("compressed_tensors", 4.0)])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_known_row_of_nvfp4(spelling, shared, dtype):
    """formats.md 1.3, in both spellings: -0 keeps its sign."""
    made = f.one("dequant", nvfp4(spelling, KNOWN, u8([0x3C]), [shared], 1, 16), dtype=dtype).tensor().float()[0]
    assert made.tolist() == [0.375 * v for v in LADDER] + [-0.375 * v for v in LADDER]
    assert torch.signbit(made[8])


@pytest.mark.parametrize("codes_dtype", ["i8", "u8", "f4"])
@pytest.mark.parametrize("scale_dtype", ["f8_e8m0", "u8"])
def test_known_row_of_mxfp4(codes_dtype, scale_dtype):
    """formats.md 3, as signed, unsigned or 4-bit containers (B083: signed codes must not shift arithmetically)."""
    t = f.packed(f.MXFP4, 1, 32, codes=codes_dtype, scale=scale_dtype)
    made = f.numbers(f.value(t, codes=KNOWN.repeat(1, 2), scale=u8([129])))[0]
    assert made.tolist() == ([4 * v for v in LADDER] + [-4 * v for v in LADDER]) * 2
    assert t.part("codes").nbytes == 16


def test_low_nibble_first_under_a_power_of_two():
    """B106: I8 byte 0x21 under E8M0 128 is [1.0, 2.0]."""
    made = f.numbers(f.value(f.packed(f.MXFP4, 1, 32), codes=u8([0x21] + [0] * 15), scale=u8([128])))
    assert made[0, :2].tolist() == [1.0, 2.0]


def test_known_row_of_fp8_blocks():
    """formats.md 5.1: bytes 38 B8 7E 01 under scale 0.5."""
    t = f.packed(f.FP8_BLOCK, 1, 4)
    made = f.numbers(f.value(t, codes=u8([0x38, 0xB8, 0x7E, 0x01]), scale=[[0.5]]))
    assert made.tolist() == [[0.5, -0.5, 224.0, 2.0**-10]]


def test_a_scale_called_scale_is_used():
    """B118: 448 everywhere under E8M0 byte 115 is 0.109375."""
    t = f.packed(f.FP8_BLOCK, 128, 128, spelling="v4")
    made = f.one("dequant", f.value(t, codes=torch.full((128, 128), 0x7E, dtype=torch.uint8), scale=u8([115])))
    assert made.type.dtype == "bf16" and made.tensor().unique().tolist() == [0.109375]


@pytest.mark.parametrize(("dtype", "scale"), [("f8_e8m0", u8([126])), ("f32", [[0.5]])])
def test_the_rule_names_the_result_not_the_scale(dtype, scale):
    """B058: bf16 whatever the scale's dtype is."""
    v = f.value(f.packed(f.FP8_BLOCK, 2, 2, scale=dtype), codes=u8([0x38, 0x40], [0x44, 0x48]), scale=scale)
    assert f.one("dequant", v).type == f.dense("bf16", 2, 2)
    assert f.numbers(v).tolist() == [[0.5, 1.0], [1.5, 2.0]]


def test_partial_blocks_in_both_directions():
    """192 rows of 128-blocks have 2 scale rows, and the second begins at row 128 (formats.md 0.5)."""
    t = f.packed(f.FP8_BLOCK, 192, 200)
    assert t.part("scale").shape == (2, 2)
    made = f.numbers(f.value(t, codes=torch.full((192, 200), 0x38, dtype=torch.uint8), scale=[[1.0, 2.0], [4.0, 8.0]]))
    for rows, columns, value in ((slice(0, 128), slice(0, 128), 1), (slice(0, 128), slice(128, 200), 2),
                                 (slice(128, 192), slice(0, 128), 4), (slice(128, 192), slice(128, 200), 8)):  # fmt: skip
        assert made[rows, columns].unique().tolist() == [value]


def test_scales_of_four_dimensions():
    t = f.packed(f.FP8_BLOCK, 192, 200, spelling="four")
    assert t.part("scale").shape == (2, 1, 2, 1)
    a = f.random(t, 3)
    b = f.value(f.packed(f.FP8_BLOCK, 192, 200), codes=a.tensor("codes").clone(), scale=a.tensor("scale").clone())
    assert torch.equal(f.numbers(a), f.numbers(b))


def e2m1_by_hand(byte: np.ndarray) -> np.ndarray:
    """[…, 2] values of bytes, from the bits of the format and nothing else."""
    nibble = np.stack([byte & 15, byte >> 4], -1)
    exponent, mantissa, sign = nibble >> 1 & 3, nibble & 1, nibble >> 3
    value = np.where(exponent == 0, mantissa * 0.5, (1 + mantissa * 0.5) * 2.0 ** (exponent.astype(int) - 1))
    return np.where(sign, -value, value).astype(np.float32)


def every_pair(format, scale_first: int = 0):
    """A value [256, 256·g] in which row s has all 256 bytes g/2 times each under scale byte s."""
    half = format.block[1] // 2
    codes = np.repeat(np.arange(256, dtype=np.uint8), half)[None].repeat(256, 0)
    scales = np.arange(256, dtype=np.uint8)[:, None].repeat(256, 1)
    return torch.from_numpy(codes), torch.from_numpy(scales), half


@pytest.mark.parametrize("g", [0.3, 2.0**-9, 1.7e38])
@pytest.mark.parametrize("spelling", ["modelopt", "compressed_tensors"])
def test_every_byte_under_every_scale_byte_of_nvfp4(spelling, g):
    codes, scales, half = every_pair(f.NVFP4)
    made = f.numbers(nvfp4(spelling, codes, scales, [g], 256, 256 * 16))
    s = np.array(
        [
            (-1 if b & 128 else 1) * ((b & 7) * 2.0**-9 if b & 120 == 0 else (8 + (b & 7)) * 2.0 ** ((b >> 3 & 15) - 10))
            for b in range(256)
        ]
    )
    s[[0x7F, 0xFF]] = np.nan
    with np.errstate(all="ignore"):
        worth = s.astype(np.float32) * np.float32(g) if spelling == "modelopt" else s.astype(np.float32) / np.float32(g)
        wanted = np.repeat(e2m1_by_hand(np.arange(256)), half, 0).reshape(-1)[None] * worth[:, None]
    np.testing.assert_array_equal(made.numpy(), wanted)
    real = ~np.isnan(wanted)
    assert np.array_equal(np.signbit(made.numpy())[real], np.signbit(wanted)[real])


def test_every_byte_under_every_scale_byte_of_mxfp4():
    codes, scales, half = every_pair(f.MXFP4)
    made = f.numbers(f.value(f.packed(f.MXFP4, 256, 256 * 32), codes=codes, scale=scales))
    powers = np.ldexp(np.float64(1), np.arange(256) - 127)
    powers[255] = np.nan
    with np.errstate(over="ignore"):
        wanted = (np.repeat(e2m1_by_hand(np.arange(256)), half, 0).reshape(-1)[None].astype(np.float64) * powers[:, None]).astype(
            np.float32
        )
    np.testing.assert_array_equal(made.numpy(), wanted)


def test_the_comparison_fails_where_one_scale_is_another():
    codes, scales, _ = every_pair(f.NVFP4)
    right, wrong = scales.clone(), scales.clone()
    wrong[7, 9] = 6
    a, b = (f.numbers(nvfp4("modelopt", codes, s, [0.3], 256, 4096)) for s in (right, wrong))
    with pytest.raises(AssertionError):
        np.testing.assert_array_equal(a.numpy(), b.numpy())


def test_experts_have_a_global_each():
    t = f.packed(f.NVFP4, 3, 2, 32)
    assert [p.shape for p in t.parts] == [(3, 2, 16), (3, 2, 2), (3,)]
    made = f.numbers(
        f.value(
            t,
            codes=torch.full((3, 2, 16), 0x22, dtype=torch.uint8),
            scale=torch.full((3, 2, 2), 0x38, dtype=torch.uint8),
            **{"global": [1.0, 2.0, 4.0]},
        )
    )
    assert [made[e].unique().tolist() for e in range(3)] == [[1.0], [2.0], [4.0]]


def test_activation_scales_stay_behind():
    v = f.random(f.packed(f.NVFP4, 4, 32, act=True))
    assert [p.role for p in f.one("dequant", v).type.parts] == ["codes"]


def test_dense_floats_pass_and_others_lack_their_scales():
    for dtype in ("bf16", "f32", "f16", "f64"):
        s = f.step("dequant", Grid.one(f.dense(dtype, 4, 4)))
        assert s.made == s.takes and s.op.identity(s) and s.op.label(s) == "exact"
    for dtype in ("i8", "u8", "bool", "i64", "f8_e4m3", "f8_e8m0"):
        with pytest.raises(Refused, match="has no scales") as refused:
            f.step("dequant", Grid.one(f.dense(dtype, 4, 4)))
        assert refused.value.code == "QR204"


def test_labels_and_needs():
    def label(t, **args):
        s = f.step("dequant", Grid.one(t), **args)
        return s.op.label(s)

    assert label(f.packed(f.MXFP4, 2, 32)) == "exact in a range"
    assert label(f.packed(f.FP8_BLOCK, 2, 32, scale="f8_e8m0")) == "exact in a range"
    assert label(f.packed(f.FP8_BLOCK, 2, 32)) == label(f.packed(f.NVFP4, 2, 32)) == "lossy"
    assert label(f.packed(f.NVFP4, 2, 32), dtype="f32") == "exact"
    s = f.step("dequant", Grid.one(f.packed(f.NVFP4, 2, 32)))
    assert s.op.needs(s) == (Need("scales", (0,), ("scale", "global")),)


@pytest.mark.parametrize(("t", "role", "shape", "dtype", "says"), [
    (f.packed(f.FP8_BLOCK, 512, 256), "scale", (), "f32", r"scale \(.weight_scale_inv\) is f32\[\]"),
    (f.packed(f.FP8_BLOCK, 512, 256), "scale", (4, 2), "f8_e4m3", r"is f8_e4m3\[4, 2\]"),
    (f.packed(f.FP8_BLOCK, 192, 256), "scale", (1, 2), "f32", r"is f32\[1, 2\]"),
    (f.packed(f.NVFP4, 4, 48), "scale", (4, 4), "f8_e4m3", r"is f8_e4m3\[4, 4\]"),
    (f.packed(f.MXFP4, 4, 72), "scale", (4, 2), "f8_e8m0", r"is f8_e8m0\[4, 2\]"),
])  # fmt: skip
def test_a_scale_of_a_wrong_rank_dtype_or_grid(t, role, shape, dtype, says):
    """B019, B076 and the first two faults of deepseek_v4.md: type errors of the plan, with shapes and names."""
    from attrs import evolve

    wrong = evolve(t, parts=tuple(PartType(role, dtype, shape) if p.role == role else p for p in t.parts))
    for op in ("unpack", "dequant", "pack"):
        with pytest.raises(Refused, match=says) as refused:
            f.step(op, Grid.one(wrong))
        assert refused.value.code == "QR203" and str(t.part(role).shape[0]) in refused.value.help
    with pytest.raises(Refused, match=f"has no {role}"):
        f.step("dequant", Grid.one(evolve(t, parts=tuple(p for p in t.parts if p.role != role))))


def test_partial_groups_are_read():
    """B019: K = 72 in groups of 32 has 3 scale columns, and the last covers 8."""
    t = f.packed(f.MXFP4, 1, 72)
    made = f.numbers(f.value(t, codes=torch.full((1, 36), 0x22, dtype=torch.uint8), scale=u8([127, 128, 129])))[0]
    assert made.tolist() == [1.0] * 32 + [2.0] * 32 + [4.0] * 8


def test_symbolic_dimensions():
    """Type rules serve schemas too."""
    h = Expr.of("hidden")
    t = f.packed(f.NVFP4, 2 * h, 32 * h)
    assert str(f.step("dequant", Grid.one(t)).made.items[0]) == "bf16[2*hidden, 32*hidden]"
    assert str(t.part("scale")) == "f8_e4m3[2*hidden, 2*hidden]"


def test_one_global_scale_of_either_rank():
    """[] and [1] are alike on disk, whatever the spelling writes itself; so members that differ in this join."""
    from quantrules import parse
    from quantrules.checkpoint import StateDictSource
    from quantrules.testing import run

    part = {"weight": torch.full((2, 8), 0x22, dtype=torch.uint8), "weight_scale": torch.ones(2, 1).to(torch.float8_e4m3fn)}
    tensors = {f"{m}.{k}": v for m in "ab" for k, v in part.items()}
    tensors |= {"a.weight_scale_2": torch.tensor(0.5), "b.weight_scale_2": torch.tensor([2.0])}
    made = run(parse("{a,b} → unpack | cat | dequant → x").bind(StateDictSource(tensors)))
    assert made["x.weight"].float().unique(dim=1).flatten().tolist() == [0.5, 0.5, 2.0, 2.0]
