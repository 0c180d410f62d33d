"""The command line: one file a command, each of which reads, calls, prints and says how it ended.

Nothing of the engine is imported before a command needs it, so that `--help` is there at once. Results go to stdout,
progress and messages to stderr. Exit codes: 0 done, 1 findings or refused, 2 usage.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from typer.core import TyperGroup

from quantrules.cli import apply, check, explain, inspect, pages, plan
from quantrules.cli.output import FINDINGS, say, show


class Commands(TyperGroup):
    """All commands: what goes wrong in one of them becomes a message and an exit code here."""

    def make_context(self, *args, **extra):
        with failures():  # `--help` is printed here
            return super().make_context(*args, **extra)

    def parse_args(self, ctx, args):
        return super().parse_args(ctx, ["--json-units" if a == "--json=units" else a for a in args])

    def invoke(self, ctx):
        with failures():
            result = super().invoke(ctx)
            sys.stdout.flush()
            return result


@contextmanager
def failures() -> Iterator[None]:
    from quantrules.diagnostics import QuantrulesError

    try:
        yield
    except QuantrulesError as error:
        show(error.diagnostics)
        raise typer.Exit(FINDINGS) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is still in the buffer goes nowhere
        raise typer.Exit(141) from None
    except MemoryError:
        say("error: there is not enough memory")
        raise typer.Exit(FINDINGS) from None
    except OSError as error:
        say(f"error: {error.filename}: {error.strerror}" if error.filename else f"error: {error}")
        raise typer.Exit(FINDINGS) from None


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Show the version.", is_eager=True)] = False) -> None:
    """\b
    quantrules plan nvfp4_to_bf16 org/model            what would happen
    quantrules apply nvfp4_to_bf16 org/model out       do it

    Converts quantised LLM checkpoints by rules. Exit codes: 0 done, 1 findings or refused, 2 usage.
    """
    if version:
        from quantrules import __version__

        print(f"quantrules {__version__}")
        raise typer.Exit


app.command("apply", short_help="Convert a checkpoint.")(apply.apply)
app.command("check", short_help="Look for errors in rules, against a checkpoint or alone.")(check.check)
app.command("plan", short_help="Show what would happen: counts, bytes, formats.")(plan.plan)
app.command("explain", short_help="Show which rule reads or writes a key, and why not others.")(explain.explain)
app.command("inspect", short_help="Show what is in a checkpoint.")(inspect.inspect)
app.command("ops", short_help="List the ops.")(pages.ops)
app.command("formats", short_help="List the formats.")(pages.formats)
app.command("rules", short_help="List the shipped rule files.")(pages.rules)
app.command("help", short_help="Show the page of an op, a format, a rule file or a code.")(pages.page)


def main() -> None:
    """The entry point of the `quantrules` script."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started us: no other file may get its number
            setattr(sys, name, open(os.devnull, "w"))
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # not under nohup
            signal.signal(number, stopped)
    app(prog_name="quantrules")


def stopped(number: int, _) -> None:
    """Ends the process as an exception does, so that a run removes what it made."""
    signal.signal(number, signal.SIG_IGN)
    sys.exit(128 + number)
