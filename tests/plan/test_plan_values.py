"""A plan is a value: it compares, prints and does not change."""

from __future__ import annotations

import attrs
import pytest

import quantrules as qr
from quantrules.api import builtin_formats
from quantrules.testing import headers

SOURCE = "l.0.q nvfp4[32, 64]\nl.0.k nvfp4[16, 64]\nl.1.q nvfp4[32, 64]\nl.1.k nvfp4[16, 64]\nnorm.weight bf16[64]\n"
RULES = "l.{L}.{q,k} → unpack | dequant | cat → l.{L}.qk\n* → keep\n"


def plan(rules=RULES, source=SOURCE):
    return qr.parse(rules, "t.rules").bind(headers(source, builtin_formats()))


def test_the_same_rules_and_headers_make_equal_plans():
    assert plan() == plan() and plan().summary() == plan().summary()


@pytest.mark.parametrize("other", [
    {"rules": RULES.replace("qk", "kq")},  # a name
    {"rules": RULES.replace("{q,k}", "{k,q}")},  # an order
    {"rules": RULES.replace("dequant |", "dequant(f32) |")},  # a type
    {"rules": RULES.replace("* →", "norm →")[:-1] + "   when len(shape) == 1\n"},  # only the text
    {"source": SOURCE.replace("[32, 64]", "[48, 64]")},  # a shape
])  # fmt: skip
def test_plans_that_do_something_else_differ(other):
    same = "when" in other.get("rules", "")
    assert (plan(**other) == plan()) is same


def test_a_plan_cannot_be_changed():
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        plan().units = ()
