"""All built-in ops, by name in REGISTRY. One file an op; nothing here imports torch."""

from quantrules.ops import (  # noqa: F401
    align,
    assert_finite,
    cast,
    cat,
    dequant,
    drop,
    keep,
    pack,
    quant,
    requant,
    split,
    stack,
    unpack,
    unstack,
)
from quantrules.ops.base import REGISTRY

__all__ = ["REGISTRY"]
