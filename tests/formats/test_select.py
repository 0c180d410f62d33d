"""Entries of lists against families of names: the same answers as Python's engines give name by name, in bounded time."""

import random
import re
import time
from fnmatch import fnmatchcase

import numpy as np
import pytest

from quantrules.formats.select import NotUnderstood, Regex, _mask, glob, select
from quantrules.names import families

MODULES = ("self_attn.q_proj", "mlp.gate", "mlp.gate_proj", "mlp.experts.1.w1", "mlp.experts.11.w2")
NAMES = [f"model.layers.{i}.{m}" for i in (0, 1, 2, 10, 12) for m in MODULES]
NAMES += ["lm_head", "model.embed_tokens", "model.visual.blocks.0.mlp.0", "a.00.b", "a.0.b"]
FAMILIES = [names for names, _ in families(NAMES)]


def chosen(masks):
    return sorted(n for names, mask in zip(FAMILIES, masks) for n in names.take(np.flatnonzero(mask)))


PIECES = [
    "model", r"\.", "layers", r"\d+", ".*", ".", "1", "0", "(q|k|v)_proj", "(?:mlp|self_attn)", "[^.]+", r"[0-9]+", "gate", "$",
    "^", ".*?", r"\w+", "experts", "w[12]", "(1|2|10)", r"\d", r"\d{2}", "(?!.*gate)", "(?=model)", "(a|b)*", r"(\.\d+)?",
    "[a-z_]*", "x{0,2}", r"\D+", r"[^0-9]*",
]  # fmt: skip


@pytest.mark.parametrize("seed", range(12))
def test_expressions_match_as_python_does(seed):
    rng = random.Random(seed)
    for _ in range(150):
        text = "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 7)))
        try:
            wanted = sorted(n for n in NAMES if re.match(text, n))
        except re.error:
            continue
        found = chosen(_mask(Regex.parse(text), n.template, n.digits) for n in FAMILIES)
        assert found == wanted, text


GLOBS = "* *.mlp.* *.gate *gate* model.*.experts.?.w1 *.w[12] *.w[!1] lm_head* *.experts.1.* m?del.*q_proj".split()


@pytest.mark.parametrize("text", GLOBS)
def test_globs_match_as_fnmatch_does(text):
    assert chosen(_mask(glob(text), n.template, n.digits) for n in FAMILIES) == sorted(n for n in NAMES if fnmatchcase(n, text))


@pytest.mark.parametrize(
    "style, entries, wanted",
    [
        ("names", ["lm_head", "model.layers.1.mlp"], lambda n: n == "lm_head" or n.startswith("model.layers.1.mlp.")),
        ("names", ["gate", "layers.1"], lambda n: False),
        ("parts", ["gate", "layers.1"], lambda n: ".gate" in n and not n.endswith("gate_proj") or ".layers.1." in n),
        ("globs", ["model.layers.1*"], lambda n: n.startswith("model.layers.1.")),
        ("globs", ["*layers.1*"], lambda n: ".layers.1." in n),
        ("names", ["model.layers.0.self_attn*"], lambda n: n.startswith("model.layers.0.self_attn")),
        ("names", ["a.00.b"], lambda n: n == "a.00.b"),
        ("names", ["re:.*gate$"], lambda n: n.endswith("gate")),
    ],
)
def test_names(style, entries, wanted):
    assert chosen(select(entries, FAMILIES, style).masks) == sorted(filter(wanted, NAMES))


def test_what_matches_nothing_or_is_not_understood_is_told():
    odd = ["re:(a)\\1", "re:(?<=x)y", "re:(?i)x", "re:(", "re:" + "(" * 5000]
    made = select(["lm_head", "nope", "re:no.*", "*.zzz", *odd], FAMILIES, "regex")
    assert made.missed == ("re:no.*", "*.zzz", "nope")
    assert len(made.obscure) == 5


BOMBS = ["(x+x+)+y", "(a*)*b", "(.*)*(.*)*!", "(.*.*.*.*.*.*.*.*.*)!", "(([a-z.]+)+)+$!", "(a|a)*(a|a)*c", "(?:(?=.*x).)*y"]


@pytest.mark.parametrize("text", BOMBS)
def test_no_expression_hangs(text):
    start = time.process_time()
    try:
        Regex.parse(text).matches("model.layers.x.a" * 20)
    except NotUnderstood:
        pass
    assert time.process_time() - start < 5


def test_long_lists_of_names_are_quick():
    names = [f"model.layers.{i}.experts.{e}.w{k}" for i in range(60) for e in range(300) for k in (1, 2, 3)]
    groups = [n for n, _ in families(names)]
    start = time.process_time()
    made = select(names[::2] + [f"model.layers.{i}.self_attn*" for i in range(60)], groups, "globs")
    assert sum(m.sum() for m in made.masks) == len(names[::2]) and len(made.missed) == 60
    assert time.process_time() - start < 5
