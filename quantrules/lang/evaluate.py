"""Values of expressions: `let`s, parameters, conditions, counts, dimensions, config edits.

Integers are exact and capped, nothing allocates more than its inputs hold, and every refusal is a RuleError at the part
of the expression that caused it. Dimensions may be symbolic (quantrules.types.Expr): arithmetic passes them on.
"""

from __future__ import annotations

import math
import operator
import reprlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import attrs
from attrs import frozen

from quantrules import types
from quantrules.diagnostics import Diagnostic, RuleError, Span
from quantrules.diagnostics import define as code
from quantrules.lang import ast
from quantrules.lang.mistakes import nearest

QR_NAME = code("QR020", "A name that nothing defines")
QR_CONFIG = code("QR021", "A config key that is missing")
QR_KIND = code("QR022", "A value of the wrong kind")
QR_DIVIDE = code("QR023", "A division that leaves a rest")
QR_SIZE = code("QR024", "A number beyond 64 bits, or a list beyond all use")
QR_INDEX = code("QR025", "An index outside its list")

LIMIT = 2**63
MOST_ITEMS = 100_000  # of a list and the lists in it


@frozen
class Env:
    """What names mean. `words` (dtypes, formats) stand for themselves; `functions` are the caller's, such as `exists`."""

    names: Mapping[str, Any] = {}
    config: Mapping[str, Any] = {}
    words: frozenset[str] = frozenset()
    functions: Mapping[str, Callable[..., Any]] = {}

    def extend(self, names: Mapping[str, Any]) -> Env:
        """This, with more names; theirs win."""
        return attrs.evolve(self, names={**self.names, **names})


class _Missing(RuleError):
    """A config key that is absent: what `default` answers."""


def evaluate(expr: ast.Expression, env: Env) -> Any:
    """The value of `expr`: int, float, str, bool, None, list, dict, or a symbolic dimension.

    >>> evaluate(ast.Binary("/", ast.Literal(12), ast.Name("n")), Env({"n": 4}))
    3
    """
    match expr:
        case ast.Literal(value=value):
            return value
        case ast.Name(name=name):
            if name in env.names:
                return env.names[name]
            if name in env.words:
                return name
            _refuse(QR_NAME, f"`{name}` is not defined", expr.span, nearest(name, [*env.names, *env.words]))
        case ast.Config(path=path):
            return _config(path, env, expr.span)
        case ast.Unary(op="not"):
            return not _truth(expr.operand, env)
        case ast.Unary():
            return _bounded(0 - _number(expr.operand, env), expr.span)
        case ast.Binary(op="and"):
            return _truth(expr.left, env) and _truth(expr.right, env)
        case ast.Binary(op="or"):
            return _truth(expr.left, env) or _truth(expr.right, env)
        case ast.Binary(op=op) if op in _ARITHMETIC:
            return _bounded(_ARITHMETIC[op](_number(expr.left, env), _number(expr.right, env), expr.span), expr.span)
        case ast.Binary():
            return _compare(expr, env)
        case ast.Index():
            return _index(expr, env)
        case ast.Apply():
            return _apply(expr, env)
        case ast.ListOf(items=items):
            made = [evaluate(i, env) for i in items]
            if _size(made, MOST_ITEMS) > MOST_ITEMS:
                _refuse(QR_SIZE, f"the list holds more than {MOST_ITEMS:,} items", expr.span, "keep lists of lists small")
            return made
        case ast.DictOf(items=items):
            return {key: evaluate(i, env) for key, i in items}
    raise TypeError(f"{type(expr).__name__} is no expression")


def walk(node: Any) -> Iterator[ast.Node]:
    """`node` and all nodes below it."""
    if isinstance(node, ast.Node):
        yield node
        for a in attrs.fields(type(node)):
            if a.eq:
                yield from walk(getattr(node, a.name))
    elif isinstance(node, tuple):
        for item in node:
            yield from walk(item)


def free_names(node: Any) -> frozenset[str]:
    """The names that an expression (or anything that holds some) needs from outside.

    >>> sorted(free_names(ast.Binary("+", ast.Name("a"), ast.Index(ast.Name("b"), ast.Literal(0)))))
    ['a', 'b']
    """
    return frozenset(n.name for n in walk(node) if isinstance(n, ast.Name))


# ------------------------------------------------------------------------------------------------------------- kinds


def _refuse(code: str, message: str, span: Span | None, help: str, label: str = "", error=RuleError) -> NoReturn:
    raise error(Diagnostic(code, message, span, label, help=help))


_KINDS = ((bool, "true or false"), (int, "an integer"), (float, "a number"), (str, "a text"), (list | tuple, "a list"),
          (Mapping, "an object"))  # fmt: skip


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return next((word for kind, word in _KINDS if isinstance(value, kind)), f"a {type(value).__name__}")


def _shown(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {True: "true", False: "false", None: "null"}[value]
    return reprlib.repr(value) if not isinstance(value, types.Expr) else str(value)


def _number(expr: ast.Expression, env: Env) -> Any:
    value = evaluate(expr, env)
    if isinstance(value, bool | str | list | tuple | Mapping) or value is None:
        _refuse(QR_KIND, f"{_shown(value)} is {_kind(value)}, not a number", expr.span, "arithmetic takes numbers only",
                "expected a number")
    return value


def _integer(expr: ast.Expression, env: Env) -> int:
    value = _number(expr, env)
    if not isinstance(value, int):
        _refuse(QR_KIND, f"{_shown(value)} is not an integer", expr.span, "write an integer", "expected an integer")
    return value


def _truth(expr: ast.Expression, env: Env) -> bool:
    value = evaluate(expr, env)
    if not isinstance(value, bool):
        _refuse(QR_KIND, f"{_shown(value)} is {_kind(value)}, not true or false", expr.span,
                "compare it: `… == …`; `default(config.x, false)` stands for a key that may be absent",
                "expected a condition")
    return value


def _bounded(value: Any, span: Span | None) -> Any:
    if isinstance(value, types.Expr):
        parts = [value.const, *(c for _, c in value.terms)]
    else:
        parts = [value]
    if any(abs(p) >= LIMIT if isinstance(p, int) else not math.isfinite(p) for p in parts if isinstance(p, int | float)):
        _refuse(QR_SIZE, "the result is beyond 64 bits", span, "no size of a tensor is as large: check the numbers")
    return value


# -------------------------------------------------------------------------------------------------------- operators


def _divide(a: Any, b: Any, span: Span | None) -> Any:
    if b == 0:
        _refuse(QR_DIVIDE, "division by 0", span, "check the divisor")
    if isinstance(a, float) or isinstance(b, float):
        return a / b
    if not isinstance(b, int) or not types.divisible(a, b):
        rest = f", rest {a % b}" if isinstance(a, int) and isinstance(b, int) else ""
        _refuse(QR_DIVIDE, f"{a} / {b} is not whole{rest}", span, "`/` divides exactly; `ceil(a, b)` rounds up",
                "must divide exactly")
    return types.div(a, b)


def _remainder(a: Any, b: Any, span: Span | None) -> Any:
    if not isinstance(a, int) or not isinstance(b, int) or b == 0:
        _refuse(QR_KIND, f"{a} % {b} has no value", span, "`%` takes integers, the second not 0")
    return a % b


def _times(a: Any, b: Any, span: Span | None) -> Any:
    if isinstance(a, types.Expr) and isinstance(b, types.Expr):
        _refuse(QR_KIND, f"({a}) * ({b}) is not linear", span, "a symbolic dimension is multiplied by a number")
    return a * b


_ARITHMETIC = {"+": lambda a, b, _: a + b, "-": lambda a, b, _: a - b, "*": _times, "/": _divide, "%": _remainder}
_ORDER = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def _size(value: Any, most: int) -> int:
    """Items of a list and of the lists in it; it stops counting beyond `most`, since a `let` may double a list at every step."""
    total = 0
    for item in value:
        total += 1 + (_size(item, most - total) if isinstance(item, list | tuple) else 0)
        if total > most:
            break
    return total


def _same(a: Any, b: Any) -> bool:
    """JSON's equality: true is not 1."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a is b
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a == b


def _compare(expr: ast.Binary, env: Env) -> bool:
    left, right = evaluate(expr.left, env), evaluate(expr.right, env)
    if expr.op in ("==", "!="):
        return _same(left, right) == (expr.op == "==")
    if expr.op in ("in", "not in"):
        if not isinstance(right, list | tuple | Mapping):
            _refuse(QR_KIND, f"{_shown(right)} is {_kind(right)}, not a list", expr.right.span, "write a list: `[a, b]`",
                    "expected a list")
        return any(_same(left, x) for x in right) == (expr.op == "in")
    numbers = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (left, right))
    if not numbers and not (isinstance(left, str) and isinstance(right, str)):
        _refuse(QR_KIND, f"{_shown(left)} and {_shown(right)} have no order", expr.span,
                f"`{expr.op}` compares two numbers or two texts")
    return _ORDER[expr.op](left, right)


def _config(path: tuple[str, ...], env: Env, span: Span | None) -> Any:
    value: Any = env.config
    for i, key in enumerate(path):
        at = ".".join(("config", *path[:i]))
        if not isinstance(value, Mapping):
            _refuse(QR_CONFIG, f"{at} is {_kind(value)} and holds no key `{key}`", span, f"write `{at}`", error=_Missing)
        if key not in value:
            full = ".".join(("config", *path[: i + 1]))
            _refuse(QR_CONFIG, f"the source's config has no {full}", span,
                    nearest(key, map(str, value)) + f"; `default({full}, …)` is for a key that may be absent", error=_Missing)
        value = value[key]
    return value


def _index(expr: ast.Index, env: Env) -> Any:
    value = evaluate(expr.value, env)
    if isinstance(value, Mapping):
        key = evaluate(expr.index, env)
        if not isinstance(key, str) or key not in value:
            _refuse(QR_INDEX, f"there is no key {_shown(key)}", expr.index.span, nearest(str(key), map(str, value)),
                    error=_Missing)
        return value[key]
    if not isinstance(value, list | tuple):
        _refuse(QR_KIND, f"{_shown(value)} is {_kind(value)} and has no items", expr.value.span,
                "only lists and objects have", "expected a list")
    at = _integer(expr.index, env)
    if not -len(value) <= at < len(value):
        _refuse(QR_INDEX, f"index {at} is outside a list of {len(value)}", expr.index.span,
                f"items are 0 to {len(value) - 1}" if value else "the list is empty")
    return value[at]


# --------------------------------------------------------------------------------------------------------- functions


def _apply(expr: ast.Apply, env: Env) -> Any:
    name, args = expr.function, expr.args
    if name in env.functions:
        return env.functions[name](*(evaluate(a, env) for a in args))
    function, least, most = _FUNCTIONS.get(name, (None, 0, 0))
    if function is None:
        _refuse(QR_NAME, f"`{name}` has no value here", expr.span, nearest(name, [*_FUNCTIONS, *env.functions]))
    if not least <= len(args) <= most:
        _refuse(QR_KIND, f"`{name}` takes {_USAGE[name]}, not {len(args)} argument{'s' * (len(args) != 1)}", expr.span,
                f"write `{name}({_USAGE[name]})`")
    return _bounded(function(expr, env), expr.span)


def _items(expr: ast.Expression, env: Env) -> list:
    value = evaluate(expr, env)
    if not isinstance(value, list | tuple):
        _refuse(QR_KIND, f"{_shown(value)} is {_kind(value)}, not a list", expr.span, "write a list: `[a, b]`", "expected a list")
    return list(value)


def _len(expr: ast.Apply, env: Env) -> int:
    value = evaluate(expr.args[0], env)
    return len(value) if isinstance(value, str | Mapping) else len(_items(expr.args[0], env))


def _count(expr: ast.Apply, env: Env) -> int:
    items, wanted = _items(expr.args[0], env), evaluate(expr.args[1], env)
    return sum(_same(x, wanted) for x in items)


def _extreme(expr: ast.Apply, env: Env) -> Any:
    """min and max of numbers, or of the numbers of one list."""
    if len(expr.args) == 1:
        values = _items(expr.args[0], env)
    else:
        values = [evaluate(a, env) for a in expr.args]
    if not values or any(not isinstance(v, int | float) or isinstance(v, bool) for v in values):
        _refuse(QR_KIND, f"`{expr.function}` takes numbers, at least one", expr.span, f"write `{expr.function}(a, b)`")
    return (min if expr.function == "min" else max)(values)


def _ceil(expr: ast.Apply, env: Env) -> Any:
    a, b = _number(expr.args[0], env), _integer(expr.args[1], env)
    if b <= 0 or isinstance(a, float):
        _refuse(QR_KIND, f"ceil({a}, {b}) has no value", expr.span, "`ceil(a, b)` is a / b rounded up, of integers, b above 0")
    return types.ceil_div(a, b)


def _default(expr: ast.Apply, env: Env) -> Any:
    """The first value, or the second where the config's key is absent or null."""
    try:
        value = evaluate(expr.args[0], env)
    except _Missing:
        value = None
    return evaluate(expr.args[1], env) if value is None else value


_FUNCTIONS = {"len": (_len, 1, 1), "count": (_count, 2, 2), "min": (_extreme, 1, 99), "max": (_extreme, 1, 99),
              "ceil": (_ceil, 2, 2), "default": (_default, 2, 2)}  # fmt: skip
_USAGE = {"len": "list", "count": "list, x", "min": "a, b", "max": "a, b", "ceil": "a, b", "default": "config.x, y"}
