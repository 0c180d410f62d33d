#!/usr/bin/env python3
"""Make a header-only DeepSeek-V4: every key, dtype and shape of the real model, in sparse files without bytes.

usage: v4_headers.py OUT [pro|flash] [--spelling modelopt|compressed-tensors] [--attention nvfp4|bf16]

Names are Hugging Face's. Routed experts are NVFP4; `--attention` says how attention, compressors and shared experts
are stored (nvfp4: a full NVFP4 export; bf16: NVFP4 experts only).
"""
import argparse
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

HEAD_DIM, INDEX_HEAD_DIM, INDEX_HEADS, O_LORA, VOCAB, HYPER, HASH_LAYERS = 512, 128, 64, 1024, 129280, 4, 3
BYTES = {"U8": 1, "F8_E4M3": 1, "F32": 4, "BF16": 2, "I64": 8}
SHARD_BYTES = 8 << 30
IGNORED = ["lm_head", "*.mlp.gate", "*.indexer.q_b_proj", "*.weights_proj"]
SPARSE, HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"

Tensor = tuple[str, str, tuple[int, ...]]  # key, dtype, shape


@dataclass(frozen=True)
class Size:
    hidden: int
    layers: int
    expert_width: int
    experts: int
    heads: int
    q_lora: int
    o_groups: int

    @property
    def layer_types(self) -> list[str]:
        """Layers 0 and 1 are heavily compressed; from then on sparse and heavy alternate."""
        return [HEAVY, HEAVY] + [SPARSE if i % 2 == 0 else HEAVY for i in range(self.layers - 2)]


SIZES = {
    "pro": Size(hidden=7168, layers=61, expert_width=3072, experts=384, heads=128, q_lora=1536, o_groups=16),
    "flash": Size(hidden=4096, layers=43, expert_width=2048, experts=256, heads=64, q_lora=1024, o_groups=8),
}


def make(out: Path, size: str = "pro", spelling: str = "modelopt", attention: str = "nvfp4") -> None:
    """Write the checkpoint: 284,809 tensors for a full NVFP4 V4-Pro in ModelOpt's spelling."""
    out.mkdir(parents=True, exist_ok=True)
    linears = {"nvfp4": SPELLINGS[spelling], "bf16": dense}
    weight_map, total = {}, 0
    shards = list(cut(tensors(SIZES[size], expert=SPELLINGS[spelling], linear=linears[attention])))
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        total += write_header(out / name, shard)
        weight_map |= dict.fromkeys((key for key, _, _ in shard), name)
    write_json(out / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    write_json(out / "config.json", config(SIZES[size], spelling, attention))


def modelopt(module: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield f"{module}.weight", "U8", (rows, columns // 2)
    yield f"{module}.weight_scale", "F8_E4M3", (rows, columns // 16)
    yield f"{module}.weight_scale_2", "F32", ()
    yield f"{module}.input_scale", "F32", ()


def compressed_tensors(module: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield f"{module}.weight_packed", "U8", (rows, columns // 2)
    yield f"{module}.weight_scale", "F8_E4M3", (rows, columns // 16)
    yield f"{module}.weight_global_scale", "F32", (1,)
    yield f"{module}.input_global_scale", "F32", (1,)


def dense(module: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield f"{module}.weight", "BF16", (rows, columns)


SPELLINGS = {"modelopt": modelopt, "compressed-tensors": compressed_tensors}


def tensors(size: Size, expert, linear) -> Iterator[Tensor]:
    """All keys of the model; `expert` and `linear` say how a routed expert's and any other quantised matrix is stored."""
    yield "model.embed_tokens.weight", "BF16", (VOCAB, size.hidden)
    yield "model.norm.weight", "BF16", (size.hidden,)
    yield "lm_head.weight", "BF16", (VOCAB, size.hidden)
    yield "model.hc_head.hc_fn", "F32", (HYPER, HYPER * size.hidden)
    yield "model.hc_head.hc_base", "F32", (HYPER,)
    yield "model.hc_head.hc_scale", "F32", (1,)
    for layer, kind in enumerate(size.layer_types):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", "BF16", (size.hidden,)
        yield f"{prefix}.post_attention_layernorm.weight", "BF16", (size.hidden,)
        for connection in ("attn_hc", "ffn_hc"):
            mixes = (2 + HYPER) * HYPER
            yield f"{prefix}.{connection}.fn", "F32", (mixes, HYPER * size.hidden)
            yield f"{prefix}.{connection}.base", "F32", (mixes,)
            yield f"{prefix}.{connection}.scale", "F32", (3,)
        yield from attention_tensors(f"{prefix}.self_attn", size, kind == SPARSE, linear)
        yield from expert_tensors(f"{prefix}.mlp", size, layer, expert, linear)


def attention_tensors(prefix: str, size: Size, sparse: bool, linear) -> Iterator[Tensor]:
    yield f"{prefix}.sinks", "F32", (size.heads,)
    yield f"{prefix}.q_a_norm.weight", "BF16", (size.q_lora,)
    yield f"{prefix}.kv_norm.weight", "BF16", (HEAD_DIM,)
    yield from linear(f"{prefix}.q_a_proj", size.q_lora, size.hidden)
    yield from linear(f"{prefix}.kv_proj", HEAD_DIM, size.hidden)
    yield from linear(f"{prefix}.q_b_proj", size.heads * HEAD_DIM, size.q_lora)
    yield from linear(f"{prefix}.o_a_proj", size.o_groups * O_LORA, size.heads * HEAD_DIM // size.o_groups)
    yield from linear(f"{prefix}.o_b_proj", size.hidden, size.o_groups * O_LORA)
    compressor = f"{prefix}.compressor"
    rate, rows = (4, 2 * HEAD_DIM) if sparse else (128, HEAD_DIM)
    yield from compressor_tensors(compressor, rate, rows, HEAD_DIM, size.hidden, linear)
    if sparse:
        indexer = f"{compressor}.indexer"
        yield from compressor_tensors(indexer, rate, 2 * INDEX_HEAD_DIM, INDEX_HEAD_DIM, size.hidden, linear)
        yield f"{indexer}.q_b_proj.weight", "BF16", (INDEX_HEADS * INDEX_HEAD_DIM, size.q_lora)
        yield f"{indexer}.scorer.weights_proj.weight", "BF16", (INDEX_HEADS, size.hidden)


def compressor_tensors(prefix: str, rate: int, rows: int, head_dim: int, hidden: int, linear) -> Iterator[Tensor]:
    yield f"{prefix}.position_bias", "F32", (rate, rows)
    yield f"{prefix}.kv_norm.weight", "BF16", (head_dim,)
    yield from linear(f"{prefix}.kv_proj", rows, hidden)
    yield from linear(f"{prefix}.gate_proj", rows, hidden)


def expert_tensors(prefix: str, size: Size, layer: int, expert, linear) -> Iterator[Tensor]:
    yield f"{prefix}.gate.weight", "BF16", (size.experts, size.hidden)
    if layer < HASH_LAYERS:
        yield f"{prefix}.gate.tid2eid", "I64", (VOCAB, 6)
    else:
        yield f"{prefix}.gate.e_score_correction_bias", "F32", (size.experts,)
    up, down = (size.expert_width, size.hidden), (size.hidden, size.expert_width)
    for name, shape in (("gate_proj", up), ("up_proj", up), ("down_proj", down)):
        yield from linear(f"{prefix}.shared_experts.{name}", *shape)
        for number in range(size.experts):
            yield from expert(f"{prefix}.experts.{number}.{name}", *shape)


def cut(keys: Iterator[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors in shards, each closed by the tensor that takes it past SHARD_BYTES."""
    shard, held = [], 0
    for tensor in keys:
        shard.append(tensor)
        held += nbytes(tensor)
        if held > SHARD_BYTES:
            yield shard
            shard, held = [], 0
    if shard:
        yield shard


def nbytes(tensor: Tensor) -> int:
    _, dtype, shape = tensor
    return BYTES[dtype] * prod(shape)


def write_header(path: Path, shard: list[Tensor]) -> int:
    """A file of the right length whose data is a hole; returns the bytes of data."""
    header, end = {}, 0
    for key, dtype, shape in shard:
        start, end = end, end + nbytes((key, dtype, shape))
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return end


def config(size: Size, spelling: str, attention: str) -> dict:
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "dtype": "bfloat16",
        "vocab_size": VOCAB,
        "hidden_size": size.hidden,
        "num_hidden_layers": size.layers,
        "moe_intermediate_size": size.expert_width,
        "n_routed_experts": size.experts,
        "n_shared_experts": 1,
        "num_attention_heads": size.heads,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "q_lora_rank": size.q_lora,
        "o_groups": size.o_groups,
        "o_lora_rank": O_LORA,
        "index_n_heads": INDEX_HEADS,
        "index_head_dim": INDEX_HEAD_DIM,
        "layer_types": size.layer_types,
        "mlp_layer_types": ["hash_moe"] * HASH_LAYERS + ["moe"] * (size.layers - HASH_LAYERS),
        "hc_mult": HYPER,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "quantization_config": quantization_config(spelling, attention),
    }


def quantization_config(spelling: str, attention: str) -> dict:
    ignored = IGNORED + (["*.self_attn.*", "*.mlp.shared_experts.*"] if attention == "bf16" else [])
    if spelling == "modelopt":
        return {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16, "ignore": ignored}
    group = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["re:" + name.replace(".", r"\.").replace("*", ".*") for name in ignored],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": group | {"dynamic": False},
                "input_activations": group | {"dynamic": "local"},
                "output_activations": None,
            }
        },
    }


def write_json(path: Path, value) -> None:
    path.write_text(json.dumps(value) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("size", choices=SIZES, nargs="?", default="pro")
    parser.add_argument("--spelling", choices=SPELLINGS, default="modelopt")
    parser.add_argument("--attention", choices=["nvfp4", "bf16"], default="nvfp4")
    arguments = parser.parse_args()
    make(arguments.out, arguments.size, arguments.spelling, arguments.attention)
    print(f"header-only V4-{arguments.size}, {arguments.spelling}, attention {arguments.attention}: {arguments.out}")


if __name__ == "__main__":
    main()
