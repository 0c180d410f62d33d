"""What the text of a rule file alone tells: names, ops, arguments and params, without a checkpoint at hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from quantrules.api import Rules, builtin_file
from quantrules.diagnostics import Diagnostic
from quantrules.formats import load_formats
from quantrules.lang import ast, walk
from quantrules.plan.scope import flatten

NO_NAME, NO_KEY, OTHERS = "QR020", "QR021", ("QR022", "QR023", "QR024", "QR025")  # what lang.evaluate refuses


def resolve(rules: Rules, params: Mapping[str, Any]) -> tuple[Diagnostic, ...]:
    """Findings of a rule file without a source. What depends on the source's config is not known and not complained of."""
    scope = flatten(rules.file, {}, load_formats(builtin_file(), rules.file), params)
    unknown, names = _needs_config(rules.file)
    return tuple(d for d in scope.errors if not _follows(d, unknown, names))


def _follows(d: Diagnostic, unknown: list[ast.Statement], names: set[str]) -> bool:
    """Whether a finding only says that there is no config."""
    if d.span is None:
        return False
    return (
        d.code == NO_KEY
        or d.code == NO_NAME
        and d.span.source in names
        or d.code in OTHERS
        and any(_within(d, s) for s in unknown)
    )


def _needs_config(file: ast.File) -> tuple[list[ast.Statement], set[str]]:
    """Statements that read the config, or a `let`, `param` or `def` that does; and the names of those."""
    found, names = [], set()
    for statement in _all(file.statements):
        used = {n.name for n in walk(statement) if isinstance(n, (ast.Name, ast.Call))} | {
            n.let for n in walk(statement) if isinstance(n, ast.Reference)
        }
        if used & names or any(isinstance(n, ast.Config) for n in walk(statement)):
            found.append(statement)
            names |= {statement.name} if isinstance(statement, (ast.Let, ast.Param, ast.Def)) else set()
    return found, names


def _all(statements: Iterable[ast.Statement]) -> Iterator[ast.Statement]:
    for statement in statements:
        yield from _all(statement.body) if isinstance(statement, (ast.Include, ast.Under)) else [statement]


def _within(diagnostic: Diagnostic, statement: ast.Statement) -> bool:
    a, b = diagnostic.span, statement.span
    return a.text is b.text and b.start <= a.start and a.end <= b.end
