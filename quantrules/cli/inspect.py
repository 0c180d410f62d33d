"""quantrules inspect"""

from __future__ import annotations

import typer

from quantrules.cli import options
from quantrules.cli.output import FINDINGS, print_json, show


def inspect(src: options.SRC, json: options.JSON = False, verbose: options.VERBOSE = False) -> None:
    """\b
    quantrules inspect org/model
    quantrules inspect ./model-00001-of-00002.safetensors --json

    Show what is in a checkpoint: templates, types, formats, sizes, what its config declares, and oddities.
    """
    from quantrules.checkpoint import open_source
    from quantrules.tools import inspect as tool

    with open_source(src) as source:
        found = tool.inspect(source)
    if json:
        print_json(found.to_json())
    else:
        print(found.render())
    show(found.diagnostics, verbose)
    if any(d.severity == "error" for d in found.diagnostics):
        raise typer.Exit(FINDINGS)
