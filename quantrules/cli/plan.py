"""quantrules plan"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import typer

from quantrules.cli import options
from quantrules.cli.output import FINDINGS, many, print_json

NOTABLE = 32 << 20  # bytes of memory of a unit that are spoken of
UNITS = "Print JSON by group, with a schema number; --json=units prints one line a unit."


def plan(
    rules: options.RULES,
    src: options.SRC,
    define: options.DEFINE = None,
    only: options.ONLY = None,
    input_scales: options.SCALES = None,
    json: Annotated[bool, typer.Option("--json", help=UNITS)] = False,
    json_units: Annotated[bool, typer.Option("--json-units", hidden=True)] = False,
    by: Annotated[str, typer.Option(metavar="rule|type|section", help="What rows stand for.")] = "section",
    steps: Annotated[bool, typer.Option("--steps", help="Show each recipe step by step, and how it runs.")] = False,
    verbose: options.VERBOSE = False,
) -> None:
    """\b
    quantrules plan deepseek_v4_vllm org/model -D attention=fp8
    quantrules plan my.rules ./src --by rule --steps

    Show what would happen, from headers alone.
    """
    from quantrules.plan import view

    if by not in ("rule", "type", "section"):
        raise typer.BadParameter(f"{by!r} is not one of rule, type, section", param_hint="'--by'")
    with options.bound(rules, src, define, only, input_scales, verbose, go_on=json) as made:
        if json:
            print_json(view.to_json(made))
        elif json_units:
            for line in view.unit_lines(made):
                print_json(line, indent=None)
        else:
            print(view.table(made, by))
            for line in all_steps(made) if steps else not_tiled(made):
                print(line)
    if made.errors:
        raise typer.Exit(FINDINGS)


def not_tiled(made) -> Iterator[str]:
    """Recipes that need much memory, because they do not run in tiles."""
    from quantrules.lower import lower, tiled
    from quantrules.plan.view import size

    for units in made.units:
        if units.recipe.made.items and not tiled(lower(units.recipe, "reference")):
            memory = lower(units.recipe).whole_bytes
            if memory >= NOTABLE:
                what = f"{many(len(units), 'unit')}, {size(memory)} of memory each, such as {units.target_keys(0)[0][0]}"
                yield f"{place(units)} cannot run in tiles: {what}"


def all_steps(made) -> Iterator[str]:
    """Each rule with its recipes: the types that it takes and makes, and what runs its steps."""
    from quantrules.lower import describe, lower

    found: dict[str, dict[tuple[str, str], int]] = {}
    for units in made.units:
        types = [", ".join(dict.fromkeys(map(str, grid.items))) or "nothing" for grid in (units.recipe.took, units.recipe.made)]
        recipes = found.setdefault(f"\n{place(units)}: {' '.join(units.rule.span.source.split())}", {})
        key = (" → ".join(types), describe(lower(units.recipe)))
        recipes[key] = recipes.get(key, 0) + len(units)
    for rule, recipes in found.items():
        yield rule
        for (types, how), n in recipes.items():
            yield f"  {many(n, 'unit')} of {types}"
            yield from ("    " + line for line in how.splitlines())


def place(units) -> str:
    return f"line {units.rule.span.text.position(units.rule.span.start)[0]}"
