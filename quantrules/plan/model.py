"""What a plan is: immutable, and columns where there are many. A recipe is typed once; units that share it are rows.

A unit is one application of a rule: a grid of source modules becomes a grid of targets. `Units.sources[u]` holds table
rows of all parts of all members of unit u, in the order of `Recipe.slots`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import field, frozen

from quantrules.diagnostics import Diagnostic, PlanError
from quantrules.lang import ast
from quantrules.names import KeyTable, Names, fill
from quantrules.ops.base import Need, Step
from quantrules.types import Grid, Type


@frozen(eq=False)
class Recipe:
    """took: types of the sources. steps: typed. made: types of the targets. checks: needs on items of `took`."""

    took: Grid[Type]
    steps: tuple[Step, ...]
    made: Grid[Type]
    checks: tuple[Need, ...] = ()

    @property
    def slots(self) -> tuple[tuple[int, str], ...]:
        """(item of took, role) of each source tensor of a unit, in the order of `Units.sources`."""
        return tuple((i, p.role) for i, t in enumerate(self.took.items) for p in t.parts)

    @property
    def copies(self) -> bool:
        """Whether every part is written byte for byte as it was read."""
        return all(step.op.identity(step) for step in self.steps)


@frozen(eq=False)
class Units:
    """n units of one rule and one recipe."""

    rule: ast.Rule
    recipe: Recipe
    sources: np.ndarray  # int32[n, slots]: rows of the key table
    targets: tuple[Names, ...]  # one Names of n paths for each item of recipe.made; () for drop
    paths: tuple[Names, ...]  # one Names of n source paths for each item of recipe.took (after renames)

    def __len__(self) -> int:
        return len(self.sources)

    def target_keys(self, unit: int) -> list[tuple[str, int, str]]:
        """(key, item of made, role) of every tensor that a unit writes."""
        made = self.recipe.made.items
        return [(names[unit] + made[i].spelling.part(p.role).suffix, i, p.role) for i, names in enumerate(self.targets) for p in made[i].parts]


@frozen(eq=False)
class Plan:
    """Rules bound to a source. `units` are in the order of the rules and, within one, of the first source row."""

    table: KeyTable
    units: tuple[Units, ...]
    config_files: Mapping[str, Any]  # file name -> JSON to write
    diagnostics: tuple[Diagnostic, ...] = ()
    params: Mapping[str, Any] = field(factory=dict)
    metadata: Mapping[str, str] = field(factory=dict)
    rules: tuple[str, ...] = ()  # names of the rule files
    texts: Mapping[str, str] = field(factory=dict, repr=False)  # their texts, for the manifest
    source: Any = field(default=None, repr=False)  # what it was bound to
    scope: Any = field(default=None, repr=False)  # what the rule file defines
    binder: Any = field(default=None, repr=False)  # which rule took each module, for explain

    def summary(self, by: str = "section") -> str:
        """What would happen, as a table of counts and bytes by section, rule or type."""
        from quantrules.plan.view import table

        return table(self, by)

    def __eq__(self, other: object) -> bool:
        """Whether both read the same rows of equal tables and write the same keys, types and config files by the same steps."""
        if not isinstance(other, Plan):
            return NotImplemented
        sides = [([_facts(u) for u in p.units], p.config_files, p.table.files) for p in (self, other)]
        return sides[0] == sides[1] and all(np.array_equal(a.sources, b.sources) for a, b in zip(self.units, other.units))

    __hash__ = None

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        return tuple(d for d in self.diagnostics if d.severity == "error")

    def raise_for_errors(self) -> None:
        if self.errors:
            raise PlanError(self.errors)


def _facts(units: Units) -> tuple:
    recipe = units.recipe
    columns = [(n.template, n.digits.tobytes()) if fill(n.template, n.digits[0]) == n[0] else list(n) for n in units.targets if len(n)]
    return recipe.took, tuple(map(str, recipe.steps)), recipe.made, columns
