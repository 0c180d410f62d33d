"""An output directory, from its first byte to its index.

What is half done never looks like a checkpoint: shards are written as `.NAME.partial`, config files come last but one
and the index last; a run that fails removes what it made. A run that was killed leaves a lock file that lists what it
made, so the next run may remove exactly that. With `overwrite` an old output goes before the new one is written:
the files that its manifest lists, or else safetensors files, index and config files; anything else stays.

No link is written through: files are made new beside their place, below a directory descriptor, and renamed into it.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from quantrules.checkpoint.files import Descriptors, copy_range, open_regular, read_object, write_at
from quantrules.checkpoint.place import Placing
from quantrules.checkpoint.source import CONFIG_FILES, INDEX_SUFFIX, MANIFEST, SUFFIX, SideFile, Source, as_bytes, is_inside
from quantrules.diagnostics import CheckpointError, Diagnostic, RunError, define

IS_SOURCE = define("QR342", "The output directory is, holds or lies in a source")
NOT_EMPTY = define("QR343", "The output directory holds something else")
LOCKED = define("QR344", "Another run writes into the output directory")
NO_SPACE = define("QR345", "The disk has no room for the output")
FAILED = define("QR346", "The output cannot be written")

LOCK = ".quantrules.lock"
INDEX = "model" + INDEX_SUFFIX
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def _error(code: str, message: str, help: str = "") -> RunError:
    return RunError(Diagnostic(code, message, help=help))


@contextmanager
def _told(what: str | os.PathLike) -> Iterator[None]:
    """OSErrors as RunErrors that name the file and say what to do."""
    try:
        yield
    except OSError as e:
        full = e.errno in (errno.ENOSPC, errno.EDQUOT)
        help = "free some room, or give another output directory" if full else "give a directory that can be written"
        raise _error(NO_SPACE if full else FAILED, f"{what}: {e.strerror or e}", help) from e


class Output:
    """The files of one run. A context manager: whoever leaves it before `finish` leaves nothing behind.

    sides are copied as they are; configs (file name → object) are written in the order of their keys; sources are only
    looked at, so that none is written onto. Safe for threads between entering and `finish`. Raises RunError.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        placing: Placing,
        *,
        sides: Sequence[SideFile] = (),
        configs: Mapping[str, Mapping] = {},
        sources: Sequence[Source] = (),
        overwrite: bool = False,
    ):
        self.path, self.placing = Path(os.path.realpath(path)), placing
        self._sides, self._configs, self._sources, self._overwrite = sides, configs, sources, overwrite
        self._folder = self._lock = -1
        self._owned = False  # whether the lock file lists what this run makes, and no longer what an earlier one did
        self._made: list[str] = []  # files in place or partial, and folders with a / behind, in order
        self._descriptors = Descriptors(
            lambda shard: os.open(_partial(placing.files[shard]), os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._folder)
        )

    @property
    def names(self) -> list[str]:
        """Every file that a finished run has made."""
        return sorted([*self.placing.files, *(s.name for s in self._sides), *self._configs, MANIFEST, INDEX])

    # ------------------------------------------------------------------------------------------------- begin and end

    def __enter__(self) -> Output:
        refuse_sources(self.path, self._sources)
        with _told(self.path):
            self._new = not self.path.exists()
            self.path.mkdir(parents=True, exist_ok=True)
            self._folder = os.open(self.path, _FOLDER)
        try:
            with _told(self.path / LOCK):
                stale = self._take_lock()
            old = self._old(stale)
            self._check_space(old)
            with _told(self.path):
                for name in old:
                    self._remove(name)
                self._owned = True
                os.ftruncate(self._lock, 0)
                write_at(self._lock, 0, memoryview("\n".join(self.names).encode()))
            for shard, file in enumerate(self.placing.files):
                with _told(self.path / file):
                    self._allocate(shard)
            return self
        except BaseException:
            self.abort()
            raise

    def __exit__(self, *_) -> None:
        self.abort()

    def finish(self, manifest: Mapping = {}) -> None:
        """Copy side files, write manifest and config, and last the index: only now is it a checkpoint."""
        open_shards = [f for f in self.placing.files if _partial(f) in self._made]
        assert not open_shards, f"unfinished: {open_shards}"
        for side in self._sides:
            with _told(self.path / side.name):
                self._copy_file(side)
        texts = {MANIFEST: {**manifest, "files": self.names}, **self._configs}
        for name, value in texts.items():
            with _told(self.path / name):
                self._write_file(name, (json.dumps(value, indent=2, sort_keys=name == MANIFEST) + "\n").encode())
        with _told(self.path / INDEX):
            os.fsync(self._folder)
            self._write_file(INDEX, self.placing.index())
            os.fsync(self._folder)
        self._made.clear()
        self._new = False
        self.abort()  # nothing is left to remove but the lock

    def abort(self) -> None:
        """Remove what this run made, and the directory if it made that. Does nothing after `finish`."""
        if self._folder < 0:
            return
        self._descriptors.close()
        for name in reversed(self._made):
            with suppress(OSError):
                self._remove(name)
        self._made.clear()
        if self._lock >= 0:
            if self._owned or not os.fstat(self._lock).st_size:  # the list of a run that was killed is kept for the next one
                with suppress(OSError):
                    os.unlink(LOCK, dir_fd=self._folder)
            os.close(self._lock)
        os.close(self._folder)
        self._folder = self._lock = -1
        if self._new:
            with suppress(OSError):
                self.path.rmdir()

    # -------------------------------------------------------------------------------------------------------- shards

    def write_at(self, shard: int, offset: int, data: memoryview | np.ndarray) -> None:
        """Write bytes at an absolute offset of a shard, within its data."""
        view = as_bytes(data)
        self._check_range(shard, offset, len(view))
        with _told(self.path / self.placing.files[shard]), self._descriptors.use(shard) as fd:
            write_at(fd, offset, view)

    def copy(self, source_fd: int, source_offset: int, shard: int, offset: int, count: int, shown: str = "the source") -> None:
        """Copy bytes of an open file into a shard, within the kernel where it can."""
        self._check_range(shard, offset, count)
        with _told(self.path / self.placing.files[shard]), self._descriptors.use(shard) as fd:
            copy_range(source_fd, source_offset, fd, offset, count, shown)

    def _check_range(self, shard: int, offset: int, count: int) -> None:
        assert len(self.placing.headers[shard]) <= offset and offset + count <= self.placing.sizes[shard], (shard, offset, count)

    def finish_shard(self, shard: int) -> None:
        """Flush a shard whose bytes are all there, and give it its name."""
        file = self.placing.files[shard]
        with _told(self.path / file):
            with self._descriptors.use(shard) as fd:
                os.fsync(fd)
            self._descriptors.close(shard)
            self._rename(self._folder, file, file)

    def _allocate(self, shard: int) -> None:
        fd = os.open(_partial(self.placing.files[shard]), _NEW, 0o666, dir_fd=self._folder)
        self._made.append(_partial(self.placing.files[shard]))
        try:
            try:
                os.posix_fallocate(fd, 0, self.placing.sizes[shard])
            except OSError as e:
                if e.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                    raise
                os.ftruncate(fd, self.placing.sizes[shard])
            write_at(fd, 0, memoryview(self.placing.headers[shard]))
        finally:
            os.close(fd)

    # --------------------------------------------------------------------------------------------------- small files

    def _rename(self, folder: int, leaf: str, name: str) -> None:
        """From partial to final; what is in the way, a link too, is replaced and not followed."""
        os.rename(_partial(leaf), leaf, src_dir_fd=folder, dst_dir_fd=folder)
        self._made[self._made.index(_partial(name))] = name

    def _write_file(self, name: str, data: bytes) -> None:
        with self._making(name) as fd:
            write_at(fd, 0, memoryview(data))

    def _copy_file(self, side: SideFile) -> None:
        source = open_regular(side.path)
        try:
            with self._making(side.name) as fd:
                copy_range(source, 0, fd, 0, os.fstat(source).st_size, str(side.path))
        finally:
            os.close(source)

    @contextmanager
    def _making(self, name: str) -> Iterator[int]:
        """A descriptor of a new partial file, which is flushed and renamed in the end."""
        with self._parent(name, make=True) as (folder, leaf):
            fd = os.open(_partial(leaf), _NEW, 0o666, dir_fd=folder)
            self._made.append(_partial(name))
            try:
                yield fd
                os.fsync(fd)
            finally:
                os.close(fd)
            self._rename(folder, leaf, name)

    @contextmanager
    def _parent(self, name: str, make: bool = False) -> Iterator[tuple[int, str]]:
        """(descriptor of the folder that holds `name`, last part of the name); a link on the way is an error."""
        *folders, leaf = name.split("/")
        fd, at = self._folder, ""
        try:
            for part in folders:
                at += part + "/"
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(part, dir_fd=fd)
                        self._made.append(at)
                inner = os.open(part, _FOLDER, dir_fd=fd)
                if fd != self._folder:
                    os.close(fd)
                fd = inner
            yield fd, leaf
        finally:
            if fd != self._folder:
                os.close(fd)

    def _remove(self, name: str) -> None:
        """Remove a file, a link, or (with a / behind) an empty folder; one that is gone is no matter."""
        with suppress(FileNotFoundError, NotADirectoryError), self._parent(name.rstrip("/")) as (folder, leaf):
            if name.endswith("/"):
                with suppress(OSError):
                    os.rmdir(leaf, dir_fd=folder)
            else:
                os.unlink(leaf, dir_fd=folder)

    # ------------------------------------------------------------------------------------------------- what is there

    def _take_lock(self) -> list[str]:
        """Hold the lock file; what a run that was killed lists in it."""
        while True:
            fd = os.open(LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o666, dir_fd=self._folder)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                current = os.stat(LOCK, dir_fd=self._folder, follow_symlinks=False)
            except BlockingIOError:
                os.close(fd)
                help = "wait until it ends, or give another directory"
                raise _error(LOCKED, f"another run writes into {self.path}", help) from None
            except FileNotFoundError:  # removed by the run that had it
                os.close(fd)
                continue
            if (current.st_dev, current.st_ino) == (os.fstat(fd).st_dev, os.fstat(fd).st_ino):
                break
            os.close(fd)
        self._lock = fd
        listed = os.pread(fd, 1 << 26, 0).decode("utf-8", "replace").split("\n")
        return [n for n in listed if n and is_inside(n)]

    def _old(self, stale: Sequence[str]) -> list[str]:
        """What may be removed: of a run that was killed, and with `overwrite` an old output. Anything else refuses."""
        with _told(self.path):
            present = set(os.listdir(self._folder)) - {LOCK}
        old = [form for name in stale for form in (name, _partial(name))]
        if self._overwrite:
            old += _manifest_files(self.path / MANIFEST)
            old += [
                n for n in present if n.endswith((SUFFIX, INDEX_SUFFIX, SUFFIX + ".partial")) or n in (*CONFIG_FILES, MANIFEST)
            ]
            old += map(_partial, self.names)
        elif foreign := sorted(present - {n.split("/")[0] for n in old}):
            shown = ", ".join(foreign[:5]) + (f" and {len(foreign) - 5} more" if len(foreign) > 5 else "")
            raise _error(NOT_EMPTY, f"{self.path} holds {shown}", "give an empty directory, or --overwrite")
        # first what makes it a checkpoint
        old = sorted(set(old), key=lambda n: (not n.endswith(INDEX_SUFFIX), n not in CONFIG_FILES, n))
        folders = {"/".join(parts[:i]) + "/" for n in old for parts in [n.split("/")] for i in range(1, len(parts))}
        return old + sorted(folders, key=len, reverse=True)

    def _check_space(self, old: Sequence[str]) -> None:
        needed, freed = sum(self.placing.sizes) + (1 << 20), 0
        for side in self._sides:
            with _told(side.path):
                needed += side.path.stat().st_size
        for name in old:
            with suppress(OSError):
                s = os.stat(name, dir_fd=self._folder, follow_symlinks=False)
                freed += s.st_blocks * 512 if s.st_nlink == 1 and stat.S_ISREG(s.st_mode) else 0
        disk = os.fstatvfs(self._folder)
        room = disk.f_bavail * disk.f_frsize + freed
        if needed > room:
            help = "free some room, or give another output directory"
            raise _error(NO_SPACE, f"{self.path} needs {needed:,} bytes; its disk has room for {room:,}", help)


def _partial(name: str) -> str:
    """The name that a file has until it is complete."""
    folder, slash, leaf = name.rpartition("/")
    return f"{folder}{slash}.{leaf}.partial"


def _manifest_files(path: Path) -> list[str]:
    """What an earlier output says it made; nothing if it is not readable."""
    try:
        files = read_object(path, 1 << 30, FAILED).get("files")
    except CheckpointError:
        return []
    return [f for f in files if isinstance(f, str) and is_inside(f)] if isinstance(files, list) else []


def refuse_sources(path: Path, sources: Sequence[Source]) -> None:
    """Refuse an output directory that is a source, lies in one, or holds a file of one (also by other names of it)."""
    here = _identities(path)
    for source in sources:
        folder = source.path if source.path and source.path.is_dir() else None
        if folder and _identity(folder) in here:
            raise _error(IS_SOURCE, f"the output {path} is, or lies in, the source {folder}", "give a directory outside it")
        places = {p.parent for p in source.real_files()} | ({folder or source.path.parent} if source.path else set())
        mine = _identity(path)
        for place in sorted(places):
            if mine and mine in _identities(place):
                message = f"the output {path} holds the source, or files of it, in {place}"
                raise _error(IS_SOURCE, message, "give another directory")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        s = os.stat(path)
    except OSError:
        return None
    return s.st_dev, s.st_ino


def _identities(path: Path) -> set[tuple[int, int]]:
    """Of a path and all that it lies in, as far as they exist."""
    return {i for p in (path, *path.parents) if (i := _identity(p))}
