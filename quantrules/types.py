"""What a value is: dtypes, dimensions, formats, types, and the grid that holds several. No torch, no files.

A value has one kind: parts (role, dtype, shape) of a format. Dense is a format with one part. Shapes of a `Type` are
logical: an NVFP4 weight stored as u8[N, K/2] has shape (N, K).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from attrs import field, frozen

# dtypes by their safetensors names in lower case; bits per element
DTYPE_BITS = {
    "bool": 8, "u8": 8, "i8": 8, "u16": 16, "i16": 16, "u32": 32, "i32": 32, "u64": 64, "i64": 64,
    "f16": 16, "bf16": 16, "f32": 32, "f64": 64, "c64": 64,
    "f8_e4m3": 8, "f8_e5m2": 8, "f8_e8m0": 8, "f8_e4m3fnuz": 8, "f8_e5m2fnuz": 8,
    "f4": 4, "f6_e2m3": 6, "f6_e3m2": 6,
}  # fmt: skip
FLOATS = ("f64", "f32", "f16", "bf16")  # dense values that arithmetic takes; one-byte floats need a scale


@frozen(order=False)
class Expr:
    """A linear expression over names: const + Σ coefficient·name. Symbolic dimensions of schemas; ints stay ints."""

    terms: tuple[tuple[str, int], ...] = ()
    const: int = 0

    @staticmethod
    def of(name: str) -> Expr:
        return Expr(((name, 1),))

    @staticmethod
    def make(terms: dict[str, int], const: int) -> Dim:
        kept = tuple(sorted((n, c) for n, c in terms.items() if c))
        return Expr(kept, const) if kept else const

    def __add__(self, other: Dim) -> Dim:
        terms, const = dict(self.terms), self.const
        if isinstance(other, Expr):
            for name, c in other.terms:
                terms[name] = terms.get(name, 0) + c
            return Expr.make(terms, const + other.const)
        return Expr.make(terms, const + other)

    __radd__ = __add__

    def __mul__(self, n: int) -> Dim:
        return Expr.make({name: c * n for name, c in self.terms}, self.const * n)

    __rmul__ = __mul__

    def __sub__(self, other: Dim) -> Dim:
        return self + other * -1

    def __rsub__(self, other: Dim) -> Dim:
        return self * -1 + other

    def divisible(self, n: int) -> bool:
        return self.const % n == 0 and all(c % n == 0 for _, c in self.terms)

    def __str__(self) -> str:
        parts = [name if c == 1 else f"{c}*{name}" for name, c in self.terms]
        return " + ".join(parts + ([str(self.const)] if self.const else []))


Dim = int | Expr


def divisible(dim: Dim, n: int) -> bool:
    return dim % n == 0 if isinstance(dim, int) else dim.divisible(n)


def div(dim: Dim, n: int) -> Dim:
    """dim / n, which must be exact (ask `divisible` first)."""
    assert divisible(dim, n), (dim, n)
    return dim // n if isinstance(dim, int) else Expr.make({k: c // n for k, c in dim.terms}, dim.const // n)


def ceil_div(dim: Dim, n: int) -> Dim:
    """⌈dim / n⌉; a symbolic dimension that n does not divide becomes an opaque name."""
    if isinstance(dim, int):
        return -(-dim // n)
    return div(dim, n) if dim.divisible(n) else Expr.of(f"ceil({dim}, {n})")


@frozen
class Axis:
    """An axis of a grid: its name ("" where braces have none) and labels: member names, or integers of a capture."""

    name: str
    labels: tuple[str | int, ...]


T = TypeVar("T")
S = TypeVar("S")


@frozen
class Grid(Generic[T]):
    """Items labelled by axes, row-major. The only container: sources, types, values and targets are grids."""

    axes: tuple[Axis, ...]
    items: tuple[T, ...]

    def __attrs_post_init__(self) -> None:
        assert len(self.items) == math.prod(len(a.labels) for a in self.axes)

    @staticmethod
    def one(item: T) -> Grid[T]:
        return Grid((), (item,))

    def map(self, function: Callable[[T], S]) -> Grid[S]:
        return Grid(self.axes, tuple(function(x) for x in self.items))

    def labels(self) -> Iterator[tuple[str | int, ...]]:
        """The coordinates of each item, in order."""
        import itertools

        return itertools.product(*(a.labels for a in self.axes))

    def position(self, name: str) -> int:
        return next(i for i, a in enumerate(self.axes) if a.name == name)

    def lines(self, axis: int) -> list[tuple[int, ...]]:
        """Item indexes along `axis`, one tuple for each combination of the other axes, in row-major order of those."""
        size = len(self.axes[axis].labels)
        inner = math.prod(len(a.labels) for a in self.axes[axis + 1 :])
        outer = math.prod(len(a.labels) for a in self.axes[:axis])
        return [tuple((o * size + k) * inner + i for k in range(size)) for o in range(outer) for i in range(inner)]

    def without(self, axis: int) -> tuple[Axis, ...]:
        return self.axes[:axis] + self.axes[axis + 1 :]


# ------------------------------------------------------------------------------------------------ formats, as data


@frozen
class Element:
    """How codes are stored: codec (a name of kernels and references), codes per container word, which nibble is first."""

    codec: str  # e2m1, f8_e4m3, …
    per: int = 1  # codes in one container element, along the last axis
    low_first: bool = True


@frozen
class GridDim:
    """One dimension of a part: ⌈letter / divisor⌉, or a plain number where letter is ""."""

    letter: str  # "N" rows, "K" columns of the weight, ""
    divisor: int = 1  # of a letter; the number itself where letter is ""

    def __str__(self) -> str:
        return str(self.divisor) if not self.letter else self.letter + (f"/{self.divisor}" if self.divisor != 1 else "")


@frozen
class Part:
    """One tensor of a quantised module. `grid` follows the last axes of the weight; leading axes (experts) go in front."""

    role: str  # codes | scale | global | act | zero | shape | perm
    suffix: str
    dtypes: tuple[str, ...]  # what may stand on disk, the one to write first; () = any
    grid: tuple[GridDim, ...] | None  # None = the shape of the weight itself, of any rank
    optional: bool = False
    inverse: bool = False  # the stored number divides
    cat: str = "follow"  # under cat along the rows: follow | equal | collect | max (the larger range)
    stack: str = "follow"  # under stack


@frozen
class Spelling:
    """One way to name and store a format's parts on disk."""

    name: str
    parts: tuple[Part, ...]
    dense: str = ""  # the suffix that the weight has once it is dense
    # a predicate (lang.ast expression) over a quantization config; None = nothing declares it
    declared: object = field(default=None, eq=False, repr=False)
    span: object = field(default=None, eq=False, repr=False)

    def part(self, role: str) -> Part | None:
        return next((p for p in self.parts if p.role == role), None)


@frozen
class Format:
    """A block of formats.rules. `value` is the product in its order, as nested tuples of roles: ("codes", ("scale", "global"))."""

    name: str  # formats of one run have names of their own, so that equality and hashes are of the name alone
    element: Element | None = field(eq=False)  # None: dense
    block: tuple[int, ...] = field(eq=False)  # [rows, columns] that share one scale; () for dense
    value: object = field(eq=False, repr=False)
    spellings: tuple[Spelling, ...] = field(eq=False, repr=False)

    @property
    def is_dense(self) -> bool:
        return self.element is None

    def spelling(self, name: str) -> Spelling | None:
        return next((s for s in self.spellings if s.name == name), None)

    def spelling_of(self, suffix: str) -> Spelling:
        """The spelling whose codes have this suffix; of dense, "" is bare."""
        return next(s for s in self.spellings if s.parts[0].suffix == suffix)


@frozen
class PartType:
    role: str
    dtype: str
    shape: tuple[Dim, ...]

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.shape)

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


@frozen
class Type:
    """Format, spelling, logical shape, and what each part is stored as (in the order of the spelling's parts).

    spans: rows of the weight that each number of a collected part covers, after a `cat` of members that each had their
    own; () where one covers all. aligned: names of the axes along which all members have the same collected numbers, so
    that a `cat` along one keeps a single number. A type says everything about the bytes that are written, except the bytes.
    """

    format: Format
    spelling: Spelling
    shape: tuple[Dim, ...]
    parts: tuple[PartType, ...]
    spans: tuple[Dim, ...] = ()
    layout: str = ""
    aligned: tuple[str, ...] = ()

    @property
    def is_dense(self) -> bool:
        return self.format.is_dense

    @property
    def dtype(self) -> str:
        """The dtype of a dense value (of the codes of a quantised one)."""
        return self.parts[0].dtype

    def part(self, role: str) -> PartType | None:
        return next((p for p in self.parts if p.role == role), None)

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.parts)

    def __str__(self) -> str:
        name = self.dtype if self.is_dense else self.format.name
        tail = f"; {len(self.spans)}" if self.spans else ""
        return f"{name}[{', '.join(map(str, self.shape))}{tail}]"


def nbytes(dtype: str, shape: Iterable[int]) -> int:
    return -(-math.prod(shape) * DTYPE_BITS[dtype] // 8)


def part_type(format: Format, part: Part, shape: tuple[Dim, ...], dtype: str | None = None) -> PartType:
    """What `part` is stored as for a weight of the logical `shape` (rank ≥ 2 for a quantised format).

    The grid counts bytes where the dtype is smaller than a byte (f4); the shape of such a part counts elements.
    """
    dtype = dtype or part.dtypes[0]
    if part.grid is None:
        return PartType(part.role, dtype, shape)
    letters = {"N": shape[-2], "K": shape[-1]} if len(shape) >= 2 else {}
    dims = tuple(g.divisor if not g.letter else ceil_div(letters[g.letter], g.divisor) for g in part.grid)
    if DTYPE_BITS[dtype] < 8 and dims:
        dims = (*dims[:-1], dims[-1] * 8 // DTYPE_BITS[dtype] if isinstance(dims[-1], int) else dims[-1] * (8 // DTYPE_BITS[dtype]))
    return PartType(part.role, dtype, shape[:-2] + dims)


def stored_shapes(part: Part, shape: tuple[Dim, ...], logical: tuple[Dim, ...]) -> set[tuple[Dim, ...]]:
    """What may stand on disk for a part that should have `shape`: where the grid says one number, [] and [1] alike."""
    one = part.grid is not None and all(not g.letter and g.divisor == 1 for g in part.grid)
    return {shape, logical[:-2], (*logical[:-2], 1)} if one else {shape}


def make_type(format: Format, spelling: Spelling, shape: tuple[Dim, ...], dtypes: dict[str, str] | None = None,
              roles: Iterable[str] | None = None) -> Type:
    """A type with the parts that the spelling requires (or those of `roles`), each in its first or the given dtype."""
    dtypes = dtypes or {}
    wanted = set(roles) if roles is not None else {p.role for p in spelling.parts if not p.optional}
    parts = tuple(part_type(format, p, shape, dtypes.get(p.role)) for p in spelling.parts if p.role in wanted)
    return Type(format, spelling, shape, parts)


def dense(type: Type, dense_format: Format, dtype: str, shape: tuple[Dim, ...] | None = None) -> Type:
    """The dense type that `type` becomes: its spelling's dense suffix decides between the spellings of dense."""
    spelling = dense_format.spelling_of(type.spelling.dense)
    return make_type(dense_format, spelling, type.shape if shape is None else shape, {"codes": dtype})


def rows_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """(outer, N, K): a shape as outer × rows × columns. Tiles are ranges of its outer·N flat rows."""
    if len(shape) >= 2:
        return math.prod(shape[:-2]), shape[-2], shape[-1]
    return 1, (shape[0] if shape else 1), 1




# ------------------------------------------------------------------------------------------------------------- tiles


def flat_rows(shape: tuple[int, ...]) -> int:
    """How many flat rows a value of this logical shape has; tiles are ranges of them."""
    outer, n, _ = rows_of(shape)
    return outer * n


def tileable(type: Type) -> bool:
    """Whether a range of rows is one byte range of every part: rows come first in each part that follows them."""
    specs = [type.spelling.part(p.role) for p in type.parts]
    return not type.layout and all(s.grid is None or "N" not in [g.letter for g in s.grid[1:]] for s in specs)


def _cut(type: Type, lo: int, hi: int) -> tuple[int, int, int, int]:
    """(first outer, past the last outer, first row, past the last row) of flat rows [lo, hi): one outer or whole ones."""
    outer, n, _ = rows_of(type.shape)
    if hi <= lo or n == 0:
        return 0, 0, 0, 0
    first, last = lo // n, (hi - 1) // n
    if first == last:
        return first, first + 1, lo - first * n, hi - first * n
    assert lo % n == 0 and hi % n == 0, f"rows {lo}:{hi} begin or end inside one of {outer} slices of {n} rows"
    return first, last + 1, 0, n


def span_range(type: Type, lo: int, hi: int) -> tuple[int, int]:
    """Which of `type.spans` rows [lo, hi) of one slice touch."""
    start, touched = 0, []
    for i, size in enumerate(type.spans):
        if start < hi and start + size > lo:
            touched.append(i)
        start += size
    return (touched[0], touched[-1] + 1) if touched else (0, 0)


def tile(type: Type, lo: int, hi: int) -> Type:
    """The type of flat rows [lo, hi) of a value. Within one slice the leading dimensions go; else they become one.

    A part that has one row for a block of rows is taken whole where the tile begins or ends inside a block: where the
    tile begins in one, the value carries that phase (ops.Value).
    """
    if (lo, hi) == (0, flat_rows(type.shape)):
        return type
    first, last, a, b = _cut(type, lo, hi)
    _, n, _ = rows_of(type.shape)
    whole = (a, b) == (0, n) and last - first > 1
    lead = (last - first,) if whole else ()
    if len(type.shape) == 1:
        shape: tuple[int, ...] = (b - a,)
    else:
        shape = lead + (b - a, type.shape[-1])
    spans = type.spans
    if spans and not whole:
        i, j = span_range(type, a, b)
        edges = [sum(spans[:k]) for k in range(len(spans) + 1)]
        spans = tuple(min(b, edges[k + 1]) - max(a, edges[k]) for k in range(i, j))
    parts = []
    for p in type.parts:
        spec, rest = type.spelling.part(p.role), p.shape[max(0, len(type.shape) - 2) :]
        if spec.grid is None:
            parts.append(PartType(p.role, p.dtype, shape))
        elif spec.grid and spec.grid[0].letter == "N":
            bn = spec.grid[0].divisor
            parts.append(PartType(p.role, p.dtype, lead + (-(-b // bn) - a // bn, *rest[1:])))
        elif type.spans and len(rest) == 1 and spec.cat == "collect":
            parts.append(PartType(p.role, p.dtype, lead + (len(spans),)))
        else:
            parts.append(PartType(p.role, p.dtype, lead + rest))
    return Type(type.format, type.spelling, shape, tuple(parts), spans, type.layout)


def part_bytes(type: Type, role: str, lo: int, hi: int) -> tuple[int, int]:
    """Bytes [from, to) of a part that flat rows [lo, hi) of the value need; `tile` gives their type."""
    p, spec = type.part(role), type.spelling.part(role)
    total = p.nbytes
    outer, n, _ = rows_of(type.shape)
    if (lo, hi) == (0, outer * n):
        return 0, total
    first, last, a, b = _cut(type, lo, hi)
    each = total // outer if outer else 0
    if (a, b) == (0, n):
        return first * each, last * each
    if spec.grid is None:
        row = each // n
        return first * each + a * row, first * each + b * row
    if spec.grid and spec.grid[0].letter == "N":
        bn = spec.grid[0].divisor
        row = each // (-(-n // bn))
        return first * each + a // bn * row, first * each + -(-b // bn) * row
    if type.spans and spec.cat == "collect":
        i, j = span_range(type, a, b)
        one = each // len(type.spans)
        return first * each + i * one, first * each + j * one
    return first * each, last * each
