"""Tiles make the bits of the whole: every op, over random types, leading dimensions and tile boundaries. And inverses."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quantrules.types import Axis, Grid, Type
from tests.ops import forms as f

CUTS = st.lists(st.integers(1, 400), max_size=4).map(tuple)
LEADS = st.sampled_from([(), (1,), (3,), (4,)])


UP_TO_40, UP_TO_3 = st.integers(1, 40), st.integers(1, 3)


@st.composite
def packed(draw, rows=UP_TO_40, lead=LEADS, columns=UP_TO_3):
    """A packed type with any spelling of a format; FP8 with blocks of rows, partial ones too."""
    format = draw(st.sampled_from([f.NVFP4, f.FP8_BLOCK, f.MXFP4]))
    spelling = draw(st.sampled_from(format.spellings))
    n = draw(rows) * (9 if format is f.FP8_BLOCK else 1)
    dtypes = {"scale": draw(st.sampled_from(spelling.part("scale").dtypes))}
    act = format is f.NVFP4 and draw(st.booleans())
    return f.packed(format, *draw(lead), n, 32 * draw(columns), spelling=spelling.name, act=act, **dtypes)


dense = st.builds(
    lambda dtype, lead, n, k: f.dense(dtype, *lead, n, 32 * k),
    st.sampled_from(["bf16", "f32"]),
    LEADS,
    st.integers(1, 300),
    st.integers(1, 4),
)


def check(step, values, cuts):
    whole = f.run(step, values)
    f.same(whole, f.run(step, values, cuts))
    return whole


def resized(t: Type, n: int) -> Type:
    return f.packed(
        t.format,
        *t.shape[:-2],
        n,
        t.shape[-1],
        spelling=t.spelling.name,
        act=t.part("act") is not None,
        scale=t.part("scale").dtype,
    )


@settings(deadline=None, max_examples=60)
@given(t=packed(), cuts=CUTS, seed=st.integers(0, 9), dtype=st.sampled_from(["bf16", "f32", "f16"]))
def test_dequant(t, cuts, seed, dtype):
    check(f.step("dequant", Grid.one(t), dtype=dtype), [f.random(t, seed)], cuts)


@settings(deadline=None, max_examples=60)
@given(t=dense, cuts=CUTS, seed=st.integers(0, 9), format=st.sampled_from(["nvfp4", "fp8_block", "mxfp4"]),
       spelling=st.sampled_from([None, "compressed_tensors"]))  # fmt: skip
def test_quant(t, cuts, seed, format, spelling):
    args = {"spelling": spelling} if format != "fp8_block" else {"scale": "f8_e8m0" if spelling else None}
    check(f.step("quant", Grid.one(t), format=format, **args), [f.random(t, seed)], cuts)


@settings(deadline=None, max_examples=40)
@given(t=packed(), cuts=CUTS, seed=st.integers(0, 9))
def test_pack_and_what_copies(t, cuts, seed):
    v = f.random(t, seed)
    for spelling in t.format.spellings:
        if spelling.part("scale").dtypes[0] == t.part("scale").dtype or t.part("scale").dtype == "f8_e8m0":
            check(f.step("pack", Grid.one(t), spelling=spelling.name), [v], cuts)
    for op in ("keep", "unpack", "assert_finite"):
        f.same(check(f.step(op, Grid.one(t)), [v], cuts), [v])


@settings(deadline=None, max_examples=80)
@given(t=packed(), sizes=st.lists(st.integers(1, 40), min_size=1, max_size=4), cuts=CUTS, seed=st.integers(0, 9))
def test_cat_split_and_align_along_the_rows(t, sizes, cuts, seed):
    unit = 128 if t.format is f.FP8_BLOCK else 1
    types = [resized(t, (s // 9 + 1 if unit > 1 else s) * unit) for s in sizes[:-1]] + [resized(t, sizes[-1])]
    axis, dim = Axis("", tuple(f"m{i}" for i in range(len(types)))), len(t.shape) - 2
    values = [f.random(x, seed + i) for i, x in enumerate(types)]
    joined = check(f.step("cat", Grid((axis,), tuple(types)), dim=dim), values, cuts)
    if not t.part("act"):
        back = f.step("split", Grid.one(joined[0].type), f.context(axis), dim=dim, sizes=[x.shape[dim] for x in types])
        f.same(check(back, joined, cuts), values)
    aligned = f.step("align", Grid((axis,), tuple(types)))
    made = check(aligned, values, cuts)
    one = check(f.step("cat", aligned.made, dim=dim), made, cuts)
    assert one[0].type == resized(t, sum(x.shape[dim] for x in types))
    pieces = f.step("split", Grid.one(one[0].type), f.context(axis), dim=dim, sizes=[x.shape[dim] for x in types])
    f.same(check(pieces, one, cuts), made)


@settings(deadline=None, max_examples=40)
@given(t=packed(rows=st.just(1)), more=st.integers(1, 3), cuts=CUTS, seed=st.integers(0, 9))
def test_cat_and_split_along_the_columns(t, more, cuts, seed):
    if t.format is f.FP8_BLOCK:
        t = f.packed(t.format, *t.shape[:-1], 128, spelling=t.spelling.name, scale=t.part("scale").dtype)
    wide = f.packed(
        t.format, *t.shape[:-1], 32 * more, spelling=t.spelling.name, act=t.part("act") is not None, scale=t.part("scale").dtype
    )
    grid, values = Grid((Axis("", ("a", "b")),), (t, wide)), [f.random(t, seed), f.random(wide, seed + 1)]
    aligned = f.step("align", grid)
    values = f.run(aligned, values)
    dim = len(t.shape) - 1
    joined = check(f.step("cat", aligned.made, dim=dim), values, cuts)
    back = f.step(
        "split", Grid.one(joined[0].type), f.context(Axis("", ("a", "b"))), dim=dim, sizes=[t.shape[dim], wide.shape[dim]]
    )
    f.same(check(back, joined, cuts), values)


@settings(deadline=None, max_examples=60)
@given(t=packed(), n=st.integers(1, 4), cuts=CUTS, seed=st.integers(0, 9), spans=st.booleans())
def test_stack_and_unstack(t, n, cuts, seed, spans):
    axis = Axis("E", tuple(range(n)))
    values = [f.random(t, seed + i) for i in range(n)]
    if spans and t.format is f.NVFP4:
        two = f.step("cat", Grid((Axis("", ("a", "b")),), (t, t)), dim=len(t.shape) - 2)
        values = [f.run(two, [v, v])[0] for v in values]
    stacked = check(f.step("stack", Grid((axis,), tuple(v.type for v in values)), axis="E"), values, cuts)
    f.same(check(f.step("unstack", Grid.one(stacked[0].type), f.context(Axis("E", ())), axis="E"), stacked, cuts), values)


@settings(deadline=None, max_examples=80)
@given(
    shape=st.lists(st.integers(1, 6), max_size=4),
    n=st.integers(1, 3),
    data=st.data(),
    cuts=CUTS,
    seed=st.integers(0, 9),
    dtype=st.sampled_from(["bf16", "i64", "u8", "bool", "f8_e8m0", "c64"]),
)
def test_dense_values_of_any_rank_and_dimension(shape, n, data, cuts, seed, dtype):
    t = f.dense(dtype, *shape)
    rng = np.random.default_rng(seed)
    values = [f.value(t, codes=rng.integers(0, 2, t.nbytes, np.uint8)) for _ in range(n)]
    dim = data.draw(st.integers(0, len(shape)))
    axis = Axis("E", tuple(range(n)))
    stacked = check(f.step("stack", Grid((axis,), (t,) * n), axis="E", dim=dim), values, cuts)
    f.same(
        check(f.step("unstack", Grid.one(stacked[0].type), f.context(Axis("E", ())), axis="E", dim=dim), stacked, cuts), values
    )
    if shape:
        dim = data.draw(st.integers(0, len(shape) - 1))
        joined = check(f.step("cat", Grid((axis,), (t,) * n), axis="E", dim=dim), values, cuts)
        assert joined[0].type.shape[dim] == n * shape[dim]
        f.same(check(f.step("split", Grid.one(joined[0].type), f.context(axis), dim=dim), joined, cuts), values)


@settings(deadline=None, max_examples=20)
@given(t=dense, cuts=CUTS, seed=st.integers(0, 9), dtype=st.sampled_from(["f32", "bf16", "f16"]))
def test_cast(t, cuts, seed, dtype):
    check(f.step("cast", Grid.one(t), dtype=dtype), [f.random(t, seed)], cuts)


def test_tiles_that_begin_inside_a_block_carry_its_phase():
    t = f.packed(f.FP8_BLOCK, 300, 200)
    v, s = f.random(t), f.step("dequant", Grid.one(t))
    tile = v.rows(t, 100, 290)
    assert (tile.phase, tile.start, tile.type.part("scale").shape) == (100, 100, (3, 2))
    f.same(f.run(s, [v]), f.run(s, [v], (1, 100, 127, 128, 129, 290)))


def test_the_comparison_fails_on_a_wrong_byte():
    v = f.random(f.packed(f.NVFP4, 4, 32))
    w = f.random(f.packed(f.NVFP4, 4, 32))
    f.same([v], [w])
    w.parts["scale"][3] ^= 1
    with pytest.raises(AssertionError, match="scale: 1 bytes differ, first at 3"):
        f.same([v], [w])


@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (0, 0), (2, 0, 32), (0, 4, 32)])
def test_values_without_elements(shape):
    v, axis, dim = f.Value.empty(f.dense("bf16", *shape)), Axis("E", (0, 1)), len(shape) - 1
    for format in ("nvfp4", "fp8_block", "mxfp4"):
        packed_ = f.one("quant", v, format=format)
        for op in ("dequant", "pack", "assert_finite"):
            check(f.step(op, Grid.one(packed_.type)), [packed_], (1,))
        if format != "fp8_block":
            check(f.step("cat", Grid((axis,), (packed_.type,) * 2), axis="E", dim=dim - 1), [packed_, packed_], (1,))
    for d in range(len(shape)):
        joined = f.run(f.step("cat", Grid((axis,), (v.type,) * 2), axis="E", dim=d), [v, v])[0]
        f.same(f.run(f.step("split", Grid.one(joined.type), f.context(axis), dim=d), [joined]), [v, v])
    stacked = f.run(f.step("stack", Grid((axis,), (v.type,) * 2), axis="E"), [v, v])[0]
    f.same(f.run(f.step("unstack", Grid.one(stacked.type), f.context(Axis("E", ())), axis="E"), [stacked]), [v, v])


def test_a_member_without_rows_has_no_global_in_the_result():
    types = (f.packed(f.NVFP4, 0, 32), f.packed(f.NVFP4, 4, 32))
    values = [f.random(t) for t in types]
    made = check(f.step("cat", Grid((Axis("", ("a", "b")),), types)), values, (1, 2))[0]
    f.same([made], [values[1]])
