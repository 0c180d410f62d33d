"""The command line: one short function a command, which reads, calls, prints and says how it ended.

Nothing of the engine is imported before a command needs it, so that `--help` is there at once. Results go to stdout,
progress and messages to stderr. Exit codes: 0 done, 1 findings or refused, 2 usage.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

OK, FINDINGS = 0, 1
SCHEMA = 1  # of the JSON of `check`; `plan` and `inspect` carry their own
NOTABLE = 32 << 20  # bytes of memory of a unit that `plan` speaks of


class _Commands(TyperGroup):
    """All commands: what goes wrong in one of them becomes a message and an exit code here."""

    def parse_args(self, ctx, args):
        return super().parse_args(ctx, ["--json-units" if a == "--json=units" else a for a in args])

    def invoke(self, ctx):
        with _failures():
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result


@contextmanager
def _failures() -> Iterator[None]:
    from quantrules.diagnostics import QuantrulesError

    try:
        yield
    except QuantrulesError as error:
        _show(error.diagnostics)
        raise typer.Exit(FINDINGS) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still in the buffer goes nowhere
        raise typer.Exit(141) from None
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        _say(f"error: {what}")
        raise typer.Exit(FINDINGS) from None


app = typer.Typer(
    cls=_Commands, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False, no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    help="""\b
    quantrules plan nvfp4_to_bf16 org/model            what would happen
    quantrules apply nvfp4_to_bf16 org/model out       do it

    Converts quantised LLM checkpoints by rules. Exit codes: 0 done, 1 findings or refused, 2 usage.""",
)  # fmt: skip


def main() -> None:
    """The entry point of the `quantrules` script."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
    app(prog_name="quantrules")


# ------------------------------------------------------------------------------------------------------------- options


def _size(text: str) -> int:
    """`2GiB`, `5GB`, `512MiB`, `1000`: bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([kmgt]?)(i?)b?)\s*", text, re.IGNORECASE)
    if not found or found[3] and not found[2]:
        raise typer.BadParameter(f"{text!r} is no size; write 2GiB, 5GB, 512MiB or a number of bytes")
    number = int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " "))
    if not 0 < number < 2**62:
        raise typer.BadParameter(f"{text!r} is out of range")
    return number


def _params(given: list[str] | None) -> dict[str, str]:
    """`-D name=value` as keyword arguments of `Rules.bind`."""
    params: dict[str, str] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or name in params or name in ("only", "input_scales"):
            reason = "is given twice" if name in params else "is no param=value" if name not in ("only", "input_scales") else f"is written --{name.replace('_', '-')}"
            raise typer.BadParameter(f"{text!r} {reason}", param_hint="'-D'")
        params[name] = value
    return params


def _device(text: str) -> str:
    if text != "cpu":
        raise typer.BadParameter(f"{text!r} comes in a later version; this one runs on cpu")
    return text


RulesFile = Annotated[str, typer.Argument(metavar="RULES", help="A rule file, or the name of a shipped one (`quantrules rules`).")]
Src = Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint: a directory, a file, or org/model in the local Hub cache.")]
Define = Annotated[list[str] | None, typer.Option("-D", metavar="NAME=VALUE", help="Set a param of the rules; may be repeated.")]
Only = Annotated[str | None, typer.Option(metavar="PATTERN", help="Only the targets that a pattern takes.")]
Scales = Annotated[str | None, typer.Option(metavar="FILE", help="Activation scales for modules that become quantised: a .safetensors with keys MODULE.input_scale, "
                                            "or JSON {MODULE: number}; each is the largest activation / 2688.")]  # fmt: skip
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="Show notes too.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, with a schema number.")]


# ------------------------------------------------------------------------------------------------------------ commands


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)] = False) -> None:
    if version:
        from quantrules import __version__

        print(f"quantrules {__version__}")
        raise typer.Exit(OK)


@app.command(short_help="Convert a checkpoint.")
def apply(
    rules: RulesFile,
    src: Src,
    out: Annotated[str, typer.Argument(metavar="OUT", help="A directory that does not exist yet, or is empty.")],
    define: Define = None,
    only: Only = None,
    memory: Annotated[Any, typer.Option(parser=_size, metavar="SIZE", help="Bytes of buffers at once.")] = "2GiB",
    jobs: Annotated[int | None, typer.Option(metavar="N", min=1, max=4096, help="Threads; one a core unless given.")] = None,
    shard_size: Annotated[Any, typer.Option(parser=_size, metavar="SIZE", help="Bytes of tensors in one file.")] = "5GB",
    input_scales: Scales = None,
    device: Annotated[str, typer.Option(parser=_device, metavar="DEVICE", help="Where ops run.")] = "cpu",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in OUT.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Plan, check the values that must be checked, and stop before the first byte is written.")] = False,
    verbose: Verbose = False,
) -> None:
    """\b
    quantrules apply nvfp4_to_bf16 org/model out
    quantrules apply deepseek_v4_vllm ./src ./out -D attention=fp8 --memory 8GiB

    Convert a checkpoint. Nothing that looks like a checkpoint is left where it fails.
    """
    from quantrules import api
    from quantrules.plan import view

    with _bound(rules, src, define, only, input_scales, verbose) as plan:
        with _progress() as report:
            result = api.apply(plan, out, memory=memory, jobs=jobs, shard_size=shard_size, overwrite=overwrite, dry_run=dry_run, progress=report)
        _show(result.warnings, verbose)
        if dry_run:
            print(view.table(plan))
        print(f"{'would write' if dry_run else 'wrote'} {result.path}: {result.tensors:,} tensors in {_many(len(result.files), 'file')}, {view.size(result.nbytes)}")


@app.command(short_help="Look for errors in rules, against a checkpoint or alone.")
def check(
    rules: RulesFile,
    src: Annotated[str | None, typer.Argument(metavar="[SRC]", help="A checkpoint; without one the text alone is checked.")] = None,
    define: Define = None,
    only: Only = None,
    input_scales: Scales = None,
    values: Annotated[bool, typer.Option("--values", help="Read the scales and check their values too, as apply does first.")] = False,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """\b
    quantrules check my.rules
    quantrules check deepseek_v4_vllm org/model --values

    Say whether apply would run: exit code 0 if so, warnings included, 1 if not.
    """
    from quantrules.diagnostics import QuantrulesError

    params = _params(define)
    if src is None and (values or only or input_scales):
        raise typer.BadParameter("--values, --only and --input-scales need a checkpoint", param_hint="SRC")
    try:
        found = _findings(rules, src, params, only, input_scales, values)
    except QuantrulesError as error:
        found = error.diagnostics
    counts = {s: sum(d.severity == s for d in found) for s in ("error", "warning", "note")}
    if json:
        _print_json({"schema": SCHEMA, "rules": rules, "source": src, **{s + "s": n for s, n in counts.items()}, "diagnostics": [d.to_json() for d in found]})
    else:
        _show(found, verbose)
        if not counts["error"]:
            print(f"{rules}{f' on {src}' if src else ''}: no errors")
    raise typer.Exit(FINDINGS if counts["error"] else OK)


def _findings(rules: str, src: str | None, params: dict, only: str | None, input_scales: str | None, values: bool) -> tuple:
    from quantrules import api

    loaded = api.load(rules)
    if src is None:
        from quantrules.tools.resolve import resolve

        return resolve(loaded, params)
    with api.open_source(src) as source:
        plan = loaded.bind(source, only=only, input_scales=input_scales, **params)
        found = plan.diagnostics
        if values and not plan.errors:
            from quantrules.run.preflight import preflight

            found = (*found, *preflight(plan, plan.source))
        return found


@app.command(short_help="Show what would happen: counts, bytes, formats.")
def plan(
    rules: RulesFile,
    src: Src,
    define: Define = None,
    only: Only = None,
    input_scales: Scales = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON by group, with a schema number; --json=units prints one line a unit.")] = False,
    json_units: Annotated[bool, typer.Option("--json-units", hidden=True)] = False,
    by: Annotated[str, typer.Option(metavar="rule|type|section", help="What rows stand for.")] = "section",
    steps: Annotated[bool, typer.Option("--steps", help="Show each recipe step by step, and how it runs.")] = False,
    verbose: Verbose = False,
) -> None:
    """\b
    quantrules plan deepseek_v4_vllm org/model -D attention=fp8
    quantrules plan my.rules ./src --by rule --steps

    Show what would happen, from headers alone.
    """
    from quantrules.plan import view

    if by not in ("rule", "type", "section"):
        raise typer.BadParameter(f"{by!r} is not one of rule, type, section", param_hint="'--by'")
    with _bound(rules, src, define, only, input_scales, verbose, go_on=json) as plan:
        if json:
            _print_json(view.to_json(plan))
        elif json_units:
            for line in view.unit_lines(plan):
                _print_json(line, indent=None)
        else:
            print(view.table(plan, by))
            for line in _recipes(plan, steps):
                print(line)
    if plan.errors:
        raise typer.Exit(FINDINGS)


def _recipes(plan, steps: bool) -> Iterator[str]:
    """How recipes run; without `steps` only those that need much memory, because they do not run in tiles."""
    from quantrules.lower import describe, lower, tiled
    from quantrules.plan.view import size

    found: dict[tuple[str, ...], int] = {}
    for units in plan.units:
        place = f"line {units.rule.span.text.position(units.rule.span.start)[0]}"
        if steps:
            types = [", ".join(dict.fromkeys(map(str, grid.items))) for grid in (units.recipe.took, units.recipe.made)]
            key = (f"\n{place}: {' '.join(units.rule.span.source.split())}", f"of {types[0]} → {types[1] or 'nothing'}", describe(lower(units.recipe)))
            found[key] = found.get(key, 0) + len(units)
        elif units.recipe.made.items and not tiled(lower(units.recipe, "reference")) and (program := lower(units.recipe)).whole_bytes >= NOTABLE:
            yield f"{place} cannot run in tiles: {_many(len(units), 'unit')}, {size(program.whole_bytes)} of memory each, such as {units.target_keys(0)[0][0]}"
    last = ""
    for (head, what, how), n in found.items():
        yield from () if head == last else (head,)
        yield from (f"  {_many(n, 'unit')} {what}", *("    " + text for text in how.splitlines()))
        last = head


@app.command(short_help="Show which rule reads or writes a key, and why not others.")
def explain(
    rules: RulesFile,
    src: Src,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="Keys of the source or the target, or paths of modules.")],
    define: Define = None,
    verbose: Verbose = False,
) -> None:
    """\b
    quantrules explain deepseek_v4_vllm org/model model.layers.2.self_attn.o_a_proj
    quantrules explain my.rules ./src lm_head.weight model.norm.weight

    Show which rule reads or writes a key, step by step with types, and why the others do not.
    """
    from quantrules.tools.explain import explain as explained

    with _bound(rules, src, define, None, None, verbose, go_on=True) as plan:
        found, unknown = explained(plan, keys)
    if found:
        print("\n\n".join(e.render() for e in found))
    _show(unknown)
    if unknown or plan.errors:
        raise typer.Exit(FINDINGS)


@app.command(short_help="Show what is in a checkpoint.")
def inspect(src: Src, json: Json = False, verbose: Verbose = False) -> None:
    """\b
    quantrules inspect org/model
    quantrules inspect ./model-00001-of-00002.safetensors --json

    Show what is in a checkpoint: templates, types, formats, sizes, what its config declares, and oddities.
    """
    from quantrules.checkpoint import open_source
    from quantrules.tools.inspect import inspect as inspected

    with open_source(src) as source:
        found = inspected(source)
    if json:
        _print_json(found.to_json())
    else:
        print(found.render())
    _show(found.diagnostics, verbose)
    if any(d.severity == "error" for d in found.diagnostics):
        raise typer.Exit(FINDINGS)


@app.command(short_help="List the ops.")
def ops() -> None:
    """\b
    quantrules ops
    quantrules help quant

    List the ops.
    """
    from quantrules.tools import pages

    _list(pages.ops())


@app.command(short_help="List the formats.")
def formats() -> None:
    """\b
    quantrules formats
    quantrules help nvfp4

    List the formats.
    """
    from quantrules.tools import pages

    _list(pages.formats())


@app.command(short_help="List the shipped rule files.")
def rules() -> None:
    """\b
    quantrules rules
    quantrules help nvfp4_to_bf16

    List the shipped rule files.
    """
    from quantrules.tools import pages

    _list(pages.rule_files())


@app.command("help", short_help="Show the page of an op, a format, a rule file or a code.")
def help_(word: Annotated[str | None, typer.Argument(metavar="WORD", help="quant, nvfp4, nvfp4_to_bf16, QR130 …")] = None) -> None:
    """\b
    quantrules help quant
    quantrules help QR130

    Show the page of an op, a format, a rule file or the code of a diagnostic.
    """
    from typer.main import get_command

    command = get_command(app)
    context = typer.Context(command, info_name="quantrules", **command.context_settings)
    if word in command.commands:
        command = command.commands[word]
        context = typer.Context(command, parent=context, info_name=word)
    if word is None or word == command.name:
        print(command.get_help(context))
        return
    from quantrules.tools import pages

    print(pages.page(word))


# ------------------------------------------------------------------------------------------------------------- helpers


@contextmanager
def _bound(rules: str, src: str, define, only, input_scales, verbose: bool, go_on: bool = False) -> Iterator[Any]:
    """The plan, its diagnostics shown. Where it has errors that is the end, unless `go_on`."""
    from quantrules import api

    params = _params(define)
    loaded = api.load(rules)
    with api.open_source(src) as source:
        plan = loaded.bind(source, only=only, input_scales=input_scales, **params)
        _show(plan.diagnostics, verbose)
        if plan.errors and not go_on:
            raise typer.Exit(FINDINGS)
        yield plan


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar on a terminal, nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("check", total=None)
        yield lambda done, total, phase: bar.update(task, completed=done, total=total if phase == "write" else None, description=phase)


def _show(diagnostics: Iterable, verbose: bool = True) -> None:
    """Diagnostics on stderr, with their count as the last line; notes only if `verbose`."""
    found = list(diagnostics)
    shown = [d for d in found if verbose or d.severity != "note"]
    for d in shown:
        _say(_coloured(d.render()) + "\n")
    if found:
        folded = len(found) - len(shown)
        _say(_counted(found) + (" (--verbose shows notes)" if folded else ""))


def _counted(diagnostics: Iterable) -> str:
    counts = {s: sum(d.severity == s for d in diagnostics) for s in ("error", "warning", "note")}
    return ", ".join(_many(n, s) for s, n in counts.items() if n)


def _many(n: int, word: str) -> str:
    return f"{n:,} {word}{'s' * (n != 1)}"


def _say(text: str) -> None:
    print(text, file=sys.stderr)


COLOURS = (
    (re.compile(r"^error\[\w+\]", re.M), "1;31"), (re.compile(r"^warning\[\w+\]", re.M), "1;33"), (re.compile(r"^note\[\w+\]", re.M), "1;36"),
    (re.compile(r"^ *(?:-->|:::)|^ *\d* \|(?= |$)|^ *= (?:note|help):", re.M), "34"),
)  # fmt: skip


def _coloured(text: str) -> str:
    """Colours on a terminal, unless NO_COLOR is set."""
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        for pattern, colour in COLOURS:
            text = pattern.sub(lambda m, c=colour: f"\x1b[{c}m{m[0]}\x1b[0m", text)
    return text


def _print_json(value: Any, indent: int | None = 2) -> None:
    import json

    print(json.dumps(value, indent=indent))


def _list(entries: dict[str, str]) -> None:
    width = max(map(len, entries))
    for name, summary in entries.items():
        print(f"{name:{width}}  {summary}".rstrip())
