"""requant: from one quantised format to another, rounding once."""

from __future__ import annotations

from quantrules.ops.base import REGISTRY, Op, register


@register
class Requant(Op):
    name = "requant"
    summary = "another format, by way of f32"
    help = """Stands for `dequant(f32) | quant(format, …)` with the same arguments as `quant`: codes are rounded once, where
`dequant | quant` rounds to bf16 first. A dense value is quantised. Refused as `dequant` and `quant` are."""
    example = "*.o_a_proj → unpack | requant(FORMAT, scale=f8_e8m0)"

    @property
    def params(self):
        return REGISTRY["quant"].params

    def expand(self, args):
        return (("dequant", {"dtype": "f32"}), ("quant", dict(args)))
