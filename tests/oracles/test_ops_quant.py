"""quant against ModelOpt (multiplying globals), compressed-tensors (dividing ones, MXFP4) and DeepGEMM (FP8 blocks, MXFP4).

Where they differ from each other the docstring says what is ours: blocks of zeros have scale 0 (ModelOpt 1, compressed-tensors
0.125), blocks far below the largest have the smallest scale 2^-9 as with ModelOpt (compressed-tensors: 0.125, which zeroes
them), an all-zero tensor has global 1 as with compressed-tensors (ModelOpt: 0, and NaN scales).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.conftest import lacking
from tests.ops import forms as f

pytestmark = pytest.mark.oracle


def weights(dtype: torch.dtype, columns: int = 512):
    """Rows of many scales, with ties and zeros among them; no block of zeros, and none far below the largest."""
    x = torch.randn(64, columns, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 1, 64)[:, None]
    x[:, ::7] = (x[:, ::7] * 8).round() / 8
    x[:, 5::32], x[0, 1] = 0.0, -0.0
    return (x * 0.03).to(dtype)


def quantised(x: torch.Tensor, format: str, **args):
    return f.one("quant", f.of(x, "bf16" if x.dtype == torch.bfloat16 else "f32"), format=format, **args)


def bits(x: torch.Tensor) -> list[int]:
    return x.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_is_modelopts(dtype):
    """Codes, block scales and global bit for bit, with the global scale found or given."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    x = weights(dtype)
    theirs, scale, shared = NVFP4QTensor.quantize(x.clone(), 16)
    mine = quantised(x, "nvfp4")
    assert bits(mine.tensor("global")) == bits(shared) and bits(mine.tensor("scale")) == bits(scale)
    assert bits(mine.tensor("codes")) == bits(theirs._quantized_data)


def test_small_blocks_are_modelopts_and_blocks_of_zeros_are_not():
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    x = torch.ones(3, 16)
    x[1], x[2] = 2.0**-20, 0.0
    theirs, scale, _ = NVFP4QTensor.quantize(x.clone(), 16)
    mine = quantised(x, "nvfp4")
    assert bits(mine.tensor("codes")) == bits(theirs._quantized_data)
    assert mine.tensor("scale").float()[:, 0].tolist() == [448, 2.0**-9, 0] and scale.float()[:, 0].tolist() == [448, 2.0**-9, 1]


def by_compressed_tensors(x, **args):
    from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    made = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True,
                            scale_dtype=torch.float8_e4m3fn, zp_dtype=torch.float8_e4m3fn)  # fmt: skip
    groups = x.float().reshape(len(x), -1, 16)
    g = generate_gparam(groups.min(), groups.max()).reshape(1)
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), made, global_scale=g)
    state = {"weight": x.float(), "weight_scale": scale.float(), "weight_global_scale": g}
    return NVFP4PackedCompressor.compress(state, QuantizationScheme(targets=["Linear"], weights=made))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_with_a_dividing_global_is_compressed_tensors(dtype):
    x = weights(dtype)
    theirs, mine = by_compressed_tensors(x), quantised(x, "nvfp4", spelling="compressed_tensors")
    assert bits(mine.tensor("global")) == bits(theirs["weight_global_scale"])
    assert bits(mine.tensor("scale")) == bits(theirs["weight_scale"])
    assert bits(mine.tensor("codes")) == bits(theirs["weight_packed"])


@pytest.mark.parametrize("seed", [7, 13, 19])
def test_each_direction_of_the_global_has_the_order_of_its_own_oracle(seed):
    """Data on which the two oracles make different codes and block scales."""
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    x = (torch.randn(256, 1024, generator=torch.Generator().manual_seed(seed)) * 0.03).to(torch.bfloat16)
    multiplies, divides = quantised(x, "nvfp4"), quantised(x, "nvfp4", spelling="compressed_tensors")
    one, scale, _ = NVFP4QTensor.quantize(x.clone(), 16)
    two = by_compressed_tensors(x)
    assert (
        bits(multiplies.tensor("codes"))
        == bits(one._quantized_data)
        != bits(two["weight_packed"])
        == bits(divides.tensor("codes"))
    )
    assert bits(multiplies.tensor("scale")) == bits(scale) != bits(two["weight_scale"]) == bits(divides.tensor("scale"))


def test_an_all_zero_tensor_has_the_global_of_compressed_tensors():
    theirs, mine = (
        by_compressed_tensors(torch.zeros(2, 16)),
        quantised(torch.zeros(2, 16), "nvfp4", spelling="compressed_tensors"),
    )
    assert mine.tensor("global").tolist() == theirs["weight_global_scale"].tolist() == [1.0]
    assert bits(mine.tensor("codes")) == bits(theirs["weight_packed"])
    assert mine.tensor("scale").float().tolist() == [[0.0]] * 2 and theirs["weight_scale"].float().tolist() == [[0.125]] * 2


def test_mxfp4_by_the_even_rule_is_compressed_tensors():
    from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.quant_scheme import MXFP4
    from compressed_tensors.quantization.utils import calculate_qparams

    x, scheme = weights(torch.float32), QuantizationScheme(targets=["Linear"], **MXFP4)
    groups = x.reshape(len(x), -1, 32)
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
    theirs = MXFP4PackedCompressor.compress({"weight": x, "weight_scale": scale}, scheme)
    mine = quantised(x, "mxfp4", rule="even")
    assert bits(mine.tensor("scale")) == bits(theirs["weight_scale"]) and bits(mine.tensor("codes")) == bits(
        theirs["weight_packed"]
    )
    assert bits(quantised(x, "mxfp4").tensor("scale")) != bits(theirs["weight_scale"]), "the default rule is another one"


@pytest.fixture(scope="module")
def deep_gemm():
    """deep_gemm/utils/math.py by its path: the package itself wants CUDA."""
    spec = importlib.util.find_spec("deep_gemm")
    if spec is None:
        lacking("sgl-deep-gemm not installed: make oracles")
    path = Path(spec.submodule_search_locations[0]) / "utils" / "math.py"
    found = importlib.util.spec_from_file_location("deep_gemm_math", path)
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize("shape", [(256, 384), (300, 200), (1, 130)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ue8m0", [False, True])
def test_fp8_blocks_are_deep_gemms(deep_gemm, shape, dtype, ue8m0):
    """Codes and scales bit for bit, partial blocks and blocks below 1e-4 included."""
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    x[:128, :128] *= 1e-6
    codes, scale = deep_gemm.per_block_cast_to_fp8(x, use_ue8m0=ue8m0)
    mine = quantised(x, "fp8_block", scale="f8_e8m0" if ue8m0 else "f32")
    assert bits(mine.tensor("codes")) == bits(codes)
    assert torch.equal(mine.tensor("scale").float(), scale)


def test_mxfp4_by_the_ceil_rule_is_deep_gemms(deep_gemm):
    """Equal numbers; it writes code 0 where a negative number rounds to zero."""
    x = weights(torch.float32)
    codes, scale = deep_gemm.per_token_cast_to_fp4(x, use_ue8m0=True, gran_k=32)
    mine = quantised(x, "mxfp4", floor=1e-4)
    assert torch.equal(mine.tensor("scale").float(), scale)
    assert torch.equal(f.numbers(mine), deep_gemm.cast_back_from_fp4(codes, scale, gran_k=32))
    assert torch.equal(quantised(x, "mxfp4").tensor("scale").float(), scale.clone()) or x.abs().min() < 1e-4


def test_scales_of_ceil_are_modelopts():
    """ModelOpt's MXFP4 has the same scales; its codes round ties down and have code 8 for zero."""
    from modelopt.torch.quantization.qtensor import MXFP4QTensor

    x = weights(torch.float32)
    _, scale = MXFP4QTensor.quantize(x.clone(), 32)
    assert bits(quantised(x, "mxfp4").tensor("scale")) == bits(scale)


def test_aligned_members_decode_in_compressed_tensors_to_their_own_numbers():
    """One global after an exact align, decoded by an oracle: the members' own values, where max-merging would scale one."""
    from tests.oracles.test_ops_decode import by_compressed_tensors as decode

    x = [weights(torch.float32)[:32], weights(torch.float32)[32:]]
    values = [quantised(v, "nvfp4", spelling="compressed_tensors") for v in x]
    values[1].tensor("global").copy_(values[0].tensor("global") * 4)
    for v in values:
        v.tensor("scale").copy_(v.tensor("scale").float().clamp(min=16.0).to(torch.float8_e4m3fn))
    s = f.step("align", f.Grid((f.Axis("", ("a", "b")),), tuple(v.type for v in values)))
    joined = f.run(f.step("cat", s.made), f.run(s, values))[0]
    theirs = decode(
        joined.tensor("codes").clone(), joined.tensor("scale").view(torch.uint8).clone(), joined.tensor("global").clone()
    )
    assert torch.equal(theirs, torch.cat([f.one("dequant", v).tensor() for v in values]))
