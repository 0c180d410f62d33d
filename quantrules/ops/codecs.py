"""Element codecs: how codes and scales are numbers. Tables in numpy; decode, encode and rounding in torch, imported inside.

Every encoder rounds half to even and saturates; e2m1 writes code 0 for zero of either sign and code 8 for a negative number
that rounds to zero.
"""

from __future__ import annotations

from functools import cache

import numpy as np

from quantrules.ops.torch_views import torch_dtype
from quantrules.types import Element, Format

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
# The first number that rounds up to each next code: midpoints, where a tie that goes up to an even code is one ulp lower.
E2M1_BOUNDS = tuple(float(np.nextafter(np.float32(b), np.float32(0 if i % 2 else b)))
                    for i, b in enumerate((0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)))  # fmt: skip
LARGEST = {"e2m1": 6.0, "f8_e4m3": 448.0}  # of the codecs that can be written
SMALLEST = {"f8_e4m3": 2.0**-9}
TINY = 2.0**-126  # the smallest normal f32
POWER_RULES = ("ceil", "even", "floor")


@cache
def table(codec: str) -> np.ndarray:
    """f32 values of all codes: 16 of e2m1, 256 of a one-byte float; NaN where a code has no number."""
    if codec == "e2m1":
        return np.array(E2M1 + tuple(-v for v in E2M1), np.float32)
    bits = np.arange(256, dtype=np.int32)
    if codec == "f8_e8m0":
        return np.where(bits == 255, np.nan, np.ldexp(1.0, bits - 127)).astype(np.float32)
    if codec == "f8_e4m3":
        exponent, mantissa = bits >> 3 & 15, bits & 7
        value = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), np.ldexp(1 + mantissa / 8, exponent - 7))
        return np.where(bits & 127 == 127, np.nan, np.where(bits & 128, -value, value)).astype(np.float32)
    raise KeyError(f"no table of {codec}")


def codec_of(format: Format, role: str, dtype: str) -> str:
    """How a part of this dtype is read as numbers: a plain byte holds the one-byte float that the format names for it."""
    if dtype not in ("u8", "i8"):
        return dtype
    named = [d for s in format.spellings for p in s.parts if p.role == role for d in p.dtypes if d.startswith("f8_")]
    return named[0] if named else dtype


def decode_codes(raw, element: Element, columns: int):
    """f32 [..., columns] of codes [..., columns / per]."""
    import torch

    if element.per == 1:
        return raw.view(torch_dtype(element.codec)).float()
    values = torch.from_numpy(table(element.codec)).to(raw.device)
    first, second = torch.meshgrid(values, values, indexing="xy" if element.low_first else "ij")  # [high nibble, low nibble]
    pairs, raw = torch.stack((first, second), -1).reshape(256, 2), raw.view(torch.uint8)
    return pairs.index_select(0, raw.reshape(-1).int()).reshape(*raw.shape[:-1], columns)


def encode_codes(x, element: Element):
    """Codes of f32 x [..., K], as bytes [..., K / per]."""
    import torch

    top = LARGEST[element.codec]
    if element.codec != "e2m1":
        return x.clamp(-top, top).to(torch_dtype(element.codec)).view(torch.uint8)
    bounds = torch.tensor(E2M1_BOUNDS, device=x.device)
    codes = torch.bucketize(x.abs().contiguous(), bounds, out_int32=True).to(torch.uint8) | (x < 0).to(torch.uint8) << 3
    if element.per == 1:
        return codes
    first, second = codes[..., 0::2], codes[..., 1::2]
    return first | second << 4 if element.low_first else second | first << 4


def decode_numbers(raw, codec: str):
    """f32 of scales: one-byte floats by their value, wider floats as they are."""
    import torch

    return raw.view(torch_dtype(codec)).float() if codec.startswith("f8_") else raw.to(torch.float32)


def round_to(x, dtype: str):
    """f32 x rounded once to a float dtype; every NaN becomes the positive quiet one, as torch's vector and scalar code differ."""
    import torch

    y = x.to(torch_dtype(dtype))
    bad = torch.isnan(y)
    return torch.where(bad, torch.tensor(float("nan"), device=x.device).to(y.dtype), y) if bad.any() else y


def power_of_two(amax, top: float, rule: str):
    """The scale 2^e of blocks with this largest magnitude, for codes up to `top`.

    ceil: the least power that is not below amax / top, so nothing saturates. even: amax rounded to a power (up from 1.75 of
    one), floor: rounded down, both over the power of two in `top`: magnitudes up to 7/6 and 4/3 of it saturate. Exponent
    bytes stay in 1..254, since 0 and 255 are no numbers to every reader.
    """
    import torch

    bits = (amax / top if rule == "ceil" else amax).contiguous().view(torch.int32)
    if rule == "ceil":
        exponent = (bits >> 23) + (bits & 0x7FFFFF != 0).int()
    else:
        exponent = (bits + (1 << 21 if rule == "even" else 0) >> 23) - int(np.log2(top))
    return (exponent.clamp(1, 254) << 23).view(torch.float32)
