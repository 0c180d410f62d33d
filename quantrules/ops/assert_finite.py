"""assert_finite: pass a value on, or stop at the first number that is none."""

from __future__ import annotations

from quantrules.ops.base import Op, register
from quantrules.ops.blocks import copy, decoded, require_finite
from quantrules.ops.lift import scale_needs
from quantrules.types import FLOATS


@register
class AssertFinite(Op):
    name = "assert_finite"
    summary = "stops at NaN and infinities"
    help = """Any value passes unchanged; the run stops at the first number that is NaN or infinite, and names its key and
index. Of a packed value the decoded numbers count, so a NaN scale is found as well. Never refused by type."""
    example = "*.q_proj → unpack | dequant | assert_finite"

    def infer(self, x, args, context):
        return x

    def needs(self, step):
        return scale_needs(step)

    def reference(self, step, x, state, out):
        for i, (source, target) in enumerate(zip(x, out, strict=True)):
            if target is None:
                continue
            whole = step.takes.items[i]
            if not source.type.is_dense or source.type.dtype in FLOATS or source.type.dtype.startswith("f8"):
                require_finite(source, whole, decoded(source))
            copy(source, target)

    def inverse(self, step):
        return (("assert_finite", {}),)
