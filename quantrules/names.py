"""Names of tensors and modules: families of names that differ in whole numbers, and patterns that match either.

V4-Pro's 284,809 keys are 86 families, so a pattern is matched against a family's template once and the rest is columns.
In a template each whole-number segment is HOLE, one character that no name may hold; `*` and `{L}` run over it as over
any other text. Matching takes time linear in name × pattern: every (node, offset) pair is tried at most once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

import numpy as np
from attrs import evolve, field, frozen

from quantrules.lang.ast import Alternation, Capture, IntForm, Lit, Literal, Members, Pattern, Star

HOLE = "\0"
# a whole-number segment, for names that are joined with "\n." between them; no leading zeros (`00` stays text), and it fits an int64
_NUMBER = re.compile(r"\.(0|[1-9][0-9]{0,17})(?=[.\n])")


@frozen(eq=False)
class Names:
    """n names of one template, as columns: digits int64[n, holes]."""

    template: str
    digits: np.ndarray

    def __len__(self) -> int:
        return len(self.digits)

    def __getitem__(self, i: int) -> str:
        return fill(self.template, self.digits[i])

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def take(self, index: np.ndarray) -> Names:
        return Names(self.template, self.digits[index])


def fill(template: str, digits: Iterable[int]) -> str:
    parts = template.split(HOLE)
    return "".join(p + str(d) for p, d in zip(parts, [*map(int, digits), ""]))


def row_keys(digits: np.ndarray) -> np.ndarray:
    """One int64 a row of int[n, w]: equal for equal rows, and ordered as rows are, column by column."""
    if not digits.size:
        return np.zeros(len(digits), np.int64)
    low, high = digits.min(0).tolist(), digits.max(0).tolist()
    spans = [b - a + 1 for a, b in zip(low, high)]
    if math.prod(spans) >= 1 << 62:
        return np.unique(digits, axis=0, return_inverse=True)[1].reshape(-1)
    strides = [math.prod(spans[i + 1 :]) for i in range(len(spans))]
    return (digits - np.array(low)) @ np.array(strides, np.int64)


def split_name(name: str) -> tuple[str, tuple[int, ...]]:
    """(template, digits) of one name."""
    text = f".{name}\n"
    return _NUMBER.sub("." + HOLE, text)[1:-1], tuple(map(int, _NUMBER.findall(text)))


def families(names: Sequence[str]) -> list[tuple[Names, np.ndarray]]:
    """Collapse names into families: (names, rows int32[n] into the given sequence), in order of first appearance."""
    text = "." + "\n.".join(names) + "\n"  # one call of the regular expression for all: a quarter of the time
    if text.count("\n") == len(names):
        templates, numbers = _NUMBER.sub("." + HOLE, text).split("\n"), _NUMBER.findall(text)
    else:  # a name with a line end in it
        pairs = [split_name(n) for n in names]
        templates, numbers = ["." + t for t, _ in pairs], [d for _, digits in pairs for d in digits]
    rows: dict[str, list[int]] = {}
    for row in range(len(names)):
        template = templates[row]
        entry = rows.get(template)
        if entry is None:
            rows[template] = [row]
        else:
            entry.append(row)
    values = np.array(numbers, np.int64)
    widths = np.zeros(len(names), np.int64)
    for template, indexes in rows.items():
        widths[indexes] = template.count(HOLE)
    starts = np.cumsum(widths) - widths
    result = []
    for template, indexes in rows.items():
        index = np.array(indexes, np.int32)
        digits = values[starts[index][:, None] + np.arange(template.count(HOLE))] if len(values) else np.zeros((len(index), 0), np.int64)
        result.append((Names(template[1:], digits.reshape(len(index), -1)), index))
    return result


@frozen(eq=False)
class KeyTable:
    """All tensors of a source, as columns over rows 0…n-1. A tensor's identity is its row: (source, file, name).

    file, dtype, shape: indexes into `files`, `dtypes`, `shapes`. begin: absolute offset in its file. nbytes: length.
    family, within: which family names the row, and its place there.
    """

    files: tuple[str, ...]
    dtypes: tuple[str, ...]  # lower case, as types.DTYPE_BITS
    shapes: tuple[tuple[int, ...], ...]
    file: np.ndarray  # int32[n]
    dtype: np.ndarray  # int16[n]
    shape: np.ndarray  # int32[n]
    begin: np.ndarray  # int64[n]
    nbytes: np.ndarray  # int64[n]
    families: tuple[Names, ...]
    rows: tuple[np.ndarray, ...]  # int32 rows of each family
    family: np.ndarray = field(init=False)  # int32[n]
    within: np.ndarray = field(init=False)  # int32[n]

    def __attrs_post_init__(self) -> None:
        family, within = np.zeros(len(self.file), np.int32), np.zeros(len(self.file), np.int32)
        for i, rows in enumerate(self.rows):
            family[rows], within[rows] = i, np.arange(len(rows), dtype=np.int32)
        object.__setattr__(self, "family", family)
        object.__setattr__(self, "within", within)

    def __len__(self) -> int:
        return len(self.file)

    def name(self, row: int) -> str:
        return self.families[self.family[row]][int(self.within[row])]

    def names(self) -> list[str]:
        return [self.name(i) for i in range(len(self))]

    @staticmethod
    def build(files: Sequence[str], entries: Iterable[tuple[str, int, str, tuple[int, ...], int, int]]) -> KeyTable:
        """From (name, file index, dtype, shape, begin, nbytes) tuples; for sources whose headers are few."""
        rows = list(entries)
        dtypes, shapes = list(dict.fromkeys(r[2] for r in rows)), list(dict.fromkeys(r[3] for r in rows))
        dtype_id, shape_id = {d: i for i, d in enumerate(dtypes)}, {s: i for i, s in enumerate(shapes)}
        groups = families([r[0] for r in rows])
        return KeyTable(
            tuple(files), tuple(dtypes), tuple(shapes),
            np.array([r[1] for r in rows], np.int32), np.array([dtype_id[r[2]] for r in rows], np.int16),
            np.array([shape_id[r[3]] for r in rows], np.int32), np.array([r[4] for r in rows], np.int64),
            np.array([r[5] for r in rows], np.int64), tuple(g[0] for g in groups), tuple(g[1] for g in groups),
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- matching


@frozen
class Match:
    """What each wildcard of a pattern read: (start, end) of the name, by place among the pattern's nodes."""

    spans: tuple[tuple[int, int], ...]  # one a node
    choices: tuple[int, ...]  # the alternative or member read, -1 for other nodes

    def text(self, name: str, node: int) -> str:
        start, end = self.spans[node]
        return name[start:end]


def _options(node) -> list[str] | None:
    if isinstance(node, Alternation):
        return [a.left for a in node.items]
    if isinstance(node, Members):
        return [m.text for m in node.items]
    return [node.text] if isinstance(node, Lit) else None


def match(pattern: Pattern, name: str, forbidden: frozenset[tuple[int, int, int]] = frozenset()) -> Match | None:
    """Match a whole name or template. Pieces are settled from left to right, each as short as lets the rest match.

    Ranges and integer forms read a number or a hole; whether it is the right one, and captures that stand twice, are
    left to the caller, who asks again with (node, start, end) forbidden where it is not.
    """
    nodes, size = pattern.nodes, len(name)
    options = [_options(n) for n in nodes]
    dead: set[tuple[int, int]] = set()
    spent: dict[tuple[int, int], int] = {}  # (wildcard, its limit) -> the first start whose every end was tried in vain
    trail: list[tuple[int, int, int]] = []  # (start, end, choice) of nodes settled so far
    # iterative depth first: `tries` holds, a node, the candidates (end, choice) still to try at its start
    stack = [(0, _candidates(nodes, options, 0, 0, name, spent))] if nodes else []
    if not nodes:
        return Match((), ()) if not name else None
    while stack:
        start, candidates = stack[-1]
        found = next(candidates, None)
        at = len(stack) - 1
        if found is None:
            dead.add((at, start))
            stack.pop()
            if trail:
                trail.pop()
            continue
        end, choice = found
        if (at, start, end) in forbidden:
            continue
        if at + 1 == len(nodes):
            if end == size:
                trail.append((start, end, choice))
                return Match(tuple((a, b) for a, b, _ in trail), tuple(c for _, _, c in trail))
            continue
        if (at + 1, end) in dead:
            continue
        trail.append((start, end, choice))
        stack.append((end, _candidates(nodes, options, at + 1, end, name, spent)))
    return None


def _candidates(nodes, options, at: int, start: int, name: str, spent: dict):
    """(end, choice) pairs that node `at` may read from `start`, the shortest first (alternatives in their order).

    A wildcard that failed from one start has tried all that it could read from a later one, so it is never tried again
    beyond it: this keeps the matching linear.
    """
    if options[at] is not None:
        for choice, text in enumerate(options[at]):
            if name.startswith(text, start):
                yield start + len(text), -1 if isinstance(nodes[at], Lit) else choice
        return
    if is_integer(nodes[at]):  # a few digits at most: every end is tried from every start
        yield from ((end, -1) for end in _digits(name, start))
        return
    limit = len(name)
    if not isinstance(nodes[at], Star):
        dot = name.find(".", start)
        limit = dot if dot >= 0 else limit
    bound = min(limit, spent.get((at, limit), limit))
    if at + 1 == len(nodes):
        ends = (limit,) if limit == len(name) and start < limit else ()
    else:
        ends = _ends(name, options[at + 1], start + 1, bound)
    for end in ends:
        yield end, -1
    spent[at, limit] = min(start, spent.get((at, limit), start))


def _ends(name: str, following: list[str] | None, low: int, high: int):
    """Where a wildcard may end in [low, high]: before literal text, at its occurrences only."""
    if following is None or len(following) != 1 or not following[0]:
        yield from range(low, high + 1)
        return
    end = name.find(following[0], low)
    while 0 <= end <= high:
        yield end
        end = name.find(following[0], end + 1)


def _digits(name: str, start: int) -> range:
    """Where a whole number that begins at `start` may end."""
    if name.startswith(HOLE, start):
        return range(start + 1, start + 2)
    end = start
    while end < len(name) and is_whole(name[start : end + 1]):
        end += 1
    return range(start + 1, end + 1)


def is_whole(text: str) -> bool:
    """Whether a text is a number that captures compute with: ASCII digits that fit an int64."""
    return text.isascii() and text.isdigit() and len(text) < 19


def number_pieces(pattern: Pattern) -> tuple[Pattern, bool]:
    """The pattern with whole-number pieces of its literals as integer forms, so that they can be read by holes.

    Also whether that is not enough, because a number touches a wildcard or stands in a list (`*1.x`, `{0,1}`): such a
    pattern is matched against each name and not against templates.
    """
    nodes: list = []
    ambiguous = False
    for i, node in enumerate(pattern.nodes):
        if not isinstance(node, Lit):
            ambiguous |= any(is_whole(piece) for text in _options(node) or () for piece in text.split("."))
            nodes.append(node)
            continue
        pieces, text = node.text.split("."), ""
        for k, piece in enumerate(pieces):
            touches = k == 0 and i > 0 or k == len(pieces) - 1 and i + 1 < len(pattern.nodes)
            if is_whole(piece) and not touches and str(int(piece)) == piece:
                nodes += [Lit(text)] * bool(text) + [IntForm(Literal(int(piece)))]
                text = ""
            else:
                ambiguous |= is_whole(piece) and touches
                text += piece
            text += "." * (k < len(pieces) - 1)
        nodes += [Lit(text)] * bool(text)
    return evolve(pattern, nodes=tuple(nodes)), ambiguous


def is_integer(node) -> bool:
    """Whether a wildcard reads integers only: a range or an integer form."""
    return isinstance(node, IntForm) or isinstance(node, Capture) and node.is_range
