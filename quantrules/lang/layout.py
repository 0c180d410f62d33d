"""Layout: which characters of a file are one statement. Comments, quotes, brackets and indents are settled here.

The result is a tree of chunks, each a slice of the file with its comments blanked out, so that a mistake in one
statement hides none in the next. One pass over the characters and one over the lines; nothing here looks back.
"""

from __future__ import annotations

import re

from attrs import Factory, define

from quantrules.diagnostics import Diagnostic, Span, Text
from quantrules.diagnostics import define as code

QR_QUOTE = code("QR002", "A quote that its line does not close")
QR_BRACKET = code("QR003", "A bracket without its partner")
QR_INDENT = code("QR004", "Indentation that fits no statement")
QR_COMMENT = code("QR005", "A `#` that is glued to a word")
QR_LIMIT = code("QR006", "A file that is too large, too deep, or has too many errors")

MAX_BRACKETS = 32  # open at once; what recursion downstream may rely on
MAX_BLOCKS = 8  # `under` in `under`
HEADERS = ("under", "format", "dialect", "spelling")  # statements that deeper lines belong to
KEYWORDS = ("under", "def", "let", "param", "fuse", "rename", "tie", "include", "source", "target", "delete", "format", "dialect")

_MARK = re.compile(r'\n|"(?:[^"\\\n]|\\[^\n])*"|"|\\[^\n]?|[#(){}\[\]]')
_WORD = re.compile(r"([a-z]+)\s+(?!→|->|[,:@])(?=\S)")  # a keyword: white space and something other than → , : @ follow
_PARTNER = {"(": ")", "[": "]", "{": "}", ")": "(", "]": "[", "}": "{"}


@define
class Line:
    start: int
    code_end: int = 0  # where the comment or the line ends
    column: int = 0
    comment: str | None = None
    inside: int = 0  # brackets that are open where it begins
    bad: bool = False


@define
class Chunk:
    """One statement, or one line of a format: [start, end) of the masked text."""

    start: int
    end: int
    section: str
    blank: bool  # a blank line above
    comments: list[str] = Factory(list)
    comment: str = ""
    bad: bool = False  # already reported; parsing it would only repeat that
    body: list[Chunk] = Factory(list)

    def add(self, line: Line) -> None:
        self.end = max(self.end, line.code_end)
        self.bad |= line.bad
        if line.comment:
            if self.comment:
                self.comments.append(self.comment)
            self.comment = line.comment


class Layout:
    """`chunks`, `masked` (the file with spaces for comments) and `comments` (those after the last statement)."""

    def __init__(self, text: Text, report):
        self.text, self.report = text, report
        self.comments: list[str] = []
        self.lines = self._lines()
        self.chunks = self._chunks()

    def keyword(self, chunk: Chunk) -> str:
        found = _WORD.match(self.masked, chunk.start, chunk.end)
        return found[1] if found else ""

    def _error(self, code: str, message: str, start: int, end: int, label: str = "", help: str = "") -> None:
        self.report(Diagnostic(code, message, Span(self.text, start, end), label, help=help))

    def _lines(self) -> list[Line]:
        """Cut at line ends, find comments and unclosed quotes, and pair the brackets."""
        content, lines, brackets, masked = self.text.content, [Line(0)], [], []
        at = copied = 0
        while True:
            found = _MARK.search(content, at)
            mark, here = (found[0], found.start()) if found else ("\n", len(content))
            line, at = lines[-1], here + len(mark)
            if mark == "\n":
                code = content[line.start : here if line.comment is None else line.code_end]
                line.code_end, line.column = line.start + len(code.rstrip()), len(code) - len(code.lstrip())
                if not found:
                    break
                lines.append(Line(at))
            elif mark in _PARTNER:
                brackets.append((mark, here, len(lines) - 1))
            elif mark in ("#", '"'):
                end = content.find("\n", here)
                at = len(content) if end < 0 else end
                if mark == "#":
                    self._comment(line, here, at)
                    masked += [content[copied:here], " " * (at - here)]
                    copied = at
                    continue
                self._error(QR_QUOTE, "this quote is not closed on its line", here, at, 'expected `"`',
                            'close it with `"` on the same line; a quote as a character is written `\\"`')
                line.bad = True
        self.masked = "".join(masked) + content[copied:]
        self._pair(brackets, lines)
        return lines

    def _comment(self, line: Line, start: int, end: int) -> None:
        content = self.text.content
        if start > line.start and not content[start - 1].isspace():
            self._error(QR_COMMENT, "`#` starts a comment only after white space", start, start + 1, "glued to what is before it",
                        "write a space before `#`; as a character of a name it goes in quotes or after `\\`")
            line.bad = True
        words = content[start + 1 : end].rstrip()
        line.comment, line.code_end = words[1:] if words.startswith(" ") else words, start

    def _pair(self, brackets: list[tuple[str, int, int]], lines: list[Line]) -> None:
        """Mark the lines that begin inside brackets. A bracket without partner holds no lines together."""
        stack: list[tuple[str, int, int]] = []
        open_count = dict.fromkeys("([{", 0)
        steps = [0] * (len(lines) + 1)

        def refuse(code: str, at: int, row: int, message: str, label: str, help: str) -> None:
            if not lines[row].bad:  # one mistake a line: the others mostly follow from it
                lines[row].bad = True
                self._error(code, message, at, at + 1, label, help)

        def unclosed(mark: str, at: int, row: int) -> None:
            open_count[mark] -= 1
            refuse(QR_BRACKET, at, row, f"this `{mark}` is never closed", f"expected `{_PARTNER[mark]}`",
                   "close it; as a character of a name it goes in quotes or after `\\`")

        for mark, at, row in brackets:
            if mark in open_count:
                stack.append((mark, at, row))
                open_count[mark] += 1
                if len(stack) > MAX_BRACKETS:
                    refuse(QR_LIMIT, at, row, f"brackets are nested more than {MAX_BRACKETS} deep", "",
                           "name inner parts with `let` or `def`")
            elif not open_count[_PARTNER[mark]]:
                refuse(QR_BRACKET, at, row, f"this `{mark}` closes nothing", f"no `{_PARTNER[mark]}` is open",
                       f"remove it; as a character of a name it is written `\\{mark}`")
            else:
                while stack[-1][0] != _PARTNER[mark]:
                    unclosed(*stack.pop())
                opener, _, first = stack.pop()
                open_count[opener] -= 1
                steps[first + 1] += 1
                steps[row + 1] -= 1
        for item in stack:
            unclosed(*item)
        depth = 0
        for line, step in zip(lines, steps):
            depth += step
            line.inside = depth

    def _chunks(self) -> list[Chunk]:
        top: list[Chunk] = []
        levels = [(0, top)]  # open blocks: the column of their statements, and these
        current, section, blank = None, "", False
        fresh = True  # whether a statement has come since the last section line
        for line in self.lines:
            if line.code_end == line.start:
                if line.comment is None:
                    blank = True
                elif self.text.content.startswith("## ", line.start + line.column) and line.comment[2:].strip():
                    self.comments += [] if fresh else [section]  # a title without statements is a comment
                    section, fresh = line.comment[2:].strip(), False
                else:
                    self.comments.append(line.comment)
                continue
            if line.inside and current:
                current.comments += self.comments
                current.add(line)
                self.comments, blank = [], False
                continue
            current = self._place(line, levels, section, blank)
            current.comments += self.comments
            self.comments, blank, fresh = [], False, True
        if not fresh:
            self.comments.append("# " + section)
        return top

    def _place(self, line: Line, levels: list[tuple[int, list[Chunk]]], section: str, blank: bool) -> Chunk:
        """The chunk that a line begins or continues."""
        first = line.start + line.column
        if "\t" in self.masked[line.start : first]:
            self._error(QR_INDENT, "a tab does not indent", line.start, first, "", "write spaces")
            line.bad = True
        while line.column < levels[-1][0]:
            levels.pop()
        column, body = levels[-1]
        owner = body[-1] if body and line.column > column else None
        if line.column > column and not owner and not line.bad:
            self._error(QR_INDENT, "this line is indented, but no statement is above it", line.start, first, "",
                        "start it in column 1")
            line.bad = True
        if owner:
            head = self.keyword(owner) in HEADERS
            if not head or (not owner.body and self.masked.startswith(("→", "->"), first)):
                owner.add(line)
                return owner
            if owner.body:
                self._error(QR_INDENT, "this line is indented less than the block above and more than its head",
                            line.start, first, "", "give the statements of a block one column")
                line.bad = True
            if len(levels) > MAX_BLOCKS:
                self._error(QR_LIMIT, f"blocks are nested more than {MAX_BLOCKS} deep", first, line.code_end, "",
                            "write the longer prefix in one `under`")
                owner.bad = True
                return owner
            body = owner.body
            levels.append((line.column, body))
        body.append(Chunk(first, line.code_end, section, blank, comment=line.comment or "", bad=line.bad))
        return body[-1]
