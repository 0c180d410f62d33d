"""The flagship on a header-only V4-Pro of full size: what `plan` counts, in its JSON and as it prints."""

from __future__ import annotations

import json
import re
import subprocess
import sys


def plan(source, *options):
    run = subprocess.run([sys.executable, "-m", "quantrules", "plan", "deepseek_v4_vllm", str(source), *options], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def conversions(source, *options):
    """(section, from, to, action) -> units"""
    report = json.loads(plan(source, "--json", *options))
    return {(c["section"], c["from"], c["to"], c["action"]): c for c in report["conversions"]}, report


def test_the_bridge_s_counts(v4_headers):
    found, report = conversions(v4_headers("pro"))
    attention, compressors, experts = "attention and shared experts", "compressors", "routed experts and the rest"
    assert found[attention, "nvfp4", "fp8_block", "convert"]["units"] == 61  # o_a_proj
    assert found[attention, "nvfp4", "bf16", "convert"]["units"] == 305  # 5 in each of 61 layers
    assert found[compressors, "nvfp4", "bf16", "convert"]["units"] == 91  # 61 main, 30 in indexers
    assert found[experts, "nvfp4", "nvfp4", "keep"]["tensors_in"] == 281_088 == found[experts, "nvfp4", "nvfp4", "keep"]["tensors_out"]
    assert not [k for k in found if k[1] == "bf16" and k[2] == "fp8_block"]  # none from BF16 to FP8
    assert sum(c["units"] for k, c in found.items() if k[2] == "fp8_block") == 61
    assert report["totals"]["tensors_in"] == 284_809 and not [d for d in report["diagnostics"] if d["severity"] != "note"]
    assert sorted(g["units"] for g in report["groups"] if g["section"] == compressors and g["source"] == "nvfp4") == [30, 61]


def test_they_are_printed(v4_headers):
    text = plan(v4_headers("pro"))
    rows = [re.sub(r"\s+", " ", line.strip()) for line in text.splitlines()]
    for row in ("nvfp4 → fp8_block 61 ", "nvfp4 → bf16 305 ", "nvfp4 → bf16 91 ", "nvfp4 kept 70,272 281,088 "):
        assert any(r.startswith(row) for r in rows), f"{row!r} is not in\n{text}"


def test_attention_as_fp8(v4_headers):
    found, _ = conversions(v4_headers("pro"), "-D", "attention=fp8")
    attention = "attention and shared experts"
    assert found[attention, "nvfp4", "fp8_block", "convert"]["units"] == 61 + 305
    assert (attention, "nvfp4", "bf16", "convert") not in found
    assert sum(c["units"] for k, c in found.items() if k[0] == "compressors" and k[1:3] == ("nvfp4", "bf16")) == 91
    assert found["compressors", "bf16", "fp8_block", "convert"]["units"] == 30  # the indexers' q_b_proj, BF16 on disk


def test_shared_experts_apart_from_attention(v4_headers):
    found, _ = conversions(v4_headers("pro"), "-D", "shared=fp8")
    attention = "attention and shared experts"
    assert found[attention, "nvfp4", "fp8_block", "convert"]["units"] == 61 + 2 * 61
    assert found[attention, "nvfp4", "bf16", "convert"]["units"] == 3 * 61


def test_bf16_attention_passes_through(v4_headers):
    found, _ = conversions(v4_headers("flash", "--attention", "bf16"))
    kept = [k for k in found if k[1] == "bf16" and k[2] == "fp8_block"]
    assert sum(found[k]["units"] for k in kept) == 43  # wo_a alone


def test_the_command_fits_in_300_mb(v4_headers):
    script = ("import runpy, sys; sys.argv = ['quantrules', 'plan', 'deepseek_v4_vllm', sys.argv[1]]\n"
              "try: runpy.run_module('quantrules', run_name='__main__')\n"
              "finally: print(*[l for l in open('/proc/self/status') if l.startswith('VmHWM')], file=sys.stderr)")  # fmt: skip
    run = subprocess.run([sys.executable, "-c", script, str(v4_headers("pro"))], capture_output=True, text=True)
    assert int(run.stderr.split()[-2]) < 300_000, run.stderr  # getrusage would count the peak of the process that forks
