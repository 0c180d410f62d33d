"""The syntax tree of rule files: frozen, with spans and comments. Equality ignores spans, so print ∘ parse can be compared.

Nothing here has meaning yet: names are not resolved, expressions not evaluated (lang.eval), defs not expanded (plan).
"""

from __future__ import annotations

from attrs import field, frozen

from quantrules.diagnostics import Span


def _span():
    return field(default=None, eq=False, repr=False, kw_only=True)


@frozen
class Node:
    span: Span = _span()


# ------------------------------------------------------------------------------------------------------- expressions


@frozen
class Literal(Node):
    """A number, a text, or a JSON constant (true, false, null)."""

    value: int | float | str | bool | None = field(eq=lambda v: (type(v), v))  # true is not 1


@frozen
class Name(Node):
    """A `let`, `param`, capture, op argument word, dtype or format: what it is depends on where it stands."""

    name: str


@frozen
class Config(Node):
    """config.a.b"""

    path: tuple[str, ...]


@frozen
class Binary(Node):
    """left op right; op is one of + - * / % == != < <= > >= and or in, "not in"."""

    op: str
    left: Expression
    right: Expression


@frozen
class Unary(Node):
    op: str  # "-" | "not"
    operand: Expression


@frozen
class Index(Node):
    """value[index]"""

    value: Expression
    index: Expression


@frozen
class Apply(Node):
    """A function of the expression language: len, count, min, max, ceil, default, exists, derive."""

    function: str
    args: tuple[Expression, ...]


@frozen
class ListOf(Node):
    items: tuple[Expression, ...]


@frozen
class DictOf(Node):
    """A JSON object, in config edits and dialects."""

    items: tuple[tuple[str, Expression], ...]


Expression = Literal | Name | Config | Binary | Unary | Index | Apply | ListOf | DictOf


# ---------------------------------------------------------------------------------------------------------- patterns


@frozen
class Lit(Node):
    """Text that stands for itself (quotes and backslashes already resolved)."""

    text: str


@frozen
class Star(Node):
    """`*`, or `{**name}`: any non-empty run of characters."""

    name: str = ""


@frozen
class Capture(Node):
    """`{L}`: one segment or a part of one; with bounds `{L:lo..hi}` an integer in a half-open range."""

    name: str
    low: Expression | None = None
    high: Expression | None = None

    @property
    def is_range(self) -> bool:
        return self.low is not None or self.high is not None


@frozen
class IntForm(Node):
    """`{2*L+1}` on the source side, any integer expression in targets."""

    value: Expression


@frozen
class Alternative(Node):
    left: str
    right: str  # == left where the text has no `=`


@frozen
class Alternation(Node):
    """`{x:a|b=c}`; name "" where it has none."""

    name: str
    items: tuple[Alternative, ...]


@frozen
class Member(Node):
    text: str
    optional: bool = False
    fill: str = ""  # "zeros"


@frozen
class Members(Node):
    """`{a,b,c}`, `{p:a,b?=zeros}`: ordered members of one unit."""

    name: str
    items: tuple[Member, ...]


@frozen
class Reference(Node):
    """`{m:leaf}`: an alternation or member list that a `let` holds, under the capture name m."""

    name: str
    let: str


PatternNode = Lit | Star | Capture | IntForm | Alternation | Members | Reference


@frozen
class Pattern(Node):
    nodes: tuple[PatternNode, ...]
    source: str = ""  # `fp8:P` is P in the source named fp8
    file: Pattern | None = None  # `P @ FILE`


# --------------------------------------------------------------------------------------------------------- pipelines


@frozen
class Argument(Node):
    """name=value, or a bare value where name is ""."""

    name: str
    value: Expression | Pipeline


@frozen
class Call(Node):
    """One step: an op or a def, with its arguments. `at(q, k: OPS)` has Name arguments and a last Argument("ops", Pipeline)."""

    name: str
    args: tuple[Argument, ...] = ()


@frozen
class Pipeline(Node):
    steps: tuple[Call, ...]


@frozen
class Rest(Node):
    """`…` or `...` within a type: any dimensions."""


@frozen
class TypeExpr(Node):
    """`bf16[2*N, H]`, `nvfp4[...; 2]`, or `bf16` alone (dims None)."""

    name: str  # a dtype or a format
    dims: tuple[Expression | Rest, ...] | None = None
    spans: Expression | None = None  # after the semicolon


# -------------------------------------------------------------------------------------------------------- statements


@frozen
class Commented(Node):
    """comments: full-line comments above it, without "# "; comment: the one at its end."""

    comments: tuple[str, ...] = field(default=(), kw_only=True)
    comment: str = field(default="", kw_only=True)


@frozen
class Statement(Commented):
    """section: the `## title` it is under; blank: whether a blank line stands above, for the printer."""

    section: str = field(default="", kw_only=True)
    blank: bool = field(default=False, eq=False, repr=False, kw_only=True)


@frozen
class SourcePattern(Node):
    pattern: Pattern
    type: TypeExpr | None = None


@frozen
class Rule(Statement):
    sources: tuple[SourcePattern, ...]
    pipeline: Pipeline
    targets: tuple[Pattern, ...] = ()
    type: TypeExpr | None = None  # of the target
    when: Expression | None = None
    excepts: tuple[Pattern, ...] = ()
    expect: tuple[Expression, ...] = ()  # alternatives: `expect 0 | 30`
    also: bool = False


@frozen
class Under(Statement):
    prefix: Pattern
    target: Pattern | None
    body: tuple[Statement, ...]


@frozen
class Def(Statement):
    name: str
    params: tuple[str, ...]
    pipeline: Pipeline
    when: Expression | None = None


@frozen
class Let(Statement):
    name: str
    value: Expression | Alternation | Members


@frozen
class Param(Statement):
    name: str
    choices: tuple[Expression, ...]  # the first is the default


@frozen
class Fuse(Statement):
    name: str
    members: tuple[Member, ...]


@frozen
class Rename(Statement):
    left: Pattern
    right: Pattern
    when: Expression | None = None


@frozen
class Tie(Statement):
    names: tuple[Pattern, ...]


@frozen
class ConfigEdit(Statement):
    """config.PATH = JSON, config.PATH += JSON, delete config.PATH."""

    path: tuple[str, ...]
    op: str  # "=" | "+=" | "delete"
    value: Expression | None = None


@frozen
class Include(Statement):
    """body: the included file's statements, once `lang.load` has read it; the printer writes the line only."""

    path: str
    body: tuple[Statement, ...] = field(default=(), eq=False)


@frozen
class Side(Statement):
    """source NAME, target NAME"""

    side: str  # "source" | "target"
    name: str


@frozen
class SchemaKey(Statement):
    """PATTERN : TYPE [when COND], in a schema."""

    pattern: Pattern
    type: TypeExpr
    when: Expression | None = None


@frozen
class PartField(Commented):
    """role  suffix  dtype|dtype[grid]  words…, such as `scale .weight_scale f8_e4m3[N, K/16] cat follow stack follow`."""

    role: str
    suffix: str
    dtypes: tuple[str, ...]  # () where the text says `any`
    grid: tuple[Expression | Rest, ...]
    words: tuple[tuple[str, str], ...]  # ("optional", ""), ("inverse", ""), ("cat", "follow"), ("dense", ".weight") …


@frozen
class SpellingBlock(Commented):
    name: str
    parts: tuple[PartField, ...]
    declared: Expression | None = None


@frozen
class FormatDef(Statement):
    """format NAME with its fields; `element` is (codec, count, container, "low" | "high"), count 1 where it stands alone."""

    name: str
    element: tuple[str, int, str, str] | None
    block: tuple[int, ...]
    value: Expression | None
    spellings: tuple[SpellingBlock, ...]


@frozen
class DialectDef(Statement):
    """dialect NAME: how a quantization config says what a checkpoint holds; see formats.rules.

    entries: (format name, spelling name or "", JSON template), in order.
    files: (file name, format name, JSON template): further config files, such as hf_quant_config.json.
    reads: how such a config is recognised and read.
    """

    name: str
    entries: tuple[tuple[str, str, Expression], ...]
    files: tuple[tuple[str, str, Expression], ...] = ()
    reads: DictOf | None = None


@frozen
class File(Node):
    statements: tuple[Statement, ...]
    comments: tuple[str, ...] = ()  # after the last statement
