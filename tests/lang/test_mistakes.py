"""Wrong rule files, and what a person who wrote one must find in the message: the line, the column, and what to write.

A row is (text, line, column, the marked text, words of the remedy). It was written from what the reader needs.
"""

from __future__ import annotations

import pytest

from quantrules.diagnostics import RuleError
from quantrules.lang import mistakes, parse
from quantrules.lang.parser import MAX_CHARACTERS

ROWS = [
    # arrows and ops
    ("a.* → b.*", 1, 7, "b.*", "write `→ keep → b.*`"),
    ("*.w → {x}.w", 1, 7, "{x}.w", "write `→ keep → {x}.w`"),
    ('a → "b c"', 1, 5, '"b', "write `→ keep → \"b"),
    ("a → keep | b.c → d", 1, 12, "b.c", "names stand after `→`"),
    ("*.norm keep", 1, 8, "keep", "write `*.norm → keep`"),
    ("*.norm", 1, 7, "", "write `*.norm → keep`"),
    ("*.norm →", 1, 9, "", "write `→ keep`, or `→ drop`"),
    ("*.norm → → x", 1, 10, "→", "write `→ keep →`"),
    ("*.norm → keep →", 1, 16, "", "write the target, or remove the arrow"),
    ("*.norm => keep", 1, 8, "=>", "write `→` or `->`"),
    ("*.norm ⇒ keep", 1, 8, "⇒", "write `→` or `->`"),
    ("*.norm = keep", 1, 8, "=", "write `*.norm → OPS`"),
    ("* → keep → a | cat", 1, 14, "|", "`→ OPS → TARGET`"),
    ("* → keep → a → b", 1, 14, "→", "`→ OPS → TARGET`"),
    ("* → unpack dequant", 1, 12, "dequant", "write `| dequant`"),
    ("* → unpack, dequant", 1, 11, ",", "write `|` here"),
    ("* → unpack | | dequant", 1, 14, "|", "remove the `|`"),
    ("* → unpack |", 1, 13, "", "remove the `|`"),
    ("a, → keep", 1, 4, "→", "remove the `,`"),
    ("# x\n* → keep\n→ b", 3, 1, "→", "indent this line"),
    # clauses
    ("* → keep → b wehn x == 1", 1, 14, "wehn", "did you mean `when`?"),
    ("* → keep if x == 1", 1, 10, "if", "did you mean `when`?"),
    ("* → keep → b expects 3", 1, 14, "expects", "did you mean `expect`?"),
    ("* → keep when", 1, 14, "", 'such as `when attention == "bf16"`'),
    ("* → keep expect", 1, 16, "", "`expect 61`"),
    ("* → keep when a when b", 1, 17, "when b", "joined by `and`"),
    ("* → keep → my name.x", 1, 15, "name.x", "a name with a space is written in quotes"),
    ("* → keep when x = 3", 1, 17, "=", "write `==`"),
    ("* → keep when a && b", 1, 17, "&&", "write `and`"),
    ("* → keep when x == 'b'", 1, 20, "'b'", 'write `"…"`'),
    ("* → keep when 0 < x < 3", 1, 21, "<", "`a < b and b < c`"),
    ("* → keep when x == True", 1, 20, "True", "write `true`"),
    ("* → keep → x:bf16", 1, 12, "x:bf16", "write `x : …`, with spaces"),
    ("* : → keep", 1, 5, "→", "`: bf16[N, K]`"),
    ("* : bf16[N K] → keep", 1, 12, "K", "write `, K`"),
    ("* : bf16[N,] → keep", 1, 12, "]", "remove the `,`"),
    # patterns
    ("a.**.b → keep", 1, 3, "**", "`*` crosses dots already"),
    ("{a,b|c} → keep", 1, 5, "|", "use one kind"),
    ("{x:a|b?} → keep", 1, 7, "?", "quotes for a character"),
    ("{L:0..3|5} → keep", 1, 8, "|", "a mixture"),
    ("{a,{b,c}} → keep", 1, 4, "{", "do not nest"),
    ("{} → keep", 1, 2, "", "write a name, `{L}`, or a list"),
    ("{L:3} → keep", 1, 4, "3", "`{L:0..61}`"),
    ("{0..3} → keep", 1, 2, "0..3", "write `{L:0..3}`"),
    ("{L:..} → keep", 1, 2, "L:..", "write `{L}`"),
    ("{x:a.b} → keep", 1, 5, ".b", "write `{x:a.b=c.d}`"),
    ("{a b} → keep", 1, 4, "b", "write `, b`"),
    ("{a*,b} → keep", 1, 3, "*", "one pattern for each"),
    ("{x:|a} → keep", 1, 4, "|", '`""`'),
    ("{a,b,} → keep", 1, 6, "", '`""`'),
    ("{a,b,a} → keep", 1, 6, "a", "remove one"),
    ("{a,b?=ones} → keep", 1, 7, "ones", "`?=zeros`"),
    ("{2*L+} → keep", 1, 6, "", "captures, numbers"),
    ("{when} → keep", 1, 2, "when", "`when_`"),
    # quotes, brackets, comments, indents
    ('"a.b → keep', 1, 1, '"a.b → keep', 'close it with `"`'),
    ("{a,b → keep\n* → keep", 1, 1, "{", "close it"),
    ("a → cat(0 → b\n* → keep", 1, 8, "(", "expected `)`"),
    ("a → cat(0]) → b", 1, 10, "]", "remove it"),
    ("a) → keep", 1, 2, ")", "`\\)`"),
    ("* → keep# comment", 1, 9, "#", "a space before `#`"),
    ("  a → keep", 1, 1, "  ", "start it in column 1"),
    ("under a\n\tb → keep", 2, 1, "\t", "write spaces"),
    ("under a\n    b → keep\n  c → keep", 3, 1, "  ", "one column"),
    ("under a\n* → keep", 1, 1, "under a", "indent the statements"),
    ("under a:\n    b → keep", 1, 8, ":", "remove the `:`"),
    (r'let a = "\q"', 1, 10, "\\", r"write `\\`"),
    # definitions
    ("let x 3", 1, 7, "3", "write `=` here"),
    ("let x: 3", 1, 6, ":", "write `=` here"),
    ("let when = 3", 1, 5, "when", "choose another"),
    ("let 3x = 1", 1, 5, "3x", "before the digit"),
    ("let x = 1_000", 1, 9, "1_000", "digits only"),
    ("let x = 99999999999999999999", 1, 9, "99999999999999999999", "9223372036854775807"),
    ("let x =", 1, 8, "", "`let NAME = VALUE`"),
    ("let x = [1 2]", 1, 12, "2", "write `, 2`"),
    ("let x = {a}", 1, 9, "{a}", "`{a|b=c}`"),
    ("let x = length(y)", 1, 9, "length", "`len`"),
    ("let x = lenn(y)", 1, 9, "lenn", "did you mean `len`?"),
    ("def f(x): keep", 1, 9, ":", "write `=` here"),
    ("def f =", 1, 8, "", "write `= keep`"),
    ("def f(x, x) = keep", 1, 10, "x", "a name of its own"),
    ("fuse a b, c", 1, 8, "b", "write `=` here"),
    ("fuse a = b c", 1, 12, "c", "write `, c`"),
    ("fuse a = *.b, c", 1, 10, "*.b", "write it out"),
    ("rename a b", 1, 10, "b", "`rename OLD → NEW`"),
    ("tie a → b", 1, 7, "→", "`tie A = B`"),
    ("include formats.rules", 1, 9, "formats.rules", 'write `include "formats.rules"`'),
    ('inculde "a"', 1, 1, "inculde", "did you mean `include`?"),
    ("source", 1, 7, "", "write `source NAME`"),
    ("config.weight → keep", 1, 15, "→", '`"config".…`'),
    ("config.a == 3", 1, 11, "=", "`config.PATH = JSON`"),
    ("delete a.b", 1, 8, "a.b", "`delete config.PATH`"),
    ('config.a = {"x": 1, "x": 2}', 1, 21, '"x": 2', "keep one"),
    # formats
    ("format x\n    elemnt e2m1", 2, 5, "elemnt", "did you mean `element`?"),
    ("format x\n    block [1, b]", 2, 15, "b", "`block [1, 16]`"),
    ("format x\n    spelling y\n        codes .weight u8[N K]", 3, 28, "K", "write `, K`"),
    ('dialect x\n    for y {"a": }', 2, 17, "}", "`for FORMAT SPELLING {JSON}`"),
]  # fmt: skip


def found(text: str):
    with pytest.raises(RuleError) as error:
        parse(text, "t.rules")
    return error.value.diagnostics


@pytest.mark.parametrize("text, line, column, marked, remedy", ROWS, ids=[r[0].replace("\n", "⏎") for r in ROWS])
def test_a_mistake_is_found_where_it_is_and_says_what_to_write(text, line, column, marked, remedy):
    first = next(d for d in found(text) if d.span)
    assert (first.span.text.position(first.span.start), first.span.source) == ((line, column), marked)
    assert remedy in f"{first.message} {first.label} {first.help}"
    assert first.message and first.help and first.code.startswith("QR0")
    assert f"t.rules:{line}:{column}" in first.render()


@pytest.mark.parametrize("text", [r[0] for r in ROWS], ids=[r[0].replace("\n", "⏎") for r in ROWS])
def test_a_mistake_is_said_once_and_hides_none_below(text):
    assert len(found(text)) == 1
    if not text.startswith("under a\n* →"):  # there the block would take the line
        more = found(text + "\nlast →")
        assert len(more) == 2 and more[-1].span.text.position(more[-1].span.start)[0] == text.count("\n") + 2


def test_each_row_of_hints_is_reached_by_its_snippets():
    rows = {(code, message, help) for code, message, help, *_ in mistakes.HINTS}
    assert set(mistakes._hints().values()) == rows


def test_a_rendered_mistake_is_what_a_compiler_would_print():
    (one,) = found("# V4\na.{kv,q} → b.kv_q\n")
    assert (
        one.render()
        == """\
error[QR008]: `b.kv_q` is a name, but after the first arrow comes an op
 --> t.rules:2:12
  |
2 | a.{kv,q} → b.kv_q
  |            ^^^^^^ expected an op
  |
  = help: write `→ keep → b.kv_q`"""
    )


def test_limits_are_diagnostics():
    assert "nested" in found("let x = " + "(" * 40 + "1" + ")" * 40)[0].message
    assert "nested" in found("let x = " + "not " * 150 + "true")[0].message
    assert "sum of that length" in found("let x = 1" + " + 1" * 150)[0].message
    assert "deep" in found("".join(" " * i + "under a\n" for i in range(12)) + " " * 12 + "b → keep")[0].message
    assert f"{MAX_CHARACTERS} characters" in found("# " + "a" * MAX_CHARACTERS)[0].message
    many = found("a\n" * 500)
    assert len(many) == 101 and "more mistakes" in many[-1].message
