"""Units: what a rule took, gathered into complete grids of members, as columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
from attrs import frozen

from quantrules.diagnostics import Diagnostic, PlanError, define
from quantrules.lang import ast
from quantrules.lang.evaluate import free_names
from quantrules.names import Names, row_keys
from quantrules.plan.reading import Read, axis_key, integers
from quantrules.plan.scope import BoundRule
from quantrules.types import Axis

MISSING = define("QR120", "A unit lacks a member")
DOUBLED = define("QR121", "A unit has a member twice")
MIXED = define("QR122", "A capture gathers numbers and other texts, which have no order")


@frozen(eq=False)
class Took:
    """Modules that one source pattern took: global module ids, and what the pattern read there."""

    source: int
    as_key: bool
    modules: np.ndarray
    read: Read


@frozen
class AxisPlan:
    """An axis of the sources: its labels where the text lists them, else None; which of them may be absent."""

    name: str
    labels: tuple[str, ...] | None
    optional: frozenset[str] = frozenset()
    by_source: tuple[str, ...] = ()  # the patterns of `P, Q → …`, where they are the members


@frozen(eq=False)
class Gathered:
    """n complete units that share axes: modules int32[n, items] in row-major order of the axes; captures as columns."""

    as_key: bool
    axes: tuple[Axis, ...]
    modules: np.ndarray
    stars: tuple[Names, ...]
    named: dict[str, Names]


def source_axes(rule: BoundRule) -> tuple[AxisPlan, ...]:
    """Member lists, and captures that the target does not repeat. Nothing is gathered by `drop`."""
    if not rule.targets:
        return ()
    repeated = rule.repeated
    axes: list[AxisPlan] = []
    if len(rule.sources) > 1:
        axes.append(AxisPlan("", tuple(map(str, range(len(rule.sources)))), by_source=tuple(s.pattern.span.source for s in rule.sources)))
    unnamed = len(axes)
    for node in rule.sources[0].pattern.nodes:
        if isinstance(node, ast.Members):
            name = node.name or axis_key(unnamed)
            unnamed += not node.name
            axes.append(AxisPlan(name, tuple(m.text for m in node.items), frozenset(m.text for m in node.items if m.optional)))
        elif isinstance(node, (ast.Capture, ast.Star)) and node.name and node.name not in repeated and node.name not in [a.name for a in axes]:
            axes.append(AxisPlan(node.name, None))
        elif isinstance(node, ast.IntForm):
            axes += [AxisPlan(n, None) for n in sorted(free_names(node.value) - repeated) if n not in [a.name for a in axes]]
    return tuple(axes)


def gather(rule: BoundRule, took: list[Took], name_of, errors: list[Diagnostic]) -> Iterator[Gathered]:
    """Complete units, group by group; incomplete ones become diagnostics. `name_of(module)` is for their messages."""
    axes = source_axes(rule)
    groups: dict = {}
    for t in took:
        kept = [k for k in sorted(t.read.named) if k not in {a.name for a in axes}]
        key = (t.as_key, tuple(s.template for s in t.read.stars), t.read.lefts, tuple((k, t.read.named[k].template) for k in kept))
        groups.setdefault(key, []).append(t)
    for (as_key, star_templates, _, named_templates), members in groups.items():
        texts = [list(t.read.stars) + [t.read.named[k] for k, _ in named_templates] for t in members]
        digits = np.vstack([np.hstack([x.digits for x in row]) if row else np.zeros((len(t.modules), 0), np.int64) for row, t in zip(texts, members)])
        modules = np.concatenate([t.modules for t in members])
        coords, labels = _coordinates(rule, axes, members)
        order = np.argsort(row_keys(np.hstack([digits, coords])), kind="stable")
        digits, modules, coords = digits[order], modules[order], coords[order]
        for index, present in _complete(rule, axes, labels, digits, coords, modules, name_of, errors):
            columns, at = [], 0
            for template in [*star_templates, *(t for _, t in named_templates)]:
                width = template.count("\0")
                columns.append(Names(template, digits[index[:, 0], at : at + width]))
                at += width
            stars = tuple(columns[: len(star_templates)])
            named = {k: c for (k, _), c in zip(named_templates, columns[len(star_templates) :])}
            yield Gathered(as_key, present, modules[index], stars, named)


def _coordinates(rule: BoundRule, axes: tuple[AxisPlan, ...], members: list[Took]) -> tuple[np.ndarray, list[list]]:
    """Each module's place on each axis as an integer, and the label that an integer stands for (for listed or text axes)."""
    columns, labels = [], []
    for axis in axes:
        if axis.labels is not None:
            listed = [a.name for a in axes if a.labels is not None and not a.by_source]
            place = [t.source if axis.by_source else axis.labels.index(t.read.members[listed.index(axis.name)]) for t in members]
            columns.append(np.concatenate([np.full(len(t.modules), p) for t, p in zip(members, place)]))
            labels.append(list(axis.labels))
            continue
        numbers = [integers(t.read.named[axis.name]) for t in members]
        if all(n is not None for n in numbers):
            columns.append(np.concatenate(numbers))
            labels.append([])
        else:
            texts = [list(t.read.named[axis.name]) for t in members]
            known = sorted({x for column in texts for x in column})
            if words := [x for x in known if any(y.isdigit() for y in known) and not x.isdigit()]:
                message = f"{{{axis.name}}} reads numbers, and also {', '.join(words[:3])}{', …' if len(words) > 3 else ''}"
                help = f"`{{{axis.name}:0..}}` reads numbers only; the others need a rule of their own"
                raise PlanError(Diagnostic(MIXED, message, rule.rule.sources[0].span or rule.rule.span, help=help))
            columns.append(np.array([known.index(x) for column in texts for x in column]))
            labels.append(known)
    rows = sum(len(t.modules) for t in members)
    return (np.stack(columns, 1) if columns else np.zeros((rows, 0), np.int64)), labels


def _complete(rule, axes, labels, digits, coords, modules, name_of, errors):
    """(index int[n, items] into the sorted columns, axes) for each set of labels that units have."""
    n = len(modules)
    if not axes:
        yield np.arange(n)[:, None], ()
        return
    change = np.ones(n, bool)
    change[1:] = (digits[1:] != digits[:-1]).any(1) if digits.shape[1] else False
    starts = np.flatnonzero(change)
    counts = np.diff(np.append(starts, n))
    groups: dict[tuple[int, bytes], list[int]] = {}
    if len(set(counts.tolist())) == 1 and (coords.reshape(len(starts), counts[0], -1) == coords[: counts[0]]).all():
        groups[int(counts[0]), coords[: counts[0]].tobytes()] = starts.tolist()
    else:
        for start, count in zip(starts.tolist(), counts.tolist()):
            groups.setdefault((count, coords[start : start + count].tobytes()), []).append(start)
    missing: list[tuple[str, str]] = []
    for (count, _), firsts in groups.items():
        here = coords[firsts[0] : firsts[0] + count]
        present = tuple(_present(axis, label, here[:, i]) for i, (axis, label) in enumerate(zip(axes, labels)))
        want = list(itertools.product(*(p.labels for p in present)))
        have = [tuple(label[v] if label else int(v) for label, v in zip(labels, row)) for row in here.tolist()]
        if have == want:
            yield np.array(firsts)[:, None] + np.arange(count), present
            continue
        doubled = [h for i, h in enumerate(have) if h in have[:i]]
        for first in firsts:
            if doubled:
                errors.append(
                    Diagnostic(
                        DOUBLED, f"{name_of(modules[first])} and another source are both member {_show(axes, doubled[0])} of one unit", rule.rule.span
                    )
                )
            lacks = [w for w in want if w not in have]
            if lacks:
                missing.append((name_of(modules[first]), _show(axes, lacks[0]) + (f" and {len(lacks) - 1} more" if len(lacks) > 1 else "")))
    if missing:
        example, lack = missing[0]
        errors.append(
            Diagnostic(
                MISSING,
                f"the unit of {example} lacks {lack}",
                rule.rule.sources[0].span or rule.rule.span,
                f"{len(missing)} unit{'s' * (len(missing) > 1)} incomplete",
                count=len(missing),
                help="`{a,b?}` marks a member that may be absent; a missing one may have been taken by an earlier rule (`quantrules explain`)",
            )
        )


def _present(axis: AxisPlan, labels: list, column: np.ndarray) -> Axis:
    """The axis that a unit should have: all listed labels but absent optional ones, or the values that it has."""
    values = np.unique(column).tolist()
    if axis.labels is not None:
        seen = {labels[v] for v in values}
        return Axis(axis.name, tuple(x for x in axis.labels if x in seen or x not in axis.optional))
    return Axis(axis.name, tuple(labels[v] if labels else int(v) for v in values))


def _show(axes, labels) -> str:
    texts = (a.by_source[int(label)] if a.by_source else label for a, label in zip(axes, labels))
    return ", ".join(f"{a.name}={text}" if a.name and not a.name.startswith("#") else str(text) for a, text in zip(axes, texts))
