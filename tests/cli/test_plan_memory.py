"""`plan` names the recipes that cannot run in tiles, and what they take."""

from __future__ import annotations

import json
import re
import struct
import subprocess
import sys

from tests.conftest import ROOT


def test_a_recipe_that_cannot_run_in_tiles_is_named(tmp_path):
    size = 2 * 4096 * 4096
    header = {f"l.experts.{e}.w": {"dtype": "BF16", "shape": [4096, 4096], "data_offsets": [e * size, (e + 1) * size]} for e in range(4)}
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + 4 * size)  # headers only: a hole on the disk
    said = {}
    for dim in (0, 1):
        (tmp_path / "t.rules").write_text(f"*.experts.{{E}}.w → stack(E, {dim}) → *.experts.w\n")
        command = [sys.executable, "-m", "quantrules", "plan", str(tmp_path / "t.rules"), str(tmp_path / "model.safetensors")]
        said[dim] = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "cannot run in tiles" not in said[0]
    found = re.search(r"line 1 cannot run in tiles: 1 unit, (\d+) MB of memory each, such as l\.experts\.w", said[1])
    assert found and int(found[1]) >= 2 * 4 * size // 10**6, said[1]  # at least what it reads and what it writes
