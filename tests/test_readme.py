"""What README tells a user to type, typed: its blocks marked `run`, in order, in a folder like the one it assumes."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
TINY_V4 = ROOT / "tests" / "vllm" / "tiny_v4.py"
INTERPRETERS = {"sh": ["bash", "-eu"], "python": [sys.executable]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the files of README and the tiny DeepSeek-V4 that `make demo` leaves."""
    folder = tmp_path_factory.mktemp("readme")
    subprocess.run([sys.executable, str(TINY_V4), "source", str(folder / ".data/demo/v4-tiny")], check=True)
    for _, name, text in BLOCKS:
        if name.endswith(".rules"):
            (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_readme_has_blocks_to_run():
    assert [language for language, mark, _ in BLOCKS if mark == "run"] == ["sh", "python"]


@pytest.mark.parametrize("language", ["sh", "python"])
def test_the_blocks_that_are_marked_run_do(folder, language):
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    for _, _, text in (block for block in BLOCKS if block[:2] == (language, "run")):
        command = INTERPRETERS[language]
        done = subprocess.run(command, input=text, text=True, cwd=folder, capture_output=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_first_rule_does_what_readme_says(folder, tmp_path):
    from safetensors.torch import load_file

    source = folder / ".data/demo/v4-tiny"
    command = Path(sys.executable).with_name("quantrules")
    subprocess.run([command, "apply", folder / "first.rules", source, tmp_path / "out"], check=True)
    made = {key: tensor for file in (tmp_path / "out").glob("*.safetensors") for key, tensor in load_file(file).items()}
    fused = [key for key in made if "indexer" in key and "fused_wkv_wgate" in key]
    assert fused == ["model.layers.1.self_attn.compressor.indexer.fused_wkv_wgate.weight"]
    assert made[fused[0]].shape == (512, 256)
    assert "model.layers.1.self_attn.compressor.kv_proj.weight_scale" in made


def test_the_make_targets_and_commands_of_readme_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
    shipped = {path.stem for path in (ROOT / "rules").glob("*.rules")} - {"formats"}
    listed = README.split("## Rules that are shipped")[1].split("## Python")[0]
    assert shipped <= set(re.findall(r"`(\w+)`", listed)), "README lists every shipped rule file"


def test_the_table_of_commands_is_what_help_lists():
    command = Path(sys.executable).with_name("quantrules")
    told = subprocess.run([command, "--help"], check=True, capture_output=True, text=True).stdout
    table = README.split("## Commands")[1].split("## Rules")[0]
    for name in re.findall(r"`(?:quantrules )?(\w+)", "\n".join(line for line in table.splitlines() if line.startswith("| `"))):
        assert name in told
