"""Which rule reads or writes a key, and why the others do not."""

from __future__ import annotations

import numpy as np
import pytest

from tests.cli.conftest import MODELOPT, bf16, nvfp4, write

FUSED = "{x:a|b}.{q_proj,k_proj} → unpack | dequant | cat → {x}.qk\n* → keep\n"


@pytest.fixture
def lines(run):
    """The lines that explain prints, without the spaces that align them."""

    def call(*args, code: int = 0) -> list[str]:
        result = run("explain", *args)
        assert result.exit_code == code, result.stderr
        return [" ".join(line.split()) for line in result.stdout.splitlines()]

    return call


@pytest.mark.parametrize("key", ["model.layers.1.q_proj.weight_scale", "model.layers.1.q_proj", "model.layers.1.q_proj.weight"])
def test_a_tensor_a_module_and_a_target_lead_to_the_same_unit(lines, quantised, key):
    assert lines("nvfp4_to_bf16", quantised, key)[1:5] == [
        "module model.layers.1.q_proj nvfp4[16, 32], spelling modelopt",
        "model.layers.1.q_proj.weight u8[16, 16] in model.safetensors",
        "model.layers.1.q_proj.weight_scale f8_e4m3[16, 2] in model.safetensors",
        "model.layers.1.q_proj.weight_scale_2 f32[] in model.safetensors",
    ]


def test_steps_are_shown_with_their_types(lines, quantised):
    shown = lines("nvfp4_to_bf16", quantised, "model.layers.0.q_proj")
    at = shown.index("* → unpack(nvfp4) | dequant when format == nvfp4")
    assert shown[at + 1 : at + 3] == ["steps nvfp4[16, 32]", "dequant → bf16[16, 32] (lossy)"]
    assert "writes model.layers.0.q_proj.weight bf16[16, 32]" in shown


def test_a_target_shows_all_its_members(lines, dense, rules):
    shown = lines(rules(FUSED), dense, "a.qk.weight")
    assert "members a.q_proj bf16[16, 32]" in shown and "a.k_proj bf16[16, 32]" in shown
    assert "steps bf16[16, 32] × 2" in shown and any(line.startswith("cat") and line.endswith("→ bf16[32, 32]") for line in shown)


def test_a_condition_that_is_false_is_named_with_its_values(lines, quantised):
    shown = lines("nvfp4_to_bf16", quantised, "lm_head.weight")
    assert (
        "not by line 5 `* → unpack(nvfp4) | dequant when format == nvfp4`: `when format == nvfp4` is false: format = dense"
        in shown
    )


def test_an_exception_is_named(lines, dense, rules):
    shown = lines(rules("*_proj → drop except *.k_proj\n* → keep\n"), dense, "a.k_proj")
    assert "not by line 1 `*_proj → drop except *.k_proj`: `except *.k_proj` leaves it out" in shown


def test_a_rule_that_comes_later_is_named(lines, dense, rules):
    assert "not by line 2 `* → keep`: it comes later, and the first match wins" in lines(
        rules("norm → keep\n* → keep\n"), dense, "norm.weight"
    )


def test_the_chain_of_renames_is_shown(lines, dense, rules):
    path = rules("rename a.* → b.*\nrename b.{x}_proj → c.{x}\nc.q → keep\n* → drop\n")
    for key in ("a.q_proj.weight", "a.q_proj", "c.q"):
        shown = lines(path, dense, key)
        assert "renamed a.q_proj on disk" in shown
        assert (
            f"b.q_proj by `rename a.* → b.*` ({path}:1:1)" in shown
            and f"c.q by `rename b.{{x}}_proj → c.{{x}}` ({path}:2:1)" in shown
        )


def test_what_is_dropped_writes_nothing(lines, dense, rules):
    shown = lines(rules("norm → drop\n* → keep\n"), dense, "norm.weight")
    assert "steps bf16[32], dropped" in shown and "writes nothing" in shown


def test_a_companion_that_a_rule_of_its_own_drops(lines, tmp_path, rules):
    tensors = nvfp4("a.q_proj", 16, 32) | {"a.q_proj.input_scale": ("F32", (), np.float32(1))}
    source = write(tmp_path / "act", tensors, MODELOPT)
    path = rules("*.input_scale → drop\n* → keep\n")
    assert "writes nothing" in lines(path, source, "a.q_proj.input_scale")
    assert "a.q_proj.input_scale f32[] in model.safetensors" not in lines(path, source, "a.q_proj")


def test_rules_with_errors_are_not_explained(run, dense, rules):
    result = run("explain", rules("* → unpak\n"), dense, "norm.weight")
    assert (result.exit_code, result.stdout) == (1, "") and result.stderr.endswith("1 error\n")


def test_a_key_that_no_rule_takes_names_what_nearly_did(lines, dense, rules):
    shown = lines(rules("norm → cast(f32)\nq_proj → keep\n"), dense, "norm", "a.q_proj.weight", code=1)
    assert shown.count("rule none takes it") == 2
    assert any("`cast` reads keys, and norm is a module's path" in line for line in shown)
    assert "nearest line 2 `q_proj → keep`: it reads the end of the name, without `a.`" in shown


def test_an_unknown_key_is_an_error_beside_the_others(run, dense):
    result = run("explain", "nvfp4_to_bf16", dense, "norm.weight", "a.p_proj.weight")
    assert result.exit_code == 1 and result.stdout.startswith("norm.weight\n")
    assert "a.p_proj.weight is neither read nor written" in result.stderr and "did you mean one like a." in result.stderr


def test_many_members_are_cut_short_but_the_asked_one_is_there(lines, tmp_path, rules):
    source = write(tmp_path / "experts", {f"e.{i}.up.weight": bf16(4, 4) for i in range(40)}, {})
    shown = lines(rules("e.{E}.up.weight → stack(E) → e.up\n"), source, "e.17.up.weight")
    assert "e.17.up.weight bf16[4, 4] in model.safetensors" in shown and "… 40 members in all" in shown and len(shown) < 25
