"""model.safetensors.index.json: which shard holds which tensor. Headers are the truth, and the index must say the same.

Hundreds of thousands of names are compared as columns of hashes (Python's, keyed anew in each process); the names
themselves are read again only where the columns differ, to say which.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from attrs import field, frozen

from quantrules.checkpoint.files import CHANGED, decoded, parsed_object, quoted, read_small, refuse, strict_json
from quantrules.checkpoint.source import SUFFIX, is_inside
from quantrules.diagnostics import CheckpointError, Diagnostic, define

INDEX = define("QR322", "An index is not legal")
UNSAFE = define("QR323", "An index names a file outside its directory")
ABSENT = define("QR325", "An index lists a tensor that its shard does not hold")
UNLISTED = define("QR326", "A shard holds a tensor that the index does not list")
DOUBLE = define("QR327", "A tensor stands in two shards")
PICKLE = define("QR328", "Pickled checkpoints are not read")

LIMIT = 512 << 20  # bytes of an index


@frozen(eq=False)
class Index:
    """name[n]: the hash of a tensor's name; file[n]: its shard, among `files`, which are sorted."""

    path: Path
    files: tuple[str, ...]
    name: np.ndarray = field(repr=False)  # int64[n]
    file: np.ndarray = field(repr=False)  # int32[n]

    def agrees(self, hashes: Sequence[np.ndarray]) -> bool:
        """Whether the shards hold what is listed; hashes[f]: those of the names in shard f."""
        name = np.concatenate([np.zeros(0, np.int64), *hashes])
        file = np.repeat(np.arange(len(hashes), dtype=np.int32), [len(h) for h in hashes])
        mine, theirs = np.lexsort((self.file, self.name)), np.lexsort((file, name))
        return np.array_equal(self.name[mine], name[theirs]) and np.array_equal(self.file[mine], file[theirs])


def hashes(names: Sequence[str]) -> np.ndarray:
    """int64[n]"""
    return np.fromiter(map(hash, names), np.int64, len(names))


def read_index(path: Path) -> Index:
    """Raises CheckpointError where it is no index, or names what no shard may be called."""
    text = decoded(read_small(path, LIMIT, str(path)), path, INDEX)
    name, file, ids = canonical(text) or _columns(weight_map(text, path))
    order = sorted(ids)
    if unsafe := [f for f in order if not is_inside(f)]:
        raise CheckpointError(
            [
                Diagnostic(UNSAFE, f"{path} names the shard {quoted(f)}", help="a shard lies in the index's directory")
                for f in unsafe
            ]
        )
    if pickles := [f for f in order if not f.endswith(SUFFIX)]:
        raise refuse(
            PICKLE,
            f"{path} names {', '.join(map(quoted, pickles[:5]))}; only {SUFFIX} files are read",
            "convert it to safetensors first",
        )
    place = np.zeros(len(ids), np.int32)
    place[[ids[f] for f in order]] = np.arange(len(ids))
    return Index(path, tuple(order), name, place[file] if len(ids) else file)


def weight_map(text: str, path: Path) -> dict[str, str]:
    """The map of a legal index, in any spelling."""
    found = parsed_object(text, path, INDEX).get("weight_map")
    if not isinstance(found, dict) or not set(map(type, found.values())) <= {str}:
        raise refuse(INDEX, f"{path}: `weight_map` is not an object of strings")
    return found


Columns = tuple[np.ndarray, np.ndarray, dict[str, int]]  # hashes of names, files by number, numbers of files


def _columns(weight_map: Mapping[str, str]) -> Columns:
    ids = {f: i for i, f in enumerate(dict.fromkeys(weight_map.values()))}
    return hashes(weight_map.keys()), np.array([ids[f] for f in weight_map.values()], np.int32), ids


_MAP = re.compile(r'"weight_map":\s*\{\s*(?="[^"\\]*"(:\s*)"[^"\\]*"(,\s*)")')


def canonical(text: str, chunk: int = 1 << 20) -> Columns | None:
    """The columns of an index as json.dumps writes it, map last and without escapes; None for any other.

    Cut at its quotes, a piece at a time: half the time of a parser, and none of its memory.
    """
    start, end = _MAP.search(text), text.rfind('"') + 1
    if not start or "\\" in text or not _has_empty_map(text[: start.end()] + text[end:]):
        return None
    colon, comma = start.groups()
    columns, ids, at = [], {}, start.end()
    while at < end:
        cut = text.find(f'"{comma}"', at + chunk, end) + 1 or end
        pieces = text[at:cut].split('"')
        names, values = pieces[1::4], pieces[3::4]
        seams = (
            len(pieces) % 4 == 1 and pieces[0] == pieces[-1] == "" and {*pieces[2::4]} == {colon} and {*pieces[4:-1:4]} <= {comma}
        )
        if not seams or _controls(text[at:cut]) != len(names) * _controls(colon) + (len(names) - 1) * _controls(comma):
            return None
        for file in {*values} - ids.keys():
            ids[file] = len(ids)
        columns.append((hashes(names), np.fromiter(map(ids.__getitem__, values), np.int32, len(values))))
        at = cut + (len(comma) if cut < end else 0)
    name, file = (np.concatenate(column) for column in zip(*columns))
    ordered = np.sort(name)  # np.unique takes ten times as long
    return None if (ordered[1:] == ordered[:-1]).any() else (name, file, ids)


def _controls(text: str) -> int:
    """How many characters are control characters; line ends may stand between strings, and nowhere else."""
    raw = text.encode()
    return len(raw) - len(raw.translate(None, bytes(range(32))))


def _has_empty_map(text: str) -> bool:
    try:
        rest = strict_json(text, floats=True)
    except ValueError:
        return False
    return isinstance(rest, dict) and rest.get("weight_map") == {}


def disagreements(index: Index, names_of: Iterable[tuple[str, Iterable[str]]]) -> list[Diagnostic]:
    """What index and headers say differently, from (file, names in its header) of all shards.

    One diagnostic for each file and way to be wrong, with the first names.
    """
    listed = weight_map(decoded(read_small(index.path, LIMIT, str(index.path)), index.path, INDEX), index.path)
    held = {file: set(names) for file, names in names_of}
    told: dict[tuple[str, str], list[str]] = {}
    moved = set()
    for file, names in held.items():
        for name in sorted(n for n in names if listed.get(n) != file):
            place = listed.get(name)
            if place is None:
                told.setdefault((UNLISTED, f"is in {file}, and {index.path} does not list it"), []).append(name)
            elif name in held.get(place, ()):
                told.setdefault((DOUBLE, f"is in both {place} and {file} ({index.path} says {place})"), []).append(name)
            else:
                moved.add(name)
                told.setdefault((ABSENT, f"is in {file}; {index.path} says {place}, which does not hold it"), []).append(name)
    for name, file in listed.items():
        if name not in moved and name not in held.get(file, ()):
            told.setdefault((ABSENT, f"is listed by {index.path} for {file}, whose header does not hold it"), []).append(name)
    if not told:
        return [
            Diagnostic(
                CHANGED, f"{index.path}, or a shard, changed while it was being read", help="run again once nothing writes to it"
            )
        ]
    return [
        Diagnostic(code, f"{quoted(names[0])} {text}", count=len(names),
                   notes=tuple(map(quoted, names[1:5])) + ((f"and {len(names) - 5} more",) if len(names) > 5 else ()))
        for (code, text), names in told.items()
    ]  # fmt: skip
