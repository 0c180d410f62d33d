"""keep: a module or tensor as it is."""

from __future__ import annotations

from quantrules.ops.base import register
from quantrules.ops.blocks import Unchanged


@register
class Keep(Unchanged):
    name = "keep"
    summary = "as it is, byte for byte, in its own spelling"
    help = """Takes modules (all tensors of a weight) and single tensors, of any dtype, and writes their bytes under the
target's name. A module keeps its format and its spelling; `unpack | pack(spelling)` writes it in another one. Never refused."""
    matches = "paths, keys"
    example = "model.norm.weight → keep → norm.weight"

    def infer(self, x, args, context):
        return x

    def inverse(self, step):
        return (("keep", {}),)
