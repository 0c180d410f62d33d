"""Tiny DeepSeek-V4 checkpoints for the real-engine test: a source, and what its conversion must give.

  tiny_v4.py source   OUT [--spelling modelopt|compressed-tensors] [--storage nvfp4|fp8|fp8-native|bf16] [--seed N]
  tiny_v4.py expected OUT [the same] [--attention bf16|fp8] [--shared bf16|fp8] [--experts keep|bf16] ...
  tiny_v4.py twin     OUT [the same as expected]

`source` has Hugging Face names, several shards with companions scattered over them, and a config.json that vLLM takes
once quantization_config is replaced. `expected` is the checkpoint for vLLM's default loader, computed from the same
seed in plain torch. `twin` is `expected` decoded to BF16, every module, with no quantization_config.

This file shares no code with quantrules on purpose: it is the second opinion. Only torch and safetensors are needed.
"""
import argparse
import functools
import json
import pathlib
import re
from typing import NamedTuple

import torch
from safetensors.torch import save_file

BF16, F32, U8, E4M3, E8M0 = torch.bfloat16, torch.float32, torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu
SHARDS = 3
KINDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}

# Sizes that vLLM's CPU kernels accept: 64 experts, 6 per token, head_dim 512 with 64 rotary, index_head_dim 128.
CONFIG = dict(
    architectures=["DeepseekV4ForCausalLM"], model_type="deepseek_v4", dtype="bfloat16",
    vocab_size=512, hidden_size=256, moe_intermediate_size=128, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=1, head_dim=512, qk_rope_head_dim=64,
    q_lora_rank=128, o_lora_rank=128, o_groups=2,
    n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=1, num_hash_layers=1,
    scoring_func="sqrtsoftplus", topk_method="noaux_tc", norm_topk_prob=True,
    routed_scaling_factor=1.5, swiglu_limit=10.0, hidden_act="silu", rms_norm_eps=1e-6,
    hc_mult=4, hc_sinkhorn_iters=20, hc_eps=1e-6,
    sliding_window=128, compress_ratios=[0, 4, 128], compress_rope_theta=160000.0, rope_theta=10000.0,
    layer_types=[KINDS[r] for r in (0, 4, 128)],  # no mlp_layer_types: vLLM refuses transformers' "hash_moe"
    index_n_heads=8, index_head_dim=128, index_topk=512,
    max_position_embeddings=4096, num_nextn_predict_layers=0,
    rope_scaling=dict(type="yarn", rope_type="yarn", factor=16, original_max_position_embeddings=256,
                      beta_fast=32, beta_slow=1),
    tie_word_embeddings=False, bos_token_id=0, eos_token_id=1, attention_bias=False,
)

DEEPSEEK_FP8 = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128],
                    scale_fmt="ue8m0")


# ------------------------------------------------------------------------------------------ the model's tensors
class Linear(NamedTuple):
    """A matrix; `target` is the module of DeepSeek's names it ends in, whole or as the next rows of it."""
    source: str
    target: str
    rows: int
    columns: int
    group: str  # attention, wo_a, index (left in BF16 by NVFP4 exports), compressor, shared, expert


class Plain(NamedTuple):
    """A tensor that no export quantises."""
    source: str
    target: str
    shape: tuple
    dtype: torch.dtype
    std: float = 0.05


def compressor_of(source, target, ratio, width, hidden):
    rows = (2 if ratio == 4 else 1) * width
    yield Linear(f"{source}.kv_proj", f"{target}.fused_wkv_wgate", rows, hidden, "compressor")
    yield Linear(f"{source}.gate_proj", f"{target}.fused_wkv_wgate", rows, hidden, "compressor")
    yield Plain(f"{source}.position_bias", f"{target}.ape", (ratio, rows), F32)
    yield Plain(f"{source}.kv_norm.weight", f"{target}.norm.weight", (width,), BF16)


def attention_of(source, target, ratio, c):
    hidden, heads, width = c["hidden_size"], c["num_attention_heads"], c["head_dim"]
    q, o, groups = c["q_lora_rank"], c["o_lora_rank"], c["o_groups"]
    yield Linear(f"{source}.q_a_proj", f"{target}.fused_wqa_wkv", q, hidden, "attention")
    yield Linear(f"{source}.kv_proj", f"{target}.fused_wqa_wkv", width, hidden, "attention")
    yield Linear(f"{source}.q_b_proj", f"{target}.wq_b", heads * width, q, "attention")
    yield Linear(f"{source}.o_a_proj", f"{target}.wo_a", groups * o, heads * width // groups, "wo_a")
    yield Linear(f"{source}.o_b_proj", f"{target}.wo_b", hidden, groups * o, "attention")
    yield Plain(f"{source}.sinks", f"{target}.attn_sink", (heads,), F32)
    yield Plain(f"{source}.q_a_norm.weight", f"{target}.q_norm.weight", (q,), BF16)
    yield Plain(f"{source}.kv_norm.weight", f"{target}.kv_norm.weight", (width,), BF16)
    if ratio > 1:
        yield from compressor_of(f"{source}.compressor", f"{target}.compressor", ratio, width, hidden)
    if ratio == 4:
        index, indexer = f"{source}.compressor.indexer", f"{target}.indexer"
        n, d = c["index_n_heads"], c["index_head_dim"]
        yield from compressor_of(index, f"{indexer}.compressor", 4, d, hidden)
        yield Linear(f"{index}.q_b_proj", f"{indexer}.wq_b", n * d, q, "index")
        yield Plain(f"{index}.scorer.weights_proj.weight", f"{indexer}.weights_proj.weight", (n, hidden), BF16)


def experts_of(source, target, layer, c):
    hidden, width, count = c["hidden_size"], c["moe_intermediate_size"], c["n_routed_experts"]
    yield Plain(f"{source}.gate.weight", f"{target}.gate.weight", (count, hidden), BF16)
    if layer < c["num_hash_layers"]:
        yield Plain(f"{source}.gate.tid2eid", f"{target}.gate.tid2eid", (c["vocab_size"], c["num_experts_per_tok"]), torch.int64)
    else:
        yield Plain(f"{source}.gate.e_score_correction_bias", f"{target}.gate.bias", (count,), F32)
    for e in range(count):
        expert, into = f"{source}.experts.{e}", f"{target}.experts.{e}"
        yield Linear(f"{expert}.gate_proj", f"{into}.w1", width, hidden, "expert")
        yield Linear(f"{expert}.up_proj", f"{into}.w3", width, hidden, "expert")
        yield Linear(f"{expert}.down_proj", f"{into}.w2", hidden, width, "expert")
    shared, into = f"{source}.shared_experts", f"{target}.shared_experts"
    yield Linear(f"{shared}.gate_proj", f"{into}.gate_up_proj", width, hidden, "shared")
    yield Linear(f"{shared}.up_proj", f"{into}.gate_up_proj", width, hidden, "shared")
    yield Linear(f"{shared}.down_proj", f"{into}.down_proj", hidden, width, "shared")


def tensors_of(c):
    hidden, hc = c["hidden_size"], c["hc_mult"]
    yield Plain("model.embed_tokens.weight", "embed.weight", (c["vocab_size"], hidden), BF16, 1.0)
    yield Plain("model.norm.weight", "norm.weight", (hidden,), BF16)
    yield Plain("lm_head.weight", "head.weight", (c["vocab_size"], hidden), BF16)
    for part, shape in (("fn", (hc, hc * hidden)), ("base", (hc,)), ("scale", (1,))):
        yield Plain(f"model.hc_head.hc_{part}", f"hc_head_{part}", shape, F32)
    for layer, ratio in enumerate(c["compress_ratios"][:c["num_hidden_layers"]]):
        source, target, mix = f"model.layers.{layer}", f"layers.{layer}", (2 + hc) * hc
        yield Plain(f"{source}.input_layernorm.weight", f"{target}.attn_norm.weight", (hidden,), BF16)
        yield Plain(f"{source}.post_attention_layernorm.weight", f"{target}.ffn_norm.weight", (hidden,), BF16)
        for name in ("attn", "ffn"):
            for part, shape in (("fn", (mix, hc * hidden)), ("base", (mix,)), ("scale", (3,))):
                yield Plain(f"{source}.{name}_hc.{part}", f"{target}.hc_{name}_{part}", shape, F32)
        yield from attention_of(f"{source}.self_attn", f"{target}.attn", ratio, c)
        yield from experts_of(f"{source}.mlp", f"{target}.ffn", layer, c)


@functools.lru_cache(1)
def random_model(seed):
    """-> {item: tensor}, in one fixed order, so that a seed means one model whatever is written of it."""
    c, generator = CONFIG, torch.Generator().manual_seed(seed)

    def draw(item):
        if isinstance(item, Linear):
            return (torch.randn(item.rows, item.columns, generator=generator) * 0.05).to(BF16)
        if item.dtype == torch.int64:
            picks = [torch.randperm(c["n_routed_experts"], generator=generator)[:item.shape[1]] for _ in range(item.shape[0])]
            return torch.stack(picks)
        if len(item.shape) == 1 and "norm" in item.source:
            return (1 + 0.1 * torch.randn(item.shape, generator=generator)).to(item.dtype)
        return (torch.randn(item.shape, generator=generator) * item.std).to(item.dtype)
    return {item: draw(item) for item in tensors_of(c)}


# ------------------------------------------------------------------------------------------ number formats
E2M1 = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6])
MIDPOINTS = torch.tensor([.25, .75, 1.25, 1.75, 2.5, 3.5, 5])


def nvfp4_encode(w, amax):
    """-> packed codes, block scales, global multiplier."""
    multiplier = (amax / 2688).to(F32)
    blocks = w.float().view(w.shape[0], -1, 16)
    scale = (blocks.abs().amax(-1) / 6 / multiplier).clamp(2**-9, 448).to(E4M3)
    x = blocks / (scale.float() * multiplier)[..., None]
    code = torch.bucketize(x.abs(), MIDPOINTS) | ((x < 0).long() << 3)
    code = code.to(U8).view(w.shape)
    return (code[:, 0::2] | (code[:, 1::2] << 4)).contiguous(), scale, multiplier


def nvfp4_decode(packed, scale, factor):
    """In float32, in the order codes · factor, where factor is what the spelling makes of its two scales."""
    values = torch.stack([E2M1[(packed & 15).long()], E2M1[(packed >> 4).long()]], -1).flatten(-2)
    return values * factor.repeat_interleave(16, -1)


def ue8m0_scale(amax):
    """Smallest power of two not below amax/448, from the bits of the float."""
    bits = (amax.clamp(min=1e-4).to(F32) / 448).view(torch.int32)
    exponent = ((bits >> 23) & 255) + ((bits & 0x7FFFFF) != 0).int()
    return (exponent.clamp(1, 254) << 23).view(F32)


def fp8_encode(w, block=128):
    """-> e4m3 codes and their power-of-two block scales in float32."""
    rows, columns = w.shape
    padded = torch.nn.functional.pad(w.float(), (0, -columns % block, 0, -rows % block))
    tiles = padded.view(padded.shape[0] // block, block, padded.shape[1] // block, block)
    scale = ue8m0_scale(tiles.abs().amax((1, 3)))
    codes = (tiles * (1 / scale)[:, None, :, None]).clamp(-448, 448).reshape(padded.shape)[:rows, :columns]
    return codes.to(E4M3).contiguous(), scale


def fp8_decode(codes, scale, block=128):
    grid = scale.float().repeat_interleave(block, 0).repeat_interleave(block, 1)
    return codes.float() * grid[:codes.shape[0], :codes.shape[1]]


# ------------------------------------------------------------------------------------------ the source checkpoint
def stored_as(item, storage):
    """Which format a module has in a source of this storage: nvfp4, fp8 or bf16."""
    if item.group == "expert":
        return "nvfp4"
    if storage == "nvfp4":
        return "bf16" if item.group == "index" else "nvfp4"
    if storage.startswith("fp8"):
        return "bf16" if item.group == "compressor" else "fp8"
    return "bf16"


def nvfp4_amax(model):
    """-> {item: largest magnitude}. Gate and up of a routed expert share theirs, as an engine that stacks them wants."""
    own = {item: model[item].float().abs().max() for item in model if isinstance(item, Linear)}
    by_source = {item.source: amax for item, amax in own.items()}

    def shared(item):
        if item.group != "expert":
            return own[item]
        partner = re.sub("(gate|up)_proj$", lambda m: "up_proj" if m[1] == "gate" else "gate_proj", item.source)
        return torch.maximum(own[item], by_source[partner])
    return {item: shared(item) for item in own}


class Module(NamedTuple):
    """One module of the source: its tensors on disk by suffix, and its value in float32."""
    files: dict
    value: torch.Tensor


def nvfp4_module(weight, amax, spelling, act):
    codes, scale, multiplier = nvfp4_encode(weight, amax)
    if spelling == "modelopt":
        value = nvfp4_decode(codes, scale, scale.float() * multiplier)
        return Module({"weight": codes, "weight_scale": scale, "weight_scale_2": multiplier, "input_scale": act}, value)
    divisor = (1 / multiplier).reshape(1)
    value = nvfp4_decode(codes, scale, scale.float() / divisor)
    return Module({"weight_packed": codes, "weight_scale": scale, "weight_global_scale": divisor,
                   "input_global_scale": (1 / act).reshape(1)}, value)


def fp8_module(weight, storage):
    codes, scale = fp8_encode(weight)
    companion = {"scale": scale.to(E8M0)} if storage == "fp8-native" else {"weight_scale_inv": scale}
    return Module({"weight": codes, **companion}, fp8_decode(codes, scale))


def input_scale(item):
    """Any number, another one for each activation: gate and up see the same."""
    seed = sum(ord(ch) * (i + 1) for i, ch in enumerate(item.source.replace("gate_proj", "up_proj")))
    return torch.tensor(0.01 + (seed % 97) / 4096, dtype=F32)


@functools.lru_cache(1)
def source_modules(spelling, storage, seed):
    """-> {item: Module}; kept, because a source and its targets are often written in one process."""
    model = random_model(seed)
    amax = nvfp4_amax(model)

    def module(item):
        kind = stored_as(item, storage)
        if kind == "nvfp4":
            return nvfp4_module(model[item], amax[item], spelling, input_scale(item))
        return fp8_module(model[item], storage) if kind == "fp8" else Module({"weight": model[item]}, model[item].float())
    return {item: module(item) for item in model if isinstance(item, Linear)}


def source_quantization(spelling, storage, modules):
    """-> quantization_config and hf_quant_config.json (None where the dialect has none)."""
    if storage.startswith("fp8"):
        plain = sorted({i.source for i in modules if stored_as(i, storage) == "bf16"} | {"lm_head"})
        return dict(DEEPSEEK_FP8, moe_quant_algo="NVFP4", modules_to_not_convert=plain), None
    outside = ["lm_head", "*.mlp.gate", "*.indexer.q_b_proj", "*.weights_proj"]
    if storage == "bf16":
        outside = ["lm_head", "*.mlp.gate", "*.self_attn.*", "*.mlp.shared_experts.*"]
    if spelling == "modelopt":
        producer = {"name": "modelopt", "version": "0.47.0"}
        legacy = {"producer": producer, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": None,
                                                         "group_size": 16, "exclude_modules": outside}}
        return dict(quant_method="modelopt", quant_algo="NVFP4", group_size=16, ignore=outside, producer=producer), legacy
    ignore = [n if "*" not in n else "re:" + n.replace(".", r"\.").replace("*", ".*") + "$" for n in outside]
    numbers = dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    group = dict(targets=["Linear"], format="nvfp4-pack-quantized", weights={**numbers, "dynamic": False},
                 input_activations={**numbers, "dynamic": "local"}, output_activations=None)
    return dict(quant_method="compressed-tensors", format="nvfp4-pack-quantized", quantization_status="compressed",
                ignore=ignore, config_groups={"group_0": group}), None


def source_checkpoint(spelling, storage, seed):
    """-> tensors, config.json, hf_quant_config.json or None."""
    if storage.startswith("fp8") and spelling != "modelopt":
        raise SystemExit("FP8 attention with NVFP4 experts is declared as DeepSeek's fp8: only --spelling modelopt")
    model, modules = random_model(seed), source_modules(spelling, storage, seed)
    tensors = {item.source: tensor for item, tensor in model.items() if isinstance(item, Plain)}
    for item, module in modules.items():
        tensors.update({f"{item.source}.{suffix}": tensor for suffix, tensor in module.files.items()})
    quantization, legacy = source_quantization(spelling, storage, modules)
    return tensors, {**CONFIG, "quantization_config": quantization}, legacy


# ------------------------------------------------------------------------------------------ what must come out
class Target(NamedTuple):
    """The choices of a conversion: each bf16 or fp8; experts keep (NVFP4) or bf16."""
    attention: str = "bf16"
    shared: str = "bf16"
    experts: str = "keep"
    wo_a: str = "fp8"
    fp8_from: str = "bf16"  # attention and shared experts become FP8 from their BF16 rounding, or straight from float32


def wanted_format(item, target):
    return {"attention": target.attention, "index": target.attention, "wo_a": target.wo_a, "shared": target.shared,
            "compressor": "bf16", "expert": "nvfp4" if target.experts == "keep" else "bf16"}[item.group]


def expert_files(module):
    """NVFP4 in ModelOpt's spelling: bytes as they are; a divisor's inverse is the multiplier."""
    f = module.files
    if "weight_packed" not in f:
        return f
    inverse = {name: (1 / f[divisor]).reshape(())
               for name, divisor in (("weight_scale_2", "weight_global_scale"), ("input_scale", "input_global_scale"))}
    return {"weight": f["weight_packed"], "weight_scale": f["weight_scale"], **inverse}


def target_files(kind, modules, item, target):
    """The tensors of one target module out of the source modules that are its rows."""
    if kind == "nvfp4":
        return expert_files(modules[0])
    value = torch.cat([m.value for m in modules])
    if kind == "bf16":
        return {"weight": value.to(BF16)}
    if item.group != "wo_a" and target.fp8_from == "bf16":
        value = value.to(BF16).float()
    codes, scale = fp8_encode(value)
    return {"weight": codes, "scale": scale.to(E8M0)}


def ignored_layers(rows, target):
    """Modules that stay in BF16 although their class would be FP8, in DeepSeek's names."""
    names = []
    for name, items in rows.items():
        group = items[0].group
        if group == "expert":
            continue
        if group != "compressor" and wanted_format(items[0], target) == "bf16":
            parts = {"fused_wqa_wkv": ["wq_a", "wkv"], "gate_up_proj": ["w1", "w3"], "down_proj": ["w2"]}
            parent, leaf = name.rsplit(".", 1)
            names += [f"{parent}.{part}" for part in parts.get(leaf, [leaf])]
    if target.experts == "bf16":
        names += [f"layers.{layer}.ffn.experts" for layer in range(CONFIG["num_hidden_layers"])]
    return names


def target_config(rows, target):
    kinds = {wanted_format(items[0], target) for items in rows.values()}
    if kinds == {"bf16"}:
        return dict(CONFIG)
    quantization = dict(DEEPSEEK_FP8)
    if target.experts == "keep":
        quantization["moe_quant_algo"] = "NVFP4"
    ignored = ignored_layers(rows, target)
    if ignored:
        quantization["ignored_layers"] = ignored
    return {**CONFIG, "quantization_config": quantization, "expert_dtype": "fp4"}


def expected_checkpoint(spelling, storage, seed, target):
    """-> tensors and config.json as vLLM's default loader takes them."""
    model, modules = random_model(seed), source_modules(spelling, storage, seed)
    rows = {}
    for item in modules:
        rows.setdefault(item.target, []).append(item)
    tensors = {item.target: tensor for item, tensor in model.items() if isinstance(item, Plain)}
    for name, items in rows.items():
        files = target_files(wanted_format(items[0], target), [modules[i] for i in items], items[0], target)
        tensors.update({f"{name}.{suffix}": tensor for suffix, tensor in files.items()})
    return tensors, target_config(rows, target)


def twin_checkpoint(*choices):
    """The expected checkpoint with every module decoded to BF16, and no quantization_config."""
    tensors, _ = expected_checkpoint(*choices)
    companions = ("scale", "weight_scale", "weight_scale_2", "input_scale")
    out = {n: t for n, t in tensors.items() if n.rsplit(".", 1)[-1] not in companions}
    for name in out:
        part = {c: tensors.get(name.removesuffix("weight") + c) for c in companions}
        if part["weight_scale_2"] is not None:
            scale = part["weight_scale"]
            out[name] = nvfp4_decode(tensors[name], scale, scale.float() * part["weight_scale_2"]).to(BF16)
        elif part["scale"] is not None:
            out[name] = fp8_decode(tensors[name], part["scale"]).to(BF16)
    return out, dict(CONFIG)


# ------------------------------------------------------------------------------------------ what vLLM must hold
def expected_parameters(tensors):
    """vLLM's parameters after loading these tensors, put together without vLLM: names, rows, experts stacked."""
    out, stacks = {}, {}
    for name, tensor in tensors.items():
        name = re.sub(r"^(layers|norm|hc_head)", r"model.\1", name)
        name = {"embed.weight": "model.embed_tokens.weight", "head.weight": "lm_head.weight"}.get(name, name)
        name = name.replace("ffn.gate.bias", "ffn.gate.e_score_correction_bias")
        expert = re.fullmatch(r"(.*\.ffn\.experts)\.(\d+)\.(w[123])\.(.*)", name)
        if expert:
            prefix, index, which, part = expert.groups()
            stacks.setdefault(f"{prefix}.routed_experts.", {})[int(index), which, part] = tensor
        else:
            name = re.sub(r"\.scale$", ".weight_scale_inv", name)
            out[name] = tensor.to(torch.int32) if name.endswith("tid2eid") else tensor
    for prefix, members in stacks.items():
        out.update(stacked_experts(prefix, members))
    return out


def stacked_experts(prefix, members):
    indices = sorted({index for index, _, _ in members})
    for part in sorted({part for _, _, part in members}):
        join = torch.stack if members[0, "w1", part].dim() == 0 else torch.cat
        w13 = [join([as_bytes(members[i, w, part]) for w in ("w1", "w3")]) for i in indices]
        w2 = [as_bytes(members[i, "w2", part]) for i in indices]
        dtype = members[0, "w1", part].dtype
        yield f"{prefix}w13_{part}", torch.stack(w13).view(dtype)
        yield f"{prefix}w2_{part}", torch.stack(w2).view(dtype)


def as_bytes(tensor):
    """Float8 tensors have few operators: join them as bytes."""
    return tensor.view(U8) if tensor.element_size() == 1 else tensor


# ------------------------------------------------------------------------------------------ files
def write_checkpoint(out, tensors, config, legacy=None, shards=SHARDS):
    """Deals the sorted names out to the shards in turn, so members and companions lie apart."""
    out = pathlib.Path(out)
    out.mkdir(parents=True, exist_ok=True)
    weight_map, total = {}, 0
    for shard in range(shards):
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = {n: tensors[n].contiguous() for n in sorted(tensors)[shard::shards]}
        save_file(part, out / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, name))
        total += sum(t.numel() * t.element_size() for t in part.values())
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    write_json(out / "model.safetensors.index.json", index)
    if legacy:
        write_json(out / "hf_quant_config.json", legacy)
    write_json(out / "config.json", config)  # last: a directory that has it is complete
    print(f"{len(weight_map)} tensors, {total / 1e6:.1f} MB: {out}")


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2) + "\n")


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["source", "expected", "twin"])
    parser.add_argument("out")
    parser.add_argument("--spelling", choices=["modelopt", "compressed-tensors"], default="modelopt")
    parser.add_argument("--storage", choices=["nvfp4", "fp8", "fp8-native", "bf16"], default="nvfp4",
                        help="of attention and shared experts; routed experts are NVFP4")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--attention", choices=["bf16", "fp8"], default="bf16")
    parser.add_argument("--shared", choices=["bf16", "fp8"], help="default: as attention")
    parser.add_argument("--experts", choices=["keep", "bf16"], default="keep")
    parser.add_argument("--wo-a", choices=["fp8", "bf16"], default="fp8")
    parser.add_argument("--fp8-from", choices=["bf16", "f32"], default="bf16",
                        help="attention and shared experts become FP8 from their BF16 rounding or straight from float32")
    return parser.parse_args()


def target_of(options):
    return Target(options.attention, options.shared or options.attention, options.experts, options.wo_a, options.fp8_from)


def main():
    options = arguments()
    source = options.spelling, options.storage, options.seed
    if options.what == "source":
        write_checkpoint(options.out, *source_checkpoint(*source))
    else:
        make = twin_checkpoint if options.what == "twin" else expected_checkpoint
        write_checkpoint(options.out, *make(*source, target_of(options)))


if __name__ == "__main__":
    torch.set_num_threads(2)
    main()
