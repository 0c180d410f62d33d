"""What `declared`, `when` and a dialect's templates mean: expressions over the keys of a config, or over placeholders.

An absent key is null, and so is anything looked up in null, because configs come in many shapes. Texts compare without
regard to case: the same algorithm is written in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quantrules.diagnostics import Diagnostic, RuleError
from quantrules.formats.load import QR_FORMAT
from quantrules.lang import ast

OMIT: Any = object()  # in a template: leave the key out
_COMPARE = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "in": lambda a, b: a in (b if isinstance(b, list) else []),
    "not in": lambda a, b: a not in (b if isinstance(b, list) else []),
}


def value_of(node: ast.Expression, scope: Mapping[str, Any]) -> Any:
    """The value of an expression; a name is looked up in `scope`, or null."""
    if isinstance(node, ast.Literal):
        return node.value
    if isinstance(node, ast.Name):
        return scope.get(node.name)
    if isinstance(node, ast.ListOf):
        return [value_of(i, scope) for i in node.items]
    if isinstance(node, ast.DictOf):
        made = {key: value_of(v, scope) for key, v in node.items}
        return {k: v for k, v in made.items() if v is not OMIT}
    if isinstance(node, ast.Index):
        return _index(value_of(node.value, scope), value_of(node.index, scope))
    if isinstance(node, ast.Unary) and node.op == "not":
        return not value_of(node.operand, scope)
    if isinstance(node, ast.Binary) and node.op in ("and", "or"):
        left = value_of(node.left, scope)
        return value_of(node.right, scope) if bool(left) == (node.op == "and") else left
    if isinstance(node, ast.Binary) and node.op in _COMPARE:
        return _COMPARE[node.op](_folded(value_of(node.left, scope)), _folded(value_of(node.right, scope)))
    raise RuleError(Diagnostic(QR_FORMAT, "this expression has no meaning in a format or dialect", getattr(node, "span", None),
                               help="==, !=, in, and, or, not, [ ], lists and objects are understood"))


def _index(value: Any, key: Any) -> Any:
    if isinstance(value, list) and isinstance(key, int):
        return value[key] if 0 <= key < len(value) else None
    return value.get(key) if isinstance(value, Mapping) and isinstance(key, str) else None


def _folded(value: Any) -> Any:
    if isinstance(value, list):
        return [_folded(v) for v in value]
    return value.casefold() if isinstance(value, str) else value
