"""Finding and checking the files of a checkpoint: a directory, one file, an index, or a model in the local Hub cache.

Headers are the truth. An index must say the same, name by name; what it does not mention is a stray, and is reported.
All that is wrong with a checkpoint comes in one CheckpointError; what is only odd is in `Source.warnings`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from attrs import frozen

from quantrules.checkpoint.files import UNREADABLE, open_regular, quoted, read_object, read_small, refuse
from quantrules.checkpoint.headers import Header, read_header
from quantrules.checkpoint.index import PICKLE, Index, disagreements, hashes, read_index
from quantrules.checkpoint.source import CONFIG_FILES, INDEX_SUFFIX, MANIFEST, SUFFIX, FileSource, SideFile, Stamp, is_inside
from quantrules.checkpoint.table import TableBuilder, paused_gc
from quantrules.diagnostics import CheckpointError, Diagnostic, define

NOT_FOUND = define("QR300", "No such checkpoint")
NOTHING = define("QR320", "No safetensors file in a directory")
AMBIGUOUS = define("QR321", "Several safetensors files, and no index that says which belong together")
MISSING = define("QR324", "A shard is missing")
CONFIG = define("QR329", "A config file is not legal")
STRAY = define("QR330", "Safetensors files that the index does not mention")
OUTSIDE = define("QR331", "Links that lead out of the checkpoint's directory")
NOT_COPIED = define("QR332", "Files that are not copied")
METADATA_DIFFERS = define("QR333", "Shards differ in their metadata")

CONFIG_LIMIT = 64 << 20  # bytes
_OTHER_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".bin.index.json", SUFFIX, INDEX_SUFFIX)


def open_source(path_or_id: str | os.PathLike) -> FileSource:
    """Open a checkpoint and check all its headers; no tensor is read. Raises CheckpointError with all that is wrong.

    A directory (with an index, or with one file), a safetensors file, an index file, or `org/model[@revision]` of the
    local Hub cache. A path that exists comes before the cache.
    """
    root, found = locate(path_or_id), _Findings()
    directory = root if root.is_dir() else root.parent
    with found.collected(), paused_gc():
        layout = choose(root)
        builder, stamps, metadata, named = TableBuilder(), [], {}, []
        for file, header, stamp in _headers(directory, layout.files, found):
            builder.add(file, header)
            stamps.append(stamp)
            named.append(hashes(header.names))
            _merge(metadata, header.metadata)
        table = builder.build()
        if layout.index and not found.errors and not layout.index.agrees(named):  # a shard not read would lack all its names
            found.errors += disagreements(layout.index, ((f, h.names) for f, h, _ in _headers(directory, layout.files, found)))
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
        beside = f"{_some(layout.strays)} beside {layout.index.path.name}, which does not mention them"
        found.warn(STRAY, f"{directory} has {beside}; not read", len(layout.strays))
    if differing := sorted(k for k, v in metadata.items() if v is None):
        found.warn(METADATA_DIFFERS, f"{directory}: shards differ in the metadata {_some(map(quoted, differing))}; left out")
    kept = {k: v for k, v in metadata.items() if v is not None}
    paths = tuple(directory / f for f in layout.files)
    return FileSource(root, paths, table, configs, kept, sides, tuple(found.warnings), tuple(stamps))


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
        message = f"{quoted(text)} is neither a path nor in the local Hub cache {cache}"
        raise refuse(NOT_FOUND, message, f"hf download {model[1]}/{model[2]}")
    return Path(os.path.realpath(snapshot))


def hub_cache() -> Path:
    """Where the Hub's own tools keep models: HF_HUB_CACHE, or hub in HF_HOME, or in the user's cache."""
    env = os.environ
    home = env.get("HF_HOME") or os.path.join(env.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.path.expanduser(env.get("HF_HUB_CACHE") or os.path.join(home, "hub")))


@frozen
class Layout:
    """The files of a checkpoint, by names relative to its directory, its index, and files that this does not mention."""

    files: tuple[str, ...]
    index: Index | None = None
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
            message = f"{root} has only {_some(pickles)}; a pickle runs code when it is read, so none is"
            raise refuse(PICKLE, message, "convert it to safetensors first")
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
    index = read_index(directory / name)
    return Layout(index.files, index, tuple(sorted(set(present) - set(index.files))))


# --------------------------------------------------------------------------------------------------------------- headers


def _headers(directory: Path, files: Iterable[str], found: _Findings) -> Iterator[tuple[str, Header, Stamp]]:
    """Each file's header; what is wrong with one goes into `found`."""
    for file in files:
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
            yield file, header, stamp


def _merge(metadata: dict[str, str | None], more: Mapping[str, str]) -> None:
    """Add a shard's metadata; a key on which shards differ becomes None."""
    for key, value in more.items():
        if metadata.setdefault(key, value) != value:
            metadata[key] = None


# --------------------------------------------------------------------------------------------------- everything else


def _side_files(directory: Path, found: _Findings) -> tuple[SideFile, ...]:
    """What is copied beside the tensors: no weights, no config, no index, no dot files, no folders behind links."""
    sides: list[SideFile] = []
    left: list[str] = []

    def unreadable(error: OSError) -> None:
        left.append(os.path.relpath(error.filename, directory) + "/")

    for folder, folders, names in os.walk(directory, onerror=unreadable):
        inner = os.path.relpath(folder, directory)
        prefix = "" if inner == "." else inner.replace(os.sep, "/") + "/"
        kept = sorted(f for f in folders if not f.startswith(".") and not os.path.islink(os.path.join(folder, f))
                      and is_inside(f) and not (_is_ours(f) and not prefix))  # fmt: skip
        left += [prefix + f + "/" for f in folders if f not in kept and not f.startswith(".")]
        folders[:] = kept
        for name in sorted(n for n in names if not n.startswith(".")):
            if not prefix and _is_ours(name):
                continue
            path = Path(folder, name)
            readable = os.path.isfile(path) and os.access(path, os.R_OK)
            if name.endswith(_OTHER_WEIGHTS) or not is_inside(name) or not readable:
                left.append(prefix + name)
            else:
                sides.append(SideFile(prefix + name, path))
    if left := sorted(left):
        why = "other weights, folders behind links, odd names, or not to be read"
        found.warn(NOT_COPIED, f"{directory}: not copied: {_some(left)} ({why})", len(left))
    return tuple(sides)


def _is_ours(name: str) -> bool:
    """Whether an output may have a file of its own by this name, beside its index."""
    return name in CONFIG_FILES or name == MANIFEST or name.endswith((SUFFIX, INDEX_SUFFIX))


def _warn_links(directory: Path, names: Iterable[str], found: _Findings) -> None:
    """Links are followed. Those of the Hub cache lead from a snapshot to its blobs; others that leave are named."""
    home = [os.path.realpath(directory)]
    if directory.parent.name == "snapshots":
        home.append(os.path.realpath(directory.parent.parent / "blobs"))
    inside = tuple(h.rstrip("/") + "/" for h in home)
    reals = ((n, os.path.realpath(directory / n)) for n in names)
    if out := [f"{n} -> {real}" for n, real in reals if not real.startswith(inside)]:
        found.warn(OUTSIDE, f"{directory}: links lead out of the directory: {_some(out)}", len(out))
