"""Loads DeepSeek-V4 directories in real vLLM's default loader and writes down what it then holds and says.

  run_v4.py CHECKPOINT_DIR... [--out DIR]

Needs the environment of setup.sh. Writes to CHECKPOINT_DIR.run (or --out, for one): parameters.safetensors (every
parameter right after load_weights, before vLLM repacks them) and run.json (which parameters load_weights filled, and
the log-probabilities of a fixed prompt of 200 tokens, which passes the sliding window and both compressions). Before
loading, parameters are filled with a pattern of bytes, so that memory nobody wrote is the same in every run and never
looks right by chance. Several directories are loaded one after the other in one process, which saves the imports; one
that vLLM refuses is reported, gets no run.json, and makes the exit status 1.
"""
import argparse
import gc
import json
import os
import pathlib
import shutil
import sys
import time
import traceback

import shims

PROMPT = [(7 * i + 3) % 500 for i in range(200)]
POISON = 0xA5


def folder_of(checkpoint):
    """Where the record of a checkpoint lies."""
    return checkpoint.with_name(checkpoint.name + ".run")


def poison(model):
    """attn_sink may be longer than what is loaded: its padding is vLLM's to set."""
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
    return [next(iter(d.values())).logprob for d in answer.prompt_logprobs[1:]]


def run(checkpoint, out, seen):
    from safetensors.torch import save_file
    shutil.rmtree(out, ignore_errors=True)  # no old record may stand for a run that fails
    seen.clear()
    quantization = json.loads((checkpoint / "config.json").read_text()).get("quantization_config") or {}
    begin = time.time()
    llm = start(checkpoint, nvfp4=quantization.get("moe_quant_algo") == "NVFP4")
    loaded = time.time()
    logprobs = prompt_logprobs(llm)
    seconds = dict(load=round(loaded - begin, 1), prompt=round(time.time() - loaded, 1))
    out.mkdir(parents=True)
    save_file(seen["parameters"], out / "parameters.safetensors")
    missing = sorted(set(seen["parameters"]) - set(seen["filled"]))
    (out / "run.json").write_text(json.dumps(dict(unfilled=missing, logprobs=logprobs, seconds=seconds)) + "\n")
    print(f"{checkpoint}: {len(seen['parameters'])} parameters, {len(missing)} unfilled, "
          f"sum of log-probabilities {sum(logprobs):.4f}, {seconds}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoints", nargs="+", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, help="for a single directory; default CHECKPOINT_DIR.run")
    options = parser.parse_args()
    shims.set_environment()
    shims.install()
    seen, failed = {}, 0
    record_loading(seen)
    for checkpoint in options.checkpoints:
        try:
            run(checkpoint, options.out or folder_of(checkpoint), seen)
        except Exception:
            failed += 1
            traceback.print_exc()
            print(f"{checkpoint}: vLLM does not load it", flush=True)
        gc.collect()
    sys.stdout.flush()
    os._exit(bool(failed))  # vLLM's own shutdown takes seconds and has nothing left to do


if __name__ == "__main__":
    main()
