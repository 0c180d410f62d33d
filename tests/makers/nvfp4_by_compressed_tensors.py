#!/usr/bin/env python3
"""Quantise a BF16 checkpoint to NVFP4 with an independent implementation (compressed-tensors), in either spelling.

usage: nvfp4_by_compressed_tensors.py SRC OUT [--spelling compressed-tensors|modelopt] [--shared-globals]

Every `*_proj` weight of SRC becomes NVFP4 (groups of 16 along the columns, one global scale a module); the rest is copied.
Beside OUT stands `OUT.dequantised.safetensors`: the same weights decoded in float32 in the spelling's order of
multiplication, q·(scale/global) or q·(scale·global), not yet rounded to BF16.
"""
import argparse
import json
import shutil
from pathlib import Path

import torch
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors import safe_open
from safetensors.torch import save_file

GROUP = 16
SPELLINGS = ("compressed-tensors", "modelopt")
WEIGHTS = QuantizationArgs(
    num_bits=4,
    type="float",
    strategy="tensor_group",
    group_size=GROUP,
    symmetric=True,
    scale_dtype=torch.float8_e4m3fn,
    zp_dtype=torch.float8_e4m3fn,
)
SCHEME = QuantizationScheme(targets=["Linear"], weights=WEIGHTS)
FUSED = {"q_proj": "qkv", "k_proj": "qkv", "v_proj": "qkv", "gate_proj": "gate_up", "up_proj": "gate_up"}
PRODUCER = {"name": "modelopt", "version": "0.47.0"}
COMPRESSED_TENSORS_CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "tensor_group",
                "group_size": GROUP,
                "symmetric": True,
                "dynamic": False,
            },
        }
    },
}
MODELOPT_CONFIG = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "group_size": GROUP,
    "ignore": ["lm_head"],
    "producer": PRODUCER,
}
HF_QUANT_CONFIG = {
    "producer": PRODUCER,
    "quantization": {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": GROUP,
        "exclude_modules": ["lm_head"],
    },
}


def make(src: Path, out: Path, spelling: str = "compressed-tensors", shared_globals: bool = False) -> None:
    """Write the NVFP4 checkpoint and its decoding.

    With `shared_globals`, q/k/v and gate/up of a layer have one global scale, as engines that fuse them expect.
    """
    out.mkdir(parents=True, exist_ok=True)
    shards = sorted(src.glob("*.safetensors"))
    globals_ = global_scales(shards, shared_globals)
    weight_map, dense, total = {}, {}, 0
    for shard in shards:
        tensors = {}
        for key, weight in read(shard):
            if key.endswith("_proj.weight"):
                module = key.removesuffix(".weight")
                parts, dense[key] = quantise(module, weight, globals_[owner(module, shared_globals)], spelling)
                tensors |= parts
            else:
                tensors[key] = weight
        save_file(tensors, out / shard.name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard.name)
        total += sum(tensor.nbytes for tensor in tensors.values())
    save_file(dense, out.parent / f"{out.name}.dequantised.safetensors")
    write_side_files(src, out, spelling)
    write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})


def read(shard: Path):
    with safe_open(shard, "pt") as file:
        for key in file.keys():
            yield key, file.get_tensor(key)


def owner(module: str, shared: bool) -> str:
    """The name under which the global scale of `module` is kept."""
    parent, name = module.rsplit(".", 1)
    return f"{parent}.{FUSED.get(name, name)}" if shared else module


def global_scales(shards: list[Path], shared: bool) -> dict[str, torch.Tensor]:
    extremes = {}
    for shard in shards:
        for key, weight in read(shard):
            if key.endswith("_proj.weight"):
                name = owner(key.removesuffix(".weight"), shared)
                low, high = extremes.get(name, (weight.min(), weight.max()))
                extremes[name] = min(low, weight.min()), max(high, weight.max())
    return {name: generate_gparam(low.float(), high.float()) for name, (low, high) in extremes.items()}


def quantise(module: str, weight: torch.Tensor, global_scale: torch.Tensor, spelling: str):
    """The stored parts of a module by key, and its float32 decoding in the order of the spelling."""
    weight = weight.float()
    divisor = global_scale.reshape(1).clone()
    groups = weight.reshape(weight.shape[0], -1, GROUP)
    scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), WEIGHTS, global_scale=divisor)
    state = {"weight": weight, "weight_scale": scale.float(), "weight_global_scale": divisor}
    state = NVFP4PackedCompressor.compress(state, SCHEME)
    stored, multiplier = state["weight_scale"].float(), (1.0 / divisor.double()).float()
    factor = stored * multiplier if spelling == "modelopt" else stored / divisor
    codes = unpack_fp4_from_uint8(state["weight_packed"], *weight.shape).float()
    dense = (codes.reshape(groups.shape) * factor.unsqueeze(-1)).reshape(weight.shape)
    if spelling == "modelopt":
        parts = {
            "weight": state["weight_packed"],
            "weight_scale": state["weight_scale"],
            "weight_scale_2": multiplier.reshape(()),
            "input_scale": torch.tensor(1.0),
        }
    else:
        parts = state
        theirs = NVFP4PackedCompressor.decompress(dict(state), SCHEME)["weight"]
        if not torch.equal(dense.to(torch.bfloat16), theirs.to(torch.bfloat16)):
            raise SystemExit(f"{module}: compressed-tensors itself decodes otherwise")
    return {f"{module}.{role}": part.contiguous() for role, part in parts.items()}, dense


def write_side_files(src: Path, out: Path, spelling: str) -> None:
    for file in src.iterdir():
        if file.suffix != ".safetensors" and file.name != "model.safetensors.index.json":
            shutil.copy(file, out / file.name)
    config = json.loads((src / "config.json").read_text())
    config["quantization_config"] = MODELOPT_CONFIG if spelling == "modelopt" else COMPRESSED_TENSORS_CONFIG
    write_json(out / "config.json", config)
    if spelling == "modelopt":
        write_json(out / "hf_quant_config.json", HF_QUANT_CONFIG)


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("src", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--spelling", choices=SPELLINGS, default=SPELLINGS[0])
    parser.add_argument("--shared-globals", action="store_true")
    arguments = parser.parse_args()
    make(arguments.src, arguments.out, arguments.spelling, arguments.shared_globals)
    print(f"NVFP4 by compressed-tensors, {arguments.spelling} spelling: {arguments.out}")


if __name__ == "__main__":
    main()
