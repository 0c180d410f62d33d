"""The demo's own comparisons notice what they are there to notice."""
import importlib.util

import pytest
import torch

from tests.conftest import ROOT


@pytest.fixture()
def demo():
    spec = importlib.util.spec_from_file_location("demo", ROOT / "examples" / "demo" / "demo.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def checkpoint(demo, error: float) -> tuple[dict, dict]:
    """210 matrices whose copies differ by a relative `error`, and one other tensor."""
    before = {f"layers.{i}.a_proj.weight": torch.full((2, 8), 4.0) for i in range(demo.PROJECTIONS)}
    before["norm.weight"] = torch.ones(8)
    after = {key: tensor * (1 + error) if key.endswith("_proj.weight") else tensor for key, tensor in before.items()}
    return before, after


def test_the_error_of_nvfp4_passes(demo):
    demo.compare(*checkpoint(demo, error=0.0947))
    assert demo.faults == []


@pytest.mark.parametrize("error", [0.0, 0.05, 0.2, 1.4])
def test_another_error_is_a_fault(demo, error):
    demo.compare(*checkpoint(demo, error))
    assert "210 with an error that NVFP4 does not have" in demo.faults[0]


def test_one_matrix_out_of_210_is_a_fault(demo):
    before, after = checkpoint(demo, error=0.0947)
    after["layers.7.a_proj.weight"] = after["layers.7.a_proj.weight"].flip(0) * -1
    demo.compare(before, after)
    assert "layers.7.a_proj.weight" in demo.faults[0]


def test_a_missing_matrix_is_a_fault(demo):
    before, after = checkpoint(demo, error=0.0947)
    del after["layers.7.a_proj.weight"]
    demo.compare(before, after)
    assert "209 of 210" in demo.faults[0]


@pytest.mark.parametrize("other", [torch.full((8,), 1.0000001), torch.ones(4), torch.ones(8, dtype=torch.bfloat16)])
def test_another_norm_is_a_fault(demo, other):
    before, after = checkpoint(demo, error=0.0947)
    after["norm.weight"] = other
    demo.compare(before, after)
    assert "norm.weight" in demo.faults[0]


def test_a_wrong_count_is_a_fault(demo):
    groups = [{"from": "nvfp4", "to": "bf16", "units": 304}, {"from": "bf16", "to": "bf16", "units": 7}]
    demo.expect("modules to BF16", 305, demo.count(groups, "nvfp4", "bf16"))
    assert demo.faults == ["modules to BF16: 304 where 305 are expected"]
