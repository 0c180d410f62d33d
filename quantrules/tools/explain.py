"""Why a key goes where it goes: the rule that reads or writes it, step by step with types, and why other rules do not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import numpy as np
from attrs import evolve, frozen

from quantrules.diagnostics import Diagnostic, QuantrulesError, define, visible
from quantrules.lang import ast, evaluate, free_names
from quantrules.lang.mistakes import nearest
from quantrules.lang.printer import expression, pattern
from quantrules.names import HOLE, KeyTable, Names
from quantrules.plan import bind as binding
from quantrules.plan.bind import Binder, Texts
from quantrules.plan.model import Plan, Units
from quantrules.plan.reading import as_value, read_name
from quantrules.plan.scope import BoundRule
from quantrules.types import Grid, Type

NO_KEY = define("QR091", "A key that is neither read nor written")

SHOWN = 4  # modules or keys of a unit that are listed; 384 experts do not help
NEEDS = {
    "scales": "every number of {} is finite and not negative",
    "equal": "{} of the members are equal, byte for byte",
    "exact-align": "{} of the members can be aligned without rounding",
}

Facts = Iterator[tuple[str, list[str]]]  # headings with lines


@frozen
class Explanation:
    """What there is to say of one key, as headings with lines."""

    key: str
    facts: tuple[tuple[str, list[str]], ...]

    def render(self) -> str:
        width = max(len(head) for head, _ in self.facts)
        lines = [(head if i == 0 else "", line) for head, lines in self.facts for i, line in enumerate(lines)]
        return "\n".join([visible(self.key), *(f"  {head:{width}}  {visible(line)}".rstrip() for head, line in lines)])


def explain(plan: Plan, keys: Iterable[str]) -> tuple[list[Explanation], list[Diagnostic]]:
    """For each key of the source or the target, or path of a module: an explanation for each unit that it is part of.

    Keys that are neither read nor written are the second result. Of rules that could not be read there is nothing to say.
    """
    if plan.scope.failed:
        return [], []
    teller = _Teller(plan.table, plan.binder)
    explained, unknown = [], []
    for key in keys:
        found = [Explanation(key, tuple(facts)) for facts in teller.tell(key)]
        explained += found
        if not found:
            unknown.append(Diagnostic(NO_KEY, f"{key} is neither read nor written", help=teller.near(key)))
    return explained, unknown


@frozen(eq=False)
class _Teller:
    table: KeyTable
    binder: Binder

    @property
    def rules(self) -> list[BoundRule]:
        return self.binder.scope.rules

    def tell(self, key: str) -> Iterator[Facts]:
        row = self.row(key)
        module = self.module(key, row)
        if row is None and module is not None:
            row = int(self.binder.rows[module, 0])
        for units in self.binder.units:
            readers = np.flatnonzero((units.sources == row).any(1)).tolist() if row is not None else ()
            for u in sorted({*readers, *_writers(units, key)}):
                yield self.unit(units, u, key)
        if module is not None and self.binder.owner[module] < 0:
            yield self.untaken(module)

    # ------------------------------------------------------------------------------------------------------- finding

    def row(self, key: str) -> int | None:
        found = ((rows, _place(names, key)) for names, rows in zip(self.table.families, self.table.rows))
        return next((int(rows[at]) for rows, at in found if at is not None), None)

    def module(self, key: str, row: int | None) -> int | None:
        """The module that has a tensor, or this path, before or after renames."""
        for family in self.binder.families:
            if row is None and (at := _place(family.names, key)) is not None:
                return family.first + at
        suffixes = dict.fromkeys(f.modules.spelling.parts[0].suffix for f in self.binder.families)
        rows = [row] if row is not None else [r for s in suffixes if (r := self.row(key + s)) is not None]
        found = np.flatnonzero(np.isin(self.binder.rows, rows).any(1))
        return int(found[0]) if len(found) else None

    def near(self, key: str) -> str:
        """The nearest name: the first key of the template that is most like this one."""
        names = [n[0] for n in self.table.families]
        names += [k for units in self.binder.units for k, _, _ in units.target_keys(0)]
        known = {re.sub(r"\d+", "0", n): n for n in reversed(names)}
        help = nearest(re.sub(r"\d+", "0", key), known)
        word = help.split("`")[1] if help.startswith("did you mean") else ""
        return f"did you mean one like {known[word]}?" if word in known else "`quantrules inspect SRC` shows what there is"

    # -------------------------------------------------------------------------------------------------------- saying

    def unit(self, units: Units, u: int, key: str) -> Facts:
        recipe, rule = units.recipe, next(r for r in self.rules if r.rule is units.rule)
        took, rows = recipe.took.items, dict(zip(recipe.slots, units.sources[u].tolist()))
        names = {i: {units.paths[i][u], *(self.table.name(rows[i, p.role]) for p in t.parts)} for i, t in enumerate(took)}
        listed, rest = _some(list(names), lambda i: key in names[i], "members")
        modules = [self.stored(units.paths[i][u], took[i], [rows[i, p.role] for p in took[i].parts]) for i in listed]
        yield "members" if len(took) > 1 else "module", [line for lines in modules for line in lines] + rest
        yield from self.renamed(units.paths[listed[0]][u], rows[listed[0], took[listed[0]].parts[0].role], took[listed[0]])
        yield "rule", list(_rule_lines(rule))
        yield "steps", list(_step_lines(units))
        needs = dict.fromkeys(NEEDS.get(n.kind, n.kind).format(", ".join(n.roles)) for n in recipe.checks)
        if needs:
            yield "checks", [f"before a byte is written: {n}" for n in needs]
        keys, rest = _some(units.target_keys(u), lambda k: k[0] == key, "keys")
        yield "writes", [f"{k}  {recipe.made.items[i].part(role)}" for k, i, role in keys] + rest or ["nothing"]
        module = np.flatnonzero((self.binder.rows == units.sources[u, 0]).any(1))
        if len(module):
            yield from self.others(int(module[0]), rule.index)

    def untaken(self, module: int) -> Facts:
        type, rows = self.type(module), [r for r in self.binder.rows[module].tolist() if r >= 0]
        yield "module", self.stored(self.binder.name_of(module), type, rows)
        yield from self.renamed(self.binder.name_of(module), rows[0], type)
        yield "rule", ["none takes it"]
        yield from self.others(module, len(self.rules))

    def type(self, module: int) -> Type:
        return self.binder.types[self.binder.type_of[module]]

    def stored(self, path: str, type: Type, rows: list[int]) -> list[str]:
        t = self.table
        tensors = [f"{t.name(r)}  {t.dtypes[t.dtype[r]]}{list(t.shapes[t.shape[r]])}  in {t.files[t.file[r]]}" for r in rows]
        return [f"{path}  {type}" + ("" if type.is_dense else f", spelling {type.spelling.name}"), *("    " + x for x in tensors)]

    def renamed(self, path: str, row: int, type: Type) -> Facts:
        """The chain of renames from the path on disk to the one that rules see."""
        name = self.table.name(row).removesuffix(type.spelling.parts[0].suffix)
        if name == path:
            return
        chain, env = [f"{name}  on disk"], self.binder.scope.env
        modules = next(f for f in self.binder.families if _place(f.names, path) is not None).modules
        for rename in self.binder.scope.renames:
            if rename.when is None or evaluate(rename.when, env):
                one = binding.Family(Names(name, np.zeros((1, 0), np.int64)), 0, modules)
                new = binding.rename_family(self.binder, rename, one, env)[0].names[0]
                if new != name:
                    chain.append(f"{new}  by `{' '.join(rename.span.source.split())}` ({rename.span})")
                name = new
        yield "renamed", chain

    def others(self, module: int, taken: int) -> Facts:
        """Rules that read the name and do not take it: those before the rule that does, and the first ones after it."""
        said = [f"{_line(r)}: {why}" for r in self.rules[:taken] if (why := self.reason(r, module))]
        later = [
            f"{_line(r)}: it comes later, and the first match wins"
            for r in self.rules[taken + 1 :]
            if self.reason(r, module) == ""
        ]
        if said or later:
            yield "not by", said + later[:2]
        near = [] if said or taken < len(self.rules) else list(self.ends(module))
        if near:
            yield "nearest", near[:3]

    def reason(self, rule: BoundRule, module: int) -> str | None:
        """Why a rule does not take a module: None where its pattern reads no name of it, "" where nothing is against it."""
        path, env, type, found = self.binder.name_of(module), self.binder.scope.env, self.type(module), None
        keys = {path + type.spelling.part(p.role).suffix for p in type.parts}
        op = rule.steps[0].op
        for source in rule.sources:
            for name in (path, *sorted(keys - {path})):
                for read in read_name(source.pattern, name, env):
                    left_out = next((e for e in rule.excepts if read_name(e, name, env)), None)
                    if op.matches == "paths" and name != path:
                        found = f"`{op.name}` reads modules, and {name} is a tensor's key"
                    elif op.matches == "keys" and name not in keys:
                        found = f"`{op.name}` reads keys, and {name} is a module's path"
                    elif name != path and not type.is_dense and op.name != "drop":
                        found = f"{name} is one tensor of a {type.format.name} module, which is taken whole"
                    elif left_out:
                        return f"`except {pattern(left_out)}` leaves it out"
                    elif rule.rule.also:
                        return "it reads it too, as `also` says"
                    else:
                        return _false(rule.rule.when, read, type, env)
        return found

    def ends(self, module: int) -> Iterator[str]:
        """Rules whose pattern reads the end of a name."""
        for rule in self.rules:
            for source in rule.sources:
                longer = evolve(source.pattern, nodes=(ast.Star(), ast.Lit("."), *source.pattern.nodes))
                for read in read_name(longer, self.binder.name_of(module), self.binder.scope.env):
                    yield f"{_line(rule)}: it reads the end of the name, without `{read.stars[0][0]}.`"


def _place(names: Names, text: str) -> int | None:
    """Where a text stands among names."""
    if isinstance(names, Texts):
        return names.texts.index(text) if text in names.texts else None
    found = re.fullmatch("(0|[1-9][0-9]{0,17})".join(map(re.escape, names.template.split(HOLE))), text, re.DOTALL)
    if found is None:
        return None
    at = np.flatnonzero((names.digits == np.array([*map(int, found.groups())], np.int64)).all(1))
    return int(at[0]) if len(at) else None


def _writers(units: Units, key: str) -> Iterator[int]:
    """The units that write a key, or a module of this path."""
    for names, type in zip(units.targets, units.recipe.made.items):
        for suffix in {"", *(type.spelling.part(p.role).suffix for p in type.parts)}:
            if key.endswith(suffix) and (at := _place(names, key.removesuffix(suffix))) is not None:
                yield at


def _some(items: list, asked, what: str) -> tuple[list, list[str]]:
    """The first few with the one that is asked for, which then comes first, and a line that stands for the others."""
    if len(items) <= SHOWN + 1:
        return items, []
    first = [i for i in items if asked(i)][:1]
    return list(dict.fromkeys(first + items[:SHOWN])), [f"… {len(items)} {what} in all"]


def _line(rule: BoundRule) -> str:
    text = str(rule)
    return f"line {rule.rule.span.text.position(rule.rule.span.start)[0]} `{text if len(text) < 80 else text[:79] + '…'}`"


def _rule_lines(rule: BoundRule) -> Iterator[str]:
    yield f"{rule.rule.span}" + (f", section {rule.section}" if rule.section else "")
    yield str(rule)
    whole = ", ".join(pattern(s.pattern) for s in rule.sources)
    if whole not in str(rule):  # within `under`, or a group of `fuse`
        yield f"which reads {whole}" + (f" and writes {', '.join(map(pattern, rule.targets))}" if rule.rule.targets else "")


def _step_lines(units: Units) -> Iterator[str]:
    recipe = units.recipe
    if not recipe.steps:
        yield f"{_types(recipe.took)}, {'copied byte for byte' if recipe.made.items else 'dropped'}"
        return
    width = max(len(str(s)) for s in recipe.steps)
    yield f"{'':{width}}   {_types(recipe.took)}"
    for step in recipe.steps:
        label = step.op.label(step)
        yield f"{step!s:{width}} → {_types(step.made)}" + (f"  ({label})" if label != "exact" else "")


def _types(grid: Grid[Type]) -> str:
    """`nvfp4[256, 7168] × 2, bf16[4]`"""
    counts: dict[str, int] = {}
    for t in grid.items:
        counts[str(t)] = counts.get(str(t), 0) + 1
    return ", ".join(f"{t} × {n}" if n > 1 else t for t, n in counts.items())


def _false(when: ast.Expression | None, read, type: Type, env) -> str:
    """What makes a condition false, or "" where it holds."""
    known = {"dtype": type.dtype if type.is_dense else "", "format": type.format.name, "shape": list(type.shape)}
    known |= {n: as_value(v[0]) for n, v in read.named.items()}
    try:
        if when is None or evaluate(when, env.extend(known)):
            return ""
    except QuantrulesError as error:
        return f"`when {expression(when)}` has no value: {error.diagnostics[0].message}"
    used = {n: {**env.names, **known}[n] for n in sorted(free_names(when)) if n in known or n in env.names}
    values = ", ".join(f"{n} = {v}" for n, v in used.items())
    return f"`when {expression(when)}` is false" + (f": {values}" if values else "")
