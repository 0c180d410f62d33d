"""Activation scales that come in a file of their own: they join the dense modules that a rule quantises."""

from __future__ import annotations

import numpy as np
from attrs import evolve

from quantrules.diagnostics import Diagnostic, define
from quantrules.lang.mistakes import nearest
from quantrules.names import KeyTable
from quantrules.plan.bind import Binder
from quantrules.types import Part, PartType

STRAY = define("QR140", "An activation scale fits no module that is quantised")
WITHOUT = define("QR141", "Some modules have activation scales and others do not")
ACT = Part("act", ".input_scale", ("f32",), (), optional=True, cat="max", stack="collect")


def attach(binder: Binder, table: KeyTable, first: int) -> None:
    """Give dense modules the rows of `table` from `first` on, each called MODULE.input_scale, as their activation scale."""
    known = {binder.name_of(m): m for f in binder.families for m in range(f.first, f.first + len(f.names))}
    if binder.rows.shape[1] < 2:
        binder.rows = np.hstack([binder.rows, np.full((len(binder.rows), 1), -1, np.int32)])
    for row in range(first, len(table)):
        module = table.name(row).removesuffix(ACT.suffix)
        type = binder.types[binder.type_of[known[module]]] if module in known else None
        if type is None or not type.is_dense:
            reason = "no module has that name" if type is None else f"it is {type.format.name} already"
            binder.diagnostics.append(Diagnostic(STRAY, f"an activation scale is given for {module}, and {reason}", help=nearest(module, known)))
            continue
        spelling = evolve(type.spelling, parts=(*type.spelling.parts, ACT))
        wider = evolve(type, spelling=spelling, parts=(*type.parts, PartType(ACT.role, "f32", ())))
        if wider not in binder.types:
            binder.types.append(wider)
        binder.type_of[known[module]] = binder.types.index(wider)
        binder.rows[known[module], 1] = row


def check_used(binder: Binder) -> list[Diagnostic]:
    """Every scale that was given reaches a quantised module, and modules without one are named."""
    found, without = [], []
    for units in binder.units:
        for type, names in zip(units.recipe.made.items, units.targets):
            if type.is_dense and type.part(ACT.role):
                found.append(Diagnostic(STRAY, f"an activation scale is given for {names[0]}, which stays {type}", units.rule.span,
                                        "this rule takes it", count=len(names), help="leave it out of the file, or quantise the module"))  # fmt: skip
            elif not type.is_dense and type.spelling.part(ACT.role) and not type.part(ACT.role) and units.recipe.steps:
                without += list(names)
    if without:
        more = f" and {len(without) - 1} more" if len(without) > 1 else ""
        found.append(Diagnostic(WITHOUT, f"{without[0]}{more} become quantised without an activation scale", severity="warning", count=len(without)))
    return found
