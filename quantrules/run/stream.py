"""A plan's targets as tensors, one unit after the other: what a loader reads instead of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from quantrules.checkpoint import Source
from quantrules.diagnostics import RunError
from quantrules.lower import Layout, layout, lower
from quantrules.ops.base import Value
from quantrules.plan.model import Plan
from quantrules.run.evaluate import Unit
from quantrules.run.preflight import preflight
from quantrules.types import PartType, part_bytes

MEMORY = 256 << 20  # bytes of working memory beside the tensors of one unit


def stream(plan: Plan, source: Source, device: str = "cpu", backend: str = "cpu") -> Iterator[tuple[str, object]]:
    """(key, torch.Tensor) of every target, in plan order, each whole and owned by who takes it.

    Nothing is checked ahead but the plan's errors: `preflight` reads the values. Raises RunError for a value that is refused.
    """
    plan.raise_for_errors()
    for units in plan.units:
        if not units.recipe.made.items:
            continue
        program = lower(units.recipe, backend)
        cut = layout(program, MEMORY)
        for index in range(len(units)):
            values = whole(Unit(units, index, program, source), cut)
            for key, item, role in units.target_keys(index):
                yield key, _tensor(values[item].parts[role], units.recipe.made.items[item].part(role)).to(device)


def in_memory(plan: Plan, source: Source) -> dict[str, object]:
    """Every target as a torch tensor, by key; values are checked first, as `execute` checks them (RunError)."""
    plan.raise_for_errors()
    if errors := [d for d in preflight(plan, source) if d.severity == "error"]:
        raise RunError(errors)
    return dict(stream(plan, source))


def whole(unit: Unit, cut: Layout) -> list[Value]:
    """All targets of a unit; its tiles are made where they lie in them."""
    if cut.whole:
        return unit.make_all()
    unit.survey(cut)
    values = [Value.empty(t) for t in unit.units.recipe.made.items]
    for tile in cut.tiles:
        value = values[tile.item]
        spans = ((role, *part_bytes(value.type, role, tile.lo, tile.hi)) for role in value.parts)
        unit.make(len(unit.program.calls), tile.item, tile.lo, tile.hi, {role: value.parts[role][a:b] for role, a, b in spans})
    return values


def _tensor(buffer, part: PartType):
    """A buffer as the tensor that safetensors' own loader would make of it."""
    import torch

    from quantrules.ops.torch_views import view

    tensor = view(buffer, part)
    return tensor.view(torch.float4_e2m1fn_x2) if part.dtype == "f4" else tensor
