"""What a plan writes as config.json and its like: the cases of config.txt."""

import json
from pathlib import Path

import pytest
from attrs import evolve, frozen

from quantrules.api import parse
from quantrules.diagnostics import QuantrulesError
from quantrules.testing import Headers, headers, read_cases

from .test_detect import FORMATS, words

CASES = list(read_cases(Path(__file__).parent / "config.txt"))


@frozen(eq=False)
class WithFiles(Headers):
    config_files: dict = None


def made(case):
    config = json.loads(case.sections.get("config", "{}"))
    source = headers(case.sections["source"], FORMATS, config)
    files = {"config.json": config, **json.loads(case.sections.get("files", "{}"))}
    source = WithFiles(source.table, config, config_files=files)
    before = json.dumps(files)
    try:
        plan = parse(case.sections["rules"], "t.rules").bind(source)
    except QuantrulesError as error:
        return {}, error.diagnostics
    assert json.dumps(files) == before, "the source's configs were changed"
    return plan.config_files, plan.diagnostics


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.place}: {c.title}")
def test_case(case):
    files, diagnostics = made(case)
    said = words("\n".join(d.render() for d in diagnostics))
    for line in words(case.sections.get("diagnostics", "")):
        assert line in said, f"not said: {line}\n" + "\n".join(said)
    if "output" in case.sections:
        assert files == json.loads(case.sections["output"]), said
        assert not [line for line in said if line.startswith("error")], said
    else:
        assert [line for line in said if line.startswith("error")]


def test_the_harness_fails_on_a_wrong_output():
    with pytest.raises(AssertionError):
        test_case(evolve(CASES[0], sections={**CASES[0].sections, "output": '{"config.json": {"model_type": "n"}}'}))


THEIRS = [c for c in CASES if '"quantization_status": "compressed"' in c.sections.get("output", "")]


@pytest.mark.oracle
@pytest.mark.parametrize("case", THEIRS, ids=lambda c: c.place)
def test_compressed_tensors_takes_what_is_written(case):
    from compressed_tensors.quantization import QuantizationConfig

    files, _ = made(case)
    read = QuantizationConfig.model_validate(files["config.json"]["quantization_config"])
    assert read.config_groups and all(scheme.weights and scheme.targets for scheme in read.config_groups.values())
