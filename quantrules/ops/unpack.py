"""unpack: bind a module's parts to its format."""

from __future__ import annotations

from quantrules.diagnostics import define
from quantrules.ops.base import Param, Refused, register
from quantrules.ops.blocks import Unchanged
from quantrules.ops.lift import check_parts, find_format

OTHER_FORMAT = define("QR200", "A module has another format than the rule asks for")


@register
class Unpack(Unchanged):
    name = "unpack"
    summary = "a module's tensors as one value of its format"
    help = """Takes a module and checks that every part has the dtype and the shape that the format gives it.
`unpack(FORMAT)` requires that format; plain `unpack` takes any, dense too, so that one rule serves a module that was never
quantised. Refused: another format, a part missing, a scale of the wrong dtype, or on a grid that is not the format's blocks."""
    params = (Param("format", "format", None, "the format that it must have"),)
    matches = "paths"
    example = "*.down_proj → unpack | dequant"

    def infer(self, x, args, context):
        wanted = find_format(args.get("format"), context)
        for t in x.items:
            if wanted is not None and t.format.name != wanted.name:
                reason = f"{t} is {t.format.name}, not {wanted.name}"
                raise Refused(OTHER_FORMAT, reason, "plain `unpack` takes any format", argument="format")
            check_parts(t)
        return x

    def inverse(self, step):
        return ()
