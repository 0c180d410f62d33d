"""Activation scales from a file of their own: they reach the modules that are quantised, and are never invented."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import quantrules as qr
from quantrules.checkpoint import StateDictSource
from quantrules.testing import run

RULES = "*_proj → unpack | quant(nvfp4, spelling={0})\n* → keep\n"


def source():
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    return StateDictSource({"a.q_proj.weight": weight, "a.k_proj.weight": weight * 2, "norm.weight": weight[0].clone()})


def bound(tmp_path, scales, spelling="modelopt"):
    path = tmp_path / "scales.json"
    path.write_text(json.dumps(scales))
    return qr.parse(RULES.format(spelling), "t.rules").bind(source(), input_scales=path)


def codes(plan):
    return {d.code: d for d in plan.diagnostics}


def test_weights_only_without_a_file():
    plan = qr.parse(RULES.format("modelopt"), "t.rules").bind(source())
    assert not [k for k in run(plan, plan.source) if "input" in k]


@pytest.mark.parametrize(
    "spelling, key, value", [("modelopt", "a.q_proj.input_scale", 0.25), ("compressed_tensors", "a.q_proj.input_global_scale", 4.0)]
)
def test_a_scale_reaches_its_module(tmp_path, spelling, key, value):
    plan = bound(tmp_path, {"a.q_proj": 0.25, "a.k_proj.input_scale": 0.5}, spelling)
    assert not plan.errors, plan.diagnostics
    got = run(plan, plan.source)
    assert float(got[key]) == value and len([k for k in got if "input" in k]) == 2


def test_a_safetensors_file_says_the_same(tmp_path):
    save_file({"a.q_proj.input_scale": torch.tensor(0.25), "a.k_proj.input_scale": torch.tensor([0.5])}, tmp_path / "scales.safetensors")
    plan = qr.parse(RULES.format("modelopt"), "t.rules").bind(source(), input_scales=tmp_path / "scales.safetensors")
    assert float(run(plan, plan.source)["a.k_proj.input_scale"]) == 0.5


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda p: os.symlink("/dev/zero", p)])
def test_what_is_no_regular_file_is_not_waited_for(tmp_path, make):
    make(tmp_path / "scales.json")
    with pytest.raises(qr.QuantrulesError, match="QR301"):
        qr.parse(RULES.format("modelopt"), "t.rules").bind(source(), input_scales=tmp_path / "scales.json")


def test_the_file_of_scales_is_not_overwritten(tmp_path):
    plan = bound(tmp_path, {"a.q_proj": 0.25, "a.k_proj": 0.5})
    with pytest.raises(qr.RunError, match="QR342"):
        qr.apply(plan, tmp_path, overwrite=True)
    assert [p.name for p in tmp_path.iterdir()] == ["scales.json"]


def test_a_module_without_one_is_named(tmp_path):
    found = codes(bound(tmp_path, {"a.q_proj": 0.25}))
    assert found["QR141"].severity == "warning" and "a.k_proj" in found["QR141"].message


@pytest.mark.parametrize("name, word", [("a.qproj", "a.q_proj"), ("norm", "stays")])
def test_a_stray_scale_is_an_error(tmp_path, name, word):
    found = codes(bound(tmp_path, {"a.q_proj": 0.25, name: 0.5}))["QR140"]
    assert found.severity == "error" and word in found.render()


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "x", None, True, [1]])
def test_what_is_no_scale_is_refused(tmp_path, value):
    with pytest.raises(qr.QuantrulesError, match="scales.json"):
        bound(tmp_path, {"a.q_proj": value})


def test_a_file_of_other_tensors_is_refused(tmp_path):
    save_file({"a.q_proj.input_scale": torch.zeros(3)}, tmp_path / "scales.safetensors")
    with pytest.raises(qr.QuantrulesError, match="one f32 number"):
        qr.parse(RULES.format("modelopt"), "t.rules").bind(source(), input_scales=tmp_path / "scales.safetensors")


def test_the_number_is_kept_to_the_bit(tmp_path):
    value = float(np.float32(1 / 3))
    plan = bound(tmp_path, {"a.q_proj": value, "a.k_proj": value})
    assert run(plan, plan.source)["a.q_proj.input_scale"].numpy().tobytes() == np.float32(1 / 3).tobytes()
