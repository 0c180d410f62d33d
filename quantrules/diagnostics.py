"""Diagnostics: codes, places in a text, rendering, and the exceptions that carry them.

A diagnostic is a value. Rooms make them, this file renders them, and nothing else prints. All diagnostics of a run
come together: code that finds one goes on looking for the next.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from attrs import field, frozen

CODES: dict[str, str] = {}


def define(code: str, title: str) -> str:
    """Register a code with the sentence that titles its page; each room defines its own. A second title is a bug."""
    if CODES.setdefault(code, title) != title:
        raise AssertionError(f"{code} is already: {CODES[code]}")
    return code


@frozen(eq=False)
class Text:
    """A text that spans point into: a rule file, or what was given on the command line."""

    name: str
    content: str
    _starts: list[int] = field(init=False, repr=False)

    def __attrs_post_init__(self) -> None:
        starts = [0] + [i + 1 for i, c in enumerate(self.content) if c == "\n"]
        object.__setattr__(self, "_starts", starts)

    def position(self, offset: int) -> tuple[int, int]:
        """1-based (line, column) of a character offset."""
        line = bisect_right(self._starts, offset)
        return line, offset - self._starts[line - 1] + 1

    def line(self, number: int) -> str:
        """The text of a 1-based line, without its end."""
        return self.content[self._starts[number - 1] :].split("\n", 1)[0].rstrip("\r")


@frozen
class Span:
    """Characters [start, end) of a text. Spans do not take part in the equality of what they mark (see lang.ast)."""

    text: Text = field(repr=False)
    start: int
    end: int

    @property
    def source(self) -> str:
        return self.text.content[self.start : self.end]

    def __str__(self) -> str:
        return "{}:{}:{}".format(self.text.name, *self.text.position(self.start))

    def to(self, other: Span) -> Span:
        return Span(self.text, min(self.start, other.start), max(self.end, other.end))


@frozen
class Diagnostic:
    """One finding: what is, what was expected, and (help) what to write instead."""

    code: str
    message: str
    span: Span | None = None
    label: str = ""  # beside the caret
    notes: tuple[str, ...] = ()
    help: str = ""
    severity: str = "error"  # error | warning | note
    count: int = 1  # how many modules or keys this one finding stands for
    related: tuple[tuple[Span, str], ...] = ()

    def __attrs_post_init__(self) -> None:
        assert self.code in CODES, f"{self.code} is not defined"

    def to_json(self) -> dict:
        place = {}
        if self.span:
            line, column = self.span.text.position(self.span.start)
            place = {"file": self.span.text.name, "line": line, "column": column}
        return {"severity": self.severity, "code": self.code, "message": self.message, "label": self.label,
                "notes": list(self.notes), "help": self.help, "count": self.count, **place}

    def render(self) -> str:
        """The finding as rustc would print it, without colour."""
        lines = [f"{self.severity}[{self.code}]: {visible(self.message)}"]
        marks = ([(self.span, self.label, "^")] if self.span else []) + [(s, t, "-") for s, t in self.related]
        numbers = [span.text.position(span.start)[0] for span, _, _ in marks]
        gutter = max((len(str(n)) for n in numbers), default=1)
        for (span, label, mark), number in zip(marks, numbers):
            column = span.text.position(span.start)[1]
            source = span.text.line(number)
            shown, start = _clip(source, column - 1)
            width = max(1, min(span.end - span.start, len(source) - column + 1, len(shown) - start))
            arrow = "-->" if mark == "^" else ":::"
            lines += [f"{' ' * gutter}{arrow} {span}", f"{' ' * gutter} |", f"{number:>{gutter}} | {visible(shown)}",
                      f"{' ' * gutter} | {' ' * start}{mark * width} {visible(label)}".rstrip()]
        if marks and (self.notes or self.help):
            lines.append(f"{' ' * gutter} |")
        lines += [f"{' ' * gutter} = note: {visible(n)}" for n in self.notes]
        if self.help:
            lines.append(f"{' ' * gutter} = help: {visible(self.help)}")
        return "\n".join(lines)


def _clip(source: str, at: int, width: int = 160) -> tuple[str, int]:
    """A window of a long line around column `at`; a rule file of one line of a megabyte must not fill the screen."""
    if len(source) <= width:
        return source, at
    start = max(0, min(at - width // 2, len(source) - width))
    before, after = "…" * (start > 0), "…" * (start + width < len(source))
    return before + source[start : start + width] + after, at - start + len(before)


def visible(text: str) -> str:
    """Text from strangers, safe for a terminal: control characters are escaped, tabs become one space."""
    text = text.replace("\t", " ")
    return text if text.isprintable() else "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class QuantrulesError(Exception):
    """Bad input. `.diagnostics` holds every finding; str() renders them all."""

    def __init__(self, diagnostics: Diagnostic | Iterable[Diagnostic]):
        self.diagnostics = (diagnostics,) if isinstance(diagnostics, Diagnostic) else tuple(diagnostics)
        super().__init__(self.diagnostics)

    def __str__(self) -> str:
        return "\n\n".join(d.render() for d in self.diagnostics)


class RuleError(QuantrulesError):
    """A rule file that does not parse, or means nothing."""


class CheckpointError(QuantrulesError):
    """A checkpoint that is not whole, not legal or not readable."""


class PlanError(QuantrulesError):
    """Rules and a checkpoint that do not fit each other."""


class RunError(QuantrulesError):
    """A run that cannot start or go on: the output is in the way, the disk is full, a value is refused."""
