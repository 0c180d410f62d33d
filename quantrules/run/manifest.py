"""The manifest beside an output: which rules and versions made it, and what each target was made of.

The same plan gives the same bytes: no times, no paths, no host.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, version
from pathlib import PurePath
from typing import Any

from quantrules.names import HOLE, Names
from quantrules.plan.model import Plan, Units

SCHEMA = 1


def manifest(plan: Plan) -> dict[str, Any]:
    """JSON: rule files with the sha256 of their text, parameters, versions; the rule and sources of each template of targets."""
    hashes = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in plan.texts.items()}
    return {
        "schema": SCHEMA,
        "versions": {name: _version(name) for name in ("quantrules", "torch", "numpy", "numba")},
        "rules": [{"name": PurePath(name).name, "sha256": hashes.get(name)} for name in plan.rules],
        "params": dict(plan.params),
        "targets": [entry for units in plan.units for entry in _entries(units)],
    }


def _entries(units: Units) -> list[dict[str, Any]]:
    sources = [_template(p) for p in units.paths]
    rule = units.rule.span
    place = f"{PurePath(rule.text.name).name}:{rule.text.position(rule.start)[0]}" if rule else ""
    steps = " | ".join(map(str, units.recipe.steps)) or "keep"
    made = zip(units.targets, units.recipe.made.items, strict=True)
    return [{"target": _template(names), "type": str(type), "units": len(units), "rule": place, "steps": steps,
             "sources": sources if len(sources) < 9 else [*sources[:4], f"… {len(sources) - 8} more", *sources[-4:]]}
            for names, type in made]  # fmt: skip


def _template(names: Names) -> str:
    """What the names have in common, with {n} for each number that differs."""
    same = (names.digits == names.digits[:1]).all(axis=0)
    texts = names.template.split(HOLE)
    numbers = [str(d) if keep else "{n}" for d, keep in zip(names.digits[0].tolist(), same.tolist(), strict=True)]
    return "".join(text + number for text, number in zip(texts, [*numbers, ""], strict=True))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
