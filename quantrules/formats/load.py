"""Formats and dialects out of `format` and `dialect` blocks: checked, and turned into the data of `types`."""

from __future__ import annotations

from collections.abc import Iterable

from attrs import frozen

from quantrules.diagnostics import Diagnostic, RuleError, Span, define
from quantrules.lang import ast
from quantrules.types import DTYPE_BITS, Element, Format, GridDim, Part, Spelling

QR_FORMAT = define("QR401", "A format or dialect block that means nothing")

STYLES = ("names", "parts", "globs", "regex")
JOINS = ("follow", "equal", "collect", "max")
ELEMENT = "write `element CODEC, 2 in u8, low first, along -1`"


@frozen
class Dialect:
    """One way in which a quantization config says what a checkpoint holds. Templates are evaluated by plan.config.

    ignore: keys of lists of modules left dense, written in `style`. groups, layers: keys of groups with targets, and of
    {module: settings}. dense: globs of modules that are never quantised. tied: modules to name as dense where embeddings are.
    acts: formats whose activation scales its readers need.
    """

    name: str
    when: ast.Expression | None = None
    ignore: tuple[str, ...] = ()
    style: str = "names"
    groups: str = ""
    layers: str = ""
    dense: tuple[str, ...] = ()
    tied: tuple[str, ...] = ()
    acts: tuple[str, ...] = ()
    entries: tuple[tuple[str, str, ast.Expression], ...] = ()
    files: tuple[tuple[str, str, ast.Expression], ...] = ()


def statements(file: ast.File | ast.Include) -> Iterable[ast.Statement]:
    """The statements of a file, those of included files in their place."""
    for s in file.statements if isinstance(file, ast.File) else file.body:
        if isinstance(s, ast.Include):
            yield from statements(s)
        else:
            yield s


def load_formats(*files: ast.File) -> dict[str, Format]:
    """The formats of some files, by name. Raises RuleError with all that is wrong in them."""
    formats, errors = {}, []
    for block in (s for f in files for s in statements(f)):
        if isinstance(block, ast.FormatDef):
            reader = _Reader(errors)
            made = reader.format(block)
            if block.name in formats:
                reader.error(block.span, f"format {block.name} is defined twice", "rename one of them")
            elif block.name in (*DTYPE_BITS, "any", "several"):
                reader.error(block.span, f"`{block.name}` has a meaning of its own", "give the format another name")
            elif made:
                formats[block.name] = made
    if errors:
        raise RuleError(errors)
    return formats


def load_dialects(*files: ast.File) -> tuple[Dialect, ...]:
    """The dialects of some files, those of later files first: the first that recognises a config reads it."""
    dialects, errors = [], []
    for block in (s for f in reversed(files) for s in statements(f)):
        if isinstance(block, ast.DialectDef):
            reader = _Reader(errors)
            if any(d.name == block.name for d in dialects):
                reader.error(block.span, f"dialect {block.name} is defined twice", "rename one of them")
            dialects.append(reader.dialect(block))
    if errors:
        raise RuleError(errors)
    return tuple(dialects)


@frozen
class _Reader:
    errors: list[Diagnostic]

    def error(self, span: Span | None, message: str, help: str = "") -> None:
        self.errors.append(Diagnostic(QR_FORMAT, message, span, help=help))

    # ------------------------------------------------------------------------------------------------------- formats

    def format(self, block: ast.FormatDef) -> Format | None:
        before = len(self.errors)
        element = self.element(block)
        value = self.product(block.value) if block.value is not None else "codes"
        names = [s.name for s in block.spellings]
        for i, spelling in enumerate(block.spellings):
            if spelling.name in names[:i]:
                self.error(spelling.span, f"spelling {spelling.name} stands twice in format {block.name}", "rename one of them")
        if not names:
            self.error(block.span, f"format {block.name} has no spelling", "add `spelling NAME` with its parts below")
        if element is None and (block.block or block.value is not None):
            self.error(block.span, f"format {block.name} has a block or a value, but no element", ELEMENT)
        if element is not None and len(block.block) != 2 or any(n < 1 for n in block.block):
            self.error(block.span, f"format {block.name} needs `block [rows, columns]`, what shares one scale")
        if element is not None and block.value is None:
            self.error(block.span, f"format {block.name} needs `value`, such as `value codes * scale`")
        spellings = tuple(self.spelling(s, element) for s in block.spellings)
        for role in _roles(value):
            for s, node in zip(spellings, block.spellings):
                part = s.part(role)
                if part is None or part.optional:
                    how = "has only sometimes" if part else "lacks"
                    self.error(node.span, f"the value is a product with `{role}`, which spelling {s.name} {how}")
        return Format(block.name, element, block.block, value, spellings) if len(self.errors) == before else None

    def element(self, block: ast.FormatDef) -> Element | None:
        if block.element is None:
            return None
        codec, per, container, order = block.element
        if per < 1 or per > 1 and DTYPE_BITS.get(container, 0) % per:
            self.error(block.span, f"{per} codes do not share one {container}", ELEMENT)
        return Element(codec, per, order == "low")

    def product(self, value: ast.Expression):
        """`codes * (scale * global)` as nested tuples, in the order of multiplication."""
        if isinstance(value, ast.Name):
            return value.name
        if isinstance(value, ast.Binary) and value.op == "*":
            return self.product(value.left), self.product(value.right)
        self.error(value.span, "a value is a product of roles", "write it as `codes * (scale * global)`")
        return "codes"

    def spelling(self, block: ast.SpellingBlock, element: Element | None) -> Spelling:
        parts, dense = [], ""
        for i, node in enumerate(block.parts):
            parts.append(self.part(node))
            dense = dict(node.words).get("dense", dense)
            if any(p.role == node.role or p.suffix == node.suffix for p in block.parts[:i]):
                self.error(node.span, f"a part with role {node.role} or suffix {node.suffix!r} stands above already")
        if not parts or parts[0].role != "codes" or parts[0].optional:
            self.error(block.span, f"spelling {block.name} must begin with its codes", "write `codes .weight u8[N, K/2] …` first")
        elif element is not None:
            grid, span = parts[0].grid or (), block.parts[0].span
            if sorted(g.letter for g in grid if g.letter) != ["K", "N"]:
                self.error(span, "the codes' grid must name N and K once each", "write `[N, K/2]`: two codes in one container")
            elif grid[-1].letter == "K" and grid[-1].divisor % element.per:
                self.error(span, f"the element puts {element.per} codes into one number, the grid {grid[-1].divisor}")
            if len(parts) < 2:
                self.error(block.span, f"spelling {block.name} has no scale: nothing would tell its codes from dense numbers")
        return Spelling(block.name, tuple(parts), dense, block.declared, block.span)

    def part(self, node: ast.PartField) -> Part:
        for dtype in node.dtypes:
            if dtype not in DTYPE_BITS:
                self.error(node.span, f"{dtype} is not a dtype", f"one of {', '.join(DTYPE_BITS)}")
        words = dict(node.words)
        for word in ("cat", "stack"):
            if words.get(word, "follow") not in JOINS:
                self.error(node.span, f"{word} {words[word]}: not a way to join parts", f"one of {', '.join(JOINS)}")
        return Part(node.role, node.suffix, node.dtypes, self.grid(node), "optional" in words, "inverse" in words,
                    words.get("cat", "follow"), words.get("stack", "follow"))

    def grid(self, node: ast.PartField) -> tuple[GridDim, ...] | None:
        if len(node.grid) == 1 and isinstance(node.grid[0], ast.Rest):
            return None
        dims = []
        for dim in node.grid:
            letter, number = dim, ast.Literal(1)
            if isinstance(dim, ast.Literal):
                letter, number = ast.Name(""), dim
            elif isinstance(dim, ast.Binary) and dim.op == "/":
                letter, number = dim.left, dim.right
            fits = isinstance(letter, ast.Name) and letter.name in ("N", "K", "") and isinstance(number, ast.Literal)
            if not fits or type(number.value) is not int or number.value < 1:
                self.error(dim.span or node.span, "a dimension of a part is N, K, N/128, K/16 or a number")
                continue
            dims.append(GridDim(letter.name, number.value))
        return tuple(dims)

    # ------------------------------------------------------------------------------------------------------ dialects

    def dialect(self, block: ast.DialectDef) -> Dialect:
        fields = {}
        for key, value in block.reads.items if block.reads else ():
            texts = [getattr(i, "value", None) for i in (value.items if isinstance(value, ast.ListOf) else [value])]
            if key == "when":
                fields[key] = value
            elif key in ("style", "groups", "layers") and not isinstance(value, ast.ListOf) and isinstance(texts[0], str):
                fields[key] = texts[0]
            elif key in ("ignore", "dense", "tied", "acts") and all(isinstance(t, str) for t in texts):
                fields[key] = tuple(texts)
            else:
                self.error(value.span or block.span, f"`{key}` of `reads` is not understood",
                           "when: a condition; style, groups, layers: a text; ignore, dense, tied, acts: a list of texts")
        if fields.get("style", "names") not in STYLES:
            self.error(block.span, f"style {fields['style']!r} is not known", f"one of {', '.join(STYLES)}")
        return Dialect(block.name, **fields, entries=block.entries, files=block.files)


def _roles(value) -> list[str]:
    return [value] if isinstance(value, str) else [r for v in value for r in _roles(v)]
