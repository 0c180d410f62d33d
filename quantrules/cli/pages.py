"""quantrules ops | formats | rules | help"""

from __future__ import annotations

from typing import Annotated

import typer


def ops() -> None:
    """\b
    quantrules ops
    quantrules help quant

    List the ops.
    """
    from quantrules.tools import pages

    print_list(pages.ops())


def formats() -> None:
    """\b
    quantrules formats
    quantrules help nvfp4

    List the formats.
    """
    from quantrules.tools import pages

    print_list(pages.formats())


def rules() -> None:
    """\b
    quantrules rules
    quantrules help nvfp4_to_bf16

    List the shipped rule files.
    """
    from quantrules.tools import pages

    print_list(pages.rule_files())


def page(
    context: typer.Context,
    word: Annotated[str | None, typer.Argument(metavar="[WORD]", help="An op, a format, a rule file, a code, a command.")] = None,
) -> None:
    """\b
    quantrules help quant
    quantrules help QR130

    Show the page of an op, a format, a rule file or the code of a diagnostic, or the help of a command.
    """
    root = context.parent
    if word is None:
        print(root.get_help())
    elif word in root.command.commands:
        command = root.command.commands[word]
        print(command.get_help(typer.Context(command, parent=root, info_name=word)))
    else:
        from quantrules.tools import pages

        print(pages.page(word))


def print_list(entries: dict[str, str]) -> None:
    width = max(map(len, entries))
    for name, summary in entries.items():
        print(f"{name:{width}}  {summary}".rstrip())
