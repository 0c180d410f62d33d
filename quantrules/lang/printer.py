"""AST → canonical text. `parse(print_file(file)) == file`, comments included, and canonical text prints as itself.

One space stands between words, a rule longer than `WIDTH` breaks before its arrows, and a name that needs quotes is
quoted as a whole. Blank lines are kept, one at a time.
"""

from __future__ import annotations

import json
import re
from functools import singledispatch

from quantrules.lang import ast
from quantrules.lang.build import RESERVED
from quantrules.lang.evaluate import walk

WIDTH = 120
INDENT = "    "

_PLAIN = re.compile(r'(?:[^\s{}*,:=@#|()\[\]"\\→-]|-(?!>))+')
_WORD = re.compile(r"[^\W\d]\w*")
_LEVELS = {"or": 1, "and": 2, "not": 3, **dict.fromkeys(("==", "!=", "<", "<=", ">", ">=", "in", "not in"), 4),
           "+": 5, "-": 5, "*": 6, "/": 6, "%": 6}  # fmt: skip
_SUM, _UNARY, _POSTFIX = 5, 7, 8


def print_file(file: ast.File) -> str:
    """The canonical text of a file.

    >>> from quantrules.lang import parse
    >>> print_file(parse("a.{x,y}->dequant|cat->  b   # why"))
    'a.{x,y} → dequant | cat → b  # why\\n'
    """
    lines: list[str] = []
    _block(file.statements, "", lines, "")
    *first, last = file.comments or ("",)
    lines += [_comment(c) for c in first]
    if file.comments:
        lines.append("#" + last if last.startswith("# ") else _comment(last))  # a title that nothing follows
    return "".join(line + "\n" for line in lines)


def _comment(text: str) -> str:
    return ("#" if text.startswith("##") else "# ") + text if text else "#"


def _block(statements: tuple[ast.Statement, ...], indent: str, lines: list[str], section: str) -> str:
    """Append the lines of statements; the section that they end in."""
    for node in statements:
        if lines and (node.blank or node.section != section):
            lines.append("")
        if node.section != section:
            section = node.section
            lines.append(f"{indent}## {section}")
        _commented(node, statement(node, indent), indent, lines)
        if isinstance(node, ast.Under):
            section = _block(node.body, indent + INDENT, lines, section)
        elif isinstance(node, ast.FormatDef):
            _format(node, indent + INDENT, lines)
        elif isinstance(node, ast.DialectDef):
            _dialect(node, indent + INDENT, lines)
    return section


def _commented(node: ast.Commented, text: str, indent: str, lines: list[str]) -> None:
    lines += [indent + _comment(c) for c in node.comments]
    lines.append(indent + text + (f"  {_comment(node.comment)}" if node.comment else ""))


# --------------------------------------------------------------------------------------------------------- statements


@singledispatch
def statement(node: ast.Statement, indent: str = "") -> str:
    """A statement without its comments and its block; lines after the first carry their indent."""
    raise TypeError(f"{type(node).__name__} is no statement")


@statement.register
def _(node: ast.Rule, indent: str = "") -> str:
    first, *others = [pattern(s.pattern) + (f" : {type_(s.type)}" if s.type else "") for s in node.sources]
    sources = ", ".join([_start(first), *others])
    ops = "→ " + pipeline(node.pipeline)
    tail = ["→ " + ", ".join(map(pattern, node.targets))] if node.targets else []
    tail += [f": {type_(node.type)}"] if node.type else []
    tail += _when(node.when)
    tail += ["except " + ", ".join(map(pattern, node.excepts))] if node.excepts else []
    tail += ["expect " + " | ".join(map(expression, node.expect))] if node.expect else []
    tail += ["also"] if node.also else []
    rest = " ".join(tail)
    deeper = "\n" + indent + INDENT
    if len(indent) + len(sources) + len(ops) + len(rest) + 2 <= WIDTH:
        return " ".join(filter(None, (sources, ops, rest)))
    if len(deeper) + len(ops) + len(rest) <= WIDTH:
        return sources + deeper + " ".join(filter(None, (ops, rest)))
    return sources + deeper + _filled(ops, deeper) + (deeper + rest if rest else "")


@statement.register
def _(node: ast.SchemaKey, indent: str = "") -> str:
    return " ".join([f"{_start(pattern(node.pattern))} : {type_(node.type)}", *_when(node.when)])


@statement.register
def _(node: ast.Under, indent: str = "") -> str:
    return f"under {pattern(node.prefix)}" + (f" → {pattern(node.target)}" if node.target else "")


@statement.register
def _(node: ast.Def, indent: str = "") -> str:
    params = f"({', '.join(node.params)})" if node.params else ""
    return " ".join([f"def {node.name}{params} = {pipeline(node.pipeline)}", *_when(node.when)])


@statement.register
def _(node: ast.Let, indent: str = "") -> str:
    value = node.value
    return f"let {node.name} = {_piece(value) if isinstance(value, ast.Alternation | ast.Members) else expression(value)}"


@statement.register
def _(node: ast.Param, indent: str = "") -> str:
    return f"param {node.name} = {' | '.join(map(expression, node.choices))}"


@statement.register
def _(node: ast.Fuse, indent: str = "") -> str:
    return f"fuse {_text(node.name)} = {', '.join(map(_member, node.members))}"


@statement.register
def _(node: ast.Rename, indent: str = "") -> str:
    return " ".join([f"rename {pattern(node.left)} → {pattern(node.right)}", *_when(node.when)])


@statement.register
def _(node: ast.Tie, indent: str = "") -> str:
    return f"tie {' = '.join(map(pattern, node.names))}"


@statement.register
def _(node: ast.ConfigEdit, indent: str = "") -> str:
    if node.op == "delete":
        return f"delete {_config(node.path)}"
    head = f"{_config(node.path)} {node.op} "
    return head + _tall(node.value, indent, len(head))


@statement.register
def _(node: ast.Include, indent: str = "") -> str:
    return f"include {json.dumps(node.path, ensure_ascii=False)}"


@statement.register
def _(node: ast.Side, indent: str = "") -> str:
    return f"{node.side} {_text(node.name)}"


@statement.register
def _(node: ast.FormatDef, indent: str = "") -> str:
    return f"format {node.name}"


@statement.register
def _(node: ast.DialectDef, indent: str = "") -> str:
    return f"dialect {node.name}"


def _filled(ops: str, indent: str) -> str:
    """A pipeline over several lines, broken before a `|`; one within parentheses or quotes is only a longer line."""
    lines = [""]
    for i, call in enumerate(re.split(r" (?=\| )", ops)):
        if i and len(indent) + len(lines[-1]) + len(call) > WIDTH and _balanced(lines[-1]):
            lines.append(INDENT + call)
        else:
            lines[-1] += " " * bool(i) + call
    return indent.join(lines)


def _balanced(text: str) -> bool:
    plain = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    return '"' not in plain and all(plain.count(a) == plain.count(b) for a, b in ("()", "[]"))


def _when(condition: ast.Expression | None) -> list[str]:
    return [f"when {expression(condition)}"] if condition else []


def _start(text: str) -> str:
    """A pattern at the start of a statement; `config.` would begin an edit there."""
    return '"config"' + text[6:] if text.startswith("config.") else text


def _format(node: ast.FormatDef, indent: str, lines: list[str]) -> None:
    if node.element:
        codec, count, container, order = node.element
        packed = "" if (count, container, order) == (1, codec, "low") else f", {count} in {container}, {order} first, along -1"
        lines.append(f"{indent}element {codec}{packed}")
    if node.block:
        lines.append(f"{indent}block [{', '.join(map(str, node.block))}]")
    if node.value is not None:
        lines.append(f"{indent}value {expression(node.value)}")
    for spelling in node.spellings:
        _commented(spelling, f"spelling {spelling.name}", indent, lines)
        rows = [(p.role, _text(p.suffix), "|".join(p.dtypes or ("any",)) + _dims(p.grid, None)) for p in spelling.parts]
        widths = [max(map(len, column)) for column in zip(*rows)]
        for part, row in zip(spelling.parts, rows):
            words = [f"{word} {_text(value)}" if word in ("cat", "stack", "dense") else word for word, value in part.words]
            columns = [cell.ljust(width) for cell, width in zip(row, widths)]
            _commented(part, "  ".join([*columns, *words]).rstrip(), indent + INDENT, lines)
        if spelling.declared is not None:
            lines.append(f"{indent + INDENT}declared {expression(spelling.declared)}")


def _dialect(node: ast.DialectDef, indent: str, lines: list[str]) -> None:
    fields = [("reads", node.reads)] if node.reads else []
    fields += [(f"for {name} {spelling}".rstrip(), value) for name, spelling, value in node.entries]
    fields += [(f"file {json.dumps(file, ensure_ascii=False)} {name}", value) for file, name, value in node.files]
    lines += [f"{indent}{head} {_tall(value, indent, len(head))}" for head, value in fields]


# ------------------------------------------------------------------------------------------------ pipelines and types


def pipeline(node: ast.Pipeline) -> str:
    return " | ".join(map(_call, node.steps))


def _call(node: ast.Call) -> str:
    args = ", ".join(map(_argument, (a for a in node.args if not isinstance(a.value, ast.Pipeline))))
    args += "".join(f": {pipeline(a.value)}" for a in node.args if isinstance(a.value, ast.Pipeline))
    return f"{node.name}({args})" if args else node.name


def _argument(node: ast.Argument) -> str:
    if not node.name:
        return expression(node.value)
    plain = _WORD.fullmatch(node.name) and node.name not in RESERVED
    return f"{node.name if plain else json.dumps(node.name, ensure_ascii=False)}={expression(node.value)}"


def type_(node: ast.TypeExpr) -> str:
    return node.name if node.dims is None else node.name + _dims(node.dims, node.spans)


def _dims(dims: tuple[ast.Expression | ast.Rest, ...], spans: ast.Expression | None) -> str:
    """Products of short names are written without spaces, as `2*N` and `K/16` are read."""
    tight = [not any(isinstance(n, ast.Config) for n in walk(d)) for d in dims]
    texts = ["..." if isinstance(d, ast.Rest) else expression(d, tight=t) for d, t in zip(dims, tight)]
    return f"[{', '.join(texts)}{'' if spans is None else '; ' + expression(spans)}]"


# --------------------------------------------------------------------------------------------------------- expressions


def expression(node: ast.Expression, level: int = 0, tight: bool = False) -> str:
    """`level`: how tightly the place binds; what binds less is put in parentheses. `tight`: no spaces in sums."""
    text, own = _expression(node, tight)
    return text if own >= level else f"({text})"


def _expression(node: ast.Expression, tight: bool) -> tuple[str, int]:
    match node:
        case ast.Literal(value=value):
            negative = type(value) in (int, float) and value < 0
            return json.dumps(value, ensure_ascii=False), _UNARY if negative else _POSTFIX
        case ast.Name(name=name):
            return name, _POSTFIX
        case ast.Config(path=path):
            return _config(path), _POSTFIX
        case ast.Unary(op="not"):
            return "not " + expression(node.operand, _LEVELS["not"], tight), _LEVELS["not"]
        case ast.Unary():
            return "-" + expression(node.operand, _UNARY, tight), _UNARY
        case ast.Binary(op=op):
            level = _LEVELS[op]
            left = expression(node.left, level + (level == _LEVELS["=="]), tight)
            right = expression(node.right, level + 1, tight)
            return f"{left}{op}{right}" if tight and level >= _SUM else f"{left} {op} {right}", level
        case ast.Index():
            return f"{expression(node.value, _POSTFIX, tight)}[{expression(node.index, 0, tight)}]", _POSTFIX
        case ast.Apply(function=function, args=args):
            return f"{function}({', '.join(expression(a, 0, tight) for a in args)})", _POSTFIX
        case ast.ListOf(items=items):
            return f"[{', '.join(expression(i, 0, tight) for i in items)}]", _POSTFIX
        case ast.DictOf(items=items):
            return "{" + ", ".join(f"{json.dumps(k, ensure_ascii=False)}: {expression(v)}" for k, v in items) + "}", _POSTFIX
    raise TypeError(f"{type(node).__name__} is no expression")


def _tall(node: ast.Expression, indent: str, used: int = 0) -> str:
    """A list or object, with one item a line where it is too long for the rest of a line of which `used` are taken."""
    text = expression(node)
    if not isinstance(node, ast.ListOf | ast.DictOf) or not node.items or len(indent) + used + len(text) <= WIDTH:
        return text
    deeper = indent + INDENT
    if isinstance(node, ast.ListOf):
        items, (opening, closing) = [_tall(i, deeper) for i in node.items], "[]"
    else:
        items, (opening, closing) = [f"{json.dumps(k, ensure_ascii=False)}: {_tall(v, deeper)}" for k, v in node.items], "{}"
    return opening + "".join(f"\n{deeper}{item}," for item in items)[:-1] + f"\n{indent}{closing}"


def _config(path: tuple[str, ...]) -> str:
    return ".".join(["config", *(key if re.fullmatch(r"\w+", key) else json.dumps(key, ensure_ascii=False) for key in path)])


# ------------------------------------------------------------------------------------------------------------ patterns


def pattern(node: ast.Pattern) -> str:
    text = (f"{node.source}:" if node.source else "") + "".join(map(_piece, node.nodes))
    return text + (f" @ {pattern(node.file)}" if node.file else "")


def _text(text: str) -> str:
    return text if _PLAIN.fullmatch(text) else json.dumps(text, ensure_ascii=False)


def _item(text: str) -> str:
    """A name in braces, or in a fuse, where `?` and `..` say something."""
    return json.dumps(text, ensure_ascii=False) if "?" in text or ".." in text else _text(text)


def _member(node: ast.Member) -> str:
    return _item(node.text) + "?" * node.optional + (f"={node.fill}" if node.fill else "")


def _piece(node: ast.PatternNode) -> str:
    match node:
        case ast.Lit(text=text):
            return _text(text)
        case ast.Star(name=name):
            return f"{{**{name}}}" if name else "*"
        case ast.Capture(name=name, low=low, high=high) if node.is_range:
            return f"{{{name}:{_bound(low)}..{_bound(high)}}}"
        case ast.Capture(name=name):
            return f"{{{name}}}"
        case ast.IntForm(value=value):
            return f"{{{_bound(value)}}}"
        case ast.Reference(name=name, let=let):
            return f"{{{name}:{let}}}"
        case ast.Alternation(name=name, items=items):
            written = [_item(a.left) + (f"={_item(a.right)}" if a.right != a.left or len(items) == 1 else "") for a in items]
            return f"{{{name + ':' if name else ''}{'|'.join(written)}}}"
        case ast.Members(name=name, items=items):
            return f"{{{name + ':' if name else ''}{','.join(map(_member, items))}}}"
    raise TypeError(f"{type(node).__name__} is no part of a pattern")


def _bound(node: ast.Expression | None) -> str:
    return "" if node is None else expression(node, _SUM, tight=True)
