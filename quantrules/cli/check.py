"""quantrules check"""

from __future__ import annotations

from typing import Annotated

import typer

from quantrules.cli import options
from quantrules.cli.output import FINDINGS, print_json, show

SCHEMA = 1


def check(
    rules: options.RULES,
    src: Annotated[str | None, typer.Argument(metavar="[SRC]", help="Without a checkpoint the text alone is checked.")] = None,
    define: options.DEFINE = None,
    only: options.ONLY = None,
    input_scales: options.SCALES = None,
    values: Annotated[bool, typer.Option("--values", help="Read and check all scales too; apply checks those that it computes with.")] = False,
    json: options.JSON = False,
    verbose: options.VERBOSE = False,
) -> None:
    """\b
    quantrules check my.rules
    quantrules check deepseek_v4_vllm org/model --values

    Say whether apply would run: exit code 0 if so, with or without warnings, 1 if not.
    """
    from quantrules.diagnostics import QuantrulesError

    if src is None and (values or only or input_scales):
        raise typer.BadParameter("--values, --only and --input-scales need a checkpoint", param_hint="SRC")
    given = options.params(define)
    try:
        found = findings(rules, src, values, {"only": only, "input_scales": input_scales}, given)
    except QuantrulesError as error:
        found = error.diagnostics
    counts = {f"{s}s": sum(d.severity == s for d in found) for s in ("error", "warning", "note")}
    if json:
        print_json({"schema": SCHEMA, "rules": rules, "source": src, **counts, "diagnostics": [d.to_json() for d in found]})
    else:
        show(found, verbose)
        if not counts["errors"]:
            print(f"{rules}{f' on {src}' if src else ''}: no errors")
    if counts["errors"]:
        raise typer.Exit(FINDINGS)


def findings(rules: str, src: str | None, values: bool, how: dict, given: dict) -> tuple:
    from quantrules import api

    loaded = api.load(rules)
    if src is None:
        from quantrules.tools.resolve import resolve

        return resolve(loaded, given)
    with api.open_source(src) as source:
        plan = loaded.bind(source, **how, **given)
        if not values or plan.errors:
            return plan.diagnostics
        from quantrules.run.preflight import preflight

        return (*plan.diagnostics, *preflight(plan, plan.source, kept=True))
