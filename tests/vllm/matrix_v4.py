"""Every source and target of the tiny DeepSeek-V4, converted by a command and judged by vLLM.

  matrix_v4.py WORK_DIR --convert COMMAND [--only TEXT] [--files-only]
  matrix_v4.py WORK_DIR --prove

COMMAND is run for each case with {source}, {out}, {attention}, {shared} and {experts} filled in, for example
  --convert "quantrules convert RULES {source} {out} -D attention={attention} -D shared={shared} -D experts={experts}"
--prove judges the judge: the expected checkpoints must pass, and damaged ones must not, each for the right reason.
--files-only compares files and needs no vLLM. Ends with a line 'N passed, N failed'.
"""
import argparse
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
from typing import NamedTuple

import check_v4
import tiny_v4
import torch
from tiny_v4 import Target


class Case(NamedTuple):
    name: str
    spelling: str
    storage: str
    target: Target

    @property
    def choices(self):
        return self.spelling, self.storage, 0, self.target


CASES = [
    Case("modelopt-bf16", "modelopt", "nvfp4", Target("bf16", "bf16")),
    Case("modelopt-fp8", "modelopt", "nvfp4", Target("fp8", "fp8")),
    Case("modelopt-bf16-shared-fp8", "modelopt", "nvfp4", Target("bf16", "fp8")),
    Case("modelopt-fp8-shared-bf16", "modelopt", "nvfp4", Target("fp8", "bf16")),
    Case("modelopt-bf16-experts-bf16", "modelopt", "nvfp4", Target("bf16", "bf16", "bf16")),
    Case("modelopt-fp8-experts-bf16", "modelopt", "nvfp4", Target("fp8", "fp8", "bf16")),
    Case("compressed-tensors-bf16", "compressed-tensors", "nvfp4", Target("bf16", "bf16")),
    Case("compressed-tensors-fp8", "compressed-tensors", "nvfp4", Target("fp8", "fp8")),
    Case("fp8-attention-bf16", "modelopt", "fp8", Target("bf16", "bf16")),
    Case("fp8-native-attention-fp8", "modelopt", "fp8-native", Target("fp8", "fp8")),
    Case("bf16-attention-bf16", "modelopt", "bf16", Target("bf16", "bf16")),
    Case("bf16-attention-fp8", "compressed-tensors", "bf16", Target("fp8", "fp8")),
]
# What vLLM takes too, though no rule file makes it.
UNMADE = [
    Case("wo-a-bf16", "modelopt", "nvfp4", Target("bf16", "bf16", "keep", "bf16")),
    Case("all-bf16", "modelopt", "nvfp4", Target("bf16", "bf16", "bf16", "bf16")),
]


class Folders:
    def __init__(self, work, case):
        self.source = work / f"source-{case.spelling}-{case.storage}"
        self.expected, self.twin, self.out = (work / f"{case.name}.{part}" for part in ("expected", "twin", "converted"))


def prepare(case, folders, source=True, twin=True):
    """Writes what is not there yet."""
    if source:
        write_once(folders.source, lambda: tiny_v4.source_checkpoint(*case.choices[:3]))
    write_once(folders.expected, lambda: tiny_v4.expected_checkpoint(*case.choices))
    if twin:
        write_once(folders.twin, lambda: tiny_v4.twin_checkpoint(*case.choices))


def write_once(folder, make):
    if not (folder / "config.json").exists():
        tiny_v4.write_checkpoint(folder, *make())


def convert(command, case, folders):
    """-> a fault, or None."""
    shutil.rmtree(folders.out, ignore_errors=True)
    values = dict(source=folders.source, out=folders.out, attention=case.target.attention, shared=case.target.shared,
                  experts=case.target.experts)
    done = subprocess.run([word.format(**values) for word in shlex.split(command)], stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True)
    return f"the command ended with {done.returncode}: {done.stdout[-2000:]}" if done.returncode else None


def matrix(work, command, only, files_only):
    """-> {case name: faults}."""
    cases = {case: Folders(work, case) for case in CASES if only in case.name}
    results = {}
    for case, folders in cases.items():
        prepare(case, folders, twin=not files_only)
        fault = convert(command, case, folders)
        if fault:
            results[case.name] = [fault]
        elif files_only:
            results[case.name] = check_v4.file_faults(folders.out, folders.expected)
    judged = {case: folders for case, folders in cases.items() if case.name not in results}
    twins = [f.twin for f in judged.values() if not check_v4.was_run(f.twin)]
    said = check_v4.run_all([f.out for f in judged.values()] + twins)
    for case, f in judged.items():
        results[case.name] = check_v4.faults_of(f.out, f.expected, f.twin, said)
    return results


# ------------------------------------------------------------------------------------------ judging the judge
EXPERT = "layers.1.ffn.experts."


def swap_w1_w3(tensors):
    swap = {".w1.": ".w3.", ".w3.": ".w1."}
    return {n.replace(w, swap[w], 1) if (w := next((w for w in swap if w in n), None)) else n: t for n, t in tensors.items()}


def ones_for_wo_a_scale(tensors):
    return {n: torch.ones(t.shape).to(t.dtype) if n.endswith("wo_a.scale") else t for n, t in tensors.items()}


def ones_for_block_scales(tensors):
    return {n: torch.ones(t.shape).to(t.dtype) if n.endswith("weight_scale") else t for n, t in tensors.items()}


def zero_one_expert(tensors):
    return {n: torch.zeros_like(t) if n.startswith(EXPERT + "17.") and n.endswith(".weight") else t for n, t in tensors.items()}


def drop_one_scale(tensors):
    return {n: t for n, t in tensors.items() if n != "layers.0.attn.wo_a.scale"}


def swap_nibbles(tensors):
    return {n: (t >> 4 | t << 4) if t.dtype == torch.uint8 else t for n, t in tensors.items()}


def numbers_for_bytes(tensors):
    """The scale's bytes copied as numbers: the fault behind more than one garbled server."""
    return {n: t.view(torch.uint8).float() if n.endswith("wo_a.scale") else t for n, t in tensors.items()}


def negate_one_indexer_row(tensors):
    out = dict(tensors)
    name = "layers.1.attn.indexer.wq_b.weight"
    out[name] = torch.cat([-tensors[name][:1], tensors[name][1:]])
    return out


# damage, and a text that a fault must hold
DAMAGE = [
    (swap_w1_w3, "w13_weight"), (ones_for_wo_a_scale, "wo_a.weight_scale_inv"), (ones_for_block_scales, "w13_weight_scale"),
    (zero_one_expert, "layers.1.ffn.experts.routed_experts.w13_weight"), (drop_one_scale, "load_weights did not fill it"),
    (swap_nibbles, "w2_weight"), (numbers_for_bytes, "wo_a.weight_scale_inv"), (negate_one_indexer_row, "indexer.wq_b.weight"),
]
MUST_MOVE_LOGPROBS = {swap_w1_w3, ones_for_wo_a_scale, ones_for_block_scales, swap_nibbles, numbers_for_bytes}


def damage(case, change, work):
    out = work / f"damaged-{change.__name__}"
    tensors, config = tiny_v4.expected_checkpoint(*case.choices)
    write_once(out, lambda: (change(tensors), config))
    return out


def verdict(change, text, faults):
    """Faults of the proof itself: damage that went unseen."""
    missed = [] if any(text in f for f in faults) else [f"no fault speaks of {text}; found: {faults[:3]}"]
    if change in MUST_MOVE_LOGPROBS and not any("BF16 twin" in f for f in faults):
        missed.append("log-probabilities did not give it away")
    return missed


def prove(work, only):
    """-> {name: faults}: the expected checkpoints pass for themselves, damaged ones fail as they must."""
    cases = {case: Folders(work, case) for case in CASES + UNMADE if only in case.name}
    for case, folders in cases.items():
        prepare(case, folders, source=False)
    base = next(iter(cases))
    damaged = {change: damage(base, change, work) for change, _ in DAMAGE}
    wanted = [d for f in cases.values() for d in (f.expected, f.twin)] + list(damaged.values())
    said = check_v4.run_all([d for d in wanted if not check_v4.was_run(d)])
    results = {case.name: check_v4.faults_of(f.expected, f.expected, f.twin, said) for case, f in cases.items()}
    for change, text in DAMAGE:
        faults = check_v4.faults_of(damaged[change], cases[base].expected, cases[base].twin, said)
        results[f"sees {change.__name__}"] = verdict(change, text, faults)
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=pathlib.Path)
    parser.add_argument("--convert", metavar="COMMAND")
    parser.add_argument("--prove", action="store_true")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds it")
    parser.add_argument("--files-only", action="store_true")
    options = parser.parse_args()
    if options.prove == bool(options.convert):
        parser.error("one of --convert and --prove")
    options.work.mkdir(parents=True, exist_ok=True)
    if options.prove:
        results = prove(options.work, options.only)
    else:
        results = matrix(options.work, options.convert, options.only, options.files_only)
    for name, faults in results.items():
        check_v4.report(name, faults)
    failed = sum(map(bool, results.values()))
    print(f"{len(results) - failed} passed, {failed} failed")
    sys.exit(bool(failed) or not results)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    main()
