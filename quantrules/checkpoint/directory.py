"""Finding and checking the files of a checkpoint: a directory, one file, an index, or a model in the local Hub cache.

Headers are the truth. An index must say the same, name by name; what it does not mention is a stray, and is reported.
All that is wrong with a checkpoint comes in one CheckpointError; what is only odd is in `Source.warnings`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from attrs import field, frozen

from quantrules.checkpoint.files import UNREADABLE, open_regular, quoted, read_small, refuse, strict_json
from quantrules.checkpoint.headers import Header, read_header
from quantrules.checkpoint.source import CONFIG_FILES, INDEX_SUFFIX, MANIFEST, SUFFIX, FileSource, SideFile, Stamp, is_inside
from quantrules.checkpoint.table import TableBuilder, paused_gc
from quantrules.diagnostics import CheckpointError, Diagnostic, define

NOT_FOUND = define("QR300", "No such checkpoint")
NOTHING = define("QR320", "No safetensors file in a directory")
AMBIGUOUS = define("QR321", "Several safetensors files, and no index that says which belong together")
INDEX = define("QR322", "An index is not legal")
UNSAFE = define("QR323", "An index names a file outside its directory")
MISSING = define("QR324", "A shard is missing")
ABSENT = define("QR325", "An index lists a tensor that its shard does not hold")
UNLISTED = define("QR326", "A shard holds a tensor that the index does not list")
DOUBLE = define("QR327", "A tensor stands in two shards")
PICKLE = define("QR328", "Pickled checkpoints are not read")
CONFIG = define("QR329", "A config file is not legal")
STRAY = define("QR330", "Safetensors files that the index does not mention")
OUTSIDE = define("QR331", "Links that lead out of the checkpoint's directory")
NOT_COPIED = define("QR332", "Files that are not copied")
METADATA_DIFFERS = define("QR333", "Shards differ in their metadata")

INDEX_LIMIT, CONFIG_LIMIT = 512 << 20, 64 << 20  # bytes
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".bin.index.json", SUFFIX, INDEX_SUFFIX)


def open_source(path_or_id: str | os.PathLike) -> FileSource:
    """Open a checkpoint and check all its headers; no tensor is read. Raises CheckpointError with all that is wrong.

    A directory (with an index, or with one file), a safetensors file, an index file, or `org/model[@revision]` of the
    local Hub cache. A path that exists comes before the cache.
    """
    root, found = locate(path_or_id), _Findings()
    directory = root if root.is_dir() else root.parent
    with found.collected():
        layout = choose(root)
        builder, stamps, metadata = TableBuilder(), [], {}
        with paused_gc():
            for file, header, stamp in _headers(directory, layout, found):
                builder.add(file, header)
                stamps.append(stamp)
                _merge(metadata, header.metadata)
            table = builder.build()
    configs = {}
    for name in CONFIG_FILES:
        with found.collected():
            if os.path.lexists(directory / name):
                configs[name] = read_object(directory / name, CONFIG_LIMIT, CONFIG)
    if found.errors:
        raise CheckpointError(found.errors)
    sides = _side_files(directory, found) if root.is_dir() else ()
    _warn_links(directory, [*layout.files, *(s.name for s in sides), *configs], found)
    if layout.strays:
        found.warn(STRAY, f"{directory}: {', '.join(layout.strays)} {_are(layout.strays)} not in {layout.index}, and not read", len(layout.strays))
    if differing := sorted(k for k, v in metadata.items() if v is None):
        found.warn(METADATA_DIFFERS, f"{directory}: shards differ in the metadata {', '.join(map(quoted, differing))}, which is left out")
    kept = {k: v for k, v in metadata.items() if v is not None}
    return FileSource(root, tuple(directory / f for f in layout.files), table, configs, kept, sides, tuple(found.warnings), tuple(stamps))


class _Findings:
    """Errors and warnings of one checkpoint, as they come."""

    def __init__(self) -> None:
        self.errors: list[Diagnostic] = []
        self.warnings: list[Diagnostic] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as e:
            self.errors += e.diagnostics

    def warn(self, code: str, message: str, count: int = 1, help: str = "") -> None:
        self.warnings.append(Diagnostic(code, message, severity="warning", count=count, help=help))


def _are(items) -> str:
    return "is" if len(items) == 1 else "are"


# ------------------------------------------------------------------------------------------------------- which files


def locate(path_or_id: str | os.PathLike) -> Path:
    """The directory or file that is meant, with links in its own path resolved."""
    text = os.fspath(path_or_id)
    if text and "\0" not in text and os.path.exists(os.path.expanduser(text)):
        return Path(os.path.realpath(os.path.expanduser(text)))
    model = re.fullmatch(r"([\w.-]+)/([\w.-]+)(?:@([\w./-]+))?", text)
    if not model or ".." in text:
        raise refuse(NOT_FOUND, f"{quoted(text)}: no such file or directory")
    cache = hub_cache()
    repository = cache / f"models--{model[1]}--{model[2]}"
    revision = model[3] or "main"
    reference = repository / "refs" / revision
    if os.path.isfile(reference):
        revision = read_small(reference, 1000, str(reference)).decode("ascii", "replace").strip()
    snapshot = repository / "snapshots" / revision
    if not re.fullmatch(r"[\w-][\w.-]*", revision) or not os.path.isdir(snapshot):
        raise refuse(NOT_FOUND, f"{quoted(text)} is neither a path nor in the local Hub cache {cache}", f"hf download {model[1]}/{model[2]}")
    return Path(os.path.realpath(snapshot))


def hub_cache() -> Path:
    """Where the Hub's own tools keep models: HF_HUB_CACHE, or hub in HF_HOME, or in the user's cache."""
    env = os.environ
    home = env.get("HF_HOME") or os.path.join(env.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(env.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


@frozen
class Layout:
    """The files of a checkpoint, by names relative to its directory, and what the index says of them."""

    files: tuple[str, ...]
    index: str = ""
    weight_map: Mapping[str, str] | None = field(default=None, repr=False)
    strays: tuple[str, ...] = ()


def choose(root: Path) -> Layout:
    """Which files belong to the checkpoint."""
    if not root.is_dir():
        if root.name.endswith(INDEX_SUFFIX):
            return _indexed(root.parent, root.name, ())
        return Layout((root.name,))
    try:
        names = sorted(n for n in os.listdir(root) if not n.startswith("."))
    except OSError as e:
        raise refuse(UNREADABLE, f"{root}: {e.strerror}") from None
    shards = tuple(n for n in names if n.endswith(SUFFIX))
    indexes = [n for n in names if n.endswith(INDEX_SUFFIX)]
    preferred = "model" + INDEX_SUFFIX
    if preferred in indexes or len(indexes) == 1:
        return _indexed(root, preferred if preferred in indexes else indexes[0], shards)
    if indexes:
        raise refuse(AMBIGUOUS, f"{root} has several indexes: {', '.join(indexes)}", "give the path of the one that is meant")
    if not shards:
        pickles = [n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt"))]
        if pickles:
            raise refuse(PICKLE, f"{root} has only {_some(pickles)}; a pickle runs code when it is read, so none is", "convert it to safetensors first")
        raise refuse(NOTHING, f"no safetensors file in {root}")
    numbered = re.search(r"-of-0*([0-9]+)\.safetensors$", shards[0])
    if len(shards) > 1 or numbered and numbered[1] != "1":
        raise refuse(AMBIGUOUS, f"{root} has {_some(shards)} and no {preferred}",
                     "download the index too, or give the path of the one file that is meant")  # fmt: skip
    return Layout(shards)


def _some(names: Iterable[str], most: int = 5) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _indexed(directory: Path, name: str, present: tuple[str, ...]) -> Layout:
    path = directory / name
    weight_map = read_weight_map(path)
    if not isinstance(weight_map, dict) or not set(map(type, weight_map.values())) <= {str}:
        raise refuse(INDEX, f"{path}: `weight_map` is not an object of strings")
    files = sorted(set(weight_map.values()))
    if unsafe := [f for f in files if not is_inside(f)]:
        raise CheckpointError([Diagnostic(UNSAFE, f"{path} names the shard {quoted(f)}", help="a shard lies in the index's directory") for f in unsafe])
    if pickles := [f for f in files if not f.endswith(SUFFIX)]:
        raise refuse(PICKLE, f"{path} names {_some(pickles)}; only {SUFFIX} files are read", "convert it to safetensors first")
    return Layout(tuple(files), name, weight_map, tuple(sorted(set(present) - set(files))))


def read_weight_map(path: Path) -> object:
    """`weight_map` of an index: the short way where its text is canonical, else the general one."""
    raw = read_small(path, INDEX_LIMIT, str(path))
    try:
        text = raw.decode("utf-8")
        del raw
        found = canonical_weight_map(text)
        return found if found is not None else _object(text, path, INDEX).get("weight_map")
    except UnicodeDecodeError as e:
        raise refuse(INDEX, f"{path}: not legal JSON: {e}") from None


_MAP = re.compile(r'"weight_map":\s*\{\s*(?="[^"\\]*"(:\s*)"[^"\\]*"(,\s*)")')


def canonical_weight_map(text: str, chunk: int = 1 << 20) -> dict[str, str] | None:
    """The weight_map of an index as json.dumps writes it, last in the text and without escapes; None for any other.

    Cut at its quotes, a piece at a time: half the time of a parser and, with one string a file, a third of the memory.
    """
    start, end = _MAP.search(text), text.rfind('"') + 1
    try:
        rest = strict_json(text[: start.end()] + text[end:], floats=True) if start and "\\" not in text else {}
    except ValueError:
        return None
    if rest.get("weight_map") != {}:
        return None
    colon, comma = start.groups()
    result: dict[str, str] = {}
    files: dict[str, str] = {}
    at, count = start.end(), 0
    while at < end:
        cut = text.find(f'"{comma}"', at + chunk, end) + 1 or end
        pieces = text[at:cut].split('"')
        names, values = pieces[1::4], pieces[3::4]
        seams = {*pieces[4:-1:4]} <= {comma} and {*pieces[2::4]} == {colon} and pieces[0] == pieces[-1] == "" and len(pieces) % 4 == 1
        if not seams or not "".join(names).isprintable() or not all(f.isprintable() for f in {*values} - files.keys()):
            return None
        files.update((f, f) for f in values if f not in files)
        result.update(zip(names, map(files.__getitem__, values)))
        at, count = cut + (len(comma) if cut < end else 0), count + len(names)
    return result if len(result) == count else None


def read_object(path: Path, limit: int, code: str) -> dict:
    """A JSON object from a file; names that stand twice are refused."""
    try:
        return _object(read_small(path, limit, str(path)).decode("utf-8"), path, code)
    except UnicodeDecodeError as e:
        raise refuse(code, f"{path}: not legal JSON: {e}") from None


def _object(text: str, path: Path, code: str) -> dict:
    try:
        value = strict_json(text, floats=True)
    except ValueError as e:
        raise refuse(code, f"{path}: not legal JSON: {e}") from None
    if not isinstance(value, dict):
        raise refuse(code, f"{path}: not a JSON object")
    return value


# ----------------------------------------------------------------------------------------------- headers and an index


def _headers(directory: Path, layout: Layout, found: _Findings) -> Iterator[tuple[str, Header, Stamp]]:
    """Each file's header, checked against the index; what is wrong goes into `found`."""
    listed = Counter(layout.weight_map.values()) if layout.weight_map is not None else {}
    astray: list[tuple[str, str]] = []  # (name, file) that the index has elsewhere or nowhere
    absent: dict[str, str] = {}  # name -> file in which the index has it in vain
    for file in layout.files:
        path = directory / file
        with found.collected():
            if not os.path.exists(path):  # unlike pathlib's, it takes any name
                nowhere = ", a link that leads nowhere" if os.path.islink(path) else ""
                raise refuse(MISSING, f"{directory}/{quoted(file)} is missing{nowhere}", "is the download complete?")
            fd = open_regular(path)
            try:
                stamp = Stamp.of(fd)
                header = read_header(fd, stamp.size, str(path))
            finally:
                os.close(fd)
            if layout.weight_map is not None:
                places = list(map(layout.weight_map.get, header.names))
                if places.count(file) != len(places):
                    astray += [(n, file) for n, place in zip(header.names, places) if place != file]
                if places.count(file) != listed[file]:
                    names = set(header.names)
                    absent.update((n, f) for n, f in layout.weight_map.items() if f == file and n not in names)
            yield file, header, stamp
    if not found.errors:  # a shard that was not read would make its names absent
        found.errors += _index_errors(directory / layout.index, layout.weight_map, astray, absent)


def _index_errors(index: Path, weight_map: Mapping[str, str] | None, astray, absent: Mapping[str, str]) -> list[Diagnostic]:
    """One diagnostic per file and way to be wrong, each with the first names."""
    told: dict[tuple[str, str], list[str]] = {}
    moved = set()
    for name, file in astray:
        place = weight_map.get(name)
        if place is None:
            told.setdefault((UNLISTED, f"is in {file}, and {index} does not list it"), []).append(name)
        elif name in absent:
            moved.add(name)
            told.setdefault((ABSENT, f"is in {file}; {index} says {place}, which does not hold it"), []).append(name)
        else:
            told.setdefault((DOUBLE, f"is in both {place} and {file} ({index} says {place})"), []).append(name)
    for name, file in absent.items():
        if name not in moved:
            told.setdefault((ABSENT, f"is listed by {index} for {file}, whose header does not hold it"), []).append(name)
    return [
        Diagnostic(code, f"{quoted(names[0])} {text}", count=len(names),
                   notes=tuple(map(quoted, names[1:5])) + ((f"and {len(names) - 5} more",) if len(names) > 5 else ()))
        for (code, text), names in told.items()
    ]  # fmt: skip


def _merge(metadata: dict[str, str | None], more: Mapping[str, str]) -> None:
    """Add a shard's metadata; a key on which shards differ becomes None."""
    for key, value in more.items():
        if metadata.setdefault(key, value) != value:
            metadata[key] = None


# --------------------------------------------------------------------------------------------------- everything else


def _side_files(directory: Path, found: _Findings) -> tuple[SideFile, ...]:
    """What is copied beside the tensors: no weights, no config, no index, no dot files, no folders behind links."""
    sides, left = [], []
    for folder, folders, names in os.walk(directory, onerror=lambda e: left.append(os.path.relpath(e.filename, directory) + "/")):
        inner = os.path.relpath(folder, directory)
        prefix = "" if inner == "." else inner.replace(os.sep, "/") + "/"
        left += [prefix + f + "/" for f in folders if os.path.islink(os.path.join(folder, f))]
        folders[:] = sorted(f for f in folders if not f.startswith(".") and not os.path.islink(os.path.join(folder, f)))
        for name in sorted(n for n in names if not n.startswith(".")):
            if not prefix and (name in CONFIG_FILES or name == MANIFEST or name.endswith((SUFFIX, INDEX_SUFFIX))):
                continue
            path = Path(folder, name)
            if name.endswith(_OTHER_WEIGHTS) or not os.path.isfile(path):
                left.append(prefix + name)
            else:
                sides.append(SideFile(prefix + name, path))
    if left := sorted(left):
        found.warn(NOT_COPIED, f"{directory}: {_some(left)} {_are(left)} not copied: other weights, folders behind links, or no regular files", len(left))
    return tuple(sides)


def _warn_links(directory: Path, names: Iterable[str], found: _Findings) -> None:
    """Links are followed. Those of the Hub cache lead from a snapshot to its blobs; others that leave are named."""
    home = [os.path.realpath(directory)]
    if directory.parent.name == "snapshots":
        home.append(os.path.realpath(directory.parent.parent / "blobs"))
    out = {n: real for n in names if not (real := os.path.realpath(directory / n)).startswith(tuple(h.rstrip("/") + "/" for h in home))}
    if out:
        found.warn(OUTSIDE, f"{directory}: {_some(f'{n} -> {real}' for n, real in out.items())} {'leads' if len(out) == 1 else 'lead'} out of the directory", len(out))
