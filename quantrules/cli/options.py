"""Arguments and options that commands share, and how their values are read."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from quantrules.cli.output import FINDINGS, show

RESERVED = ("only", "input_scales")  # keyword arguments of Rules.bind that are no params


def size(text: str) -> int:
    """`2GiB`, `5GB`, `512MiB`, `1000`: bytes."""
    found = re.fullmatch(r"\s*(\d{1,20}(?:\.\d{1,20})?)\s*(?:([kmgt]?)(i?)b?)\s*", text, re.IGNORECASE | re.ASCII)
    if not found or found[3] and not found[2]:
        raise typer.BadParameter(f"{text!r} is no size; write 2GiB, 5GB, 512MiB or a number of bytes")
    number = int(float(found[1]) * (1024 if found[3] else 1000) ** " kmgt".index(found[2].lower() or " "))
    if not 0 < number < 2**62:
        raise typer.BadParameter(f"{text!r} is out of range")
    return number


def not_empty(text: str | None) -> str | None:
    """A path that an unset variable made empty would be the current directory."""
    if text == "":
        raise typer.BadParameter("it is empty")
    return text


def device(text: str) -> str:
    if text != "cpu":
        raise typer.BadParameter(f"{text!r} comes in a later version; this one runs on cpu")
    return text


def params(given: list[str] | None) -> dict[str, str]:
    """`-D name=value` as keyword arguments of `Rules.bind`."""
    found: dict[str, str] = {}
    for text in given or ():
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier() or name in found or name in RESERVED:
            reason = "is given twice" if name in found else "is an option of its own" if name in RESERVED else "is no NAME=VALUE"
            raise typer.BadParameter(f"{text!r} {reason}", param_hint="'-D'")
        found[name] = value
    return found


@contextmanager
def bound(rules: str, src: str, define, only, input_scales, verbose: bool, go_on: bool = False) -> Iterator[Any]:
    """The plan, its diagnostics shown. Where it has errors that is the end, unless `go_on`."""
    from quantrules import api

    given = params(define)
    loaded = api.load(rules)
    with api.open_source(src) as source:
        plan = loaded.bind(source, only=only, input_scales=input_scales, **given)
        show(plan.diagnostics, verbose)
        if plan.errors and not go_on:
            raise typer.Exit(FINDINGS)
        yield plan


RULES = Annotated[str, typer.Argument(metavar="RULES", callback=not_empty, help="A rule file, or the name of a shipped one.")]
SRC = Annotated[
    str, typer.Argument(metavar="SRC", callback=not_empty, help="A directory, a file, or org/model in the local Hub cache.")
]
DEFINE = Annotated[list[str] | None, typer.Option("-D", metavar="NAME=VALUE", help="Set a param of the rules; may be repeated.")]
ONLY = Annotated[str | None, typer.Option(metavar="PATTERN", callback=not_empty, help="Only the targets that a pattern takes.")]
SCALES = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        callback=not_empty,
        help="Activation scales for modules that become quantised: a .safetensors with keys MODULE.input_scale, "
        "or JSON {MODULE: number}; each is the largest activation / 2688.",
    ),
]
VERBOSE = Annotated[bool, typer.Option("-v", "--verbose", help="Show notes too.")]
JSON = Annotated[bool, typer.Option("--json", help="Print JSON, with a schema number.")]
