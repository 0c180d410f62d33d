"""What commands print: results, diagnostics with colours and their count, progress."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

FINDINGS = 1  # exit code

COLOURS = (
    (re.compile(r"^error\[\w+\]", re.M), "1;31"),
    (re.compile(r"^warning\[\w+\]", re.M), "1;33"),
    (re.compile(r"^note\[\w+\]", re.M), "1;36"),
    (re.compile(r"^ *(?:-->|:::)|^ *\d* \|(?= |$)|^ *= (?:note|help):", re.M), "34"),
)


def show(diagnostics: Iterable, verbose: bool = True) -> None:
    """Diagnostics on stderr, with their count as the last line; notes only if `verbose`."""
    found = list(diagnostics)
    shown = [d for d in found if verbose or d.severity != "note"]
    for d in shown:
        say(coloured(d.render()) + "\n")
    if found:
        counts = {s: n for s in ("error", "warning", "note") if (n := sum(d.severity == s for d in found))}
        folded = " (--verbose shows notes)" if len(shown) < len(found) else ""
        say(", ".join(many(n, s) for s, n in counts.items()) + folded)


def say(text: str) -> None:
    print(text, file=sys.stderr)


def many(n: int, word: str) -> str:
    return f"{n:,} {word}{'s' * (n != 1)}"


def coloured(text: str) -> str:
    """Colours on a terminal, unless NO_COLOR is set."""
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        for pattern, colour in COLOURS:
            text = pattern.sub(lambda m, c=colour: f"\x1b[{c}m{m[0]}\x1b[0m", text)
    return text


def print_json(value: Any, indent: int | None = 2) -> None:
    import json

    print(json.dumps(value, indent=indent))


@contextmanager
def progress() -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar on a terminal, nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("check", total=None)

        def report(done: int, total: int, phase: str) -> None:
            bar.update(task, completed=done, total=total if phase == "write" else None, description=phase)

        yield report
