"""What the text of a rule file alone tells: names, ops, arguments and params, without a checkpoint at hand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from quantrules.api import Rules, builtin_formats
from quantrules.diagnostics import Diagnostic
from quantrules.formats import load_formats
from quantrules.lang import ast, walk
from quantrules.plan.scope import flatten

VALUES = {f"QR02{n}" for n in range(6)}  # of expressions: a config key that is missing, and what follows from that


def resolve(rules: Rules, params: Mapping[str, Any]) -> tuple[Diagnostic, ...]:
    """Findings of a rule file without a source. What depends on the source's config is not known and not complained of."""
    scope = flatten(rules.file, {}, load_formats(rules.file, builtin_formats()), params)
    unknown = _needs_config(rules.file)
    return tuple(d for d in scope.errors if d.code not in VALUES or d.span is None or not any(_within(d, s) for s in unknown))


def _needs_config(file: ast.File) -> list[ast.Statement]:
    """Statements that read the config, or a `let`, `param` or `def` that does."""
    found, names = [], set()
    for statement in _all(file.statements):
        used = {n.name for n in walk(statement) if isinstance(n, (ast.Name, ast.Call))}
        used |= {n.let for n in walk(statement) if isinstance(n, ast.Reference)}
        if used & names or any(isinstance(n, ast.Config) for n in walk(statement)):
            found.append(statement)
            names |= {statement.name} if isinstance(statement, (ast.Let, ast.Param, ast.Def)) else set()
    return found


def _all(statements: Iterable[ast.Statement]) -> Iterator[ast.Statement]:
    for statement in statements:
        yield from _all(statement.body) if isinstance(statement, (ast.Include, ast.Under)) else [statement]


def _within(diagnostic: Diagnostic, statement: ast.Statement) -> bool:
    a, b = diagnostic.span, statement.span
    return a.text is b.text and b.start <= a.start and a.end <= b.end
