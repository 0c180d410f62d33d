"""Recipes: the steps of a rule, typed once for each signature of source types, with the checks that bytes must pass."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from quantrules.diagnostics import Diagnostic, PlanError, RuleError, define
from quantrules.lang import ast
from quantrules.lang.evaluate import Env, evaluate, free_names
from quantrules.ops.base import REGISTRY, Context, Refused, Step
from quantrules.plan.model import Recipe
from quantrules.plan.scope import BoundRule
from quantrules.types import Axis, Grid, Type, flat_rows

ASSERTED = define("QR150", "A value does not have the type that the rule asserts")
NOWHERE: Grid = Grid((Axis("", ()),), ())  # what `drop` makes


def make_recipe(rule: BoundRule, took: Grid[Type], context: Context, env: Env) -> Recipe:
    """Type every step; raises PlanError with the step that refuses."""
    bound: dict[str, Any] = {}
    sizes = {a.name: len(a.labels) for a in took.axes if a.name}
    each = len(took.items) // len(rule.sources)  # the patterns of `P, Q → …` are the first axis
    for i, source in enumerate(rule.sources):
        for type in took.items[i * each : (i + 1) * each] if source.type is not None else ():
            check_type(source.type, type, env.extend(sizes), bound)
    grid, steps, needs, remade = took, [], [], False
    origin = [frozenset([i]) for i in range(len(took.items))]
    for step in rule.steps:
        if step.op.name == "drop":
            return Recipe(took, (), NOWHERE)
        try:
            made = step.op.infer(grid, step.args, context)
        except Refused as refused:
            raise PlanError(refusal(refused, step.span, grid)) from None
        typed = Step(step.op, step.args, grid, made, step.span)
        if made != grid or not step.op.identity(typed):
            steps.append(typed)
            if not remade:  # later scales are not those of the source
                for need in step.op.needs(typed):
                    items = set().union(*(origin[i] for i in need.items))
                    needs.append(evolve(need, items=tuple(sorted(items)), span=step.span))
            remade |= step.op.surveys or all(t.is_dense for t in grid.items) != all(t.is_dense for t in made.items)
            origin = [_origin(typed, j, origin) for j in range(len(made.items))]
        grid = made
    _check_storable(rule, grid, context)
    sizes |= {a.name: len(a.labels) for a in grid.axes if a.name}
    for type in grid.items if rule.rule.type is not None else ():
        check_type(rule.rule.type, type, env.extend(sizes), bound)
    return Recipe(took, tuple(steps), grid, tuple(needs))


def _origin(step: Step, item: int, origin: list[frozenset[int]]) -> frozenset[int]:
    """The source items behind an output item."""
    rows = step.op.rows(step, item, 0, flat_rows(step.made.items[item].shape))
    return frozenset().union(*(o for i, o in enumerate(origin) if rows is None or rows[i] is not None))


def _check_storable(rule: BoundRule, grid: Grid[Type], context: Context) -> None:
    """What is written without `pack` must fit its own spelling."""
    quantised = [t for t in grid.items if not t.is_dense and t.spans]
    if quantised:
        try:
            REGISTRY["pack"].infer(Grid.one(quantised[0]), {p.name: p.default for p in REGISTRY["pack"].params}, context)
        except Refused as refused:
            raise PlanError(refusal(refused, rule.steps[-1].span, grid)) from None


def refusal(refused: Refused, span, grid: Grid[Type]) -> Diagnostic:
    shown = "; ".join(f"{'.'.join(map(str, label)) or 'value'}: {t}" for label, t in zip(grid.labels(), grid.items[:6]))
    more = f" and {len(grid.items) - 6} more" if len(grid.items) > 6 else ""
    return Diagnostic(refused.code, refused.reason, span, refused.label, notes=(f"it takes {shown}{more}",), help=refused.help)


# ------------------------------------------------------------------------------------------------------ type assertions


def check_type(expected: ast.TypeExpr, type: Type, env: Env, bound: dict[str, Any]) -> None:
    """`: bf16[2*N, H]`: new capitals are bound on first use in `bound` and must agree in the rest of the unit."""
    if expected.name not in (type.format.name, type.dtype if type.is_dense else None):
        raise _asserted(expected, type, f"expected {expected.name}")
    if expected.dims is None:
        return
    dims, shape = list(expected.dims), list(type.shape)
    if any(isinstance(d, ast.Rest) for d in dims):
        at = next(i for i, d in enumerate(dims) if isinstance(d, ast.Rest))
        after = len(dims) - at - 1
        if len(shape) < len(dims) - 1:
            raise _asserted(expected, type, f"expected at least {len(dims) - 1} dimensions")
        dims, shape = dims[:at] + dims[at + 1 :], shape[:at] + (shape[-after:] if after else [])
    if len(dims) != len(shape):
        raise _asserted(expected, type, f"expected {len(dims)} dimensions")
    for dim, size in zip(dims, shape):
        _check_dim(expected, dim, size, type, env, bound)


def _check_dim(expected, dim, size: int, type: Type, env: Env, bound: dict[str, Any]) -> None:
    new = free_names(dim) - set(env.names) - set(bound)
    if len(new) > 1:
        raise RuleError(Diagnostic(ASSERTED, "a dimension binds one new name at most", dim.span))
    if new:
        (name,) = new
        base, one = (evaluate(dim, env.extend({**bound, name: v})) for v in (0, 1))
        if one == base or (size - base) % (one - base):
            raise _asserted(expected, type, f"no whole {name} gives {size}")
        bound[name] = (size - base) // (one - base)
        return
    value = evaluate(dim, env.extend(bound))
    if value != size:
        raise _asserted(expected, type, f"expected {value}, found {size}")


def _asserted(expected: ast.TypeExpr, type: Type, label: str) -> PlanError:
    return PlanError(
        Diagnostic(
            ASSERTED, f"the value is {type}, and the rule says {expected.span.source if expected.span else expected.name}", expected.span, label
        )
    )
