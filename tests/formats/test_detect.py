"""Which tensors are a module, in which format, and whether the configs agree: the cases of detect.txt and declared.txt."""

import gc
import json
import time
from pathlib import Path

import numpy as np
import pytest

from quantrules import lang
from quantrules.checkpoint import open_source
from quantrules.diagnostics import RuleError
from quantrules.formats import find_modules, load_dialects, load_formats
from quantrules.names import KeyTable
from quantrules.testing import headers, read_cases
from quantrules.types import nbytes

ROOT = Path(__file__).parent.parent.parent
FILE = lang.load(ROOT / "rules" / "formats.rules")
FORMATS, DIALECTS = load_formats(FILE), load_dialects(FILE)
CASES = [c for name in ("detect", "declared") for c in read_cases(Path(__file__).parent / f"{name}.txt")]


def words(text):
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def listed(table):
    for m in table.modules:
        for i in range(len(m)):
            t = table.type_of(m, i)
            yield f"{m.names[i]} {m.format.name}/{m.spelling.name} {t} " + ", ".join(f"{p.role} {p}" for p in t.parts)


def check_rows(keys, table):
    """Every row is in exactly one module, under its own name."""
    rows = np.concatenate([m.rows.ravel() for m in table.modules])
    assert sorted(rows.tolist()) == list(range(len(keys)))
    for m in table.modules:
        for column, role in enumerate(m.roles):
            assert keys.name(m.rows[0, column]) == m.names[0] + m.spelling.part(role).suffix
            assert keys.name(m.rows[-1, column]) == m.names[len(m) - 1] + m.spelling.part(role).suffix


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.place}: {c.title}")
def test_case(case):
    source = headers(case.sections["source"], FORMATS)
    configs = {"config.json": json.loads(case.sections.get("config", "{}")), **json.loads(case.sections.get("files", "{}"))}
    table = find_modules(source.table, configs, FORMATS, DIALECTS)
    check_rows(source.table, table)
    said = words("\n".join(d.render() for d in table.diagnostics))
    if "modules" in case.sections:
        assert sorted(words("\n".join(listed(table)))) == sorted(words(case.sections["modules"])), said
    wanted = words(case.sections.get("diagnostics", ""))
    for line in wanted:
        assert line in said, f"not said: {line}\n" + "\n".join(said)
    errors = [line for line in said if line.startswith(("error", "warning"))]
    assert sorted(errors) == sorted(line for line in wanted if line in errors)


def test_the_harness_fails_on_a_wrong_expectation(tmp_path):
    path = tmp_path / "wrong.txt"
    for wrong in ("--- modules\na dense/weight bf16[2, 3] codes bf16[2, 3]", "--- diagnostics\nerror[QR410]: a"):
        path.write_text(f"=== wrong\n--- source\na.weight bf16[2, 2]\n{wrong}\n")
        with pytest.raises(AssertionError):
            test_case(next(iter(read_cases(path))))


def test_deleting_a_block_removes_the_format():
    text = (ROOT / "rules" / "formats.rules").read_text()
    start = text.index("format nvfp4")
    file = lang.parse(text[:start] + text[text.index("format fp8_block") :])
    formats = load_formats(file)
    assert list(FORMATS) == ["dense", "nvfp4", "fp8_block", "mxfp4"] and list(formats) == ["dense", "fp8_block", "mxfp4"]
    source = headers("a nvfp4[4, 16]\nb fp8_block[128, 128]", FORMATS)
    table = find_modules(source.table, {}, formats, load_dialects(file))
    assert {m.format.name for m in table.modules} == {"dense", "fp8_block"}
    assert [d.code for d in table.diagnostics if d.severity == "error"], "u8 with scales is still no dense module"


def test_a_format_of_a_user_is_found_like_any_other():
    user = lang.parse("""
format fp2
    element  e2m0, 4 in u8, high first, along -1
    block    [1, 8]
    value    codes * scale
    spelling own
        codes  _blocks  u8[N, K/8, 2]
        scale  _scales  u8[N, K/8]
""")
    formats = load_formats(FILE, user)
    source = headers("a.w_blocks u8[3, 5, 2]\na.w_scales u8[3, 5]\nb.weight bf16[2, 2]", formats)
    table = find_modules(source.table, {}, formats, DIALECTS)
    assert not table.diagnostics
    assert words("\n".join(listed(table)))[0] == "a.w fp2/own fp2[3, 40] codes u8[3, 5, 2], scale u8[3, 5]"


@pytest.mark.parametrize(
    "block, said",
    [
        ("element e2m1", "needs `block [rows, columns]`"),
        ("element e2m1, 3 in u8, low first, along -1\n    block [1, 16]", "3 codes do not share one u8"),
        ("element e2m1\n    block [1, 16]\n    value codes * zero", "a product with `zero`, which spelling s lacks"),
        ("element e2m1\n    block [1, 16]\n    value codes + scale", "a value is a product of roles"),
        ("element e2m1\n    block [1, 16]\n    value codes * act", "which spelling s has only sometimes"),
    ],
)
def test_a_block_that_means_nothing_is_refused(block, said):
    parts = "codes .w u8[N, K]\n        scale .s u8[N, K/16]\n        act .a f32[] optional\n"
    text = f"format odd\n    {block}\n    spelling s\n        {parts}"
    with pytest.raises(RuleError) as error:
        load_formats(lang.parse(text))
    assert said in str(error.value)


@pytest.mark.parametrize(
    "line, said",
    [
        ("codes .w u9[N, K]", "u9 is not a dtype"),
        ("codes .w u8[N, M]", "a dimension of a part is N, K"),
        ("codes .w u8[N]", "must name N and K once each"),
        ("scale .s u8[N, K]", "must begin with its codes"),
        ("codes .w u8[N, K] cat sideways", "not a way to join parts"),
    ],
)
def test_a_part_that_means_nothing_is_refused(line, said):
    text = f"format odd\n    element e2m1\n    block [1, 16]\n    value codes\n    spelling s\n        {line}\n"
    with pytest.raises(RuleError) as error:
        load_formats(lang.parse(text))
    assert said in str(error.value)


def test_two_formats_of_one_name():
    with pytest.raises(RuleError, match="defined twice"):
        load_formats(FILE, lang.parse('format dense\n    spelling x\n        codes "" any[...] dense ""\n'))


def test_two_readings_that_only_a_config_can_tell_apart():
    user = lang.parse("""
format twin
    element  e2m1, 2 in u8, low first, along -1
    block    [1, 32]
    value    codes * scale
    spelling own
        codes  .weight        u8[N, K/2]     dense .weight
        scale  .weight_scale  u8[N, K/32]
        declared quant_algo == "TWIN"
""")
    formats = load_formats(FILE, user)
    source = headers("a twin[4, 32]", formats)
    table = find_modules(source.table, {}, formats, DIALECTS)
    assert [d.code for d in table.diagnostics] == ["QR416"]
    assert "mxfp4 (modelopt) or twin (own)" in table.diagnostics[0].message
    told = {"config.json": {"quantization_config": {"quant_method": "modelopt", "quant_algo": "TWIN"}}}
    table = find_modules(source.table, told, formats, DIALECTS)
    assert not table.diagnostics and table.modules[0].format.name == "twin"


def test_ranks_that_repeat_keys_are_joined_within_their_file():
    tensors = (("a.weight", "f8_e4m3", (128, 128)), ("a.weight_scale_inv", "f32", (1, 1)))
    entries = [(n, f, d, s, 0, nbytes(d, s)) for f in (0, 1) for n, d, s in tensors]
    keys = KeyTable.build(["r0", "r1"], entries)
    table = find_modules(keys, {}, FORMATS, DIALECTS)
    assert table.modules[0].rows.tolist() == [[0, 1], [2, 3]] and not table.diagnostics


def test_v4_pro_is_quick_and_clean(v4_headers):
    with open_source(v4_headers("pro")) as source:
        find_modules(source.table, source.config_files, FORMATS, DIALECTS)
        gc.disable()
        start = time.process_time()
        table = find_modules(source.table, source.config_files, FORMATS, DIALECTS)
        took = time.process_time() - start
        gc.enable()
        check_rows(source.table, table)
    assert not [d for d in table.diagnostics if d.severity != "note"]
    assert sum(len(m) for m in table.modules if m.format.name == "nvfp4") == 70_942
    assert took < 1.0, f"{took:.2f} s; 0.15 s where nothing else runs"
