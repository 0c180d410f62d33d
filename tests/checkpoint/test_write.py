"""An output directory: what is half done never looks like a checkpoint, and nothing of anybody else's is touched."""

import errno
import json
import os
import signal
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from quantrules.checkpoint import Output, StateDictSource, open_source, place
from quantrules.checkpoint.files import copy_range
from quantrules.checkpoint.source import SideFile
from quantrules.diagnostics import CheckpointError, RunError
from tests.checkpoint.make import checkpoint, of

TENSORS = {"a.weight": b"0123456789", "a.scale": b"ab", "b.weight": b"ABCDEFGH"}
PLACING = place([(n, "u8", (len(d),)) for n, d in TENSORS.items()], [0, 0, 1], shard_size=10)
CONFIG = {"config.json": {"model_type": "toy", "limit": float("inf")}}
FINAL = [
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "quantrules_manifest.json",
]


def write(out: Output, finish: bool = True) -> None:
    for row, data in enumerate(TENSORS.values()):
        out.write_at(int(PLACING.shard[row]), int(PLACING.offset[row]), data)
    for shard in range(len(PLACING.files)):
        out.finish_shard(shard)
    if finish:
        out.finish({"rules": "r"})


def run(path, **options) -> None:
    with Output(path, PLACING, configs=CONFIG, **options) as out:
        write(out)


def tree(path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


def looks_like_a_checkpoint(path) -> bool:
    return any(n.endswith((".safetensors", ".index.json")) or n == "config.json" for n in tree(path))


def refused(path, code: str, **options) -> str:
    with pytest.raises(RunError, match=code) as caught:
        run(path, **options)
    return str(caught.value)


# ---------------------------------------------------------------------------------------------------- a run that ends well


def test_what_is_written_is_read_by_safetensors_and_by_us(tmp_path):
    run(tmp_path / "out")
    assert sorted(tree(tmp_path / "out")) == FINAL
    theirs = {k: bytes(v.tolist()) for f in PLACING.files for k, v in load_file(tmp_path / "out" / f).items()}
    assert theirs == TENSORS
    with open_source(tmp_path / "out") as source:
        assert source.warnings == () == source.side_files()
        assert source.config == CONFIG["config.json"]
        assert source.metadata == {"format": "pt"}


def test_the_same_input_gives_the_same_bytes(tmp_path):
    run(tmp_path / "a")
    run(tmp_path / "deep" / "b")
    assert tree(tmp_path / "a") == tree(tmp_path / "deep" / "b")


def test_the_manifest_lists_every_file(tmp_path):
    run(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "quantrules_manifest.json").read_text()) == {"rules": "r", "files": FINAL}


def test_the_config_keeps_the_order_of_its_keys(tmp_path):
    with Output(tmp_path / "out", place([], [], 1), configs={"config.json": {"z": 1, "a": {"é": None}}}) as out:
        out.finish()
    assert (tmp_path / "out" / "config.json").read_text() == '{\n  "z": 1,\n  "a": {\n    "\\u00e9": null\n  }\n}\n'


def test_side_files_and_folders_are_copied(tmp_path):
    files = {"m.safetensors": of(w=b"1"), "tokenizer.json": b"{}", "a/b/c.txt": b"deep", "a/d.txt": b""}
    source = open_source(checkpoint(tmp_path / "m", files))
    run(tmp_path / "out", sides=source.side_files(), sources=[source])
    assert {k: v for k, v in tree(tmp_path / "out").items() if k not in FINAL} == {
        "tokenizer.json": b"{}",
        "a/b/c.txt": b"deep",
        "a/d.txt": b"",
    }


def test_side_files_of_a_hub_cache_become_files(tmp_path):
    checkpoint(tmp_path, {"blob": b"{}"})
    (tmp_path / "link.json").symlink_to("blob")
    run(tmp_path / "out", sides=[SideFile("t.json", tmp_path / "link.json")])
    assert not (tmp_path / "out" / "t.json").is_symlink()


def test_threads_may_write_at_once(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 1 << 20, dtype=np.uint8)
    placing = place([("w", "u8", data.shape)], [0], 1)
    with Output(tmp_path / "out", placing) as out, ThreadPoolExecutor(8) as pool:
        start = int(placing.offset[0])
        list(pool.map(lambda at: out.write_at(0, start + at, data[at : at + 1000]), range(0, len(data), 1000)))
        out.finish_shard(0)
        out.finish()
    assert (tmp_path / "out" / placing.files[0]).read_bytes()[start:] == data.tobytes()


def test_a_write_outside_the_data_of_a_shard_is_a_bug_of_the_caller(tmp_path):
    with Output(tmp_path / "out", PLACING) as out:
        for offset in (0, 4095, PLACING.sizes[0] - 1):
            with pytest.raises(AssertionError):
                out.write_at(0, offset, b"xx")


def test_finishing_with_a_shard_unfinished_is_a_bug_of_the_caller(tmp_path):
    with Output(tmp_path / "out", PLACING) as out:
        out.finish_shard(0)
        with pytest.raises(AssertionError, match="model-00002"):
            out.finish()


# ------------------------------------------------------------------------------------------------ copies of whole tensors


@pytest.mark.parametrize("kernel", ["works", "refuses", "gives nothing", "is short"])
def test_bytes_are_copied_with_and_without_the_kernel(tmp_path, monkeypatch, kernel):
    def refuses(*_):
        raise OSError(errno.EXDEV, "")

    real = os.copy_file_range
    ways = {
        "works": real,
        "refuses": refuses,
        "gives nothing": lambda *_: 0,
        "is short": lambda s, t, n, a, b: real(s, t, min(n, 7), a, b),
    }
    monkeypatch.setattr(os, "copy_file_range", ways[kernel])
    monkeypatch.setattr("quantrules.checkpoint.files.BUFFER", 16)
    (tmp_path / "m.safetensors").write_bytes(of(x=b"xyz", w=bytes(range(100))))
    placing = place([("w", "u8", (100,))], [0], 1)
    with open_source(tmp_path / "m.safetensors") as source, Output(tmp_path / "out", placing, sources=[source]) as out:
        row = source.table.names().index("w")
        with source.opened(row) as (fd, at):
            out.copy(fd, at, 0, int(placing.offset[0]), 100)
        out.finish_shard(0)
        out.finish()
    assert load_file(tmp_path / "out" / placing.files[0])["w"].tolist() == list(range(100))


def test_a_source_that_ends_early_is_an_error_and_not_a_hole(tmp_path):
    (tmp_path / "short").write_bytes(b"12")
    with open(tmp_path / "short", "rb") as source, open(tmp_path / "target", "wb") as target:
        with pytest.raises(CheckpointError, match="QR335"):
            copy_range(source.fileno(), 0, target.fileno(), 0, 5, "short")


# ------------------------------------------------------------------------------------------------------ where it refuses


def test_an_output_that_is_the_source_lies_in_it_or_holds_it(tmp_path):
    source = open_source(checkpoint(tmp_path / "up" / "m", {"m.safetensors": of(w=b"1")}))
    (tmp_path / "link").symlink_to("up/m")
    before = tree(tmp_path)
    for path in ("up/m", "link", "up/m/out", "link/out", "up", "up/m/../m", "."):
        assert "the source" in refused(tmp_path / path, "QR342", sources=[source], overwrite=True)
    assert tree(tmp_path) == before


def test_an_output_that_holds_a_file_of_the_source_behind_a_link(tmp_path):
    checkpoint(tmp_path / "blobs", {"m.safetensors": of(w=b"1")})
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "m.safetensors").symlink_to("../blobs/m.safetensors")
    source = open_source(tmp_path / "m")
    refused(tmp_path / "blobs", "QR342", sources=[source], overwrite=True)
    assert (tmp_path / "blobs" / "m.safetensors").exists()


def test_a_source_that_is_one_file_may_have_the_output_beside_it_but_not_around_it(tmp_path):
    source = open_source(checkpoint(tmp_path, {"m.safetensors": of(w=b"1")}) / "m.safetensors")
    refused(tmp_path, "QR342", sources=[source], overwrite=True)
    run(tmp_path / "out", sources=[source])
    assert (tmp_path / "m.safetensors").exists()


def test_a_source_in_memory_is_in_nobody_s_way(tmp_path):
    run(tmp_path / "out", sources=[StateDictSource({"w": torch.zeros(1)})])


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_output_that_is_a_file(tmp_path, overwrite):
    (tmp_path / "out").write_text("mine")
    assert str(tmp_path / "out") in refused(tmp_path / "out", "QR346", overwrite=overwrite)
    assert (tmp_path / "out").read_text() == "mine"


def test_a_directory_that_holds_something_else_is_refused_and_left_as_it_was(tmp_path):
    checkpoint(tmp_path, {"thesis.tex": b"x", ".hidden": b"y", "sub/f": b"z"})
    before = tree(tmp_path)
    assert ".hidden, sub, thesis.tex" in refused(tmp_path, "QR343")
    assert tree(tmp_path) == before


def test_a_run_is_not_mixed_with_an_earlier_one(tmp_path):
    run(tmp_path)
    before = tree(tmp_path)
    assert "--overwrite" in refused(tmp_path, "QR343")
    assert tree(tmp_path) == before


def test_an_existing_empty_directory_is_used(tmp_path):
    run(tmp_path)
    assert sorted(tree(tmp_path)) == FINAL


def test_overwrite_removes_an_earlier_output_whole_and_nothing_else(tmp_path):
    sides = [SideFile("old/vocab.txt", tmp_path / "v"), SideFile("old.txt", tmp_path / "v")]
    (tmp_path / "v").write_text("v")
    out = tmp_path / "out"
    many = place([(f"t{i}", "u8", (10,)) for i in range(5)], range(5), 10)
    with Output(out, many, sides=sides, configs={"config.json": {}, "hf_quant_config.json": {}}) as o:
        for i in range(5):
            o.finish_shard(i)
        o.finish()
    checkpoint(out, {"notes.txt": b"mine", "old/mine.txt": b"mine"})
    run(out, overwrite=True)
    assert sorted(tree(out)) == sorted([*FINAL, "notes.txt", "old/mine.txt"])


def test_overwrite_removes_a_checkpoint_that_is_not_ours_so_that_none_is_mixed(tmp_path):
    checkpoint(
        tmp_path,
        {"model.safetensors": of(w=b"1"), "config.json": b"{}", "tokenizer.json": b"theirs", "hf_quant_config.json": b"{}"},
    )
    run(tmp_path, overwrite=True)
    assert sorted(tree(tmp_path)) == sorted([*FINAL, "tokenizer.json"])
    assert open_source(tmp_path).table.names() == ["a.weight", "a.scale", "b.weight"]


def test_a_manifest_that_lies_leads_nowhere_else(tmp_path):
    checkpoint(tmp_path, {"mine.txt": b"1", "other/mine.txt": b"2"})
    checkpoint(tmp_path / "out", {})
    (tmp_path / "out" / "link").symlink_to("../other")
    files = ["../mine.txt", str(tmp_path / "mine.txt"), "link/mine.txt", "..", "", 5, "a\0b"]
    for name in ("quantrules_manifest.json", ".quantrules.lock"):
        (tmp_path / "out" / name).write_text(json.dumps({"files": files}) if "json" in name else "\n".join(map(str, files)))
        run(tmp_path / "out", overwrite=True)
        assert (tmp_path / "mine.txt").exists() and (tmp_path / "other" / "mine.txt").exists()


def test_two_runs_do_not_share_a_directory(tmp_path):
    with Output(tmp_path / "out", PLACING, configs=CONFIG) as out:
        refused(tmp_path / "out", "QR344", overwrite=True)
        write(out)
    assert sorted(tree(tmp_path / "out")) == FINAL


def test_no_room_is_said_before_anything_is_removed(tmp_path):
    run(tmp_path / "out")
    before = tree(tmp_path / "out")
    vast = place([("w", "u8", (1 << 55,))], [0], 1)
    with pytest.raises(RunError, match="QR345.*needs"):
        Output(tmp_path / "out", vast, overwrite=True).__enter__()
    assert tree(tmp_path / "out") == before


def test_a_directory_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    assert "Not a directory" in refused(tmp_path / "file" / "out", "QR346")


# ---------------------------------------------------------------------------------------------- links are not written through


@pytest.mark.parametrize("name", [*FINAL, "side.txt", ".quantrules.lock", ".config.json.partial", f".{FINAL[1]}.partial"])
def test_a_link_in_the_way_is_replaced_or_refused_but_never_followed(tmp_path, name):
    (tmp_path / "precious").write_text("precious")
    (tmp_path / "v").write_text("v")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to("../precious")
    try:
        run(tmp_path / "out", overwrite=True, sides=[SideFile("side.txt", tmp_path / "v")])
        assert not (tmp_path / "out" / name).is_symlink()
    except RunError as e:
        assert name == ".quantrules.lock" and {d.code for d in e.diagnostics} == {"QR346"}
    assert (tmp_path / "precious").read_text() == "precious"


def test_a_folder_that_is_a_link_is_not_written_through(tmp_path):
    checkpoint(tmp_path, {"v": b"v", "else/x": b""})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "sub").symlink_to("../else")
    refused(tmp_path / "out", "QR346", overwrite=True, sides=[SideFile("sub/v", tmp_path / "v")])
    assert sorted(tree(tmp_path / "else")) == ["x"]
    assert not looks_like_a_checkpoint(tmp_path / "out")


def test_an_output_that_is_a_link_to_an_empty_directory_is_that_directory(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk")
    run(tmp_path / "out")
    assert sorted(tree(tmp_path / "disk")) == FINAL


# ------------------------------------------------------------------------------------------------ a run that does not end well


def test_until_the_end_nothing_looks_like_a_checkpoint(tmp_path):
    with Output(tmp_path / "out", PLACING, configs=CONFIG) as out:
        assert not looks_like_a_checkpoint(tmp_path / "out")
        write(out, finish=False)
        assert sorted(tree(tmp_path / "out")) == sorted([".quantrules.lock", *PLACING.files])
        with pytest.raises(CheckpointError):
            open_source(tmp_path / "out")
        out.finish()


@pytest.mark.parametrize("step", range(4))
def test_a_run_that_fails_leaves_nothing(tmp_path, step):
    for path, left in ((tmp_path / "new", False), (tmp_path / "empty", True)):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(KeyboardInterrupt), Output(path, PLACING, configs=CONFIG) as out:
            if step > 0:
                out.write_at(0, int(PLACING.offset[0]), b"01")
            if step > 1:
                out.finish_shard(0)
            if step > 2:
                out.finish_shard(1)
            raise KeyboardInterrupt
        assert path.exists() == left
        assert not left or os.listdir(path) == []


@pytest.mark.parametrize("call", ["fsync", "pwrite", "rename", "posix_fallocate", "mkdir"])
@pytest.mark.parametrize("nth", range(8))
def test_whatever_call_fails_the_error_names_a_file_and_nothing_is_left(tmp_path, monkeypatch, call, nth):
    (tmp_path / "v").write_text("v")
    real, count = getattr(os, call), [0]

    def failing(*args, **kw):
        count[0] += 1
        if count[0] == nth + 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*args, **kw)

    monkeypatch.setattr(os, call, failing)
    try:
        run(tmp_path / "out", sides=[SideFile("s/v", tmp_path / "v")])
    except RunError as e:
        (found,) = e.diagnostics
        assert (found.code, str(tmp_path / "out") in found.message, "free some room" in found.help) == ("QR345", True, True)
        assert not (tmp_path / "out").exists()
    else:
        assert count[0] <= nth


def test_a_full_disk_of_another_kind_is_told_too(tmp_path):
    """A limit on the size of files, as a quota: EFBIG."""
    code = f"""
        import resource, signal
        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        from quantrules.checkpoint import Output, place
        from quantrules.diagnostics import RunError
        try:
            Output({str(tmp_path / "out")!r}, place([("w", "u8", (10000,))], [0], 1)).__enter__()
        except RunError as e:
            print(e)
    """
    out = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True).stdout
    assert "QR346" in out and "File too large" in out and "model-00001-of-00001.safetensors" in out
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("point", ["begun", "shard", "shards", "sides"])
def test_a_run_that_is_killed_leaves_no_checkpoint_and_the_next_one_cleans_up(tmp_path, point):
    (tmp_path / "v").write_text("v")
    code = f"""
        import os, signal, sys
        from pathlib import Path
        import quantrules.checkpoint.write as w
        from quantrules.checkpoint import place
        from quantrules.checkpoint.source import SideFile
        placing = place([("a.weight", "u8", (10,)), ("a.scale", "u8", (2,)), ("b.weight", "u8", (8,))], [0, 0, 1], shard_size=10)
        die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
        sides = [SideFile("s/v", Path({str(tmp_path / "v")!r}))]
        with w.Output({str(tmp_path / "out")!r}, placing, configs={{"config.json": {{}}}}, sides=sides) as out:
            if {point!r} == "begun": die()
            out.finish_shard(0)
            if {point!r} == "shard": die()
            out.finish_shard(1)
            if {point!r} == "shards": die()
            out._write_file = die
            out.finish()
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)]).returncode == -signal.SIGKILL
    assert ".quantrules.lock" in os.listdir(tmp_path / "out")
    with pytest.raises(CheckpointError):
        open_source(tmp_path / "out")
    run(tmp_path / "out")
    assert sorted(tree(tmp_path / "out")) == FINAL


def test_what_a_killed_run_left_beside_files_of_others_does_not_free_the_directory(tmp_path):
    checkpoint(tmp_path, {".quantrules.lock": b"config.json", "config.json": b"{}", "mine.txt": b""})
    before = tree(tmp_path)
    assert "holds mine.txt" in refused(tmp_path, "QR343")
    assert tree(tmp_path) == before
    (tmp_path / "mine.txt").unlink()
    run(tmp_path)
    assert sorted(tree(tmp_path)) == FINAL


def test_overwrite_removes_what_is_half_done_too(tmp_path):
    left = [".model-00001-of-00002.safetensors.partial", ".model-00007-of-00009.safetensors.partial", ".config.json.partial"]
    checkpoint(tmp_path, {name: b"" for name in left})
    run(tmp_path, overwrite=True)
    assert sorted(tree(tmp_path)) == FINAL


# ------------------------------------------------------------------------------------------------------------ scarce things


def test_a_lock_that_cannot_be_written_is_not_left(tmp_path, monkeypatch):
    """A file system that stops within the list of names: what a later run would read there is no list."""

    def half(fd, offset, data):
        os.pwrite(fd, data[:5], offset)
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr("quantrules.checkpoint.write.write_at", half)
    for made in (False, True):
        if made:
            (tmp_path / "out").mkdir()
        assert "File too large" in refused(tmp_path / "out", "QR346")
        assert (tmp_path / "out").exists() == made and (not made or os.listdir(tmp_path / "out") == [])


def test_few_open_files_are_enough_for_many_shards(tmp_path):
    script = textwrap.dedent("""
        import resource, sys
        resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))
        from quantrules.checkpoint import Output, place
        placing = place([(f"t{i}", "u8", (1,)) for i in range(100)], range(100), 1)
        with Output(sys.argv[1], placing) as out:
            for i in range(100):
                out.write_at(i, int(placing.offset[i]), b"x")
            for i in range(100):
                out.finish_shard(i)
            out.finish()
    """)
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], check=True)
    assert len(os.listdir(tmp_path / "out")) == 102


def test_what_was_made_is_removed_with_no_descriptor_to_spare(tmp_path):
    script = textwrap.dedent("""
        import os, sys
        from quantrules.checkpoint import Output, place
        held = []
        with Output(sys.argv[1], place([("t", "u8", (1,))], [0], 1)) as out:
            try:
                while True:
                    held.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                pass
    """)
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], check=True)
    assert not (tmp_path / "out").exists()
