"""For authors of rules: text fixtures that say what a rule file makes of a source, and in-memory sources and runs.

A fixture file holds cases; each begins with `=== title` and has named sections that begin with `--- name`:

    === members are decoded into their rows
    --- source
    a.kv_proj    nvfp4[512, 4096]
    a.gate_proj  nvfp4[512, 4096]
    --- rules
    a.{kv_proj,gate_proj} → unpack | dequant | cat → a.fused
    --- plan
    a.fused.weight  bf16[1024, 4096]  = a.kv_proj, a.gate_proj | dequant | cat

In `source` a dtype stands for one tensor, a format for a module with its companions (`nvfp4/SPELLING[…]` in a spelling
that is not the first; `+act` behind adds an optional part). A case has `plan` or `diagnostics`, or both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from quantrules.names import KeyTable
from quantrules.types import DTYPE_BITS, Format, make_type, nbytes

SECTIONS = ("config", "files", "source", "params", "rules", "plan", "modules", "output", "diagnostics")
_LINE = re.compile(r"(\S+)\s+([\w]+)(?:/(\w+))?\[([\d, ]*)\]((?:\s*\+\w+)*)$")


@frozen
class Case:
    """One case of a fixture file; `place` is FILE:LINE of its title."""

    title: str
    place: str
    sections: Mapping[str, str]


def read_cases(path: Path) -> Iterator[Case]:
    """The cases of a fixture file. A section that is unknown, doubled or without a case is a ValueError."""
    title, place, sections, name = "", "", {}, ""
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("=== "):
            if title:
                yield Case(title, place, {k: v.strip("\n") for k, v in sections.items()})
            title, place, sections, name = line[4:].strip(), f"{path.name}:{number}", {}, ""
        elif line.startswith("--- "):
            name = line[4:].strip()
            if name not in SECTIONS or name in sections or not title:
                raise ValueError(f"{path}:{number}: section {name!r} is unknown, doubled or outside a case")
            sections[name] = ""
        elif name:
            sections[name] += line + "\n"
        elif line.strip() and title:
            raise ValueError(f"{path}:{number}: text outside a section")
    if title:
        yield Case(title, place, {k: v.strip("\n") for k, v in sections.items()})


@frozen(eq=False)
class Headers:
    """A source of headers only: enough for a plan, not for a run."""

    table: KeyTable
    config: Mapping[str, Any] = field(factory=dict)
    metadata: Mapping[str, str] = field(factory=dict)
    warnings: tuple = ()
    path: Path | None = None

    @property
    def config_files(self) -> dict[str, Any]:
        return {"config.json": dict(self.config)} if self.config else {}


def keys(lines: str, formats: Mapping[str, Format]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors that the lines of a `source` section stand for: key -> (dtype, shape on disk)."""
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for line in filter(None, (raw.split("#")[0].strip() for raw in lines.splitlines())):
        matched = _LINE.match(line)
        if not matched:
            raise ValueError(f"not `NAME TYPE[SHAPE]`: {line}")
        name, kind, spelling, dims, extra = matched.groups()
        shape = tuple(int(d) for d in dims.split(",") if d.strip())
        if kind in DTYPE_BITS:
            found[name] = (kind, shape)
            continue
        form = formats[kind]
        spelled = form.spelling(spelling) if spelling else form.spellings[0]
        roles = {p.role for p in spelled.parts if not p.optional} | set(re.findall(r"\w+", extra))
        for part in make_type(form, spelled, shape, roles=roles).parts:
            found[name + spelled.part(part.role).suffix] = (part.dtype, part.shape)
    return found


def headers(lines: str, formats: Mapping[str, Format], config: Mapping[str, Any] | None = None) -> Headers:
    """A header-only source from the lines of a `source` section."""
    entries = [(k, 0, d, s, 0, nbytes(d, s)) for k, (d, s) in keys(lines, formats).items()]
    return Headers(KeyTable.build(["source"], entries), config or {})


def run_case(case: Case) -> tuple[str, str]:
    """(plan, diagnostics) of a case, as its sections should have them."""
    from quantrules.api import builtin_formats, parse
    from quantrules.diagnostics import QuantrulesError

    config = json.loads(case.sections.get("config", "{}"))
    params = dict(p.split("=", 1) for p in case.sections.get("params", "").split())
    try:
        rules = parse(case.sections["rules"], "t.rules")
        plan = rules.bind(headers(case.sections.get("source", ""), builtin_formats(), config), **params)
    except QuantrulesError as error:
        return "", str(error)
    return "\n".join(plan_lines(plan)), "\n\n".join(d.render() for d in plan.diagnostics)


def plan_lines(plan) -> Iterator[str]:
    """One line a target: key, type, and where it comes from."""
    for units in plan.units:
        for u in range(len(units)):
            steps = "".join(f" | {s}" for s in units.recipe.steps)
            sources = ", ".join(names[u] for names in units.paths)
            for key, item, role in units.target_keys(u):
                yield f"{key}  {units.recipe.made.items[item].part(role)}  = {sources}{steps}"
            if not units.targets:
                yield f"(dropped)  {', '.join(plan.table.name(int(r)) for r in units.sources[u])}"


def run(plan, source=None) -> dict[str, Any]:
    """Every target of a plan as a torch tensor, in memory, after the plan's checks. Raises PlanError and RunError."""
    from quantrules.run.stream import in_memory

    return in_memory(plan, plan.source if source is None else source)
