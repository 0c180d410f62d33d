"""Placing is a pure function: where each target goes, and the exact headers, before the first byte."""

import json
import sys
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from quantrules.checkpoint import Targets, place
from quantrules.checkpoint.headers import parse_canonical, parse_header
from quantrules.diagnostics import RunError
from quantrules.types import DTYPE_BITS

dtypes = st.sampled_from(sorted(set(DTYPE_BITS) - {"f4", "f6_e2m3", "f6_e3m2"}))
shapes = st.lists(st.sampled_from([0, 1, 2, 3, 5, 8, 64, 96]), max_size=3).map(tuple)
f4 = shapes.map(lambda s: ("f4", (*s, 4)))
columns = st.lists(st.tuples(st.one_of(st.tuples(dtypes, shapes), f4), st.integers(0, 5)), max_size=30)
sizes = st.sampled_from([1, 100, 5000, 1 << 40])


def placed(columns, shard_size):
    targets = [(f"t.{i}", dtype, shape) for i, ((dtype, shape), _) in enumerate(columns)]
    return targets, place(targets, [g for _, g in columns], shard_size, {"a": "b"})


@given(columns, sizes)
def test_tensors_cover_the_data_without_hole_or_overlap_and_headers_say_where(columns, shard_size):
    targets, placing = placed(columns, shard_size)
    assert sum(map(len, (np.flatnonzero(placing.shard == i) for i in range(len(placing.files))))) == len(targets)
    for i, (header, size) in enumerate(zip(placing.headers, placing.sizes)):
        read = parse_header(header[8:], size - len(header), "shard")  # refuses holes, overlaps, wrong sizes and ends
        told = {n: (read.kinds[k], b, e) for n, k, b, e in zip(read.names, read.kind, read.begin, read.end)}
        mine = np.flatnonzero(placing.shard == i)
        offsets = placing.offset[mine] - len(header)
        assert told == {
            targets[t][0]: ((targets[t][1].upper(), targets[t][2]), o, o + placing.nbytes[t]) for t, o in zip(mine, offsets)
        }
        assert read.metadata == {"a": "b", "format": "pt"}


@given(columns, sizes)
def test_data_begins_on_a_page_and_each_tensor_on_its_element(columns, shard_size):
    targets, placing = placed(columns, shard_size)
    for header in placing.headers:
        assert len(header) % 4096 == 0 and int.from_bytes(header[:8], "little") == len(header) - 8
    for (_, dtype, _), offset, size in zip(targets, placing.offset.tolist(), placing.nbytes.tolist()):
        assert offset % max(1, DTYPE_BITS[dtype] // 8) == 0
        assert offset % min(4096, size & -size or 4096) == 0


@given(columns, sizes)
def test_a_group_is_never_split_and_a_shard_is_over_full_only_by_one_group(columns, shard_size):
    _, placing = placed(columns, shard_size)
    groups = np.array([g for _, g in columns])
    for g in set(groups.tolist()):
        assert len(set(placing.shard[groups == g].tolist())) == 1
    for i in range(len(placing.files)):
        mine = placing.shard == i
        filled = {g for g in groups[mine].tolist() if placing.nbytes[groups == g].sum()}
        assert placing.nbytes[mine].sum() <= shard_size or len(filled) == 1


@given(columns, sizes)
def test_the_same_targets_give_the_same_placing(columns, shard_size):
    _, a = placed(columns, shard_size)
    _, b = placed(columns, shard_size)
    assert (a.files, a.headers, a.sizes, a.index()) == (b.files, b.headers, b.sizes, b.index())
    assert all((x == y).all() for x, y in ((a.shard, b.shard), (a.offset, b.offset), (a.nbytes, b.nbytes)))


@given(columns, sizes)
def test_the_index_lists_each_target_in_its_shard_sorted_by_name(columns, shard_size):
    targets, placing = placed(columns, shard_size)
    index = json.loads(placing.index())
    assert list(index["weight_map"].items()) == sorted((t[0], placing.files[s]) for t, s in zip(targets, placing.shard))
    assert index["metadata"] == {"total_size": int(placing.nbytes.sum())}


def test_the_index_is_the_text_that_json_would_write():
    placing = place([('b"\\é', "u8", (1,)), ("a", "u8", (2,))], [0, 1], 1)
    index = {"metadata": {"total_size": 3}, "weight_map": {"a": placing.files[1], 'b"\\é': placing.files[0]}}
    assert placing.index().decode() == json.dumps(index, indent=2) + "\n"


def test_groups_fill_shards_in_the_order_in_which_they_appear():
    placing = place([(n, "u8", (6,)) for n in "abcd"], [7, 3, 7, 1], shard_size=12)
    assert placing.shard.tolist() == [0, 1, 0, 1]
    assert placing.files == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def test_a_weight_and_its_scale_stay_together_though_the_shard_is_full():
    placing = place([("w", "u8", (100,)), ("w.scale", "u8", (10,)), ("v", "u8", (100,))], [0, 0, 1], shard_size=100)
    assert placing.shard.tolist() == [0, 0, 1]


def test_large_powers_of_two_come_first_then_the_order_of_the_plan():
    placing = place(
        [("a", "u8", (3,)), ("b", "f32", (2,)), ("c", "u8", (8192,)), ("d", "u8", (5,)), ("e", "bf16", ()), ("f", "u8", (4096,))],
        [0] * 6,
        1,
    )
    start = len(placing.headers[0])
    assert (placing.offset - start).tolist() == [8192 + 4096 + 10, 8192 + 4096, 0, 8192 + 4096 + 13, 8192 + 4096 + 8, 8192]


def test_metadata_keeps_the_source_s_and_says_format_pt():
    (header,) = place([("w", "u8", (1,))], [0], 1, {"z": "é", "format": "np"}).headers
    assert header[8:].startswith(
        '{"__metadata__":{"format":"pt","z":"é"},"w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'.encode()
    )


def test_our_headers_take_the_short_way():
    (header,) = place([(f"l.{i}", "bf16", (2, 3)) for i in range(3)], [0] * 3, 100, {"a": "b"}).headers
    assert parse_canonical(header[8:].decode()) is not None


def test_nothing_to_write_is_no_shard():
    placing = place([], [], 100)
    assert (placing.files, json.loads(placing.index())["weight_map"]) == ((), {})


@pytest.mark.parametrize("target", [("w", "f4", (3,)), ("w", "f6_e2m3", (2,)), ("w", "f4", ())])
def test_a_target_of_half_a_byte_is_refused(target):
    with pytest.raises(RunError, match="QR340.*`w`"):
        place([target], [0], 100)


def test_a_header_beyond_100_megabytes_is_refused(monkeypatch):
    monkeypatch.setattr(sys.modules["quantrules.checkpoint.place"], "LIMIT", 10_000)
    with pytest.raises(RunError, match="QR341"):
        place([(f"t.{i}", "u8", (1,)) for i in range(200)], range(200), 1000)


def test_safetensors_reads_the_headers(tmp_path):
    targets = [
        ("a", "bf16", (2, 3)),
        ("f4", "f4", (2, 8)),
        ("e8m0", "f8_e8m0", (5,)),
        ("s", "f32", ()),
        ("z", "i64", (0, 7)),
        ('q"\\é', "bool", (3,)),
    ]
    placing = place(targets, range(6), 1 << 40)
    with open(tmp_path / "m.safetensors", "wb") as f:
        f.write(placing.headers[0])
        f.truncate(placing.sizes[0])
    with safe_open(tmp_path / "m.safetensors", "pt") as theirs:
        assert sorted(theirs.keys()) == sorted(n for n, _, _ in targets)
        assert theirs.get_tensor("f4").shape == (2, 4)


def test_three_hundred_thousand_targets_are_placed_quickly():
    """1 s is the aim on an idle machine."""
    kinds = [("u8", (3072, 3584)), ("f8_e4m3", (3072, 448)), ("f32", ()), ("f32", ())]
    names = [f"model.layers.{i // 4000}.mlp.experts.{i // 4 % 1000}.gate_proj.{i % 4}" for i in range(300_000)]
    targets = Targets(names, kinds, np.arange(300_000) % 4)
    start = time.process_time()
    placing = place(targets, np.arange(300_000) // 4, 5_000_000_000)
    assert time.process_time() - start < 3
    assert len(placing.files) > 100
