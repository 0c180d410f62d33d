"""Text → AST. `parse` reports every mistake of a text at once.

layout.py cuts the text into statements, grammar.lark says what each looks like, build.py makes its node; here they meet.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import evolve, frozen

from quantrules.diagnostics import Diagnostic, RuleError, Span, Text
from quantrules.lang import ast, mistakes
from quantrules.lang.build import parse_piece
from quantrules.lang.layout import KEYWORDS, QR_LIMIT, Chunk, Layout

MAX_CHARACTERS = 1 << 18  # of a file; the largest known has a twentieth
MAX_ERRORS = 100
_START_OF = {"source": "side", "target": "side", "delete": "edit", "def": "definition"}


def parse(text: str, name: str = "<text>") -> ast.File:
    """The syntax tree of a rule file; RuleError with all its mistakes where there are some.

    >>> parse("a.* → keep").statements[0].pipeline.steps[0].name
    'keep'
    """
    source = Text(name, text.removeprefix("\ufeff"))
    found: list[Diagnostic] = []
    if len(source.content) > MAX_CHARACTERS:
        message = f"{name} has more than {MAX_CHARACTERS} characters"
        raise RuleError(Diagnostic(QR_LIMIT, message, help="split it and `include` the parts"))

    def report(finding: Diagnostic) -> None:
        if len(found) == MAX_ERRORS:
            raise _Enough
        found.append(finding)

    try:
        layout = Layout(source, report)
        statements = _Reader(source, layout, report).statements(layout.chunks)
    except _Enough:
        end = len(source.content)
        message = f"{name} has more mistakes than these {MAX_ERRORS}"
        found.append(Diagnostic(QR_LIMIT, message, Span(source, end, end), help="mend these, then look again"))
    if found:
        raise RuleError(sorted(found, key=lambda d: d.span.start))
    return ast.File(statements, tuple(layout.comments), span=Span(source, 0, len(source.content)))


class _Enough(Exception):
    """So many mistakes that looking for more would take time and help nobody."""


@frozen
class _Reader:
    """From chunks to statements."""

    text: Text
    layout: Layout
    report: Callable[[Diagnostic], None]

    def statements(self, chunks: list[Chunk]) -> tuple[ast.Statement, ...]:
        made = []
        for chunk in chunks:
            node = self.statement(chunk)
            if node is not None:
                comments = (*chunk.comments, *node.comments)
                made.append(evolve(node, comments=comments, comment=chunk.comment, section=chunk.section, blank=chunk.blank))
        return tuple(made)

    def statement(self, chunk: Chunk) -> ast.Statement | None:
        keyword = self.layout.keyword(chunk)
        if keyword in KEYWORDS:
            start = _START_OF.get(keyword, keyword)
        else:
            start = "edit" if self.layout.masked.startswith("config.", chunk.start) else "rule"
        node = self.one(chunk, start)
        if start == "under":
            body = self.statements(chunk.body)
            if node and not body and not chunk.body:
                self.error(mistakes.QR_SYNTAX, "this `under` holds no statements", node.span,
                           help="indent the statements that belong to it")
            return node and evolve(node, body=body)
        if start == "format":
            return self.format(node, chunk.body)
        if start == "dialect":
            return self.dialect(node, chunk.body)
        return node

    def one(self, chunk: Chunk, start: str):
        if chunk.bad:
            return None
        return parse_piece(self.text, start, self.layout.masked[chunk.start : chunk.end], chunk.start, self.report)

    def error(self, code: str, message: str, span: Span, label: str = "", help: str = "") -> None:
        self.report(Diagnostic(code, message, span, label, help=help))

    def lines(self, chunks: list[Chunk], words: dict[str, str]) -> list[tuple[str, Chunk, object]]:
        """(start symbol, chunk, what was read) of each line of a block; the first word says which start it is."""
        made = []
        for chunk in chunks:
            word = self.layout.masked[chunk.start : chunk.end].split(maxsplit=1)[0]
            start = words.get(word, words.get("", ""))
            if not start:
                end = chunk.start + len(word)
                self.error(mistakes.QR_UNKNOWN, f"`{word}` is not a field here", Span(self.text, chunk.start, end),
                           "expected " + mistakes.either(words), mistakes.nearest(word, words))
            else:
                made.append((start, chunk, self.one(chunk, start)))
        return made

    def format(self, node: ast.FormatDef | None, chunks: list[Chunk]) -> ast.FormatDef | None:
        fields, spellings, comments = {}, [], []
        for start, chunk, read in self.lines(chunks, {w: w for w in ("element", "block", "value", "spelling")}):
            if start == "spelling":
                spellings.append(self.spelling(read, chunk))
                continue
            comments += chunk.comments + ([chunk.comment] if chunk.comment else [])
            if start in fields and read:
                self.error(mistakes.QR_UNKNOWN, f"`{start}` stands twice in this format", self.span(chunk), help="keep one")
            fields[start] = read.value if read else None
        if node is None or None in spellings:
            return None
        return evolve(node, spellings=tuple(spellings), comments=tuple(comments), **fields)

    def spelling(self, node: ast.SpellingBlock | None, chunk: Chunk) -> ast.SpellingBlock | None:
        parts, declared, comments = [], None, list(chunk.comments)
        for start, line, read in self.lines(chunk.body, {"declared": "declared", "": "part"}):
            if read is None:
                node = None
            elif start == "part":
                parts.append(evolve(read, comments=tuple(line.comments), comment=line.comment))
            else:
                comments += line.comments + ([line.comment] if line.comment else [])
                if declared is not None:
                    self.error(mistakes.QR_UNKNOWN, "`declared` stands twice in this spelling", read.span,
                               help="join both by `or`")
                declared = read.value
        return node and evolve(node, parts=tuple(parts), declared=declared, comments=tuple(comments), comment=chunk.comment)

    def dialect(self, node: ast.DialectDef | None, chunks: list[Chunk]) -> ast.DialectDef | None:
        found, comments = {"entry": [], "further": [], "reads": []}, []
        for start, chunk, read in self.lines(chunks, {"for": "entry", "file": "further", "reads": "reads"}):
            comments += chunk.comments + ([chunk.comment] if chunk.comment else [])
            if start == "reads" and found["reads"] and read:
                self.error(mistakes.QR_UNKNOWN, "`reads` stands twice in this dialect", read.span, help="keep one")
            found[start].append(read and read.value)
        reads = found["reads"][0] if found["reads"] else None
        return node and evolve(node, entries=tuple(found["entry"]), files=tuple(found["further"]), reads=reads,
                               comments=tuple(comments))

    def span(self, chunk: Chunk) -> Span:
        return Span(self.text, chunk.start, chunk.end)
