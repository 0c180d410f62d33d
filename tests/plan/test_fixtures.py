"""Every case of tests/plan/fixtures: what a rule file makes of a source, and what it is told where it is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantrules.testing import read_cases, run_case

CASES = [case for path in sorted((Path(__file__).parent / "fixtures").glob("*.txt")) for case in read_cases(path)]


def _words(text: str) -> list[str]:
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.place}: {c.title}")
def test_case(case):
    plan, diagnostics = run_case(case)
    wanted = case.sections
    if "plan" in wanted:
        assert _words(plan) == _words(wanted["plan"]), diagnostics
    else:
        assert wanted.get("diagnostics"), "a case has a plan or diagnostics"
    for line in _words(wanted.get("diagnostics", "")):
        said = any(d == line or line.endswith("]") and d.startswith(line) for d in _words(diagnostics))  # a code alone stands for its message
        assert said, f"not said: {line}\n\n{diagnostics}"
    if "diagnostics" not in wanted:
        assert "error[" not in diagnostics, diagnostics


def test_the_harness_fails_on_a_wrong_plan(tmp_path):
    path = tmp_path / "wrong.txt"
    path.write_text("=== wrong\n--- source\na.weight bf16[2, 2]\n--- rules\n* → keep\n--- plan\nb.weight  bf16[2, 2]  = a\n")
    with pytest.raises(AssertionError):
        test_case(next(iter(read_cases(path))))
