"""quantrules apply"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from quantrules.cli import options
from quantrules.cli.output import many, progress, show


def apply(
    rules: options.RULES,
    src: options.SRC,
    out: Annotated[
        str, typer.Argument(metavar="OUT", callback=options.not_empty, help="A directory that does not exist yet, or is empty.")
    ],
    define: options.DEFINE = None,
    only: options.ONLY = None,
    memory: Annotated[Any, typer.Option(parser=options.size, metavar="SIZE", help="Bytes of buffers at once.")] = "2GiB",
    jobs: Annotated[int | None, typer.Option(metavar="N", min=1, max=4096, help="Threads; one a core unless given.")] = None,
    shard_size: Annotated[Any, typer.Option(parser=options.size, metavar="SIZE", help="Bytes of tensors in a file.")] = "5GB",
    input_scales: options.SCALES = None,
    device: Annotated[str, typer.Option(parser=options.device, metavar="DEVICE", help="Where ops run.")] = "cpu",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in OUT.")] = False,
    allow_nonfinite: Annotated[
        bool, typer.Option("--allow-nonfinite", help="Convert scales that are NaN, infinite or negative as they are.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stop before the first byte is written.")] = False,
    verbose: options.VERBOSE = False,
) -> None:
    """\b
    quantrules apply nvfp4_to_bf16 org/model out
    quantrules apply deepseek_v4_vllm ./src ./out -D attention=fp8 --memory 8GiB

    Convert a checkpoint. Nothing that looks like a checkpoint is left where it fails.
    """
    from quantrules import api
    from quantrules.plan import view

    with options.bound(rules, src, define, only, input_scales, verbose) as plan:
        how = {"memory": memory, "jobs": jobs, "shard_size": shard_size, "overwrite": overwrite, "dry_run": dry_run}
        how["allow_nonfinite"] = allow_nonfinite
        with progress() as report:
            made = api.apply(plan, out, progress=report, **how)
        show(made.warnings, verbose)
        if dry_run:
            print(view.table(plan))
        head = f"{'would write' if dry_run else 'wrote'} {made.path}"
        print(f"{head}: {made.tensors:,} tensors in {many(len(made.files), 'file')}, {view.size(made.nbytes)}")
