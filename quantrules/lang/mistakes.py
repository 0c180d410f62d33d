"""From a parser's dead end to a sentence: what stands there, what was expected, and what to write instead.

`HINTS` is the idea of lark's match_examples: a row holds malformed snippets, and the parser state and character at which
each of them fails are where its message applies. A better message is a new row.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache

from quantrules.diagnostics import Diagnostic, Span, Text
from quantrules.diagnostics import define as code
from quantrules.lang.layout import KEYWORDS

QR_SYNTAX = code("QR001", "Text that does not parse")
QR_ARROW = code("QR007", "A rule without an arrow")
QR_OP = code("QR008", "A name where an op belongs")
QR_BRACES = code("QR009", "Braces that mean nothing, or two things at once")
QR_STARS = code("QR010", "`**` in a pattern")
QR_RESERVED = code("QR011", "A word of the language used as a name")
QR_NUMBER = code("QR012", "A number that is too large, or not of the right kind")
QR_ESCAPE = code("QR013", "A text that is not written as in JSON")
QR_UNKNOWN = code("QR014", "A clause, field or function that is unknown or stands twice")
QR_NAME = code("QR015", "A pattern where a name belongs")

BRACE_STARTS = {"a list": "members", "an alternation": "alternation", "a range": "range"}
BRACE_KINDS = {",": "a list", "?": "a list", "?=": "a list", "|": "an alternation", "=": "an alternation", "..": "a range"}
CLAUSES = ("when", "except", "expect", "also")
_OTHER_WORDS = {"if": "when", "where": "when", "unless": "when not", "expects": "expect", "and": "when … and", "excluding": "except"}

# (code or "", message, help, snippets that fail where the message applies: a start symbol and a text).
# {word} is the run of characters around the place, {at} its part from the place on, {before} the statement up to it.
# A snippet that ends in ¶ speaks for its parser state whatever character stands there.
HINTS = (
    (QR_OP, "`{word}` is a name, but after the first arrow comes an op", "write `→ keep → {word}`",
     ["rule a → b.*", "rule a → *.b", "rule a → {x}", "rule a → b{x}", "rule a → b*", 'rule a → "b"', "rule a → 1b", "rule a → .b", "rule a → b-c", "rule a → b/c"]),
    (QR_OP, "the rule ends where an op is expected", "write `→ keep`, or `→ drop`", ["rule a →"]),
    (QR_OP, "two arrows with no op between", "write `→ keep →`", ["rule a → → b", "rule a → -> b"]),
    (QR_ARROW, "`=>` is not an arrow", "write `→` or `->`", ["rule a => b", "rule a => keep"]),
    (QR_ARROW, "no arrow stands before `=`", "a rule is `{before} → OPS`; constants begin with `let`, pipelines with `def`", ["rule a = b", "rule a, b = c"]),
    (QR_ARROW, "a rule needs an arrow before the op", "write `{before} → {at}`", ["rule a ¶", "rule a, b ¶", "rule a @ b ¶", "rule a | b", "rule {a} ¶"]),
    (QR_ARROW, "this statement has no arrow", "write `{before} → keep`, or `{before} : TYPE` in a schema", ["rule a", "rule a, b", "rule a @ b"]),
    (QR_SYNTAX, "a statement begins with a pattern", "to continue the statement above, indent this line", ["rule → a", "rule | a", "rule : a", "rule @ a", "rule , a"]),
    (QR_SYNTAX, "the rule ends after its arrow", "write the target, or remove the arrow", ["rule a → keep →"]),
    (QR_SYNTAX, "a target is a name", "write ops before the second arrow: `→ OPS → TARGET`", ["rule a → keep → b | c", "rule a → keep → b(1)", "rule a → keep → b → c"]),
    (QR_UNKNOWN, "`{at}` is not a clause", "{clause}", ["rule a → keep → b ¶", "rule a → keep also ¶", "rule a : b ¶", "rule a → keep : b[1] ¶", "rule a → keep expect 1 ¶", "under under a ¶"]),
    (QR_UNKNOWN, "`{at}` follows an op without `|`", "write `| {at}` for a further op; {clause}", ["rule a → keep b", "rule a → cat(0) b", "definition def a = keep b"]),
    (QR_SYNTAX, "a single `=` does not compare", "write `==`", ["rule a → keep when x = 3", "rule a → keep when config.x = 3", "declared declared a = 3"]),
    (QR_SYNTAX, "comparisons do not chain", "write `a < b and b < c`", ["rule a → keep when 1 < x < 3", "rule a → keep when x == y == z"]),
    (QR_SYNTAX, "texts stand in double quotes", 'write `"…"`', ["rule a → keep when x == 'b'", "let let a = 'b'", "rule a → cat('b')", "include include 'b'"]),
    (QR_SYNTAX, "this operator is a word here", "write `and`, `or`, `not`", ["rule a → keep when a && b", "rule a → keep when !a", "rule a → keep when x == 1 || a", "rule a → keep when a & b"]),
    (QR_SYNTAX, "an included file's name stands in quotes", 'write `include "{at}"`', ["include include a", "include include a.b", "include include .b", "include include /b"]),
    (QR_SYNTAX, "the head of a block ends without a colon", "remove the `:`", ["under under a:", "under under a → b:", "under under a :", "format format a:", "spelling spelling a:", "dialect dialect a:"]),
    (QR_SYNTAX, "a definition is written with `=`", "write `=` here", ["definition def a: keep", "definition def a(x): keep", "definition def a → keep", "let let a: 3", "let let a 3", "let let a → 3", "param param a 3",
     "param param a: 3", "fuse fuse a: b", "fuse fuse a → b", "fuse fuse a b", "definition def a keep", "definition def a(x) keep", "tie tie a b", "tie tie a → b", "tie tie a, b"]),
    (QR_SYNTAX, "members of a list are separated by commas", "write `, {at}`", ["fuse fuse a = b c", "rule a → cat(1 2)", "let let a = [1 2]", "members a b, c", "definition def a(x y) = keep", "fuse fuse a = b | c"]),
    (QR_SYNTAX, "a rename goes from one pattern to another", "write `rename OLD → NEW`", ["rename rename a b", "rename rename a = b", "rename rename a", "rename rename a, b"]),
    (QR_SYNTAX, "an edit is `config.PATH = JSON`, `config.PATH += JSON` or `delete config.PATH`",
     'a tensor whose name begins with `config.` is written `"config".…`', ["edit config.a → b", "edit config.a", "edit config.a: 3", "edit config. = 3", "edit delete a", "edit config.a == 3", "edit config.a b"]),
    (QR_BRACES, "these braces are empty", "write a name, `{{L}}`, or a list, `{{a,b}}`", ["capture  "]),
    (QR_BRACES, "a capture is a word", "a number stands without braces; a range is `{{L:0..61}}`", ["capture 3", "capture x:3", "capture .a"]),
    (QR_BRACES, "a lone name after the colon is a `let`", "an alternation has a `|`; to rename one, write `{{x:a.b=c.d}}`", ["capture x:a.b", "capture a.b"]),
    (QR_BRACES, "`*` does not stand in a list", "write one pattern for each, or `\\*` for the character", ["members a*,b", "members *,b", "alternation a|*", "alternation a*|b", "alternation *|b"]),
    (QR_BRACES, "an item is missing", 'write it, or `""` for no characters', ["alternation |a", "alternation a|", "alternation a||b", "alternation x:|a", "alternation a=|b", "members a,", "members ,b", "members a,,b", "alternation a="]),
    (QR_BRACES, "a range has a name", "write `{{L:0..3}}`", ["range 0..3", "range ..3", "range a..3"]),
    (QR_BRACES, "a line holds `{at}` where an integer is expected", "captures, numbers, `let`s, `config.…` and + - * / % may stand here", ["form L+", "form L*", "form 2*"]),
)

_NAMES = {
    "PATTERN": "a pattern", "NAME": "a name", "ITEM": "a name", "LABEL": "", "STRING": "a text in quotes", "NUMBER": "a number", "ARROW": "`→`", "CONFIG": "`config.…`", "REST": "`…`",
    "BRACES": "braces", "SIDE": "`source`", "$END": "the end of the statement", "PLUSEQ": "`+=`", "STARS": "`**`", "DOTS": "`..`", "EQ": "`=`", "PIPE": "`|`", "COMMA": "`,`", "COLON": "`:`",
    "SEMICOLON": "`;`", "AT": "`@`", "MAYBE": "`?`", "LPAR": "`(`", "RPAR": "`)`", "LSQB": "`[`", "RSQB": "`]`", "LBRACE": "`{`", "RBRACE": "`}`", "LAST": "`-1`",
    "FLAG": "`optional` or `inverse`", "PAIR": "`cat`, `stack` or `dense`",
}  # fmt: skip
_OPERATORS = {"PLUS", "MINUS", "STAR", "SLASH", "PERCENT", "COMPARE", "IN", "AND", "OR", "NOT"}


def either(words: Iterable[str]) -> str:
    """`a`, `b` or `c`"""
    quoted = [f"`{w}`" for w in words if w]
    return quoted[0] if len(quoted) == 1 else ", ".join(quoted[:-1]) + " or " + quoted[-1]


def nearest(word: str, known: Iterable[str]) -> str:
    """A help line that offers the known word that `word` was probably meant to be, or all where none is near."""
    known = [k for k in known if k]
    close = difflib.get_close_matches(word[:100], known[:2000], 1, 0.6)
    if close:
        return f"did you mean `{close[0]}`?"
    return "write " + either(known) if 0 < len(known) <= 8 else "nothing known has a name like it"


def _expected(names: set[str]) -> str:
    operators = len(names & _OPERATORS) > 2
    value = {"NAME", "NUMBER", "STRING"} <= names
    hidden = (_OPERATORS if operators else set()) | ({"NAME", "NUMBER", "STRING", "CONFIG", "LPAR", "LBRACE", "MINUS", "NOT", "LSQB"} if value else set())
    words = [_NAMES.get(n, f"`{n.lower()}`") for n in sorted(names - hidden)]
    words = (["a value"] if value else []) + [w for w in words if w] + (["an operator"] if operators else [])
    return "expected " + (", ".join(words[:-1]) + " or " + words[-1] if len(words) > 1 else words[0]) if words else ""


def _place(error, content: str) -> tuple[tuple[int, ...], int, str]:
    """(the last two parser states, offset, what stands there): a word's characters are all alike, the end is ""."""
    token = getattr(error, "token", None)
    at = len(content.rstrip()) if token is not None and token.type == "$END" else error.pos_in_stream
    here = content[at : at + 1]
    return tuple(error.state.state_stack[-2:]), at, "word" if here.isalnum() or here == "_" else here


def _allowed(error) -> set[str]:
    """The terminals that may stand at the place. A state's own set holds what any use of its rule may be followed by."""
    states, allowed = error.state.parse_conf.states, set()
    for terminal in getattr(error, "allowed", None) or error.expected:
        stack = list(error.state.state_stack)
        while (found := states[stack[-1]].get(terminal)) and not isinstance(found[1], int):  # a rule to reduce by
            del stack[len(stack) - len(found[1].expansion) :]
            stack.append(states[stack[-1]][found[1].origin.name][1])
        if found:
            allowed.add(terminal)
    return allowed


@cache
def _hints() -> dict[tuple[tuple[int, ...], str | None], tuple[str, str, str]]:
    from lark.exceptions import UnexpectedInput

    from quantrules.lang.parser import lark_parser

    table: dict[tuple[tuple[int, ...], str | None], tuple[str, str, str]] = {}
    for code, message, help, snippets in HINTS:
        for snippet in snippets:
            start, _, content = snippet.partition(" ")
            try:
                lark_parser().parse(content.replace("¶", "¤"), start=start)
            except UnexpectedInput as error:
                state, _, here = _place(error, content.replace("¶", "¤"))
                table.setdefault((state, None if content.endswith("¶") else here), (code, message, help))
            else:
                raise AssertionError(f"this snippet parses: {snippet}")
    return table


def explain(error, start: str, content: str, base: int, text: Text) -> Diagnostic:
    """The diagnostic for lark's error in `content`, a piece of `text` that begins at `base`."""
    state, at, here = _place(error, content)
    run = re.compile(r"[^\s|→,()\[\]]*")
    end = max(run.match(content, at).end(), at + (at < len(content)))
    first = at
    while first and run.fullmatch(content[first - 1]) and content[first - 1]:
        first -= 1
    word, rest, before = content[first:end], content[at:end], " ".join(content[:at].split())
    hint = _hints().get((state, here)) or (here and _hints().get((state, None)))
    close = difflib.get_close_matches(content.split(maxsplit=1)[0][:30], KEYWORDS, 1, 0.75) if start == "rule" and here and content.strip() else []
    if close and " " not in before:
        hint = (QR_SYNTAX, "this is neither a rule nor a statement", f"did you mean `{close[0]}`?")
    if not hint:
        what = f"`{_short(rest)}` cannot stand here" if at < len(content.rstrip()) else "the statement ends too early" if start in _STATEMENTS else "something is missing in these braces"
        hint = (QR_SYNTAX, what, "")
    allowed = _allowed(error)
    values = {"word": _short(word), "at": _short(rest), "before": _short(before), "clause": _clause(rest)}
    return Diagnostic(hint[0], hint[1].format(**values), Span(text, base + at, base + end), _expected(allowed), help=hint[2].format(**values) or _expected(allowed).replace("expected", "write", 1))


_STATEMENTS = {"rule", "edit", "side", *KEYWORDS}


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"


def _clause(word: str) -> str:
    """Help for a word that stands where a clause may."""
    close = [_OTHER_WORDS[word]] if word in _OTHER_WORDS else difflib.get_close_matches(word[:30], CLAUSES, 1, 0.6)
    return f"did you mean `{close[0]}`?" if close else "clauses begin with " + either(CLAUSES) + "; a name with a space is written in quotes"
