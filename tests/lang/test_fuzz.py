"""Texts made of tokens: a tree or diagnostics, never another exception, nothing slow; a tree that came out reads back."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import pytest

from quantrules.diagnostics import RuleError
from quantrules.lang import parse, print_file

EXAMPLES = [p.read_text() for p in sorted((Path(__file__).parent / "examples").glob("*.rules"))]
STATEMENTS = [s for text in EXAMPLES for s in re.split(r"\n(?=\S)", text) if s.strip()]
TOKENS = re.compile(r'\s+|"[^"\n]*"|\w+|→|->|\.\.|==|.')
VOCABULARY = sorted({t for text in EXAMPLES for t in TOKENS.findall(text)}) + [
    "**", "{", "}", "{{", "((", "[", "]", "\\", '"', "'", "#", "##", "\t", "\n", "\n    ", "\n  ", "\r\n", "\0", "\ud800",
    "\u2028", "9" * 30, "1e999",
    "{a,b|c}", "{L:..}", "{}", "not ", "- ", "config.", '"\\ud800"', '"\\u00"', "?=zeros", "|", " : ", "@", "even",
    "under ", "tie ", "config.a = ",
]  # fmt: skip


def mutant(draw: random.Random) -> str:
    tokens = TOKENS.findall("\n".join(draw.choices(STATEMENTS, k=draw.randint(1, 3))))
    for _ in range(draw.choice([1, 1, 1, 2, 4, 16])):
        at, action = draw.randrange(len(tokens) + 1), draw.randrange(5)
        if action == 0:
            del tokens[at : at + draw.randint(1, 3)]
        elif action == 1:
            tokens.insert(at, draw.choice(VOCABULARY))
        elif action == 2 and tokens:
            tokens[at % len(tokens)] = draw.choice(VOCABULARY)
        elif action == 3 and tokens:
            other = draw.randrange(len(tokens))
            tokens[at % len(tokens)], tokens[other] = tokens[other], tokens[at % len(tokens)]
        else:
            tokens[at:at] = tokens[at : at + draw.randint(1, 12)] * draw.choice([1, 1, 40])
    return "".join(tokens)


def test_mutants_are_read_or_refused_and_quickly(capsys):
    parsed = slowest = 0
    for seed in range(3000):
        text = mutant(random.Random(seed))
        start = time.process_time()
        try:
            file = parse(text)
        except RuleError as error:
            assert error.diagnostics and all(d.help for d in error.diagnostics if d.span), text
            str(error)
        else:
            parsed += 1
            assert parse(print_file(file)) == file, text
        slowest = max(slowest, time.process_time() - start)
    with capsys.disabled():
        print(f"\n{parsed / 30:.0f} % of 3000 mutants parse; the slowest took {slowest:.3f} s")
    assert slowest < 1 and 300 < parsed < 2700


@pytest.mark.parametrize("text", [
    "(" * 50_000, "{" * 50_000, ")" * 50_000, '"' * 50_000, "\\" * 50_000, "*" * 50_000, "-" * 50_000, "#" * 50_000,
    "let x = " + "not " * 9000, "let x = 1" + "+1" * 9000, "a → " + "a|" * 9000 + "a", "{x:" + "a|" * 9000 + "b} → keep",
    "let x = " + "9" * 50_000, "a" * 50_000 + " → keep", '"' + "a" * 50_000, "{" + "a," * 9000 + "b} → keep", "\ta\n" * 9000,
    "".join(" " * i + "under a\n" for i in range(300)), "## a\n" * 9000, "config" + ".a" * 9000 + " = 1",
    "let x = " + "a[" * 9000,
    "a, " * 9000 + "b → keep", "x : bf16[" + "1, " * 9000 + "1]", "format f\n" + "  spelling a\n" * 2000, "{**" * 9000,
    "{a}" * 9000 + " → keep",
])  # fmt: skip
def test_long_texts_are_read_or_refused(text):
    start = time.process_time()
    try:
        print_file(parse(text))
    except RuleError as error:
        assert len(str(error)) < 200_000
    assert time.process_time() - start < 3
