"""dequant: packed values to floating point."""

from __future__ import annotations

from quantrules.ops.base import Op, Param, Refused, register
from quantrules.ops.blocks import copy, cube, decoded
from quantrules.ops.codecs import codec_of, round_to
from quantrules.ops.lift import NO_SCALES, WRONG_ARGUMENT, check_parts, scale_needs
from quantrules.types import FLOATS, dense


@register
class Dequant(Op):
    name = "dequant"
    summary = "a packed value in floating point"
    help = """f[N, K] of a format → dtype[N, K], bf16 unless said otherwise. The product of the parts is computed in f32 in
the order that the format gives, parts that are stored inverted divide, and the result is rounded once. The sign of zero is
kept; NaN becomes the quiet NaN. Activation scales stay behind. A dense floating-point value passes as it is, whatever the
dtype asked for. Refused: dense integers, booleans and one-byte floats (their scales are missing), and a module whose parts do
not fit its format."""
    params = (Param("dtype", "dtype", "bf16", "of the result", FLOATS),)
    example = "*.q_proj → unpack | dequant"

    def infer(self, x, args, context):
        dtype = args.get("dtype") or "bf16"
        if dtype not in FLOATS:
            reason = f"{dtype} is not a dtype for dense values"
            raise Refused(WRONG_ARGUMENT, reason, f"one of {', '.join(FLOATS)}", argument="dtype")

        def made(t):
            check_parts(t)
            if t.is_dense and t.dtype not in FLOATS:
                reason = f"{t} has no scales"
                help = "if it is a quantised weight, its scales are missing or named otherwise; if not, `keep` it"
                raise Refused(NO_SCALES, reason, help)
            return t if t.is_dense else dense(t, context.dense, dtype)

        return x.map(made)

    def needs(self, step):
        return scale_needs(step)

    def label(self, step):
        labels = {self._label(t, m) for t, m in zip(step.takes.items, step.made.items, strict=True)}
        return next(name for name in ("lossy", "exact in a range", "exact") if name in labels)

    @staticmethod
    def _label(taken, made):
        if taken.is_dense or made.dtype in ("f32", "f64"):
            return "exact"
        scales = {codec_of(taken.format, p.role, p.dtype) for p in taken.parts if p.role in ("scale", "global")}
        return "exact in a range" if scales == {"f8_e8m0"} else "lossy"

    def identity(self, step):
        return all(t.is_dense for t in step.takes.items)

    def reference(self, step, x, state, out):
        for source, target in zip(x, out, strict=True):
            if target is None:
                continue
            if source.type.is_dense:
                copy(source, target)
            else:
                cube(target).copy_(round_to(decoded(source), target.type.dtype))

    def inverse(self, step):
        packed = {t.format.name: t for t in step.takes.items if not t.is_dense}
        if len(packed) != 1:
            return None if packed else ()
        t = next(iter(packed.values()))
        scale = {"scale": t.part("scale").dtype} if t.part("scale") else {}
        return (("quant", {"format": t.format.name, "spelling": t.spelling.name, **scale}),)
