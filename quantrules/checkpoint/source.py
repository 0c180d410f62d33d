"""Sources of tensors: what a plan reads from. Files of a checkpoint, or tensors in memory; both give a KeyTable and bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path, PurePosixPath
from typing import Protocol

import numpy as np
from attrs import frozen

from quantrules.checkpoint.files import CHANGED, Descriptors, open_regular, read_at, refuse
from quantrules.checkpoint.headers import NAME
from quantrules.diagnostics import Diagnostic
from quantrules.names import HOLE, KeyTable

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
CONFIG_FILES = ("config.json", "hf_quant_config.json", "quantize_config.json")
MANIFEST = "quantrules_manifest.json"


@frozen
class SideFile:
    """A file that is copied as it is: its name below the checkpoint (POSIX), and where it is read."""

    name: str
    path: Path


@frozen
class Stamp:
    """What a file was when its header was read; it must be the same when its data is."""

    device: int
    inode: int
    size: int
    modified: int  # ns

    @staticmethod
    def of(fd: int) -> Stamp:
        s = os.fstat(fd)
        return Stamp(s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns)


class Source(Protocol):
    """Tensors by row of `table`. Safe for threads; a context manager that closes itself."""

    table: KeyTable
    config: Mapping  # config.json; {} where there is none
    config_files: Mapping[str, dict]  # by name, those of CONFIG_FILES that exist
    metadata: Mapping[str, str]  # of the shards, as far as they agree
    path: Path | None
    warnings: tuple[Diagnostic, ...]

    def side_files(self) -> tuple[SideFile, ...]: ...

    def read_into(self, row: int, lo: int, hi: int, out: memoryview | np.ndarray) -> None:
        """Bytes [lo, hi) of the tensor into `out`, which has exactly hi - lo bytes. Raises CheckpointError."""

    def opened(self, row: int) -> AbstractContextManager[tuple[int, int]] | None:
        """(descriptor, offset of the tensor in it) for copies by the kernel; None where there is no file."""

    def real_files(self) -> tuple[Path, ...]:
        """Every file that may be read, links resolved: what an output must not touch."""

    def recheck(self) -> None:
        """Raises CheckpointError where a file is no longer what it was when its header was read."""

    def close(self) -> None: ...


def is_inside(name: str) -> bool:
    """Whether a name leads to a place below its directory: a relative POSIX path in normal form, without `..`."""
    path = PurePosixPath(name)
    plain = name.isprintable() and "\\" not in name and ":" not in name
    return plain and not path.is_absolute() and ".." not in path.parts and str(path) == name and name != "."


def as_bytes(out: memoryview | np.ndarray) -> memoryview:
    """A writable view of the bytes of a contiguous buffer."""
    view = memoryview(out)
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


class _Base:
    table: KeyTable
    config_files: Mapping[str, dict]

    @property
    def config(self) -> dict:
        return self.config_files.get("config.json", {})

    def _checked(self, row: int, lo: int, hi: int, out: memoryview | np.ndarray) -> memoryview:
        view = as_bytes(out)
        assert 0 <= lo <= hi <= self.table.nbytes[row] and len(view) == hi - lo, (row, lo, hi, len(view))
        return view

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def recheck(self) -> None:
        pass

    def close(self) -> None:
        pass


class FileSource(_Base):
    """A checkpoint on disk, as directory.open_source made it. `paths` are the files of `table.files`, in that order."""

    def __init__(
        self,
        path: Path,
        paths: tuple[Path, ...],
        table: KeyTable,
        config_files: Mapping[str, dict],
        metadata: Mapping[str, str],
        sides: tuple[SideFile, ...],
        warnings: tuple[Diagnostic, ...],
        stamps: tuple[Stamp, ...],
    ):
        self.path, self.paths, self.table, self.config_files, self.metadata = path, paths, table, config_files, metadata
        self.warnings, self._sides, self._stamps = warnings, sides, stamps
        self._descriptors = Descriptors(self._open)

    def _open(self, file: int) -> int:
        fd = open_regular(self.paths[file])
        if Stamp.of(fd) != self._stamps[file]:
            os.close(fd)
            message = f"{self.paths[file]} was changed or replaced after its header was read"
            raise refuse(CHANGED, message, "run again once nothing writes to it")
        return fd

    def side_files(self) -> tuple[SideFile, ...]:
        return self._sides

    def read_into(self, row: int, lo: int, hi: int, out: memoryview | np.ndarray) -> None:
        view, file = self._checked(row, lo, hi, out), int(self.table.file[row])
        with self._descriptors.use(file) as fd:
            read_at(fd, int(self.table.begin[row]) + lo, view, str(self.paths[file]))

    @contextmanager
    def opened(self, row: int) -> Iterator[tuple[int, int]]:
        with self._descriptors.use(int(self.table.file[row])) as fd:
            yield fd, int(self.table.begin[row])

    def real_files(self) -> tuple[Path, ...]:
        return tuple(Path(os.path.realpath(p)) for p in (*self.paths, *(s.path for s in self._sides)))

    def recheck(self) -> None:
        for file in range(len(self.paths)):
            os.close(self._open(file))

    def close(self) -> None:
        self._descriptors.close()


# names of dtypes in torch and numpy (with ml_dtypes) -> ours
DTYPE_NAMES = {
    "bool": "bool", "uint8": "u8", "int8": "i8", "uint16": "u16", "int16": "i16", "uint32": "u32", "int32": "i32",
    "uint64": "u64", "int64": "i64", "float16": "f16", "bfloat16": "bf16", "float32": "f32", "float64": "f64",
    "complex64": "c64", "float8_e4m3fn": "f8_e4m3", "float8_e5m2": "f8_e5m2", "float8_e8m0fnu": "f8_e8m0",
    "float8_e4m3fnuz": "f8_e4m3fnuz", "float8_e5m2fnuz": "f8_e5m2fnuz", "float4_e2m1fn_x2": "f4",
}  # fmt: skip


@frozen
class Raw:
    """A tensor given as bytes: dtype (ours), shape (as in a file), data. For dtypes that numpy lacks."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class StateDictSource(_Base):
    """Tensors in memory: torch tensors (of any device), numpy arrays, or Raw bytes, by name.

    A tensor that is not contiguous is copied once, here; others are only referred to.
    """

    path = None
    warnings: tuple[Diagnostic, ...] = ()

    def __init__(self, tensors: Mapping[str, object], config: Mapping | None = None, metadata: Mapping[str, str] | None = None):
        self.config_files = {"config.json": dict(config)} if config is not None else {}
        self.metadata = dict(metadata or {})
        if wrong := next((n for n in tensors if HOLE in n), None):
            raise refuse(NAME, f"{wrong!r} has a NUL character in its name")
        held = [_held(t) for t in tensors.values()]
        self._data = [data for _, _, data in held]
        sizes = [len(d) for d in self._data]
        self.table = KeyTable.build(("",), [(n, 0, d, s, 0, size) for n, (d, s, _), size in zip(tensors, held, sizes)])

    def side_files(self) -> tuple[SideFile, ...]:
        return ()

    def read_into(self, row: int, lo: int, hi: int, out: memoryview | np.ndarray) -> None:
        view, part = self._checked(row, lo, hi, out), self._data[row][lo:hi]
        np.frombuffer(view, np.uint8)[:] = part if isinstance(part, np.ndarray) else part.cpu().numpy()

    def opened(self, row: int) -> None:
        return None

    def real_files(self) -> tuple[Path, ...]:
        return ()


def _held(tensor) -> tuple[str, tuple[int, ...], object]:
    """(dtype, shape as in a file, flat bytes: a uint8 array or torch tensor)."""
    if isinstance(tensor, Raw):
        return tensor.dtype, tuple(tensor.shape), np.frombuffer(tensor.data, np.uint8)
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPE_NAMES:
        raise TypeError(f"a tensor of dtype {name} has no place in a checkpoint")
    dtype, shape = DTYPE_NAMES[name], tuple(map(int, tensor.shape))
    if dtype == "f4":  # two elements in one of torch's
        shape = (*shape[:-1], shape[-1] * 2)
    if isinstance(tensor, np.ndarray):
        return dtype, shape, np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    import torch

    return dtype, shape, tensor.detach().contiguous().reshape(-1).view(torch.uint8)
