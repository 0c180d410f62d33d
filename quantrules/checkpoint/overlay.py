"""A source with a few more tensors: activation scales that come in a file of their own beside a checkpoint."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from quantrules.checkpoint.directory import open_source
from quantrules.checkpoint.files import read_object
from quantrules.checkpoint.source import Raw, Source, StateDictSource
from quantrules.diagnostics import CheckpointError, Diagnostic, define
from quantrules.names import KeyTable

SCALES = define("QR338", "A file of activation scales that is not one")
SUFFIX = ".input_scale"
MAX_JSON = 64 << 20


class Overlay:
    """`base` with the tensors of `extra`, which `path` held, as further rows; it answers for both."""

    def __init__(self, base: Source, extra: Source, path: Path):
        self.base, self.extra, self.read, self.split = base, extra, path, len(base.table)
        self.table = _joined(base.table, extra.table)

    def __getattr__(self, name):
        return getattr(self.base, name)

    def read_into(self, row: int, lo: int, hi: int, out) -> None:
        if row < self.split:
            self.base.read_into(row, lo, hi, out)
        else:
            self.extra.read_into(row - self.split, lo, hi, out)

    def opened(self, row: int):
        return self.base.opened(row) if row < self.split else self.extra.opened(row - self.split)

    def real_files(self) -> tuple[Path, ...]:
        return (*self.base.real_files(), self.read.resolve())


def _joined(a: KeyTable, b: KeyTable) -> KeyTable:
    shift = len(a)
    return KeyTable(
        (*a.files, *b.files), (*a.dtypes, *b.dtypes), (*a.shapes, *b.shapes),
        np.concatenate([a.file, b.file + len(a.files)]).astype(np.int32), np.concatenate([a.dtype, b.dtype + len(a.dtypes)]).astype(np.int16),
        np.concatenate([a.shape, b.shape + len(a.shapes)]).astype(np.int32), np.concatenate([a.begin, b.begin]), np.concatenate([a.nbytes, b.nbytes]),
        (*a.families, *b.families), (*a.rows, *(r + shift for r in b.rows)),
    )  # fmt: skip


def read_scales(path: Path) -> dict[str, float]:
    """Module -> activation scale (a multiplier: largest activation / 2688), from .safetensors (`MODULE.input_scale`, one
    number each) or JSON ({module or key: number}). Raises CheckpointError."""
    if path.suffix == ".json":
        found = _from_json(path)
    else:
        with open_source(path) as source:
            found = {}
            for row in range(len(source.table)):
                dtype, shape = source.table.dtypes[source.table.dtype[row]], source.table.shapes[source.table.shape[row]]
                if dtype != "f32" or math.prod(shape) != 1:
                    raise _bad(path, f"{source.table.name(row)} is {dtype}{list(shape)}, and a scale is one f32 number")
                number = np.empty(1, np.float32)
                source.read_into(row, 0, 4, number.view(np.uint8))
                found[source.table.name(row)] = float(number[0])
    for key, value in found.items():
        with np.errstate(over="ignore", under="ignore"):
            stored = np.float32(value)
        if not (np.isfinite(stored) and stored > 0):
            raise _bad(path, f"{key} is {value}, and a scale is a positive number that f32 can hold")
    return {key.removesuffix(SUFFIX): value for key, value in found.items()}


def _from_json(path: Path) -> dict[str, float]:
    found = read_object(path, MAX_JSON, SCALES)
    if not all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in found.values()):
        raise _bad(path, "it is not an object of numbers")
    return {k: v if abs(v) < 1e300 else math.inf for k, v in found.items()}  # JSON integers have no end


def _bad(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        Diagnostic(SCALES, f"{path}: {reason}", help='a .safetensors with keys `MODULE.input_scale`, or JSON {"MODULE": number}')
    )


def with_scales(base: Source, path: str | Path) -> Overlay:
    """`base` with the activation scales of a file as rows `MODULE.input_scale`."""
    path = Path(path)
    scales = {module + SUFFIX: Raw("f32", (), np.float32(value).tobytes()) for module, value in read_scales(path).items()}
    return Overlay(base, StateDictSource(scales), path)
