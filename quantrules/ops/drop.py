"""drop: not at all."""

from __future__ import annotations

from quantrules.ops.base import Op, register
from quantrules.types import Axis, Grid


@register
class Drop(Op):
    name = "drop"
    summary = "not written"
    help = """What it matches is consumed and nothing is written; the plan counts it. A rule with `drop` has no target. Of a
quantised module only an optional part (an activation scale) may be dropped by a rule of its own."""
    matches = "paths, keys"
    example = "mtp.* → drop"

    def infer(self, x, args, context):
        return Grid((Axis("", ()),), ())

    def rows(self, step, item, lo, hi):
        return tuple(None for _ in step.takes.items)

    def reference(self, step, x, state, out):
        pass
