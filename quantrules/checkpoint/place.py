"""Where each target goes, decided before the first byte: shards, offsets and exact headers as a pure function."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from json.encoder import encode_basestring, encode_basestring_ascii

import numpy as np
from attrs import field, frozen

from quantrules.checkpoint.files import quoted
from quantrules.checkpoint.headers import DTYPES, LIMIT
from quantrules.diagnostics import Diagnostic, RunError, define
from quantrules.types import nbytes

NO_BYTES = define("QR340", "A target has no whole number of bytes")
HEADER_TOO_LONG = define("QR341", "A shard would have a header of more than 100 MB")

PAGE = 4096  # data starts on such a boundary; no tensor is aligned beyond it


@frozen(eq=False)
class Targets:
    """What is written, as columns: names, distinct (dtype in lower case, shape as on disk), and kind[n] into them."""

    names: Sequence[str]
    kinds: Sequence[tuple[str, tuple[int, ...]]]
    kind: np.ndarray  # int[n]

    @staticmethod
    def of(entries: Iterable[tuple[str, str, tuple[int, ...]]]) -> Targets:
        """From (name, dtype, shape) tuples."""
        rows = list(entries)
        ids: dict[tuple[str, tuple[int, ...]], int] = {}
        kind = np.array([ids.setdefault((d, tuple(s)), len(ids)) for _, d, s in rows], np.int32)
        return Targets([r[0] for r in rows], tuple(ids), kind)


@frozen(eq=False)
class Placing:
    """shard, offset (absolute in its file), nbytes: columns over targets. files, headers, sizes: of shards.

    A header is the file's beginning up to its data: length, JSON, spaces up to a page.
    """

    targets: Targets = field(repr=False)
    files: tuple[str, ...]
    headers: tuple[bytes, ...] = field(repr=False)
    sizes: tuple[int, ...]
    shard: np.ndarray = field(repr=False)  # int32[n]
    offset: np.ndarray = field(repr=False)  # int64[n]
    nbytes: np.ndarray = field(repr=False)  # int64[n]

    def index(self) -> bytes:
        """model.safetensors.index.json, sorted by name."""
        places = [f'": "{f}"' for f in self.files]
        rows = sorted(zip(self.targets.names, self.shard.tolist()))
        lines = ",\n".join(f"    {encode_basestring_ascii(name)[:-1]}{places[shard]}" for name, shard in rows)
        total = f'  "metadata": {{\n    "total_size": {int(self.nbytes.sum())}\n  }}'
        return f'{{\n{total},\n  "weight_map": {{\n{lines}\n  }}\n}}\n'.encode()


def place(
    targets: Targets | Iterable[tuple[str, str, tuple[int, ...]]],
    groups: Sequence[int] | np.ndarray,
    shard_size: int,
    metadata: Mapping[str, str] = {},
) -> Placing:
    """Lay out targets in shards of about `shard_size` bytes of tensors.

    groups[n]: targets with one number stay in one shard; they fill shards in the order in which the numbers first
    appear, and a group beyond shard_size has a shard to itself. Within a shard the targets are sorted by the largest
    power of two, up to a page, that divides their size, so that each begins aligned to at least its element.
    """
    targets = targets if isinstance(targets, Targets) else Targets.of(targets)
    assert len(set(targets.names)) == len(targets.names) == len(groups) and "__metadata__" not in targets.names
    sizes = np.array([_nbytes(targets, i) for i in range(len(targets.kinds))], np.int64)[targets.kind]
    shard = _shards(np.asarray(groups), sizes, shard_size)
    count = int(shard.max(initial=-1)) + 1
    align = np.where(sizes == 0, PAGE, np.minimum(sizes & -sizes, PAGE))
    order = np.lexsort((-align, shard))  # stable: plan order within equal ones
    bounds = np.searchsorted(shard[order], np.arange(count + 1))
    ends = np.cumsum(sizes[order])
    starts = ends - sizes[order]
    starts -= np.repeat(starts[bounds[:-1]], np.diff(bounds))
    tail = [f':{{"dtype":"{d.upper()}","shape":[{",".join(map(str, s))}],"data_offsets":[' for d, s in targets.kinds]
    intro = json.dumps({**metadata, "format": "pt"}, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    offset, headers, files = np.zeros(len(sizes), np.int64), [], []
    for i in range(count):
        rows, begin = order[bounds[i] : bounds[i + 1]], starts[bounds[i] : bounds[i + 1]]
        entries = zip(rows.tolist(), targets.kind[rows].tolist(), begin.tolist(), (begin + sizes[rows]).tolist())
        body = ",".join([f"{encode_basestring(targets.names[r])}{tail[k]}{b},{e}]}}" for r, k, b, e in entries])
        headers.append(_header(f'{{"__metadata__":{intro},{body}}}'.encode()))
        files.append(f"model-{i + 1:05}-of-{count:05}.safetensors")
        offset[rows] = begin + len(headers[-1])
    totals = [len(h) + int(sizes[order[a:b]].sum()) for h, a, b in zip(headers, bounds, bounds[1:])]
    return Placing(targets, tuple(files), tuple(headers), tuple(totals), shard, offset, sizes)


def _nbytes(targets: Targets, kind: int) -> int:
    dtype, shape = targets.kinds[kind]
    size = nbytes(dtype, shape)
    if size * 8 != DTYPES[dtype.upper()] * int(np.prod(shape, dtype=object)):
        name = targets.names[int(np.flatnonzero(targets.kind == kind)[0])]
        raise RunError(Diagnostic(NO_BYTES, f"{quoted(name)}: {dtype}{list(shape)} has no whole number of bytes"))
    return size


def _shards(groups: np.ndarray, sizes: np.ndarray, shard_size: int) -> np.ndarray:
    """int32[n]: the shard of each target, filled greedily by groups in order of first appearance."""
    _, first, inverse = np.unique(groups, return_index=True, return_inverse=True)
    rank = np.empty(len(first), np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    group = rank[inverse.reshape(-1)]
    filled = np.zeros(len(first) + 1, np.int64)
    np.add.at(filled, group + 1, sizes)
    filled = np.cumsum(filled)  # filled[g]: bytes of the groups before g
    of_group, start, shard = np.zeros(len(first), np.int32), 0, 0
    while start < len(first):
        end = max(start + 1, int(np.searchsorted(filled, filled[start] + shard_size, "right")) - 1)
        of_group[start:end] = shard
        start, shard = end, shard + 1
    return of_group[group]


def _header(text: bytes) -> bytes:
    length = -(-(8 + len(text)) // PAGE) * PAGE - 8
    if length > LIMIT:
        raise RunError(
            Diagnostic(HEADER_TOO_LONG, f"a shard's header would have {length} bytes", help="give a smaller --shard-size")
        )
    return length.to_bytes(8, "little") + text.ljust(length)
