"""What an op is: six small functions side by side in one file, over grids of types (planning) and of values (running).

Nothing here imports torch; references import it inside. An op works on whole values or on tiles of flat rows alike: the
runner asks `rows` which input rows an output range needs, fills values for these, and calls `reference` on them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import define, field, frozen

from quantrules.diagnostics import Span
from quantrules.types import DTYPE_BITS, Axis, Format, Grid, Type, flat_rows, part_bytes, tile


class Refused(Exception):
    """An op that cannot take these types or arguments: a code, the reason, and what to write instead.

    `label` stands beside the caret; `argument` names the argument at fault, where one is.
    """

    def __init__(self, code: str, reason: str, help: str = "", label: str = "", argument: str = ""):
        super().__init__(reason)
        self.code, self.reason, self.help, self.label, self.argument = code, reason, help, label, argument


REQUIRED: Any = object()


@frozen
class Param:
    """One parameter of an op. kind: dtype | format | spelling | int | ints | axis | word | text | number | sizes.

    `sizes` takes a list of ints positionally, or name=int for each member.
    """

    name: str
    kind: str
    default: Any = REQUIRED
    help: str = ""
    choices: tuple[str, ...] = ()


@frozen
class Need:
    """A fact that only bytes can tell, about items of a step's input: read by preflight before the first byte is written.

    kind: "scales" (each number of the roles is finite and not negative), "equal" (the parts are byte-equal),
    "exact-align" (one global for the items exists without rounding).
    """

    kind: str
    items: tuple[int, ...]
    roles: tuple[str, ...]
    span: Span | None = field(default=None, eq=False, repr=False)


@frozen
class Context:
    """What an op may ask while types are inferred: all formats by name, and the axes that the rule's target adds."""

    formats: Mapping[str, Format]
    target_axes: tuple[Axis, ...] = ()
    lows: Mapping[str, int] = field(factory=dict)  # lower bound of a capture that has a range; others begin at 0

    @property
    def dense(self) -> Format:
        return next(f for f in self.formats.values() if f.is_dense)


@frozen
class Step:
    """One op of a recipe with its arguments bound, and the types it takes and makes."""

    op: Op
    args: Mapping[str, Any] = field(eq=False)
    takes: Grid[Type]
    made: Grid[Type]
    span: Span | None = field(default=None, eq=False, repr=False)

    def __str__(self) -> str:
        """As a rule would write it, without what is the default."""
        given = [(p.name, self.args[p.name]) for p in self.op.params if self.args.get(p.name) not in (None, p.default)]
        first = self.op.params[0].name if self.op.params else ""
        texts = ((k, getattr(v, "name", v)) for k, v in given)
        shown = ", ".join(str(v) if k == first else f"{k}={v}" for k, v in texts)
        return f"{self.op.name}({shown})" if shown else self.op.name


@define(eq=False)
class Value:
    """A value, or the tile [lo, hi) of one: `type` is the tile's, parts are flat u8 buffers (numpy; later on a device).

    phase: rows between the start of the first block and the tile's first row; 0 where the tile begins a block.
    start: the tile's first flat row within the whole value, for messages.
    """

    type: Type
    parts: dict[str, np.ndarray]
    phase: int = 0
    start: int = 0
    name: str = ""  # the key or path, for messages

    @staticmethod
    def empty(type: Type, lo: int = 0, hi: int | None = None, name: str = "") -> Value:
        """Fresh buffers for flat rows [lo, hi) of a value of `type`."""
        hi = flat_rows(type.shape) if hi is None else hi
        cut = tile(type, lo, hi)
        parts = {p.role: np.empty(p.nbytes, np.uint8) for p in cut.parts}
        return Value(cut, parts, phase_of(type, lo), lo, name)

    def rows(self, whole: Type, lo: int, hi: int) -> Value:
        """A view of flat rows [lo, hi) of this value, which must be a whole one of type `whole`."""
        cut = tile(whole, lo, hi)
        spans = {p.role: part_bytes(whole, p.role, lo, hi) for p in whole.parts}
        return Value(cut, {r: self.parts[r][a:b] for r, (a, b) in spans.items()}, phase_of(whole, lo), lo, self.name)

    def tensor(self, role: str = "codes"):
        """A torch view of a part with its dtype and shape (f4 and f6 as bytes)."""
        from quantrules.ops.torch_views import view

        return view(self.parts[role], self.type.part(role))


def phase_of(type: Type, lo: int) -> int:
    """Rows between the start of the block that flat row `lo` lies in, and that row."""
    n = type.shape[-2] if len(type.shape) >= 2 else 0
    return lo % n % type.format.block[0] if type.format.block and n else 0


class Op:
    """Base of all ops. Class attributes are its page; override the functions that differ from "one item in, one out"."""

    name = ""
    summary = ""  # one line
    help = ""  # the page: what, shapes, example, when refused
    params: tuple[Param, ...] = ()
    matches = "keys"  # what a pipeline that begins with this op matches: "paths", "paths, keys" or "keys"
    example = ""  # one rule that uses it

    def expand(self, args: Mapping[str, Any]) -> tuple[tuple[str, dict], ...] | None:
        """(op name, arguments) pairs that this op stands for, or None where it is one step of its own."""
        return None

    def infer(self, x: Grid[Type], args: Mapping[str, Any], context: Context) -> Grid[Type]:
        """The types it makes; raises Refused."""
        raise NotImplementedError

    def needs(self, step: Step) -> tuple[Need, ...]:
        return ()

    def label(self, step: Step) -> str:
        """exact | exact in a range | lossy, for these types."""
        return "exact"

    def rows(self, step: Step, item: int, lo: int, hi: int) -> tuple[tuple[int, int] | None, ...] | None:
        """Flat rows of each input item that rows [lo, hi) of output `item` need (None for an item: not needed).

        None: this op cannot work in tiles on these types; the unit then runs whole.
        """
        return tuple((lo, hi) if i == item else None for i in range(len(step.takes.items)))

    def grain(self, step: Step, item: int) -> int:
        """Tiles of output `item` must begin on a multiple of this many rows of a slice (shape[-2]): whole blocks."""
        block = step.made.items[item].format.block
        return block[0] if block else 1

    def identity(self, step: Step) -> bool:
        """Whether every byte stays as it is; such a step changes names at most and needs no run."""
        return False

    surveys = False  # whether the op has a `survey` at all

    def needs_survey(self, step: Step) -> bool:
        """Whether `survey` must see all input rows before `reference` runs on these types."""
        return self.surveys

    def survey(self, step: Step, x: tuple[Value | None, ...], state: Any) -> Any:
        """Fold tiles of the input into a small state; `state` is None at first. Order of tiles must not matter."""
        return None

    def reference(self, step: Step, x: tuple[Value | None, ...], state: Any, out: tuple[Value | None, ...]) -> None:
        """The specification, in torch: fills the buffers of `out` (those that are not None). Raises Refused for values."""
        raise NotImplementedError

    def inverse(self, step: Step) -> tuple[tuple[str, dict], ...] | None:
        """(op name, arguments) pairs that undo it, or None."""
        return None


REGISTRY: dict[str, Op] = {}


def register(cls: type[Op]) -> type[Op]:
    """Class decorator: makes the op known by its name."""
    REGISTRY[cls.name] = cls()
    return cls


def is_dtype(word: str) -> bool:
    return word in DTYPE_BITS
