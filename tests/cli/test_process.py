"""The command line as a process: what it imports, pipes, terminals, signals."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import quantrules
from quantrules import api
from quantrules.cli import app
from tests.conftest import ROOT, as_on_a_terminal

HEAVY = ("torch", "numpy", "lark", "numba", "rich")


def process(*args: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "quantrules", *map(str, args)], cwd=ROOT, capture_output=True, text=True, **options
    )


def imported(code: str) -> set[str]:
    """Which heavy modules a program has imported at its end."""
    ended = (
        f"import atexit, sys; atexit.register(lambda: print(*(m for m in {HEAVY} if m in sys.modules), file=sys.stderr)); {code}"
    )
    return set(subprocess.run([sys.executable, "-c", ended], cwd=ROOT, capture_output=True, text=True).stderr.split())


@pytest.mark.parametrize("arguments", [["--help"], ["apply", "--help"], ["--version"], []])
def test_help_imports_nothing_heavy(arguments):
    assert imported(f"sys.argv = ['quantrules', *{arguments}]; from quantrules.cli import main; main()") & set(HEAVY) == set()


def test_the_package_imports_nothing_until_asked():
    assert imported("import quantrules; quantrules.__version__; dir(quantrules)") == set()
    assert "torch" not in imported("import quantrules; quantrules.load")


def test_a_plan_imports_neither_torch_nor_numba_nor_rich(quantised):
    run = f"sys.argv = ['quantrules', 'plan', 'nvfp4_to_bf16', {str(quantised)!r}]; from quantrules.cli import main; main()"
    assert imported(run) & {"torch", "numba", "rich"} == set()


def test_the_public_names_are_there():
    for name in quantrules.__all__:
        assert getattr(quantrules, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        quantrules.nonsense  # noqa: B018


def test_the_version_is_that_of_the_package():
    assert process("--version").stdout == f"quantrules {quantrules.__version__}\n"


def test_a_reader_that_leaves_is_no_error(quantised):
    command = [sys.executable, "-m", "quantrules", "plan", "nvfp4_to_bf16", str(quantised), "--json=units"]
    pipe = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    pipe.stdout.close()
    assert pipe.stderr.read() == b"" and pipe.wait() == 141


def test_an_interrupt_is_quiet(monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "load", interrupted)
    result = CliRunner().invoke(app, ["check", "nvfp4_to_bf16"])
    assert (result.exit_code, result.output) == (130, "")


def test_an_error_of_the_system_is_a_message(quantised, tmp_path):
    (tmp_path / "file").write_text("")
    result = process("apply", "nvfp4_to_bf16", quantised, tmp_path / "file" / "out")
    assert result.returncode == 1 and "Traceback" not in result.stderr and "file" in result.stderr


def test_output_that_the_encoding_lacks_is_escaped(quantised):
    result = process("plan", "nvfp4_to_bf16", quantised, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0 and "nvfp4 \\u2192 bf16" in result.stdout


def terminal(*args: str, **environment: str) -> str:
    """What a command writes to stderr where that is a terminal."""
    near, far = os.openpty()
    env = (
        {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR")}
        | {"TERM": "xterm", "COLUMNS": "100"}
        | environment
    )
    child = subprocess.Popen(
        [sys.executable, "-m", "quantrules", *map(str, args)], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=far, env=env
    )
    os.close(far)
    seen = b""
    try:
        while chunk := os.read(near, 4096):
            seen += chunk
    except OSError:  # the far end is closed
        pass
    os.close(near)
    child.wait()
    return seen.decode()


def test_colours_on_a_terminal_unless_the_user_wants_none():
    assert "\x1b[1;31merror[QR090]\x1b[0m: " in terminal("check", "nonsense")
    assert "\x1b" not in terminal("check", "nonsense", NO_COLOR="1")
    assert "\x1b" not in process("check", "nonsense").stderr


def test_a_terminal_shows_progress(quantised, tmp_path):
    assert "write" in terminal("apply", "nvfp4_to_bf16", quantised, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_standard_streams_that_are_closed_are_no_error(quantised, tmp_path, closed):
    command = shlex.join([sys.executable, "-m", "quantrules", "apply", "nvfp4_to_bf16", str(quantised), str(tmp_path / "out")])
    assert subprocess.run(["sh", "-c", f"{command} {closed}"], cwd=ROOT).returncode == 0
    assert (tmp_path / "out" / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("arguments", [["--help"], ["plan", "--help"], ["help"], ["--version"], ["ops"]])
def test_an_output_that_is_full_is_a_message(arguments):
    with open("/dev/full", "w") as full:
        ended = subprocess.run([sys.executable, "-m", "quantrules", *arguments], cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert "No space left" in ended.stderr and "Traceback" not in ended.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_told_to_end_leaves_nothing(quantised, tmp_path, number):
    script = (
        "import sys, time; from quantrules.checkpoint import Output; from quantrules.cli import main\n"
        "Output.finish = lambda *_: (print('there', flush=True), time.sleep(60))\n"
        "sys.argv = ['quantrules', 'apply', 'nvfp4_to_bf16', *sys.argv[1:]]; main()\n"
    )
    command = [sys.executable, "-c", script, str(quantised), str(tmp_path / "out")]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, **pipes, text=True, preexec_fn=as_on_a_terminal) as run:
        assert run.stdout.readline() == "there\n" and (tmp_path / "out").exists()
        run.send_signal(number)
        assert run.stderr.read() == "" and run.wait() == 128 + number
    assert not (tmp_path / "out").exists()
