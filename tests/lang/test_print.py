"""Printing: parse(print(tree)) is the tree, comments included; canonical text prints as itself."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quantrules.lang import ast, parse, print_file, walk
from quantrules.lang.build import RESERVED

ROOT = Path(__file__).parent.parent.parent
FILES = sorted((Path(__file__).parent / "examples").glob("*.rules")) + sorted((ROOT / "rules").glob("*.rules"))


def check(file: ast.File) -> str:
    text = print_file(file)
    again = parse(text)
    assert again == file
    assert print_file(again) == text
    return text


@pytest.mark.parametrize("path", FILES, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_files_survive(path):
    text = check(parse(path.read_text(encoding="utf-8")))
    assert all(line == line.rstrip() for line in text.splitlines())
    count = sum(1 + len(n.items) for n in walk(parse(text).statements) if isinstance(n, ast.ListOf | ast.DictOf))
    assert count or len(max(text.splitlines(), key=len)) <= 140


@pytest.mark.parametrize("text, canonical", [
    ("a.*->keep", "a.* → keep"),
    ("a , b→cat( 0 )|unpack()  →  c", "a, b → cat(0) | unpack → c"),
    ("* → keep     also   expect 3|4 when   x==1", "* → keep when x == 1 expect 3 | 4 also"),
    ("{ x : a | b = c }.w → keep", "{x:a|b=c}.w → keep"),
    ('"a"."b" → keep', "a.b → keep"),
    (r"a\:b.c → keep", '"a:b.c" → keep'),
    ('"config".w → keep', '"config".w → keep'),
    ("a : bf16[ 2 * N , K/16 ; 3 ] → keep", "a : bf16[2*N, K/16; 3] → keep"),
    ("a : bf16[ 2*config.n ] → keep", "a : bf16[2 * config.n] → keep"),
    ("layers.{ 2 * L + 1 } → keep", "layers.{2*L+1} → keep"),
    ("let x = (1 + 2) * ((3))", "let x = (1 + 2) * 3"),
    ("let x = 1 - (2 - 3)", "let x = 1 - (2 - 3)"),
    ("let x = (not a) and b", "let x = not a and b"),
    ("let x = not (a and b)", "let x = not (a and b)"),
    ("let x = {\n  a ,\n  b?=zeros }", "let x = {a,b?=zeros}"),
    ("#   two  \n#\n#!x\n* → keep#", None),
    ("##  title\n# why\n* → keep # end", "## title\n# why\n* → keep  # end"),
    ("a → keep\n\n\n\nb → keep", "a → keep\n\nb → keep"),
    ("under a->b\n  c->keep # x\n  under d\n        e->keep", "under a → b\n    c → keep  # x\n    under d\n        e → keep"),
    ("* → keep\n## nothing follows", "* → keep\n## nothing follows"),
])  # fmt: skip
def test_canonical_text(text, canonical):
    if canonical is not None:
        assert print_file(parse(text)) == canonical + "\n"


def test_a_long_rule_breaks_at_its_arrows_and_a_longer_one_at_its_bars():
    name = "model.layers.{L}." + "x" * 60
    assert print_file(parse(f"{name} → unpack | dequant → {name}")) == f"{name}\n    → unpack | dequant → {name}\n"
    op = "rearrange(" + ", ".join(f"a{i}={i}" for i in range(8)) + ")"
    text = check(parse(f"under p\n  {name} → {op} | {op} | {op} → {name}  # c"))
    assert text.splitlines()[1:] == [
        f"    {name}",
        f"        → {op}",
        f"            | {op}",
        f"            | {op}",
        f"        → {name}  # c",
    ]


# ---------------------------------------------------------------------------------------------------- trees of all kinds

words = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,5}", fullmatch=True).filter(
    lambda w: w not in RESERVED | {"True", "False", "None"}
)
# any character of a name, with those that need quotes drawn often
texts = st.text(
    st.one_of(st.sampled_from('ab.0_-?/+\\"*{}|,:=@#()[]→> \t\n'), st.characters(codec="utf-8")), min_size=1, max_size=8
)
config = st.builds(ast.Config, st.lists(st.one_of(words, texts), max_size=3).map(tuple))
numbers = st.one_of(st.integers(-(2**63) + 1, 2**63 - 1), st.floats(allow_nan=False, allow_infinity=False))
literals = st.builds(ast.Literal, st.one_of(numbers, st.booleans(), st.none(), texts, st.just("")))
leaves = st.one_of(literals, st.builds(ast.Name, words), config)
functions = st.sampled_from(["len", "count", "min", "max", "ceil", "default", "exists", "derive"])


def _inner(parts):
    not_number = parts.filter(lambda e: not (isinstance(e, ast.Literal) and type(e.value) in (int, float)))
    return st.one_of(
        st.builds(ast.Binary, st.sampled_from("+ - * / % == != < <= > >= and or in".split() + ["not in"]), parts, parts),
        st.builds(ast.Unary, st.just("not"), parts),
        st.builds(ast.Unary, st.just("-"), not_number),
        st.builds(ast.Index, parts, parts),
        st.builds(ast.Apply, functions, st.lists(parts, max_size=3).map(tuple)),
        st.builds(ast.ListOf, st.lists(parts, max_size=3).map(tuple)),
    )


plain = st.recursive(leaves, _inner, max_leaves=5)  # what may stand in the braces of a pattern
objects = st.builds(ast.DictOf, st.lists(st.tuples(texts, plain), max_size=3, unique_by=lambda p: p[0]).map(tuple))
expressions = st.one_of(plain, objects)

members = st.builds(ast.Member, texts, st.booleans()) | st.builds(ast.Member, texts, st.just(True), st.just("zeros"))
member_lists = st.lists(members, min_size=2, max_size=3, unique_by=lambda m: m.text).map(tuple)
alternatives = st.lists(st.builds(ast.Alternative, texts | st.just(""), texts | st.just("")), min_size=1, max_size=3).map(tuple)
names = words | st.just("")
ranges = st.tuples(st.none() | plain, st.none() | plain).filter(lambda b: b != (None, None))
forms = st.builds(ast.IntForm, st.builds(ast.Binary, st.sampled_from("+-*/%"), plain, plain) | config.filter(lambda c: c.path))
braces = st.one_of(
    st.builds(ast.Star, names), st.builds(ast.Capture, words), forms, st.builds(ast.Alternation, names, alternatives),
    ranges.flatmap(lambda b: st.builds(ast.Capture, words, st.just(b[0]), st.just(b[1]))),
    st.builds(ast.Members, names, member_lists), st.builds(ast.Reference, words, words),
)  # fmt: skip


@st.composite
def patterns(draw, file=False, source=False):
    pieces = draw(st.lists(st.builds(ast.Lit, texts) | braces, min_size=1, max_size=4))
    nodes = []
    for piece in pieces:  # two texts side by side are one, and two stars are an error
        if nodes and (isinstance(piece, ast.Lit | ast.Star) and type(piece) is type(nodes[-1])):
            continue
        nodes.append(piece)
    return ast.Pattern(tuple(nodes), draw(names) if source else "", draw(st.none() | patterns()) if file else None)


dims = st.lists(expressions | st.just(ast.Rest()), min_size=1, max_size=3).map(tuple)
types = st.one_of(
    st.builds(ast.TypeExpr, words, st.none() | st.just(())),
    st.builds(ast.TypeExpr, words, dims, st.none() | expressions),
)
arguments = st.builds(ast.Argument, st.one_of(st.just(""), words, texts), expressions)
calls = st.builds(ast.Call, words, st.lists(arguments, max_size=3).map(tuple))
simple = st.builds(ast.Pipeline, st.lists(calls, min_size=1, max_size=3).map(tuple))
ats = st.builds(
    lambda a, p: ast.Call("at", (*a, ast.Argument("ops", p))), st.lists(arguments, min_size=1, max_size=2).map(tuple), simple
)
pipelines = st.builds(ast.Pipeline, st.lists(calls | ats, min_size=1, max_size=3).map(tuple))
conditions = st.none() | expressions
sources = st.builds(ast.SourcePattern, patterns(file=True, source=True), st.none() | types)
several = lambda strategy, least=0: st.lists(strategy, min_size=least, max_size=2).map(tuple)
no_comment = st.just("")
comment = st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=8).map(str.strip) | no_comment
comments = several(comment | st.sampled_from(["# x", "## y", "#", "#z", " x"]))
meta = {"comments": comments, "comment": comment, "blank": st.booleans()}
parts = st.builds(ast.PartField, words.filter(lambda w: w != "declared"), texts | st.just(""),
                  st.lists(words.filter(lambda w: w != "any"), max_size=2).map(tuple), dims | st.just(()),
                  several(st.sampled_from([("optional", ""), ("inverse", "")]) | st.tuples(st.sampled_from(["cat",
                          "dense"]), texts)),
                  comments=comments, comment=comment)  # fmt: skip
spellings = st.builds(ast.SpellingBlock, words, several(parts), conditions, comments=comments, comment=comment)
elements = st.none() | st.tuples(words, st.integers(1, 9), words, st.sampled_from(["low", "high"]))
statements = st.one_of(
    st.builds(ast.Rule, several(sources, 1), pipelines, several(patterns()), st.none() | types, conditions, several(patterns()),
              several(expressions), st.booleans(), **meta),
    st.builds(ast.SchemaKey, patterns(source=True), types, conditions, **meta),
    st.builds(ast.Def, words, st.lists(words, max_size=2, unique=True).map(tuple), pipelines, conditions, **meta),
    st.builds(ast.Let, words, plain | st.builds(ast.Alternation, st.just(""), alternatives)
              | st.builds(ast.Members, st.just(""), member_lists), **meta),
    st.builds(ast.Param, words, several(expressions, 1), **meta),
    st.builds(ast.Fuse, texts, several(members, 1), **meta),
    st.builds(ast.Rename, patterns(), patterns(), conditions, **meta),
    st.builds(ast.Tie, st.lists(patterns(), min_size=2, max_size=3).map(tuple), **meta),
    st.builds(ast.ConfigEdit, st.lists(words | texts, min_size=1, max_size=3).map(tuple), st.sampled_from(["=", "+="]),
              expressions, **meta),
    st.builds(ast.ConfigEdit, st.lists(words | texts, min_size=1, max_size=3).map(tuple), st.just("delete"), **meta),
    st.builds(ast.Include, texts, **meta),
    st.builds(ast.Side, st.sampled_from(["source", "target"]), texts, **meta),
    st.builds(ast.FormatDef, words, elements, several(st.integers(0, 9)), conditions, several(spellings), **meta),
    st.builds(ast.DialectDef, words, several(st.tuples(words, names, objects)), several(st.tuples(texts, words, objects)),
              st.none() | objects, **meta),
)  # fmt: skip
blocks = st.builds(ast.Under, patterns(), st.none() | patterns(), st.lists(statements, min_size=1, max_size=2).map(tuple), **meta)


@st.composite
def files(draw):
    """Statements under sections; a statement before the first section has none."""
    made, section = [], ""
    for statement in draw(st.lists(statements | blocks, max_size=4)):
        section = draw(st.sampled_from([section, "one", "two words"]))
        if isinstance(statement, ast.Under):
            statement = attrs.evolve(statement, body=tuple(attrs.evolve(s, section=section) for s in statement.body))
        made.append(attrs.evolve(statement, section=section))
    return ast.File(tuple(made), draw(comments.filter(lambda c: not any(x.startswith("# ") for x in c))))


@given(files())
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_tree_survives_printing(file):
    check(file)


def test_the_check_fails_where_a_tree_is_not_what_was_printed():
    with pytest.raises(AssertionError):
        check(ast.File((ast.Param("x", (ast.Unary("-", ast.Literal(1)),)),)))  # reads as the number -1
