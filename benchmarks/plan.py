"""What `quantrules plan` costs on a header-only DeepSeek-V4-Pro, process start to exit, beside reading the same headers.

usage: python benchmarks/plan.py [--runs N]       (makes its input in .data/bench once; 104 sparse files)

The baseline is the least that a Python tool can do: the standard library's json.loads of every header, nothing else.
Prints seconds (minimum, median, maximum), the ratio of the medians, and the largest peak of resident memory.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
BASELINE = """
import json, struct, sys, pathlib
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.safetensors")):
    with open(path, "rb") as file:
        json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
"""


def measure(command: list[str]) -> tuple[float, int]:
    """(seconds, peak resident KiB) of one run of a command."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}  # as an installed package is: compiled
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(command)} failed")
    return time.perf_counter() - start, usage.ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    runs = parser.parse_args().runs
    made = ROOT / ".data" / "bench" / "v4-pro"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        unfinished = made.with_name("unfinished")
        subprocess.run([sys.executable, ROOT / "tests/makers/v4_headers.py", unfinished, "pro"], check=True, stdout=subprocess.DEVNULL)
        unfinished.rename(made)
    plan = [sys.executable, "-m", "quantrules", "plan", "deepseek_v4_vllm", str(made)]
    baseline = [sys.executable, "-c", BASELINE, str(made)]
    measure(plan)  # warms the caches of files and of compiled grammar
    pairs = [(measure(plan), measure(baseline)) for _ in range(runs)]  # side by side: the machine may be shared
    medians = []
    for name, found in (("quantrules plan", [p for p, _ in pairs]), ("json.loads of all headers", [b for _, b in pairs])):
        seconds = sorted(s for s, _ in found)
        medians.append(statistics.median(seconds))
        print(f"{name:28} {seconds[0]:6.2f} {medians[-1]:6.2f} {seconds[-1]:6.2f} s   {max(m for _, m in found) / 1000:6.0f} MB")
    print(f"ratio of medians             {medians[0] / medians[1]:6.2f}")


if __name__ == "__main__":
    main()
