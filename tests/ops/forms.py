"""Formats built by hand, values of them, and a runner of single ops: whole, or in tiles as the real one works."""

from __future__ import annotations

import numpy as np
import torch
from attrs import evolve

from quantrules.ops import REGISTRY
from quantrules.ops.base import Context, Step, Value
from quantrules.ops.torch_views import torch_dtype
from quantrules.types import (
    Axis,
    Element,
    Format,
    Grid,
    GridDim,
    Part,
    Spelling,
    Type,
    flat_rows,
    make_type,
    part_bytes,
    rows_of,
    tile,
)

N, K = GridDim("N"), GridDim("K")


def grid(*dims: str | int) -> tuple[GridDim, ...]:
    return tuple(GridDim("", d) if isinstance(d, int) else GridDim(d[0], int(d[2:] or 1) if len(d) > 1 else 1) for d in dims)


DENSE = Format("dense", None, (), "codes", (
    Spelling("weight", (Part("codes", ".weight", (), None),), ".weight"),
    Spelling("bare", (Part("codes", "", (), None),), ""),
))  # fmt: skip
NVFP4 = Format("nvfp4", Element("e2m1", 2), (1, 16), ("codes", ("scale", "global")), (
    Spelling("modelopt", (
        Part("codes", ".weight", ("u8", "i8", "f4"), grid("N", "K/2")),
        Part("scale", ".weight_scale", ("f8_e4m3",), grid("N", "K/16")),
        Part("global", ".weight_scale_2", ("f32",), (), cat="collect", stack="collect"),
        Part("act", ".input_scale", ("f32",), (), optional=True, cat="max", stack="collect"),
    ), ".weight"),
    Spelling("compressed_tensors", (
        Part("codes", ".weight_packed", ("u8",), grid("N", "K/2")),
        Part("scale", ".weight_scale", ("f8_e4m3",), grid("N", "K/16")),
        Part("global", ".weight_global_scale", ("f32",), grid(1), inverse=True, cat="collect", stack="collect"),
        Part("act", ".input_global_scale", ("f32",), grid(1), optional=True, inverse=True, cat="max", stack="collect"),
    ), ".weight"),
))  # fmt: skip
FP8_BLOCK = Format("fp8_block", Element("f8_e4m3"), (128, 128), ("codes", "scale"), (
    Spelling("deepseek", (Part("codes", ".weight", ("f8_e4m3",), grid("N", "K")),
                          Part("scale", ".weight_scale_inv", ("f32", "f8_e8m0"), grid("N/128", "K/128"))), ".weight"),
    Spelling("v4", (Part("codes", ".weight", ("f8_e4m3",), grid("N", "K")),
                    Part("scale", ".scale", ("f8_e8m0", "f32"), grid("N/128", "K/128"))), ".weight"),
    Spelling("four", (Part("codes", ".weight", ("f8_e4m3",), grid("N", "K")),
                      Part("scale", ".weight_scale", ("f32",), grid("N/128", 1, "K/128", 1))), ".weight"),
))  # fmt: skip
MXFP4 = Format("mxfp4", Element("e2m1", 2), (1, 32), ("codes", "scale"), (
    Spelling("deepseek", (Part("codes", ".weight", ("i8", "u8", "f4"), grid("N", "K/2")),
                          Part("scale", ".scale", ("f8_e8m0", "u8"), grid("N", "K/32"))), ".weight"),
    Spelling("compressed_tensors", (Part("codes", ".weight_packed", ("u8",), grid("N", "K/2")),
                                    Part("scale", ".weight_scale", ("u8",), grid("N", "K/32"))), ".weight"),
))  # fmt: skip
FORMATS = {f.name: f for f in (DENSE, NVFP4, FP8_BLOCK, MXFP4)}


def context(*target_axes: Axis, **lows: int) -> Context:
    return Context(FORMATS, target_axes, lows)


def dense(dtype: str, *shape: int, spelling: str = "weight") -> Type:
    return make_type(DENSE, DENSE.spelling(spelling), shape, {"codes": dtype})


def packed(format: Format, *shape: int, spelling: str = "", act: bool = False, **dtypes: str) -> Type:
    spelled = format.spelling(spelling) if spelling else format.spellings[0]
    roles = [p.role for p in spelled.parts if act or not p.optional]
    return make_type(format, spelled, shape, dtypes, roles)


def value(type: Type, name: str = "m", **parts) -> Value:
    """A whole value; parts are tensors or arrays of the stored dtype (or bytes), in any shape."""
    made = Value.empty(type, name=name)
    for role, given in parts.items():
        t = given if isinstance(given, torch.Tensor) else torch.as_tensor(given)
        made.parts[role][:] = t.contiguous().reshape(-1).view(torch.uint8).numpy()
    return made


def of(tensor: torch.Tensor, dtype: str, name: str = "m", spelling: str = "weight") -> Value:
    return value(dense(dtype, *tensor.shape, spelling=spelling), name, codes=tensor.to(torch_dtype(dtype)))


def random(type: Type, seed: int = 0, name: str = "m", spread: float = 1.0) -> Value:
    """Legal random parts: any codes, positive scales, globals that differ by more than powers of two."""
    rng = np.random.default_rng(seed)
    made = Value.empty(type, name=name)
    for p in type.parts:
        n, size = made.parts[p.role], p.nbytes
        if type.is_dense and p.dtype in ("bf16", "f32", "f16"):
            numbers = torch.from_numpy(rng.standard_normal(size).astype(np.float32) * spread)
            n[:] = _bytes(numbers, p, size)
        elif p.role == "codes" and type.format.element and type.format.element.codec == "f8_e4m3":
            n[:] = rng.choice([b for b in range(256) if b & 127 != 127], size)
        elif p.role == "codes":
            n[:] = rng.integers(0, 256, size)
        elif p.dtype == "f8_e4m3":
            n[:] = rng.integers(1, 127, size)
        elif p.dtype in ("f8_e8m0", "u8"):
            n[:] = rng.integers(110, 135, size)
        else:
            n[:] = (rng.random(size // 4, np.float32) * 0.9 + 0.1).view(np.uint8)
    return made


def _bytes(numbers: torch.Tensor, part, size: int) -> np.ndarray:
    dtype = {"bf16": torch.bfloat16, "f32": torch.float32, "f16": torch.float16}[part.dtype]
    return numbers.to(dtype).view(torch.uint8)[:size].numpy()


def step(name: str, takes: Grid[Type], ctx: Context | None = None, **args) -> Step:
    op = REGISTRY[name]
    return Step(op, args, takes, op.infer(takes, args, ctx or context()))


def boundaries(whole: Type, grain: int, cuts: tuple[int, ...]) -> list[tuple[int, int]]:
    """Tiles of a value: its slices cut at multiples of the grain near `cuts`, and the last slices together."""
    outer, n, _ = rows_of(whole.shape)
    if not outer * n:
        return [(0, 0)]
    inside = sorted({0, n, *(min(n, c % (n + 1) // grain * grain) for c in cuts)})
    tiles, single = [], outer if outer < 3 else outer - 2
    for k in range(single):
        tiles += [(k * n + a, k * n + b) for a, b in zip(inside, inside[1:], strict=False)]
    return tiles + ([(single * n, outer * n)] if single < outer and n else [])


def run(step: Step, inputs: list[Value], cuts: tuple[int, ...] | None = None) -> list[Value]:
    """All outputs of a step; with cuts, in tiles: survey folded over tiles, then each tile written into its place."""
    op, state = step.op, None
    if op.needs_survey(step):
        if cuts is None:
            state = op.survey(step, tuple(inputs), None)
        else:
            for i, v in enumerate(inputs):
                for lo, hi in reversed(
                    boundaries(
                        step.takes.items[i], step.takes.items[i].format.block[0] if step.takes.items[i].format.block else 1, cuts
                    )
                ):
                    state = op.survey(step, tuple(v.rows(v.type, lo, hi) if j == i else None for j in range(len(inputs))), state)
    outs = [Value.empty(t, name=f"out{i}") for i, t in enumerate(step.made.items)]
    for o in outs:
        for p in o.parts.values():
            p[:] = 0xA5
    if cuts is None:
        op.reference(step, tuple(inputs), state, tuple(outs))
        return outs
    for i, o in enumerate(outs):
        for lo, hi in boundaries(o.type, op.grain(step, i), cuts):
            wanted = op.rows(step, i, lo, hi)
            if wanted is None:
                op.reference(step, tuple(inputs), state, tuple(v if j == i else None for j, v in enumerate(outs)))
                break
            given = tuple(None if w is None else v.rows(v.type, *w) for v, w in zip(inputs, wanted, strict=True))
            made = Value.empty(o.type, lo, hi, name=o.name)
            op.reference(step, given, state, tuple(made if j == i else None for j in range(len(outs))))
            for p in tile(o.type, lo, hi).parts:
                a, b = part_bytes(o.type, p.role, lo, hi)
                o.parts[p.role][a:b] = made.parts[p.role]
    return outs


def same(a: list[Value], b: list[Value]) -> None:
    """Types (but for what they say of other members) and bits equal."""
    assert [evolve(v.type, aligned=()) for v in a] == [evolve(v.type, aligned=()) for v in b]
    for x, y in zip(a, b, strict=True):
        for role in x.parts:
            differ = np.flatnonzero(x.parts[role] != y.parts[role])
            assert not len(differ), f"{x.type} {role}: {len(differ)} bytes differ, first at {differ[0]}"


def one(op: str, v: Value, ctx: Context | None = None, **args) -> Value:
    """The result of an op on a single value."""
    return run(step(op, Grid.one(v.type), ctx, **args), [v])[0]


def numbers(v: Value) -> torch.Tensor:
    """f32 of a value by way of the dequant op."""
    return one("dequant", v, dtype="f32").tensor().clone() if not v.type.is_dense else v.tensor().float()


__all__ = ["Axis", "Grid", "Value", "flat_rows"]
