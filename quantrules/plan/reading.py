"""Patterns read families: which rows of a family a pattern takes, and what each of its wildcards read, as columns."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from attrs import frozen

from quantrules.diagnostics import Diagnostic, RuleError, define
from quantrules.lang import ast
from quantrules.lang.evaluate import Env, evaluate, free_names
from quantrules.names import HOLE, Names, fill, is_integer, is_whole, match, number_pieces, split_name

LINEAR = define("QR110", "An integer form is not linear in one capture")
UNREPEATED = define("QR111", "A target repeats what the source did not read")
UNFIT = define("QR114", "A name that no file can hold")

LONGEST = 1 << 16  # characters of a name
METADATA = "__metadata__"  # the one name that a header keeps for itself


@frozen(eq=False)
class Read:
    """Rows of a family that a pattern took. `stars` and `named` are n texts each; `lefts` tells alternations apart.

    members: the label that each `{a,b}` read, by place among the pattern's member lists.
    """

    index: np.ndarray
    stars: tuple[Names, ...]
    named: dict[str, Names]
    lefts: tuple[str, ...]
    members: tuple[str, ...]


def read(pattern: ast.Pattern, names: Names, env: Env) -> list[Read]:
    """All rows of `names` that the pattern matches, in one or more groups."""
    numbered, ambiguous = number_pieces(pattern)
    if ambiguous:
        return _read_each(pattern, names, env)
    found = []
    work = [(np.arange(len(names)), frozenset())]
    while work:
        rows, forbidden = work.pop()
        m = match(numbered, names.template, forbidden)
        if m is None or not len(rows):
            continue
        texts = [_piece(names, rows, span) for span in m.spans]
        wrong = np.full(len(rows), -1)  # the first integer node whose number is not the right one
        for at, node in enumerate(numbered.nodes):
            if is_integer(node):
                wrong[(wrong < 0) & ~_fits(node, texts[at], env)] = at
        for at in np.unique(wrong[wrong >= 0]):
            work.append((rows[wrong == at], forbidden | {(int(at), *m.spans[at])}))
        keep = wrong < 0
        if keep.any():
            found += _captured(numbered, rows[keep], [t.take(keep) for t in texts], m.choices, env)
    return found


def _read_each(pattern: ast.Pattern, names: Names, env: Env) -> list[Read]:
    """Name by name, for patterns whose numbers cannot be told from holes; what was read is collapsed again."""
    groups: dict = {}
    for i in range(len(names)):
        for one in read_name(pattern, names[i], env):
            parts = [split_name(fill(t.template, t.digits[0])) for t in (*one.stars, *one.named.values())]
            key = (tuple(t for t, _ in parts), tuple(one.named), one.lefts, one.members)
            groups.setdefault(key, []).append((i, [d for _, d in parts]))
    found = []
    for (templates, keys, lefts, members), rows in groups.items():
        columns = [np.array([d[k] for _, d in rows], np.int64).reshape(len(rows), -1) for k in range(len(templates))]
        texts = [Names(t, c) for t, c in zip(templates, columns)]
        stars = len(texts) - len(keys)
        index = np.array([i for i, _ in rows])
        found.append(Read(index, tuple(texts[:stars]), dict(zip(keys, texts[stars:])), lefts, members))
    return found


def read_name(pattern: ast.Pattern, name: str, env: Env) -> list[Read]:
    """As `read`, of one name; its text stays text."""
    forbidden: frozenset = frozenset()
    one = Names(name, np.zeros((1, 0), np.int64))
    while (m := match(pattern, name, forbidden)) is not None:
        texts = [_piece(one, np.arange(1), span) for span in m.spans]
        wrong = [at for at, n in enumerate(pattern.nodes) if is_integer(n) and not _fits(n, texts[at], env)[0]]
        if not wrong:
            return _captured(pattern, np.arange(1), texts, m.choices, env)
        forbidden |= {(wrong[0], *m.spans[wrong[0]])}
    return []


def _piece(names: Names, rows: np.ndarray, span: tuple[int, int]) -> Names:
    start, end = span
    first = names.template.count(HOLE, 0, start)
    text = names.template[start:end]
    return Names(text, names.digits[rows, first : first + text.count(HOLE)])


def integers(text: Names) -> np.ndarray | None:
    """The numbers that a column of texts writes, or None where they are not all numbers."""
    if text.template == HOLE:
        return text.digits[:, 0]
    return np.full(len(text), int(text.template)) if is_whole(text.template) else None


def _linear(node: ast.IntForm, env: Env) -> tuple[str, int, int]:
    """(capture, factor, constant) of an integer form; capture "" where it is a plain number."""
    unknown = sorted(free_names(node.value) - set(env.names))
    if not unknown:
        return "", 0, evaluate(node.value, env)
    if len(unknown) == 1:
        at = [evaluate(node.value, env.extend({unknown[0]: v})) for v in (0, 1, 2)]
        if at[2] - at[1] == at[1] - at[0] != 0:
            return unknown[0], at[1] - at[0], at[0]
    raise RuleError(Diagnostic(LINEAR, "an integer form on the source side is factor * capture + constant", node.span,
                               "this is not", help="such as `{2*L+1}`"))  # fmt: skip


def _fits(node, text: Names, env: Env) -> np.ndarray:
    values = integers(text)
    if values is None:
        return np.zeros(len(text), bool)
    if isinstance(node, ast.Capture):
        low = evaluate(node.low, env) if node.low is not None else 0
        fits = values >= low
        return fits & (values < evaluate(node.high, env)) if node.high is not None else fits
    capture, factor, constant = _linear(node, env)
    if not capture:  # a number that the text spells out: `00` is not `0`
        return values == constant if text.template in (HOLE, str(constant)) else np.zeros(len(text), bool)
    return ((values - constant) % factor == 0) & ((values - constant) // factor >= 0)


def _captured(pattern: ast.Pattern, rows: np.ndarray, texts: list[Names], choices, env: Env) -> list[Read]:
    """The captures of one match; rows where a capture that stands twice read two texts are left out."""
    stars, named, lefts, members = [], {}, [], []
    same = np.ones(len(rows), bool)
    for node, text, choice in zip(pattern.nodes, texts, choices):
        name = getattr(node, "name", "")
        if isinstance(node, ast.Star) and not name:
            stars.append(text)
            continue
        if isinstance(node, ast.Alternation):
            lefts.append(node.items[choice].left)
            text = constant(node.items[choice].right, len(rows))
            name = name or f"|{len(lefts)}"  # as scope.as_target calls it
        elif isinstance(node, ast.Members):
            members.append(node.items[choice].text)
            continue
        elif isinstance(node, ast.IntForm):
            name, factor, base = _linear(node, env)
            if name:
                text = Names(HOLE, (integers(text)[:, None] - base) // factor)
        if name and name in named:
            same &= equal(named[name], text)
        elif name:
            named[name] = text
    if not same.all():
        rows, stars = rows[same], [t.take(same) for t in stars]
        named = {k: t.take(same) for k, t in named.items()}
    return [Read(rows, tuple(stars), named, tuple(lefts), tuple(members))] if len(rows) else []


def as_value(text: str) -> int | str:
    """What a capture that read `text` is in an expression: its integer where it has one."""
    return int(text) if is_whole(text) else text


def constant(text: str, n: int) -> Names:
    return Names(text, np.zeros((n, 0), np.int64))


def equal(a: Names, b: Names) -> np.ndarray:
    if a.template == b.template:
        return (a.digits == b.digits).all(1)
    return np.array([x == y for x, y in zip(a, b)], bool)


def join(parts: Iterable[Names], n: int) -> Names:
    parts = list(parts)
    digits = np.hstack([p.digits for p in parts]) if parts else np.zeros((n, 0), np.int64)
    return Names("".join(p.template for p in parts), digits)


def write(pattern: ast.Pattern, stars: tuple[Names, ...], named: dict[str, Names], labels: dict[str, str], n: int, env: Env) -> Names:
    """Fill a target pattern: the n-th `*` repeats the n-th star, `{x}` a capture, `{a,b}` the label of its axis.

    labels: the label of each axis by name; unnamed member lists are "", in order "#1", "#2" from the second on.
    """
    parts, star, unnamed = [], 0, 0
    for node in pattern.nodes:
        if isinstance(node, ast.Lit):
            parts.append(constant(node.text, n))
        elif isinstance(node, ast.Star) and not node.name:
            if star >= len(stars):
                raise _unread(node, f"this is `*` number {star + 1} of the target, and the source has {len(stars)}")
            parts.append(stars[star])
            star += 1
        elif isinstance(node, ast.Members):
            key = node.name or axis_key(unnamed)
            unnamed += not node.name
            parts.append(constant(str(labels[key]), n))
        elif isinstance(node, ast.IntForm):
            parts.append(_computed(node, named, labels, n, env))
        elif node.name in labels or node.name in named:
            text = constant(str(labels[node.name]), n) if node.name in labels else named[node.name]
            if is_integer(node) and not _fits(node, text, env).all():
                raise _unread(node, f"{text[int(np.argmin(_fits(node, text, env)))]} is outside this range")
            parts.append(text)
        else:
            raise _unread(node, f"no capture of the source is called {node.name}")
    length = sum(len(p.template) for p in parts)
    if length > LONGEST:
        raise RuleError(Diagnostic(UNFIT, f"this makes a name of {length:,} characters; at most {LONGEST:,} are written", pattern.span))
    return join(parts, n)


def axis_key(position: int) -> str:
    """The name under which the n-th unnamed member list stands in `labels` and among axes."""
    return "" if position == 0 else f"#{position}"


def _unread(node, reason: str) -> RuleError:
    return RuleError(Diagnostic(UNREPEATED, "the target repeats what the source did not read", node.span, reason))


def _computed(node: ast.IntForm, named: dict[str, Names], labels: dict, n: int, env: Env) -> Names:
    """A target's integer expression, over captures that read numbers."""
    used = sorted(free_names(node.value) - set(env.names))
    columns = {}
    for name in used:
        values = integers(named[name]) if name in named else np.full(n, labels[name]) if isinstance(labels.get(name), int) else None
        if values is None:
            raise _unread(node, f"{name} is not a capture that reads numbers")
        columns[name] = values
    if not used:
        return constant(str(evaluate(node.value, env)), n)
    keys, inverse = np.unique(np.stack([columns[c] for c in used], 1), axis=0, return_inverse=True)
    results = [evaluate(node.value, env.extend({c: int(v) for c, v in zip(used, row)})) for row in keys]
    if any(r < 0 for r in results):
        raise _unread(node, f"it makes {min(results)}, and a name has no negative number")
    return Names(HOLE, np.array(results, np.int64)[inverse.reshape(-1)][:, None])
