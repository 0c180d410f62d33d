"""cast: dense values to another dtype, by value."""

from __future__ import annotations

from attrs import evolve

from quantrules.diagnostics import define
from quantrules.ops.base import Op, Param, Refused, register
from quantrules.ops.blocks import cube, place, raw
from quantrules.ops.codecs import round_to
from quantrules.ops.lift import NO_SCALES, WRONG_ARGUMENT
from quantrules.ops.torch_views import torch_dtype
from quantrules.types import FLOATS

NOT_HELD = define("QR216", "A number does not fit the dtype that it is cast to")
DENSE = (*FLOATS, "i64", "i32", "i16", "i8", "u64", "u32", "u16", "u8", "bool")
DIGITS = {"f64": 53, "f32": 24, "f16": 11, "bf16": 8, "i64": 63, "i32": 31, "i16": 15, "i8": 7, "u64": 64, "u32": 32, "u16": 16,
          "u8": 8, "bool": 1}  # fmt: skip
RANGE = {"f64": 1024, "f32": 128, "f16": 16, "bf16": 128}


@register
class Cast(Op):
    name = "cast"
    summary = "another dtype, by value"
    help = """dtype[…] → dtype[…], dense only. Floats are rounded once, half to even, and overflow to infinity as IEEE says;
integers and booleans must hold the value exactly. Refused: packed values (`dequant`), one-byte floats on either side (they
have no scale: `quant` makes one), and at run time a number that an integer dtype cannot hold, with its index."""
    params = (Param("dtype", "dtype", help="of the result", choices=DENSE),)
    example = "*.norm.weight → cast(f32)"

    def infer(self, x, args, context):
        dtype = args["dtype"]
        if dtype not in DENSE:
            reason = f"a cast to {dtype} would have no scale"
            raise Refused(WRONG_ARGUMENT, reason, "`quant(…)` makes scales; `bitcast` keeps the bits", argument="dtype")

        def made(t):
            if not t.is_dense:
                raise Refused(NO_SCALES, f"{t} is packed", "write `dequant` first")
            if t.dtype not in DENSE:
                raise Refused(NO_SCALES, f"{t} has no scales", "a bare cast of one-byte values would be wrong by its scale")
            return evolve(t, parts=tuple(evolve(p, dtype=dtype) if p.role == "codes" else p for p in t.parts))

        return x.map(made)

    def label(self, step):
        labels = {self._label(t.dtype, m.dtype) for t, m in zip(step.takes.items, step.made.items, strict=True)}
        return next(name for name in ("lossy", "exact in a range", "exact") if name in labels)

    @staticmethod
    def _label(old, new):
        if new not in RANGE:  # the run stops where an integer does not hold the value
            wider = old not in RANGE and DIGITS[new] >= DIGITS[old] and (old[0] != "i" or new[0] == "i")
            return "exact" if wider else "exact in a range"
        fits = DIGITS[new] >= DIGITS[old] and RANGE[new] >= RANGE.get(old, DIGITS[old])
        return "exact" if fits else "lossy" if old in RANGE else "exact in a range"

    def identity(self, step):
        return step.takes.items == step.made.items

    def reference(self, step, x, state, out):
        for i, (source, target) in enumerate(zip(x, out, strict=True)):
            if target is None:
                continue
            for p in target.type.parts[1:]:
                raw(target, p.role).copy_(raw(source, p.role))
            a, dtype = cube(source), target.type.dtype
            if dtype in FLOATS:
                cube(target).copy_(round_to(a, dtype))
                continue
            b = a.to(torch_dtype(dtype))
            bad = b.to(a.dtype) != a
            if bad.any():
                number = a[tuple(bad.nonzero()[0])].item()
                raise Refused(NOT_HELD, f"{place(source, step.takes.items[i], bad)} is {number}, which {dtype} cannot hold")
            cube(target).copy_(b)

    def inverse(self, step):
        dtypes = {t.dtype for t in step.takes.items}
        return (("cast", {"dtype": dtypes.pop()}),) if len(dtypes) == 1 else None
