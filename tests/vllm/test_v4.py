"""deepseek_v4_vllm on a tiny DeepSeek-V4, from sources and against tensors that tiny_v4.py makes without us.

The files of every source and choice are compared bit by bit; then vLLM's default loader takes them, and its parameters
and log-probabilities are judged (check_v4.py says by what).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CONVERT = (
    f"{sys.executable} -m quantrules apply deepseek_v4_vllm {{source}} {{out}} -D attention={{attention}} -D shared={{shared}} -D experts={{experts}}"
)


def matrix(python, work: Path, *options: str) -> tuple[int, str]:
    """(cases that passed, output) of matrix_v4.py; fails where any case did."""
    run = subprocess.run([str(python), "matrix_v4.py", str(work), *options], cwd=HERE, capture_output=True, text=True)
    verdict = re.search(r"(\d+) passed, 0 failed\s*$", run.stdout)
    assert run.returncode == 0 and verdict, run.stdout[-6000:] + run.stderr[-6000:]
    return int(verdict[1]), run.stdout


def test_files_are_the_expected_ones(tmp_path):
    passed, _ = matrix(sys.executable, tmp_path, "--files-only", "--convert", CONVERT)
    assert passed == 12


@pytest.mark.vllm
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("case, count", [("modelopt-bf16", 3), ("modelopt-fp8", 3), ("compressed-tensors", 2), ("attention", 4)])
def test_vllm_loads_them(vllm_python, tmp_path, case, count):
    passed, _ = matrix(vllm_python, tmp_path, "--only", case, "--convert", CONVERT)
    assert passed == count


@pytest.mark.vllm
@pytest.mark.timeout(1500)
def test_the_judge_sees_damage(vllm_python, tmp_path):
    matrix(vllm_python, tmp_path, "--prove", "--only", "modelopt-bf16-")
