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
BRACES = {*BRACE_STARTS.values(), "capture", "star", "form"}
BRACE_KINDS = {",": "a list", "?": "a list", "?=": "a list", "|": "an alternation", "=": "an alternation", "..": "a range"}
CLAUSES = ("when", "except", "expect", "also")
_OTHER_WORDS = {"if": "when", "where": "when", "unless": "when not", "expects": "expect", "and": "when … and", "but": "except"}

_CLAUSE = (QR_UNKNOWN, "`{at}` is not a clause", "{clause}")

# (code, message, help, snippets that fail where the message applies: a start symbol and a text).
# {word} is the run of characters around the place, {at} its part from the place on, {before} the statement up to it.
# A snippet that ends in ¶ speaks for its parser state whatever character stands there.
HINTS = (
    (QR_OP, "`{word}` is a name, but after the first arrow comes an op", "write `→ keep → {word}`",
     "rule a → b.*", "rule a → *.b", "rule a → {x}", "rule a → b{x}", "rule a → b*", 'rule a → "b"', "rule a → 1b",
     "rule a → .b", "rule a → b-c", "rule a → b/c"),
    (QR_OP, "`{word}` is a name, but after `|` comes an op",
     "names stand after `→`; an op is a word of letters, digits and `_`",
     "rule a → b | b.*", "rule a → b | *.b", "rule a → b | {x}", "rule a → b | b{x}", "rule a → b | b*",
     "rule a → b | b-c"),
    (QR_OP, "an op is missing after `|`", "write one, or remove the `|`",
     "rule a → b | → c", "rule a → b |", "rule a → b | | c", "definition def a = b |"),
    (QR_OP, "ops are joined by `|`", "write `|` here",
     "rule a → b, c", "definition def a = b, c"),
    (QR_OP, "the definition ends where an op is expected", "write `= keep`, or other ops",
     "definition def a =", "definition def a(x) ="),
    (QR_OP, "the rule ends where an op is expected", "write `→ keep`, or `→ drop`",
     "rule a →"),
    (QR_OP, "two arrows with no op between", "write `→ keep →`",
     "rule a → → b", "rule a → -> b"),
    (QR_ARROW, "`{at}` is not an arrow", "write `→` or `->`",
     "rule a => b", "rule a ⇒ b", "rule a —> b", "rule a –> b", "rule a > b", "rule a - b", "rename rename a => b",
     "under under a => b"),
    (QR_ARROW, "no arrow stands before `=`", "write `{before} → OPS`; constants begin with `let`, pipelines with `def`",
     "rule a = b", "rule a, b = c"),
    (QR_ARROW, "a rule needs an arrow before the op", "write `{before} → {at}`",
     "rule a ¶", "rule a, b ¶", "rule a @ b ¶", "rule a | b", "rule {a} ¶"),
    (QR_ARROW, "this statement has no arrow", "write `{before} → keep`, or `{before} : TYPE` in a schema",
     "rule a", "rule a, b", "rule a @ b"),
    (QR_SYNTAX, "a statement begins with a pattern", "to continue the statement above, indent this line",
     "rule → a", "rule | a", "rule : a", "rule @ a", "rule , a", "rule = a"),
    (QR_SYNTAX, "the rule ends after its arrow", "write the target, or remove the arrow",
     "rule a → keep →"),
    (QR_SYNTAX, "a type is missing after `:`",
     "write one, such as `: bf16[N, K]`, or quotes where the `:` belongs to a name",
     "rule a : → keep", "rule a :", "rule a → keep :", "rule a : *"),
    (QR_SYNTAX, "`when` needs a condition", 'write one, such as `when attention == "bf16"`',
     "rule a → keep when", "definition def a = keep when"),
    (QR_SYNTAX, "`expect` needs a number of units", "write one, such as `expect 61` or `expect 0 | 30`",
     "rule a → keep expect"),
    (QR_SYNTAX, "a pattern is missing after `,`", "write one, or remove the `,`",
     "rule a, → keep", "rule a → keep → b,", "rule a → keep except a,", "fuse fuse a = b,"),
    (QR_SYNTAX, "a list does not end in a comma", "remove the `,`",
     "let let a = [1,]", "rule a → cat(1,)", "rule a : b[1,]", 'edit config.a = {"a": 1,}', "definition def a(x,) = keep"),
    (QR_SYNTAX, "a name begins with a letter", "write a letter or `_` before the digit",
     "let let 3x = 1", "param param 3x = 1", "definition def 3x = keep", "format format 3x", "dialect dialect 3x"),
    (QR_NUMBER, "`{word}` is no number", "write digits only, with one `.` where it is not whole",
     "let let a = 1_0", "rule a → keep when a == 1_0", "let let a = 1 + 0x1", "rule a → cat(1_0)",
     "rule a → keep expect 1_0", "param param a = 1_0"),
    (QR_SYNTAX, "a target is a name", "write ops before the second arrow: `→ OPS → TARGET`",
     "rule a → keep → b | c", "rule a → keep → b(1)", "rule a → keep → b → c"),
    (*_CLAUSE,
     "rule a → keep → b ¶", "rule a → keep also ¶", "rule a : b ¶", "rule a → keep : b[1] ¶",
     "rule a → keep expect 1 ¶",
     "under under a ¶"),
    (QR_UNKNOWN, "`{at}` follows an op without `|`", "write `| {at}` for a further op; {clause}",
     "rule a → keep b", "rule a → cat(0) b", "definition def a = keep b"),
    (QR_SYNTAX, "a single `=` does not compare", "write `==`",
     "rule a → keep when x = 3", "rule a → keep when config.x = 3", "declared declared a = 3"),
    (QR_SYNTAX, "comparisons do not chain", "write `a < b and b < c`",
     "rule a → keep when 1 < x < 3", "rule a → keep when x == y == z"),
    (QR_SYNTAX, "texts stand in double quotes", 'write `"…"`',
     "rule a → keep when x == 'b'", "let let a = 'b'", "rule a → cat('b')", "include include 'b'"),
    (QR_SYNTAX, "this operator is a word here", "write `and`, `or`, `not`",
     "rule a → keep when a && b", "rule a → keep when !a", "rule a → keep when x == 1 || a", "rule a → keep when a & b"),
    (QR_SYNTAX, "an included file's name stands in quotes", 'write `include "{at}"`',
     "include include a", "include include a.b", "include include .b", "include include /b"),
    (QR_SYNTAX, "the head of a block ends without a colon", "remove the `:`",
     "under under a:", "under under a → b:", "under under a :", "format format a:", "spelling spelling a:",
     "dialect dialect a:"),
    (QR_SYNTAX, "a definition is written with `=`", "write `=` here",
     "definition def a: keep", "definition def a(x): keep", "definition def a → keep", "let let a: 3", "let let a 3",
     "let let a → 3", "param param a 3", "param param a: 3", "fuse fuse a: b", "fuse fuse a → b", "fuse fuse a b",
     "definition def a keep", "definition def a(x) keep"),
    (QR_SYNTAX, "names of one tensor are joined by `=`", "write `tie A = B`",
     "tie tie a b", "tie tie a → b", "tie tie a, b", "tie tie a"),
    (QR_SYNTAX, "members of a list are separated by commas", "write `, {at}`",
     "fuse fuse a = b c", "rule a → cat(1 2)", "let let a = [1 2]", "members a b, c", "definition def a(x y) = keep",
     "fuse fuse a = b | c", "capture a b", "part codes .weight u8[N K]", "rule a : b[N K]"),
    (QR_SYNTAX, "a rename goes from one pattern to another", "write `rename OLD → NEW`",
     "rename rename a b", "rename rename a = b", "rename rename a", "rename rename a, b"),
    (QR_SYNTAX, "an edit is `config.PATH = JSON`, `config.PATH += JSON` or `delete config.PATH`",
     'a tensor whose name begins with `config.` is written `"config".…`',
     "edit config.a → b", "edit config.a", "edit config.a: 3", "edit config. = 3", "edit delete a", "edit config.a == 3",
     "edit config.a b"),
    (QR_BRACES, "these braces are empty", "write a name, `{{L}}`, or a list, `{{a,b}}`",
     "capture"),
    (QR_BRACES, "a capture is a word", "a number stands without braces; a range is `{{L:0..61}}`",
     "capture 3", "capture x:3", "capture .a"),
    (QR_BRACES, "a lone name after the colon is a `let`", "an alternation has a `|`; to rename one, write `{{x:a.b=c.d}}`",
     "capture x:a.b", "capture a.b"),
    (QR_BRACES, "`*` does not stand in a list", "write one pattern for each, or `\\*` for the character",
     "members a*,b", "members *,b", "alternation a|*", "alternation a*|b", "alternation *|b"),
    (QR_BRACES, "an item is missing", 'write it, or `""` for no characters',
     "alternation |a", "alternation a|", "alternation a||b", "alternation x:|a", "alternation a=|b", "members a,", "members a,b,",
     "members ,b", "members a,,b", "alternation a="),
    (QR_BRACES, "a range has a name", "write `{{L:0..3}}`",
     "range 0..3", "range ..3", "range a..3"),
    (QR_BRACES, "an integer is missing in this expression",
     "captures, numbers, `let`s, `config.…` and + - * / % may stand here",
     "form L+", "form L*", "form 2*"),
)  # fmt: skip

USAGE = {
    "under": "under PREFIX → TARGET PREFIX", "def": "def NAME = OPS", "let": "let NAME = VALUE",
    "param": "param NAME = VALUE | VALUE", "fuse": "fuse NAME = a, b", "rename": "rename OLD → NEW", "tie": "tie A = B",
    "include": 'include "FILE.rules"', "source": "source NAME", "target": "target NAME", "delete": "delete config.PATH",
    "format": "format NAME", "dialect": "dialect NAME", "element": "element e2m1, 2 in u8, low first, along -1",
    "block": "block [1, 16]", "value": "value codes * scale", "spelling": "spelling NAME",
    "for": "for FORMAT SPELLING {JSON}", "file": 'file "NAME.json" FORMAT {JSON}',
}  # fmt: skip

_NAMES = {
    "$END": "the end", "PATTERN": "a pattern", "NAME": "a name", "ITEM": "a name", "LABEL": "",
    "STRING": "a text in quotes", "NUMBER": "a number", "ARROW": "`→`", "CONFIG": "`config.…`", "REST": "`…`",
    "BRACES": "braces", "SIDE": "`source`", "PLUSEQ": "`+=`", "STARS": "`**`", "DOTS": "`..`", "EQ": "`=`", "PIPE": "`|`",
    "COMMA": "`,`", "COLON": "`:`", "SEMICOLON": "`;`", "AT": "`@`", "MAYBE": "`?`", "LPAR": "`(`", "RPAR": "`)`",
    "LSQB": "`[`", "RSQB": "`]`", "LBRACE": "`{`", "RBRACE": "`}`", "LAST": "`-1`", "FLAG": "`optional` or `inverse`",
    "PAIR": "`cat`, `stack` or `dense`",
}  # fmt: skip
_VALUES = {"NAME", "NUMBER", "STRING", "CONFIG", "LPAR", "LBRACE", "MINUS", "NOT", "LSQB"}
_CLAUSES = {c.upper() for c in CLAUSES}
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


def _expected(names: set[str], end: str) -> str:
    """Terminals in words: values, operators and clauses as one word each, marks before words, the end last."""
    known, words = set(names) - {"$END"}, []
    groups = (({"NAME", "NUMBER"}, _VALUES, "a value"), ({"PLUS"}, _OPERATORS, "an operator"), ({"WHEN"}, _CLAUSES, "a clause"))
    for signs, group, word in groups:
        if signs <= names:
            known -= group
            words.append(word)
    marks = sorted((_NAMES.get(n, f"`{n.lower()}`") for n in known), key=lambda w: (w[:1] == "a", w[1:2].isalpha(), w))
    words = [w for w in marks if w] + words + ([end] if "$END" in names else [])
    return f"expected {' or '.join(filter(None, (', '.join(words[:-1]), words[-1])))}" if words else ""


def _place(error, content: str) -> tuple[tuple[int, ...], int, str]:
    """(the last two parser states, offset, what stands there): a word's characters are all alike, the end is ""."""
    token = getattr(error, "token", None)
    at = len(content.rstrip()) if token is not None and token.type == "$END" else error.pos_in_stream
    here = content[at : at + 1 + content.startswith("=>", at)]
    return tuple(error.state.state_stack[-2:]), at, "word" if here.isalnum() or here == "_" else here


def _allowed(error) -> set[str]:
    """The terminals that may stand at the place. A state's own set holds what any use of its rule may be followed by."""
    conf, allowed = error.state.parse_conf, set()
    for terminal in {*(getattr(error, "allowed", None) or error.expected), "$END"}:
        stack = list(error.state.state_stack)
        while (found := conf.states[stack[-1]].get(terminal)) and not isinstance(found[1], int):  # a rule to reduce by
            del stack[len(stack) - len(found[1].expansion) :]
            stack.append(conf.states[stack[-1]][found[1].origin.name][1])
        if found or (terminal == "$END" and stack[-1] == conf.end_state):
            allowed.add(terminal)
    return allowed


@cache
def _hints() -> dict[tuple[tuple[int, ...], str | None], tuple[str, str, str]]:
    from lark.exceptions import UnexpectedInput

    from quantrules.lang.tables import lark_parser

    table: dict[tuple[tuple[int, ...], str | None], tuple[str, str, str]] = {}
    for kind, message, help, *snippets in HINTS:
        for snippet in snippets:
            start, _, content = snippet.partition(" ")
            try:
                lark_parser().parse(content.replace("¶", "¤"), start=start)
            except UnexpectedInput as error:
                state, _, here = _place(error, content.replace("¶", "¤"))
                table.setdefault((state, None if content.endswith("¶") else here), (kind, message, help))
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
    word, rest, before = _short(content[first:end]), _short(content[at:end]), _short(" ".join(content[:at].split()))
    begin, only = (content.split(maxsplit=1) or [""])[0], content.strip()
    close = difflib.get_close_matches(begin[:30], KEYWORDS, 1, 0.75) if start == "rule" and before == begin != only else []
    hint = _hints().get((state, here)) or (here and _hints().get((state, None)))
    allowed = _allowed(error)
    if not hint and here == "word" and "EXPECT" in allowed:
        hint = _CLAUSE
    inside = start in BRACES
    expected = _expected(allowed, "`}`" if inside else "the end")
    if start == "rule" and only in USAGE:
        help = f"write `{USAGE[only]}`; for a tensor of this name `{only} → keep`"
        hint = (QR_SYNTAX, f"`{only}` alone says nothing", help)
    elif close:
        hint, at = (QR_SYNTAX, f"`{begin}` begins no statement", f"did you mean `{close[0]}`?"), content.index(begin)
        end = at + len(begin)
    elif hint:
        kind, message, help = hint
        at = first if "{word}" in message else at
        if kind == QR_OP and ("{word}" in message or allowed == {"NAME"}):
            expected = "expected an op"
        values = {"word": word, "at": rest, "before": before, "clause": _clause(rest)}
        hint = (kind, message.format(**values), help.format(**values))
    else:
        usage = USAGE.get(only.split(maxsplit=1)[0]) if only and not inside else None
        help = f"write `{usage}`" if usage else "remove it" if "$END" in allowed else expected.replace("expected", "write", 1)
        hint = (QR_SYNTAX, f"`{rest}` cannot stand here" if here else "this ends too early", help)
    return Diagnostic(hint[0], hint[1], Span(text, base + at, base + max(end, at)), expected, help=hint[2])


def _short(text: str) -> str:
    return text if len(text) <= 60 else text[:59] + "…"


def _clause(word: str) -> str:
    """Help for a word that stands where a clause may."""
    close = [_OTHER_WORDS[word]] if word in _OTHER_WORDS else difflib.get_close_matches(word[:30], CLAUSES, 1, 0.6)
    if close:
        return f"did you mean `{close[0]}`?"
    return f"clauses begin with {either(CLAUSES)}; a name with a space is written in quotes"
