"""Modules: which tensors of a table belong together, in which format and spelling. By family, never by tensor.

Suffixes are stripped from templates; what has one path template is joined by its numbers, and every distinct signature
(parts present, dtypes, shapes) is fitted once. Block shapes are declared by the format and never divided out of shapes:
192 rows with 2 rows of scales are blocks of 128, not of 96.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import evolve, field, frozen

from quantrules.diagnostics import Diagnostic, define
from quantrules.formats.declared import Section, about, check_declared, read_sections
from quantrules.formats.load import Dialect
from quantrules.names import KeyTable, Names, row_keys
from quantrules.types import DTYPE_BITS, Format, Part, PartType, Spelling, Type, part_type, stored_shapes

QR_NO_SCALE = define("QR410", "A weight without its scale")
QR_NO_WEIGHT = define("QR411", "A scale, or another companion, without its weight")
QR_DENSE_SCALE = define("QR412", "A scale beside a weight that takes none")
QR_MISSING = define("QR413", "A module that lacks a companion its format requires")
QR_GRID = define("QR414", "A tensor that does not fit its weight")
QR_TWICE = define("QR415", "Two modules of one path")
QR_AMBIGUOUS = define("QR416", "A module that fits several formats")
QR_SOME = define("QR417", "A companion that only some modules of a family have")


@frozen(eq=False)
class Modules:
    """Modules of one path template, format, spelling and set of parts, as columns."""

    names: Names  # their paths
    format: Format
    spelling: Spelling
    roles: tuple[str, ...]  # the parts that are present, in the order of the spelling
    rows: np.ndarray  # int32[n, roles]: rows of the key table
    types: np.ndarray  # int32[n]: indexes into ModuleTable.types

    def __len__(self) -> int:
        return len(self.names)


@frozen(eq=False)
class ModuleTable:
    """All modules of a key table: every row is in exactly one, also where a diagnostic says that it should not be."""

    modules: tuple[Modules, ...]
    types: tuple[Type, ...]
    diagnostics: tuple[Diagnostic, ...] = ()
    sections: tuple[Section, ...] = ()  # what the configs declare

    def type_of(self, modules: Modules, i: int) -> Type:
        return self.types[modules.types[i]]


def find_modules(
    table: KeyTable, configs: Mapping[str, Any], formats: Mapping[str, Format], dialects: Sequence[Dialect] = ()
) -> ModuleTable:
    """Bind a table's tensors to modules, and hold what configs declare against what is stored.

    configs: parsed JSON by file name ("config.json", "hf_quant_config.json", …). Findings are folded by template and
    returned, not raised: a plan shows them with its own.
    """
    sections, findings = read_sections(configs, formats, dialects)
    finder = _Finder(table, formats, {d for s in sections for c in s.claims for d in c.spellings})
    finder.find_quantised()
    finder.find_dense()
    finder.find_twice()
    finder.find_some()
    made = ModuleTable(tuple(finder.modules), tuple(finder.types), (), tuple(sections))
    return evolve(made, diagnostics=(*finder.findings, *findings, *check_declared(made.modules, made.types, sections, formats)))


# ----------------------------------------------------------------------------------------------------- fitting a weight


@frozen
class Misfit:
    """Why tensors are no module of a spelling: `rank` orders reasons, the one that says most is shown."""

    rank: int
    code: str
    reason: str


def fit(format: Format, spelling: Spelling, found: Mapping[str, tuple[str, tuple[int, ...]]]) -> Type | Misfit | None:
    """The type of a module with tensors `found` by suffix, or why they are none. None: its codes are of another kind."""
    codes = spelling.parts[0]
    dtype, shape = found[codes.suffix]
    if codes.dtypes and dtype not in codes.dtypes:
        return None
    logical = logical_shape(codes, dtype, shape)
    if logical is None:
        return Misfit(0, QR_GRID, f"{_type(dtype, shape)} is no shape for codes")
    parts, bad = [PartType(codes.role, dtype, shape)], None
    for part in (p for p in spelling.parts[1:] if p.suffix in found):
        has, size = found[part.suffix]
        want = part_type(format, part, logical)
        if has not in part.dtypes or size not in stored_shapes(part, want.shape, logical):
            same = f"{list(size)}" if has in part.dtypes else _type(has, size)
            wanted = _type("|".join(part.dtypes), want.shape)
            bad = bad or Misfit(2 + 2 * (has in part.dtypes), QR_GRID, f"{part.suffix}: expected {wanted}, found {same}")
        parts.append(PartType(part.role, has, size))
    lacking = [p.suffix for p in spelling.parts if not p.optional and p.suffix not in found]
    if lacking:
        there = ", ".join(p.suffix for p in spelling.parts[1:] if p.suffix in found)
        reason = f"{codes.suffix} is {_type(dtype, shape)} with {there} but without {', '.join(lacking)}"
        return Misfit(1 if bad else 3, QR_MISSING, reason)
    return bad or Type(format, spelling, logical, tuple(parts))


def logical_shape(codes: Part, dtype: str, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The weight's shape from that of its codes; f4 counts elements on disk where u8 counts pairs of them."""
    if codes.grid is None:
        return shape
    lead, tail = shape[: len(shape) - len(codes.grid)], list(shape[len(shape) - len(codes.grid) :])
    if len(shape) < len(codes.grid):
        return None
    per = 8 // DTYPE_BITS[dtype] if DTYPE_BITS[dtype] < 8 else 1
    if tail[-1] % per:
        return None
    tail[-1] //= per
    letters = {}
    for dim, size in zip(codes.grid, tail):
        if dim.letter:
            letters[dim.letter] = size * dim.divisor
        elif size != dim.divisor:
            return None
    return (*lead, letters["N"], letters["K"])


def _type(dtype: str, shape: tuple[int, ...]) -> str:
    return f"{dtype}{list(shape)}"


# ------------------------------------------------------------------------------------------------------------- joining


def join(table: KeyTable, families: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """(numbers int64[n, w], rows int32[n, families], -1 where absent) of names that agree in their numbers.

    Where files repeat keys, as those of tensor-parallel ranks do, names of different files are apart.
    """
    digits = np.concatenate([table.families[f].digits for f in families])
    rows = np.concatenate([table.rows[f] for f in families])
    which = np.repeat(np.arange(len(families)), [len(table.rows[f]) for f in families])
    _, first, place = np.unique(row_keys(digits), return_index=True, return_inverse=True)
    if np.bincount(place * len(families) + which).max() > 1:
        _, first, place = np.unique(row_keys(np.column_stack([place, table.file[rows]])), return_index=True, return_inverse=True)
    joined = np.full((len(first), len(families)), -1, np.int32)
    joined[place, which] = rows
    return digits[first], joined


def groups(columns: Iterable[np.ndarray]) -> list[np.ndarray]:
    """Row indexes of each distinct row of integer columns."""
    code = None
    for column in columns:
        if len(column) and (column[0] == column).all():
            continue
        _, place = np.unique(column if code is None else code * (int(column.max()) + 2) + column + 1, return_inverse=True)
        code = place.reshape(-1).astype(np.int64)
    if code is None:
        return [np.arange(len(column))] if len(column) else []
    order = np.argsort(code, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(code[order])) + 1)


@frozen(eq=False)
class _Finder:
    table: KeyTable
    formats: Mapping[str, Format]
    declared: set[tuple[str, str]]  # (format, spelling) pairs that a config declares
    modules: list[Modules] = field(factory=list)
    types: list[Type] = field(factory=list)
    findings: list[Diagnostic] = field(factory=list)
    known: dict = field(factory=dict)  # what types were seen -> index
    used: np.ndarray = field(init=False)
    blamed: np.ndarray = field(init=False)  # rows that a finding is about

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "used", np.zeros(len(self.table) + 1, bool))  # the last one is for row -1, absent
        object.__setattr__(self, "blamed", np.zeros(len(self.table) + 1, bool))

    def spellings(self, dense: bool) -> list[tuple[Format, Spelling]]:
        return [(f, s) for f in self.formats.values() if f.is_dense == dense for s in f.spellings]

    def found(self, row: int) -> tuple[str, tuple[int, ...]]:
        return self.table.dtypes[self.table.dtype[row]], self.table.shapes[self.table.shape[row]]

    def type_index(self, type: Type) -> int:
        key = (type.format.name, type.spelling.name, type.shape, type.parts)
        if key not in self.known:
            self.known[key] = len(self.types)
            self.types.append(type)
        return self.known[key]

    def say(self, code: str, names: Names, reason: str, help: str = "", severity: str = "error") -> None:
        self.findings.append(about(code, names, reason, help, severity))

    # ----------------------------------------------------------------------------------------------------- quantised

    def find_quantised(self) -> None:
        """Every path template that has some spelling's codes and at least one of its companions."""
        stems: dict[str, dict[str, int]] = {}
        suffixes = {p.suffix for _, s in self.spellings(False) for p in s.parts}
        for i, names in enumerate(self.table.families):
            for suffix in suffixes:
                if names.template.endswith(suffix) and len(names.template) > len(suffix):
                    stems.setdefault(names.template[: len(names.template) - len(suffix)], {})[suffix] = i
        for stem, there in stems.items():
            candidates = [
                (f, s) for f, s in self.spellings(False)
                if s.parts[0].suffix in there and any(p.suffix in there for p in s.parts[1:])
            ]
            if candidates:
                self.bind(stem, there, candidates)

    def bind(self, stem: str, there: dict[str, int], candidates: list[tuple[Format, Spelling]]) -> None:
        suffixes = [s for s in there if any(p.suffix == s for _, sp in candidates for p in sp.parts)]
        digits, rows = join(self.table, [there[s] for s in suffixes])
        size = len(self.table.shapes)
        kinds = [np.where(r >= 0, self.table.dtype[r] * np.int64(size) + self.table.shape[r], -1) for r in rows.T]
        made: dict[tuple, list] = {}
        for index in groups(kinds):
            index = index[~self.used[rows[index]].any(axis=1)]
            present = [j for j in range(len(suffixes)) if len(index) and rows[index[0], j] >= 0]
            found = {suffixes[j]: self.found(rows[index[0], j]) for j in present}
            fits = [c for c in candidates if c[1].parts[0].suffix in found and any(p.suffix in found for p in c[1].parts[1:])]
            if not fits:
                continue
            names = Names(stem, digits[index])
            type = self.choose(names, found, fits)
            if type is None:
                self.blamed[rows[index][:, present]] = True
                continue
            columns = [suffixes.index(type.spelling.part(p.role).suffix) for p in type.parts]
            key = (type.format.name, type.spelling.name, tuple(p.role for p in type.parts))
            made.setdefault(key, [type, [], [], []])
            for store, value in zip(made[key][1:], (index, rows[index][:, columns], np.full(len(index), self.type_index(type)))):
                store.append(value)
            self.used[rows[index][:, columns]] = True
        for (_, _, roles), (type, index, kept, kind) in made.items():
            self.add(Names(stem, digits[np.concatenate(index)]), type, roles, np.concatenate(kept), np.concatenate(kind))

    def add(self, names: Names, type: Type, roles: tuple[str, ...], rows: np.ndarray, types: np.ndarray) -> None:
        order = np.lexsort(names.digits.T[::-1]) if names.digits.shape[1] else np.arange(len(rows))
        rows, types = rows[order].astype(np.int32), types[order].astype(np.int32)
        self.modules.append(Modules(names.take(order), type.format, type.spelling, roles, rows, types))

    def choose(self, names: Names, found: Mapping[str, tuple[str, tuple[int, ...]]], candidates) -> Type | None:
        """The one type that fits, or None and a finding."""
        tried = [(f, s, fit(f, s, found)) for f, s in candidates]
        fits = [t for _, _, t in tried if isinstance(t, Type)]
        fits = [t for t in fits if len(t.parts) == max(len(u.parts) for u in fits)]
        if len(fits) > 1:
            declared = [t for t in fits if (t.format.name, t.spelling.name) in self.declared]
            fits = declared if len(declared) == 1 else fits
        if len(fits) == 1:
            return fits[0]
        if fits:
            either = " or ".join(f"{t.format.name} ({t.spelling.name})" for t in fits)
            self.say(QR_AMBIGUOUS, names, f"may be {either}", "say which in config.json's quantization_config")
            return None
        misfits = [(f, s, t) for f, s, t in tried if isinstance(t, Misfit)]
        if misfits:
            f, s, why = max(misfits, key=lambda m: (m[2].rank, (m[0].name, m[1].name) in self.declared))
            self.say(why.code, names, f"{why.reason} ({f.name} as {s.name})")
            return None
        codes = candidates[0][1].parts[0]
        others = [x for x in found if x != codes.suffix and self.claims(x, *found[x])]
        if not others:
            return None
        takes = "|".join(dict.fromkeys(d for _, s in candidates for d in s.parts[0].dtypes))
        what = f"{', '.join(others)} beside {codes.suffix}, which is {_type(*found[codes.suffix])} and not {takes}"
        self.say(QR_DENSE_SCALE, names, what, "a weight with a scale that nothing uses is not what its numbers say")
        return None

    def claims(self, suffix: str, dtype: str, shape: tuple[int, ...]) -> bool:
        """Whether a tensor with a companion's suffix is one: its suffix names its weight, or dtype and rank are a companion's.

        Others are tensors that happen to end so, such as the scale of a norm.
        """
        if any(s.parts[0].suffix and suffix.startswith(s.parts[0].suffix) for _, s in self.spellings(True)):
            return True
        parts = [p for _, s in self.spellings(False) for p in s.parts[1:] if p.suffix == suffix and p.grid is not None]
        return any(dtype in p.dtypes and (len(shape) >= len(p.grid) > 1 or len(shape) <= 1 >= len(p.grid)) for p in parts)

    # --------------------------------------------------------------------------------------------------------- dense

    def find_dense(self) -> None:
        """What is left: each tensor is a module of one part, and those that only make sense beside others are findings."""
        spellings = sorted(self.spellings(True), key=lambda fs: -len(fs[1].parts[0].suffix))
        companions = {p.suffix for _, s in self.spellings(False) for p in s.parts[1:]}
        for names, rows in zip(self.table.families, self.table.rows):
            left = np.flatnonzero(~self.used[rows])
            if not len(left):
                continue
            ends = [s.parts[0].suffix for _, s in spellings]
            k = next((k for k, end in enumerate(ends) if names.template.endswith(end) and names.template != end), None)
            if k is None:
                self.say(QR_NO_SCALE, names.take(left), "no format takes it")
                continue
            (format, spelling), suffix = spellings[k], ends[k]
            stem = names.template[: len(names.template) - len(suffix)]
            kinds = np.zeros(len(left), np.int64)
            for index in groups([self.table.dtype[rows[left]], self.table.shape[rows[left]]]):
                dtype, shape = self.found(rows[left[index[0]]])
                kinds[index] = self.type_index(Type(format, spelling, shape, (PartType("codes", dtype, shape),)))
                alone = names.take(left[index][~self.blamed[rows[left[index]]]])
                if len(alone):
                    self.find_alone(alone, dtype, shape, companions)
            self.add(Names(stem, names.digits[left]), self.types[kinds[0]], ("codes",), rows[left][:, None], kinds)

    def find_alone(self, names: Names, dtype: str, shape: tuple[int, ...], companions: set[str]) -> None:
        ending = max((s for s in companions if names.template.endswith(s)), key=len, default=None)
        if ending and self.claims(ending, dtype, shape):
            path = Names(names.template[: len(names.template) - len(ending)], names.digits)
            self.say(QR_NO_WEIGHT, path, f"{ending} is {_type(dtype, shape)}, and no weight here takes it")
            return
        dense = {s.parts[0].suffix for _, s in self.spellings(True)}
        for _, s in self.spellings(False):
            codes = s.parts[0]
            packed = dtype in codes.dtypes and DTYPE_BITS[dtype] <= 8 and len(shape) >= 2
            if codes.suffix and names.template.endswith(codes.suffix) and (packed or codes.suffix not in dense):
                path = Names(names.template[: len(names.template) - len(codes.suffix)], names.digits)
                self.say(QR_NO_SCALE, path, f"{codes.suffix} is {_type(dtype, shape)}, without a scale")
                return

    # ------------------------------------------------------------------------------------------------------- coherence

    def by_template(self) -> dict[str, list[Modules]]:
        made: dict[str, list[Modules]] = {}
        for m in self.modules:
            made.setdefault(m.names.template, []).append(m)
        return {t: ms for t, ms in made.items() if len(ms) > 1}

    def find_twice(self) -> None:
        for template, modules in self.by_template().items():
            digits = np.concatenate([m.names.digits for m in modules])
            which = np.repeat(np.arange(len(modules)), [len(m) for m in modules])
            values, first, place = np.unique(row_keys(digits), return_index=True, return_inverse=True)
            owners = np.zeros((len(values), len(modules)), bool)
            owners[place, which] = True
            twice = np.flatnonzero(owners.sum(axis=1) > 1)
            if len(twice):
                ends = dict.fromkeys(repr(modules[k].spelling.parts[0].suffix) for k in np.flatnonzero(owners[twice[0]]))
                reason = f"it is stored twice, with the suffixes {' and '.join(ends)}"
                self.say(QR_TWICE, Names(template, digits[first[twice]]), reason)

    def find_some(self) -> None:
        """An optional companion (an activation scale) that others of the template have: engines read the gap as garbage."""
        for modules in self.by_template().values():
            for m in modules:
                peers = {r for o in modules if o.spelling is m.spelling for r in o.roles}
                lacking = [m.spelling.part(r).suffix for r in peers - set(m.roles)]
                if lacking:
                    reason = f"without {', '.join(sorted(lacking))}, which others of this kind have"
                    self.say(QR_SOME, m.names, reason, severity="warning")
