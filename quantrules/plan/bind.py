"""Rules × headers → plan. Rules take modules in file order, first match wins; what they took becomes typed units.

Everything is decided per family of names and per type signature, so a plan costs what its rules cost and not what its
keys cost. All diagnostics of a plan come together.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

import numpy as np
from attrs import define as mutable
from attrs import evolve, field, frozen

from quantrules.diagnostics import Diagnostic, PlanError, QuantrulesError, define
from quantrules.lang import ast
from quantrules.lang.evaluate import Env, evaluate, free_names, walk
from quantrules.lang.parser import parse
from quantrules.names import HOLE, Names, families, row_keys, split_name
from quantrules.ops.base import Context
from quantrules.plan.model import Plan, Recipe, Units
from quantrules.plan.reading import METADATA, UNFIT, Read, as_value, axis_key, integers, read, write
from quantrules.plan.scope import BoundRule, Scope, merged
from quantrules.plan.typing import make_recipe
from quantrules.plan.units import Gathered, Took, gather
from quantrules.types import Axis, Grid, Type, make_type

UNMATCHED = define("QR130", "No rule takes a source key")
CLASH = define("QR131", "Two rules write one target key")
PARTED = define("QR132", "A rule would part the tensors of a module")
OTHER_KIND = define("QR133", "A pattern would match if it were read as the other kind of name")
NOTHING = define("QR134", "A rule matches nothing")
EXPECTED = define("QR135", "A rule does not match what it expects")
AXES = define("QR136", "The axes of a unit and of its target differ")
SUFFIX = define("QR137", "A module's target ends in a suffix of its format")
RENAMED = define("QR138", "A rename does not keep names apart")
BEHIND = define("QR139", "Activation scales are left behind")


@frozen(eq=False)
class Family:
    """Modules of one template, as `formats.find_modules` found them, under their names after renames."""

    names: Names
    first: int  # global id of the first; the others follow
    modules: Any


@mutable(eq=False)
class Binder:
    """State of one binding: which rule took each module, and what it made of it."""

    scope: Scope
    families: list[Family]
    types: list[Type]
    type_of: np.ndarray  # int32[modules]
    rows: np.ndarray  # int32[modules, parts], -1 where a module has fewer
    owner: np.ndarray  # int32[modules]: the rule that took it, or -1
    context: Context
    units: list[Units] = field(factory=list)
    diagnostics: list[Diagnostic] = field(factory=list)
    counts: dict[int, int] = field(factory=dict)  # units of each rule that took anything

    def name_of(self, module: int) -> str:
        family = self.family_of(module)
        return family.names[int(module) - family.first]

    def family_of(self, module: int) -> Family:
        return self.families[bisect_right(self.families, module, key=lambda f: f.first) - 1]


def make_binder(scope: Scope, table) -> Binder:
    """`table` is the formats.ModuleTable of a source."""
    found, first = [], 0
    width = max((len(m.roles) for m in table.modules), default=1)
    size = sum(len(m.names) for m in table.modules)
    type_of, rows = np.zeros(size, np.int32), np.full((size, width), -1, np.int32)
    for m in table.modules:
        end = first + len(m.names)
        type_of[first:end], rows[first:end, : len(m.roles)] = m.types, m.rows
        found.append(Family(m.names, first, m))
        first = end
    return Binder(scope, found, list(table.types), type_of, rows, np.full(size, -1, np.int32), Context(scope.formats))


def bind_rules(binder: Binder) -> None:
    """Run renames and rules; fills `units` and `diagnostics`."""
    try:
        _rename(binder)
    except QuantrulesError as error:
        binder.diagnostics += error.diagnostics
        return
    for rule in binder.scope.rules:
        try:
            took = _take(binder, rule)
            if took:
                binder.counts.setdefault(rule.index, 0)
            _make_units(binder, rule, took)
        except QuantrulesError as error:
            binder.counts.setdefault(rule.index, 0)
            binder.diagnostics += error.diagnostics
    for rule in binder.scope.rules:
        try:
            _check_count(binder, rule)
        except QuantrulesError as error:
            binder.diagnostics += error.diagnostics
    _check_coverage(binder)
    _check_targets(binder)
    _note_left_behind(binder)
    binder.diagnostics = _folded(binder.diagnostics)


def _note_left_behind(binder: Binder) -> None:
    """Activation scales that a change of format leaves behind; weight scales never are."""
    for units in binder.units:
        acts = sum(t.part("act") is not None for t in units.recipe.took.items)
        if acts and units.recipe.made.items and not any(t.part("act") for t in units.recipe.made.items):
            message = f"the activation scales of {units.paths[0].template.replace(HOLE, '#') or units.paths[0][0]} are left behind"
            binder.diagnostics.append(Diagnostic(BEHIND, message, units.rule.span, severity="note", count=acts * len(units)))


def _folded(diagnostics: list[Diagnostic]) -> list[Diagnostic]:
    """One finding for what is said of several families in the same words, in the order of the text."""
    found: dict[tuple, Diagnostic] = {}
    for d in diagnostics:
        key = (d.code, d.message, d.span)
        found[key] = evolve(found[key], count=found[key].count + d.count) if key in found else d
    return sorted(found.values(), key=lambda d: ({"error": 0, "warning": 1}.get(d.severity, 2), d.span.start if d.span else 1 << 60))


def restrict(plan: Plan, only: str) -> Plan:
    """The part of a plan whose targets (or, for what is dropped, sources) a pattern takes, by path or by key."""
    file = parse(f"{only} → keep\n", "--only")
    rule = file.statements[0] if len(file.statements) == 1 else None
    if not (isinstance(rule, ast.Rule) and len(rule.sources) == len(rule.pipeline.steps) == 1 and not rule.targets):
        raise PlanError(Diagnostic(NOTHING, "--only takes one pattern", help="such as --only 'layers.0.*'"))
    pattern = rule.sources[0].pattern
    kept = []
    for units in plan.units:
        mask = np.zeros(len(units), bool)
        made = units.recipe.made.items or units.recipe.took.items
        for names, type in zip(units.targets or units.paths, made):
            for suffix in ("", *(p.suffix for p in type.spelling.parts)):
                whole = [n + suffix for n in names]
                for family, rows in families(whole):
                    for r in read(pattern, family, plan.scope.env):
                        mask[rows[r.index]] = True
        index = np.flatnonzero(mask)
        if len(index):
            kept.append(
                evolve(
                    units,
                    sources=units.sources[index],
                    targets=tuple(t.take(index) for t in units.targets),
                    paths=tuple(p.take(index) for p in units.paths),
                )
            )
    if not kept:
        missing = Diagnostic(NOTHING, f"--only {only} takes no target of the plan", rule.span, help="`quantrules plan` without it shows the targets")
        return evolve(plan, diagnostics=(*plan.diagnostics, missing))
    return evolve(plan, units=tuple(kept))


# ----------------------------------------------------------------------------------------------------------- renames


def _rename(binder: Binder) -> None:
    env = binder.scope.env
    for rename in binder.scope.renames:
        if rename.when is not None and not evaluate(rename.when, env):
            continue
        renamed: list[Family] = []
        for family in binder.families:
            made = rename_family(binder, rename, family, env)
            if made == [family]:
                _check_companions(binder, rename, family, env)
            renamed += made
        binder.families = renamed
    if binder.scope.renames:
        _check_distinct(binder)


def rename_family(binder: Binder, rename: ast.Rename, family: Family, env: Env) -> list[Family]:
    """The family under its new names; split where a rename takes only some of its rows."""
    suffix = family.modules.spelling.parts[0].suffix
    for tail in ("", suffix) if suffix else ("",):
        names = Names(family.names.template + tail, family.names.digits)
        reads = read(rename.left, names, env)
        if not reads:
            continue
        texts: dict[int, str] = {}
        for r in reads:
            new = write(rename.right, r.stars, r.named, {}, len(r.index), env)
            for i, text in zip(r.index.tolist(), new):
                if tail and not text.endswith(tail):
                    raise PlanError(Diagnostic(RENAMED, f"the rename makes {text} of {names[i]}, and a module keeps its suffix {tail}", rename.span))
                texts[i] = text[: len(text) - len(tail)] if tail else text
        return _regrouped(family, texts)
    return [family]


def _regrouped(family: Family, texts: dict[int, str]) -> list[Family]:
    """Families of runs of modules whose ids follow each other, since ids are places in columns."""
    pairs = [split_name(texts.get(i) or family.names[i]) for i in range(len(family.names))]
    found, start = [], 0
    for i in range(1, len(pairs) + 1):
        if i == len(pairs) or pairs[i][0] != pairs[start][0]:
            digits = np.array([d for _, d in pairs[start:i]], np.int64).reshape(i - start, -1)
            found.append(Family(Names(pairs[start][0], digits), family.first + start, family.modules))
            start = i
    return found


def _check_companions(binder: Binder, rename: ast.Rename, family: Family, env: Env) -> None:
    """A rename that fits a companion but neither its module nor the weight would part them."""
    for role in family.modules.roles[1:]:
        names = Names(family.names.template + family.modules.spelling.part(role).suffix, family.names.digits)
        for r in read(rename.left, names, env):
            message = f"the rename fits {names[int(r.index[0])]}, a companion of {family.names[int(r.index[0])]}, and not that module"
            help = "rename the module by its path; `unpack | pack(SPELLING)` gives its tensors other suffixes"
            binder.diagnostics.append(Diagnostic(RENAMED, message, rename.span, help=help, count=len(r.index)))


def _check_distinct(binder: Binder) -> None:
    by_template: dict[str, list[Family]] = {}
    for family in binder.families:
        by_template.setdefault(family.names.template, []).append(family)
    for template, group in by_template.items():
        digits = np.vstack([f.names.digits for f in group])
        _, first, counts = np.unique(row_keys(digits), return_index=True, return_counts=True)
        if (counts > 1).any():
            twice = Names(template, digits[first[counts > 1]])[0]
            binder.diagnostics.append(Diagnostic(RENAMED, f"two modules are called {twice} after the renames", binder.scope.renames[0].span))


# ------------------------------------------------------------------------------------------------------------ taking


def _take(binder: Binder, rule: BoundRule) -> list[Took]:
    """What a rule takes of what is left, by each of its source patterns."""
    took: list[Took] = []
    for place, source in enumerate(rule.sources):
        for family in binder.families:
            ids = np.arange(family.first, family.first + len(family.names))
            free = ids if rule.rule.also else ids[binder.owner[ids] < 0]
            for one in _reads(binder, rule, place, source.pattern, family, free):
                took.append(one)
                if not rule.rule.also:
                    binder.owner[one.modules] = rule.index
    return took


def _reads(binder: Binder, rule: BoundRule, place: int, pattern: ast.Pattern, family: Family, free: np.ndarray):
    """By path where the first op matches paths, then by key; a key of a quantised module is an error, but for `drop`."""
    if not len(free):
        return
    env = binder.scope.env
    if rule.matches != "keys":
        names, left = family.names.take(free - family.first), np.ones(len(free), bool)
        for r in read(pattern, names, env):
            for kept in _admitted(binder, rule, r, names, free, env):
                yield Took(place, False, free[kept.index], kept)
            left[r.index] = False  # what `except` or `when` refuses by its path is not tried by its key
        free = free[left]
        if rule.matches == "paths" or not len(free):
            return
    dense = family.modules.format.is_dense
    for k, role in enumerate(family.modules.roles):
        suffix = family.modules.spelling.part(role).suffix
        if not suffix and rule.matches != "keys":
            continue
        present = free[binder.rows[free, k] >= 0]
        names = family.names.take(present - family.first)
        names = Names(names.template + suffix, names.digits)
        for r in read(pattern, names, env):
            for kept in _admitted(binder, rule, r, names, present, env):
                if dense:
                    yield Took(place, True, present[kept.index], kept)
                else:
                    _drop_part(binder, rule, family, role, k, present[kept.index], names[int(kept.index[0])])


def _admitted(binder: Binder, rule: BoundRule, r: Read, names: Names, ids: np.ndarray, env: Env):
    """Rows that `except` and `when` leave."""
    keep = np.ones(len(r.index), bool)
    for pattern in rule.excepts:
        for other in read(pattern, names, env):
            keep &= ~np.isin(r.index, other.index)
    if rule.rule.when is not None and keep.any():
        keep &= _holds(binder, rule, r, names, ids)
    if keep.all():
        yield r
    elif keep.any():
        yield Read(r.index[keep], tuple(s.take(keep) for s in r.stars), {k: v.take(keep) for k, v in r.named.items()}, r.lefts, r.members)


def _holds(binder: Binder, rule: BoundRule, r: Read, names: Names, ids: np.ndarray) -> np.ndarray:
    """`when`, asked once for each combination of what it reads: captures, and the type of the module."""
    asks = any(isinstance(n, ast.Apply) and n.function == "exists" for n in walk(rule.rule.when))  # its text may name any capture
    used = [n for n in sorted(r.named) if asks or n in free_names(rule.rule.when)]
    columns = [list(r.named[n]) for n in used]
    kinds = binder.type_of[ids[r.index]]
    known: dict = {}
    result = np.zeros(len(r.index), bool)
    for i, kind in enumerate(kinds.tolist()):
        key = (kind, *(c[i] for c in columns))
        if key not in known:
            type = binder.types[kind]
            words = {"dtype": type.dtype if type.is_dense else "", "format": type.format.name, "shape": list(type.shape)}
            values = {n: as_value(v) for n, v in zip(used, key[1:])}
            env = evolve(binder.scope.env.extend({**words, **values}), functions={"exists": _exists(binder, dict(zip(used, key[1:])))})
            known[key] = bool(evaluate(rule.rule.when, env))
        result[i] = known[key]
    return result


def _exists(binder: Binder, captured: dict[str, str]):
    """`exists("pattern")`: whether a module or a key has such a name, after renames; captures are those of the rule."""

    def exists(text: Any = "", *more: Any) -> bool:
        file = parse(f"{text} → keep\n", "exists()")
        if more or not isinstance(text, str) or len(file.statements) != 1:
            raise PlanError(Diagnostic(NOTHING, f"exists() takes one pattern in quotes, not {text!r}"))
        pattern = file.statements[0].sources[0].pattern
        nodes = [ast.Lit(captured[n.name]) if isinstance(n, ast.Capture) and n.name in captured else n for n in pattern.nodes]
        pattern, env = evolve(pattern, nodes=merged(nodes)), binder.scope.env
        return any(
            read(pattern, Names(f.names.template + suffix, f.names.digits), env)
            for f in binder.families
            for suffix in {"", *(f.modules.spelling.part(r).suffix for r in f.modules.roles)}
        )

    return exists


def _drop_part(binder: Binder, rule: BoundRule, family: Family, role: str, k: int, ids: np.ndarray, example: str) -> None:
    """`drop` of an optional companion takes it out of its module; anything else would part the module."""
    spec = family.modules.spelling.part(role)
    if rule.steps[0].op.name != "drop" or not spec.optional:
        raise PlanError(
            Diagnostic(
                PARTED,
                f"`{rule.steps[0].op.name}` takes {example}, one tensor of a {family.modules.format.name} module",
                rule.rule.sources[0].span,
                f"{len(ids)} such",
                count=len(ids),
                help="a module is taken whole, by its path: write the pattern without the suffix",
            )
        )
    lone = make_type(binder.context.dense, binder.context.dense.spelling_of(""), (), {"codes": "u8"})
    for kind in np.unique(binder.type_of[ids]):
        these = ids[binder.type_of[ids] == kind]
        old = binder.types[kind]
        part = old.part(role)
        binder.type_of[these] = _known(binder, evolve(old, parts=tuple(p for p in old.parts if p.role != role)))
        taken = evolve(lone, shape=part.shape, parts=(evolve(lone.parts[0], dtype=part.dtype, shape=part.shape),))
        paths = Names(family.names.template + spec.suffix, family.names.digits[these - family.first])
        binder.units.append(Units(rule.rule, Recipe(Grid.one(taken), (), Grid((Axis("", ()),), ())), binder.rows[these, k : k + 1], (), (paths,)))
        binder.rows[these, k:-1], binder.rows[these, -1] = binder.rows[these, k + 1 :].copy(), -1
    binder.counts[rule.index] = binder.counts.get(rule.index, 0) + len(ids)


def _known(binder: Binder, type: Type) -> int:
    if type not in binder.types:
        binder.types.append(type)
    return binder.types.index(type)


# ------------------------------------------------------------------------------------------------------------- units


def _make_units(binder: Binder, rule: BoundRule, took: list[Took]) -> None:
    for group in gather(rule, took, binder.name_of, binder.diagnostics):
        binder.counts[rule.index] = binder.counts.get(rule.index, 0) + len(group.modules)
        kinds, asked = binder.type_of[group.modules], _asked(rule, group)
        _, first, inverse = np.unique(row_keys(np.hstack([kinds, *asked.values()])), return_index=True, return_inverse=True)
        for s, example in enumerate(first):
            units = np.flatnonzero(inverse == s)
            try:
                known = {name: int(column[example, 0]) for name, column in asked.items()}
                _type_units(binder, rule, group, units, [binder.types[k] for k in kinds[example]], known)
            except PlanError as error:
                example = binder.name_of(group.modules[units[0], 0])
                note = f"for {example}" + (f" and {len(units) - 1} more" if len(units) > 1 else "")
                binder.diagnostics += [evolve(d, notes=(*d.notes, note), count=len(units)) for d in error.diagnostics]


def _asked(rule: BoundRule, group: Gathered) -> dict[str, np.ndarray]:
    """Captures whose integers the rule's types speak of, as columns [units, 1]."""
    types = [t for t in (rule.rule.type, *(s.type for s in rule.sources)) if t is not None]
    names = {n for t in types for d in t.dims or () if not isinstance(d, ast.Rest) for n in free_names(d)} & set(group.named)
    columns = {n: integers(group.named[n]) for n in sorted(names)}
    if text := next((n for n, column in columns.items() if column is None), None):
        raise PlanError(Diagnostic(AXES, f"a dimension of the type is computed from {text}, which read {group.named[text][0]!r}", types[0].span))
    return {n: column[:, None] for n, column in columns.items()}


def _type_units(binder: Binder, rule: BoundRule, group: Gathered, index: np.ndarray, types: list[Type], known: dict[str, int]) -> None:
    """known: captures, in all these units."""
    if group.as_key:
        types = [as_bare(t, binder.context.dense) for t in types]
    took = Grid(group.axes, tuple(types))
    listed = _target_axes(rule)
    context = evolve(binder.context, target_axes=(*listed, *_added_axes(rule, group, binder.scope.env)), lows=_lows(rule, binder.scope.env))
    recipe = make_recipe(rule, took, context, binder.scope.env.extend(known))
    modules = group.modules[index]
    sources = np.hstack([binder.rows[modules[:, i], : len(t.parts)] for i, t in enumerate(types)])
    group = evolve(group, modules=modules, stars=tuple(s.take(index) for s in group.stars), named={k: v.take(index) for k, v in group.named.items()})
    targets = _targets(binder, rule, group, recipe, listed) if rule.targets else ()
    paths = tuple(_paths(binder, modules[:, i]) for i in range(modules.shape[1]))
    order = np.argsort(sources[:, 0], kind="stable") if len(sources) else np.arange(0)
    binder.units.append(Units(rule.rule, recipe, sources[order], tuple(t.take(order) for t in targets), tuple(p.take(order) for p in paths)))


def _paths(binder: Binder, ids: np.ndarray) -> Names:
    """Names of modules as one column; of several families, which differ in text, as text."""
    first = binder.family_of(ids[0])
    if ((ids >= first.first) & (ids < first.first + len(first.names))).all():
        return first.names.take(ids - first.first)
    return Texts([binder.name_of(i) for i in ids.tolist()])


class Texts(Names):
    """Names that share no template: plain text."""

    def __init__(self, texts: list[str]):
        super().__init__("", np.zeros((len(texts), 0), np.int64))
        object.__setattr__(self, "texts", texts)

    def __getitem__(self, i: int) -> str:
        return self.texts[i]

    def take(self, index: np.ndarray) -> Names:
        return Texts([self.texts[i] for i in np.arange(len(self.texts))[index].tolist()])


def as_bare(type: Type, dense) -> Type:
    """A dense tensor taken by its key: its name is its path, and no suffix is added to its target."""
    return type if not type.spelling.parts[0].suffix else evolve(type, spelling=dense.spelling_of(""))


# ----------------------------------------------------------------------------------------------------------- targets


def _target_axes(rule: BoundRule) -> tuple[Axis, ...]:
    """The member lists that a target writes, in order."""
    if not rule.targets:
        return ()
    axes, unnamed = [], 0
    if len(rule.targets) > 1:
        axes.append(Axis("", tuple(map(str, range(len(rule.targets))))))
        unnamed = 1
    for node in rule.targets[0].nodes:
        if isinstance(node, ast.Members):
            axes.append(Axis(node.name or axis_key(unnamed), tuple(m.text for m in node.items)))
            unnamed += not node.name
    return tuple(axes)


def _added_axes(rule: BoundRule, group: Gathered, env: Env) -> tuple[Axis, ...]:
    """Captures of the target that the source does not read: axes that an op has to make."""
    read_there = {
        *group.named,
        *(a.name for a in group.axes),
        *(n.name for t in rule.targets for n in t.nodes if isinstance(n, (ast.Members, ast.Star))),
    }
    return tuple(Axis(n, ()) for n in sorted(rule.repeated - read_there - set(env.names)))


def _lows(rule: BoundRule, env: Env) -> dict[str, int]:
    """Lower bounds of captures that have a range, in the sources or (for what an op makes) in the targets."""
    patterns = (*rule.targets, *(s.pattern for s in rule.sources))
    nodes = [n for p in patterns for n in p.nodes if isinstance(n, ast.Capture) and n.low is not None]
    return {n.name: evaluate(n.low, env) for n in nodes}


def _targets(binder: Binder, rule: BoundRule, group: Gathered, recipe: Recipe, listed: tuple[Axis, ...]) -> tuple[Names, ...]:
    """Names of the targets, one column for each item that the recipe made."""
    made = recipe.made
    if len({a.name for a in made.axes}) < len(made.axes):
        lists = " and ".join(f"{{{','.join(map(str, a.labels))}}}" for a in made.axes if a.name == "")
        raise _axes(rule, f"the result has the members {lists}, which have no names to tell them apart", "`cat` one first, or name it: `{p:a,b}`")
    written = {a.name for a in listed}
    for axis in made.axes:
        if axis.name in written:
            target = next(a for a in listed if a.name == axis.name)
            if len(target.labels) != len(axis.labels):
                raise _axes(rule, f"the unit has {len(axis.labels)} members and the target lists {len(target.labels)}")
        elif axis.name not in rule.repeated:
            what = f"axis {axis.name}" if axis.name and axis.name[0] != "#" else f"members {', '.join(map(str, axis.labels))}"
            op = f"stack({axis.name})" if axis.name and axis.name[0] != "#" else "cat"
            raise _axes(rule, f"the target does not repeat the {what}, and no op removes it", f"add `{op}`, or repeat it in the target")
    lost = written - {a.name for a in made.axes}
    if lost:
        other = "take the braces out of the target" if rule.rule.targets else "write a target, or a `fuse` of these members"
        raise _axes(rule, "the target lists members, and the pipeline makes one value", f"add `split`, or {other}")
    _check_repeated(rule, group)
    names = []
    for labels in made.labels():
        known = {a.name: label for a, label in zip(made.axes, labels)}
        pattern = rule.targets[0]
        if len(rule.targets) > 1:
            pattern = rule.targets[made.axes[made.position("")].labels.index(known[""])]
        for axis in listed:
            source = next(a for a in made.axes if a.name == axis.name)
            known[axis.name] = axis.labels[source.labels.index(known[axis.name])]
        names.append(write(pattern, group.stars, group.named, known, len(group.modules), binder.scope.env))
    for name, type in zip(names, made.items):
        suffixes = {p.suffix for p in type.spelling.parts if p.suffix}
        ends = next((s for s in suffixes if name.template.endswith(s)), "")
        if ends and (rule.rule.targets or group.as_key):  # a module that keeps its path may be called so
            raise PlanError(
                Diagnostic(
                    SUFFIX,
                    f"the target {name[0]} ends in `{ends}`, which {type.format.name} adds by itself",
                    rule.rule.targets[0].span if rule.rule.targets else rule.rule.span,
                    help=f"write the target without `{ends}`",
                )
            )
    return tuple(names)


def _axes(rule: BoundRule, message: str, help: str = "") -> PlanError:
    return PlanError(Diagnostic(AXES, message, rule.rule.targets[0].span if rule.rule.targets else rule.rule.span, help=help))


def _check_repeated(rule: BoundRule, group: Gathered) -> None:
    """A target repeats every `*` and every alternation, or names of different sources would become one."""
    stars = max(sum(isinstance(n, ast.Star) and not n.name for n in t.nodes) for t in rule.targets)
    if stars < len(group.stars):
        raise _axes(
            rule, f"the source has {len(group.stars)} `*` and the target repeats {stars}", "a target repeats every `*`; name it `{**x}` to gather it"
        )
    unnamed = 0
    for node in rule.sources[0].pattern.nodes:
        if isinstance(node, ast.Alternation):
            unnamed += not node.name
            if (node.name or f"|{unnamed}") not in rule.repeated:
                shown = f"{{{node.name}:…}}" if node.name else "that has no name"
                raise _axes(rule, f"the target drops the alternation {shown}", "name and repeat it, or write a list `{a,b}` to gather its members")


# ---------------------------------------------------------------------------------------------------------- coverage


def _check_count(binder: Binder, rule: BoundRule) -> None:
    count = binder.counts.get(rule.index, 0)
    if rule.rule.expect:
        wanted = [evaluate(e, binder.scope.env) for e in rule.rule.expect]
        if count not in wanted:
            raise PlanError(
                Diagnostic(
                    EXPECTED,
                    f"the rule makes {count} units and expects {' or '.join(map(str, wanted))}",
                    rule.rule.expect[0].span or rule.rule.span,
                    f"found {count}",
                )
            )
    if rule.index not in binder.counts:
        if other := _other_kind(binder, rule):
            raise PlanError(other)
        if rule.rule.expect:  # nothing, as it says
            return
        binder.diagnostics.append(_nothing(binder, rule))


def _nothing(binder: Binder, rule: BoundRule) -> Diagnostic:
    """A rule that took nothing. It is no surprise of `drop` and of `*`, which are there for what may be left."""
    nodes = rule.sources[0].pattern.nodes
    expected = not rule.targets or len(nodes) == 1 and isinstance(nodes[0], ast.Star)
    notes: tuple[str, ...] = ()
    for family in binder.families:
        suffix = family.modules.spelling.parts[0].suffix if rule.matches == "keys" else ""
        names = Names(family.names.template + suffix, family.names.digits)
        taken = [r.index for s in rule.sources for r in read(s.pattern, names, binder.scope.env)]
        owner = binder.owner[family.first + int(taken[0][0])] if taken else -1
        if 0 <= owner < rule.index:
            notes = (f"it fits {names[int(taken[0][0])]}, which `{binder.scope.rules[owner]}` takes first",)
            break
    return Diagnostic(
        NOTHING,
        "the rule matches nothing",
        rule.rule.sources[0].span or rule.rule.span,
        notes=notes,
        severity="note" if expected else "warning",
        help="say how many units you expect, as in `expect 61`, to make this an error",
    )


def _other_kind(binder: Binder, rule: BoundRule) -> Diagnostic | None:
    """A rule that matches nothing, but would by keys instead of paths or the other way round."""
    if rule.matches == "paths, keys":
        return None
    for source in rule.sources:
        for family in binder.families:
            own = family.names.template + (family.modules.spelling.parts[0].suffix if rule.matches == "keys" else "")
            if read(source.pattern, Names(own, family.names.digits), binder.scope.env):
                return None  # it reads names: its condition stands against it, or an earlier rule
    for source in rule.sources:
        for family in binder.families:
            suffix = family.modules.spelling.parts[0].suffix
            if not suffix:
                continue
            template = family.names.template + (suffix if rule.matches == "paths" else "")
            found = read(source.pattern, Names(template, family.names.digits), binder.scope.env)
            if found:
                name = Names(template, family.names.digits)[int(found[0].index[0])]
                first = rule.steps[0].op.name
                if rule.matches == "paths":
                    message, help = f"`{first}` matches modules, and {name} is a tensor's key", f"write the pattern without `{suffix}`"
                else:
                    message, help = f"`{first}` matches keys, and {name} is a module's path", f"add `{suffix}`, or begin with `unpack`"
                return Diagnostic(OTHER_KIND, message, source.pattern.span, help=help)
    return None


def _check_coverage(binder: Binder) -> None:
    left: dict[str, list[Family]] = {}
    for family in binder.families:
        ids = np.arange(family.first, family.first + len(family.names))
        free = ids[binder.owner[ids] < 0]
        if len(free):
            names = family.names.take(free - family.first)
            left.setdefault(names.template, []).append((names, family, len(free)))
    for template, groups in left.items():
        names, family, _ = groups[0]
        count = sum(n for _, _, n in groups)
        keys = [names[0] + family.modules.spelling.part(r).suffix for r in family.modules.roles]
        more = f" and {count - 1} more like it" if count > 1 else ""
        binder.diagnostics.append(
            Diagnostic(
                UNMATCHED,
                f"no rule takes {names[0]}{more}",
                notes=(f"a {binder.types[binder.type_of[family.first]].format.name} module: " + ", ".join(keys),),
                count=count,
                help=_near_miss(binder, names[0])
                or f"write a rule for it, or `{_shown(template)} → keep`; `* → keep` at the end passes on all that is left",
            )
        )


def _shown(template: str) -> str:
    letters = iter("LEKMNPQRSTUVW")
    return "".join("{" + next(letters, "X") + "}" if c == HOLE else c for c in template)


def _near_miss(binder: Binder, name: str) -> str:
    """A rule that takes the same tail under another beginning."""
    for family in binder.families:
        if (binder.owner[family.first : family.first + len(family.names)] >= 0).any():
            tail, other = name.split("."), family.names[0].split(".")
            same = 0
            while same < min(len(tail), len(other)) and _alike(tail[-1 - same], other[-1 - same]):
                same += 1
            if same >= 2 and same >= len(tail) - 2:
                rule = binder.scope.rules[int(binder.owner[family.first : family.first + len(family.names)].max())]
                return f"{family.names[0]}, which ends alike, is taken by `{rule}`"
    return ""


def _alike(a: str, b: str) -> bool:
    return a == b or a.isdigit() and b.isdigit()


def _check_targets(binder: Binder) -> None:
    """No key is written twice, whoever writes it: compared by canonical families of whole keys."""
    seen: dict[str, list[tuple[np.ndarray, Units]]] = {}
    for units in binder.units:
        for item, names in enumerate(units.targets):
            type = units.recipe.made.items[item]
            for part in type.parts:
                for whole in canonical(names, type.spelling.part(part.role).suffix):
                    seen.setdefault(whole.template, []).append((whole.digits, units))
    for template, writers in seen.items():
        if template == METADATA:
            binder.diagnostics.append(
                Diagnostic(UNFIT, f"a file keeps {METADATA} for itself", writers[0][1].rule.span, help="call the target something else")
            )
        digits = np.vstack([d for d, _ in writers])
        _, first, counts = np.unique(row_keys(digits), return_index=True, return_counts=True)
        if (counts > 1).any():
            clashing = digits[first[counts > 1]]
            key = Names(template, clashing)[0]
            who = [u for d, u in writers if (d == clashing[0]).all(1).any()]
            rules = list(dict.fromkeys(" ".join(u.rule.span.source.split()) for u in who))
            by = f"by `{rules[0]}` and by `{rules[1]}`" if len(rules) > 1 else f"twice by `{rules[0]}`"
            binder.diagnostics.append(
                Diagnostic(
                    CLASH,
                    f"{key} is written {by}",
                    who[-1].rule.span,
                    "writes it again",
                    count=len(clashing),
                    related=((who[0].rule.span, "writes it too"),) if who[0].rule is not who[-1].rule else (),
                )
            )


def canonical(names: Names, suffix: str) -> list[Names]:
    """Names with a suffix as families whose holes are whole segments and whose numbers are all holes."""
    pieces = (names.template + suffix).split(".")
    clean = all(p == HOLE or HOLE not in p and not p.isdigit() for p in pieces)
    if clean and not isinstance(names, Texts):
        return [Names(names.template + suffix, names.digits)]
    return [family for family, _ in families([n + suffix for n in names])]
