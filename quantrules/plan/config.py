"""What config.json and its like say of the output: the rules' edits, and a quantization config made anew from the outputs.

Names in it are those of the modules that are written, so they follow every rename, fusion and change of format by
themselves. How a dialect says it is data (`dialect` blocks of formats.rules).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from quantrules.diagnostics import Diagnostic, RuleError, define
from quantrules.formats import declared
from quantrules.formats.detect import Modules
from quantrules.formats.load import Dialect
from quantrules.formats.select import select
from quantrules.formats.values import OMIT, value_of
from quantrules.lang import ast
from quantrules.lang.evaluate import evaluate, walk
from quantrules.lang.mistakes import nearest
from quantrules.names import HOLE, Names, fill
from quantrules.plan.bind import canonical
from quantrules.types import FLOATS, Format, Type

QR_DIALECT = define("QR430", "No dialect, or more than one, can say what the output holds")
QR_ACT = define("QR431", "Activation scales that only some modules have, or that the dialect needs")
QR_CLASH = define("QR432", "Two parts of a dialect that say different things")
QR_EDIT = define("QR433", "A config edit that does not fit the config")

ROOT, (KEY,) = declared.PLACES[0]
NOT_LINEAR = ("embed", "norm", "wte", "wpe")  # within the last segment of a path: matrices that no list needs to name
MANY = 16  # with more numbered children than this, a parent is listed for them


@frozen(eq=False)
class Out:
    """Modules that a plan writes, of one template and type."""

    names: Names
    type: Type


def derive(plan, configs: Mapping[str, Any], scope, dialects: Sequence[Dialect]) -> tuple[dict[str, Any], list[Diagnostic]]:
    """The config files of a plan's output by name, and what is wrong with them.

    A plan that changes formats, spellings or names makes its quantization config anew, in the source's dialect where
    that can say it, unless the rules set, keep or delete it; `derive(DIALECT)` names the dialect. Files of the source
    that are not in the result are not written.
    """
    findings: list[Diagnostic] = []
    files, sections = deepcopy(dict(configs)), declared.read_sections(configs, scope.formats, dialects)[0]
    whole = [e for e in scope.edits if e.path == (KEY,)]
    asked = whole[-1] if whole and _asks(whole[-1]) else None
    remade = asked is not None or not whole and bool(files.get(ROOT)) and _changed(plan, scope.formats, bool(sections))
    parts = [e for e in scope.edits if e.path[0] == KEY and len(e.path) > 1]  # stand beside what is derived
    for edit in scope.edits:
        if _asks(edit) and (edit.path != (KEY,) or edit.op != "="):
            findings.append(
                Diagnostic(QR_EDIT, "derive() makes a whole quantization config", edit.span, help=f"write `config.{KEY} = derive(DIALECT)`")
            )
        elif not _asks(edit) and not (remade and edit in parts):
            _apply(files, edit, scope, findings)
    outs = list(_outputs(plan))
    if remade:
        files.setdefault(ROOT, {})
        _Maker(plan, configs, files, sections, outs, dialects, scope.formats, findings).make(asked)
        for edit in parts:
            _apply(files, edit, scope, findings)
    if (remade or whole or parts) and not any(d.severity == "error" for d in findings):
        findings += _check(files, outs, scope.formats, dialects, bool(parts) or bool(whole) and not asked)
    return {name: content for name, content in files.items() if content is not None}, findings


# ---------------------------------------------------------------------------------------------------------------- edits


def _asks(edit: ast.ConfigEdit) -> bool:
    return isinstance(edit.value, ast.Apply) and edit.value.function == "derive"


def _apply(files: dict[str, Any], edit: ast.ConfigEdit, scope, findings: list[Diagnostic]) -> None:
    """One edit of config.json. Its expression reads the source's config, whatever edits came before."""

    def refuse(reason: str, help: str = "", severity: str = "error") -> None:
        findings.append(Diagnostic(QR_EDIT, f"config.{'.'.join(edit.path)}: {reason}", edit.span, help=help, severity=severity))

    config, key = files.setdefault(ROOT, {}), edit.path[-1]
    for step in edit.path[:-1]:
        inner = config.setdefault(step, {}) if edit.op == "=" else config.get(step)
        if not isinstance(inner, dict):
            return refuse(f"{step} is {'absent' if inner is None else 'not an object'}")
        config = inner
    old = config.get(key)
    if edit.op == "delete":
        return refuse("is not there to delete", nearest(key, config), "warning") if config.pop(key, OMIT) is OMIT else None
    try:
        value = evaluate(edit.value, scope.env)
    except RuleError as error:
        findings += error.diagnostics
        return None
    if edit.op == "=":
        config[key] = value
    elif isinstance(old, list):
        config[key] = old + (value if isinstance(value, list) else [value])
    elif isinstance(old, dict) and isinstance(value, dict):
        config[key] = {**old, **value}
    else:
        refuse("is no list or object that += could add to", f"write `config.{'.'.join(edit.path)} = …`")


# -------------------------------------------------------------------------------------------------------------- outputs


def _outputs(plan) -> Iterable[Out]:
    """Every module that the plan writes, by template and type."""
    for units in plan.units:
        for names, type in zip(units.targets, units.recipe.made.items):
            for whole in canonical(names, "") if len(names) else ():
                yield Out(whole, type)


def _changed(plan, formats: Mapping[str, Format], named: bool) -> bool:
    """Whether formats, spellings or parts differ from the source, or (where a config names modules) names do."""

    def kinds(types: Iterable[Type]) -> set:
        return {(t.format.name, t.spelling.name if not t.is_dense else "", tuple(p.role for p in t.parts)) for t in types}

    def renamed(a: Names, b: Names) -> bool:
        plain = type(a) is type(b) is Names and a.template == b.template
        return not np.array_equal(a.digits, b.digits) if plain else list(a) != list(b)

    companions = tuple(p.suffix for f in formats.values() if not f.is_dense for s in f.spellings for p in s.parts[1:])
    for units in plan.units:
        took, made = units.recipe.took.items, units.recipe.made.items
        if not made:  # dropped: a module that the config counts, or an activation scale
            if not all(t.is_dense for t in took) or any(len(p) and p[0].endswith(companions) for p in units.paths):
                return True
        elif kinds(took) != kinds(made) or named and any(map(renamed, units.targets, units.paths)):
            return True
    return False


@frozen(eq=False)
class _Maker:
    """Makes the quantization config of a plan's outputs, into `files`."""

    plan: Any
    configs: Mapping[str, Any]
    files: dict[str, Any]
    sections: list[declared.Section]
    outs: list[Out]
    dialects: Sequence[Dialect]
    formats: Mapping[str, Format]
    findings: list[Diagnostic]
    dense: dict[str, list[str]] = field(factory=dict)  # dialect -> its list of dense modules
    used: dict[tuple[str, str], list[Out]] = field(init=False, factory=dict)  # (format, spelling) -> what is written in it

    def __attrs_post_init__(self) -> None:
        for out in self.outs:
            if not out.type.is_dense:
                self.used.setdefault((out.type.format.name, out.type.spelling.name), []).append(out)

    def make(self, asked: ast.ConfigEdit | None) -> None:
        places = declared.PLACES
        place = next((p for p in places if p[0] == ROOT and declared.look_up(self.files, p) is not None), places[0])
        for file, path in places:  # the old ones go, whatever comes
            if file != ROOT:
                self.files[file] = None
            elif isinstance(inner := declared.look_up(self.files, (file, path[:-1])), dict):
                inner.pop(path[-1], None)
        own = self.sections[0] if self.sections else None
        dialect = self.choose(asked, own) if self.used else None
        if dialect is None:
            return
        same = own is not None and own.dialect is dialect
        section = self.section(dialect)
        declared.look_up(self.files, (place[0], place[1][:-1]))[KEY] = {**self.carried(own), **section} if same else section
        said: dict[str, dict[str, Any]] = {}
        for name, format, template in dialect.files:
            if format == "any" or any(f == format for f, _ in self.used):
                more, before = self.filled(dialect, format, "", template), said.get(name, {})
                for key in sorted(more.keys() & before.keys()):
                    if more[key] != before[key]:
                        message = f"{name}: {key} is said to be {before[key]!r} and {more[key]!r}"
                        help = f"dialect {dialect.name} has one {key} for the whole output"
                        self.findings.append(Diagnostic(QR_CLASH, message, help=help))
                said[name] = _merged(before, more)
        for name, content in said.items():
            old = self.files[ROOT] if name == ROOT else self.configs.get(name, {}) if same else {}
            self.files[name] = _merged(old, content)

    # ------------------------------------------------------------------------------------------------------- dialects

    def holds(self, dialect: Dialect) -> bool:
        entries = {(f, s) for f, s, _ in dialect.entries}
        return all((f, s) in entries or (f, "") in entries for f, s in self.used)

    def choose(self, asked: ast.ConfigEdit | None, own: declared.Section | None) -> Dialect | None:
        """The dialect that the rules name, the source's own, or the only one that holds the output and is read back."""
        held, span = ", ".join(f"{f} ({s})" for f, s in self.used), asked.value.span if asked is not None else None
        fit = [d for d in self.dialects if self.holds(d)]
        if asked is not None:
            arg = asked.value.args[0] if len(asked.value.args) == 1 else None
            name = arg.name if isinstance(arg, ast.Name) else getattr(arg, "value", None)
            named = next((d for d in self.dialects if d.name == name), None)
            if named in fit:
                return named
            message = f"dialect {name} cannot say {held}" if named else f"there is no dialect {name}"
            help = "" if named else nearest(str(name), [d.name for d in self.dialects])
        elif own is not None and own.dialect in fit:
            return own.dialect
        else:
            fit = [d for d in fit if declared.recognised({**self.files[ROOT], **self.section(d, quiet=True)}, self.dialects) is d]
            if len(fit) == 1:
                return fit[0]
            which = f"{' and '.join(d.name for d in fit)} both can" if fit else "no dialect can"
            message, help = f"the output holds {held}, and {which} say that in a quantization config", ""
        advice = (
            f"write `config.{KEY} = derive({fit[0].name})`"
            if fit
            else (f"use `pack(SPELLING)` so that one dialect holds all, or set `config.{KEY} = {{…}}` yourself")
        )
        self.findings.append(Diagnostic(QR_DIALECT, message, span, help=help or advice))
        return None

    # -------------------------------------------------------------------------------------------------------- content

    def section(self, dialect: Dialect, quiet: bool = False) -> dict[str, Any]:
        section, before = {}, len(self.findings)
        several = ("several",) if len(self.used) > 1 else ()
        for format, spelling, template in dialect.entries:
            if format in ("any", *several) or any(f == format and spelling in ("", s) for f, s in self.used):
                section = _merged(section, self.filled(dialect, format, spelling, template))
        if quiet:
            del self.findings[before:]
        return section

    def carried(self, own: declared.Section) -> dict[str, Any]:
        """What the source's section says beyond its dialect's templates (a cache's scheme, the producer): it stays."""
        d = own.dialect
        said = {*d.ignore, d.groups, d.layers, *(key for _, _, template in d.entries for key, _ in template.items)}
        return {k: deepcopy(v) for k, v in own.content.items() if k not in said}

    def filled(self, dialect: Dialect, format: str, spelling: str, template: ast.Expression) -> dict[str, Any]:
        """A template with its placeholders filled."""
        outs = [o for (f, s), many in self.used.items() if f == format and spelling in ("", s) for o in many]
        asks = {n.name for n in walk(template) if isinstance(n, ast.Name)}
        scope: dict[str, Any] = {"omit": OMIT, "several": int(len(self.used) > 1)}
        if "dense_modules" in asks:
            if dialect.name not in self.dense:
                self.dense[dialect.name] = self.dense_modules(dialect)
            scope["dense_modules"] = self.dense[dialect.name]
        if outs:
            block = outs[0].type.format.block
            scales = sorted({p.dtype for o in outs for p in o.type.parts if p.role == "scale"})
            if len(scales) > 1 and "scale" in asks:
                self.findings.append(
                    Diagnostic(
                        QR_CLASH, f"{format} is written with scales in {' and in '.join(scales)}, and dialect {dialect.name} says one dtype for all"
                    )
                )
            act = self.act(dialect, format, outs)
            scope |= {"block": list(block), "group": block[-1], "scale": scales[0] if scales else None, "act": act}
            if "modules" in asks and scope["several"]:
                scope["modules"] = _listed(outs, self.outs, dialect.style)
        return value_of(template, scope)

    def act(self, dialect: Dialect, format: str, outs: list[Out]) -> int:
        """1 where all modules have an activation scale, 0 where none has."""
        lacking = [o for o in outs if o.type.part("act") is None]
        if lacking and (len(lacking) < len(outs) or format in dialect.acts):
            part = lacking[0].type.spelling.part("act")
            why = "others have one" if len(lacking) < len(outs) else f"what reads {dialect.name} takes garbage for it"
            reason = f"written without {part.suffix if part else 'an activation scale'}, and {why}"
            help = "give scales with --input-scales FILE, drop those of all, or keep these modules dense"
            finding = declared.about(QR_ACT, lacking[0].names, reason, help)
            if finding not in self.findings:
                self.findings.append(finding)
        return int(not lacking)

    def dense_modules(self, dialect: Dialect) -> list[str]:
        """Matrices left dense, in full; names of the old list that the files never held, and those that tying leaves out."""
        ends = {self.formats[f].spelling(s).dense for f, s in self.used}
        matrices = [o for o in self.outs if o.type.is_dense and o.type.dtype in FLOATS and len(o.type.shape) >= 2]
        matrices = [o for o in matrices if o.type.spelling.parts[0].suffix in ends or len(o.type.shape) > 2]
        matrices = [o for o in matrices if not any(w in o.names.template.rsplit(".", 1)[-1].lower() for w in NOT_LINEAR)]
        never = select(dialect.dense, [o.names for o in matrices], "globs").masks
        chosen = [Out(o.names.take(~mask), o.type) for o, mask in zip(matrices, never)]
        names = _parents_of_many(chosen, self.outs, dialect.style)
        old = [e for s in self.sections[:1] if s.dialect is dialect for e in s.ignore if not any(c in e for c in "*?[:")]
        names += select(old, self.plan.table.families, "globs").missed
        names += dialect.tied if self.files[ROOT].get("tie_word_embeddings") else ()
        return list(dict.fromkeys(names))


def _merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """b over a, object by object; a null gives way to what is there (a cache's scheme that no rule touches)."""
    made = dict(a)
    for key, value in b.items():
        if isinstance(made.get(key), dict) and isinstance(value, dict):
            made[key] = _merged(made[key], value)
        elif value is not None or key not in made:
            made[key] = value
    return made


def _parents_of_many(chosen: list[Out], outs: list[Out], style: str) -> list[str]:
    """Names in full, but a parent whose many numbered children (experts) are all chosen stands for them."""

    def children(many: Iterable[Out]) -> dict[tuple[str, tuple], int]:
        counts: dict[tuple[str, tuple], int] = {}
        for o in many:
            if len(o.type.shape) >= 2 and o.names.template.count(HOLE) >= 2:
                rows, sizes = np.unique(o.names.digits[:, :-1], axis=0, return_counts=True)
                for row, size in zip(map(tuple, rows.tolist()), sizes.tolist()):
                    counts[parent(o), row] = counts.get((parent(o), row), 0) + size
        return counts

    def parent(o: Out) -> str:
        return o.names.template[: max(o.names.template.rfind(HOLE), 0)].rstrip(".")

    total = children(outs)
    folded = {k for k, n in children(chosen).items() if n > MANY and total[k] == n}
    found: dict[tuple, str] = {}
    for o in chosen:
        for digits, name in zip(map(tuple, o.names.digits.tolist()), o.names):
            if (parent(o), digits[:-1]) in folded:
                name = fill(parent(o), digits[:-1])
                name = {"globs": name + "*", "regex": f"re:{re.escape(name)}\\..*"}.get(style, name)
            found[digits[:1], name] = name
    return [found[k] for k in sorted(found)]


def _listed(mine: list[Out], outs: list[Out], style: str) -> list[str]:
    """Targets of one of several groups: a pattern for a template that is all in the group, else names in full."""
    ids = {id(o) for o in mine}
    mixed = {o.names.template for o in outs if id(o) not in ids and len(o.type.shape) >= 2}
    pattern = {"regex": ("re:^", r"\d+", "$"), "globs": ("", "*", "")}.get(style)
    made: list[str] = []
    for o in mine:
        if pattern is None or o.names.template in mixed or HOLE not in o.names.template:
            made += list(o.names)
        else:
            pieces = [re.escape(p) if style == "regex" else p for p in o.names.template.split(HOLE)]
            made.append(pattern[0] + pattern[1].join(pieces) + pattern[2])
    return list(dict.fromkeys(made))


def _check(files: Mapping[str, Any], outs: list[Out], formats, dialects, by_rule: bool) -> list[Diagnostic]:
    """The output's configs against the output, as a reader would find them.

    Entries that match nothing are errors where rules wrote them; where they were derived, the source's were told already.
    """
    modules = [
        Modules(o.names, o.type.format, o.type.spelling, (), np.zeros((len(o.names), 0), np.int32), np.full(len(o.names), i, np.int32))
        for i, o in enumerate(outs)
    ]
    found = declared.check_declared(modules, [o.type for o in outs], declared.read_sections(files, formats, dialects)[0], formats)
    kept = [evolve(d, message=f"in the output, {d.message}") for d in found if d.code != declared.QR_NO_MATCH or by_rule]
    return [evolve(d, severity="error") if d.code == declared.QR_NO_MATCH and d.severity == "warning" else d for d in kept]
