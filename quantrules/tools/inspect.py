"""What is in a checkpoint, from its headers: modules by template and type, sizes, and what its config says of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from attrs import asdict, frozen

from quantrules.api import builtin_file, builtin_formats
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
    type: str
    format: str  # of dense modules, their dtype
    spelling: str  # "" for dense ones
    tensors: dict[str, str]  # suffix -> dtype[shape] as stored
    modules: int
    parameters: int  # of all its modules; their scales are none
    bytes: int


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

    def formats(self) -> list[dict[str, Any]]:
        """Sums by format and spelling; of dense modules, by dtype."""
        sums: dict[tuple[str, str], np.ndarray] = {}
        for g in self.groups:
            one = np.array([g.modules, g.modules * len(g.tensors), g.parameters, g.bytes])
            sums[g.format, g.spelling] = sums.get((g.format, g.spelling), 0) + one
        names = ("modules", "tensors", "parameters", "bytes")
        return [{"format": f, "spelling": s, **dict(zip(names, sums[f, s].tolist()))} for f, s in sums]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA, "files": self.files, "tensors": self.tensors, "bytes": self.bytes, "parameters": self.parameters,
            "bits_per_parameter": round(self.bits, 4), "formats": self.formats(), "declared": self.declared,
            "groups": [asdict(g) for g in self.groups], "diagnostics": [d.to_json() for d in self.diagnostics],
        }  # fmt: skip

    def render(self) -> str:
        rows = [("#", "template", "type", "modules", "bytes")]
        for g in self.groups:
            rows.append((_ranges(g), visible(g.template), f"{g.type} {g.spelling}".rstrip(), f"{g.modules:,}", size(g.bytes)))
        stored = [
            (
                f"  {f['format']} {f['spelling']}".rstrip(),
                f"{f['modules']:,} modules",
                f"{f['tensors']:,} tensors",
                size(f["bytes"]),
            )
            for f in self.formats()
        ]
        declared = [f"  {place}: {_short(content)}" for place, content in self.declared.items()] or ["  nothing"]
        files = f"{self.tensors:,} tensors in {self.files} file{'s' * (self.files != 1)}, {size(self.bytes)}"
        total = f"  {files}, {_count(self.parameters)} parameters, {self.bits:.2f} bits each"
        parts = [*_table(rows, "lllrr"), "", "stored", *_table(stored, "lrrr"), "declared", *declared, "total", total]
        return "\n".join(parts)


def inspect(source: Source) -> Inspection:
    """Look at a source's headers and config; no tensor is read."""
    table = find_modules(source.table, source.config_files, builtin_formats(), load_dialects(builtin_file()))
    groups = sorted((pair for modules in table.modules for pair in _groups(table, modules)), key=lambda pair: pair[0])
    listed = tuple(group for _, group in groups)
    return Inspection(
        len(source.table.files), len(source.table), int(source.table.nbytes.sum()), sum(g.parameters for g in listed), listed,
        {str(s): dict(s.content) for s in table.sections}, (*source.warnings, *table.diagnostics),
    )  # fmt: skip


def _groups(table: ModuleTable, modules: Modules) -> Iterator[tuple[int, Group]]:
    """(first row, group) for each type."""
    for kind in np.unique(modules.types):
        these = np.flatnonzero(modules.types == kind)
        type, n = table.types[kind], len(these)
        template = modules.names.template.replace(HOLE, "#")
        ranges = tuple((int(c.min()), int(c.max())) for c in modules.names.digits[these].T)
        named = (type.dtype, "") if type.is_dense else (type.format.name, type.spelling.name)
        tensors = {type.spelling.part(p.role).suffix: str(p) for p in type.parts}
        group = Group(template, ranges, str(type), *named, tensors, n, n * math.prod(type.shape), n * type.nbytes)
        yield int(modules.rows[these].min()), group


def _ranges(group: Group) -> str:
    """`0-60 × 0-383`: what the `#`s read; `(30)` where it is not the product."""
    text = " × ".join(f"{a}-{b}" if b > a else str(a) for a, b in group.ranges)
    return text if math.prod(b - a + 1 for a, b in group.ranges) == group.modules else f"{text} ({group.modules:,})"


def _short(content: Any, depth: int = 0) -> str:
    """A config in one line: what is long and inside is told by its length."""
    if isinstance(content, dict) and (depth == 0 or len(content) <= 3):
        items = ", ".join(f"{visible(str(k))}={_short(v, depth + 1)}" for k, v in list(content.items())[:24])
        return f"{{{items}}}" if depth else items
    if isinstance(content, (dict, list)):
        brackets = "{}" if isinstance(content, dict) else "[]"
        whole = isinstance(content, list) and len(content) <= 3
        return (
            f"{brackets[0]}{', '.join(_short(v, depth + 1) for v in content) if whole else f'{len(content)} items'}{brackets[1]}"
        )
    return visible(str(content))[:60]


def _count(n: int) -> str:
    words = ((10**12, "trillion"), (10**9, "billion"), (10**6, "million"))
    return next((f"{n / unit:.3g} {word}" for unit, word in words if n >= unit), f"{n:,}")


def _table(rows: list[tuple[str, ...]], align: str) -> list[str]:
    widths = [max(len(r[i]) for r in rows) for i in range(len(align))] if rows else []
    just = {"l": str.ljust, "r": str.rjust}
    return ["  ".join(just[a](c, w) for a, c, w in zip(align, r, widths)).rstrip() for r in rows]
