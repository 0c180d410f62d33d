"""What is in a checkpoint, from its headers: modules by template and type, sizes, and what its config says of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from attrs import asdict, frozen

from quantrules.api import _builtin, builtin_formats
from quantrules.checkpoint import Source
from quantrules.diagnostics import Diagnostic, visible
from quantrules.formats import Modules, ModuleTable, find_modules, load_dialects
from quantrules.names import HOLE
from quantrules.plan.view import size

SCHEMA = 1  # of the JSON


@frozen
class Group:
    """Modules of one template and one type. `ranges`: for each `#` of the template its least and largest number."""

    template: str
    ranges: tuple[tuple[int, int], ...]
    format: str
    spelling: str
    tensors: dict[str, str]  # suffix -> dtype[shape] as stored
    shape: tuple[int, ...]  # logical
    modules: int
    parameters: int  # of all its modules; their scales are none
    bytes: int

    @property
    def type(self) -> str:
        stored = next(iter(self.tensors.values())).split("[")[0] if self.format == "dense" else self.format
        return f"{stored}[{', '.join(map(str, self.shape))}]"


@frozen
class Inspection:
    """What `inspect` found; `declared` holds the quantization configs by place."""

    files: int
    tensors: int
    bytes: int
    parameters: int
    groups: tuple[Group, ...]
    declared: dict[str, Any]
    diagnostics: tuple[Diagnostic, ...]

    @property
    def bits(self) -> float:
        """Bits on disk for each parameter, scales included."""
        return 8 * self.bytes / self.parameters if self.parameters else 0.0

    def to_json(self) -> dict[str, Any]:
        return {"schema": SCHEMA, "files": self.files, "tensors": self.tensors, "bytes": self.bytes, "parameters": self.parameters,
                "bits_per_parameter": round(self.bits, 4), "formats": self.formats(), "declared": self.declared,
                "groups": [asdict(g) for g in self.groups], "diagnostics": [d.to_json() for d in self.diagnostics]}  # fmt: skip

    def formats(self) -> list[dict[str, Any]]:
        """Sums by format and spelling; of dense modules, by dtype."""
        sums: dict[tuple[str, str], list[int]] = {}
        for g in self.groups:
            key = (g.format, g.spelling) if g.format != "dense" else (g.type.split("[")[0], "")
            entry = sums.setdefault(key, [0, 0, 0, 0])
            for i, n in enumerate((g.modules, g.modules * len(g.tensors), g.parameters, g.bytes)):
                entry[i] += n
        return [{"format": f, "spelling": s, **dict(zip(("modules", "tensors", "parameters", "bytes"), sums[f, s]))} for f, s in sums]

    def render(self) -> str:
        rows = [(_ranges(g), visible(g.template), f"{g.type} {g.spelling}" if g.format != "dense" else g.type, f"{g.modules:,}", size(g.bytes))
                for g in self.groups]  # fmt: skip
        kinds = [(f"{f['format']} {f['spelling']}".strip(), f"{f['modules']:,} modules", f"{f['tensors']:,} tensors", size(f["bytes"])) for f in self.formats()]
        declared = [f"{place}: {_short(content)}" for place, content in self.declared.items()] or ["none: no config says that anything is quantised"]
        total = f"{self.tensors:,} tensors in {self.files} file{'s' * (self.files != 1)}, {size(self.bytes)}, {_count(self.parameters)} parameters, {self.bits:.2f} bits each"
        return "\n".join([*_table([("#", "template", "type", "modules", "bytes"), *rows], "lllrr"), "", "stored",
                          *("  " + line for line in _table(kinds, "lrrr")), "declared", *("  " + line for line in declared), "total", "  " + total])  # fmt: skip


def inspect(source: Source) -> Inspection:
    """Look at a source's headers and config; no tensor is read."""
    table = find_modules(source.table, source.config_files, builtin_formats(), load_dialects(_builtin()))
    groups = [(int(rows.min()), group) for modules in table.modules for rows, group in _groups(table, modules)]
    listed = tuple(g for _, g in sorted(groups, key=lambda pair: pair[0]))
    declared = {str(s): dict(s.content) for s in table.sections}
    return Inspection(len(source.table.files), len(source.table), int(source.table.nbytes.sum()), sum(g.parameters for g in listed), listed,
                      declared, (*source.warnings, *table.diagnostics))  # fmt: skip


def _groups(table: ModuleTable, modules: Modules) -> Iterator[tuple[np.ndarray, Group]]:
    for kind in np.unique(modules.types):
        these = np.flatnonzero(modules.types == kind)
        type, digits = table.types[kind], modules.names.digits[these]
        ranges = tuple((int(c.min()), int(c.max())) for c in digits.T)
        tensors = {type.spelling.part(p.role).suffix: str(p) for p in type.parts}
        yield modules.rows[these], Group(
            modules.names.template.replace(HOLE, "#"), ranges, type.format.name, type.spelling.name, tensors, type.shape,
            len(these), len(these) * math.prod(type.shape), len(these) * type.nbytes)  # fmt: skip


def _ranges(group: Group) -> str:
    """`0-60 × 0-383 (9)`: what the `#`s read, and the count where it is not the product."""
    text = " × ".join(f"{a}-{b}" if b > a else str(a) for a, b in group.ranges)
    whole = math.prod(b - a + 1 for a, b in group.ranges)
    return text if whole == group.modules else f"{text} ({group.modules:,})"


def _short(content: Any, limit: int = 6) -> str:
    """A config for one line: lists and objects by their length where they are long."""
    if isinstance(content, dict):
        items = [f"{visible(str(k))}={_short(v, 3)}" for k, v in list(content.items())[:24]]
        return ", ".join(items) if limit == 6 else "{" + ", ".join(items) + "}" if len(content) <= limit else f"{{{len(content)} keys}}"
    if isinstance(content, list):
        return "[" + ", ".join(_short(v, 3) for v in content) + "]" if len(content) <= limit else f"[{len(content)} items]"
    return visible(str(content))[:60]


def _count(n: int) -> str:
    return next((f"{n / unit:.3g} {word}" for unit, word in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")) if n >= unit), f"{n:,}")


def _table(rows: list[tuple[str, ...]], align: str) -> list[str]:
    widths = [max(len(r[i]) for r in rows) for i in range(len(align))] if rows else []
    just = {"l": str.ljust, "r": str.rjust}
    return ["  ".join(just[a](c, w) for a, c, w in zip(align, r, widths)).rstrip() for r in rows]
