"""A header from a stranger: each way to be wrong has a code and a sentence; what is legal is read as safetensors reads it."""

import json
import os
import re
import struct
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from quantrules.checkpoint import open_source
from quantrules.checkpoint.headers import LIMIT, parse_canonical, parse_general, parse_header
from quantrules.checkpoint.table import collapse
from quantrules.diagnostics import CheckpointError
from quantrules.names import families
from tests.checkpoint.make import entry, raw

FOUR = b"1234"
ENTRY = json.dumps(entry())


def text(entry: str) -> bytes:
    """One tensor `w` of four bytes, described by this text."""
    return raw(f'{{"w": {entry}}}', FOUR)


def declared(**fields) -> bytes:
    """One tensor `w` of four bytes, with some fields changed."""
    return raw({"w": {**entry(), **fields}}, FOUR)


REFUSED = {
    # title: (bytes of the file, code, words of the message)
    "an empty file": (b"", "QR303", "0 bytes"),
    "a file of nine bytes": (b"\x01" + bytes(7) + b"{", "QR303", "9 bytes"),
    "an HTML page": (b"<!DOCTYPE html><html><body>Not Found</body></html>", "QR304", "looks like an HTML page"),
    "an HTML page after a line end": (b"\n <HTML>" + bytes(50), "QR304", "looks like an HTML page"),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "QR304", "a Git LFS pointer"),
    "a pickle": (b"\x80\x02}q\x00X\x01\x00\x00\x00wq\x01K\x01s.", "QR304", "looks like a pickle"),
    "a zipped pickle": (b"PK\x03\x04\x00\x00\x08\x08\x00\x00archive/data.pkl", "QR304", "looks like a zip archive"),
    "GGUF": (b"GGUF\x03\x00\x00\x00" + bytes(40), "QR304", "looks like GGUF"),
    "a header without its length": (b'{"w": {"dtype": "U8"}}', "QR304", "looks like JSON"),
    "a header beyond the file": (raw({"w": entry()}, FOUR, length=1000), "QR305", "1000 bytes; the file has"),
    "a header one byte beyond the file": (raw("{}", length=3), "QR305", "3 bytes; the file has 10"),
    "a header of 2^63 bytes": (raw("{}", length=1 << 63), "QR305", f"at most {LIMIT}"),
    "a header of 2^64 - 1 bytes": (raw("{}", length=(1 << 64) - 1), "QR305", f"at most {LIMIT}"),
    "no JSON": (raw("{]", FOUR), "QR306", "not JSON"),
    "half of a header": (raw('{"w": {"dtype": "U8", "sha', FOUR), "QR306", "not JSON"),
    "no UTF-8": (raw(b'{"\xff\xfe": {}}', FOUR), "QR306", "not UTF-8 at its byte 2"),
    "a byte order mark": (raw(b"\xef\xbb\xbf{}"), "QR306", "not JSON"),
    "a line end within a name": (raw('{"a\nb": {}}', FOUR), "QR306", "not JSON"),
    "a list": (raw("[1, 2]  "), "QR306", "not a JSON object"),
    "two objects": (raw("{} {}"), "QR306", "not JSON"),
    "nesting of 100,000": (raw('{"w": ' + "[" * 100_000 + "]" * 100_000 + "}"), "QR306", "nested too deeply"),
    "NaN": (declared(shape=float("nan")), "QR306", "`NaN` where an integer is expected"),
    "Infinity": (declared(data_offsets=[0, float("inf")]), "QR306", "`Infinity` where an integer is expected"),
    "a fraction": (text('{"dtype": "U8", "shape": [4.0], "data_offsets": [0, 4]}'), "QR306", "`4.0` where an integer"),
    "an exponent": (text('{"dtype": "U8", "shape": [4e0], "data_offsets": [0, 4]}'), "QR306", "`4e0` where an integer"),
    "minus zero": (raw('{"w": {"dtype": "U8", "shape": [4], "data_offsets": [-0, 4]}}', FOUR), "QR306", "`-0` where an integer"),
    "an integer of 100,000 digits": (text('{"shape": [' + "9" * 100_000 + "]}"), "QR306", "(100000 characters) where an integer"),
    "an integer of 19 digits": (raw('{"w": {"shape": [9223372036854775807]}}'), "QR306", "at most 18 digits"),
    "a name twice, the same": (text(ENTRY + ', "w": ' + ENTRY), "QR307", "`w` stands twice"),
    "a name twice, once escaped": (text(ENTRY + ', "\\u0077": ' + ENTRY), "QR307", "`w` stands twice"),
    "a field twice": (text('{"dtype": "U8", "dtype": "I8", "shape": [4], "data_offsets": [0, 4]}'), "QR307", "`dtype` stands"),
    "metadata twice": (raw('{"__metadata__": {}, "__metadata__": {}}'), "QR307", "`__metadata__` stands twice"),
    "a tensor that is a list": (raw({"w": [1]}, FOUR), "QR308", "`w` is not described by an object"),
    "no dtype": (raw({"w": {"shape": [4], "data_offsets": [0, 4]}}, FOUR), "QR308", "`w` has the fields `data_offsets`, `shape`"),
    "no fields": (raw({"w": {}}, FOUR), "QR308", "(none)"),
    "a field too many": (declared(strides=[1]), "QR308", "`strides`"),
    "a dtype that is a number": (declared(dtype=8), "QR308", "dtype that is not a string"),
    "an unknown dtype": (declared(dtype="U4"), "QR309", "unknown dtype `U4`"),
    "a dtype in lower case": (declared(dtype="u8"), "QR309", "unknown dtype `u8`"),
    "a shape that is a number": (declared(shape=4), "QR310", "the shape `4`"),
    "a negative dimension": (declared(shape=[-4]), "QR310", "the shape `[-4]`"),
    "two negative dimensions": (declared(shape=[-2, -2]), "QR310", "the shape `[-2, -2]`"),
    "a dimension that is true": (declared(shape=[4, True]), "QR310", "the shape `[4, True]`"),
    "a dimension that is null": (declared(shape=[None]), "QR310", "the shape `[None]`"),
    "a dimension that is text": (declared(shape=["4"]), "QR310", "the shape"),
    "dimensions whose product wraps to 4": (declared(shape=[1 << 33, 1 << 31, 4]), "QR310", "beyond 62 bits"),
    "65 dimensions": (declared(shape=[1] * 65), "QR310", "64 dimensions"),
    "no offsets": (declared(data_offsets=None), "QR311", "the offsets `None`"),
    "one offset": (declared(data_offsets=[4]), "QR311", "the offsets `[4]`"),
    "three offsets": (declared(data_offsets=[0, 4, 4]), "QR311", "the offsets `[0, 4, 4]`"),
    "a negative offset": (declared(data_offsets=[-4, 0]), "QR311", "the offsets `[-4, 0]`"),
    "an offset that is false": (declared(data_offsets=[False, 4]), "QR311", "the offsets"),
    "an end before its beginning": (declared(data_offsets=[4, 0]), "QR311", "ends at 0, before it begins at 4"),
    "too few bytes": (declared(shape=[5]), "QR312", "has 4 bytes; U8 [5] takes 5"),
    "bytes of another dtype": (declared(dtype="BF16"), "QR312", "has 4 bytes; BF16 [4] takes 8"),
    "an odd count of F4": (declared(dtype="F4", shape=[7]), "QR312", "no whole number of bytes"),
    "F4 counted as bytes": (declared(dtype="F4", shape=[4]), "QR312", "F4 [4] takes 2 bytes"),
    "three elements of F6": (declared(dtype="F6_E2M3", shape=[3]), "QR312", "no whole number of bytes"),
    "an empty tensor with bytes": (declared(shape=[0]), "QR312", "U8 [0] takes 0 bytes"),
    "a scalar with bytes": (declared(shape=[]), "QR312", "U8 [] takes 1 bytes"),
    "overlap": (raw({"a": entry(), "b": entry(begin=3, end=7)}, bytes(7)), "QR313", "`b` begins at 3, and the tensors before"),
    "the same bytes twice": (raw({"a": entry(), "b": entry()}, FOUR), "QR313", "begins at 0"),
    "an empty tensor inside another": (raw({"a": entry(), "z": entry("U8", [0], 2, 2)}, FOUR), "QR313", "`z` begins at 2"),
    "a hole": (raw({"a": entry(), "b": entry(begin=5, end=9)}, bytes(9)), "QR314", "and the tensors before it end at 4"),
    "a hole at the beginning": (raw({"a": entry(begin=1, end=5)}, bytes(5)), "QR314", "`a` begins at 1"),
    "an empty tensor behind a hole": (raw({"a": entry(), "z": entry("U8", [0], 9, 9)}, FOUR), "QR314", "`z` begins at 9"),
    "data that is cut": (raw({"w": entry()}, b"123"), "QR315", "3 bytes of data; its tensors need 4"),
    "trailing bytes": (raw({"w": entry("F32", (4,), 0, 16)}, bytes(20)), "QR316", "4 bytes behind its last tensor"),
    "bytes without a tensor": (raw({}, b"1"), "QR316", "1 bytes behind"),
    "metadata that is a list": (raw({"__metadata__": []}), "QR317", "`__metadata__` is not an object"),
    "metadata that is null": (raw({"__metadata__": None}), "QR317", "`__metadata__` is not an object"),
    "metadata with a number": (raw({"__metadata__": {"format": 1}}), "QR317", "`format` in `__metadata__` is not a string"),
    "metadata that is a tensor": (raw({"__metadata__": entry()}, FOUR), "QR317", "`shape` in `__metadata__`"),
    "half a surrogate in metadata": (raw({"__metadata__": {"a": "\ud800"}}), "QR317", "surrogate"),
    "NUL in a name": (raw({"a\0b": entry()}, FOUR), "QR318", "NUL"),
    "half a surrogate pair in a name": (raw({"\ud800": entry()}, FOUR), "QR318", "not UTF-8"),
}  # fmt: skip


def errors(tmp_path, data: bytes) -> CheckpointError:
    path = tmp_path / "m.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError) as caught:
        open_source(path)
    return caught.value


@pytest.mark.parametrize("title", REFUSED)
def test_it_is_refused_with_its_own_code_and_names_the_file(tmp_path, title):
    data, code, words = REFUSED[title]
    (found, *_) = errors(tmp_path, data).diagnostics
    assert found.code == code
    assert words in found.message
    assert str(tmp_path / "m.safetensors") in found.message
    assert found.render().isprintable() or "\n" in found.render()


def test_every_code_of_headers_has_a_case_and_every_code_of_the_room_is_tested():
    defined = {}
    for name, module in sys.modules.items():
        if name.startswith("quantrules.checkpoint."):
            codes = {v for v in vars(module).values() if isinstance(v, str) and re.fullmatch("QR3[0-9][0-9]", v)}
            defined[name.rpartition(".")[2]] = codes
    told = {code for _, code, _ in REFUSED.values()} | {"QR302", "QR335"}  # two of files.py
    assert defined["headers"] - told == set()
    tests = "".join(p.read_text() for p in Path(__file__).parent.glob("test_*.py"))
    assert {code for module, codes in defined.items() if module != "overlay" for code in codes if code not in tests} == set()


ORACLE_TAKES = {
    "a name twice, the same",
    "a name twice, once escaped",
    "a field too many",
    "metadata that is null",
    "NUL in a name",
}


@pytest.mark.parametrize("title", REFUSED)
def test_safetensors_refuses_it_too_unless_we_are_stricter(tmp_path, title):
    (tmp_path / "m.safetensors").write_bytes(REFUSED[title][0])
    try:
        with safe_open(tmp_path / "m.safetensors", "np"):
            taken = True
    except SafetensorError:
        taken = False
    assert taken == (title in ORACLE_TAKES)


def test_all_that_is_wrong_comes_together(tmp_path):
    header = {"a": entry("U9"), "b": entry(shape=[9], begin=4, end=8), "c": entry(begin=9, end=8), "d\0": entry(begin=8, end=12)}
    assert sorted(d.code for d in errors(tmp_path, raw(header, bytes(12))).diagnostics) == ["QR309", "QR311", "QR312", "QR318"]


def test_many_tensors_with_one_fault_are_one_diagnostic(tmp_path):
    (found,) = errors(tmp_path, raw({f"t{i}": entry("U9", (4,), 4 * i, 4 * i + 4) for i in range(50)}, bytes(200))).diagnostics
    assert found.count == 50
    assert found.notes[-1] == "and 45 more"


def test_a_name_of_a_megabyte_is_cut_in_the_message(tmp_path):
    (found,) = errors(tmp_path, raw({"x" * 1_000_000: entry("U9")}, FOUR)).diagnostics
    assert len(found.render()) < 1000


def test_a_length_that_lies_allocates_nothing(tmp_path):
    path = tmp_path / "m.safetensors"
    with open(path, "wb") as f:
        f.write(raw("{", length=LIMIT + 1))
        f.truncate(1 << 40)
    tracemalloc.start()
    with pytest.raises(CheckpointError):
        open_source(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.timeout(10)
def test_a_fifo_is_refused_and_does_not_block(tmp_path):
    os.mkfifo(tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="QR301"):
        open_source(tmp_path / "m.safetensors")


def test_a_device_is_refused(tmp_path):
    (tmp_path / "m.safetensors").symlink_to("/dev/zero")
    with pytest.raises(CheckpointError, match="QR301"):
        open_source(tmp_path / "m.safetensors")


# ------------------------------------------------------------------------------------------------------------- legal

LEGAL = {
    "nothing at all": raw({}),
    "metadata only": raw({"__metadata__": {"crc": "12"}}),
    "a scalar": raw({"w": entry("F32", (), 0, 4)}, FOUR),
    "an empty tensor": raw({"w": entry("F32", (3, 0, 2), 0, 0)}),
    "an empty tensor between two": raw(
        {"a": entry(), "z": entry(shape=[0], begin=4, end=4), "b": entry(begin=4, end=8)}, bytes(8)
    ),
    "an empty tensor at the beginning and at the end": raw(
        {"z": entry(shape=[0], begin=0, end=0), "a": entry(), "y": entry(shape=[0], begin=4, end=4)}, FOUR
    ),
    "an order of the header that is not that of the data": raw({"b": entry(begin=4, end=8), "a": entry()}, bytes(8)),
    "a beginning that is not aligned": raw({"a": entry("U8", (1,), 0, 1), "w": entry("F32", (1,), 1, 5)}, b"12345"),
    "spaces in front": raw("   " + json.dumps({"w": entry()}), FOUR),
    "spaces behind": raw(json.dumps({"w": entry()}) + " " * 77, FOUR),
    "compact": raw(json.dumps({"__metadata__": {"format": "pt"}, "w": entry()}, separators=(",", ":")), FOUR),
    "many lines": raw(json.dumps({"w": entry(), "v": entry(begin=4, end=8)}, indent=4), bytes(8)),
    "metadata at the end": raw({"w": entry(), "__metadata__": {"a": "b"}}, FOUR),
    "fields in another order": raw({"w": {"data_offsets": [0, 4], "shape": [4], "dtype": "U8"}}, FOUR),
    "names with escapes": raw({'a"b\\c\nd': entry(), "é漢😀": entry(begin=4, end=8)}, bytes(8)),
    "an empty name": raw({"": entry()}, FOUR),
    "braces in metadata": raw({"__metadata__": {"config": '{"a": [1]}'}, "w": entry()}, FOUR),
    "a header of 640 bytes, whose length looks like a pickle": raw(json.dumps({"w": entry()}).ljust(0x0280), FOUR),
    **{
        f"a header of {n} bytes": raw(json.dumps({"w": entry()}).ljust(n), FOUR)
        for n in (99_992, 99_994, 99_999, 100_000, 100_001, 100_008)
    },
}


@pytest.mark.parametrize("title", LEGAL)
def test_it_is_read_as_safetensors_reads_it(tmp_path, title):
    path = tmp_path / "m.safetensors"
    path.write_bytes(LEGAL[title])
    with safe_open(path, "np") as theirs, open_source(path) as ours:
        assert sorted(ours.table.names()) == sorted(theirs.keys())
        assert dict(ours.metadata) == (theirs.metadata() or {})
        for row, name in enumerate(ours.table.names()):
            tensor = theirs.get_tensor(name)
            assert ours.table.shapes[ours.table.shape[row]] == tensor.shape
            out = np.zeros(int(ours.table.nbytes[row]), np.uint8)
            ours.read_into(row, 0, len(out), out)
            assert out.tobytes() == tensor.tobytes()


TORCH_DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2,
    torch.float8_e8m0fnu, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float4_e2m1fn_x2,
]  # fmt: skip


def numbered(dtype: torch.dtype, count: int, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor whose bytes count up (0 and 1 for bool)."""
    nbytes = count * dtype.itemsize
    data = torch.arange(nbytes, dtype=torch.uint8)
    return (data % 2 if dtype is torch.bool else data).view(dtype).reshape(shape)


def test_every_dtype_that_safetensors_writes_is_read(tmp_path):
    tensors = {f"t.{d}".replace("torch.", ""): numbered(d, 6, (3, 2)) for d in TORCH_DTYPES}
    tensors |= {f"{name}.scalar": numbered(t.dtype, 1, ()) for name, t in tensors.items() if "x2" not in name}
    tensors |= {f"{name}.empty": numbered(t.dtype, 0, (0, 4)) for name, t in list(tensors.items())[:20]}
    save_file(tensors, tmp_path / "m.safetensors", {"format": "pt"})
    with open_source(tmp_path / "m.safetensors") as ours:
        assert sorted(ours.table.names()) == sorted(tensors)
        for row, name in enumerate(ours.table.names()):
            out, tensor = np.zeros(int(ours.table.nbytes[row]), np.uint8), tensors[name]
            ours.read_into(row, 0, len(out), out)
            assert out.tobytes() == tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            shape = (
                tuple(tensor.shape) if tensor.dtype is not torch.float4_e2m1fn_x2 else (*tensor.shape[:-1], tensor.shape[-1] * 2)
            )
            assert ours.table.shapes[ours.table.shape[row]] == shape


def test_f4_counts_elements_on_disk(tmp_path):
    save_file({"w": torch.zeros(2, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}, tmp_path / "m.safetensors")
    table = open_source(tmp_path / "m.safetensors").table
    assert (table.dtypes, table.shapes, table.nbytes.tolist()) == (("f4",), ((2, 8),), [8])


# --------------------------------------------------------------------------------- the short way gives what the long does

names = st.text(st.sampled_from('ab.01"\\é{}[]:, \0'), max_size=6)
entries = st.builds(entry, st.sampled_from(["U8", "F32", "F8_E8M0", "u8", "X"]), st.lists(st.integers(0, 9), max_size=3))


@st.composite
def headers(draw) -> str:
    """Headers as several writers spell them, some with a character changed."""
    header = dict(draw(st.dictionaries(names, entries, max_size=4)))
    if draw(st.booleans()):
        header = {"__metadata__": draw(st.dictionaries(names, names, max_size=2)), **header}
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (", ", ":")]))
    text = json.dumps(header, separators=separators, ensure_ascii=draw(st.booleans())) + " " * draw(st.integers(0, 3))
    if draw(st.booleans()):
        at = draw(st.integers(0, len(text)))
        text = (
            text[:at]
            + draw(st.sampled_from(["", " ", ",", "0", "1", '"', "]", "}", '"":', "-", "e1", "\n"]))
            + text[at + draw(st.integers(0, 2)) :]
        )
    return text


@given(headers())
def test_the_short_way_takes_a_part_of_the_long_and_gives_the_same(text):
    short = parse_canonical(text)
    if short is None:
        return
    long = parse_general(text, "m")
    assert list(short.names) == list(long.names)
    assert [short.kinds[k] for k in short.kind] == [long.kinds[k] for k in long.kind]
    assert (short.begin.tolist(), short.end.tolist(), short.metadata) == (long.begin.tolist(), long.end.tolist(), long.metadata)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
@pytest.mark.parametrize("metadata", [{}, {"__metadata__": {"format": "pt", "a": ""}}])
def test_canonical_headers_take_the_short_way(separators, metadata):
    text = json.dumps({**metadata, "a.0.w": entry("F8_E4M3", (2, 2)), "a.1.w": entry("F32", (), 4, 8)}, separators=separators)
    assert parse_canonical(text) is not None


def test_headers_that_safetensors_writes_take_the_short_way(tmp_path):
    save_file({f"l.{i}.w": torch.zeros(i) for i in range(12)}, tmp_path / "m.safetensors", {"format": "pt"})
    data = (tmp_path / "m.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    assert parse_canonical(data[8 : 8 + length].decode()) is not None


def test_equal_tables_are_told_from_unequal_ones():
    """The comparison above would fail on a wrong value."""
    a = parse_header(raw({"w": entry()}, b"")[8:], 4, "m")
    b = parse_header(raw({"w": entry("I8")}, b"")[8:], 4, "m")
    assert a.kinds != b.kinds


@given(st.lists(st.text(st.sampled_from("a.019\né"), max_size=12), max_size=8))
def test_names_collapse_as_the_names_room_has_it(names):
    ours = [(n.template, n.digits.tolist(), rows.tolist()) for n, rows in collapse(names)]
    assert ours == [(n.template, n.digits.tolist(), rows.tolist()) for n, rows in families(names)]
