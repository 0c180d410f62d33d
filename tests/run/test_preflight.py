"""Preflight says, for all units at once, which scales cannot be right and which parts that must agree do not."""

import numpy as np
import pytest

from quantrules.checkpoint import Raw, StateDictSource
from quantrules.ops.base import Need
from quantrules.plan.model import Recipe
from quantrules.run import preflight as room
from quantrules.run.preflight import preflight
from quantrules.types import Element, Format, GridDim, Part, Spelling, make_type
from tests.run.toys import Job, dense, members, plan_of


def scaled(rows, scale="f8_e4m3", global_=None, inverse=False, columns=2):
    """A quantised type: codes u8[rows, columns], scale[rows, columns] and, where given, an f32 global."""
    parts = [Part("codes", ".weight", ("u8",), None), Part("scale", ".scale", (scale,), (GridDim("N"), GridDim("K")))]
    parts += [Part("global", ".global", ("f32",), (), inverse=inverse)] if global_ else []
    format = Format("q", Element("byte"), (1, 1), ("codes", "scale"), (Spelling("q", tuple(parts)),))
    return make_type(format, format.spellings[0], (rows, columns))


def found(types, needs, tensors, n=1, **how):
    """Diagnostics for n units of `types`; tensors are bytes by key, others are small and right."""
    job = Job(Recipe(members(*types), (), members(*types), tuple(needs)), n, "x.{u}.m{i}", "y.{u}.m{i}")
    given = {}
    for u in range(n):
        for i, type in enumerate(types):
            for part in type.parts:
                key = f"x.{u}.m{i}" + type.spelling.part(part.role).suffix
                right = np.full(part.nbytes // 4, 2, np.float32).tobytes() if part.dtype == "f32" else b"\x38" * part.nbytes
                given[key] = Raw(part.dtype, part.shape, bytes(tensors.get(key, right)))
    source = StateDictSource(given)
    return preflight(plan_of(source, job), source, **how)


def f32(x):
    return np.float32(x).tobytes()


SCALES = [Need("scales", (0,), ("scale", "global"))]


@pytest.mark.parametrize("chunk", [1, 4096])
@pytest.mark.parametrize(
    "dtype, bits, index, what",
    [
        ("f8_e4m3", bytes([1, 2, 3, 0x7F, 5, 6]), "[1, 1]", "is NaN"),
        ("f8_e4m3", bytes([1, 2, 0xFF, 4, 5, 6]), "[1, 0]", "is NaN"),
        ("f8_e4m3", bytes([1, 2, 3, 4, 5, 0x81]), "[2, 1]", "is negative"),
        ("f8_e8m0", bytes([255, 2, 3, 4, 5, 6]), "[0, 0]", "is NaN"),
        ("f8_e5m2", bytes([1, 0x7C, 3, 4, 5, 6]), "[0, 1]", "is infinite"),
        ("f32", np.array([1, 2, np.inf, 4, 5, 6], np.float32), "[1, 0]", "is infinite"),
        ("f32", np.array([1, 2, 3, np.nan, 5, 6], np.float32), "[1, 1]", "is NaN"),
        ("f32", np.array([1, 2, 3, 4, -1e-30, 6], np.float32), "[2, 0]", "is negative"),
        ("bf16", np.array([1, 2, 3, 4, 5, 0x7F81], np.uint16), "[2, 1]", "is NaN"),
        ("f8_e4m3fnuz", bytes([1, 0x7F, 3, 4, 0x80, 0]), "[2, 0]", "is NaN"),
        ("f8_e4m3fnuz", bytes([1, 0x81, 3, 4, 5, 0]), "[0, 1]", "is negative"),
        ("f16", np.array([1, 2, 3, 0xFBFF, 5, 6], np.uint16), "[1, 1]", "is negative"),
    ],
)
def test_a_wrong_scale_is_named_with_its_place(dtype, bits, index, what, chunk, monkeypatch):
    monkeypatch.setattr(room, "SMALL", 4 if chunk == 1 else 4096)  # as a block scale, then as a scalar
    monkeypatch.setattr(room, "CHUNK", 8)
    (error,) = found([scaled(3, dtype)], SCALES, {"x.0.m0.scale": bytes(bits)})
    assert error.severity == "error"
    assert error.code == "QR601"
    assert error.message == f"`x.0.m0.scale`{index} {what}"


@pytest.mark.parametrize("small", [4, 4096])
def test_every_right_bit_pattern_passes(small, monkeypatch):
    monkeypatch.setattr(room, "SMALL", small)
    assert found([scaled(128, columns=1)], SCALES, {"x.0.m0.scale": bytes([*range(127), 0x80])}) == []  # -0 is zero
    assert found([scaled(255, "f8_e8m0", columns=1)], SCALES, {"x.0.m0.scale": bytes(range(255))}) == []
    assert found([scaled(32640, "bf16", columns=1)], SCALES, {"x.0.m0.scale": np.arange(0x7F80, dtype=np.uint16)}) == []


def test_findings_fold_by_template():
    wrong = {f"x.{u}.m0.global": np.float32(np.nan).tobytes() for u in (3, 5, 8)}
    (error,) = found([scaled(3, global_=True)], SCALES, wrong, n=10)
    assert error.message == "3 tensors, for example `x.3.m0.global` is NaN"
    assert error.count == 3


def test_zero_is_wrong_where_it_divides_only():
    zero = {"x.0.m0.global": np.float32(0).tobytes()}
    assert found([scaled(3, global_=True)], SCALES, zero) == []
    (error,) = found([scaled(3, global_=True, inverse=True)], SCALES, zero)
    assert "is zero and divides" in error.message


def test_wrong_scales_may_be_allowed():
    wrong = {"x.0.m0.global": np.float32(np.nan).tobytes()}
    (warning,) = found([scaled(3, global_=True)], SCALES, wrong, allow_nonfinite=True)
    assert warning.severity == "warning"


def test_block_scales_may_be_left_for_later(monkeypatch):
    monkeypatch.setattr(room, "SMALL", 4)
    assert found([scaled(3)], SCALES, {"x.0.m0.scale": bytes([255] * 6)}, blocks=False) == []


@pytest.mark.parametrize("small", [2, 4096])
def test_parts_that_must_be_equal(small, monkeypatch):
    monkeypatch.setattr(room, "SMALL", small)
    monkeypatch.setattr(room, "CHUNK", 3)
    types = [scaled(3, global_=True)] * 3
    needs = [Need("equal", (0, 1, 2), ("global",))]
    assert found(types, needs, {}, n=2) == []
    (error,) = found(types, needs, {"x.1.m2.global": np.float32(2.0000002).tobytes()}, n=2)
    assert error.code == "QR602"
    assert error.message == "`x.1.m0.global` differs from `x.1.m2.global`"


INEXACT = [(0.5, 0x09), (0.5, 0x01), (0.7, 0x38), (0.75, 0x39)]
EXACT = [(0.5, 0x38), (0.5, 0x02), (0.5, 0x08), (0.75, 0x38), (0.25, 0x7E)]


@pytest.mark.parametrize("ratio, scale", EXACT + INEXACT)
def test_exact_alignment(ratio, scale):
    """1 · 0.5 is a scale; 1.125 · 2^-6 · 0.5 has a bit too many below the normal range; 1.125 · 0.75 has one too many."""
    types = [scaled(3, global_=True)] * 2
    tensors = {"x.0.m0.global": f32(1), "x.0.m1.global": f32(ratio), "x.0.m1.scale": bytes([0, 0, 0, scale, 0, 0])}
    errors = found(types, [Need("exact-align", (0, 1), ("scale", "global"))], tensors)
    assert bool(errors) == ((ratio, scale) in INEXACT)
    if errors:
        assert errors[0].message == f"`x.0.m1.scale`[1, 1] has no exact value under the global scale 1; its own is {ratio}"


def test_exact_alignment_of_scales_that_divide():
    """The smallest divisor is shared: 1.125 / 4 is a scale under 2, and 1.125 · 2^-6 / 4 is not."""
    types, needs = [scaled(3, global_=True, inverse=True)] * 2, [Need("exact-align", (0, 1), ("scale", "global"))]
    tensors = {"x.0.m0.global": f32(2), "x.0.m1.global": f32(4), "x.0.m1.scale": bytes([0, 0x39, 0, 0, 0, 0])}
    assert found(types, needs, tensors) == []
    assert len(found(types, needs, tensors | {"x.0.m1.scale": bytes([0, 0x09, 0, 0, 0, 0])})) == 1


def test_dense_items_have_nothing_to_check():
    assert found([dense(3, 2)], [Need("scales", (0,), ("scale", "global"))], {}) == []
