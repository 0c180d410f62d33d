"""A plan as numbers: groups by rule, section or type, as a table for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from attrs import frozen

from quantrules.plan.model import Plan, Units
from quantrules.types import Type

SCHEMA = 1  # of the JSON; a change that readers would notice raises it


@frozen
class Group:
    """Units of one rule that go from one format to another. Bytes are those of tensors, read and written."""

    file: str
    line: int
    section: str
    rule: str
    source: str  # "nvfp4", "bf16", or several joined by " + "
    target: str  # "" for drop
    action: str  # keep | convert | drop
    units: int
    modules: int
    tensors_in: int
    tensors_out: int
    bytes_in: int
    bytes_out: int
    label: str  # exact | exact in a range | lossy

    def to_json(self) -> dict[str, Any]:
        from attrs import asdict

        return asdict(self)


def groups(plan: Plan) -> tuple[Group, ...]:
    """One group a rule and conversion, in plan order."""
    found: dict[tuple, list[Units]] = {}
    for units in plan.units:
        key = (id(units.rule), _formats(units.recipe.took.items), _formats(units.recipe.made.items), _action(units))
        found.setdefault(key, []).append(units)
    return tuple(_group(plan, *key[1:], members) for key, members in found.items())


def _formats(types: tuple[Type, ...]) -> str:
    return " + ".join(dict.fromkeys(t.dtype if t.is_dense else t.format.name for t in types))


def _action(units: Units) -> str:
    if not units.recipe.made.items:
        return "drop"
    return "keep" if units.recipe.copies else "convert"


def _group(plan: Plan, source: str, target: str, action: str, members: list[Units]) -> Group:
    rule = members[0].rule
    line = rule.span.text.position(rule.span.start)[0]
    labels = [step.op.label(step) for u in members for step in u.recipe.steps]
    worst = next((w for w in ("lossy", "exact in a range") if w in labels), "exact")
    count = lambda grid: sum(len(t.parts) for t in grid.items)  # noqa: E731
    size = lambda grid: sum(t.nbytes for t in grid.items)  # noqa: E731
    return Group(
        rule.span.text.name, line, rule.section, " ".join(rule.span.source.split()), source, target, action,
        sum(map(len, members)), sum(len(u) * len(u.recipe.took.items) for u in members),
        sum(len(u) * count(u.recipe.took) for u in members), sum(len(u) * count(u.recipe.made) for u in members),
        sum(len(u) * size(u.recipe.took) for u in members), sum(len(u) * size(u.recipe.made) for u in members), worst,
    )  # fmt: skip


def to_json(plan: Plan) -> dict[str, Any]:
    """The plan by group. Keys are stable within a schema number."""
    listed = groups(plan)
    totals = {name: sum(getattr(g, name) for g in listed) for name in ("units", "modules", "tensors_in", "tensors_out", "bytes_in", "bytes_out")}
    return {"schema": SCHEMA, "rules": list(plan.rules), "params": dict(plan.params), "totals": totals,
            "diagnostics": [d.to_json() for d in plan.diagnostics], "groups": [g.to_json() for g in listed],
            "conversions": [{"section": s, "from": a, "to": b, "action": x, "units": u, "tensors_in": t, "tensors_out": o}
                            for (s, a, b, x), (u, t, o, *_) in merged(listed, ("section", "source", "target", "action")).items()]}  # fmt: skip


def unit_lines(plan: Plan) -> Iterator[dict[str, Any]]:
    """One JSON object a unit: its sources, steps and targets with types."""
    for units in plan.units:
        for u in range(len(units)):
            yield {"sources": [plan.table.name(int(r)) for r in units.sources[u]], "steps": [str(s) for s in units.recipe.steps],
                   "targets": {key: str(units.recipe.made.items[i].part(role)) for key, i, role in units.target_keys(u)}}  # fmt: skip


def merged(listed, keys: tuple[str, ...]) -> dict[tuple, tuple[int, int, int, int, int]]:
    """Sums of (units, tensors in, tensors out, bytes in, bytes out) by the given fields of groups."""
    sums: dict[tuple, list[int]] = {}
    for g in listed:
        entry = sums.setdefault(tuple(getattr(g, k) for k in keys), [0] * 5)
        for i, name in enumerate(("units", "tensors_in", "tensors_out", "bytes_in", "bytes_out")):
            entry[i] += getattr(g, name)
    return {k: tuple(v) for k, v in sums.items()}


def size(n: int) -> str:
    """Bytes for people, in decimal units as disks have them."""
    value, unit = float(n), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if value < 1000 or unit == "TB":
            break
        value /= 1000
    return f"{n} B" if unit == "B" else f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def table(plan: Plan, by: str = "section") -> str:
    """What would happen, as aligned text. by: section, rule or type."""
    fields = {"section": ("section", "source", "target", "action"), "rule": ("line", "source", "target", "action"),
              "type": ("source", "target", "action")}[by]  # fmt: skip
    listed = groups(plan)
    rules = {g.line: g.rule for g in listed}
    rows = [("", "units", "tensors", "", "bytes", "")]
    last = None
    for key, (units, tin, tout, bin_, bout) in merged(listed, fields).items():
        head = None if by == "type" else key[0] if by == "section" else f"{key[0]}: {rules[key[0]]}"
        if head != last and head:
            rows.append((head if len(head) < 100 else head[:97] + "…",))
        last = head
        source, target, action = key[-3:]
        what = f"{source} → {target}" if action == "convert" else f"{source} {'kept' if action == 'keep' else 'dropped'}"
        rows.append(("  " + what, f"{units:,}", f"{tin:,}", f"→ {tout:,}", size(bin_), f"→ {size(bout)}"))
    total = [sum(getattr(g, n) for g in listed) for n in ("units", "tensors_in", "tensors_out", "bytes_in", "bytes_out")]
    rows.append(("total", f"{total[0]:,}", f"{total[1]:,}", f"→ {total[2]:,}", size(total[3]), f"→ {size(total[4])}"))
    widths = [max(len(r[i]) for r in rows if len(r) > 1) for i in range(6)]
    align = (str.ljust, str.rjust, str.rjust, str.ljust, str.rjust, str.ljust)
    return "\n".join(r[0] if len(r) == 1 else "  ".join(f(c, w) for f, c, w in zip(align, r, widths)).rstrip() for r in rows)
