"""Loads a DeepSeek-V4 directory in real vLLM's default loader and writes down what it then holds and says.

  run_v4.py CHECKPOINT_DIR [--out DIR]

Needs the environment of setup.sh. Writes to --out: parameters.safetensors (every parameter right after load_weights,
before vLLM repacks them) and run.json (the names that load_weights filled, and the log-probabilities of a fixed prompt
of 200 tokens, which passes the sliding window and both compressions). Before loading, parameters are filled with a
pattern of bytes, so that memory nobody wrote is the same in every run and never looks right by chance.
"""
import argparse
import json
import os
import pathlib
import sys
import time

import shims

PROMPT = [(7 * i + 3) % 500 for i in range(200)]
POISON = 0xA5


def poison(model):
    """attn_sink is longer than what is loaded: its padding is vLLM's to set."""
    import torch
    for name, parameter in model.named_parameters():
        if not name.endswith("attn_sink") and parameter.numel():
            parameter.data.view(torch.uint8).fill_(POISON)


def record_loading(seen):
    """Wraps the model's load_weights, the last point where parameters have the shapes of the checkpoint."""
    from vllm.models.deepseek_v4.cpu.model import DeepseekV4ForCausalLM
    original = DeepseekV4ForCausalLM.load_weights

    def load_weights(self, weights):
        poison(self)
        filled = original(self, weights)
        seen["filled"] = sorted(filled)
        seen["parameters"] = {n: p.detach().clone().contiguous() for n, p in self.named_parameters()}
        return filled
    DeepseekV4ForCausalLM.load_weights = load_weights


def start(checkpoint, nvfp4):
    from vllm import LLM
    backend = {"moe_backend": "emulation"} if nvfp4 else {}
    return LLM(model=str(checkpoint), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024, max_num_seqs=2,
               max_num_batched_tokens=1024, enforce_eager=True, **backend)


def prompt_logprobs(llm):
    from vllm import SamplingParams
    sampling = SamplingParams(temperature=0, max_tokens=1, detokenize=False, prompt_logprobs=0)
    answer = llm.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)[0]
    return [next(iter(d.values())).logprob for d in answer.prompt_logprobs[1:]], list(answer.outputs[0].token_ids)


def run(checkpoint, out):
    from safetensors.torch import save_file
    quantization = json.loads((checkpoint / "config.json").read_text()).get("quantization_config")
    nvfp4 = bool(quantization) and quantization.get("moe_quant_algo") == "NVFP4"
    shims.install(fp8=bool(quantization), nvfp4=nvfp4)
    seen, begin = {}, time.time()
    record_loading(seen)
    llm = start(checkpoint, nvfp4)
    loaded = time.time()
    logprobs, tokens = prompt_logprobs(llm)
    out.mkdir(parents=True, exist_ok=True)
    save_file(seen["parameters"], out / "parameters.safetensors")
    missing = sorted(set(seen["parameters"]) - set(seen["filled"]))
    result = dict(checkpoint=checkpoint.name, filled=seen["filled"], unfilled=missing, logprobs=logprobs, tokens=tokens,
                  seconds=dict(load=round(loaded - begin, 1), generate=round(time.time() - loaded, 1)))
    (out / "run.json").write_text(json.dumps(result) + "\n")
    print(f"{checkpoint}: {len(seen['parameters'])} parameters, {len(missing)} unfilled, sum of log-probabilities "
          f"{sum(logprobs):.4f}, load {result['seconds']['load']} s, generate {result['seconds']['generate']} s", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, help="default: CHECKPOINT_DIR.run beside it")
    options = parser.parse_args()
    shims.set_environment()
    run(options.checkpoint, options.out or options.checkpoint.with_name(options.checkpoint.name + ".run"))
    sys.stdout.flush()
    os._exit(0)  # vLLM's own shutdown takes seconds and has nothing left to do


if __name__ == "__main__":
    main()
