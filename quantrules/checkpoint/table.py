"""From headers to the key table: names collapse some files at a time, so no object per key outlives its batch."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from quantrules.checkpoint.headers import Header
from quantrules.names import HOLE, KeyTable, Names, families

BATCH = 20_000  # names that collapse at once


@contextmanager
def paused_gc() -> Iterator[None]:
    """Python's collector walks all that a parser makes, again and again, and finds nothing: it doubles the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class TableBuilder:
    """Collects the headers of files, in order, into one KeyTable."""

    def __init__(self) -> None:
        self._files: list[str] = []
        self._columns: list[tuple[np.ndarray, ...]] = []  # per file: kind (global), begin, end, all absolute
        self._kinds: dict[tuple[str, tuple[int, ...]], int] = {}
        self._families: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}  # template -> (digits, rows) per file
        self._rows = 0
        self._pending: list[str] = []  # names that have not collapsed yet

    def add(self, file: str, header: Header) -> None:
        known = np.array([self._kinds.setdefault(k, len(self._kinds)) for k in header.kinds], np.int32)
        self._columns.append(
            (known[header.kind] if len(known) else header.kind, header.begin + header.data, header.end + header.data)
        )
        self._files.append(file)
        self._pending += header.names
        if len(self._pending) > BATCH:
            self._collapse()

    def _collapse(self) -> None:
        for names, rows in collapse(self._pending):
            self._families.setdefault(names.template, []).append((names.digits, rows + np.int32(self._rows)))
        self._rows += len(self._pending)
        self._pending = []

    def build(self) -> KeyTable:
        self._collapse()
        dtypes = {d: i for i, d in enumerate(dict.fromkeys(d.lower() for d, _ in self._kinds))}
        shapes = {s: i for i, s in enumerate(dict.fromkeys(s for _, s in self._kinds))}
        dtype = np.array([dtypes[d.lower()] for d, _ in self._kinds], np.int16)
        shape = np.array([shapes[s] for _, s in self._kinds], np.int32)
        kind, begin, end = (np.concatenate([c[i] for c in self._columns] or [np.zeros(0, np.int64)]) for i in range(3))
        kind = kind.astype(np.int32)
        sizes = [len(c[0]) for c in self._columns]
        merged = [
            (Names(t, np.concatenate([d for d, _ in parts])), np.concatenate([r for _, r in parts]))
            for t, parts in self._families.items()
        ]
        return KeyTable(
            tuple(self._files), tuple(dtypes), tuple(shapes),
            np.repeat(np.arange(len(sizes), dtype=np.int32), sizes), dtype[kind], shape[kind], begin, end - begin,
            tuple(names for names, _ in merged), tuple(rows for _, rows in merged),
        )  # fmt: skip


def collapse(names: Sequence[str]) -> list[tuple[Names, np.ndarray]]:
    """names.families, for plain ASCII names in a fourth of the time: numbers are found and read as columns of bytes."""
    text = "." + "\n.".join(names) + "\n"
    if not text.isascii() or text.count("\n") != len(names):
        return families(names)
    chars = np.frombuffer(text.encode(), np.uint8)
    digit = (chars - np.uint8(ord("0"))) < 10
    edges = np.flatnonzero(digit[1:] != digit[:-1]) + 1  # the text begins and ends without a digit
    start, end = edges[0::2], edges[1::2]
    size = end - start
    closed = (chars[start - 1] == ord(".")) & ((chars[end] == ord(".")) | (chars[end] == ord("\n")))
    whole = closed & ((chars[start] != ord("0")) | (size == 1)) & (size <= 18)
    start, size = start[whole], size[whole]
    values, keep = np.zeros(len(start), np.int64), np.ones(len(chars), bool)
    for k in range(int(size.max(initial=0))):
        longer = np.flatnonzero(size > k)
        values[longer] = values[longer] * 10 + (chars[start[longer] + k] - np.uint8(ord("0")))
        if k:
            keep[start[longer] + k] = False
    marked = chars.copy()
    marked[start] = ord(HOLE)
    templates = marked[keep].tobytes().decode().split("\n")[:-1]
    ids = {t: i for i, t in enumerate(dict.fromkeys(templates))}
    family = np.array(list(map(ids.__getitem__, templates)), np.int32)
    row_of = np.searchsorted(np.flatnonzero(chars == ord("\n")), start)
    first = np.searchsorted(row_of, np.arange(len(names)))  # where each name's numbers begin
    order = np.argsort(family, kind="stable").astype(np.int32)
    result = []
    for template, rows in zip(ids, np.split(order, np.cumsum(np.bincount(family, minlength=len(ids)))[:-1])):
        holes = template.count(HOLE)
        result.append((Names(template[1:], values[first[rows][:, None] + np.arange(holes)].reshape(len(rows), holes)), rows))
    return result
