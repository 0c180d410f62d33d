"""What every op says of itself, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quantrules.diagnostics import CODES
from quantrules.ops import REGISTRY
from quantrules.types import Grid
from tests.ops import forms as f

OPS = "keep drop unpack dequant quant pack requant align cast cat stack split unstack assert_finite".split()


@pytest.mark.parametrize("name", OPS)
def test_pages(name):
    op = REGISTRY[name]
    assert op.name == name and op.summary and len(op.summary) < 80 and op.example
    assert all(p.help and p.kind for p in op.params)
    assert "efused" in op.help or name in ("keep", "drop"), "a page says when the op refuses"
    assert name in op.example and "→" in op.example


def test_codes_are_titled():
    assert {f"QR2{n:02}" for n in range(17)} <= set(CODES)


def test_planning_needs_no_torch():
    code = "import sys, quantrules.ops; from quantrules.kernels import cpu; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["keep", "drop", "unpack", "dequant", "pack", "assert_finite"])
def test_labels_and_inverses_of_packed_values(name):
    s = f.step(name, Grid.one(f.packed(f.NVFP4, 4, 32)))
    assert s.op.label(s) in ("exact", "exact in a range", "lossy")
    for other, args in s.op.inverse(s) or ():
        assert f.step(other, s.made, **args).made == s.takes


def test_dropping_makes_nothing():
    s = f.step("drop", Grid.one(f.packed(f.NVFP4, 4, 32)))
    assert s.made.items == () and s.op.rows(s, 0, 0, 4) == (None,)


@pytest.mark.parametrize(
    "t", [f.packed(f.NVFP4, 4, 32, spelling="compressed_tensors"), f.packed(f.FP8_BLOCK, 256, 256, spelling="v4")]
)
def test_quant_undoes_dequant(t):
    """Same format, spelling and dtypes."""
    s = f.step("dequant", Grid.one(t))
    ((name, args),) = s.op.inverse(s)
    assert f.step(name, s.made, **args).made == s.takes
    back = f.step(name, s.made, **args)
    ((name, args),) = back.op.inverse(back)
    assert f.step(name, back.made, **args).made == back.takes


def test_moves_undo_each_other():
    types = tuple(f.dense("bf16", n, 4) for n in (3, 5))
    axis = f.Axis("", ("a", "b"))
    s = f.step("cat", Grid((axis,), types))
    assert s.op.inverse(s) == (("split", {"dim": 0, "sizes": (3, 5)}),)
    e = f.Axis("E", (0, 1))
    s = f.step("stack", Grid((e,), (types[0],) * 2), axis="E")
    assert s.op.inverse(s) == (("unstack", {"axis": "E", "dim": 0}),)
    s = f.step("unstack", s.made, f.context(f.Axis("E", ())), axis="E")
    assert s.op.inverse(s) == (("stack", {"axis": "E", "dim": 0}),)
    s = f.step("split", Grid.one(types[1]), f.context(axis), sizes=[2, 3])
    assert s.op.inverse(s) == (("cat", {"axis": None, "dim": 0}),)
