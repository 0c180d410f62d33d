"""Which modules an entry of a config's list names: a name, a glob, or `re:` and a regular expression, per family.

Regular expressions come from strangers, so Python's engine never runs them: it only parses, and sets of positions are
carried through the tree, which takes polynomial time. A whole-number segment of a template is tried as HOLE first; only
where the answer depends on the number are the numbers of that segment filled in, one at a time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from re import _constants as _c
from re import _parser

import numpy as np
from attrs import evolve, field, frozen

from quantrules.names import HOLE, Names, row_keys, split_name

_CLASSES = (_c.LITERAL, _c.NOT_LITERAL, _c.ANY, _c.IN)
_ANCHORS = [(_c.AT, at) for at in (_c.AT_BEGINNING, _c.AT_BEGINNING_STRING, _c.AT_END, _c.AT_END_STRING)]
LONGEST = 600  # characters of an expression, and of a name that one is tried on
MOST = 1000  # patterns of one list; names are not counted


class NotUnderstood(Exception):
    """An expression outside the subset: groups, alternatives, classes, repeats, look-around; no references."""


class _Depends(Exception):
    """The answer depends on the number that stands at this HOLE."""


@frozen
class Regex:
    """A parsed expression. `ends(text, {0})` is where its matches from the start end; `matches` asks as re.match does."""

    items: Sequence
    whole: bool
    needs: str = ""  # text that every match holds: most families are ruled out by it

    @staticmethod
    def parse(text: str, whole: bool = False) -> Regex:
        try:
            tree = _parser.parse(text) if len(text) <= LONGEST else None
        except (re.error, RecursionError, OverflowError):
            tree = None
        if tree is None or tree.state.flags & ~re.UNICODE or _depth(tree) > 2:
            raise NotUnderstood(text)
        return Regex(tree, whole)

    def matches(self, text: str) -> bool:
        if len(text) > LONGEST or self.needs not in text:
            return False
        found = ends(self.items, text, {0})
        if not self.whole and found and all(p % 1 for p in found):
            raise _Depends
        return len(text) in found if self.whole else bool(found)


def _depth(items) -> int:
    """How deep unbounded repeats nest. Raises NotUnderstood for what `ends` does not know."""
    deepest = 0
    for op, argument in items:
        if op in (_c.MAX_REPEAT, _c.MIN_REPEAT):
            low, high, body = argument
            if max(low, 0 if high is _c.MAXREPEAT else high) > 64:
                raise NotUnderstood("a repeat")
            deepest = max(deepest, _depth(body) + 1)
        elif op is _c.SUBPATTERN:
            if argument[1] or argument[2]:
                raise NotUnderstood("flags")
            deepest = max(deepest, _depth(argument[3]))
        elif op is _c.BRANCH:
            deepest = max([deepest, *map(_depth, argument[1])])
        elif op in (_c.ASSERT, _c.ASSERT_NOT):
            if argument[0] < 0:
                raise NotUnderstood("look-behind")
            deepest = max(deepest, _depth(argument[1]))
        elif op not in _CLASSES and (op, argument) not in _ANCHORS:
            raise NotUnderstood(str(op))
    return deepest


def ends(items, text: str, starts: set[float]) -> set[float]:
    """Where matches of a sequence that begin at one of `starts` end; at + 0.5 is within the number of the HOLE at `at`."""
    for op, argument in items:
        if op is _c.BRANCH:
            starts = set().union(*(ends(b, text, starts) for b in argument[1]))
        elif op is _c.SUBPATTERN:
            starts = ends(argument[3], text, starts)
        elif op in (_c.MAX_REPEAT, _c.MIN_REPEAT):
            starts = _repeat(*argument, text, starts)
        elif op is _c.AT:
            starts = starts & {0 if argument in (_c.AT_BEGINNING, _c.AT_BEGINNING_STRING) else len(text)}
        elif op in (_c.ASSERT, _c.ASSERT_NOT):
            starts = {s for s in starts if bool(ends(argument[1], text, {s})) == (op is _c.ASSERT)}
        else:
            starts = {int(s) + 1 for s in starts if s < len(text) and _reads(op, argument, text[int(s)], once=True)}
    return starts


def _repeat(low: int, high, body, text: str, starts: set[float]) -> set[float]:
    unbounded = high is _c.MAXREPEAT
    if unbounded and low <= 1 and len(body) == 1 and body[0][0] in _CLASSES:
        return _run_of(low, *body[0], text, starts)
    made, seen, count = set(starts) if low == 0 else set(), set(starts), 0
    while starts and (unbounded or count < high):
        starts, count = ends(body, text, starts), count + 1
        if count >= low:
            made |= starts
            if unbounded:  # what was reached once need not be gone on from again
                starts, seen = starts - seen, seen | starts
    return made


def _run_of(low: int, op, argument, text: str, starts: set[float]) -> set[float]:
    """`.*`, `\\d+` and the like, in one pass. They may stop within a number, which is for what follows to make sense of."""
    made, running = set(starts) if low == 0 else set(), False
    for at in range(int(min(starts, default=len(text))), len(text)):
        within = at + 0.5 in starts
        running = (running or within or at in starts) and _reads(op, argument, text[at], once=within and low > 0)
        if running:
            made |= {at + 1, at + 0.5} if text[at] == HOLE else {at + 1}
    return made


def _reads(op, argument, character: str, once: bool) -> bool:
    """Whether a class reads a character. HOLE stands for one digit or more: a class that reads all of them may run over it."""
    if character != HOLE:
        return _in(op, argument, character)
    digits = {_in(op, argument, d) for d in "0123456789"}
    if len(digits) > 1 or True in digits and once:
        raise _Depends
    return True in digits


def _in(op, argument, c: str) -> bool:
    if op is _c.ANY:
        return c != "\n"
    if op is _c.LITERAL:
        return ord(c) == argument
    if op is _c.NOT_LITERAL:
        return ord(c) != argument
    found, negate = False, False
    for kind, value in argument:
        if kind is _c.NEGATE:
            negate = True
        elif kind is _c.RANGE:
            found |= value[0] <= ord(c) <= value[1]
        elif kind is _c.LITERAL:
            found |= ord(c) == value
        elif kind is _c.CATEGORY:
            name = str(value).lower()
            reads = c.isdecimal() if "digit" in name else c.isspace() if "space" in name else c.isalnum() or c == "_"
            found |= reads != ("_not_" in name)
    return found != negate


def glob(text: str) -> Regex:
    """A glob as fnmatch has it, but `layers.1*` does not read on in layer 12."""
    pieces = re.split(r"(\*|\?|\[[^\]]*\])", text)
    made = ""
    for piece in pieces:
        if piece == "*":
            made += r"(?!\d).*" if made[-1:].isdigit() else ".*"
        else:
            made += "." if piece == "?" else piece.replace("[!", "[^") if piece.startswith("[") else re.escape(piece)
    needs = max((p for p in pieces[::2] if not any(c.isdigit() for c in p)), key=len, default="")
    return evolve(Regex.parse(made, whole=True), needs=needs)


def _mask(regex: Regex, template: str, digits: np.ndarray) -> np.ndarray:
    """Which names of a family an expression matches."""
    try:
        return np.full(len(digits), regex.matches(template), bool)
    except _Depends:
        pass
    mask = np.zeros(len(digits), bool)
    for value in np.unique(digits[:, 0]):
        mine = digits[:, 0] == value
        mask[mine] = _mask(regex, template.replace(HOLE, str(value), 1), digits[mine, 1:])
    return mask


@frozen(eq=False)
class Selection:
    """What a list of entries selects: masks in the order of `families`, entries that select nothing, entries not understood."""

    masks: tuple[np.ndarray, ...]
    literal: tuple[np.ndarray, ...]  # those that a name selects, not a pattern
    missed: tuple[str, ...] = field(default=())
    obscure: tuple[str, ...] = field(default=())


def select(entries: Iterable[str], families: Sequence[Names], style: str) -> Selection:
    """Match the entries of a list against modules.

    A name selects the module and all below it; in the styles `globs` and `parts` it may also be a run of whole segments
    within the path (`gate` is not `gate_proj`). `re:` is matched from the start of the path, as re.match does.
    """
    masks, literal = ([np.zeros(len(n), bool) for n in families] for _ in range(2))
    names: dict[tuple[str, bool], list[tuple[str, tuple[int, ...]]]] = {}
    missed, obscure, patterns = [], [], 0
    for entry in dict.fromkeys(entries):
        start = entry.removesuffix("*")
        if not entry.startswith("re:") and not any(c in start for c in "*?["):
            template, digits = split_name(start)
            names.setdefault((template, start != entry), []).append((entry, digits))
            continue
        patterns += 1
        try:
            if patterns > MOST:
                raise NotUnderstood("too many")
            regex = Regex.parse(entry[3:]) if entry.startswith("re:") else glob(entry)
            found = [_mask(regex, n.template, n.digits) for n in families]
        except NotUnderstood:
            obscure.append(entry)
            continue
        for mask, more in zip(masks, found):
            mask |= more
        if not any(m.any() for m in found):
            missed.append(entry)
    for (template, is_start), listed in names.items():
        hit = np.zeros(len(listed), bool)
        wanted = np.array([d for _, d in listed], np.int64).reshape(len(listed), -1)
        for n, mask, named in zip(families, masks, literal):
            skip = _start(template, n.template) if is_start else _run(template, n.template, style in ("globs", "parts"))
            if skip is not None:
                rows, which = _common(n.digits[:, skip : skip + wanted.shape[1]], wanted)
                mask |= rows
                named |= rows & (not is_start)
                hit |= which
        missed += [entry for (entry, _), h in zip(listed, hit) if not h]
    return Selection(tuple(masks), tuple(literal), tuple(missed), tuple(obscure))


def _run(entry: str, template: str, anywhere: bool) -> int | None:
    """Where an entry's template is a run of whole segments: the number of holes before it; None where it is not."""
    at = f".{template}.".find(f".{entry}.")
    return None if at < 0 or at > 0 and not anywhere else template[:at].count(HOLE)


def _start(entry: str, template: str) -> int | None:
    """0 where a template begins with an entry's, and not in the middle of a number."""
    return 0 if template.startswith(entry) and not template[len(entry) : len(entry) + 1].isdigit() else None


def _common(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(which rows of a are in b, which rows of b are in a)."""
    if not a.shape[1]:
        return np.full(len(a), len(b) > 0), np.full(len(b), len(a) > 0)
    code = row_keys(np.concatenate([a, b]))
    return np.isin(code[: len(a)], code[len(a) :]), np.isin(code[len(a) :], code[: len(a)])
