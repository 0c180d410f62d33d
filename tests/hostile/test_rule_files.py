"""Rule files from strangers: mutants made of tokens give a plan or diagnostics; never a traceback, a hang or a large allocation."""

from __future__ import annotations

import random
import re
import resource
import time

import pytest

from quantrules.api import builtin_formats, parse, rules_directory
from quantrules.diagnostics import QuantrulesError
from quantrules.testing import headers

MUTANTS = 4000
SOURCE = """
model.layers.0.self_attn.q_a_proj   nvfp4[32, 64] +act
model.layers.0.self_attn.kv_proj    nvfp4[16, 64]
model.layers.1.self_attn.q_a_proj   nvfp4/compressed_tensors[32, 64]
model.layers.1.self_attn.kv_proj    nvfp4/compressed_tensors[16, 64]
model.layers.0.self_attn.q_b_proj   fp8_block[300, 256]
model.layers.1.self_attn.q_b_proj.weight   bf16[300, 256]
model.layers.0.mlp.experts.0.gate_proj  mxfp4[32, 64]
model.layers.0.mlp.experts.1.gate_proj  mxfp4[32, 64]
model.layers.0.mlp.experts.0.up_proj    mxfp4[32, 64]
model.layers.0.mlp.experts.1.up_proj    mxfp4[32, 64]
model.layers.0.mlp.gate.tid2eid     i64[7, 6]
model.embed_tokens.weight           bf16[16, 64]
lm_head.weight                      bf16[16, 64]
model.norm.weight                   f32[64]
"""
CONFIG = {"num_hidden_layers": 2, "n_routed_experts": 2, "hidden_size": 64, "layer_types": ["a", "b"], "nested": {"deep": [1, 2.5, "x", None]}}
# ruff: noqa: E501
SEEDS = [
    "fuse qkv = q_a_proj, kv_proj\n*.self_attn.q_a_proj → unpack|dequant|cat\n* → keep\n",
    "*.experts.{E}.{gate_proj,up_proj} → unpack | dequant | cat | stack(E) → *.experts.w13 : bf16[2, 64, 64]   expect 1\n* → keep\n",
    "let n = config.num_hidden_layers\nmodel.layers.{L:0..n}.* → keep → layers.{L+1}.*\n* → keep\n",
    'param a = "x" | "y"\ndef d(t) = unpack | dequant(t) when a == "x"\ndef d(t) = keep\n*.q_b_proj → d(f32)\n* → keep\n',
    "rename model.* → m.*\nunder m.layers.{L} → l.{L}\n    self_attn.{x:q_a_proj=wq|kv_proj=wkv} → unpack | align | requant(fp8_block, scale=f8_e8m0) → {x}\n* → keep\n",
    "layers.{2*L}.* → keep → a.{L}.*\n*.{a,b?} → split(0, [1, 2]) → *.c   when shape[0] > 3 and dtype in [bf16, f32] except *.norm also\n* → drop\nconfig.a.b = {\"x\": [1, null]}\n",
    "format mine\n    element e2m1, 2 in u8, low first, along -1\n    block [1, 16]\n    value codes * scale\n    spelling one\n        codes .w u8[N, K/2] dense .weight\n        scale .s f32[N, K/16]\n* → keep\n",
]
WORDS = ["keep", "drop", "unpack", "dequant", "cat", "stack(E)", "split", "unstack(E)", "quant(nvfp4)", "pack", "align", "cast(f32)", "requant(mxfp4)", "→", "|", "*",
         "{L}", "{E}", "{a,b}", "{x:a=b|c}", "{**n}", "{2*L+1}", "{L:0..9223372036854775807}", "when", "expect", "except", "also", "0", "-1", "99999999999999999999",
         "config.nested.deep[1]", "config.none", "(", ")", "[", "]", "{", "}", ":", ",", "=", '"', "\\", "#", "\n", "\n    ", "under a", "nvfp4", "bf16[N, K]", "* *",
         "1/0", "2/3", "len(config.layer_types)", "default(config.x, 1)", "count(config.layer_types, 1)", "\0", "é", "\t"]  # fmt: skip


def mutate(random: random.Random, text: str) -> str:
    tokens = re.findall(r"\s+|\w+|.", text)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        at = random.randrange(len(tokens))
        what = random.randrange(5)
        if what == 0:
            del tokens[at]
        elif what == 1:
            tokens.insert(at, random.choice(WORDS))
        elif what == 2:
            tokens[at] = random.choice(WORDS)
        elif what == 3:
            tokens[at] = random.choice(tokens)
        else:
            other = random.randrange(len(tokens))
            tokens[at], tokens[other] = tokens[other], tokens[at]
        tokens = tokens or ["*"]
    return "".join(tokens)


@pytest.mark.parametrize("seed", range(4))
def test_mutants(seed):
    rng = random.Random(seed)
    source = headers(SOURCE, builtin_formats(), CONFIG)
    seeds = SEEDS + [p.read_text() for p in sorted(rules_directory().glob("*.rules")) if p.stem != "formats"]
    parsed = clean = 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(MUTANTS // 4):
        text = mutate(rng, rng.choice(seeds))
        start = time.thread_time()
        try:
            rules = parse(text, "mutant.rules")
            parsed += 1
            plan = rules.bind(source)
            clean += not plan.errors
            for d in plan.diagnostics:
                d.render()
        except QuantrulesError as error:
            assert str(error)
        except Exception as error:  # the text is what one needs to see
            raise AssertionError(f"{type(error).__name__} for:\n{text}") from error
        assert time.thread_time() - start < 1, text  # of this thread: machines are shared
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{MUTANTS // 4} mutants: {parsed / MUTANTS * 4:.0%} parse, {clean / MUTANTS * 4:.0%} bind clean; memory grew by {grown >> 10} MB")
    assert grown < 200 << 10
    assert 0.2 < parsed / MUTANTS * 4 < 0.95 and clean
