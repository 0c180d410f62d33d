"""quantrules explain"""

from __future__ import annotations

from typing import Annotated

import typer

from quantrules.cli import options
from quantrules.cli.output import FINDINGS, show

HELP = "Keys of the source or the target, or paths of modules."


def explain(
    rules: options.RULES,
    src: options.SRC,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help=HELP)],
    define: options.DEFINE = None,
    verbose: options.VERBOSE = False,
) -> None:
    """\b
    quantrules explain deepseek_v4_vllm org/model model.layers.2.self_attn.o_a_proj
    quantrules explain my.rules ./src lm_head.weight model.norm.weight

    Show which rule reads or writes a key, step by step with types, and why the others do not.
    """
    from quantrules.tools import explain as tool

    with options.bound(rules, src, define, None, None, verbose, go_on=True) as plan:
        found, unknown = tool.explain(plan, keys)
    if found:
        print("\n\n".join(one.render() for one in found))
    show(unknown)
    if unknown or plan.errors:
        raise typer.Exit(FINDINGS)
