"""Whole conversions of a real model (SmolLM2-135M) against what others made and decode."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

import quantrules as qr
from tests.conftest import dequantised

pytestmark = pytest.mark.oracle


def tensors(directory) -> dict[str, torch.Tensor]:
    found = {}
    for shard in sorted(directory.glob("*.safetensors")):
        found.update(load_file(shard))
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def convert(rules, source, out, **options):
    plan = qr.load(rules).bind(source, **options)
    qr.apply(plan, out)
    return tensors(out)


@pytest.mark.parametrize("spelling", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("shared", [False, True])
def test_nvfp4_to_bf16_is_what_compressed_tensors_decodes(smollm2_nvfp4, smollm2, tmp_path, spelling, shared):
    source = smollm2_nvfp4(spelling, shared)
    got, expected, original = convert("nvfp4_to_bf16", source, tmp_path / "out"), load_file(dequantised(source)), tensors(smollm2)
    assert got.keys() == original.keys() and len(expected) == 210
    for key, value in got.items():
        wanted = expected[key].to(torch.bfloat16) if key in expected else original[key]
        assert same_bits(value, wanted), key
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and not (tmp_path / "out" / "hf_quant_config.json").exists()


def test_the_comparison_fails_on_a_wrong_bit(smollm2):
    weight = tensors(smollm2)["model.norm.weight"]
    wrong = weight.clone()
    wrong.view(torch.int16)[3] ^= 1
    assert same_bits(weight, weight.clone()) and not same_bits(weight, wrong)


@pytest.mark.parametrize("there, back", [("nvfp4_modelopt_to_compressed_tensors", "nvfp4_compressed_tensors_to_modelopt"),
                                         ("nvfp4_compressed_tensors_to_modelopt", "nvfp4_modelopt_to_compressed_tensors")])  # fmt: skip
def test_respelling_keeps_codes_and_block_scales(smollm2_nvfp4, tmp_path, there, back):
    """The other spelling of the same quantisation, made by compressed-tensors, is the oracle of each."""
    spellings = ["modelopt", "compressed-tensors"] if "modelopt_to" in there else ["compressed-tensors", "modelopt"]
    source, oracle = (smollm2_nvfp4(s) for s in spellings)
    got, wanted = convert(there, source, tmp_path / "there"), tensors(oracle)
    wanted = {k: v for k, v in wanted.items() if not k.endswith("input_scale")}  # weight-only sources need not have one
    for key, value in wanted.items():
        if "global" in key or key.endswith("scale_2"):  # a reciprocal in f32: within a unit in the last place
            assert got[key].shape == value.shape
            ulps = (got[key].reshape(-1).view(torch.int32) - value.reshape(-1).view(torch.int32)).abs()
            assert int(ulps) <= 1, key
        else:
            assert same_bits(got[key].view(value.dtype) if got[key].dtype != value.dtype else got[key], value), key
    assert wanted.keys() <= got.keys()
    again = convert(back, tmp_path / "there", tmp_path / "back")
    for key, value in tensors(source).items():
        if "global" not in key and not key.endswith(("scale_2", "input_scale")):
            assert same_bits(again[key], value), key


def test_bf16_to_nvfp4_is_what_compressed_tensors_makes(smollm2, smollm2_nvfp4, tmp_path):
    """Every tensor of all 692, to the bit."""
    got, theirs = convert("bf16_to_nvfp4", smollm2, tmp_path / "out", spelling="compressed_tensors"), tensors(smollm2_nvfp4("compressed-tensors"))
    assert set(theirs) == set(got) and len(got) == 692
    for key, value in theirs.items():
        assert same_bits(got[key], value), key
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "compressed-tensors"
    assert all(group["input_activations"] is None for group in config["config_groups"].values())  # weights only: no scale was invented


def test_fp8_blocks_are_what_compressed_tensors_decodes(smollm2, tmp_path):
    """576 and 1536 are 4.5 and 12 blocks of 128: partial blocks are included (q_proj is 576 × 576)."""
    got = convert("bf16_to_fp8_block", smollm2, tmp_path / "fp8")
    decoded = convert("fp8_block_to_bf16", tmp_path / "fp8", tmp_path / "bf16")
    for key in [k for k in got if k.endswith("weight_scale_inv")]:
        weight = key.removesuffix("_scale_inv")
        assert same_bits(decoded[weight], oracle_block_decode(got[weight], got[key])), key


def oracle_block_decode(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """compressed-tensors' dequantisation with strategy block, in bf16."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    args = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[128, 128], symmetric=True)
    return dequantize(weight, scale, args=args, dtype=torch.float32).to(torch.bfloat16)


def test_every_output_is_read_by_safetensors(smollm2, tmp_path):
    convert("bf16_to_nvfp4", smollm2, tmp_path / "out")
    for shard in (tmp_path / "out").glob("*.safetensors"):
        with safe_open(shard, "pt") as file:
            assert file.metadata()["format"] == "pt" and file.keys()


def test_the_model_still_answers(smollm2_nvfp4, tmp_path):
    """What compressed-tensors quantised and we decoded is a model that transformers loads and that knows its capitals."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    convert("nvfp4_to_bf16", smollm2_nvfp4("modelopt"), tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.bfloat16)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    said = tokenizer.decode(model.generate(**ids, max_new_tokens=24, do_sample=False)[0, ids["input_ids"].shape[1] :])
    assert "Paris" in said, said
