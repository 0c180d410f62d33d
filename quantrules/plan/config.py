"""What config.json and its like say of the output: the rules' edits, and a quantization config made anew from the outputs.

Names in it are those of the modules that are written, so they follow every rename, fusion and change of format by
themselves. How a dialect says it is data (`dialect` blocks of formats.rules).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import numpy as np
from attrs import evolve, frozen

from quantrules.diagnostics import Diagnostic, RuleError, define
from quantrules.formats.declared import PLACES, QR_NO_MATCH, ROOT, Section, check_declared, look_up, read_sections
from quantrules.formats.detect import Modules
from quantrules.formats.load import Dialect
from quantrules.formats.select import select
from quantrules.formats.values import OMIT, value_of
from quantrules.lang import ast
from quantrules.lang.evaluate import evaluate, walk
from quantrules.lang.mistakes import nearest
from quantrules.names import HOLE, Names, families, fill
from quantrules.types import FLOATS, Type

QR_DIALECT = define("QR430", "No dialect, or more than one, can say what the output holds")
QR_ACT = define("QR431", "Activation scales that only some modules have, or that the dialect needs")
QR_CLASH = define("QR432", "Two parts of a dialect that say different things")
QR_EDIT = define("QR433", "A config edit that does not fit the config")

KEY = PLACES[0][1][0]
NOT_LINEAR = ("embed", "norm", "wte", "wpe")  # within the last segment of a path: matrices that no list needs to name
MANY = 16  # numbered children of one parent that are listed as the parent


@frozen(eq=False)
class Out:
    """Modules that a plan writes, of one template and type."""

    names: Names
    type: Type


def derive(plan, configs: Mapping[str, Any], scope, dialects: tuple[Dialect, ...]) -> tuple[dict[str, Any], list[Diagnostic]]:
    """The config files of a plan's output by name, and what is wrong with them.

    A plan that changes formats, spellings or names makes its quantization config anew, in the source's dialect where
    that can say it, unless the rules set, keep or delete it; `derive(DIALECT)` names the dialect. Files of the source
    that are not in the result are not written.
    """
    files, findings = deepcopy(dict(configs)), []
    asked = _edit(files, scope, findings)
    if not files.get(ROOT) or not dialects:
        return files, findings
    sections, _ = read_sections(configs, scope.formats, dialects)
    outs = list(_outputs(plan))
    if asked is None and not _changed(plan, scope.formats, bool(sections)):
        return files, findings
    by_rule = [e for e in scope.edits if e.path[0] == KEY and not _asks(e)]
    if asked is not None or not any(len(e.path) == 1 for e in by_rule):
        _Maker(plan, configs, files, sections, outs, dialects, scope.formats, findings).make(asked)
        for edit in (e for e in by_rule if len(e.path) > 1):  # parts of it that the rules set themselves
            _apply(files[ROOT], edit, scope, findings)
    if not any(d.severity == "error" for d in findings):
        findings += _check(files, outs, scope.formats, dialects, bool(by_rule))
    return {name: content for name, content in files.items() if content is not None}, findings


# ---------------------------------------------------------------------------------------------------------------- edits


def _asks(edit: ast.ConfigEdit) -> bool:
    return isinstance(edit.value, ast.Apply) and edit.value.function == "derive"


def _edit(files: dict[str, Any], scope, findings: list[Diagnostic]) -> ast.ConfigEdit | None:
    """Apply a rule file's edits in order; the last one that asks for `derive()` is left for the end."""
    asked = None
    for edit in scope.edits:
        if _asks(edit):
            if edit.path != (KEY,) or edit.op != "=":
                findings.append(Diagnostic(QR_EDIT, "derive() makes a whole quantization config", edit.span, help=f"write `config.{KEY} = derive(DIALECT)`"))
            asked = edit
            continue
        if edit.path == (KEY,):
            asked = None
        if files.get(ROOT) is None:
            files[ROOT] = {}
        _apply(files[ROOT], edit, scope, findings)
    return asked


def _apply(config: Any, edit: ast.ConfigEdit, scope, findings: list[Diagnostic]) -> None:
    name = "config." + ".".join(edit.path)
    for key in edit.path[:-1]:
        inner = config.setdefault(key, {}) if edit.op == "=" else config.get(key)
        if not isinstance(inner, dict):
            findings.append(Diagnostic(QR_EDIT, f"{name}: {key} is {'absent' if inner is None else 'not an object'}", edit.span))
            return
        config = inner
    key = edit.path[-1]
    if edit.op == "delete":
        if config.pop(key, OMIT) is OMIT:
            findings.append(Diagnostic(QR_EDIT, f"{name} is not there to delete", edit.span, help=nearest(key, config), severity="warning"))
        return
    try:
        value = evaluate(edit.value, scope.env)
    except RuleError as error:
        findings += error.diagnostics
        return
    if edit.op == "=":
        config[key] = value
    elif isinstance(config.get(key), list):
        config[key] = config[key] + (value if isinstance(value, list) else [value])
    elif isinstance(config.get(key), dict) and isinstance(value, dict):
        config[key] = {**config[key], **value}
    else:
        findings.append(Diagnostic(QR_EDIT, f"{name} is no list or object that += could add to", edit.span, help=f"write `{name} = …`"))


# -------------------------------------------------------------------------------------------------------------- outputs


def _outputs(plan) -> Iterable[Out]:
    """Every module that the plan writes, by template and type."""
    for units in plan.units:
        for names, type in zip(units.targets, units.recipe.made.items):
            if len(names) and names[0] != fill(names.template, names.digits[0]) or re.search(r"(^|\.)\d+(\.|$)", names.template):
                for family, _ in families(list(names)):
                    yield Out(family, type)
            elif len(names):
                yield Out(names, type)


def _changed(plan, formats, named: bool) -> bool:
    """Whether the output has other formats, spellings or parts than the source, or (where a config names modules) other names."""

    def shape(types: Iterable[Type]):
        return {(t.format.name, t.spelling.name if not t.is_dense else "", tuple(p.role for p in t.parts)) for t in types}

    companions = tuple(p.suffix for f in formats.values() if not f.is_dense for s in f.spellings for p in s.parts[1:])
    for units in plan.units:
        took, made = units.recipe.took.items, units.recipe.made.items
        if not made:  # dropped: a module that the config counts, or an activation scale
            if not all(t.is_dense for t in took) or any(n.endswith(companions) for p in units.paths for n in [p[0]] if len(p)):
                return True
        elif shape(took) != shape(made) or named and any(not _same(a, b) for a, b in zip(units.targets, units.paths)):
            return True
    return False


def _same(a: Names, b: Names) -> bool:
    plain = type(a) is type(b) is Names and a.template == b.template
    return np.array_equal(a.digits, b.digits) if plain else list(a) == list(b)


class _Maker:
    """Makes the quantization config of a plan's outputs, into `files`."""

    def __init__(self, plan, configs, files, sections: list[Section], outs: list[Out], dialects, formats, findings):
        self.plan, self.configs, self.files, self.sections, self.outs = plan, configs, files, sections, outs
        self.dialects, self.formats, self.findings = dialects, formats, findings
        self.dense: dict[str, list[str]] = {}  # dialect -> its list of dense modules
        self.used: dict[tuple[str, str], list[Out]] = {}
        for out in outs:
            if not out.type.is_dense:
                self.used.setdefault((out.type.format.name, out.type.spelling.name), []).append(out)

    def error(self, code: str, message: str, span=None, help: str = "") -> None:
        self.findings.append(Diagnostic(code, message, span, help=help))

    def make(self, asked: ast.ConfigEdit | None) -> None:
        place = next((p for p in PLACES if p[0] == ROOT and look_up(self.files, p) is not None), PLACES[0])
        own = self.sections[0] if self.sections else None
        for file, path in PLACES:  # the old ones go, whatever comes
            if file != ROOT:
                self.files[file] = None
            elif isinstance(inner := look_up(self.files, (file, path[:-1])), dict):
                inner.pop(path[-1], None)
        if not self.used:
            return
        dialect = self.choose(asked, own)
        if dialect is None:
            return
        section = self.section(dialect)
        if own is not None and own.dialect is dialect:
            section = self.carried(own, section)
        look_up(self.files, (place[0], place[1][:-1]))[KEY] = section
        said: dict[str, dict[str, Any]] = {}
        for name, format, template in dialect.files:
            if format == "any" or any(f == format for f, _ in self.used):
                more, before = self.filled(dialect, format, "", template), said.get(name, {})
                for key in more.keys() & before.keys():
                    if more[key] != before[key]:
                        self.error(QR_CLASH, f"{name}: {key} is said to be {before[key]!r} and {more[key]!r}",
                                   help=f"dialect {dialect.name} has one {key} for the whole output")  # fmt: skip
                said[name] = self.merged(before, more)
        for name, content in said.items():
            same = own is not None and own.dialect is dialect
            self.files[name] = self.merged(self.files[ROOT] if name == ROOT else self.configs.get(name, {}) if same else {}, content)

    # ------------------------------------------------------------------------------------------------------- dialects

    def holds(self, dialect: Dialect) -> bool:
        entries = {(f, s) for f, s, _ in dialect.entries}
        return all((f, s) in entries or (f, "") in entries for f, s in self.used)

    def choose(self, asked: ast.ConfigEdit | None, own: Section | None) -> Dialect | None:
        held = ", ".join(f"{f} ({s})" for f, s in self.used)
        if asked is not None:
            arg = asked.value.args[0] if len(asked.value.args) == 1 else None
            name = arg.name if isinstance(arg, ast.Name) else getattr(arg, "value", None)
            dialect = next((d for d in self.dialects if d.name == name), None)
            if dialect is None:
                known = [d.name for d in self.dialects]
                self.error(QR_DIALECT, f"there is no dialect {name}", asked.value.span, nearest(str(name), known) or f"one of {', '.join(known)}")
            elif not self.holds(dialect):
                self.error(QR_DIALECT, f"dialect {name} cannot say {held}", asked.value.span, self.advice())
                return None
            return dialect
        if own is not None and self.holds(own.dialect):
            return own.dialect
        fit = [d for d in self.dialects if self.holds(d) and self.reads_back(d)]
        if len(fit) == 1:
            return fit[0]
        which = f"{' and '.join(d.name for d in fit)} both can" if fit else "no dialect can"
        self.error(QR_DIALECT, f"the output holds {held}, and {which} say that in a quantization config", None, self.advice(fit))
        return None

    def advice(self, fit: list[Dialect] | None = None) -> str:
        fit = [d for d in self.dialects if self.holds(d)] if fit is None else fit
        if fit:
            return f"write `config.{KEY} = derive({fit[0].name})`"
        return f"use `pack(SPELLING)` so that one dialect holds all, or set `config.{KEY} = {{…}}` yourself"

    def reads_back(self, dialect: Dialect) -> bool:
        """Whether what the dialect writes would be read as that dialect again, for this model."""
        count = len(self.findings)
        scope = {**self.files[ROOT], **self.section(dialect)}
        del self.findings[count:]
        return next((d for d in self.dialects if d.when is not None and value_of(d.when, scope)), None) is dialect

    # -------------------------------------------------------------------------------------------------------- content

    def section(self, dialect: Dialect) -> dict[str, Any]:
        section: dict[str, Any] = {}
        for format, spelling, template in dialect.entries:
            if format == "any" or format == "several" and len(self.used) > 1 or any(f == format and spelling in ("", s) for f, s in self.used):
                section = self.merged(section, self.filled(dialect, format, spelling, template))
        return section

    def filled(self, dialect: Dialect, format: str, spelling: str, template: ast.Expression) -> dict[str, Any]:
        """A template with its placeholders filled."""
        outs = [o for (f, s), many in self.used.items() if f == format and spelling in ("", s) for o in many]
        asks = {n.name for n in walk(template) if isinstance(n, ast.Name)}
        scope: dict[str, Any] = {"omit": OMIT, "several": int(len(self.used) > 1)}
        if "dense_modules" in asks:
            scope["dense_modules"] = self.dense_modules(dialect)
        if outs:
            block = outs[0].type.format.block
            scales = sorted({p.dtype for o in outs for p in o.type.parts if p.role == "scale"})
            if len(scales) > 1 and "scale" in asks:
                self.error(QR_CLASH, f"{format} is written with scales in {' and in '.join(scales)}, and dialect {dialect.name} says one dtype for all")
            scope |= {"block": list(block), "group": block[-1], "scale": scales[0] if scales else None, "act": self.act(dialect, format, outs)}
            if "modules" in asks and scope["several"]:
                scope["modules"] = _listed(outs, self.outs, dialect.style)
        return value_of(template, scope)

    def act(self, dialect: Dialect, format: str, outs: list[Out]) -> int:
        """1 where all modules have an activation scale, 0 where none has."""
        lacking = [o for o in outs if o.type.part("act") is None]
        if lacking and (len(lacking) < len(outs) or format in dialect.acts):
            count, suffix = sum(len(o.names) for o in lacking), outs[0].type.spelling.part("act")
            why = "others have one" if len(lacking) < len(outs) else f"what reads {dialect.name} takes garbage for it"
            who = lacking[0].names[0] if count == 1 else f"{count} modules, for example {lacking[0].names[0]}"
            finding = Diagnostic(QR_ACT, f"{who}: written without {suffix.suffix if suffix else 'an activation scale'}, and {why}", count=count,
                                 help="give scales with --input-scales FILE, drop those of all, or keep these modules dense")  # fmt: skip
            if finding not in self.findings:
                self.findings.append(finding)
        return int(not lacking)

    def dense_modules(self, dialect: Dialect) -> list[str]:
        """Matrices left dense, in full; names of the old list that the files never held, and those that tying leaves out."""
        if dialect.name in self.dense:
            return self.dense[dialect.name]
        ends = {s.dense for f, n in self.used if (s := self.formats[f].spelling(n))}
        matrices = [o for o in self.outs if o.type.is_dense and o.type.dtype in FLOATS and (
            len(o.type.shape) == 2 and o.type.spelling.parts[0].suffix in ends or len(o.type.shape) > 2)]  # fmt: skip
        matrices = [o for o in matrices if not any(w in o.names.template.rsplit(".", 1)[-1].lower() for w in NOT_LINEAR)]
        always = select(dialect.dense, [o.names for o in matrices], "globs").masks
        chosen = [Out(o.names.take(~mask), o.type) for o, mask in zip(matrices, always) if not mask.all()]
        names = _parents_of_many(chosen, self.outs, dialect.style)
        old = [e for s in self.sections[:1] if s.dialect is dialect for e in s.ignore if not any(c in e for c in "*?[:")]
        names += select(old, self.plan.table.families, "globs").missed
        names += dialect.tied if self.files[ROOT].get("tie_word_embeddings") else ()
        self.dense[dialect.name] = list(dict.fromkeys(names))
        return self.dense[dialect.name]

    def carried(self, own: Section, section: dict[str, Any]) -> dict[str, Any]:
        """What the source's section says beyond the dialect's templates (a cache's scheme, the producer) stays."""
        d = own.dialect
        said = {k for _, _, t in d.entries for k, _ in t.items} | {*d.ignore, d.groups, d.layers}
        return {**{k: deepcopy(v) for k, v in own.content.items() if k not in said}, **section}

    def merged(self, a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
        """b over a, object by object; a null gives way to what is there (a cache's scheme that no rule touches)."""
        made = dict(a)
        for key, value in b.items():
            if isinstance(made.get(key), dict) and isinstance(value, dict):
                made[key] = self.merged(made[key], value)
            elif value is not None or key not in made:
                made[key] = value
        return made


def _parents_of_many(chosen: list[Out], outs: list[Out], style: str) -> list[str]:
    """Names in full, but a parent whose many numbered children (experts) are all chosen stands for them."""
    taken, total = {}, {}
    for store, which in ((taken, chosen), (total, [o for o in outs if len(o.type.shape) >= 2])):
        for o in which:
            if o.names.template.count(HOLE) >= 2:
                parent = o.names.template[: o.names.template.rindex(HOLE)].rstrip(".")
                rows, counts = np.unique(o.names.digits[:, :-1], axis=0, return_counts=True)
                for row, count in zip(map(tuple, rows.tolist()), counts.tolist()):
                    store[parent, row] = store.get((parent, row), 0) + count
    folded = {k for k, n in taken.items() if n > MANY and total.get(k) == n}
    found: dict[tuple, str] = {}
    for o in chosen:
        parent = o.names.template[: max(o.names.template.rfind(HOLE), 0)].rstrip(".")
        for digits, name in zip(map(tuple, o.names.digits.tolist()), o.names):
            key = (parent, digits[:-1])
            if key in folded:
                whole = fill(parent, digits[:-1])
                name = {"globs": whole + "*", "regex": f"re:{re.escape(whole)}\\..*"}.get(style, whole)
            found.setdefault((digits[:1], name), name)
    return [found[k] for k in sorted(found)]


def _listed(mine: list[Out], outs: list[Out], style: str) -> list[str]:
    """Targets of one of several groups: a pattern for a template that is all in the group, else names in full."""
    ids = {id(o) for o in mine}
    mixed = {o.names.template for o in outs if id(o) not in ids and len(o.type.shape) >= 2}
    whole = {"regex": ("re:^", r"\d+", "$"), "globs": ("", "*", "")}.get(style)
    made: list[str] = []
    for o in mine:
        if whole is None or o.names.template in mixed or HOLE not in o.names.template:
            made += list(o.names)
        else:
            start, number, end = whole
            pieces = [re.escape(p) if style == "regex" else p for p in o.names.template.split(HOLE)]
            made.append(start + number.join(pieces) + end)
    return list(dict.fromkeys(made))


def _check(files: Mapping[str, Any], outs: list[Out], formats, dialects, by_rule: bool) -> list[Diagnostic]:
    """The output's configs against the output, as a reader would find them; entries that match nothing are errors where rules wrote them."""
    sections, _ = read_sections(files, formats, dialects)
    modules = [Modules(o.names, o.type.format, o.type.spelling, (), np.zeros((len(o.names), 0), np.int32), np.full(len(o.names), i, np.int32))
               for i, o in enumerate(outs)]  # fmt: skip
    found = check_declared(modules, [o.type for o in outs], sections, formats)
    kept = [d for d in found if d.code != QR_NO_MATCH or by_rule and d.severity == "warning"]
    return [evolve(d, severity="error" if d.code == QR_NO_MATCH else d.severity, message=f"in the output, {d.message}") for d in kept]
