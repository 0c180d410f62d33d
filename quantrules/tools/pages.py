"""Lists and pages of what the product knows: ops, formats, rule files, codes of diagnostics. From where each is defined."""

from __future__ import annotations

from collections.abc import Iterator

from attrs import evolve

from quantrules import lang
from quantrules.api import builtin_file, builtin_formats, rules_directory, shipped_rules
from quantrules.diagnostics import CODES, Diagnostic, RuleError, define
from quantrules.lang import ast, print_file
from quantrules.lang.mistakes import nearest
from quantrules.lang.printer import expression
from quantrules.ops.base import REGISTRY, REQUIRED, Op

NO_PAGE = define("QR092", "A word that has no page")


def ops() -> dict[str, str]:
    """Name -> one-line summary."""
    return {name: REGISTRY[name].summary for name in sorted(REGISTRY)}


def formats() -> dict[str, str]:
    """Name -> spellings, with bits for each parameter."""
    listed = {}
    for f in builtin_formats().values():
        spelled = ", ".join(s.name for s in f.spellings)
        listed[f.name] = spelled if f.is_dense else f"blocks of {' × '.join(map(str, f.block))}, spelled by {spelled}"
    return listed


def rule_files() -> dict[str, str]:
    """Name -> the first comment line of each shipped rule file."""
    return {name: (_comments(path.read_text(encoding="utf-8")) or [""])[0] for name, path in shipped_rules().items()}


def page(word: str) -> str:
    """The page of an op, a format, a rule file or a code; raises RuleError where there is none."""
    if word[:2].upper() == "QR" and word.upper() in _codes():
        return f"{word.upper()}: {CODES[word.upper()]}"
    blocks = {s.name: s for s in builtin_file().statements if isinstance(s, ast.FormatDef)}
    files = shipped_rules()
    found = []
    if word in REGISTRY:
        found.append("\n".join(_op(REGISTRY[word])))
    if word in blocks:
        text = print_file(ast.File((evolve(blocks[word], comments=()),)))
        found.append(f"{word}, a format: {formats()[word]}\n\n{text}\nfrom {rules_directory() / 'formats.rules'}")
    if word.removesuffix(".rules") in files:
        found.append("\n".join(_rule_file(word.removesuffix(".rules"))))
    if not found:
        raise RuleError(
            Diagnostic(NO_PAGE, f"nothing is called {word}", help=nearest(word, [*REGISTRY, *blocks, *files, *CODES]))
        )
    return "\n\n".join(found)


def _codes() -> dict[str, str]:
    """All codes: each room defines its own when it is imported."""
    from importlib import import_module
    from importlib.util import find_spec

    for room in ("quantrules.run.local", "quantrules.run.preflight", "quantrules.tools.explain"):
        if find_spec(room):
            import_module(room)
    return CODES


def _op(op: Op) -> Iterator[str]:
    yield f"{op.name}{_signature(op)}: {op.summary}"
    yield from ("", op.help) if op.help else ()
    yield from ["", *(f"  {p.name}  {_param(p)}" for p in op.params)] if op.params else ()
    yield from ("", f"  {op.example}") if op.example else ()
    reads = {"paths": "modules, by their path", "keys": "tensors, by their key"}.get(
        op.matches, "modules by their path, then tensors by their key"
    )
    yield f"\nA rule that begins with it reads {reads}."


def _signature(op: Op) -> str:
    shown = [p.name if p.default is REQUIRED else f"[{p.name}]" for p in op.params]
    return f"({', '.join(shown)})" if shown else ""


def _param(p) -> str:
    kind = " | ".join(p.choices) or p.kind
    default = "" if p.default is REQUIRED or p.default is None else f", {p.default} unless said otherwise"
    return f"{p.help or p.name} ({kind}{default})"


def _rule_file(name: str) -> Iterator[str]:
    path = shipped_rules()[name]
    text = path.read_text(encoding="utf-8")
    params = [s for s in lang.load(path, (rules_directory(),)).statements if isinstance(s, ast.Param)]
    yield from (f"{name}, a rule file", "", *_comments(text))
    if params:
        yield from ("", "params, the first value is the default:")
        yield from (
            f"  -D {p.name}=…  {' | '.join(map(expression, p.choices))}" + (f"    {p.comment}" if p.comment else "")
            for p in params
        )
    yield from ("", f"  quantrules plan {name} SRC", f"  quantrules apply {name} SRC OUT", "", f"from {path}")


def _comments(text: str) -> list[str]:
    """The comment lines that a file begins with."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("#").strip())
    return lines
