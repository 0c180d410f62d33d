"""No format's, dialect's, model's or engine's name stands in quantrules/, outside integrations: they are data, in rules/."""

import io
import re
import tokenize
from pathlib import Path

import pytest

from quantrules import lang
from quantrules.formats import load_dialects, load_formats

ROOT = Path(__file__).parent.parent
FILE = lang.load(ROOT / "rules" / "formats.rules")
MODELS = ["deepseek", "llama", "qwen", "mixtral", "gemma", "gpt_oss", "gptoss", "smollm", "glm", "kimi", "mamba", "megatron"]
ENGINES = ["vllm", "sglang", "tensorrt", "trtllm", "transformers", "compressed-tensors", "deepgemm", "marlin", "flashinfer"]
# what a word must stand beside to be no name of a format: dense is asked for by Format.is_dense, never by its name
ALLOWED = {"dense", "bare", "weight"}


def forbidden():
    formats = load_formats(FILE)
    made = {*formats, *(s.name for f in formats.values() for s in f.spellings), *(d.name for d in load_dialects(FILE))}
    return sorted((made | set(MODELS) | set(ENGINES)) - ALLOWED, key=len, reverse=True)


def code_of(path):
    """The text of a module without comments and docstrings: what it does, not what it explains."""
    tokens = list(tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline))
    before = tokenize.NEWLINE
    for token in tokens:
        docstring = token.type == tokenize.STRING and before in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.NL)
        if token.type != tokenize.COMMENT and not docstring:
            yield token.start[0], token.string
        if token.type not in (tokenize.NL, tokenize.COMMENT):
            before = token.type


def found_in(path, words):
    pattern = re.compile("|".join(re.escape(w) for w in words), re.IGNORECASE)
    return [f"{path.relative_to(ROOT)}:{line}: {text.strip()[:80]}" for line, text in code_of(path) if pattern.search(text)]


FILES = [p for p in sorted((ROOT / "quantrules").rglob("*.py")) if "integrations" not in p.parts]


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT / "quantrules")))
def test_no_name_in_code(path):
    found = found_in(path, forbidden())
    assert not found, "\n".join(found)


def test_dense_is_not_asked_for_by_name():
    pattern = re.compile(r"""formats(\[|\.get\()\s*["']dense["']|name\s*(==|!=|in)\s*\(?["']dense["']""")
    assert not [p for p in FILES if pattern.search(p.read_text(encoding="utf-8"))]
    assert pattern.search('if type.format.name == "dense":')


def test_the_search_finds_a_name():
    assert "nvfp4" in forbidden() and "inverse_named" in forbidden()
    assert found_in(Path(__file__), ["llama"])
