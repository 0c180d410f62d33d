"""Judges a converted DeepSeek-V4: does vLLM hold and say what it must?

  check_v4.py CONVERTED_DIR --expected EXPECTED_DIR --twin TWIN_DIR [--files-only]

The last two are tiny_v4.py's, for the same source and choices. What has not been run yet is run (run_v4.py); the record
of TWIN_DIR is used again. Asserted, each fault a line:

- config.json is the expected one, but for what declares the quantisation (several spellings are right: vLLM judges);
- load_weights filled every parameter;
- every parameter is, to the last bit, what the expected tensors put together by hand are (tiny_v4.expected_parameters),
  and, where EXPECTED_DIR was run too, what vLLM itself loads from it;
- log-probabilities of the prompt stay near those of the BF16 twin, and equal those of EXPECTED_DIR where it was run.

--files-only does without vLLM: the files of both directories, put together by hand, are compared. The prompt is too
short for the sparse indexer to choose anything, so of its weights only the comparison of bits says something.
"""
import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys

import tiny_v4
import torch
from run_v4 import folder_of
from safetensors.torch import load_file

# Nats between a natively quantised model and its BF16 twin. Noise of BF16 is 0.007 to 0.010 on average, and 0.034 at most
# for 19 tokens of 20; on the rest an expert near a tie is chosen otherwise (up to 0.23 seen). w1 and w3 swapped: mean 0.09.
MEAN, MOST = 0.02, 0.06
HERE = pathlib.Path(__file__).parent


class Run:
    """What run_v4.py wrote of one checkpoint."""
    def __init__(self, checkpoint):
        folder = folder_of(checkpoint)
        record = json.loads((folder / "run.json").read_text())
        self.parameters = load_file(folder / "parameters.safetensors")
        self.unfilled, self.logprobs, self.seconds = record["unfilled"], torch.tensor(record["logprobs"]), record["seconds"]


def was_run(checkpoint):
    return (folder_of(checkpoint) / "run.json").exists()


def run_all(checkpoints):
    """One process for all of them. -> what vLLM said, of use where a directory has no record afterwards."""
    for checkpoint in checkpoints:
        shutil.rmtree(folder_of(checkpoint), ignore_errors=True)
    if not checkpoints:
        return ""
    done = subprocess.run([sys.executable, HERE / "run_v4.py", *checkpoints], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    return done.stdout


def tensors_of(checkpoint):
    """All tensors of a directory, by its index, or of its only file."""
    index = checkpoint / "model.safetensors.index.json"
    if not index.exists():
        return load_file(checkpoint / "model.safetensors")
    weight_map = json.loads(index.read_text())["weight_map"]
    files = {name: load_file(checkpoint / name) for name in set(weight_map.values())}
    stray = {key for file in files.values() for key in file} ^ set(weight_map)
    if stray:
        raise ValueError(f"{index} and the files disagree about {sorted(stray)[:5]}")
    return {key: files[name][key] for key, name in weight_map.items()}


def difference(name, got, want):
    if name not in got or name not in want:
        return f"{name}: {'missing' if name not in got else 'not expected'}"
    a, b = got[name], want[name]
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{name}: {a.dtype} {tuple(a.shape)} where {b.dtype} {tuple(b.shape)} is expected"
    unequal = a.contiguous().view(-1).view(torch.uint8) != b.contiguous().view(-1).view(torch.uint8)
    if not unequal.any():
        return None
    place = int(unequal.nonzero()[0]) // a.element_size()
    return (f"{name}: {int(unequal.sum())} of {unequal.numel()} bytes differ, first at element {place}: "
            f"{a.reshape(-1)[place].item()} where {b.reshape(-1)[place].item()} is expected")


def tensor_faults(got, want):
    return [d for d in (difference(n, got, want) for n in sorted(set(got) | set(want))) if d]


def config_faults(converted, expected):
    got, want = (json.loads((d / "config.json").read_text()) for d in (converted, expected))
    keys = (set(got) | set(want)) - {"quantization_config", "expert_dtype"}
    faults = [f"config.json: {k} is {got.get(k)!r} where {want.get(k)!r} is expected" for k in sorted(keys)
              if got.get(k) != want.get(k)]
    if "quantization_config" not in want and (converted / "hf_quant_config.json").exists():
        faults.append("hf_quant_config.json: vLLM takes it for the declaration of a model that is not quantised")
    return faults


def logprob_faults(got, twin):
    away = (got.logprobs - twin.logprobs).abs()
    if away.mean() < MEAN and away.quantile(0.95) < MOST:  # NaN is a fault
        return []
    return [f"log-probabilities are {away.mean():.4f} on average from the BF16 twin's, for 19 of 20 tokens up to "
            f"{away.quantile(0.95):.4f}; allowed are {MEAN} and {MOST}"]


def engine_faults(got, want):
    """Against vLLM's own run of the expected checkpoint."""
    faults = [f"as vLLM loads the expected: {d}" for d in tensor_faults(got.parameters, want.parameters)]
    if not torch.equal(got.logprobs, want.logprobs):
        away = (got.logprobs - want.logprobs).abs().max()
        faults.append(f"log-probabilities are up to {away:.4f} from the expected checkpoint's")
    return faults


def file_faults(converted, expected):
    by_hand = [tiny_v4.expected_parameters(tensors_of(d)) for d in (converted, expected)]
    return config_faults(converted, expected) + tensor_faults(*by_hand)


def faults_of(converted, expected, twin, said=""):
    """All faults of a directory that was run (or could not be)."""
    faults = config_faults(converted, expected)
    if not was_run(converted):
        return [*faults, f"vLLM does not load it: {said[-2000:]}"]
    got = Run(converted)
    faults += [f"{name}: load_weights did not fill it" for name in got.unfilled]
    faults += tensor_faults(got.parameters, tiny_v4.expected_parameters(tensors_of(expected)))
    if was_run(expected):
        faults += engine_faults(got, Run(expected))
    return faults + logprob_faults(got, Run(twin))


def report(name, faults, shown=10):
    for fault in faults[:shown]:
        print("   ", fault)
    print(f"{name}: {f'{len(faults)} faults' if faults else 'passed'}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("converted", type=pathlib.Path)
    parser.add_argument("--expected", type=pathlib.Path, required=True)
    parser.add_argument("--twin", type=pathlib.Path)
    parser.add_argument("--files-only", action="store_true")
    options = parser.parse_args()
    if options.files_only:
        faults = file_faults(options.converted, options.expected)
    else:
        said = run_all([options.converted, *([] if was_run(options.twin) else [options.twin])])
        faults = faults_of(options.converted, options.expected, options.twin, said)
    report(options.converted, faults)
    sys.exit(bool(faults))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    main()
