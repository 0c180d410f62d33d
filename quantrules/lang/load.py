"""Rule files from disk, with what they include. Only regular files under the search path are read, each up to a size."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from attrs import define, evolve, field

from quantrules.diagnostics import Diagnostic, RuleError, Span
from quantrules.diagnostics import define as code
from quantrules.lang import ast
from quantrules.lang.mistakes import nearest
from quantrules.lang.parser import MAX_CHARACTERS, parse

QR_FILE = code("QR016", "A rule file that cannot be read")
QR_OUTSIDE = code("QR017", "An include that leaves the search path")
QR_CYCLE = code("QR018", "Files that include each other, or too many")

MAX_INCLUDES = 200  # in all: files that include each other twice must not grow without bound
MAX_DEPTH = 16
SUFFIX = ".rules"


def load(rules: str | Path, search: Iterable[str | Path] = (), name: str = "<text>") -> ast.File:
    """The syntax tree of a rule file, its includes read into `Include.body`.

    `rules` is a Path; or a str that is a path, the name of a file in a directory of `search` (with or without .rules), or
    where it holds a line end or an arrow, the text itself. An include is looked up beside the including file, then in
    `search`, and stays under these and the directory of the first file. RuleError holds the mistakes of all files.
    """
    directories = [Path(d).resolve() for d in search]
    if isinstance(rules, str) and any(mark in rules for mark in ("\n", "→", "->", " : ")):
        loader = _Loader(directories, directories)
        file = loader.parsed(rules, name)
        file = file and loader.included(file, None, ())
    else:
        path = _find(rules, directories)
        loader = _Loader(directories, [*directories, path.resolve().parent])
        file = loader.file(path, None, (), str(rules) if isinstance(rules, Path) else "")
    if loader.found:
        raise RuleError(loader.found)
    return file


def _find(rules: str | Path, directories: list[Path]) -> Path:
    path = Path(rules)
    tried = [path]
    if isinstance(rules, str) and not path.is_absolute() and ".." not in path.parts:
        tried += [d / f"{rules}{suffix}" for d in directories for suffix in ("", SUFFIX)]
    for candidate in tried:
        if os.path.exists(candidate) and not os.path.isdir(candidate):
            return candidate
    if os.path.isdir(path):
        raise RuleError(Diagnostic(QR_FILE, f"{str(rules)!r} is a directory", help="give the path of a rule file in it"))
    known = [n.removesuffix(SUFFIX) if path.suffix != SUFFIX else n for d in [*directories, path.parent] for n in _names(d)]
    raise RuleError(Diagnostic(QR_FILE, f"there is no rule file {str(rules)!r}", help=nearest(path.name, known)))


def _names(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(e.name for _, e in zip(range(5000), entries) if e.name.endswith(SUFFIX) and e.is_file())
    except OSError:
        return []


def read_text(path: Path) -> str:
    """The text of a regular file of bounded size. OSError or ValueError says what it is instead."""
    with open(path, "rb", opener=lambda p, flags: os.open(p, flags | os.O_NONBLOCK)) as file:  # a FIFO must not make us wait
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        content = file.read(4 * MAX_CHARACTERS + 1)
    if len(content) > 4 * MAX_CHARACTERS:
        raise ValueError(f"it has more than {4 * MAX_CHARACTERS} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None


@define
class _Loader:
    search: list[Path]
    roots: list[Path]  # what includes may not leave
    found: list[Diagnostic] = field(factory=list)
    files: dict[Path, ast.File | None] = field(factory=dict)
    includes: int = 0

    def parsed(self, text: str, name: str) -> ast.File | None:
        try:
            return parse(text, name)
        except RuleError as error:
            self.found += error.diagnostics
            return None

    def file(self, path: Path, span: Span | None, above: tuple[Path, ...], name: str = "") -> ast.File | None:
        """A file with its includes; `above` are the files that led to it."""
        real = path.resolve()
        if real not in self.files:
            self.files[real] = None
            try:
                self.files[real] = self.parsed(read_text(real), name or str(path))
            except (OSError, ValueError) as error:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                self.found.append(Diagnostic(QR_FILE, f"{path} cannot be read: {reason}", span, help="give a rule file in UTF-8"))
        file = self.files[real]
        return file and self.included(file, real, (*above, real))

    def included(self, file: ast.File, path: Path | None, above: tuple[Path, ...]) -> ast.File:
        return evolve(file, statements=self.statements(file.statements, path, above))

    def statements(self, statements: Iterable[ast.Statement], path: Path | None, above: tuple[Path, ...]) -> tuple:
        made = []
        for statement in statements:
            if isinstance(statement, ast.Under):
                statement = evolve(statement, body=self.statements(statement.body, path, above))
            elif isinstance(statement, ast.Include) and (target := self.target(statement, path, above)):
                file = self.file(target, statement.span, above)
                statement = evolve(statement, body=file.statements if file else ())
            made.append(statement)
        return tuple(made)

    def target(self, include: ast.Include, path: Path | None, above: tuple[Path, ...]) -> Path | None:
        """The file that an include names, or None after a report."""
        self.includes += 1
        if self.includes > MAX_INCLUDES:
            if self.includes == MAX_INCLUDES + 1:
                self.error(QR_CYCLE, f"more than {MAX_INCLUDES} includes", include, "include each file once")
            return None
        bases = ([path.parent] if path else []) + [d for d in self.search if not path or d != path.parent]
        if Path(include.path).is_absolute() or "\0" in include.path:
            self.error(QR_OUTSIDE, "an include's path is relative", include, "write the path from the including file")
            return None
        candidates = [(base / include.path).resolve() for base in bases]
        inside = [c for c in candidates if any(c.is_relative_to(r) for r in self.roots)]
        target = next((c for c in inside if os.path.lexists(c)), None)
        if target in above or len(above) > MAX_DEPTH:
            chain = " → ".join(p.name for p in (*above, target) if p)
            self.error(QR_CYCLE,
                       f"files include each other: {chain}" if target in above else f"includes are more than {MAX_DEPTH} deep",
                       include, "remove one of the includes")
            return None
        if target is None and not inside:
            self.error(QR_OUTSIDE, f"{include.path!r} lies outside the rule search path", include,
                       "move the file under it, or add its directory to the search path")
        elif target is None:
            folder = Path(include.path).parent
            self.error(QR_FILE, f"there is no file {include.path!r}", include,
                       nearest(Path(include.path).name, [n for b in bases for n in _names(b / folder)]))
        return target

    def error(self, code: str, message: str, include: ast.Include, help: str) -> None:
        self.found.append(Diagnostic(code, message, include.span, help=help))
