"""From lark's tree to the AST, bottom-up: the methods of `Builder` bear the names of the grammar's rules.

What a grammar cannot say well is settled here: the pieces of a pattern, what a pair of braces is, words that are reserved,
texts and numbers. Each refusal is reported, and building goes on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from attrs import evolve, frozen

from quantrules.diagnostics import Diagnostic, Span, Text
from quantrules.lang import ast, mistakes
from quantrules.lang.layout import QR_LIMIT
from quantrules.lang.tables import lark_parser

MAX_DEPTH = 100  # of a statement's tree: evaluation and printing recurse over it
MAX_INTEGER = 2**63 - 1  # what safetensors and JSON readers agree on
FUNCTIONS = ("len", "count", "min", "max", "ceil", "default", "exists", "derive")
CONSTANTS = {"true": True, "false": False, "null": None}
RESERVED = {"and", "or", "not", "in", "when", "except", "expect", "also", "config", *CONSTANTS}

_QUOTED = r'"(?:[^"\\]|\\.)*"|\\.'
_PIECE = re.compile(rf'({_QUOTED})|(\*+)|\{{((?:{_QUOTED}|\{{[^{{}}]*\}}|[^}}"\\])*)\}}|[^{{"\\*]+', re.S)
_WORD = re.compile(r"[^\W\d]\w*")
_SOURCE = re.compile(r"([^\W\d]\w*):(?=.)", re.S)
_MARK = re.compile(rf"{_QUOTED}|\.\.|\?=|[,?|=+\-*/%{{()\[\]]", re.S)


def parse_piece(text: Text, start: str, content: str, base: int, report: Callable[[Diagnostic], None]):
    """One statement, or the inside of braces: what its builder made, or None after a report."""
    from lark.exceptions import UnexpectedInput

    try:
        tree = lark_parser().parse(content, start=start)
    except UnexpectedInput as error:
        report(mistakes.explain(error, start, content, base, text))
        return None
    return Builder(text, base, report).build(tree)


@frozen
class Made:
    """What has no node of its own: a clause, a field, the dimensions of a type."""

    kind: str
    value: object
    span: Span


def _nodes(children: list) -> list:
    return [c for c in children if not isinstance(c, str)]  # tokens are strings


@frozen
class Builder:
    text: Text
    base: int  # where the parsed piece begins in the text
    report: Callable[[Diagnostic], None]

    def build(self, tree):
        """Children before parents, without recursion; a tree that later recursion could not take is refused."""
        order, made = [(tree, 1)], {}
        for node, depth in order:
            order += [(c, depth + 1) for c in node.children if not isinstance(c, str)]
        if order[-1][1] > MAX_DEPTH:
            leaf = next(c for node, _ in reversed(order) for c in node.children)
            self.error(QR_LIMIT, f"this statement is nested more than {MAX_DEPTH} deep, or has a sum of that length",
                       self.span([leaf]), "", "name parts of it with `let`")
            return None
        for node, _ in reversed(order):
            made[id(node)] = getattr(self, node.data)([c if isinstance(c, str) else made[id(c)] for c in node.children])
        return made[id(tree)]

    def error(self, code: str, message: str, span: Span, label: str = "", help: str = "") -> None:
        self.report(Diagnostic(code, message, span, label, help=help))

    def span(self, children: list) -> Span:
        """From the first child to the last; tokens count from the start of the piece, nodes from that of the text."""
        first, last = children[0], children[-1]
        return Span(self.text, self.base + first.start_pos if isinstance(first, str) else first.span.start,
                    self.base + last.end_pos if isinstance(last, str) else last.span.end)

    def word(self, token, what: str = "a name") -> str:
        """A name of the user's choice, which may not be a word of the language."""
        if token in RESERVED:
            message = f"`{token}` is a word of the language and cannot be {what}"
            help = f"choose another, for example `{token}_`"
            self.error(mistakes.QR_RESERVED, message, self.span([token]), f"expected {what}", help)
        return str(token)

    def string_of(self, quoted: str, start: int | None = None) -> str:
        """Quotes are read as JSON reads them. `start` is given where `quoted` is not a token of its own."""
        try:
            value = json.loads(quoted, strict=False)
            value.encode()  # half of a surrogate pair is no character
            return value
        except ValueError as error:
            at = min(error.pos, len(quoted) - 1) if isinstance(error, json.JSONDecodeError) else 0
            here = self.base + (quoted.start_pos if start is None else start) + at
            span = Span(self.text, here, here + 1)
            self.error(mistakes.QR_ESCAPE, "this text is not written as in JSON", span, "no escape of JSON",
                       r"write `\\` for a backslash, `\"` for a quote")
            return ""

    # ----------------------------------------------------------------------------------------------------- statements

    def clauses(self, parts: list) -> dict[str, object]:
        made: dict[str, Made] = {}
        for part in parts:
            if isinstance(part, Made):
                if part.kind in made:
                    self.error(mistakes.QR_UNKNOWN, f"`{part.kind.removesuffix('s')}` stands twice in this statement",
                               part.span, help="keep one" + (", joined by `and`" if part.kind == "when" else ""))
                made[part.kind] = part
        return {kind: part.value for kind, part in made.items()}

    def rule(self, c):
        nodes = _nodes(c)
        sources = tuple(n for n in nodes if isinstance(n, ast.SourcePattern))
        pipeline = next(n for n in nodes if isinstance(n, ast.Pipeline))
        clauses = self.clauses(nodes)
        return ast.Rule(sources, pipeline, **clauses, span=self.span(c))

    def key(self, c):
        return ast.SchemaKey(c[0], **self.clauses(c[1:]), span=self.span(c))

    def source(self, c):
        pattern, kind = c[0], None
        if len(c) > 1 and c[1] == "@":
            pattern = evolve(pattern, file=c[2], span=pattern.span.to(c[2].span))
        if isinstance(c[-1], Made):
            kind = c[-1].value
        return ast.SourcePattern(pattern, kind, span=self.span(c))

    def to(self, c):
        return Made("targets", tuple(self.unsourced(p) for p in c[1::2]), self.span(c))

    def unsourced(self, pattern: ast.Pattern) -> ast.Pattern:
        """`x:bf16` after an arrow reads as bf16 of the source x; it was meant as a type."""
        if pattern.source:
            self.error(mistakes.QR_NAME, "a target has no source", pattern.span, "",
                       f"for a type write `{pattern.source} : …`, with spaces; for a `:` in a name write quotes")
        return pattern

    def typed(self, c):
        return Made("type", c[1], self.span(c))

    def when(self, c):
        return Made("when", c[1], self.span(c))

    def exclusion(self, c):
        return Made("excepts", tuple(c[1::2]), self.span(c))

    def expect(self, c):
        return Made("expect", tuple(c[1::2]), self.span(c))

    def also(self, c):
        return Made("also", True, self.span(c))

    def under(self, c):
        return ast.Under(c[1], self.unsourced(c[3]) if len(c) > 3 else None, (), span=self.span(c))

    def definition(self, c):
        nodes = _nodes(c)
        name, *params = [n for n in nodes if isinstance(n, Made) and n.kind == "name"]
        for i, param in enumerate(params):
            if any(param.value == other.value for other in params[:i]):
                message = f"the parameter `{param.value}` stands twice"
                self.error(mistakes.QR_NAME, message, param.span, help="give each parameter a name of its own")
                break
        pipeline = next(n for n in nodes if isinstance(n, ast.Pipeline))
        when = nodes[-1].value if isinstance(nodes[-1], Made) else None
        return ast.Def(name.value, tuple(p.value for p in params), pipeline, when, span=self.span(c))

    def let(self, c):
        value = c[3]
        if isinstance(value, str):
            value = self.brace(value, value[1:-1], value.start_pos + 1)
            if not isinstance(value, ast.Alternation | ast.Members) or value.name:
                self.error(mistakes.QR_BRACES, "a `let` holds an expression, an alternation or a member list",
                           self.span([c[3]]), "", "write `{a|b=c}` or `{a,b}`; the capture's name stands where it is used")
                value = ast.Literal(0)
        return ast.Let(c[1].value, value, span=self.span(c))

    def param(self, c):
        return ast.Param(c[1].value, tuple(c[3::2]), span=self.span(c))

    def fuse(self, c):
        return ast.Fuse(self.plain(c[1]), tuple(c[3::2]), span=self.span(c))

    def member(self, c):
        token, fill = c[0], str(c[2]) if len(c) > 1 else ""
        optional = token.endswith("?") and not token.endswith("\\?")
        pattern = self.pattern([token.update(value=token[:-1])] if optional and len(token) > 1 else [token])
        if len(c) > 1 and (not optional or fill != "zeros"):
            self.error(mistakes.QR_BRACES, "a member that may be absent is filled by `?=zeros`", self.span(c), "",
                       f"write `{pattern.span.source}?=zeros`")
        return ast.Member(self.plain(pattern), optional, fill, span=self.span(c))

    def rename(self, c):
        when = c[4].value if len(c) > 4 else None
        return ast.Rename(self.unsourced(c[1]), self.unsourced(c[3]), when, span=self.span(c))

    def tie(self, c):
        return ast.Tie(tuple(c[1::2]), span=self.span(c))

    def include(self, c):
        return ast.Include(self.string_of(c[1]), span=self.span(c))

    def side(self, c):
        return ast.Side(str(c[0]), self.plain(c[1]), span=self.span(c))

    def edit(self, c):
        if c[0] == "delete":
            return ast.ConfigEdit(self.path(c[1]), "delete", span=self.span(c))
        return ast.ConfigEdit(self.path(c[0]), str(c[1]), c[2], span=self.span(c))

    # -------------------------------------------------------------------------------------------- formats and dialects

    def format(self, c):
        return ast.FormatDef(c[1].value, None, (), None, (), span=self.span(c))

    def element(self, c):
        value = (str(c[1]), 1, str(c[1]), "low")
        if len(c) > 2:
            value = (str(c[1]), self.integer(c[3]), str(c[5]), str(c[7]))
        return Made("element", value, self.span(c))

    def block(self, c):
        return Made("block", tuple(self.integer(n) for n in c[2::2]), self.span(c))

    def value(self, c):
        return Made("value", c[1], self.span(c))

    declared = value

    def spelling(self, c):
        return ast.SpellingBlock(c[1].value, (), span=self.span(c))

    def part(self, c):
        dims = next(i for i, n in enumerate(c) if isinstance(n, Made) and n.kind == "dims")
        dtypes = tuple(map(str, c[2:dims:2]))
        grid, spans = c[dims].value
        if spans is not None:
            self.error(mistakes.QR_SYNTAX, "the grid of a part has no `;`", spans.span, help="write the dimensions only")
        words = tuple(n.value for n in c[dims + 1 :])
        return ast.PartField(str(c[0]), self.plain(self.pattern([c[1]])), () if dtypes == ("any",) else dtypes, grid, words,
                             span=self.span(c))

    def role_word(self, c):
        return Made("word", (str(c[0]), self.plain(self.pattern([c[1]])) if len(c) > 1 else ""), self.span(c))

    def dialect(self, c):
        return ast.DialectDef(c[1].value, (), span=self.span(c))

    def entry(self, c):
        return Made("for", (str(c[1]), str(c[2]) if len(c) > 3 else "", c[-1]), self.span(c))

    def reads(self, c):
        return Made("reads", c[1], self.span(c))

    def further(self, c):
        return Made("file", (self.string_of(c[1]), str(c[2]), c[3]), self.span(c))

    # --------------------------------------------------------------------------------------------- pipelines and types

    def pipeline(self, c):
        return ast.Pipeline(tuple(c[::2]), span=self.span(c))

    def call(self, c):
        args = [n for n in c[1:] if isinstance(n, ast.Argument)]
        args += [ast.Argument("ops", n, span=n.span) for n in c[1:] if isinstance(n, ast.Pipeline)]
        return ast.Call(self.word(c[0], "an op"), tuple(args), span=self.span(c))

    def argument(self, c):
        return ast.Argument("", c[0], span=self.span(c))

    def named(self, c):
        name = self.string_of(c[0]) if c[0].startswith('"') else self.word(c[0])
        return ast.Argument(name, c[2], span=self.span(c))

    def type(self, c):
        dims, spans = c[1].value if len(c) > 1 else (None, None)
        return ast.TypeExpr(str(c[0]), dims, spans, span=self.span(c))

    def dims(self, c):
        semicolon = c.index(";") if ";" in c else len(c) - 1
        return Made("dims",
                    (tuple(self.rest(n) for n in c[1:semicolon:2]), c[semicolon + 1] if semicolon < len(c) - 1 else None),
                    self.span(c))

    def rest(self, node):
        return ast.Rest(span=self.span([node])) if isinstance(node, str) else node

    # ---------------------------------------------------------------------------------------------------- expressions

    def binary(self, c):
        return ast.Binary(str(c[1]), c[0], c[2], span=self.span(c))

    def not_in(self, c):
        return ast.Binary("not in", c[0], c[3], span=self.span(c))

    def unary(self, c):
        op, operand = str(c[0]), c[1]
        if op == "-" and isinstance(operand, ast.Literal) and type(operand.value) in (int, float):
            return ast.Literal(-operand.value, span=self.span(c))
        return ast.Unary(op, operand, span=self.span(c))

    def index(self, c):
        return ast.Index(c[0], c[2], span=self.span(c))

    def word_or_constant(self, c):
        token = c[0]
        if token in CONSTANTS:
            return ast.Literal(CONSTANTS[token], span=self.span(c))
        if token == "config":
            return ast.Config((), span=self.span(c))
        if token in ("True", "False", "None"):
            self.error(mistakes.QR_RESERVED, f"`{token}` is Python's spelling", self.span(c), "",
                       f"write `{({'None': 'null'}).get(token, token.lower())}`")
        return ast.Name(self.word(token), span=self.span(c))

    def integer(self, token) -> int:
        value = self.number([token]).value
        if type(value) is not int:
            self.error(mistakes.QR_NUMBER, "this number is not whole", self.span([token]), "expected an integer",
                       "write it without `.` and `e`")
        return int(value)

    def number(self, c):
        whole = c[0].isdigit()
        value = (int(c[0]) if len(c[0]) < 25 else MAX_INTEGER + 1) if whole else float(c[0])
        if (whole and value > MAX_INTEGER) or value == float("inf"):
            self.error(mistakes.QR_NUMBER, "this number is too large", self.span(c),
                       f"the largest is {MAX_INTEGER}" if whole else "beyond a 64-bit float", "write a smaller number")
            value = 0
        return ast.Literal(value, span=self.span(c))

    def string(self, c):
        return ast.Literal(self.string_of(c[0]), span=self.span(c))

    def path(self, token) -> tuple[str, ...]:
        pieces = re.findall(r'\.("(?:[^"\\]|\\.)*"|\w+)', token)
        return tuple(json.loads(p, strict=False) if p.startswith('"') else p for p in pieces)

    def config(self, c):
        return ast.Config(self.path(c[0]), span=self.span(c))

    def apply(self, c):
        if c[0] not in FUNCTIONS:
            self.error(mistakes.QR_UNKNOWN, f"there is no function `{c[0]}`", self.span(c[:1]),
                       "expected " + mistakes.either(FUNCTIONS), mistakes.nearest(c[0], FUNCTIONS))
        return ast.Apply(str(c[0]), tuple(c[2:-1:2]), span=self.span(c))

    def parentheses(self, c):
        return evolve(c[1], span=self.span(c))

    def list_of(self, c):
        return ast.ListOf(tuple(c[1:-1:2]), span=self.span(c))

    def dict_of(self, c):
        pairs, seen = tuple(p.value for p in c[1:-1:2]), set()
        for (key, _), pair in zip(pairs, c[1:-1:2]):
            if key in seen:
                self.error(mistakes.QR_UNKNOWN, f"the key {key!r} stands twice in this object", pair.span, help="keep one")
            seen.add(key)
        return ast.DictOf(pairs, span=self.span(c))

    def pair(self, c):
        return Made("pair", (self.string_of(c[0]), c[2]), self.span(c))

    # -------------------------------------------------------------------------------------------------------- patterns

    def name(self, c):
        return Made("name", self.word(c[0]), self.span(c))

    def pattern(self, c):
        """Pieces of a pattern token: text (quotes and backslashes resolved), stars, braces."""
        token, source, at, nodes = c[0], "", 0, []
        if prefix := _SOURCE.match(token):
            source, at = prefix[1], prefix.end()
        for piece in _PIECE.finditer(token, at):
            span = self.within(token, *piece.span())
            quoted, stars, braces = piece.groups()
            if stars:
                if len(stars) > 1:
                    self.error(mistakes.QR_STARS, f"`{stars}` is not a pattern: `*` crosses dots already", span,
                               "expected `*`", "write `*`; two with names are `{**a}.{**b}`")
                nodes.append(ast.Star(span=span))
            elif braces is not None:
                node = self.brace(token, braces, token.start_pos + piece.start(3))
                nodes.append(evolve(node, span=span) if node else ast.Star(span=span))
            else:
                text = self.plain_piece(piece[0], token.start_pos + piece.start()) if quoted else piece[0]
                if nodes and isinstance(nodes[-1], ast.Lit):
                    nodes[-1] = ast.Lit(nodes[-1].text + text, span=nodes[-1].span.to(span))
                else:
                    nodes.append(ast.Lit(text, span=span))
        return ast.Pattern(tuple(nodes), source, span=self.span(c))

    def within(self, token, start: int, end: int) -> Span:
        at = self.base + token.start_pos
        return Span(self.text, at + start, at + end)

    def plain_piece(self, piece: str, at: int) -> str:
        """What a quoted or escaped piece stands for."""
        if piece.startswith("\\"):
            return piece[1:]
        return self.string_of(piece, at)

    def item(self, token) -> str:
        pieces = re.finditer(rf'{_QUOTED}|[^"\\]+', token)
        return "".join(self.plain_piece(p[0], token.start_pos + p.start()) if p[0][0] in '"\\' else p[0] for p in pieces)

    def plain(self, pattern: ast.Pattern) -> str:
        """A pattern that must be a name."""
        if pattern.source or pattern.file or any(not isinstance(n, ast.Lit) for n in pattern.nodes):
            self.error(mistakes.QR_NAME, "a name stands here, not a pattern", pattern.span, "expected a name",
                       "write it out, or in quotes")
        return "".join(n.text for n in pattern.nodes if isinstance(n, ast.Lit))

    def brace(self, token, inside: str, start: int):
        """The inside of braces: which marks stand in it, outside quotes and parentheses, says what it is."""
        if _WORD.fullmatch(inside) and inside not in RESERVED:  # most captures; the general way takes ten times as long
            return ast.Capture(inside)
        depth, kinds, operators = 0, {}, False
        for mark in _MARK.finditer(inside):
            what = mark[0]
            if what == "{":
                here = self.base + start + mark.start()
                self.error(mistakes.QR_BRACES, "braces do not nest", Span(self.text, here, here + 1), "",
                           "name the inner part by a `let`, or write `\\{` for the character")
                return None
            depth += (what in "([") - (what in ")]")
            operators |= what in "+-*/%(["
            if depth == 0 and what in mistakes.BRACE_KINDS:
                kinds.setdefault(mistakes.BRACE_KINDS[what], mark)
        if len(kinds) > 1:
            (one, first), (other, second) = list(kinds.items())[:2]
            here = self.base + start + second.start()
            self.error(mistakes.QR_BRACES, f"`{first[0]}` makes these braces {one}, and `{second[0]}` {other}",
                       Span(self.text, here, here + len(second[0])), "a mixture", "use one kind, and quotes for a character: "
                       "`{a,b?}` lists members, `{x:a|b=c}` alternatives, `{L:0..9}` is a range")
            return None
        if inside.lstrip().startswith("**"):
            kind = "star"
        elif kinds:
            kind = mistakes.BRACE_STARTS[next(iter(kinds))]
        else:
            kind = "form" if operators or inside.lstrip().startswith("config.") else "capture"
        return parse_piece(self.text, kind, inside, self.base + start, self.report)

    def label(self, c) -> str:
        labelled = isinstance(c[0], str) and c[0].type == "LABEL"
        return self.word(c[0].update(value=c[0][:-1].rstrip())) if labelled else ""

    def capture(self, c):
        return ast.Capture(c[0].value, span=self.span(c))

    def reference(self, c):
        return ast.Reference(self.label(c), c[1].value, span=self.span(c))

    def star(self, c):
        return ast.Star(c[1].value, span=self.span(c))

    def range(self, c):
        dots = c.index("..")
        low, high = (c[1] if dots > 1 else None), (c[-1] if dots < len(c) - 1 else None)
        if low is None and high is None:
            self.error(mistakes.QR_BRACES, "this range has no bound", self.span(c), "expected `lo..`, `..hi` or `lo..hi`",
                       f"write `{{{self.label(c)}}}` for any")
        return ast.Capture(self.label(c), low, high, span=self.span(c))

    def form(self, c):
        return ast.IntForm(c[0], span=self.span(c))

    def alternation(self, c):
        return ast.Alternation(self.label(c), tuple(n for n in c if isinstance(n, ast.Alternative)), span=self.span(c))

    def alternative(self, c):
        left = self.item(c[0])
        return ast.Alternative(left, self.item(c[2]) if len(c) > 1 else left, span=self.span(c))

    def members(self, c):
        items, seen = tuple(n for n in c if isinstance(n, ast.Member)), set()
        for item in items:
            if item.text in seen:
                self.error(mistakes.QR_BRACES, f"member `{item.text}` stands twice", item.span, help="remove one")
            seen.add(item.text)
        return ast.Members(self.label(c), items, span=self.span(c))

    def one(self, c):
        fill = str(c[3]) if len(c) > 3 else ""
        if fill not in ("", "zeros"):
            self.error(mistakes.QR_BRACES, f"an absent member is filled by `zeros`, not by `{fill}`", self.span(c[3:]),
                       "expected `zeros`", "write `?=zeros`")
        return ast.Member(self.item(c[0]), len(c) > 1, fill, span=self.span(c))
