#!/usr/bin/env python3
"""The demo of `make demo`: a real model to NVFP4 and back, then DeepSeek-V4 by its headers and in miniature.

usage: demo.py [--work DIR]        exit status 1 when anything is not as it must be

Made checkpoints and outputs stay in DIR (default .data/demo) to be looked at.
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent.parent
MAKERS = ROOT / "tests" / "makers"
TINY_V4 = ROOT / "tests" / "vllm" / "tiny_v4.py"
QUESTION, ANSWER = "What is the capital of France?", "Paris"

# The root mean square error of a weight in NVFP4, relative to the weight's own. compressed-tensors, an independent
# implementation, has 0.0923 to 0.0955 on the 210 matrices of this model (group maximum mapped to 6).
NVFP4_BAND = (0.090, 0.098)
PROJECTIONS = 210  # 30 layers of q, k, v, o, gate, up, down

console = Console(highlight=False, soft_wrap=True)
faults: list[str] = []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=ROOT / ".data" / "demo")
    work = parser.parse_args().work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    os.chdir(work)
    start = time.monotonic()
    there_and_back()
    by_headers()
    in_miniature()
    console.print()
    for fault in faults:
        console.print(Text(f"✗ {fault}", style="bold red"))
    if not faults:
        console.print(Text(f"All of it is as it must be ({time.monotonic() - start:.0f} s).", style="bold green"), end=" ")
        console.print(f"Inputs and outputs are in {os.path.relpath(work, ROOT)}")
    return 1 if faults else 0


# ------------------------------------------------------------------ a real model, to NVFP4 and back
def there_and_back() -> None:
    title("1  A real model, to NVFP4 and back", "SmolLM2-135M-Instruct, its trained weights, BF16")
    source, packed, back = Path("smollm2"), Path("smollm2-nvfp4"), Path("smollm2-back")
    make_once(source, MAKERS / "smollm2.py")
    quantrules("apply", "bf16_to_nvfp4", source, fresh(packed))
    quantrules("apply", "nvfp4_to_bf16", packed, fresh(back))
    before, after = read(source), read(back)
    check(before.keys() == after.keys(), f"the same {len(before)} tensor names come back", "names differ after the way back")
    sizes = [sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6 for folder in (source, packed)]
    check(sizes[1] < 0.5 * sizes[0], f"{sizes[0]:.0f} MB became {sizes[1]:.0f} MB", "NVFP4 is not smaller")
    compare(before, after)
    for folder in (source, back):
        text = generate(folder)
        check(ANSWER in text, f"{folder}: “{QUESTION}” “{text}”", f"{folder} does not name {ANSWER}, but says: {text}")


def compare(before: dict, after: dict) -> None:
    """Every projection within the band of NVFP4, every other tensor as it was, to the last bit."""
    errors = {key: relative_error(before[key], after[key]) for key in before if key.endswith("_proj.weight") and key in after}
    show_errors(errors)
    outside = out_of_band(errors)
    check(
        len(errors) == PROJECTIONS and not outside,
        f"all {len(errors)} matrices have the error of NVFP4, {NVFP4_BAND[0]:.3f} to {NVFP4_BAND[1]:.3f}",
        f"{len(errors)} of {PROJECTIONS} matrices, {len(outside)} with an error that NVFP4 does not have: {outside[:3]}",
    )
    rest = [key for key in before if key not in errors]
    changed = [key for key in rest if key not in after or not same_bits(before[key], after[key])]
    check(not changed, f"the other {len(rest)} tensors came back bit for bit", f"changed on the way: {changed[:3]}")


def relative_error(reference, value) -> float:
    """‖reference - value‖ / ‖reference‖, in float32."""
    reference, value = reference.float(), value.float()
    return float((reference - value).norm() / reference.norm())


def out_of_band(errors: dict[str, float]) -> list[str]:
    low, high = NVFP4_BAND
    return [f"{key} {error:.4f}" for key, error in errors.items() if not low <= error <= high]


def same_bits(one, other) -> bool:
    import torch

    same_kind = one.shape == other.shape and one.dtype == other.dtype
    return same_kind and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def show_errors(errors: dict[str, float]) -> None:
    by_module: dict[str, list[float]] = {}
    for key, error in errors.items():
        by_module.setdefault(key.split(".")[-2], []).append(error)
    table = Table("matrix", "layers", "least", "mean", "largest", title="relative error, original to way back", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for module, found in by_module.items():
        table.add_row(module, str(len(found)), *(f"{x:.4f}" for x in (min(found), sum(found) / len(found), max(found))))
    console.print(table)


def generate(folder: Path) -> str:
    """The model's greedy answer, by transformers."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    chat = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, max_new_tokens=24, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return tokenizer.decode(tokens, skip_special_tokens=True).strip()


# ------------------------------------------------------------------ DeepSeek-V4
def by_headers() -> None:
    title("2  DeepSeek-V4-Pro, by its headers", "every name and shape of the 889 GB NVFP4 export, no byte of its data")
    source = Path("v4-pro")
    make_once(source, MAKERS / "v4_headers.py", "pro")
    quantrules("plan", "deepseek_v4_vllm", source)
    groups = json.loads(quantrules("plan", "deepseek_v4_vllm", source, "--json", quiet=True))["conversions"]
    compressors = [group for group in groups if group["section"] == "compressors"]
    others = [group for group in groups if group["section"] != "compressors"]
    expect("o_a_proj to FP8 blocks", 61, count(others, "nvfp4", "fp8_block"))
    expect("attention and shared expert modules to BF16", 305, count(others, "nvfp4", "bf16"))
    expect("compressors to BF16, fused", 91, count(compressors, "nvfp4", "bf16"))
    expect("expert tensors kept as they are", 281_088, count(groups, "nvfp4", "nvfp4", of="tensors_out"))


def count(groups: list[dict], source: str, target: str, of: str = "units") -> int:
    return sum(group[of] for group in groups if (group["from"], group["to"]) == (source, target))


def in_miniature() -> None:
    title("3  DeepSeek-V4 in miniature", "a tiny V4 in NVFP4 with random weights, converted to what vLLM's loader takes")
    source, ours, expected = Path("v4-tiny"), Path("v4-tiny-vllm"), Path("v4-tiny-expected")
    run(sys.executable, TINY_V4, "source", fresh(source))
    run(sys.executable, TINY_V4, "expected", fresh(expected))
    quantrules("apply", "deepseek_v4_vllm", source, fresh(ours))
    made, wanted = read(ours), read(expected)
    wrong = sorted(made.keys() ^ wanted.keys()) or [key for key in made if not same_bits(made[key], wanted[key])]
    check(
        not wrong,
        f"all {len(made)} tensors equal what a script of its own, in plain torch, says they must be",
        f"{len(wrong)} tensors differ from what they must be: {wrong[:3]}",
    )


# ------------------------------------------------------------------ small helpers
def title(text: str, what: str) -> None:
    console.print()
    console.rule(Text(text, style="bold"), align="left", characters="─")
    console.print(Text(what, style="dim"))


def make_once(out: Path, maker: Path, *arguments: str) -> None:
    """An interrupted maker leaves no directory of this name."""
    if not out.exists():
        unfinished = fresh(out.with_name(f"{out.name}.unfinished"))
        run(sys.executable, maker, unfinished, *arguments)
        unfinished.rename(out)


def fresh(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    return folder


def quantrules(*arguments, quiet: bool = False) -> str:
    """Run the command as a user would; its output is shown, and returned where `quiet`."""
    command = Path(sys.executable).with_name("quantrules")
    if quiet:
        return run(command, *arguments)
    console.print(Text(f"$ quantrules {' '.join(map(str, arguments))}", style="bold cyan"))
    start = time.monotonic()
    run(command, *arguments, capture=False)
    console.print(Text(f"  {time.monotonic() - start:.1f} s", style="dim"))
    return ""


def run(*command, capture: bool = True) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=capture, text=True)
    if done.returncode:
        raise SystemExit(f"{done.stderr or ''}exit status {done.returncode}: {' '.join(map(str, command))}")
    return done.stdout or ""


def read(folder: Path) -> dict:
    """All tensors of a checkpoint directory, by the safetensors library."""
    from safetensors.torch import load_file

    return {key: tensor for file in sorted(folder.glob("*.safetensors")) for key, tensor in load_file(file).items()}


def expect(what: str, wanted: int, found: int) -> None:
    check(found == wanted, f"{found:,} {what}", f"{what}: {found:,} where {wanted:,} are expected")


def check(holds: bool, sentence: str, fault: str) -> None:
    if holds:
        console.print(Text("✓ ", style="green") + Text(sentence))
    else:
        console.print(Text(f"✗ {fault}", style="bold red"))
        faults.append(fault)


if __name__ == "__main__":
    sys.exit(main())
