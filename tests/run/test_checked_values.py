"""Which values are looked at before anything is made of them: by `apply` and `stream` those that are computed with, by
`check --values` all scales."""

from __future__ import annotations

import pytest
import torch

import quantrules as qr
from quantrules.checkpoint import StateDictSource
from quantrules.run.preflight import preflight


def plan(rules: str, scale_2: float = 0.25, scale: int = 0x38):
    tensors = {"a.weight": torch.zeros(2, 16, dtype=torch.uint8), "a.weight_scale_2": torch.tensor(scale_2),
               "a.weight_scale": torch.full((2, 2), scale, dtype=torch.uint8).view(torch.float8_e4m3fn)}  # fmt: skip
    return qr.parse(rules, "t.rules").bind(StateDictSource(tensors))


NAN, KEEP, DECODE, RESPELL = float("nan"), "* → keep", "* → unpack | dequant", "* → unpack | pack(compressed_tensors)"


def codes(found):
    return [d.code for d in found]


@pytest.mark.parametrize("bad", [{"scale_2": NAN}, {"scale": 0x7F}, {"scale": 0xB8}])
def test_what_is_only_copied_is_checked_on_request(bad):
    bound = plan(KEEP, **bad)
    assert codes(preflight(bound, bound.source)) == [] and codes(preflight(bound, bound.source, kept=True)) == ["QR601"]


@pytest.mark.parametrize("rules", [KEEP, DECODE, RESPELL])
def test_good_values_pass(rules):
    bound = plan(rules)
    assert codes(preflight(bound, bound.source, kept=True)) == []


@pytest.mark.parametrize("scale_2", [NAN, float("inf"), -1.0])
def test_a_number_that_turns_into_its_inverse_is_checked(scale_2):
    bound = plan(RESPELL, scale_2=scale_2)
    (found,) = preflight(bound, bound.source)
    assert found.code == "QR601" and "a.weight_scale_2" in found.render()


def test_a_stream_is_checked_before_its_first_tensor():
    with pytest.raises(qr.RunError, match="a.weight_scale_2"):
        next(iter(qr.stream(plan(DECODE, scale_2=NAN))))
