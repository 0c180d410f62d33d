"""COVERAGE.md tells the truth: every entry has a row, and every test that a row names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from quantrules.testing import read_cases

TESTS = Path(__file__).parent.parent
LIST = TESTS.parent.parent / "shared" / "cases" / "field.md"
REFERENCE = re.compile(r"`([^`]+)`(?: \(([^)]*)\))?")


def rows(text: str) -> dict[str, tuple[str, str]]:
    """id -> (tests, later)"""
    found = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| B")]
    assert len({r[0] for r in found}) == len(found), "an id has two rows"
    return {name: (tests, later) for name, tests, later in found}


@cache
def functions(path: Path) -> dict[str, set[str]]:
    """Test functions of a file, with the ids that their docstrings name."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {f.name: set(re.findall(r"B\d{3}", ast.get_docstring(f) or "")) for f in tree.body if isinstance(f, ast.FunctionDef)}


@cache
def titles(path: Path) -> set[str]:
    """The ids that stand before the colon in titles of cases."""
    return {i for case in read_cases(path) for i in re.findall(r"B\d{3}", case.title.split(":")[0])}


def missing(tests: str) -> list[str]:
    """The references of a cell that lead nowhere."""
    lost = []
    for reference, parameters in REFERENCE.findall(tests):
        name, colons, function = reference.partition("::")
        name, _, title = (name, "", "") if colons else reference.partition(": ")
        path = TESTS / name
        if not path.is_file() or (function not in functions(path) if colons else title not in titles(path)):
            lost.append(reference)
        elif unknown := [p for p in parameters.split(", ") if p and p not in path.read_text(encoding="utf-8")]:
            lost.append(f"{reference} ({', '.join(unknown)})")
    return lost


ROWS = rows((Path(__file__).parent / "COVERAGE.md").read_text(encoding="utf-8"))


@pytest.mark.parametrize("entry", ROWS)
def test_every_test_that_a_row_names_exists(entry):
    tests, later = ROWS[entry]
    assert not missing(tests)
    assert REFERENCE.search(tests) or re.match(r"issue [3-7]: \S", later), "neither a test nor an issue that adds one"
    assert not later or re.match(r"issue [3-7]: \S", later)


def test_every_id_of_a_test_here_stands_in_its_row():
    for path in Path(__file__).parent.glob("test_[vf]*.py"):
        for function, named in functions(path).items():
            for entry in named:
                assert f"::{function}`" in ROWS[entry][0], f"{function} names {entry}"


def test_every_entry_of_the_list_has_a_row():
    if not LIST.exists():
        pytest.skip(f"{LIST} is not there")
    assert list(ROWS) == re.findall(r"^\| (B\d{3}) ", LIST.read_text(encoding="utf-8"), re.M)


@pytest.mark.parametrize("reference", [
    "`field/test_values.py::test_nothing`", "`field/nothing.py::test_x`", "`plan/fixtures/field.txt: B999`",
    "`checkpoint/test_headers.py::test_it_is_read_as_safetensors_reads_it` (a header of 7 bytes)",
])  # fmt: skip
def test_the_check_finds_a_reference_that_leads_nowhere(reference):
    assert missing(reference)
