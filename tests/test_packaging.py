"""The wheel: what a user installs has the rules, the command and the type marker, and works outside a checkout."""
import json
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest

from tests.conftest import ROOT

RULES = sorted(path.name for path in (ROOT / "rules").glob("*.rules"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("quantrules-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The bin folder of a new environment with the wheel in it; what it depends on is borrowed from this one."""
    venv = tmp_path_factory.mktemp("installed") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(python), "install"]
    subprocess.run([*pip, "--quiet", "--no-deps", "--no-index", str(wheel)], check=True, capture_output=True)
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    site_packages = next(venv.glob("lib/python*/site-packages"))
    (site_packages / "borrowed.pth").write_text("".join(f"{folder}\n" for folder in borrowed))
    return venv / "bin"


def run(*command, cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_ships_every_rule_file_the_grammar_and_the_type_marker(wheel):
    names = set(ZipFile(wheel).namelist())
    assert RULES
    assert {f"quantrules/rules/{name}" for name in RULES} <= names
    assert {"quantrules/py.typed", "quantrules/cli/__init__.py", "quantrules/lang/grammar.lark"} <= names
    assert not [name for name in names if name.startswith(("tests", "rules/", "examples"))]


def test_the_installed_command_lists_the_shipped_rules(installed, tmp_path):
    listed = run(installed / "quantrules", "rules", cwd=tmp_path)
    for name in RULES:
        if name != "formats.rules":
            assert name.removesuffix(".rules") in listed


def test_the_installed_package_loads_every_shipped_rule_file(installed, tmp_path):
    program = """
import json, sys, quantrules
names = sys.argv[1:]
for name in names:
    quantrules.load(name)
print(json.dumps([quantrules.__file__, "torch" in sys.modules]))
"""
    names = [name.removesuffix(".rules") for name in RULES if name != "formats.rules"]
    file, torch_imported = json.loads(run(installed / "python", "-c", program, *names, cwd=tmp_path))
    assert Path(file).is_relative_to(installed.parent)
    assert not torch_imported


def test_the_installed_command_plans(installed, tmp_path, v4_headers):
    assert "fp8_block" in run(installed / "quantrules", "plan", "deepseek_v4_vllm", v4_headers("pro"), cwd=tmp_path)
