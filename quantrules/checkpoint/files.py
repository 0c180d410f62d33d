"""Regular files of strangers: opening them without surprises, reading and copying by position, strict JSON.

Everything that touches a descriptor or parses untrusted text goes through here; the rest of the room works on values.
"""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import stat
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock

from quantrules.diagnostics import CheckpointError, Diagnostic, define

IRREGULAR = define("QR301", "Not a regular file")
UNREADABLE = define("QR302", "A file cannot be read")
CHANGED = define("QR335", "A source file changed while it was being read")

MOST_VALUES, MOST_LEVELS = 2_000_000, 64  # of a JSON file that is read whole, edited and written again
BUFFER = 8 << 20  # bytes copied at a time where the kernel cannot copy by itself
_NO_KERNEL_COPY = {errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM}


def quoted(name: str, most: int = 160) -> str:
    """A name from a file, for a message; a name of a megabyte is cut."""
    return f"`{name}`" if len(name) <= most else f"`{name[:most]}…` ({len(name)} characters)"


def refuse(code: str, message: str, help: str = "") -> CheckpointError:
    return CheckpointError(Diagnostic(code, message, help=help))


def open_regular(path: str | os.PathLike, shown: str = "") -> int:
    """A descriptor for reading. Links are followed; a FIFO, a device or a directory is refused before it is opened."""
    shown = shown or os.fspath(path)
    try:
        if stat.S_ISREG(os.stat(path).st_mode):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # not even a FIFO put there just now blocks
            if stat.S_ISREG(os.fstat(fd).st_mode):
                return fd
            os.close(fd)
    except (OSError, ValueError) as e:
        raise refuse(UNREADABLE, f"{shown}: {getattr(e, 'strerror', None) or e}") from None
    raise refuse(IRREGULAR, f"{shown} is not a regular file")


def read_at(fd: int, offset: int, out: memoryview, shown: str) -> None:
    """Fill `out` from `offset`. A read may be short; an end before its time is an error (QR335)."""
    done = 0
    while done < len(out):
        try:
            got = os.preadv(fd, [out[done:]], offset + done)
        except OSError as e:
            raise refuse(UNREADABLE, f"{shown}: {e.strerror} at byte {offset + done}") from None
        if not got:
            raise refuse(CHANGED, f"{shown} ends at byte {offset + done}, before the {len(out)} bytes at {offset}",
                         "the file was cut or replaced after its header was read")  # fmt: skip
        done += got


def write_at(fd: int, offset: int, data: memoryview) -> None:
    """Write all of `data` at `offset`; a write may be short. Raises OSError."""
    done = 0
    while done < len(data):
        done += os.pwrite(fd, data[done:], offset + done)


def copy_range(source: int, source_offset: int, target: int, offset: int, count: int, shown: str) -> None:
    """Copy `count` bytes between open files: within the kernel where it can, else through a buffer of 8 MiB.

    Raises OSError for the target, CheckpointError where the source ends before its time.
    """
    done, kernel = 0, hasattr(os, "copy_file_range")
    while kernel and done < count:
        try:
            got = os.copy_file_range(source, target, min(count - done, 1 << 30), source_offset + done, offset + done)
        except OSError as e:
            if e.errno not in _NO_KERNEL_COPY:
                raise
            got = 0
        kernel = got > 0  # 0 at the end of the file, and on file systems that cannot say no
        done += got
    buffer = memoryview(bytearray(min(BUFFER, count - done)))
    while done < count:
        part = buffer[: min(len(buffer), count - done)]
        read_at(source, source_offset + done, part, shown)
        write_at(target, offset + done, part)
        done += len(part)


def read_small(path: str | os.PathLike, limit: int, shown: str) -> bytearray:
    """A whole file of at most `limit` bytes; the size is checked before anything is allocated."""
    fd = open_regular(path, shown)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            raise refuse(UNREADABLE, f"{shown} has {size} bytes; at most {limit} are read")
        data = bytearray(size)
        read_at(fd, 0, memoryview(data), shown)
        return data
    finally:
        os.close(fd)


class Descriptors:
    """Open files by number, for many threads. Beyond `cap`, or a fourth of what the process may have open, those longest
    unused are closed; one in use only after it."""

    def __init__(self, opener: Callable[[int], int], cap: int = 200):
        allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._opener, self._lock = opener, Lock()
        self._cap = cap if allowed == resource.RLIM_INFINITY else min(cap, allowed // 4)
        self._open: OrderedDict[int, list[int]] = OrderedDict()  # number -> [descriptor, users]

    @contextmanager
    def use(self, number: int) -> Iterator[int]:
        with self._lock:
            entry = self._open.get(number)
            if entry is None:
                entry = self._open[number] = [self._opener(number), 0]
            self._open.move_to_end(number)
            entry[1] += 1
        try:
            yield entry[0]
        finally:
            with self._lock:
                entry[1] -= 1
                if not entry[1] and self._open.get(number) is not entry:
                    os.close(entry[0])
                if len(self._open) > self._cap:
                    for idle in [n for n, e in self._open.items() if not e[1]][: len(self._open) - self._cap]:
                        os.close(self._open.pop(idle)[0])

    def close(self, number: int | None = None) -> None:
        """Close one file, or all; one that a thread is using is closed when that thread is through."""
        with self._lock:
            for n in [number] if number is not None else list(self._open):
                entry = self._open.pop(n, None)
                if entry and not entry[1]:
                    os.close(entry[0])


# ------------------------------------------------------------------------------------------------------ strict JSON

_ODD_NUMBER = re.compile(r"-0|[0-9]{19}")


def strict_json(text: str, *, floats: bool) -> object:
    """JSON in which no name stands twice. Raises ValueError with a sentence.

    With `floats` as config files have them: fractions, NaN, Infinity. Without: integers only, of at most 18 digits.
    """
    extra: dict = {} if floats else {"parse_float": _no_fraction, "parse_constant": _no_fraction}
    if _ODD_NUMBER.search(text):  # looked for first: a hook for integers costs a call each
        extra["parse_int"] = _short_int if floats else _plain_int
    try:
        return json.loads(text, object_pairs_hook=_unique, **extra)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _unique(pairs: list[tuple[str, object]]) -> dict:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(k for k, _ in pairs if k in seen or seen.add(k))
        raise DuplicateName(twice)
    return result


class DuplicateName(ValueError):
    """A name that stands twice in one JSON object."""

    def __init__(self, name: str):
        self.name = name
        super().__init__(f"{quoted(name)} stands twice")


def _no_fraction(text: str):
    raise ValueError(f"{quoted(text, 40)} where an integer is expected")


def _short_int(text: str) -> int:
    if len(text) > 4000:
        raise ValueError(f"an integer of {len(text)} digits")
    return int(text)


def _plain_int(text: str) -> int:
    if len(text) > 18 or text == "-0":
        raise ValueError(f"{quoted(text, 40)} where an integer of at most 18 digits is expected")
    return int(text)


def decoded(raw: bytes | bytearray, path: os.PathLike, code: str) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise refuse(code, f"{path}: not UTF-8 at byte {e.start}") from None


def parsed_object(text: str, path: os.PathLike, code: str) -> dict:
    try:
        value = strict_json(text, floats=True)
    except ValueError as e:
        raise refuse(code, f"{path}: not legal JSON: {e}") from None
    if not isinstance(value, dict):
        raise refuse(code, f"{path}: not a JSON object")
    return value


def read_object(path: os.PathLike, limit: int, code: str) -> dict:
    """A JSON object from a file of at most `limit` bytes; `code` is that of the error where there is none."""
    text = decoded(read_small(path, limit, str(path)), path, code)
    if sum(map(text.count, ",{[")) > MOST_VALUES:
        raise refuse(code, f"{path} holds more than {MOST_VALUES:,} values")
    found = parsed_object(text, path, code)
    if _levels(found) > MOST_LEVELS:
        raise refuse(code, f"{path}: nested more than {MOST_LEVELS} deep")
    return found


def _levels(value: dict) -> int:
    """How deep objects and lists are nested."""
    level, count = [value], 0
    while level:
        inner = (v for x in level for v in (x.values() if isinstance(x, dict) else x))
        level, count = [v for v in inner if isinstance(v, (dict, list))], count + 1
    return count
