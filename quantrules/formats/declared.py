"""What configs declare, and whether the stored tensors agree. Where both speak and differ, the checkpoint is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from quantrules.diagnostics import Diagnostic, define
from quantrules.formats.load import Dialect
from quantrules.formats.select import select
from quantrules.formats.values import value_of
from quantrules.names import HOLE, Names, split_name
from quantrules.types import FLOATS, Format, Type, part_type

if TYPE_CHECKING:
    from quantrules.formats.detect import Modules

QR_DECLARED = define("QR420", "A module that the config declares quantised, stored dense")
QR_IGNORED = define("QR421", "A module that the config declares dense, stored as the config quantises")
QR_OTHER = define("QR422", "A module stored in another format than the config declares")
QR_NO_MATCH = define("QR423", "An entry of a config that matches no module")
QR_REGEX = define("QR424", "A regular expression of a config that is not understood")
QR_UNKNOWN = define("QR425", "A quantization config that no format or dialect here describes")
QR_SHAPE = define("QR426", "A quantization config of an unexpected shape")
QR_KEPT = define("QR427", "A module that is left out of the config's format and stored in another one")

# where quantization configs stand: (file, path), the one that wins first
PLACES = (
    ("config.json", ("quantization_config",)),
    ("config.json", ("text_config", "quantization_config")),
    ("hf_quant_config.json", ("quantization",)),
    ("quantize_config.json", ()),
)
ROOT = "config.json"
MANY = 20  # kinds of names that are spoken of one by one


def about(code: str, names: Names, reason: str, help: str = "", severity: str = "error") -> Diagnostic:
    """One finding for many modules, with the first as the example."""
    who = names[0] if len(names) == 1 else f"{len(names)} modules, for example {names[0]}"
    return Diagnostic(code, f"{who}: {reason}", help=help, severity=severity, count=len(names))


@frozen
class Claim:
    """Modules that a config declares to be in one of some (format, spelling) pairs; entries None: all that are linear."""

    entries: tuple[str, ...] | None
    spellings: frozenset[tuple[str, str]]
    label: str  # what the config calls it

    @property
    def formats(self) -> set[str]:
        return {f for f, _ in self.spellings}


@frozen
class Section:
    """One quantization config, read."""

    place: tuple[str, tuple[str, ...]]
    content: Mapping[str, Any]
    dialect: Dialect
    claims: tuple[Claim, ...]
    ignore: tuple[str, ...]

    def __str__(self) -> str:
        return shown(self.place)


def shown(place: tuple[str, tuple[str, ...]]) -> str:
    return f"{place[0]}: {'.'.join(place[1])}" if place[1] else place[0]


def look_up(configs: Mapping[str, Any], place: tuple[str, tuple[str, ...]]) -> Any:
    """What stands at a place, or None."""
    value = configs.get(place[0])
    for key in place[1]:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def read_sections(
    configs: Mapping[str, Any], formats: Mapping[str, Format], dialects: Sequence[Dialect]
) -> tuple[list[Section], list[Diagnostic]]:
    """Every quantization config that some dialect recognises, in the order in which they win."""
    sections, findings = [], []
    for place in PLACES if dialects else ():
        content, where = look_up(configs, place), shown(place)
        if content is None:
            continue
        if not isinstance(content, Mapping):
            findings.append(Diagnostic(QR_SHAPE, f"{where} is {type(content).__name__}, not an object"))
            continue
        levels = [look_up(configs, (ROOT, place[1][:n])) for n in range(max(len(place[1]), 1))]
        scope = {k: v for level in (*levels, content) if isinstance(level, Mapping) for k, v in level.items()}
        dialect = recognised(scope, dialects)
        if dialect is None:
            method = scope.get("quant_method") or scope.get("quant_algo")
            findings.append(Diagnostic(QR_UNKNOWN, f"{where} declares {method!r}, which no dialect here describes",
                                       help="tensors are told by their companions alone", severity="warning"))
            continue
        claims = tuple(_claims(scope, content, dialect, formats))
        sections.append(Section(place, content, dialect, claims, _texts(content, dialect.ignore, where, findings)))
        if not any(c.spellings for c in claims):
            labels = ", ".join(c.label for c in claims) or "nothing"
            message = f"{where} declares {labels}, which no format here describes"
            findings.append(Diagnostic(QR_UNKNOWN, message, severity="warning"))
    return sections, findings


def recognised(scope: Mapping[str, Any], dialects: Sequence[Dialect]) -> Dialect | None:
    """The dialect that a section is written in, from its keys and those around it."""
    return next((d for d in dialects if d.when is not None and value_of(d.when, scope)), None)


def _texts(content: Mapping[str, Any], keys: Sequence[str], where: str, findings: list[Diagnostic]) -> tuple[str, ...]:
    """The lists of texts under some keys."""
    made = []
    for key in keys:
        value = content.get(key) or []
        if isinstance(value, list) and all(isinstance(v, str) for v in value):
            made += value
        else:
            findings.append(Diagnostic(QR_SHAPE, f"{where}: {key} is not a list of texts"))
    return tuple(made)


def _claims(scope: Mapping, content: Mapping, dialect: Dialect, formats: Mapping[str, Format]) -> Iterable[Claim]:
    """What a section declares: by groups with targets, by modules, or for all that is linear."""

    def claim(entries: Iterable[str] | None, own: Mapping[str, Any]) -> Claim:
        inner = {**scope, **own}
        pairs = [(f.name, s) for f in formats.values() for s in f.spellings if s.declared is not None]
        found = frozenset((f, s.name) for f, s in pairs if value_of(s.declared, inner))
        label = next((str(inner[k]) for k in ("quant_algo", "format", "quant_method") if inner.get(k)), "?")
        return Claim(None if entries is None else tuple(entries), found, label)

    def inside(key: str) -> list[tuple[str, Mapping]]:
        value = content.get(key)
        return [(k, v) for k, v in value.items() if isinstance(v, Mapping)] if isinstance(value, Mapping) else []

    for _, group in inside(dialect.groups):
        targets = group.get("targets")
        targets = [t for t in targets if isinstance(t, str)] if isinstance(targets, list) else []
        classes = [t for t in targets if t.isidentifier() and t[0].isupper()]  # such as Linear: every one of them
        yield claim(None if classes or not targets else targets, group)
    alike: dict[str, tuple[list[str], Mapping]] = {}
    for name, settings in inside(dialect.layers):
        alike.setdefault(repr(sorted(settings.items(), key=str)), ([], settings))[0].append(name)
    for names, settings in alike.values():
        yield claim(names, settings)
    whole = claim(None, {})
    if not inside(dialect.groups) and (whole.spellings or not alike):
        yield whole


# ----------------------------------------------------------------------------------------------------------- agreement


def check_declared(
    modules: Sequence[Modules], types: Sequence[Type], sections: Sequence[Section], formats: Mapping[str, Format]
) -> list[Diagnostic]:
    """Every module's format against every section: they must agree with what is stored, and so with each other."""
    findings: list[Diagnostic] = []
    for section in sections:
        checker = _Checker(modules, types, section, formats, findings)
        checker.check_entries()
        checker.check_any()
        for i, m in enumerate(modules):
            (checker.check_dense if m.format.is_dense else checker.check_quantised)(i)
    return list(dict.fromkeys(findings))


class _Checker:
    def __init__(self, modules, types, section: Section, formats: Mapping[str, Format], findings: list[Diagnostic]):
        self.modules, self.types, self.section, self.formats, self.findings = modules, types, section, formats, findings
        families, style = [m.names for m in modules], section.dialect.style
        self.ignored = select(section.ignore, families, style)
        self.always = select(section.dialect.dense, families, "globs")
        claims = [(c, select(c.entries, families, style) if c.entries is not None else None) for c in section.claims]
        self.listed, self.claims = [s for _, s in claims if s is not None], [(c, s) for c, s in claims if c.spellings]
        self.label = ", ".join(dict.fromkeys(c.label for c, _ in self.claims))
        self.spellings = [formats[f].spelling(s) for f, s in sorted({p for c, _ in self.claims for p in c.spellings})]
        quantised = [m.names.template for m in modules if not m.format.is_dense]
        self.templates, self.last = set(quantised), {_last(t) for t in quantised} - {HOLE}
        ends = {s.dense for s in self.spellings}
        floats = [t.is_dense and t.dtype in FLOATS and len(t.shape) >= 2 and t.spelling.parts[0].suffix in ends for t in types]
        self.weights = [np.array(floats, bool)[m.types] for m in modules]  # dense matrices that could be quantised

    def say(self, code: str, i: int, mask: np.ndarray, reason: str, help: str = "", severity: str = "error") -> None:
        if mask.any():
            self.findings.append(about(code, self.modules[i].names.take(np.flatnonzero(mask)), reason, help, severity))

    def covered(self, i: int, format: str = "") -> np.ndarray:
        """Which modules some claim (for a format) takes."""
        mask = np.zeros(len(self.modules[i]), bool)
        for claim, selection in self.claims:
            if not format or format in claim.formats:
                mask |= True if selection is None else selection.masks[i]
        return mask

    def check_quantised(self, i: int) -> None:
        m, ignored = self.modules[i], self.ignored.masks[i]
        name, stored, own = m.format.name, self.types[m.types[0]], self.covered(i, m.format.name)
        other, left = self.covered(i) & ~own, f"{self.section} leaves it out of {self.label}"
        self.say(QR_IGNORED, i, ignored & own, f"stored as {name}, but {left}",
                 "take it out of the config's list, or the tensors are not what the list says")
        needs = " or ".join(dict.fromkeys(str(part_type(m.format, s.parts[0], stored.shape)) for s in self.spellings))
        self.say(QR_OTHER, i, ~ignored & other, f"{self.section} declares {self.label}, which needs {needs}; "
                 f"stored is {stored.parts[0]}, {name}", "correct the config: the tensors are what they are")
        self.say(QR_KEPT, i, ignored & other, f"{left}; it is stored as {name}, not dense", severity="note")

    def check_dense(self, i: int) -> None:
        """Dense, though declared: named by the config, or quantised in other layers or under other parents."""
        m, named = self.modules[i], np.zeros(len(self.modules[i]), bool)
        for _, selection in self.claims:
            if selection is not None:
                named |= selection.literal[i]
        alike = m.names.template in self.templates or _last(m.names.template) in self.last
        left, stored = self.weights[i] & ~self.ignored.masks[i], self.types[m.types[0]]
        meant = self.covered(i) & ~named & alike & ~self.always.masks[i]
        help = f"list it in the config ({'/'.join(self.section.dialect.ignore)}) if it is meant to be dense"
        for mask, why in ((named, "names it"), (meant, "does not leave it out")):
            reason = f"{self.section} declares {self.label} and {why}, but it is stored as {stored}, without a scale"
            self.say(QR_DECLARED, i, left & mask, reason, help)

    def check_any(self) -> None:
        """A config that quantises, and a checkpoint where nothing is."""
        left = [w & ~self.ignored.masks[i] & self.covered(i) for i, w in enumerate(self.weights)]
        i = next((i for i, mask in enumerate(left) if mask.any()), None)
        if i is not None and not self.templates:
            self.say(QR_DECLARED, i, left[i], f"{self.section} declares {self.label}, but no module here is quantised",
                     "delete the section, or correct it")

    def check_entries(self) -> None:
        """Entries that match nothing: a warning where a name comes close, which is the mark of another prefix or spelling."""
        for verb, selection in [("leaves out", self.ignored)] + [("quantises", s) for s in self.listed]:
            if selection.obscure:
                message = f"{self.section}: {selection.obscure[0]!r} is not understood and taken to match nothing"
                self.findings.append(Diagnostic(QR_REGEX, message, severity="warning", count=len(selection.obscure)))
            folded: dict[str, list[str]] = {}
            for entry in (e for e in selection.missed if e not in self.section.dialect.tied):
                template = split_name(entry)[0]
                folded.setdefault(template if template in folded or len(folded) < MANY else "", []).append(entry)
            for template, entries in folded.items():
                near, count, example = self.nearest(template), len(entries), repr(entries[0])
                what = f"{example}, which matches" if count == 1 else f"{count} names, for example {example}, which match"
                help, severity = (f"did you mean {near!r}?", "warning") if near else ("", "note")
                self.findings.append(Diagnostic(QR_NO_MATCH, f"{self.section} {verb} {what} no module", help=help,
                                                severity=severity, count=count))

    def nearest(self, template: str) -> str:
        if not template or any(c in template for c in "*?[") or template.startswith("re:"):
            return ""
        weights = {m.names.template: m for m in self.modules if len(self.types[m.types[0]].shape) >= 2}
        same = [t for t in weights if _last(t) == _last(template) != HOLE]
        close = get_close_matches(template, same or list(weights), 1, 0.0 if same else 0.8)
        return weights[close[0]].names[0] if close else ""


def _last(template: str) -> str:
    return template.rsplit(".", 1)[-1]
