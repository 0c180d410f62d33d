"""Running a plan: the same bytes as the stream, whatever the threads and the memory; nothing left behind by a failure."""

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quantrules.checkpoint import StateDictSource, open_source
from quantrules.diagnostics import CheckpointError, RunError
from quantrules.run import tasks
from quantrules.run.local import execute
from quantrules.run.stream import in_memory as run
from tests.conftest import as_on_a_terminal
from tests.run.toys import Job, blocks, dense, members, plan_of, recipe, source_of

JOBS = [
    Job(recipe(members(dense(6, 2))), 20, "kept.{u}.{i}", "k.{u}"),
    Job(recipe(members(blocks(9, 3), blocks(15, 3)), "decode", "cat", "encode"), 3, "a.{u}.{i}", "b.{u}"),
    Job(recipe(members(*[dense(12, 5)] * 6), "add", "stack"), 2, "e.{u}.{i}", "experts.{u}"),
    Job(recipe(members(dense(8, 3)), "turn"), 2, "r.{u}.{i}", "turned.{u}"),
    Job(recipe(members(dense(0, 3)), "add"), 1, "n.{u}.{i}", "nothing.{u}"),
]


def digest(path):
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(path.iterdir())}


def loaded(path):
    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    files = {f: load_file(path / f) for f in set(index.values())}
    return {name: files[f][name] for name, f in index.items()}


@pytest.fixture(params=["files", "memory"])
def source(request, tmp_path):
    made = source_of(*JOBS, config={"model_type": "toy"})
    if request.param == "memory":
        yield made
        return
    from safetensors.torch import save_file

    from quantrules.ops.torch_views import view
    from quantrules.types import PartType

    def tensor(row):
        shape, dtype = made.table.shapes[made.table.shape[row]], made.table.dtypes[made.table.dtype[row]]
        return view(made._data[row].copy(), PartType("", dtype, shape))

    (tmp_path / "source").mkdir()
    save_file({made.table.name(row): tensor(row) for row in range(len(made.table))}, tmp_path / "source" / "model.safetensors")
    (tmp_path / "source" / "config.json").write_text("{}")
    (tmp_path / "source" / "tokenizer.json").write_text("[]")
    with open_source(tmp_path / "source") as opened:
        yield opened


def test_what_is_written_is_what_is_streamed(source, tmp_path):
    plan = plan_of(source, *JOBS)
    seen = []
    result = execute(plan, source, tmp_path / "out", progress=lambda *x: seen.append(x))
    expected, found = run(plan, source), loaded(tmp_path / "out")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[k], found[k]) for k in expected)
    assert result.tensors == len(found)
    assert seen[-1] == (seen[-1][1], seen[-1][1], "write")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model": "toy"}


@pytest.mark.parametrize("memory, tile", [(50_000, 10), (200_000, 40), (2 << 30, 16 << 20)])
def test_threads_and_memory_change_no_byte(source, tmp_path, memory, tile, monkeypatch):
    monkeypatch.setattr(tasks, "BUFFER", 7)
    monkeypatch.setattr(tasks, "BATCH", 30)
    plan = plan_of(source, *JOBS)
    execute(plan, source, tmp_path / "one", jobs=1, shard_size=300)
    monkeypatch.setattr("quantrules.lower.tiles.TILE", tile)
    execute(plan, source, tmp_path / "four", jobs=4, shard_size=300, memory=memory)
    assert len(digest(tmp_path / "one")) > 6
    assert digest(tmp_path / "one") == digest(tmp_path / "four")


def test_a_refused_value_leaves_nothing(tmp_path):
    good = [Job(recipe(members(dense(400, 2)), "add"), 50, "g.{u}.{i}", "h.{u}")]
    bad = Job(recipe(members(dense(5, 2)), "add", "refuse"), 1, "layers.3.x")
    source = source_of(*good, bad, largest=254)
    source._data[-1] = np.full(10, 250, np.uint8)
    source._data[-1][-1] = 254
    with pytest.raises(RunError, match=r"layers.3.x\[4, 1\] is 255"):
        execute(plan_of(source, *good, bad), source, tmp_path / "out", shard_size=1000)
    assert not (tmp_path / "out").exists()


def test_a_fault_in_an_op_names_the_target_and_leaves_nothing(tmp_path, monkeypatch):
    job = Job(recipe(members(dense(5, 2)), "add"))
    source = source_of(job)
    monkeypatch.setattr("tests.run.toys.Add.one", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError) as error:
        execute(plan_of(source, job), source, tmp_path / "out")
    assert error.value.__notes__ == ["while making t.0.0.weight"]
    assert not (tmp_path / "out").exists()


def test_a_dry_run_writes_nothing(tmp_path):
    source = source_of(*JOBS)
    result = execute(plan_of(source, *JOBS), source, tmp_path / "out", dry_run=True, shard_size=300)
    assert result.tensors == 34 and len(result.files) > 2
    assert not (tmp_path / "out").exists()


def test_a_unit_beyond_the_memory_is_an_error_before_anything_is_written(tmp_path):
    job = Job(recipe(members(dense(1000, 100)), "turn"), 3)
    source = source_of(job)
    with pytest.raises(RunError) as error:
        execute(plan_of(source, job), source, tmp_path / "out", memory=1_000_000)
    (found,) = error.value.diagnostics
    assert found.code == "QR610" and found.count == 3
    assert found.message == "`t.0.0.weight` needs 3,400,000 bytes of memory at once, of 1,000,000: its rule cannot run in tiles"
    assert found.help == "--memory 4MiB"
    assert not (tmp_path / "out").exists()


def test_buffers_in_flight_stay_within_the_memory(tmp_path, monkeypatch):
    """Measured at the ops: what all threads hold at once, by the costs of their tasks."""
    job = Job(recipe(members(dense(3000, 10)), "add"), 8)
    source, lock, held, most = source_of(job), threading.Lock(), 0, 0
    make = tasks._maker

    def measured(w, unit, tile, *rest):
        run = make(w, unit, tile, *rest)

        def counted():
            nonlocal held, most
            with lock:
                held += tile.cost
                most = max(most, held)
            time.sleep(0.001)
            run()
            with lock:
                held -= tile.cost

        return counted

    monkeypatch.setattr(tasks, "_maker", measured)
    execute(plan_of(source, job), source, tmp_path / "out", memory=1_000_000, jobs=4)
    assert 400_000 < most <= 1_000_000


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_a_run_that_is_stopped_leaves_no_checkpoint(how, tmp_path):
    """Interrupted, it removes what it made; killed, it leaves no index, and the next run cleans up."""
    script = (
        "import sys, time; from tests.run.toys import *; from quantrules.run.local import execute\n"
        "job = Job(recipe(members(dense(50, 2)), 'add'), 400); source = source_of(job)\n"
        "def slow(done, total, phase):\n"
        "    if done > total / 2: print('half', flush=True)\n"
        "    time.sleep(0.01)\n"
        "execute(plan_of(source, job), source, sys.argv[1], shard_size=3000, progress=slow if sys.argv[2] == 'slow' else None)\n"
    )
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    command = [sys.executable, "-c", script, str(tmp_path / "out")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([*command, "slow"], cwd=root, **pipes, preexec_fn=as_on_a_terminal) as process:
        assert process.stdout.readline() == b"half\n"
        process.send_signal(how)
        assert process.wait() != 0
    if how == signal.SIGINT:
        assert not (tmp_path / "out").exists()
    else:
        assert not (tmp_path / "out" / "model.safetensors.index.json").exists()
    subprocess.run([*command, "fast"], cwd=root, check=True)
    assert len(loaded(tmp_path / "out")) == 400


def test_the_manifest_says_what_made_what_and_nothing_of_here(tmp_path):
    source = source_of(*JOBS)
    execute(plan_of(source, *JOBS), source, tmp_path / "out")
    (text,) = [p.read_text() for p in (tmp_path / "out").glob("quantrules*.json")]
    assert str(tmp_path) not in text and os.uname().nodename not in text
    found = {t["target"]: t for t in json.loads(text)["targets"]}
    assert found["b.{n}"]["sources"] == ["a.{n}.0", "a.{n}.1"]
    assert found["b.{n}"]["steps"] == "decode | cat | encode"
    assert found["k.{n}"]["steps"] == "keep"


def test_no_targets_make_an_empty_checkpoint(tmp_path):
    source = StateDictSource({}, config={})
    assert execute(plan_of(source), source, tmp_path / "out").tensors == 0


@pytest.mark.parametrize("replaced", [False, True])
def test_a_source_that_changes_while_it_is_open_is_an_error(tmp_path, replaced):
    job = Job(recipe(members(dense(5, 2)), "add"), 40)
    path, other = tmp_path / "m.safetensors", tmp_path / "other"
    save_file({f"s.{u}.0.weight": torch.ones(5, 2, dtype=torch.uint8) for u in range(job.n)}, path)
    with open_source(path) as source:

        def disturbed(done, total, phase):
            if done and not other.exists():
                other.write_bytes(data := path.read_bytes()[:-1] + b"\0")
                if replaced:
                    os.link(path, tmp_path / "old")
                    path.unlink()
                path.write_bytes(data)

        with pytest.raises(CheckpointError, match="QR335"):
            execute(plan_of(source, job), source, tmp_path / "out", progress=disturbed, jobs=1)
    assert not (tmp_path / "out").exists()
