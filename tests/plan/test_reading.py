"""Patterns against families of names: the same as plain backtracking over each name, piece by piece and shortest first."""

from __future__ import annotations

import random
import re

from quantrules.lang import parse
from quantrules.lang.evaluate import Env
from quantrules.names import families
from quantrules.plan.reading import read

ENV = Env({}, {}, frozenset())


def backtrack(nodes, name, at=0):
    """What each node reads, or None. A node is (kind, argument); integers are looked at as soon as they are read."""
    if not nodes:
        return [] if at == len(name) else None
    (kind, arg), rest = nodes[0], nodes[1:]
    if kind in ("text", "alternatives"):
        ends = [at + len(a) for a in arg if name.startswith(a, at)]
    else:
        ends = [e for e in range(at + 1, len(name) + 1) if fits(kind, arg, name[at:e])]
    for end in ends:
        if (found := backtrack(rest, name, end)) is not None:
            return [name[at:end], *found]
    return None


def fits(kind, arg, text):
    if kind == "range":
        return text.isdigit() and arg[0] <= int(text) < arg[1]
    if kind == "form":
        return text.isdigit() and int(text) >= arg[1] and (int(text) - arg[1]) % arg[0] == 0
    return kind == "star" or "." not in text


def draw(rnd):
    """Nodes without two wildcards side by side, and texts that are not side by side either."""
    nodes = []
    for _ in range(rnd.randint(1, 5)):
        wild = nodes and nodes[-1][0] not in ("text", "alternatives")
        kind = "text" if wild else rnd.choice(["text", "star", "capture", "range", "form", "alternatives"])
        if kind == "text":
            text = "".join(rnd.choice("a01..") for _ in range(rnd.randint(1, 3)))
            before = nodes.pop()[1][0] if nodes and nodes[-1][0] == "text" else ""
            nodes.append(("text", [before + text]))
        elif kind == "alternatives":
            nodes.append((kind, rnd.sample(["a", "0", "1", ".a", "a.1", "0.1", "01"], 2)))
        else:
            low = rnd.randint(0, 2)
            nodes.append((kind, {"range": (low, low + rnd.randint(0, 10)), "form": (rnd.randint(1, 3), low)}.get(kind)))
    return nodes


def written(nodes):
    ways = {"text": lambda n, a: a[0], "star": lambda n, a: "*", "capture": lambda n, a: f"{{{n}}}", "range": lambda n, a: f"{{{n}:{a[0]}..{a[1]}}}",
            "form": lambda n, a: f"{{{a[0]}*{n}+{a[1]}}}", "alternatives": lambda n, a: f"{{{n}:{'|'.join(a)}}}"}  # fmt: skip
    return "".join(ways[kind](name, arg) for name, (kind, arg) in zip("ABCDE", nodes))


def like(rnd, nodes):
    """A name that the pattern may match."""
    ways = {"text": lambda a: a[0], "star": lambda a: "".join(rnd.choice("a01.") for _ in range(rnd.randint(1, 4))),
            "capture": lambda a: rnd.choice(["a", "0", "12", "01"]), "alternatives": rnd.choice}  # fmt: skip
    return "".join(ways.get(kind, lambda a: str(rnd.randint(0, 12)))(arg) for kind, arg in nodes)


def wanted(nodes, name):
    texts = backtrack(nodes, name)
    if texts is None:
        return None
    stars = [t for (kind, _), t in zip(nodes, texts) if kind == "star"]
    named = {n: str((int(t) - arg[1]) // arg[0]) if kind == "form" else t
             for n, (kind, arg), t in zip("ABCDE", nodes, texts) if kind not in ("text", "star")}  # fmt: skip
    return stars, named


def test_families_are_read_as_names_are():
    rnd, matches = random.Random(5), 0
    for _ in range(120):
        nodes = draw(rnd)
        near = {re.sub("0", rnd.choice(["00", "1", "."]), like(rnd, nodes)) for _ in range(5)}
        names = sorted({like(rnd, nodes) for _ in range(15)} | near)
        pattern = parse(written(nodes) + " → keep\n", "t.rules").statements[0].sources[0].pattern
        got = dict.fromkeys(names)
        for family, rows in families(names):
            for r in read(pattern, family, ENV):
                stars, named = [list(s) for s in r.stars], {k: list(v) for k, v in r.named.items()}
                for k, i in enumerate(r.index.tolist()):
                    assert got[names[rows[i]]] is None, "read twice"
                    got[names[rows[i]]] = [s[k] for s in stars], {n: v[k] for n, v in named.items()}
        for name in names:
            assert got[name] == wanted(nodes, name), f"{written(nodes)} on {name}"
            matches += got[name] is not None
    assert matches > 500
