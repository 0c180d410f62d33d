"""The header of a safetensors file, read strictly: it comes from strangers.

A file is a length (u64, little-endian), that many bytes of JSON, and data. Each way to be wrong has one check and one
code, in this order:

    QR303 shorter than a header           QR310 a shape that is none
    QR304 another kind of file            QR311 offsets that are none, or end before they begin
    QR305 header beyond the file, 100 MB  QR312 bytes that are not the shape's
    QR306 not JSON, not an object         QR313 tensors that overlap
    QR307 a name twice                    QR314 bytes between tensors that belong to none
    QR308 fields of an entry              QR315 data that ends before the last tensor does
    QR309 unknown dtype                   QR316 bytes behind the last tensor
    QR317 metadata that is not text       QR318 a name that no other tool could hold

Canonical headers (as the safetensors package and json.dumps write them) take a short way: one regular expression that
must cover the text to its last character. It accepts a part of what the general way accepts, and gives the same.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from json import JSONDecodeError
from math import prod

import numpy as np
from attrs import evolve, frozen

from quantrules.checkpoint.files import DuplicateName, quoted, read_at, refuse, strict_json
from quantrules.diagnostics import CheckpointError, Diagnostic, define
from quantrules.names import HOLE
from quantrules.types import DTYPE_BITS

SHORT = define("QR303", "A file is too short to hold a safetensors header")
FOREIGN = define("QR304", "Not a safetensors file")
LENGTH = define("QR305", "A safetensors header is longer than its file or than 100 MB")
NOT_JSON = define("QR306", "A safetensors header is not a JSON object in UTF-8")
TWICE = define("QR307", "A name stands twice in a header")
FIELDS = define("QR308", "An entry of a header does not have exactly dtype, shape and data_offsets")
DTYPE = define("QR309", "A tensor has an unknown dtype")
SHAPE = define("QR310", "A shape is not a list of whole numbers that fit in 62 bits")
OFFSETS = define("QR311", "Offsets are not two whole numbers in order")
NBYTES = define("QR312", "A tensor's bytes are not what its dtype and shape say")
OVERLAP = define("QR313", "Tensors overlap")
HOLES = define("QR314", "Bytes between tensors belong to none")
TRUNCATED = define("QR315", "A file ends before its last tensor does")
TRAILING = define("QR316", "A file has bytes behind its last tensor")
METADATA = define("QR317", "The metadata of a header is not an object of strings")
NAME = define("QR318", "A tensor's name cannot be kept")

LIMIT = 100_000_000  # bytes of a header, as in the safetensors package
HUGE = 1 << 62
DTYPES = {name.upper(): bits for name, bits in DTYPE_BITS.items()}

Kind = tuple[str, tuple[int, ...]]  # dtype as the file spells it, shape


@frozen(eq=False)
class Header:
    """What a file declares: columns over its tensors, in the order of the header.

    kinds: the distinct (dtype, shape) pairs, and kind[n] indexes them. begin, end: offsets within the data, which starts
    at byte `data` of the file.
    """

    names: Sequence[str]
    kinds: tuple[Kind, ...]
    kind: np.ndarray  # int32[n]
    begin: np.ndarray  # int64[n]
    end: np.ndarray  # int64[n]
    metadata: dict[str, str]
    data: int = 0


def read_header(fd: int, size: int, file: str) -> Header:
    """Read and check the header of an open file of `size` bytes. Raises CheckpointError with all that is wrong."""
    head = bytearray(min(size, 512))
    read_at(fd, 0, memoryview(head), file)
    check_minimum(size, file)
    length = int.from_bytes(head[:8], "little")
    check_length(length, size, file, bytes(head))
    raw = bytearray(length)  # length is within the file by now
    read_at(fd, 8, memoryview(raw), file)
    return evolve(parse_header(raw, size - 8 - length, file), data=8 + length)


def parse_header(raw: bytes | bytearray, data_size: int, file: str) -> Header:
    """Columns of a header's JSON text, checked against `data_size` bytes of data."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise refuse(NOT_JSON, f"{file}: the header is not UTF-8 at its byte {e.start}") from None
    header = parse_canonical(text) or parse_general(text, file)
    findings = [d for check in CHECKS if (d := check(header, file))]
    if not findings:  # sums of sizes mean something only where each is right
        findings = check_cover(header, data_size, file)
    if findings:
        raise CheckpointError(findings)
    return header


# ------------------------------------------------------------------------------------------- checks on the raw bytes


def check_minimum(size: int, file: str) -> None:
    if size < 10:  # a length and {}
        raise refuse(SHORT, f"{file} has {size} bytes, too few for a safetensors header", "is the download complete?")


def check_length(length: int, size: int, file: str, head: bytes) -> None:
    if length > min(size - 8, LIMIT):
        bound = f"the file has {size} bytes" if length <= LIMIT else f"at most {LIMIT} are allowed"
        raise _foreign(head, file) or refuse(
            LENGTH, f"{file}: its header would have {length} bytes; {bound}", "is the download complete?"
        )


def _foreign(head: bytes, file: str) -> CheckpointError | None:
    """The error for a file of another kind; asked only once its header makes no sense."""
    text = head.lstrip().lower()
    looks = {
        "an HTML page": text.startswith((b"<!doctype", b"<html", b"<?xml")),
        "a Git LFS pointer": text.startswith(b"version https://git-lfs"),
        "a pickle": re.match(rb"\x80[\x01-\x06]", head) is not None,
        "a zip archive, as pickled checkpoints are": head.startswith(b"PK\x03\x04"),
        "GGUF": head.startswith(b"GGUF"),
        "JSON without the length in front": text.startswith(b'{"'),
    }
    for kind in (k for k, yes in looks.items() if yes):
        help = "git lfs pull" if "LFS" in kind else "download it again" if "HTML" in kind else "convert it to safetensors first"
        return refuse(FOREIGN, f"{file} is not a safetensors file (looks like {kind})", help)
    return None


# ------------------------------------------------------------------------------------------------------ the short way

_INT = "(?:0|[1-9][0-9]{0,17})"


def _entry(colon: str, comma: str) -> re.Pattern:
    """An entry in canonical spelling: the name, dtype and shape in one piece, the offsets."""
    c, s = re.escape(colon), re.escape(comma)
    shape, offsets = r"\[[0-9, ]*", rf"{_INT}{s}{_INT}"
    return re.compile(
        rf"""
        "([^"\\\x00-\x1f]*)"{c}
        \{{ "dtype"{c}"([A-Z0-9_]+"{s}"shape"{c}{shape})\]{s}"data_offsets"{c}\[({offsets})\] \}}{s}
        """,
        re.VERBOSE,
    )


# how a name's quote goes on -> (pattern of an entry, what stands between two)
_CANONICAL = {'":{': (_entry(":", ","), ","), '": {': (_entry(": ", ", "), ", ")}
_METADATA = re.compile(r'\{"__metadata__": ?(\{[^{}\\]*\}), ?(?=")')


def parse_canonical(text: str) -> Header | None:
    """The columns of a header in canonical spelling; None where the general way must decide."""
    body, metadata = text.rstrip(" "), {}
    if front := _METADATA.match(body):
        try:
            metadata = strict_json(front[1], floats=False)
        except ValueError:
            return None
        if _metadata_fault(metadata):
            return None
    body = body[front.end() if front else 1 :] if front or body.startswith('{"') else ""
    opening = re.match(r'"[^"\\]*(": ?\{)', body)
    if not opening or not body.endswith("]}}"):
        return None
    pattern, separator = _CANONICAL[opening[1]]
    pieces = pattern.split(body[:-1] + separator)  # what is between matches, then the groups of a match, and so on
    if any(pieces[0::4]):
        return None  # the matches do not cover the text
    names, kinds, offsets = pieces[1::4], pieces[2::4], pieces[3::4]
    if len(set(names)) != len(names) or "__metadata__" in names:
        return None
    ids = {k: i for i, k in enumerate(dict.fromkeys(kinds))}
    parsed = [_canonical_kind(k) for k in ids]
    numbers = np.fromstring(",".join(offsets), np.int64, sep=",")
    if None in parsed or len(numbers) != 2 * len(names):
        return None
    kind = np.array(list(map(ids.__getitem__, kinds)), np.int32)
    return Header(names, tuple(parsed), kind, numbers[0::2].copy(), numbers[1::2].copy(), metadata)


def _canonical_kind(text: str) -> Kind | None:
    try:
        entry = strict_json(f'{{"dtype":"{text}]}}', floats=False)
    except ValueError:
        return None
    return None if _shape_fault(entry["shape"]) else (entry["dtype"], tuple(entry["shape"]))


# ---------------------------------------------------------------------------------------------------- the general way


def parse_general(text: str, file: str) -> Header:
    """The columns of any legal header. Raises CheckpointError with every entry that is none."""
    try:
        entries = strict_json(text, floats=False)
    except DuplicateName as e:
        raise refuse(TWICE, f"{file}: {e} in its header") from None
    except JSONDecodeError as e:
        raise refuse(NOT_JSON, f"{file}: the header is not JSON: {e.msg} at character {e.pos}") from None
    except ValueError as e:
        raise refuse(NOT_JSON, f"{file}: the header is not legal JSON: {e}") from None
    if not isinstance(entries, dict):
        raise refuse(NOT_JSON, f"{file}: the header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    fault = _metadata_fault(metadata)
    findings = [Diagnostic(METADATA, f"{file}: {fault}")] if fault else []
    for code, check in ((FIELDS, _fields_fault), (SHAPE, lambda e: _shape_fault(e["shape"])), (OFFSETS, _offsets_fault)):
        faults = ((name, fault) for name, entry in entries.items() if (fault := check(entry)))
        if finding := _folded(code, file, faults):
            raise CheckpointError([*findings, finding])  # a later check needs what the earlier ones promise
    if findings:
        raise CheckpointError(findings)
    kinds = [(e["dtype"], tuple(e["shape"])) for e in entries.values()]
    ids = {k: i for i, k in enumerate(dict.fromkeys(kinds))}
    offsets = np.array([e["data_offsets"] for e in entries.values()], np.int64).reshape(-1, 2)
    kind = np.array([ids[k] for k in kinds], np.int32)
    return Header(tuple(entries), tuple(ids), kind, offsets[:, 0].copy(), offsets[:, 1].copy(), metadata)


def _metadata_fault(metadata: object) -> str:
    if not isinstance(metadata, dict):
        return "`__metadata__` is not an object"
    wrong = next((k for k, v in metadata.items() if not isinstance(v, str)), None)
    if wrong is None:
        return "" if _encodable("".join((*metadata, *metadata.values()))) else "`__metadata__` holds half a surrogate pair"
    return f"{quoted(wrong)} in `__metadata__` is not a string"


def _fields_fault(entry: object) -> str:
    if not isinstance(entry, dict):
        return "is not described by an object"
    if entry.keys() != {"dtype", "shape", "data_offsets"}:
        return (
            f"has the fields {', '.join(map(quoted, sorted(entry)[:8])) or '(none)'}; dtype, shape and data_offsets are expected"
        )
    return "" if isinstance(entry["dtype"], str) else "has a dtype that is not a string"


def _shape_fault(shape: object) -> str:
    if not isinstance(shape, list) or not all(type(d) is int and 0 <= d < HUGE for d in shape):
        return f"has the shape {quoted(str(shape))}; a list of whole numbers ≥ 0 is expected"
    return (
        ""
        if len(shape) <= 64 and prod(d for d in shape if d) < HUGE
        else f"has the shape {quoted(str(shape))}, beyond 62 bits or 64 dimensions"
    )


def _offsets_fault(entry: dict) -> str:
    offsets = entry["data_offsets"]
    right = isinstance(offsets, list) and len(offsets) == 2 and all(type(o) is int and 0 <= o < HUGE for o in offsets)
    return "" if right else f"has the offsets {quoted(str(offsets))}; two whole numbers ≥ 0 are expected"


# ------------------------------------------------------------------------------------------------- checks on columns


def _folded(code: str, file: str, faults: Iterable[tuple[str, str]]) -> Diagnostic | None:
    """One diagnostic for all tensors of a file that fail one check; the first five are shown."""
    faults = list(faults)
    if not faults:
        return None
    (name, fault), *rest = faults
    notes = tuple(f"{quoted(n)} {f}" for n, f in rest[:4]) + ((f"and {len(rest) - 4} more",) if len(rest) > 4 else ())
    return Diagnostic(code, f"{file}: {quoted(name)} {fault}", notes=notes, count=len(faults))


def _of_kinds(header: Header, code: str, file: str, fault: Callable[[Kind], str]) -> Diagnostic | None:
    wrong = {i: text for i, kind in enumerate(header.kinds) if (text := fault(kind))}
    rows = np.flatnonzero(np.isin(header.kind, list(wrong))) if wrong else ()
    return _folded(code, file, ((header.names[r], wrong[int(header.kind[r])]) for r in rows))


def check_names(header: Header, file: str) -> Diagnostic | None:
    """NUL marks a number in templates (names.HOLE) and ends a name in C; half a surrogate pair is not UTF-8."""
    joined = "".join(header.names)
    if HOLE not in joined and _encodable(joined):
        return None
    faults = (
        (n, "has a NUL character in its name" if HOLE in n else "" if _encodable(n) else "is not UTF-8") for n in header.names
    )
    return _folded(NAME, file, ((n, f) for n, f in faults if f))


def _encodable(text: str) -> bool:
    try:
        return text.isascii() or text.encode() is not None
    except UnicodeEncodeError:
        return False


def check_dtypes(header: Header, file: str) -> Diagnostic | None:
    return _of_kinds(header, DTYPE, file, lambda kind: "" if kind[0] in DTYPES else f"has the unknown dtype {quoted(kind[0])}")


def check_order(header: Header, file: str) -> Diagnostic | None:
    rows = np.flatnonzero(header.end < header.begin)
    return _folded(
        OFFSETS, file, ((header.names[r], f"ends at {header.end[r]}, before it begins at {header.begin[r]}") for r in rows)
    )


def check_sizes(header: Header, file: str) -> Diagnostic | None:
    """bytes = elements × bits / 8, which must be whole: an odd count of 4-bit elements has no size."""
    bits = [prod(shape) * DTYPES.get(dtype, 0) for dtype, shape in header.kinds]
    expected = np.array([b // 8 if b % 8 == 0 and b < HUGE else -1 for b in bits], np.int64)[header.kind]
    known = np.array([dtype in DTYPES for dtype, _ in header.kinds], bool)[header.kind]

    def fault(row: int) -> str:
        dtype, shape = header.kinds[header.kind[row]]
        whole = f"{expected[row]} bytes" if expected[row] >= 0 else "no whole number of bytes that a file can hold"
        return f"has {header.end[row] - header.begin[row]} bytes; {dtype} {list(shape)} takes {whole}"

    rows = np.flatnonzero((header.end - header.begin != expected) & known & (header.end >= header.begin))
    return _folded(NBYTES, file, ((header.names[r], fault(r)) for r in rows))


CHECKS = (check_names, check_dtypes, check_order, check_sizes)


def check_cover(header: Header, data_size: int, file: str) -> list[Diagnostic]:
    """Sorted by offset, each tensor begins where the one before ends, the first at 0; the last ends with the file."""
    order = np.lexsort((header.end, header.begin))
    begin, end = header.begin[order], header.end[order]
    reached = np.maximum.accumulate(np.concatenate(([0], end)))  # reached[i]: where the tensors before i end
    found = []
    for code, rows in ((OVERLAP, np.flatnonzero(begin < reached[:-1])), (HOLES, np.flatnonzero(begin > reached[:-1]))):
        told = ((header.names[order[i]], f"begins at {begin[i]}, and the tensors before it end at {reached[i]}") for i in rows)
        found.append(_folded(code, file, told))
    last = int(reached[-1])
    if last > data_size:
        found.append(
            Diagnostic(
                TRUNCATED, f"{file} has {data_size} bytes of data; its tensors need {last}", help="is the download complete?"
            )
        )
    elif last < data_size:
        found.append(Diagnostic(TRAILING, f"{file} has {data_size - last} bytes behind its last tensor that no tensor covers"))
    return [d for d in found if d]
