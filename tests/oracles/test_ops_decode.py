"""dequant against the decoders of compressed-tensors, ModelOpt and transformers: all bytes under all scale bytes."""

from __future__ import annotations

import pytest
import torch

from tests.ops import forms as f
from tests.ops.test_dequant import every_pair

pytestmark = pytest.mark.oracle


def legal(scales: torch.Tensor) -> torch.Tensor:
    """Scale bytes without NaN, whose bits no oracle promises."""
    return torch.where(scales.view(torch.uint8) & 127 == 127, 0x38, scales.view(torch.uint8))


def by_compressed_tensors(codes, scales, g):
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import NVFP4

    scheme = QuantizationScheme(targets=["Linear"], **NVFP4)
    state = {"weight_packed": codes, "weight_scale": scales.view(torch.float8_e4m3fn), "weight_global_scale": g}
    return NVFP4PackedCompressor.decompress(state, scheme)["weight"]


def same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    differ = a.view(torch.int16 if a.element_size() == 2 else torch.int32) != b.view(
        torch.int16 if b.element_size() == 2 else torch.int32
    )
    assert not differ.any(), f"{int(differ.sum())} of {a.numel()} differ"


@pytest.mark.parametrize("g", [4.0, 0.3, 3.1e-5, 1.7e4])
def test_nvfp4_by_compressed_tensors(g):
    """Bit for bit in bf16, the sign of zero included."""
    codes, scales, _ = every_pair(f.NVFP4)
    scales, shared = legal(scales), torch.tensor([g])
    v = f.value(f.packed(f.NVFP4, 256, 4096, spelling="compressed_tensors"), codes=codes, scale=scales, **{"global": shared})
    same(f.one("dequant", v).tensor(), by_compressed_tensors(codes, scales, shared))
    scales[3, 3] ^= 1
    with pytest.raises(AssertionError, match="differ"):
        same(f.one("dequant", v).tensor(), by_compressed_tensors(codes, scales, shared))


@pytest.mark.parametrize("g", [0.25, 0.3, 3.1e-5, 1.7e4])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_nvfp4_by_modelopt(g, dtype):
    """Equal numbers in f32 and bf16; its table has +0 for code 8, so the sign of zero is left out."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    codes, scales, _ = every_pair(f.NVFP4)
    scales = legal(scales)
    v = f.value(f.packed(f.NVFP4, 256, 4096), codes=codes, scale=scales, **{"global": torch.tensor(g)})
    target = torch.float32 if dtype == "f32" else torch.bfloat16
    # modelopt decodes in the dtype of its result: ask for f32 and round once, as engines do
    theirs = NVFP4QTensor(torch.Size([256, 4096]), torch.float32, codes).dequantize(
        scale=scales.view(torch.float8_e4m3fn), double_scale=torch.tensor(g), block_sizes={-1: 16}, dtype=torch.float32
    )
    assert torch.equal(f.one("dequant", v, dtype=dtype).tensor(), theirs.to(target))


def mxfp4(codes, scales):
    return f.value(f.packed(f.MXFP4, *codes.shape[:-1], codes.shape[-1] * 2), codes=codes, scale=scales)


def test_mxfp4_by_compressed_tensors():
    """Bytes 1..253: its decoder computes scales in bf16 and products in the dtype of its result."""
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import MXFP4

    codes, scales, _ = every_pair(f.MXFP4)
    codes, scales = codes[1:254], scales[1:254]
    scheme = QuantizationScheme(targets=["Linear"], **MXFP4)
    theirs = MXFP4PackedCompressor.decompress({"weight_packed": codes, "weight_scale": scales}, scheme)["weight"]
    same(f.one("dequant", mxfp4(codes, scales)).tensor(), theirs.to(torch.bfloat16))


def test_mxfp4_by_transformers():
    """gpt-oss blocks of experts: its result is transposed."""
    from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

    codes = torch.randint(0, 256, (3, 40, 4, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scales = torch.randint(100, 150, (3, 40, 4), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    theirs = _convert_moe_packed_tensors(codes.clone(), scales.clone(), dtype=torch.bfloat16)
    same(f.one("dequant", mxfp4(codes.reshape(3, 40, 64), scales)).tensor(), theirs.transpose(1, 2).contiguous())


def test_mxfp4_by_modelopt():
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    codes, scales, _ = every_pair(f.MXFP4)
    codes, scales = codes[:254], scales[:254]
    theirs = MXFP4QTensor(torch.Size([254, 8192]), torch.float32, codes).dequantize(
        dtype=torch.float32, scale=scales.reshape(-1, 1), block_sizes=[32]
    )
    assert torch.equal(f.numbers(mxfp4(codes, scales)), theirs)


def fp8(rows: int, columns: int, seed: int = 0, dtype: str = "f32"):
    return f.random(f.packed(f.FP8_BLOCK, rows, columns, scale=dtype), seed)


@pytest.mark.parametrize("shape", [(256, 384), (300, 200), (129, 1), (5, 300)])
@pytest.mark.parametrize("dtype", ["f32", "f8_e8m0"])
def test_fp8_blocks_by_compressed_tensors(shape, dtype):
    """Partial blocks in both directions, bit for bit in bf16."""
    from compressed_tensors.entrypoints.convert.converters.fp8block_dequantizer import FP8BlockDequantizer

    v = fp8(*shape, dtype=dtype)
    theirs = FP8BlockDequantizer(targets=["re:.*"]).process(
        {"m.weight": v.tensor().clone(), "m.weight_scale_inv": v.tensor("scale").float()}
    )
    same(f.one("dequant", v).tensor(), theirs["m.weight"])


@pytest.mark.parametrize("shape", [(256, 384), (300, 200)])
def test_fp8_blocks_by_transformers(shape):
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    v = fp8(*shape, 1)
    same(f.numbers(v), _dequantize_fp8_weight(v.tensor(), v.tensor("scale"), (128, 128), torch.float32))
