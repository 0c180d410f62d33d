"""cat, stack, split, unstack, align and pack: types of packed values, what is refused, and that they undo each other."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from quantrules.ops.base import Need, Refused
from quantrules.types import Axis, Expr, Grid
from tests.ops import forms as f
from tests.ops.test_dequant import u8

AB = Axis("", ("a", "b"))


def pair(*types, axis=AB):
    return Grid((axis,), types)


def join(values, axis="", **args):
    """The values of one axis, aligned or not, joined."""
    labels = Axis(axis, tuple("abcdefgh"[: len(values)]))
    s = f.step("cat", Grid((labels,), tuple(v.type for v in values)), **args)
    return f.run(s, values)[0]


def aligned(values, **args):
    labels = Axis("", tuple("abcdefgh"[: len(values)]))
    s = f.step("align", Grid((labels,), tuple(v.type for v in values)), **args)
    return f.run(s, values)


def one_block(spelling, q, s, g, act=None):
    """NVFP4 [1, 16] whose first element is q, under scale s and global g."""
    code = {0.5: 1, 1.0: 2, 2.0: 4, 6.0: 7}[q]
    more = {"act": [act]} if act is not None else {}
    return f.value(f.packed(f.NVFP4, 1, 16, spelling=spelling, act=act is not None), codes=u8([code] + [0] * 7),
                   scale=torch.tensor([[s]]).to(torch.float8_e4m3fn), **{"global": [g]}, **more)  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- types


def test_a_cat_of_nvfp4_has_a_global_for_each_member():
    made = f.step("cat", pair(f.packed(f.NVFP4, 6, 32), f.packed(f.NVFP4, 4, 32))).made.items[0]
    assert str(made) == "nvfp4[10, 32; 2]" and made.spans == (6, 4)
    assert [str(p) for p in made.parts] == ["u8[10, 16]", "f8_e4m3[10, 2]", "f32[2]"]
    more = f.step("cat", pair(made, f.packed(f.NVFP4, 2, 32))).made.items[0]
    assert more.spans == (6, 4, 2)
    with pytest.raises(Refused, match="3 global scales") as refused:
        f.step("pack", Grid.one(more))
    assert refused.value.code == "QR208" and "align" in refused.value.help


def test_aligned_members_keep_one_global():
    s = f.step("align", pair(f.packed(f.NVFP4, 6, 32), f.packed(f.NVFP4, 4, 32)))
    made = f.step("cat", s.made).made.items[0]
    assert str(made) == "nvfp4[10, 32]" and made.part("global").shape == () and made.aligned == ()
    assert f.step("pack", Grid.one(made), spelling="compressed_tensors").made.items[0].part("global").shape == (1,)


def test_experts_stack_and_join_along_their_rows():
    gate_up, e = Axis("", ("w1", "w3")), Axis("E", (0, 1, 2))
    t = f.packed(f.NVFP4, 4, 32, spelling="compressed_tensors", act=True)
    grid = Grid((e, gate_up), (t,) * 6)
    made = f.step("stack", f.step("cat", grid).made, axis="E").made.items[0]
    assert str(made) == "nvfp4[3, 8, 32; 2]" and made.part("global").shape == (3, 2) and made.part("act").shape == (3, 1)
    made = f.step("stack", f.step("cat", f.step("align", grid).made).made, axis="E").made.items[0]
    assert str(made) == "nvfp4[3, 8, 32]" and made.part("global").shape == (3, 1)
    other = f.step("cat", f.step("stack", grid, axis="E").made, dim=1).made.items[0]
    assert str(other) == "nvfp4[3, 8, 32; 2]", "either order"


def test_fp8_blocks_join_where_only_the_last_member_is_partial():
    made = f.step("cat", pair(f.packed(f.FP8_BLOCK, 256, 200), f.packed(f.FP8_BLOCK, 100, 200))).made.items[0]
    assert str(made.part("scale")) == "f32[3, 2]"
    with pytest.raises(Refused, match="576 rows are 4.5 blocks of 128") as refused:
        f.step("cat", pair(f.packed(f.FP8_BLOCK, 576, 4096), f.packed(f.FP8_BLOCK, 1536, 4096)))
    assert (
        refused.value.code == "QR201"
        and refused.value.label == "b would begin inside one"
        and "quant(fp8_block)" in refused.value.help
    )


def test_columns_join_where_scales_allow():
    made = f.step("cat", pair(f.packed(f.MXFP4, 4, 32), f.packed(f.MXFP4, 4, 64)), dim=1).made.items[0]
    assert str(made) == "mxfp4[4, 96]" and str(made.part("scale")) == "f8_e8m0[4, 3]"
    assert f.step("cat", pair(f.dense("bf16", 4, 3), f.dense("bf16", 4, 5)), dim=-1).made.items[0].shape == (4, 8)
    both = pair(f.packed(f.NVFP4, 4, 32), f.packed(f.NVFP4, 4, 32))
    with pytest.raises(Refused, match="along the columns") as refused:
        f.step("cat", both, dim=1)
    assert refused.value.code == "QR208"
    assert str(f.step("cat", f.step("align", both).made, dim=1).made.items[0]) == "nvfp4[4, 64]"
    with pytest.raises(Refused, match="48 columns are 1.5 blocks of 32"):
        f.step("cat", pair(f.packed(f.MXFP4, 4, 48), f.packed(f.MXFP4, 4, 32)), dim=1)


@pytest.mark.parametrize(
    ("types", "says", "help"),
    [
        ((f.packed(f.NVFP4, 4, 32), f.dense("bf16", 4, 32)), r"a nvfp4\[4, 32\], b bf16\[4, 32\]", "dequant"),
        ((f.packed(f.NVFP4, 4, 32), f.packed(f.MXFP4, 4, 32)), r"a nvfp4\[4, 32\], b mxfp4\[4, 32\]", "requant"),
        ((f.dense("f32", 4, 32), f.dense("bf16", 4, 32)), r"a f32\[4, 32\], b bf16\[4, 32\]", "cast"),
        ((f.packed(f.NVFP4, 4, 32), f.packed(f.NVFP4, 4, 64)), r"nvfp4\[4, 64\]", "one type"),
        (
            (f.packed(f.NVFP4, 4, 32), f.packed(f.NVFP4, 4, 32, spelling="compressed_tensors")),
            "modelopt and compressed_tensors",
            "pack",
        ),
        ((f.packed(f.NVFP4, 4, 32, act=True), f.packed(f.NVFP4, 4, 32)), "act f32", "same parts"),
        (
            (f.packed(f.FP8_BLOCK, 128, 128), f.packed(f.FP8_BLOCK, 128, 128, scale="f8_e8m0")),
            "scale f32 and codes",
            "same parts",
        ),
        ((f.dense("bf16", 4), f.dense("bf16", 4, 4)), r"bf16\[4\], b bf16\[4, 4\]", "one type"),
    ],
)
def test_members_of_different_types(types, says, help):
    with pytest.raises(Refused, match=says) as refused:
        f.step("cat", pair(*types))
    assert refused.value.code == "QR202" and help in refused.value.help


def test_axes_of_a_cat():
    t = f.dense("bf16", 4, 4)
    with pytest.raises(Refused, match="no axis without a name; its axes: none"):
        f.step("cat", Grid.one(t))
    with pytest.raises(Refused, match="its axes: p") as refused:
        f.step("cat", pair(t, t, axis=Axis("p", ("a", "b"))))
    assert refused.value.code == "QR206"
    with pytest.raises(Refused, match="no axis q"):
        f.step("cat", pair(t, t), axis="q")
    with pytest.raises(Refused, match="several axes without a name"):
        f.step("cat", Grid((AB, AB), (t,) * 4))
    assert f.step("cat", pair(t, t, axis=Axis("p", ("a", "b"))), axis="p", dim=1).made.items[0].shape == (4, 8)
    assert f.step("cat", pair(t, t), axis=1).made.items[0].shape == (4, 8), "a number where an axis may stand is the dimension"


def test_three_dimensions_need_a_written_one():
    t = f.dense("bf16", 2, 4, 4)
    with pytest.raises(Refused, match="3 dimensions") as refused:
        f.step("cat", pair(t, t))
    assert refused.value.code == "QR207"
    with pytest.raises(Refused, match="no dimension 3"):
        f.step("cat", pair(t, t), dim=3)
    assert f.step("cat", pair(t, t), dim=0).made.items[0].shape == (4, 4, 4)
    with pytest.raises(Refused, match="3 dimensions"):
        f.step("split", Grid.one(t), f.context(AB))


def test_stacks_without_a_hole():
    t, ctx = f.dense("bf16", 4), f.context
    assert f.step("stack", Grid((Axis("E", (0, 1, 2)),), (t,) * 3), axis="E").made.items[0].shape == (3, 4)
    for labels in ((0, 2), (1, 2)):
        with pytest.raises(Refused, match="missing: ") as refused:
            f.step("stack", Grid((Axis("E", labels),), (t,) * 2), axis="E")
        assert refused.value.code == "QR209"
    f.step("stack", Grid((Axis("E", (8, 9)),), (t,) * 2), ctx(E=8), axis="E")
    f.step("stack", Grid((Axis("p", ("w1", "w3")),), (t,) * 2), axis="p")
    with pytest.raises(Refused, match="packed"):
        f.step("stack", Grid((Axis("E", (0, 1)),), (f.packed(f.NVFP4, 4, 32),) * 2), axis="E", dim=1)


def test_splits():
    t = f.dense("bf16", 6, 4)
    s = f.step("split", Grid.one(t), f.context(AB))
    assert s.made.axes == (AB,) and [x.shape for x in s.made.items] == [(3, 4)] * 2
    assert [x.shape for x in f.step("split", Grid.one(t), f.context(AB), sizes=[1, 5]).made.items] == [(1, 4), (5, 4)]
    s = f.step("split", Grid.one(t), dim=1, sizes={"nope": 1, "pe": 3})
    assert s.made.axes == (Axis("", ("nope", "pe")),) and s.made.items[1].shape == (6, 3)
    for args, ctx, says in (
        ({"sizes": [1, 4]}, f.context(AB), "1 \\+ 4 is 5; dimension 0"),
        ({"sizes": [1, 2, 3]}, f.context(AB), "3 sizes for the 2 members"),
        ({}, f.context(Axis("", tuple("abcd"))), "not 4 equal parts"),
        ({}, f.context(), "no braces"),
    ):
        with pytest.raises(Refused, match=says) as refused:
            f.step("split", Grid.one(t), ctx, **args)
        assert refused.value.code == "QR210"


def test_splits_of_packed_values():
    t = f.packed(f.FP8_BLOCK, 2112, 128)
    with pytest.raises(Refused, match="576 rows are 4.5 blocks") as refused:
        f.step("split", Grid.one(t), f.context(AB), sizes=[576, 1536])
    assert refused.value.label == "b would begin inside one"
    assert [str(x.part("scale")) for x in f.step("split", Grid.one(t), f.context(AB), sizes=[1536, 576]).made.items] == [
        "f32[12, 1]",
        "f32[5, 1]",
    ]
    three = f.step("cat", Grid((Axis("", tuple("qkv")),), tuple(f.packed(f.NVFP4, n, 32) for n in (8, 2, 2)))).made.items[0]
    back = f.step("split", Grid.one(three), f.context(Axis("", tuple("qkv"))), sizes=[8, 2, 2]).made.items
    assert [(x.shape, x.spans, x.part("global").shape) for x in back] == [((8, 32), (), ()), ((2, 32), (), ()), ((2, 32), (), ())]
    two = f.step("split", Grid.one(three), f.context(AB), sizes=[8, 4]).made.items
    assert two[1].spans == (2, 2)
    with pytest.raises(Refused, match="cut the rows of one scale") as refused:
        f.step("split", Grid.one(three), f.context(AB))
    assert refused.value.code == "QR208"
    # one scale for all rows: each piece has a copy, and joined again they have one
    pieces = f.step("split", Grid.one(f.packed(f.NVFP4, 12, 32)), f.context(AB)).made
    assert f.step("cat", pieces).made.items[0] == f.packed(f.NVFP4, 12, 32)


def test_unstacks():
    t = f.packed(f.NVFP4, 3, 4, 32)
    s = f.step("unstack", Grid.one(t), f.context(Axis("E", ())), axis="E")
    assert s.made.axes == (Axis("E", (0, 1, 2)),) and s.made.items[0] == f.packed(f.NVFP4, 4, 32)
    s = f.step("unstack", Grid.one(t), f.context(Axis("E", ()), E=8), axis="E")
    assert s.made.axes[0].labels == (8, 9, 10)
    with pytest.raises(Refused, match="3 entries, g of the target 2"):
        f.step("unstack", Grid.one(t), f.context(Axis("g", ("a", "b"))), axis="g")
    with pytest.raises(Refused, match="no axis E; it has g"):
        f.step("unstack", Grid.one(t), f.context(Axis("g", ("a", "b"))), axis="E")
    with pytest.raises(Refused, match="packed"):
        f.step("unstack", Grid.one(t), f.context(Axis("E", ())), axis="E", dim=1)
    with pytest.raises(Refused, match="known only where"):
        f.step("unstack", Grid.one(f.dense("bf16", Expr.of("n"), 4)), f.context(Axis("E", ())), axis="E")


def test_symbolic_sizes():
    n = Expr.of("n")
    made = f.step("cat", pair(f.packed(f.NVFP4, 2 * n, 32), f.packed(f.NVFP4, 4, 32))).made.items[0]
    assert str(made) == "nvfp4[2*n + 4, 32; 2]"
    with pytest.raises(Refused, match="n rows are not whole blocks of 128"):
        f.step("cat", pair(f.packed(f.FP8_BLOCK, n, 128), f.packed(f.FP8_BLOCK, 128, 128)))
    assert str(f.step("split", Grid.one(f.dense("bf16", 2 * n, 4)), f.context(AB)).made.items[0]) == "bf16[n, 4]"


# -------------------------------------------------------------------------------------------------------------- values


def test_different_globals_are_joined_without_a_change():
    """B007, B008, B035: each member keeps its own numbers, where engines take one global for both."""
    gate, up = one_block("compressed_tensors", 6.0, 1.0, 2.0), one_block("compressed_tensors", 6.0, 1.0, 4.0)
    assert f.numbers(join([gate, up]))[:, 0].tolist() == [3.0, 1.5]
    w1, w3 = one_block("modelopt", 2.0, 1.0, 0.5), one_block("modelopt", 2.0, 1.0, 0.25)
    assert f.numbers(join([w1, w3]))[:, 0].tolist() == [1.0, 0.5]


@pytest.mark.parametrize(
    ("members", "shared", "scales", "numbers"),
    [
        ([("compressed_tensors", 6.0, 1.0, 2.0), ("compressed_tensors", 6.0, 1.0, 4.0)], 2.0, [1.0, 0.5], [3.0, 1.5]),  # B007
        ([("modelopt", 1.0, 2.0, 0.5), ("modelopt", 1.0, 2.0, 0.25)], 0.5, [2.0, 1.0], [1.0, 0.5]),  # B008
        ([("modelopt", 2.0, 1.0, 0.5), ("modelopt", 2.0, 1.0, 0.25)], 0.5, [1.0, 0.5], [1.0, 0.5]),  # B035
        (
            [("modelopt", 1.0, 1.0, 1.0), ("modelopt", 1.0, 1.0, 2.0), ("modelopt", 1.0, 1.0, 4.0)],
            4.0,
            [0.25, 0.5, 1.0],
            [1, 2, 4],
        ),  # B010
    ],
)
@pytest.mark.parametrize("mode", [None, "exact"])
def test_align_rescales_by_powers_of_two_exactly(members, shared, scales, numbers, mode):
    values = [one_block(*m) for m in members]
    made = join(aligned(values, mode=mode))
    assert made.tensor("global").reshape(-1).tolist() == [shared] and made.type.spans == ()
    assert made.tensor("scale").float()[:, 0].tolist() == scales
    assert f.numbers(made)[:, 0].tolist() == numbers


def test_align_of_globals_that_are_equal_changes_no_byte():
    values = [f.random(f.packed(f.NVFP4, 6, 64), i) for i in range(3)]
    for v in values:
        v.tensor("global").fill_(0.3)
    for a, b in zip(values, aligned(values), strict=True):
        assert all((a.parts[r] == b.parts[r]).all() for r in a.parts)


@pytest.mark.parametrize("spelling", ["modelopt", "compressed_tensors"])
def test_align_quantises_again_what_it_cannot_rescale(spelling):
    x = [torch.randn(8, 64, generator=torch.Generator().manual_seed(i)) * s for i, s in enumerate((1.0, 0.37, 0.011))]
    values = [f.one("quant", f.of(v, "f32"), format="nvfp4", spelling=spelling) for v in x]
    s = f.step("align", Grid((Axis("", tuple("qkv")),), tuple(v.type for v in values)))
    made = f.run(s, values)
    assert len({float(v.tensor("global")) for v in made}) == 1
    for before, after in zip(values, made, strict=True):
        a, b = f.numbers(before), f.numbers(after)
        step = a.abs().unfold(1, 16, 16).amax(2).repeat_interleave(16, 1) / 6
        assert ((a - b).abs() <= step * 1.13).all() and ((a - b).abs() > 0).any() == (before is not values[0])
    assert dict(s.op.report(s, s.op.survey(s, tuple(values), None))) == {"q": True, "k": False, "v": False}


def test_align_keeps_blocks_that_are_exact_among_others_that_are_not():
    """Ratio 3/4: scale 2 becomes 1.5 and its codes stay; scale 1.125 has no 0.84375, so that block is quantised again."""
    t = f.packed(f.NVFP4, 1, 32)
    a = f.value(t, codes=u8([0x77] * 16), scale=torch.tensor([[1.0, 1.0]]).to(torch.float8_e4m3fn), **{"global": 1.0})
    b = f.value(
        t, codes=u8([0x31] * 8 + [0x31] * 8), scale=torch.tensor([[2.0, 1.125]]).to(torch.float8_e4m3fn), **{"global": 0.75}
    )
    made = aligned([a, b])[1]
    assert made.tensor("scale").float()[0, 0] == 1.5 and set(made.parts["codes"][:8]) == {0x31}
    assert f.numbers(made)[0, :16].tolist() == f.numbers(b)[0, :16].tolist()
    assert made.tensor("scale").float()[0, 1] == 0.21875, "1.5 · 0.84375 / 6 = 0.2109375 is a tie between 0.203125 and 0.21875"
    with pytest.raises(Refused, match="1 block scales cannot") as refused:
        aligned([a, b], mode="exact")
    assert refused.value.code == "QR214"
    s = f.step("align", pair(t, t), mode="exact")
    assert Need("exact-align", (0, 1), ("scale", "global")) in s.op.needs(s) and s.op.label(s) == "exact"


def test_activation_scales_join_by_the_larger_range():
    for spelling, acts, joint in (("modelopt", (0.5, 0.25), 0.5), ("compressed_tensors", (0.5, 0.25), 0.25)):
        values = [one_block(spelling, 1.0, 1.0, 1.0, act=a) for a in acts]
        assert join(values).tensor("act").reshape(-1).tolist() == [joint]
        assert [v.tensor("act").reshape(-1).tolist() for v in aligned(values)] == [[joint]] * 2
        assert join(aligned(values)).tensor("act").reshape(-1).tolist() == [joint]


def test_align_lets_pass_what_has_no_global():
    for t in (f.dense("bf16", 4, 4), f.packed(f.FP8_BLOCK, 128, 128), f.packed(f.MXFP4, 4, 32)):
        s = f.step("align", pair(t, t))
        assert s.made == s.takes and s.op.identity(s) and not s.op.needs_survey(s)
    with pytest.raises(Refused, match="members are"):
        f.step("align", pair(f.packed(f.NVFP4, 4, 32), f.dense("bf16", 4, 32)))


def test_align_of_one_axis_leaves_others_apart():
    e, p = Axis("E", (0, 1)), Axis("p", ("w1", "w3"))
    values = [one_block("modelopt", 1.0, 1.0, g) for g in (1.0, 2.0, 8.0, 4.0)]
    s = f.step("align", Grid((e, p), tuple(v.type for v in values)), axis="p")
    assert [float(v.tensor("global")) for v in f.run(s, values)] == [2.0, 2.0, 8.0, 8.0]
    assert f.step("cat", s.made, axis="E").made.items[0].spans == (1, 1), "aligned along p says nothing of E"


def test_a_value_of_several_globals_is_aligned_by_itself():
    values = [one_block("modelopt", 1.0, 1.0, g) for g in (1.0, 0.5, 0.25)]
    v = join(values)
    s = f.step("align", Grid.one(v.type))
    made = f.run(s, [v])[0]
    assert str(made.type) == "nvfp4[3, 16]" and torch.equal(f.numbers(made), f.numbers(v))


# ---------------------------------------------------------------------------------------------------------------- pack


def test_pack_turns_a_multiplier_into_a_divisor():
    v = f.random(f.packed(f.NVFP4, 4, 32, act=True), 1)
    s = f.step("pack", Grid.one(v.type), spelling="compressed_tensors")
    made = f.run(s, [v])[0]
    assert (made.parts["codes"] == v.parts["codes"]).all() and (made.parts["scale"] == v.parts["scale"]).all()
    assert (
        made.type.part("global").shape == (1,)
        and made.tensor("global") == 1 / v.tensor("global")
        and made.tensor("act") == 1 / v.tensor("act")
    )
    assert s.op.label(s) == "lossy" and not s.op.identity(s)
    back = f.one("pack", made, spelling="modelopt")
    assert back.type == v.type and abs(int(back.parts["global"].view("i4")[0]) - int(v.parts["global"].view("i4")[0])) <= 1
    v.tensor("global").fill_(0.0)
    with pytest.raises(Refused, match="global 0.0 has no inverse"):
        f.one("pack", v, spelling="compressed_tensors")


def test_e8m0_scales_become_numbers_by_value():
    """B029: E8M0 byte 120 is 2^-7 in f32, never 120; and a byte is a byte where the container is u8."""
    v = f.value(f.packed(f.FP8_BLOCK, 128, 128, spelling="v4"), codes=torch.zeros(128, 128, dtype=torch.uint8), scale=u8([120]))
    made = f.one("pack", v, spelling="deepseek", scale="f32")
    assert made.tensor("scale").tolist() == [[0.0078125]]
    f.same([f.one("pack", made, spelling="v4", scale="f8_e8m0")], [v])
    m = f.value(f.packed(f.MXFP4, 1, 32), codes=u8([0x21] * 16), scale=u8([120]))
    s = f.step("pack", Grid.one(m.type), spelling="compressed_tensors")
    assert [str(p) for p in s.made.items[0].parts] == ["u8[1, 16]", "u8[1, 1]"] and s.op.identity(s) and s.op.label(s) == "exact"
    assert f.run(s, [m])[0].parts["scale"].tolist() == [120]
    made.tensor("scale").fill_(0.75)
    with pytest.raises(Refused, match="scale 0.75 has no f8_e8m0") as refused:
        f.one("pack", made, spelling="v4", scale="f8_e8m0")
    assert refused.value.code == "QR215"


def test_f4_codes_are_bytes():
    t = f.packed(f.NVFP4, 4, 32, codes="f4")
    assert str(t.part("codes")) == "f4[4, 32]" and t.part("codes").nbytes == 64
    v = f.random(t)
    made = f.one("pack", v, spelling="compressed_tensors")
    assert str(made.type.part("codes")) == "u8[4, 16]" and (made.parts["codes"] == v.parts["codes"]).all()


@pytest.mark.parametrize(("t", "args", "code", "says"), [
    (f.packed(f.NVFP4, 4, 32), {"spelling": "gguf"}, "QR211", "it has modelopt, compressed_tensors"),
    (f.packed(f.FP8_BLOCK, 128, 128), {"scale": "bf16"}, "QR211", "f32 or f8_e8m0, not bf16"),
    (f.dense("bf16", 4), {"spelling": "nothing"}, "QR211", "it has weight, bare"),
])  # fmt: skip
def test_pack_refuses(t, args, code, says):
    with pytest.raises(Refused, match=says) as refused:
        f.step("pack", Grid.one(t), **args)
    assert refused.value.code == code


def test_pack_of_parts_that_a_spelling_has_no_place_for():
    bare = evolve(f.NVFP4.spellings[1], name="w4a16", parts=f.NVFP4.spellings[1].parts[:3])
    format = evolve(f.NVFP4, spellings=(*f.NVFP4.spellings, bare))
    with pytest.raises(Refused, match="no place for the act") as refused:
        f.step("pack", Grid.one(evolve(f.packed(f.NVFP4, 4, 32, act=True), format=format)), spelling="w4a16")
    assert refused.value.code == "QR205"


def test_names_of_dense_values():
    t = f.dense("bf16", 4, 4)
    assert f.step("pack", Grid.one(t), spelling="bare").made.items[0].spelling.name == "bare"
    s = f.step("pack", Grid.one(t), spelling="modelopt")
    assert s.made == s.takes and s.op.identity(s), "one rule serves a module that was never quantised"


def test_unpack_requires_a_format():
    for t in (f.dense("bf16", 4, 4), f.packed(f.NVFP4, 4, 32)):
        assert f.step("unpack", Grid.one(t)).made == Grid.one(t)
        with pytest.raises(Refused, match="not mxfp4") as refused:
            f.step("unpack", Grid.one(t), format=f.MXFP4)
        assert refused.value.code == "QR200"
        assert f.step("unpack", Grid.one(t), format=t.format.name).made == Grid.one(t)
