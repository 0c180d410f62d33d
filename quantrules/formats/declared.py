"""What configs declare, and whether the stored tensors agree. Where both speak and differ, the checkpoint is refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import frozen

from quantrules.diagnostics import Diagnostic, define
from quantrules.formats.load import Dialect
from quantrules.formats.select import Selection, select
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
        file, path = self.place
        return f"{file}: {'.'.join(path)}" if path else file


def look_up(configs: Mapping[str, Any], place: tuple[str, tuple[str, ...]]) -> Any:
    """What stands at a place, or None."""
    value = configs.get(place[0])
    for key in place[1]:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def read_sections(configs: Mapping[str, Any], formats: Mapping[str, Format], dialects: Iterable[Dialect]) -> tuple[list[Section], list[Diagnostic]]:
    """Every quantization config that some dialect recognises, in the order in which they win."""
    sections, findings, dialects = [], [], tuple(dialects)
    for place in PLACES:
        content = look_up(configs, place)
        if content is None or not dialects:
            continue
        where = f"{place[0]}: {'.'.join(place[1])}" if place[1] else place[0]
        if not isinstance(content, Mapping):
            findings.append(Diagnostic(QR_SHAPE, f"{where} is {type(content).__name__}, not an object"))
            continue
        top = configs.get(ROOT)
        top = dict(top) if isinstance(top, Mapping) else {}
        inner = top.get(place[1][0]) if len(place[1]) > 1 else None
        scope = {**top, **(inner or {}), **content}
        dialect = next((d for d in dialects if d.when is not None and value_of(d.when, scope)), None)
        if dialect is None:
            method = content.get("quant_method") or content.get("quant_algo")
            findings.append(Diagnostic(QR_UNKNOWN, f"{where} declares {method!r}, which no dialect here describes", severity="warning",
                                       help="tensors are told by their companions alone"))  # fmt: skip
            continue
        section = Section(place, content, dialect, tuple(_claims(scope, content, dialect, formats)), _texts(content, dialect.ignore, where, findings))
        sections.append(section)
        if not any(c.spellings for c in section.claims):
            findings.append(Diagnostic(QR_UNKNOWN, f"{section} declares {', '.join(c.label for c in section.claims) or 'nothing'}, "
                                       "which no format here describes", severity="warning"))  # fmt: skip
    return sections, findings


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


def _claims(scope: Mapping[str, Any], content: Mapping[str, Any], dialect: Dialect, formats: Mapping[str, Format]) -> Iterable[Claim]:
    def claim(entries, own: Mapping[str, Any]) -> Claim:
        inner = {**scope, **own}
        found = {(f.name, s.name) for f in formats.values() for s in f.spellings if s.declared is not None and value_of(s.declared, inner)}
        label = next((str(inner[k]) for k in ("quant_algo", "format", "quant_method") if inner.get(k)), "?")
        return Claim(entries, frozenset(found), label)

    groups, layers = (content.get(k) if k and isinstance(content.get(k), Mapping) else {} for k in (dialect.groups, dialect.layers))
    for group in groups.values():
        if isinstance(group, Mapping):
            targets = [t for t in group.get("targets") or () if isinstance(t, str)] if isinstance(group.get("targets"), list) else []
            classes = [t for t in targets if t.isidentifier() and t[:1].isupper()]
            yield claim(None if classes or not targets else tuple(targets), group)
    by_settings: dict[str, tuple[list[str], Mapping]] = {}
    for name, settings in layers.items():
        if isinstance(settings, Mapping):
            by_settings.setdefault(repr(sorted(settings.items(), key=str)), ([], settings))[0].append(name)
    for names, settings in by_settings.values():
        yield claim(tuple(names), settings)
    whole = claim(None, {})
    if not groups and (whole.spellings or not layers):
        yield whole


# ----------------------------------------------------------------------------------------------------------- agreement


def check_declared(
    modules: Sequence[Modules], types: Sequence[Type], sections: Iterable[Section], formats: Mapping[str, Format]
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
    def __init__(self, modules: Sequence[Modules], types: Sequence[Type], section: Section, formats: Mapping[str, Format], findings: list[Diagnostic]):
        self.modules, self.types, self.section, self.formats, self.findings = modules, types, section, formats, findings
        families, style = [m.names for m in modules], section.dialect.style
        self.ignored = select(section.ignore, families, style)
        self.always = select(section.dialect.dense, families, "globs")
        claims = [(c, select(c.entries, families, style) if c.entries is not None else None) for c in section.claims]
        self.listed, self.claims = [s for _, s in claims if s is not None], [(c, s) for c, s in claims if c.spellings]
        self.label = ", ".join(dict.fromkeys(c.label for c, _ in self.claims))
        self.spellings = [formats[f].spelling(s) for f, s in sorted({p for c, _ in self.claims for p in c.spellings})]
        quantised = [m for m in modules if not m.format.is_dense]
        self.templates = {m.names.template for m in quantised}
        self.last = {_last(m.names.template) for m in quantised} - {HOLE}
        ends = {s.dense for s in self.spellings}
        weight = np.array([t.is_dense and t.spelling.parts[0].suffix in ends and t.dtype in FLOATS and len(t.shape) >= 2 for t in types], bool)
        self.weights = [weight[m.types] for m in modules]  # dense matrices that could be quantised

    def report(self, code: str, names: Names, reason: str, help: str = "", severity: str = "error") -> None:
        who = names[0] if len(names) == 1 else f"{len(names)} modules, for example {names[0]}"
        self.findings.append(Diagnostic(code, f"{who}: {reason}", help=help, severity=severity, count=len(names)))

    def covered(self, i: int, chosen: Iterable[tuple[Claim, Selection | None]]) -> np.ndarray:
        mask = np.zeros(len(self.modules[i]), bool)
        for _, selection in chosen:
            mask |= True if selection is None else selection.masks[i]
        return mask

    def check_quantised(self, i: int) -> None:
        m, ignored = self.modules[i], self.ignored.masks[i]
        own = self.covered(i, [(c, s) for c, s in self.claims if m.format.name in c.formats])
        other = self.covered(i, self.claims) & ~own
        wrong = np.flatnonzero(ignored & own)
        if len(wrong):
            self.report(QR_IGNORED, m.names.take(wrong), f"stored as {m.format.name}, but {self.section} leaves it out of {self.label}",
                        help="take it out of the config's list, or the tensors are not what the list says")  # fmt: skip
        wrong = np.flatnonzero(~ignored & other)
        if len(wrong):
            stored = self.types[m.types[wrong[0]]]
            needs = " or ".join(dict.fromkeys(str(part_type(self.formats[stored.format.name], s.parts[0], stored.shape)) for s in self.spellings))
            self.report(QR_OTHER, m.names.take(wrong), f"{self.section} declares {self.label}, which needs {needs}; stored is {stored.parts[0]}, {m.format.name}",
                        help="correct the config: the tensors are what they are")  # fmt: skip
        kept = np.flatnonzero(ignored & other)
        if len(kept):
            self.report(QR_KEPT, m.names.take(kept), f"{self.section} leaves it out of {self.label}; it is stored as {m.format.name}, not dense", severity="note")

    def check_dense(self, i: int) -> None:
        """Dense, though declared: named by the config, or quantised in other layers or under other parents."""
        m, named = self.modules[i], np.zeros(len(self.modules[i]), bool)
        for _, selection in self.claims:
            if selection is not None:
                named |= selection.literal[i]
        alike = m.names.template in self.templates or _last(m.names.template) in self.last
        declared = named | (self.covered(i, self.claims) & alike & ~self.always.masks[i])
        wrong = np.flatnonzero(self.weights[i] & declared & ~self.ignored.masks[i])
        if len(wrong):
            stored = self.types[m.types[wrong[0]]]
            why = "names it" if named[wrong[0]] else "does not leave it out"
            self.report(QR_DECLARED, m.names.take(wrong), f"{self.section} declares {self.label} and {why}, but it is stored as {stored}, without a scale",
                        help=f"list it in the config ({'/'.join(self.section.dialect.ignore)}) if it is meant to be dense")  # fmt: skip

    def check_any(self) -> None:
        """A config that quantises, and a checkpoint where nothing is."""
        left = [i for i, w in enumerate(self.weights) if (w & ~self.ignored.masks[i] & self.covered(i, self.claims)).any()]
        if left and not self.templates:
            names = self.modules[left[0]].names.take(np.flatnonzero(self.weights[left[0]]))
            self.report(QR_DECLARED, names, f"{self.section} declares {self.label}, but no module here is quantised", help="delete the section, or correct it")

    def check_entries(self) -> None:
        """Entries that match nothing: a warning where a name comes close, which is the mark of another prefix or spelling."""
        listed = [("leaves out", self.ignored)] + [("quantises", s) for s in self.listed]
        for verb, selection in listed:
            if selection.obscure:
                self.findings.append(Diagnostic(QR_REGEX, f"{self.section}: {selection.obscure[0]!r} is not understood and taken to match nothing",
                                                severity="warning", count=len(selection.obscure)))  # fmt: skip
            folded: dict[str, list[str]] = {}
            for entry in (e for e in selection.missed if e not in self.section.dialect.tied):
                template = split_name(entry)[0]
                folded.setdefault(template if template in folded or len(folded) < MANY else "", []).append(entry)
            for template, entries in folded.items():
                near = self.nearest(template)
                what = f"{entries[0]!r}, which matches" if len(entries) == 1 else f"{len(entries)} names, for example {entries[0]!r}, which match"
                self.findings.append(Diagnostic(QR_NO_MATCH, f"{self.section} {verb} {what} no module", severity="warning" if near else "note",
                                                help=f"did you mean {near!r}?" if near else "", count=len(entries)))  # fmt: skip

    def nearest(self, template: str) -> str:
        if not template or any(c in template for c in "*?[") or template.startswith("re:"):
            return ""
        weights = {m.names.template: m for m in self.modules if len(self.types[m.types[0]].shape) >= 2}
        same = [t for t in weights if _last(t) == _last(template) != HOLE]
        close = get_close_matches(template, same or list(weights), 1, 0.0 if same else 0.8)
        return weights[close[0]].names[0] if close else ""


def _last(template: str) -> str:
    return template.rsplit(".", 1)[-1]
