"""From a typed recipe to a program: rewrites, tiles, and what each takes in memory."""

from quantrules.lower.program import Call, Program
from quantrules.lower.rewrites import REWRITES, lower
from quantrules.lower.tiles import Layout, Tile, describe, layout, tiled

__all__ = ["REWRITES", "Call", "Layout", "Program", "Tile", "describe", "layout", "lower", "tiled"]
