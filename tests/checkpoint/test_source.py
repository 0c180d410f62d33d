"""Bytes by position, from files that may change under us and from memory; from many threads."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from quantrules.checkpoint import Raw, StateDictSource, open_source
from quantrules.checkpoint import files as files_module
from quantrules.checkpoint.files import Descriptors
from quantrules.diagnostics import CheckpointError
from tests.checkpoint.make import checkpoint, entry, of, raw


def read(source, row: int, lo: int = 0, hi: int | None = None) -> bytes:
    out = np.full(int(source.table.nbytes[row]) - lo if hi is None else hi - lo, 0xEE, np.uint8)
    source.read_into(row, lo, lo + len(out), out)
    return out.tobytes()


def test_ranges_of_a_tensor(tmp_path):
    (tmp_path / "m.safetensors").write_bytes(of(a=b"0123456789", b=b"abcdef"))
    with open_source(tmp_path) as source:
        assert (read(source, 0), read(source, 1)) == (b"0123456789", b"abcdef")
        assert (read(source, 0, 3, 7), read(source, 1, 5, 6), read(source, 1, 6, 6)) == (b"3456", b"f", b"")


@pytest.mark.parametrize("lo, hi, size", [(-1, 3, 4), (3, 2, 0), (0, 11, 11), (0, 4, 3)])
def test_a_range_outside_the_tensor_is_a_bug_of_the_caller(tmp_path, lo, hi, size):
    (tmp_path / "m.safetensors").write_bytes(of(a=b"0123456789", b=b"abcdef"))
    with open_source(tmp_path) as source, pytest.raises(AssertionError):
        source.read_into(0, lo, hi, bytearray(size))


@pytest.mark.parametrize("buffer", [bytearray(8), memoryview(bytearray(8)), np.zeros((2, 2), np.int16), np.zeros(8, np.uint8)])
def test_any_contiguous_writable_buffer_will_do(tmp_path, buffer):
    (tmp_path / "m.safetensors").write_bytes(of(a=b"01234567"))
    with open_source(tmp_path) as source:
        source.read_into(0, 0, 8, buffer)
    assert bytes(buffer) == b"01234567"


def test_short_reads_are_continued(tmp_path, monkeypatch):
    (tmp_path / "m.safetensors").write_bytes(of(a=bytes(range(100))))
    with open_source(tmp_path) as source:
        monkeypatch.setattr(os, "preadv", lambda fd, views, at, real=os.preadv: real(fd, [views[0][:7]], at))
        assert read(source, 0, 10, 90) == bytes(range(10, 90))


def test_a_read_error_names_the_file_and_the_place(tmp_path, monkeypatch):
    (tmp_path / "m.safetensors").write_bytes(of(a=b"1234"))
    with open_source(tmp_path) as source:

        def broken(*_):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(CheckpointError, match=r"QR302.*m\.safetensors: Input/output error at byte"):
            read(source, 0)


def test_a_file_that_shrinks_is_an_error(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(of(a=bytes(100)))
    with open_source(path) as source:
        read(source, 0)  # open by now
        os.truncate(path, 50)
        with pytest.raises(CheckpointError, match="QR335.*before the 100 bytes"):
            read(source, 0)


def test_a_file_that_is_replaced_between_header_and_data_is_an_error(tmp_path):
    path = tmp_path / "m.safetensors"
    path.write_bytes(of(a=b"1234"))
    with open_source(path) as source:
        (tmp_path / "new").write_bytes(of(a=b"5678"))
        os.replace(tmp_path / "new", path)
        with pytest.raises(CheckpointError, match="QR335.*changed or replaced"):
            read(source, 0)


def test_the_bytes_of_a_header_with_an_odd_length_are_right(tmp_path):
    """Data then starts where nothing is aligned."""
    (tmp_path / "m.safetensors").write_bytes(
        raw('{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}} ', np.float32([1, 2]).tobytes())
    )
    with open_source(tmp_path) as source:
        assert source.table.begin[0] % 2 == 1 or source.table.begin[0] % 8
        out = np.zeros(2, np.float32)
        source.read_into(0, 0, 8, out)
        assert out.tolist() == [1, 2]


def test_more_files_than_are_held_open_are_read_by_many_threads(tmp_path, monkeypatch):
    count = 40
    files = {f"f{i:02}.safetensors": of(**{f"t{i}": bytes([i]) * 64}) for i in range(count)}
    source = open_source(checkpoint(tmp_path, files, {f"t{i}": f"f{i:02}.safetensors" for i in range(count)}))
    source._descriptors._cap = 3
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(8) as pool:
        rows = [r for _ in range(50) for r in range(count)]
        assert list(pool.map(lambda r: read(source, r), rows)) == [bytes([r]) * 64 for r in rows]
    assert len(os.listdir("/proc/self/fd")) <= before + 3
    source.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_descriptor_in_use_is_never_closed(tmp_path):
    for i in range(3):
        (tmp_path / str(i)).write_text(str(i))
    pool = Descriptors(lambda i: os.open(tmp_path / str(i), os.O_RDONLY), cap=1)
    with pool.use(0) as a, pool.use(1) as b, pool.use(2) as c:
        assert [os.pread(fd, 1, 0) for fd in (a, b, c)] == [b"0", b"1", b"2"]
    with pool.use(0):
        pass
    pool.close()


def test_opening_a_source_leaves_no_descriptor_open(tmp_path):
    (tmp_path / "m.safetensors").write_bytes(of(a=b"1"))
    before = os.listdir("/proc/self/fd")
    open_source(tmp_path)
    with pytest.raises(CheckpointError):
        (tmp_path / "m.safetensors").write_bytes(b"<html>")
        open_source(tmp_path)
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_the_collector_runs_again_afterwards(tmp_path):
    import gc

    (tmp_path / "m.safetensors").write_bytes(b"<html>")
    with pytest.raises(CheckpointError):
        open_source(tmp_path)
    assert gc.isenabled()


# ---------------------------------------------------------------------------------------------------------------- memory


def test_tensors_in_memory_are_a_source():
    tensors = {
        "a.0.weight": torch.tensor([[1, 2], [3, 4]], dtype=torch.bfloat16),
        "a.1.weight": torch.arange(6, dtype=torch.int32).reshape(2, 3).T,  # not contiguous
        "scale": torch.tensor(1.5),
        "e8m0": torch.tensor([1.0, 2.0]).to(torch.float8_e8m0fnu),
        "f4": torch.tensor([[1, 2]], dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
        "np": np.arange(3, dtype=np.float64),
        "raw": Raw("bf16", (2,), b"abcd"),
        "empty": torch.zeros(0, 3),
    }
    with StateDictSource(tensors, {"a": 1}) as source:
        table = source.table
        stored = {
            n: (table.dtypes[table.dtype[r]], table.shapes[table.shape[r]], read(source, r)) for r, n in enumerate(table.names())
        }
    assert stored == {
        "a.0.weight": ("bf16", (2, 2), bytes.fromhex("803f004040408040")),
        "a.1.weight": ("i32", (3, 2), np.array([0, 3, 1, 4, 2, 5], np.int32).tobytes()),
        "scale": ("f32", (), np.float32(1.5).tobytes()),
        "e8m0": ("f8_e8m0", (2,), bytes([127, 128])),
        "f4": ("f4", (1, 4), bytes([1, 2])),
        "np": ("f64", (3,), np.arange(3.0).tobytes()),
        "raw": ("bf16", (2,), b"abcd"),
        "empty": ("f32", (0, 3), b""),
    }
    assert (source.config, source.path, source.side_files(), source.opened(0), source.real_files()) == (
        {"a": 1},
        None,
        (),
        None,
        (),
    )
    assert len(table.families) == 7


def test_memory_gives_ranges_too():
    with StateDictSource({"w": torch.arange(10, dtype=torch.uint8)}) as source:
        assert read(source, 0, 3, 6) == bytes([3, 4, 5])


def test_what_has_no_place_in_a_checkpoint():
    with pytest.raises(TypeError, match="complex128"):
        StateDictSource({"w": torch.zeros(1, dtype=torch.complex128)})


def test_an_open_source_is_safe_while_another_thread_closes_it(tmp_path):
    """Closing while reading is a bug of the caller, but must not read from a descriptor that now belongs to someone else."""
    (tmp_path / "m.safetensors").write_bytes(of(a=b"1234"))
    source, entered, leave = open_source(tmp_path), threading.Event(), threading.Event()
    original = files_module.os.preadv

    def use():
        with source.opened(0) as (fd, at):
            entered.set()
            leave.wait(5)
            return original(fd, [bytearray(4)], at)

    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(use)
        entered.wait(5)
        source.close()
        leave.set()
        assert future.result() == 4


def test_a_header_entry_gives_the_columns(tmp_path):
    header = {"x.0": entry("F32", (1, 2), 0, 8), "x.1": entry("F32", (1, 2), 8, 16), "y": entry("U8", (3,), 16, 19)}
    (tmp_path / "m.safetensors").write_bytes(raw(header, bytes(19)))
    table, start = open_source(tmp_path).table, 8 + len(raw(header)) - 8
    assert (table.dtypes, table.shapes) == (("f32", "u8"), ((1, 2), (3,)))
    assert [c.tolist() for c in (table.file, table.dtype, table.shape, table.nbytes)] == [
        [0] * 3,
        [0, 0, 1],
        [0, 0, 1],
        [8, 8, 3],
    ]
    assert (table.begin - start).tolist() == [0, 8, 16]
    assert [c.dtype for c in (table.file, table.dtype, table.shape, table.begin, table.nbytes)] == [
        "int32",
        "int16",
        "int32",
        "int64",
        "int64",
    ]
    assert [(f.template, f.digits.tolist()) for f in table.families] == [("x.\0", [[0], [1]]), ("y", [[]])]
