"""Checkpoints made by hand, byte by byte; nothing of ours and nothing of safetensors' is used."""

import json
from pathlib import Path


def entry(dtype="U8", shape=(4,), begin=0, end=4) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def raw(header, data: bytes = b"", length: int | None = None) -> bytes:
    """The bytes of a file; a header that is no bytes is written as JSON, `length` may lie."""
    text = header if isinstance(header, bytes) else (header if isinstance(header, str) else json.dumps(header)).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def of(**tensors: bytes) -> bytes:
    """A file of u8 vectors."""
    header, at = {}, 0
    for name, data in tensors.items():
        header[name] = entry("U8", (len(data),), at, at + len(data))
        at += len(data)
    return raw(header, b"".join(tensors.values()))


def checkpoint(folder: Path, files: dict[str, bytes], weight_map: dict | None = None, config: dict | None = None) -> Path:
    """A directory with these files, and an index where there is a map."""
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    folder.mkdir(exist_ok=True)
    if weight_map is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder
