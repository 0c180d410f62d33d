"""Why a key goes where it goes: the rule that reads or writes it, step by step with types, and why other rules do not.

The rules are bound once more, so that every module's place, name and type are at hand; what is said comes from there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np
from attrs import evolve, frozen

from quantrules.diagnostics import Diagnostic, QuantrulesError, define, visible
from quantrules.formats import find_modules
from quantrules.lang import ast, evaluate, free_names
from quantrules.lang.mistakes import nearest
from quantrules.lang.printer import expression, pattern
from quantrules.names import HOLE, KeyTable, Names
from quantrules.plan import bind as binding
from quantrules.plan.bind import Binder, Texts
from quantrules.plan.model import Plan, Units
from quantrules.plan.reading import read_name
from quantrules.plan.scope import BoundRule
from quantrules.types import Grid, Type

NO_KEY = define("QR091", "A key that is neither read nor written")
SHOWN = 4  # modules or keys of a unit that are listed; 384 experts do not help

NEEDS = {"scales": "every number of {} is finite and not negative", "equal": "{} of the members are equal, byte for byte",
         "exact-align": "{} of the members can be aligned without rounding"}  # fmt: skip


@frozen
class Explanation:
    """What there is to say of one key, as headings with lines."""

    key: str
    facts: tuple[tuple[str, tuple[str, ...]], ...]

    def render(self) -> str:
        width = max(len(head) for head, _ in self.facts)
        lines = [f"  {head if i == 0 else '':{width}}  {visible(line)}" for head, texts in self.facts for i, line in enumerate(texts)]
        return "\n".join([visible(self.key), *lines])


def explain(plan: Plan, keys: Iterable[str]) -> tuple[list[Explanation], list[Diagnostic]]:
    """For each key of the source or the target, or path of a module: an explanation for each unit that it is part of.

    Keys that are neither read nor written are the second result.
    """
    binder = binding.make_binder(plan.scope, find_modules(plan.table, plan.source.config_files, plan.scope.formats))
    if not plan.scope.errors:
        binding.bind_rules(binder)
    asked = _Asked(plan.table, plan.scope.rules, binder)
    explained, unknown = [], []
    for key in keys:
        found = list(asked.explain(key))
        explained += found
        if not found:
            unknown.append(Diagnostic(NO_KEY, f"{key} is neither read nor written", help=asked.near(key)))
    return explained, unknown


@frozen(eq=False)
class _Asked:
    table: KeyTable
    rules: list[BoundRule]
    binder: Binder

    def explain(self, key: str) -> Iterator[Explanation]:
        row = self.row(key)
        module = self.module(key, row)
        reads = {row, int(self.binder.rows[module, 0]) if module is not None else row} - {None}
        for units in self.binder.units:
            here = set(np.flatnonzero(np.isin(units.sources, list(reads)).any(1)).tolist()) if reads else set()
            for u in sorted(here | set(_writes(units, key))):
                yield Explanation(key, tuple(self.unit(units, u, key)))
        if module is not None and self.binder.owner[module] < 0:
            yield Explanation(key, (*self.disk(module), ("rule", ("none takes it",)), *self.others(module, len(self.rules), True)))

    # ------------------------------------------------------------------------------------------------------- finding

    def row(self, key: str) -> int | None:
        for names, rows in zip(self.table.families, self.table.rows):
            if (at := _place(names, key)) is not None:
                return int(rows[at])
        return None

    def module(self, key: str, row: int | None) -> int | None:
        """The module that has a tensor, or this path, before or after renames."""
        if row is not None:
            found = np.flatnonzero((self.binder.rows == row).any(1))
            return int(found[0]) if len(found) else None
        for family in self.binder.families:
            if (at := _place(family.names, key)) is not None:
                return family.first + at
        return next((m for f in self.binder.families for m in self.disk_path(f, key)), None)

    def disk_path(self, family, key: str) -> list[int]:
        """The module whose path on disk is `key`, where a rename gave it another."""
        row = self.row(key + family.modules.spelling.parts[0].suffix)
        return [] if row is None else np.flatnonzero(self.binder.rows[:, 0] == row).tolist()[:1]

    def near(self, key: str) -> str:
        """The nearest name: of all keys of the template that is most like this one."""
        told = {t: n for n in self.table.families for t in [_blank(n.template.replace(HOLE, "0"))]}
        for units in self.binder.units:
            for names, type in zip(units.targets, units.recipe.made.items):
                told |= {_blank(names[0] + type.spelling.part(p.role).suffix): Names(names[0] + type.spelling.part(p.role).suffix, np.zeros((1, 0)))
                         for p in type.parts if len(names)}  # fmt: skip
        help = nearest(_blank(key), told)
        word = help.split("`")[1] if help.startswith("did you mean") else ""
        return f"did you mean one like {told[word][0]}?" if word in told else "`quantrules inspect SRC` lists the keys of a source, `quantrules plan --json=units` all targets"

    # -------------------------------------------------------------------------------------------------------- saying

    def unit(self, units: Units, u: int, key: str) -> Iterator[tuple[str, tuple[str, ...]]]:
        recipe = units.recipe
        rule = next(r for r in self.rules if r.rule is units.rule)
        rows = dict(zip(recipe.slots, units.sources[u].tolist()))
        lines, asked = [], None
        for item in _some(range(len(recipe.took.items)), lambda i: units.paths[i][u] == key or any(self.table.name(r) == key for (j, _), r in rows.items() if j == i)):
            if item is None:
                lines.append(f"… {len(recipe.took.items)} members in all")
                continue
            type = recipe.took.items[item]
            asked = item if asked is None else asked
            lines.append(f"{units.paths[item][u]}  {_typed(type)}")
            lines += [f"    {self.stored(rows[item, p.role])}" for p in type.parts]
        yield "module" if len(recipe.took.items) == 1 else "members", tuple(lines)
        yield from self.renamed(units.paths[asked or 0][u], rows[asked or 0, recipe.took.items[asked or 0].parts[0].role], recipe.took.items[asked or 0])
        yield "rule", tuple(_rule_lines(rule))
        yield "steps", tuple(_step_lines(units))
        if recipe.checks:
            needs = dict.fromkeys(NEEDS.get(n.kind, n.kind + ": {}").format(", ".join(n.roles)) for n in recipe.checks)
            yield "checks", tuple(f"before a byte is written: {n}" for n in needs)
        yield "writes", tuple(_written(units, u, key))
        module = np.flatnonzero((self.binder.rows == units.sources[u, 0]).any(1))
        if len(module):
            yield from self.others(int(module[0]), rule.index, False)

    def stored(self, row: int) -> str:
        t = self.table
        return f"{t.name(row)}  {t.dtypes[t.dtype[row]]}[{', '.join(map(str, t.shapes[t.shape[row]]))}]  in {t.files[t.file[row]]}"

    def disk(self, module: int) -> Iterator[tuple[str, tuple[str, ...]]]:
        type, rows = self.binder.types[self.binder.type_of[module]], self.binder.rows[module]
        yield "module", (f"{self.binder.name_of(module)}  {_typed(type)}", *(f"    {self.stored(r)}" for r in rows.tolist() if r >= 0))
        yield from self.renamed(self.binder.name_of(module), int(rows[0]), type)

    def renamed(self, path: str, row: int, type: Type) -> Iterator[tuple[str, tuple[str, ...]]]:
        """The chain of renames from the path on disk to the one that rules see."""
        suffix = type.spelling.parts[0].suffix if self.table.name(row).endswith(type.spelling.parts[0].suffix) else ""
        name = self.table.name(row).removesuffix(suffix)
        if name == path:
            return
        family = next(f for f in self.binder.families if _place(f.names, path) is not None)
        chain = [f"{name}  on disk"]
        for rename in self.binder.scope.renames:
            if rename.when is not None and not evaluate(rename.when, self.binder.scope.env):
                continue
            one = binding.Family(Names(name, np.zeros((1, 0), np.int64)), 0, family.modules)
            new = binding._rename_family(self.binder, rename, one, self.binder.scope.env)[0].names[0]
            if new != name:
                chain.append(f"{new}  by `{_one_line(rename.span.source)}` ({rename.span})")
            name = new
        yield "renamed", tuple(chain)

    def others(self, module: int, taken: int, guess: bool) -> Iterator[tuple[str, tuple[str, ...]]]:
        """Rules that read the name and do not take it: those before the rule that does, and the first ones after it."""
        earlier = [(r, why) for r in self.rules[:taken] if (why := self.reason(r, module))]
        if earlier:
            yield "not by", tuple(f"{_place_of(r)}: {why}" for r, why in earlier)
        later = [r for r in self.rules[taken + 1 :] if self.reason(r, module) == ""]
        if later:
            yield "not by", tuple(f"{_place_of(r)}: it comes later, and the first match wins" for r in later[:2])
        if guess and not earlier and (near := self.nearest_rules(module)):
            yield "nearest", tuple(near)

    def reason(self, rule: BoundRule, module: int) -> str | None:
        """Why a rule does not take a module: None where its pattern reads no name of it, "" where nothing is against it."""
        path, env, type = self.binder.name_of(module), self.binder.scope.env, self.binder.types[self.binder.type_of[module]]
        suffixes = [type.spelling.part(p.role).suffix for p in type.parts]
        names = {path: "module"} | {path + s: "key" for s in suffixes if s}
        wanted = {"paths": ("module",), "keys": ("key",)}.get(rule.matches, ("module", "key"))
        found = None
        for source in rule.sources:
            for name, kind in names.items():
                for r in read_name(source.pattern, name, env):
                    if kind not in wanted and not (kind == "module" and "" in suffixes):
                        found = f"`{rule.steps[0].op.name}` reads " + (f"modules, and {name} is a tensor's key" if kind == "key" else f"keys, and {name} is a module's path")
                    elif kind == "key" and not type.is_dense and rule.steps[0].op.name != "drop":
                        found = f"{name} is one tensor of a {type.format.name} module, which is taken whole"
                    elif left_out := next((e for e in rule.excepts if read_name(e, name, env)), None):
                        return f"`except {pattern(left_out)}` leaves it out"
                    elif rule.rule.when is not None and (why := _false(rule.rule.when, r, type, env)):
                        return why
                    else:
                        return "" if not rule.rule.also else "it reads it too, as `also` says"
        return found

    def nearest_rules(self, module: int) -> list[str]:
        """Rules whose pattern reads the end of the name."""
        path, lines = self.binder.name_of(module), []
        for rule in self.rules:
            for source in rule.sources:
                longer = evolve(source.pattern, nodes=(ast.Star(), ast.Lit("."), *source.pattern.nodes))
                if reads := read_name(longer, path, self.binder.scope.env):
                    lines.append(f"{_place_of(rule)}: it reads the end of the name, without `{reads[0].stars[0][0]}.`")
        return lines[:3]


def _place(names: Names, text: str) -> int | None:
    """Where a text stands among names."""
    if isinstance(names, Texts):
        return names.texts.index(text) if text in names.texts else None
    found = re.fullmatch("(0|[1-9][0-9]{0,17})".join(map(re.escape, names.template.split(HOLE))), text, re.DOTALL)
    if found is None:
        return None
    at = np.flatnonzero((names.digits == np.array([*map(int, found.groups())], np.int64)).all(1))
    return int(at[0]) if len(at) else None


def _writes(units: Units, key: str) -> Iterator[int]:
    """The units that write a key, or a module of this path."""
    for names, type in zip(units.targets, units.recipe.made.items):
        for suffix in {"", *(type.spelling.part(p.role).suffix for p in type.parts)}:
            if key.endswith(suffix) and (at := _place(names, key.removesuffix(suffix))) is not None:
                yield at


def _blank(name: str) -> str:
    return re.sub(r"\d+", "0", name)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _place_of(rule: BoundRule) -> str:
    text = str(rule)
    return f"line {rule.rule.span.text.position(rule.rule.span.start)[0]} `{text if len(text) < 80 else text[:79] + '…'}`"


def _rule_lines(rule: BoundRule) -> Iterator[str]:
    yield f"{rule.rule.span}" + (f", section {rule.section}" if rule.section else "")
    yield str(rule)
    whole = ", ".join(pattern(s.pattern) for s in rule.sources)
    if whole not in str(rule):
        yield f"which reads {whole}" + (f" and writes {', '.join(map(pattern, rule.targets))}" if rule.rule.targets else "")


def _typed(type: Type) -> str:
    return str(type) if type.is_dense else f"{type}, spelling {type.spelling.name}"


def _types(grid: Grid[Type]) -> str:
    """`nvfp4[256, 7168] × 2, bf16[4]`"""
    counts: dict[str, int] = {}
    for t in grid.items:
        counts[str(t)] = counts.get(str(t), 0) + 1
    return ", ".join(f"{t} × {n}" if n > 1 else t for t, n in counts.items()) or "nothing"


def _step_lines(units: Units) -> Iterator[str]:
    recipe = units.recipe
    if not recipe.steps:
        yield f"{_types(recipe.took)}, {'copied byte for byte' if recipe.made.items else 'dropped'}"
        return
    width = max(len(str(s)) for s in recipe.steps)
    yield f"{'':{width}}   {_types(recipe.took)}"
    for step in recipe.steps:
        yield f"{step!s:{width}} → {_types(step.made)}" + (f"  ({label})" if (label := step.op.label(step)) != "exact" else "")


def _written(units: Units, u: int, key: str) -> Iterator[str]:
    keys = units.target_keys(u)
    if not keys:
        yield "nothing"
    for one in _some(keys, lambda k: k[0] == key):
        yield f"… {len(keys)} keys in all" if one is None else f"{one[0]}  {units.recipe.made.items[one[1]].part(one[2])}"


def _some(items, wanted) -> list:
    """The first few and the one that is asked for; None at the end stands for the others."""
    items = list(items)
    if len(items) <= SHOWN + 1:
        return items
    first = [i for i in items if wanted(i)][:1] + items[:SHOWN]
    return [*dict.fromkeys(first), None]


def _false(when, read, type: Type, env) -> str:
    """What makes a condition false, or "" where it holds."""
    known = {"dtype": type.dtype if type.is_dense else "", "format": type.format.name, "shape": list(type.shape)}
    known |= {n: int(v[0]) if v[0].isdigit() else v[0] for n, v in read.named.items()}
    try:
        if evaluate(when, env.extend(known)):
            return ""
    except QuantrulesError as error:
        return f"`when {expression(when)}` has no value: {error.diagnostics[0].message}"
    used = [n for n in sorted(free_names(when)) if n in known or n in env.names]
    values = ", ".join(f"{n} = {known.get(n, env.names.get(n))}" for n in used)
    return f"`when {expression(when)}` is false" + (f": {values}" if values else "")
