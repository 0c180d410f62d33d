"""What each command prints, where, and how it ends."""

from __future__ import annotations

import json
import shlex
import shutil

import pytest
import typer

from quantrules.cli import app
from quantrules.cli.options import size
from tests.cli.conftest import MODELOPT, bf16, nvfp4, write

# --------------------------------------------------------------------------------------------------------------- apply


def test_apply_writes_a_checkpoint_and_says_so(run, quantised, tmp_path):
    result = run("apply", "nvfp4_to_bf16", quantised, tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert result.stdout == f"wrote {tmp_path / 'out'}: 5 tensors in 1 file, 2.69 kB\n"
    assert result.stderr == ""  # no progress in a pipe
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == {
        "lm_head.weight",
        *(f"model.layers.{i}.{m}.weight" for i in range(2) for m in ("q_proj", "norm")),
    }


def test_apply_leaves_alone_what_stands_in_its_way(run, quantised, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    result = run("apply", "nvfp4_to_bf16", quantised, out)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error[QR3") and result.stderr.endswith("1 error\n")
    assert [p.name for p in out.iterdir()] == ["thesis.txt"]


def test_apply_overwrites_if_asked(run, quantised, tmp_path):
    assert run("apply", "nvfp4_to_bf16", quantised, tmp_path / "out").exit_code == 0
    assert run("apply", "nvfp4_to_bf16", quantised, tmp_path / "out").exit_code == 1
    assert run("apply", "nvfp4_to_bf16", quantised, tmp_path / "out", "--overwrite").exit_code == 0


def test_a_dry_run_writes_nothing(run, quantised, tmp_path):
    result = run("apply", "nvfp4_to_bf16", quantised, tmp_path / "out", "--dry-run")
    assert result.exit_code == 0
    assert "nvfp4 → bf16" in result.stdout and result.stdout.splitlines()[-1].startswith("would write ")
    assert not (tmp_path / "out").exists()


def test_a_value_that_is_refused_is_an_error_before_a_byte_is_written(run, tmp_path):
    source = write(tmp_path / "bad", nvfp4("a.q_proj", 16, 32, scale=float("nan")), MODELOPT)
    result = run("apply", "nvfp4_to_bf16", source, tmp_path / "out")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "a.q_proj.weight_scale_2" in result.stderr and not (tmp_path / "out").exists()


def test_only_applies_a_part(run, quantised, tmp_path):
    result = run("apply", "nvfp4_to_bf16", quantised, tmp_path / "out", "--only", "*.layers.1.*")
    assert result.stdout.startswith(f"wrote {tmp_path / 'out'}: 2 tensors")


def test_activation_scales_reach_the_plan(run, dense, tmp_path):
    scales = tmp_path / "scales.json"
    scales.write_text('{"a.q_proj": 0.25, "a.k_proj.input_scale": 0.5}')
    result = run("plan", "bf16_to_nvfp4", dense, "--input-scales", scales, "--json=units")
    assert result.exit_code == 0, result.stderr
    assert '"a.q_proj.input_scale": "f32[]"' in result.stdout
    scales.write_text('{"a.p_proj": 0.25}')
    result = run("plan", "bf16_to_nvfp4", dense, "--input-scales", scales)
    assert result.exit_code == 1 and "did you mean `a.q_proj`?" in result.stderr


@pytest.mark.parametrize("options", [
    ("-D", "attention"), ("-D", "=1"), ("-D", "a=1", "-D", "a=2"), ("-D", "only=x"),
    ("--memory", "3QB"), ("--memory", "0"), ("--memory", "9" * 400), ("--only", ""), ("--shard-size", "-1"),
    ("--device", "cuda:0"), ("--jobs", "0"), ("--jobs", "many"), ("--nonsense",),
])  # fmt: skip
def test_what_is_no_usage_exits_with_2(run, quantised, tmp_path, options):
    result = run("apply", "nvfp4_to_bf16", quantised, tmp_path / "out", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: ") and "Traceback" not in result.stderr


@pytest.mark.parametrize("arguments", [("", "src", "out"), ("nvfp4_to_bf16", "", "out"), ("nvfp4_to_bf16", "src", "")])
def test_an_empty_path_is_no_usage(run, arguments):
    assert run("apply", *arguments, "--overwrite").exit_code == 2


def test_a_param_that_the_rules_do_not_have_is_a_finding(run, quantised, tmp_path):
    result = run("apply", "deepseek_v4_vllm", quantised, tmp_path / "out", "-D", "atention=fp8")
    assert result.exit_code == 1
    assert "-D atention is given, and no param has that name" in result.stderr and "did you mean `attention`?" in result.stderr


def test_a_value_that_a_param_does_not_have_is_one_finding(run, dense):
    result = run("check", "bf16_to_nvfp4", dense, "-D", "spelling=x")
    assert result.exit_code == 1 and result.stderr.endswith("\n1 error\n")
    assert "-D spelling=x: it is one of \"modelopt\" | \"compressed_tensors\"" in result.stderr


def test_params_may_be_numbers_and_truths(run, dense, rules):
    path = rules("param n = 3\nparam deep = false\n*_proj → drop when n == 4 and deep\n* → keep\n")
    assert json.loads(run("plan", path, dense, "--json").stdout)["params"] == {"n": 3, "deep": False}
    assert json.loads(run("plan", path, dense, "--json", "-D", "n=4", "-D", "deep=true").stdout)["totals"]["tensors_out"] == 1


def test_rules_that_find_nothing_to_do_are_no_error(run, dense):
    assert run("check", "nvfp4_to_bf16", dense).exit_code == 0


def test_a_directory_called_like_a_rule_file_does_not_hide_it(run, dense, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nvfp4_to_bf16").mkdir()
    assert run("check", "nvfp4_to_bf16", dense).exit_code == 0


def test_sizes_are_read_as_people_write_them():
    assert [size(t) for t in ("2GiB", "5GB", "512MiB", "1000", "1.5k", "3 kb", "7B")] == [
        2 << 30,
        5 * 10**9,
        512 << 20,
        1000,
        1500,
        3000,
        7,
    ]
    for wrong in ("", "GB", "1e3", "5ib", "-1", "1TBx", "0", "99999999999TB"):
        with pytest.raises(typer.BadParameter):
            size(wrong)


# --------------------------------------------------------------------------------------------------------------- check


def test_check_is_clean(run, quantised):
    result = run("check", "nvfp4_to_bf16", quantised, "--values")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"nvfp4_to_bf16 on {quantised}: no errors\n"


def test_check_prints_every_error_as_a_compiler_does(run, quantised, rules):
    path = rules("*.q_proj → unpak | dequant\n*.norm → cast(bf61)\n* → keep\n")
    result = run("check", path, quantised)
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.splitlines()[:7] == [
        "error[QR103]: `unpak` is neither an op nor a def", f" --> {path}:1:12", "  |", "1 | *.q_proj → unpak | dequant",
        "  |            ^^^^^ not known", "  |", "  = help: did you mean `unpack`?"]  # fmt: skip
    assert result.stderr.splitlines()[-1] == "2 errors"


def test_check_of_values_reads_scales(run, tmp_path):
    source = write(tmp_path / "bad", nvfp4("a.q_proj", 16, 32, scale=float("inf")), MODELOPT)
    assert run("check", "nvfp4_to_bf16", source).exit_code == 0
    assert run("check", "nvfp4_to_bf16", source, "--values").exit_code == 1


def test_check_json_has_a_schema_number_and_all_findings(run, quantised, rules):
    result = run("check", rules("*.q_proj → unpak\n"), quantised, "--json")
    found = json.loads(result.stdout)
    assert (result.exit_code, result.stderr) == (1, "")
    assert found["schema"] == 1 and found["errors"] >= 1
    assert found["diagnostics"][0] | {"notes": []} == {
        "severity": "error", "code": "QR103", "message": "`unpak` is neither an op nor a def", "label": "not known", "notes": [],
        "help": "did you mean `unpack`?", "count": 1, "file": found["rules"], "line": 1, "column": 12}  # fmt: skip


def test_check_json_holds_syntax_errors_and_unreadable_checkpoints_too(run, rules, tmp_path):
    assert json.loads(run("check", rules("a → b.*\nc →\n"), "--json").stdout)["errors"] == 2
    assert json.loads(run("check", "nvfp4_to_bf16", tmp_path / "nowhere", "--json").stdout)["errors"] == 1


@pytest.mark.parametrize("name", ["bf16_to_fp8_block", "bf16_to_nvfp4", "deepseek_v4_vllm", "fp8_block_to_bf16", "nvfp4_to_bf16"])
def test_shipped_rules_check_without_a_checkpoint(run, name):
    result = run("check", name)
    assert (result.exit_code, result.stdout) == (0, f"{name}: no errors\n"), result.stderr


def test_check_without_a_checkpoint_does_not_ask_for_its_config(run, rules):
    path = rules(
        "let n = config.hidden_size\nlet m = 2 * n\nlet k = len(config.x) + 1\n"
        "def d = keep when m == 3\ndef d = dequant\n*.a → d expect m\n*.b → unpak\n"
    )
    result = run("check", path)
    assert result.exit_code == 1
    assert [line for line in result.stderr.splitlines() if line.startswith("error")] == [
        "error[QR103]: `unpak` is neither an op nor a def"
    ]


def test_check_without_a_checkpoint_still_sees_undefined_names(run, rules):
    result = run("check", rules("let m = nope + 1\n* → keep\n"))
    assert result.exit_code == 1 and "`nope` is not defined" in result.stderr


def test_options_that_need_a_checkpoint_say_so(run):
    result = run("check", "nvfp4_to_bf16", "--values")
    assert result.exit_code == 2 and "need a checkpoint" in result.stderr


def test_notes_are_folded_and_do_not_fail(run, quantised, rules):
    path = rules("nothing.* → drop\n* → keep\n")
    result = run("check", path, quantised)
    assert (result.exit_code, result.stderr) == (0, "1 note (--verbose shows notes)\n")
    assert "the rule matches nothing" in run("check", path, quantised, "--verbose").stderr


def test_warnings_are_shown_and_do_not_fail(run, dense, rules):
    keys = ("a.q_proj.weight", "a.k_proj.weight", "norm.weight")
    (dense / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys(keys, "model.safetensors")}))
    shutil.copy(dense / "model.safetensors", dense / "stray.safetensors")
    result = run("check", rules("* → keep\n"), dense)
    assert result.exit_code == 0 and "stray.safetensors" in result.stderr
    assert result.stderr.startswith("warning[QR3") and result.stderr.endswith("\n1 warning\n")


# ---------------------------------------------------------------------------------------------------------------- plan


def test_plan_prints_a_table(run, quantised):
    result = run("plan", "nvfp4_to_bf16", quantised)
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["nvfp4", "→", "bf16", "2", "6", "→", "2"] == rows[1][:7]
    assert rows[-1][:5] == ["total", "5", "9", "→", "5"]


def test_plan_by_rule_shows_the_rules(run, quantised):
    assert "* → unpack(nvfp4) | dequant when format == nvfp4" in run("plan", "nvfp4_to_bf16", quantised, "--by", "rule").stdout
    assert run("plan", "nvfp4_to_bf16", quantised, "--by", "colour").exit_code == 2


def test_plan_shows_steps_with_types_and_what_runs_them(run, quantised):
    text = run("plan", "nvfp4_to_bf16", quantised, "--steps").stdout
    assert "2 units of nvfp4[16, 32] → bf16[16, 32]" in text and "kernels.cpu.decode" in text and "bytes are copied" in text


def test_plan_json_has_a_schema_number_totals_and_groups(run, quantised):
    made = json.loads(run("plan", "nvfp4_to_bf16", quantised, "--json").stdout)
    assert made["schema"] == 1 and made["totals"]["tensors_out"] == 5
    assert {(g["source"], g["target"], g["action"], g["units"]) for g in made["groups"]} >= {("nvfp4", "bf16", "convert", 2)}


def test_plan_json_units_is_one_line_a_unit(run, quantised):
    lines = [json.loads(line) for line in run("plan", "nvfp4_to_bf16", quantised, "--json=units").stdout.splitlines()]
    assert len(lines) == 5
    assert {"model.layers.1.q_proj.weight": "bf16[16, 32]"} in [line["targets"] for line in lines]


def test_a_plan_with_errors_is_no_result(run, quantised, rules):
    path = rules("*.norm → keep\n")
    result = run("plan", path, quantised)
    assert (result.exit_code, result.stdout) == (1, "") and "QR130" in result.stderr
    result = run("plan", path, quantised, "--json")
    assert result.exit_code == 1 and {d["code"] for d in json.loads(result.stdout)["diagnostics"]} >= {"QR130"}


# ------------------------------------------------------------------------------------------------------------- inspect


def test_inspect_prints_templates_types_and_what_is_declared(run, quantised):
    result = run("inspect", quantised)
    assert (result.exit_code, result.stderr) == (0, "")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["0-1", "model.layers.#.q_proj", "nvfp4[16,", "32]", "modelopt", "2", "584", "B"] in rows
    assert "quant_algo=NVFP4" in result.stdout
    assert "9 tensors in 1 file, 1.22 kB, 1,344 parameters, 7.29 bits each" in result.stdout


def test_inspect_json_counts_the_same(run, quantised):
    found = json.loads(run("inspect", quantised, "--json").stdout)
    assert (found["schema"], found["tensors"], found["parameters"], found["bytes"]) == (1, 9, 1344, 1224)
    assert {"format": "nvfp4", "spelling": "modelopt", "modules": 2, "tensors": 6, "parameters": 1024, "bytes": 584} in found[
        "formats"
    ]
    projection = next(g for g in found["groups"] if g["format"] == "nvfp4")
    assert projection["ranges"] == [[0, 1]] and projection["tensors"][".weight_scale"] == "f8_e4m3[16, 2]"


def test_inspect_finds_a_weight_without_its_scale(run, tmp_path):
    tensors = {k: v for k, v in nvfp4("a.q_proj", 16, 32).items() if not k.endswith("weight_scale")}
    result = run("inspect", write(tmp_path / "bad", tensors, MODELOPT))
    assert result.exit_code == 1 and "a.q_proj" in result.stderr and result.stderr.splitlines()[-1].endswith(("error", "errors"))


def test_names_from_strangers_cannot_steer_a_terminal(run, tmp_path):
    source = write(tmp_path / "bad", {"\x1b[2Jx.weight": bf16(4, 4)}, {})
    for command in (
        ("inspect", source),
        ("explain", "nvfp4_to_bf16", source, "\x1b[2Jx"),
        ("plan", "nvfp4_to_bf16", source, "--json=units"),
    ):
        result = run(*command)
        assert "\x1b" not in result.output and "1b[2Jx" in result.output


# --------------------------------------------------------------------------------------------------- lists and pages


def test_lists_give_a_name_and_a_line_each(run):
    assert "dequant        a packed value in floating point" in run("ops").stdout
    assert any(line.split()[0] == "nvfp4" and "modelopt" in line for line in run("formats").stdout.splitlines())
    shipped = {line.split()[0]: line for line in run("rules").stdout.splitlines()}
    assert "become BF16" in shipped["nvfp4_to_bf16"] and "formats" not in shipped


@pytest.mark.parametrize(("word", "part"), [
    ("quant", "a dense value in a quantised format"),
    ("nvfp4", "value codes * (scale * global)"),
    ("deepseek_v4_vllm", '-D attention=…  "bf16" | "fp8"'),
    ("nvfp4_to_bf16.rules", "quantrules apply nvfp4_to_bf16 SRC OUT"),
    ("QR130", "QR130: No rule takes a source key"),
    ("qr601", "QR601: "),
    ("plan", "Usage: quantrules plan"),
])  # fmt: skip
def test_every_kind_of_page(run, word, part):
    result = run("help", word)
    assert result.exit_code == 0 and part in result.stdout


def test_a_word_without_a_page_names_the_nearest(run):
    result = run("help", "qaunt")
    assert (result.exit_code, result.stdout) == (1, "") and "did you mean `quant`?" in result.stderr


def commands() -> dict:
    return typer.main.get_command(app).commands


@pytest.mark.parametrize("name", list(commands()))
def test_help_begins_with_two_examples_that_parse(run, name):
    lines = run(name, "--help").stdout.splitlines()
    examples = [line.strip() for line in lines[2:4]]
    assert all(e.startswith("quantrules ") for e in examples) and not lines[4].strip(), lines
    for example in examples:
        _, command, *args = shlex.split(example)
        commands()[command].make_context(command, args)  # raises where an example is no usage
