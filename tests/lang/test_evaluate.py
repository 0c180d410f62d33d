"""Values of expressions, and what is refused, where and with which advice."""

from __future__ import annotations

import pytest

from quantrules.diagnostics import RuleError
from quantrules.lang import Env, evaluate, free_names, parse
from quantrules.types import Expr

CONFIG = {
    "layers": 61,
    "kinds": ["s", 4, 128, 4, True, 1],
    "nothing": None,
    "deep": {"x": {"y-z": 7}},
    "flag": False,
    "rate": 0.5,
}
ENV = Env({"n": 12, "H": Expr.of("hidden")}, CONFIG, frozenset({"bf16", "f32"}), {"exists": lambda name: name == "here"})


def value(text: str):
    return evaluate(parse(f"config.z = {text}").statements[0].value, ENV)


@pytest.mark.parametrize("text, expected", [
    ("config.layers * 3 - 1", 182),
    ("7168 / 512 * n", 168),
    ("-7 % 4", 1),
    ("1.5 * 2", 3.0),
    ("len(config.kinds)", 6),
    ("len(config.deep)", 1),
    ("count(config.kinds, 4)", 2),
    ("count(config.kinds, 1)", 1),  # true is not 1
    ("min(3, 1, 2)", 1), ("max([3, 1, 2])", 3),
    ("ceil(576, 128)", 5), ("ceil(512, 128)", 4),
    ("default(config.missing, 5)", 5), ("default(config.nothing, 5)", 5), ("default(config.layers, 5)", 61),
    ("default(config.deep.q.r, config.layers)", 61), ("default(config.layers.x, 1)", 1),
    ("config.kinds[1]", 4), ("config.kinds[-1]", 1), ('config.deep["x"]', {"y-z": 7}), ('config.deep.x."y-z"', 7),
    ("n > 11 and not config.flag", True), ("n < 0 or n == 12", True),
    ('"s" in config.kinds and "t" not in config.kinds', True),
    ("1 == true", False), ("bf16 == bf16", True), ('bf16 == "bf16"', True), ('"a" < "b"', True), ("[1, [2]] == [1, [2]]", True),
    ("2 == 2.0", True),
    ('{"a": [n, -1, null]}', {"a": [12, -1, None]}),
    ('exists("here")', True),
    ("false and config.missing", False),  # the right side is not asked
    ("4 * H / 2", Expr.of("hidden") * 2), ("H + H - H", Expr.of("hidden")), ("H == H", True),
    ("ceil(128 * H, 128)", Expr.of("hidden")),
])  # fmt: skip
def test_values(text, expected):
    result = value(text)
    assert result == expected and type(result) is type(expected)


@pytest.mark.parametrize("text, code, at, remedy", [
    ("m + 1", "QR020", "m", "`n`"),
    ("config.layrs", "QR021", "config.layrs", "`layers`"),
    ("config.missing", "QR021", "config.missing", "default(config.missing, …)"),
    ("config.deep.y", "QR021", "config.deep.y", "`x`"),
    ("config.layers.x", "QR021", "config.layers.x", "`config.layers`"),
    ("7 / 2", "QR023", "7 / 2", "ceil"),
    ("576 / 128 + 1", "QR023", "576 / 128", "ceil"),
    ("1 / 0", "QR023", "1 / 0", "divisor"),
    ("H / 3", "QR023", "H / 3", "ceil"),
    ("3 / H", "QR023", "3 / H", "ceil"),
    ("H * H", "QR022", "H * H", "multiplied by a number"),
    ("1 + config.kinds * 9", "QR022", "config.kinds", "numbers only"),
    ('"a" * 3', "QR022", '"a"', "numbers only"),
    ("true + 1", "QR022", "true", "numbers only"),
    ("n and true", "QR022", "n", "=="),
    ("not config.nothing", "QR022", "config.nothing", "default"),
    ("4611686018427387904 * 2", "QR024", "4611686018427387904 * 2", "64 bits"),
    ("9223372036854775807 + 1", "QR024", "9223372036854775807 + 1", "64 bits"),
    ("1e308 * 10", "QR024", "1e308 * 10", "64 bits"),
    ("config.kinds[6]", "QR025", "6", "0 to 5"),
    ("[][0]", "QR025", "0", "empty"),
    ("n[0]", "QR022", "n", "lists"),
    ("config.kinds[0.5]", "QR022", "0.5", "integer"),
    ('n < "a"', "QR022", 'n < "a"', "two numbers or two texts"),
    ('"a" in "abc"', "QR022", '"abc"', "[a, b]"),
    ("len(1, 2)", "QR022", "len(1, 2)", "len(list)"),
    ("count(n, 1)", "QR022", "n", "[a, b]"),
    ("min([])", "QR022", "min([])", "min(a, b)"),
    ("ceil(1, 0)", "QR022", "ceil(1, 0)", "above 0"),
    ("derive(x)", "QR020", "derive(x)", "write"),
    ("default(m, 1)", "QR020", "m", "`n`"),  # a name that nothing defines is not a missing key
])  # fmt: skip
def test_refusals(text, code, at, remedy):
    with pytest.raises(RuleError) as error:
        value(text)
    (found,) = error.value.diagnostics
    said = f"{found.message} {found.label} {found.help}"
    assert (found.code, found.span.source) == (code, at) and remedy in said


def test_huge_values_from_a_config_are_shown_short():
    env = Env(config={"big": ["x" * 10_000] * 10_000})
    with pytest.raises(RuleError) as error:
        evaluate(parse("let a = config.big + 1").statements[0].value, env)
    assert len(str(error.value)) < 1000


def test_free_names():
    assert free_names(parse("let a = default(config.x, b[c]) + count([d], 2)").statements[0].value) == {"b", "c", "d"}
    assert free_names(parse("a.{L:lo..} → split(0, [s, t], u=v) → b.{L-k} : bf16[N] when w == 1").statements[0]) == {
        "lo", "s", "t", "v", "L", "k", "N", "w"}  # fmt: skip
