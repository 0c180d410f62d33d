"""Small cases from the field, by their files: a checkpoint on disk goes through the command line, and another reader looks."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from quantrules import load, parse
from quantrules.cli import app
from quantrules.plan import view

from .make import bf16, file, full, header_of, numbers, save, stored

ROOT = Path(__file__).parent.parent.parent
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def rules(tmp_path):
    """rules("* → keep") is the path of a file with that text."""

    def write(text: str, name: str = "my") -> str:
        path = tmp_path / f"{name}.rules"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def command(*arguments) -> tuple[int, str, str]:
    """(exit code, stdout, stderr); a traceback fails the test."""
    result = CliRunner().invoke(app, [str(a) for a in arguments], prog_name="quantrules")
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def applied(*arguments) -> dict:
    """The tensors of what `apply` wrote."""
    code, _, said = command("apply", *arguments)
    assert code == 0, said
    return stored(Path(arguments[2]))


def refused(*arguments) -> str:
    """What a command that refuses says; its stdout is empty."""
    code, out, said = command(*arguments)
    assert (code, out) == (1, ""), said
    assert "error[QR" in said and "Traceback" not in said
    return said


def content(folder: Path) -> dict[str, bytes]:
    """All that lies below a directory."""
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else b"" for p in sorted(folder.rglob("*"))}


def nvfp4(path: str, n: int = 4, k: int = 32, scale: bytes = b"\x38", shared: bytes = b"\0\0\0\x3f") -> dict:
    """w = 1 · 1 · 0.5 unless said otherwise."""
    codes, scales = full("U8", 0x22, n, k // 2), full("F8_E4M3", scale, n, k // 16)
    return {f"{path}.weight": codes, f"{path}.weight_scale": scales, f"{path}.weight_scale_2": full("F32", shared)}


def fp8_block(path: str) -> tuple[dict, dict]:
    """(weight, scale): 1 · 0.5"""
    return {f"{path}.weight": full("F8_E4M3", 0x38, 2, 2)}, {f"{path}.weight_scale_inv": full("F32", b"\0\0\0\x3f", 1, 1)}


MODELOPT = {"hidden_size": 32, "quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "ignore": []}}
FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}

# --------------------------------------------------------------------------------------------------- shards and indexes


def test_members_are_joined_whatever_shards_they_lie_in(tmp_path, rules):
    """B011: q of two layers in one shard, k and v in another; rows come in the order q, k, v."""
    row = lambda x: bf16(*[float(x)] * 8, shape=(2, 4))  # noqa: E731
    q = {f"l.{i}.q": row(i + 0.25) for i in (3, 7)}
    kv = {f"l.{i}.{m}": row(i + x) for i in (7, 3) for m, x in (("v", 0.75), ("k", 0.5))}
    for order in ({ONE: q, TWO: kv}, {ONE: kv, TWO: q}):
        source = save(tmp_path / "source", order)
        out = applied(rules("l.{L}.{q,k,v} → cat → l.{L}.qkv\n"), source, tmp_path / "out", "--overwrite")
        assert {k: (shape, numbers(t)[::4]) for k, t in out.items() for _, shape, _ in (t,)} == {
            f"l.{i}.qkv": ((6, 4), [i + 0.25, i + 0.25, i + 0.5, i + 0.5, i + 0.75, i + 0.75]) for i in (3, 7)}  # fmt: skip


def test_a_weight_and_its_scale_may_lie_in_different_shards(tmp_path):
    """B095: also a shard that holds nothing but scales; none is left of it."""
    (a, a_scale), (c, c_scale) = fp8_block("a"), fp8_block("c")
    shards = {"1.safetensors": a | c, "2.safetensors": a_scale | {"b.weight": bf16(1, 2)}, "3.safetensors": c_scale}
    out = applied("fp8_block_to_bf16", save(tmp_path / "source", shards, FP8), tmp_path / "out")
    assert {k: numbers(t) for k, t in out.items()} == {"a.weight": [0.5] * 4, "b.weight": [1, 2], "c.weight": [0.5] * 4}
    assert sorted(p.name for p in (tmp_path / "out").glob("*.safetensors")) == ["model-00001-of-00001.safetensors"]


def test_what_is_dropped_keeps_nothing_else_from_being_written(tmp_path, rules):
    """B089: the rest of its shard is written, the index is without it, and the report counts it."""
    shards = {ONE: {"a.weight": bf16(1)}, TWO: {"l.0.rotary_emb.inv_freq": full("F32", b"\0\0\x80\x3f", 4), "b.weight": bf16(2)}}
    source, path = save(tmp_path / "source", shards), rules("*.rotary_emb.inv_freq → drop   expect 1\n* → keep\n")
    assert {k: numbers(t) for k, t in applied(path, source, tmp_path / "out").items()} == {"a.weight": [1], "b.weight": [2]}
    assert "f32 dropped" in command("plan", path, source)[1]


def test_a_stray_file_beside_an_index_is_told_and_not_read(tmp_path, rules):
    """B071: the index says which `w`."""
    source = save(tmp_path / "source", {"a.safetensors": {"w": bf16(1, 2)}}, index=True)
    (source / "model.safetensors").write_bytes(file({"w": bf16(3, 4)}))
    code, _, said = command("apply", rules("* → keep\n"), source, tmp_path / "out")
    assert (code, numbers(stored(tmp_path / "out")["w"])) == (0, [1, 2])
    assert said.startswith("warning[QR330]") and "model.safetensors" in said
    assert "model.safetensors" not in content(tmp_path / "out")


@pytest.mark.parametrize("index_says", ["1.safetensors", "2.safetensors"])
def test_a_tensor_in_two_shards_is_refused_with_both_names(tmp_path, rules, index_says):
    """B073, B074: whichever the index means, somebody wrote the other one too."""
    shards = {f"{n}.safetensors": {f"{n}.w": bf16(1), "mtp.fc.weight": full("BF16", b"\0\0", 4, 4 // n)} for n in (1, 2)}
    source = save(tmp_path / "source", shards)
    weight_map = {"1.w": "1.safetensors", "2.w": "2.safetensors", "mtp.fc.weight": index_says}
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    said = refused("apply", rules("* → keep\n"), source, tmp_path / "out")
    assert "`mtp.fc.weight`" in said and ("1.safetensors" in said and "2.safetensors" in said)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("lost, weight", [
    ("a.qweight", full("I32", 0, 4, 4, size=4)), ("l.0.attn.wo_a.scale", full("F8_E4M3", 0x38, 128, 128)),
])  # fmt: skip
def test_headers_are_the_truth_and_the_index_is_checked(tmp_path, rules, lost, weight):
    """B127, B140: a tensor that only the index lists is no tensor of zeros."""
    key = "l.0.attn.wo_a.weight" if lost[0] == "l" else "a.g_idx"
    source = save(tmp_path / "source", {"1.safetensors": {key: weight}}, FP8)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": dict.fromkeys((key, lost), "1.safetensors")}))
    said = refused("apply", rules("* → keep\n"), source, tmp_path / "out")
    assert said.startswith("error[QR325]") and f"`{lost}`" in said and "1.safetensors" in said
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {key: "1.safetensors"}}))
    if lost[0] == "l":  # with the index mended the weight still lacks its scale
        said = refused("check", rules("* → keep\n"), source)
        assert "error[QR410]: l.0.attn.wo_a: .weight is f8_e4m3[128, 128], without a scale" in said


def test_experts_of_several_ranks_come_together_once_each(tmp_path, rules):
    """B134: 0 and 2 in one file, 1 and 3 in another; numbers come from the keys, and the config speaks of all."""
    experts = {e: nvfp4(f"m.experts.{e}.w1", 4, 32, shared=b"\0\0\x80" + bytes([0x3F + e // 2])) for e in range(4)}
    head = {"m.head.weight": bf16(*[1] * 64, shape=(2, 32))}
    shards = {"a.safetensors": experts[2] | experts[0], "b.safetensors": experts[3] | experts[1] | head}
    config = {**MODELOPT, "quantization_config": {**MODELOPT["quantization_config"], "ignore": ["m.head"]}}
    source = save(tmp_path / "source", shards, config)
    out = applied(rules("m.experts.{E}.w1 → keep → x.experts.{E}.w1   expect 4\n* → keep\n"), source, tmp_path / "out")
    assert sorted(k for k in out if k.endswith("w1.weight")) == [f"x.experts.{e}.w1.weight" for e in range(4)]
    for e in range(4):
        assert out[f"x.experts.{e}.w1.weight_scale_2"] == experts[e][f"m.experts.{e}.w1.weight_scale_2"]
    stacked = applied(rules("m.experts.{E}.w1 → unpack | stack(E) → x.w1\n* → keep\n", "stack"), source, tmp_path / "stacked")
    assert stacked["x.w1.weight_scale_2"][2] == b"".join(experts[e][f"m.experts.{e}.w1.weight_scale_2"][2] for e in range(4))
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert (section["quant_algo"], section["ignore"]) == ("W4A16_NVFP4", ["m.head"])


@pytest.mark.parametrize("size", [1, 70, 71, 142, 1000])
def test_a_module_is_never_parted_by_the_end_of_a_shard(tmp_path, rules, size):
    """B097: whatever fits into a shard, all tensors of a module are in one."""
    tensors = {k: v for i in range(6) for k, v in nvfp4(f"l.{i}").items()} | {"n.weight": bf16(*[1] * 33)}
    out = tmp_path / "out"
    applied(rules("* → keep\n"), save(tmp_path / "source", {"model.safetensors": tensors}, MODELOPT), out, "--shard-size", size)
    where = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert all(len({where[f"l.{i}.{t}"] for t in ("weight", "weight_scale", "weight_scale_2")}) == 1 for i in range(6))
    assert len(set(where.values())) > 1 or size == 1000


# ------------------------------------------------------------------------------------------------------- what files say


def test_a_file_without_tensors_is_read_and_an_empty_result_has_no_shard(tmp_path, rules):
    """B025"""
    shards = {"1.safetensors": {}, "2.safetensors": {"a.weight": bf16(1)}}
    source = save(tmp_path / "source", shards, metadata={"crc": "12"})
    out = tmp_path / "out"
    assert list(applied(rules("* → keep\n"), source, out)) == ["a.weight"]
    assert len(list(out.glob("*.safetensors"))) == 1
    code, said, _ = command("apply", rules("* → drop\n", "drop"), source, tmp_path / "nothing")
    assert code == 0 and "0 tensors in 0 files" in said
    assert not list((tmp_path / "nothing").glob("*.safetensors")) and stored(tmp_path / "nothing") == {}


@pytest.mark.parametrize("width", [99_992, 99_994, 100_000, 100_008, 1001])
def test_headers_of_every_length_are_read_to_their_last_byte(tmp_path, rules, width):
    """B026, B109: around 100,000, and of a length that leaves the data on an odd byte; what is written begins on a page."""
    source = save(tmp_path / "source", {})
    (source / "model.safetensors").write_bytes(file(nvfp4("a") | {"b.weight": bf16(1, -2, 3)}, width=width))
    out = applied(rules("* → keep\n"), source, tmp_path / "out")
    assert out == nvfp4("a") | {"b.weight": bf16(1, -2, 3)}
    assert header_of(tmp_path / "out" / "model-00001-of-00001.safetensors")[1] % 4096 == 0


def test_format_pt_is_always_said_and_the_source_s_metadata_stays(tmp_path, rules):
    """B100: transformers reads no file without it."""
    for metadata, expected in ((None, {"format": "pt"}), ({"made_by": "x", "format": "flax"}, {"made_by": "x", "format": "pt"})):
        source = save(tmp_path / "source", {"model.safetensors": {"a.weight": bf16(1)}}, metadata=metadata)
        applied(rules("* → keep\n"), source, tmp_path / "out", "--overwrite")
        header, _ = header_of(tmp_path / "out" / "model-00001-of-00001.safetensors")
        assert header["__metadata__"] == expected


def test_every_dtype_is_copied_with_its_header(tmp_path, rules):
    """B148: F4 counts elements in its shape, F8_E8M0 has a byte each; neither is known to every loader."""
    tensors = {"w": ("F4", (2, 8), bytes(range(8))), "s": ("F8_E8M0", (3,), b"\0\x7f\xff"), "f": ("F8_E5M2", (2,), b"\x7c\xff")}
    tensors |= {"i": ("I64", (1,), bytes(range(8))), "b": ("BOOL", (3,), b"\1\0\1"), "c": ("C64", (1,), bytes(range(8)))}
    tensors |= {"e": ("F16", (0, 3), b"")}
    source = save(tmp_path / "source", {"model.safetensors": tensors})
    assert applied(rules("* → keep\n"), source, tmp_path / "out") == tensors


MANY = 10**12


@pytest.mark.timeout(60)
@pytest.mark.parametrize("shape", [(0, 32), (4, 0), (MANY, 0), (0, MANY), (0, 4, 32), (3, MANY, 0), (0, 0)])
def test_a_tensor_without_elements_costs_nothing(tmp_path, shape):
    """B148: it is legal, has no bytes, and a dimension of any size; what is made of it is empty too, and its scalars stay."""
    *lead, n, k = shape
    scale = ("F32", (*lead, -(-n // 128), -(-k // 128)), b"")
    blocks = {"a.q_proj.weight": ("F8_E4M3", shape, b""), "a.q_proj.weight_scale_inv": scale}
    codes = {"b.q_proj.weight": ("U8", (n, k // 2), b""), "b.q_proj.weight_scale": ("F8_E4M3", (n, k // 16), b"")}
    codes = {} if lead else codes | {"b.q_proj.weight_scale_2": full("F32", b"\0\0\x80\x3f")}
    dense = {"a.q_proj.weight": ("BF16", shape, b"")}
    cases = {"fp8_block_to_bf16": blocks, "nvfp4_to_bf16": codes, "bf16_to_nvfp4": dense, "bf16_to_fp8_block": dense}
    for rules, tensors in cases.items():
        source, out = save(tmp_path / f"{rules}-source", {"model.safetensors": tensors}), tmp_path / rules
        made = applied(rules, source, out)
        assert all(data == b"" for name, (_, _, data) in made.items() if "scale_2" not in name)
        if rules.endswith("bf16") and tensors:
            assert [(dtype, s) for dtype, s, _ in made.values()] == [("BF16", shape)]


def test_pickles_are_not_read(tmp_path, rules):
    """B101: nor where an index names them; a file that would run code is not even opened."""
    trap = b"cos\nsystem\n(S'touch " + str(tmp_path / "pwned").encode() + b"'\ntR."
    source = tmp_path / "source"
    source.mkdir()
    (source / "pytorch_model.bin").write_bytes(trap)
    assert "pytorch_model.bin" in refused("apply", rules("* → keep\n"), source, tmp_path / "out")
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": "pytorch_model.bin"}}))
    assert "pytorch_model.bin" in refused("apply", rules("* → keep\n"), source, tmp_path / "out")
    assert not (tmp_path / "pwned").exists() and not (tmp_path / "out").exists()


@pytest.mark.parametrize("data, said", [
    (b"<!DOCTYPE html><html>Not Found</html>", "HTML page"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "Git LFS pointer"),
    ((1 << 40).to_bytes(8, "little") + b"{}", "header"),
    (file({"w": ("F32", (4,), bytes(16))}) + b"1234", "4 bytes behind its last tensor"),
])  # fmt: skip
def test_what_is_no_safetensors_file_is_told_what_it_looks_like(tmp_path, rules, data, said):
    """B157, B028"""
    source = save(tmp_path / "source", {})
    (source / "model.safetensors").write_bytes(data)
    assert said in refused("inspect", source)


def test_an_index_that_leads_elsewhere_is_not_followed(tmp_path, rules):
    """B070: `../`, an absolute path, and a link out of the directory: the first two are refused, the third is told."""
    (tmp_path / "secret.safetensors").write_bytes(file({"a": bf16(1)}))
    for shard in ("../secret.safetensors", str(tmp_path / "secret.safetensors"), "/etc/passwd"):
        source = save(tmp_path / "source", {})
        (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
        assert refused("apply", rules("* → keep\n"), source, tmp_path / "out").startswith("error[QR323]")
    source = save(tmp_path / "linked", {})
    (source / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    code, _, said = command("apply", rules("* → keep\n"), source, tmp_path / "out")
    assert code == 0 and said.startswith("warning[QR") and "secret.safetensors" in said
    assert not (tmp_path / "out" / "model-00001-of-00001.safetensors").is_symlink()


def test_a_tied_model_has_one_tensor_or_two_and_its_flag_says_what_it_said(tmp_path, rules):
    """B067, B068, B103: no rule needs `lm_head`, and two that are there are two in the file, equal and apart."""
    tied, embed = {"tie_word_embeddings": True}, bf16(*[1.0, 2.0] * 16, shape=(1, 32))
    source = save(tmp_path / "one", {"model.safetensors": {"embed_tokens.weight": embed, "a.q_proj.weight": embed}}, tied)
    out = applied("bf16_to_nvfp4", source, tmp_path / "out")
    assert "lm_head.weight" not in out and out["embed_tokens.weight"] == embed
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["tie_word_embeddings"] is True and "lm_head" in config["quantization_config"]["ignore"]
    back = applied("nvfp4_to_bf16", tmp_path / "out", tmp_path / "back")
    assert (sorted(back), back["embed_tokens.weight"]) == (["a.q_proj.weight", "embed_tokens.weight"], embed)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == tied

    both = {"embed_tokens.weight": embed, "lm_head.weight": embed}
    source = save(tmp_path / "two", {"model.safetensors": both}, tied)
    out = applied(rules("lm_head → keep → head\n* → keep\n"), source, tmp_path / "apart")
    assert out == {"embed_tokens.weight": embed, "head.weight": embed}
    assert json.loads((tmp_path / "apart" / "config.json").read_text()) == tied
    path = rules("embed_tokens → keep → head also\n* → keep\nconfig.tie_word_embeddings = false\n", "untie")
    assert applied(path, tmp_path / "one", tmp_path / "untied")["head.weight"] == embed
    assert json.loads((tmp_path / "untied" / "config.json").read_text()) == {"tie_word_embeddings": False}


def test_a_rename_reaches_the_groups_of_a_config(tmp_path, rules):
    """B004: a draft layer under its new name, in the group that it was in."""
    group = lambda targets, bits: {"targets": targets, "weights": {"num_bits": bits, "type": "float"}}  # noqa: E731
    section = {"quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": [], "config_groups": {
        "a": {**group(["re:.*experts.*"], 4), "format": "nvfp4-pack-quantized"},
        "b": {**group(["mtp.0.attn.wq_a"], 8), "format": "float-quantized",
              "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}}}}  # fmt: skip
    codes, scale = full("U8", 0x22, 4, 16), full("F8_E4M3", 0x38, 4, 2)
    tensors = {"m.experts.0.weight_packed": codes, "m.experts.0.weight_scale": scale}
    tensors |= {"m.experts.0.weight_global_scale": full("F32", b"\0\0\0\x40", 1)}
    draft = {"weight": full("F8_E4M3", 0x38, 4, 16), "weight_scale": full("F32", b"\0\0\x80\x3f", 1, 1)}
    tensors |= {f"mtp.0.attn.wq_a.{k}": v for k, v in draft.items()}
    source = save(tmp_path / "source", {"model.safetensors": tensors}, {"quantization_config": section})
    out = applied(rules("mtp.{K}.* → keep → model.layers.{K+2}.*\n* → keep\n"), source, tmp_path / "out")
    assert out["model.layers.2.attn.wq_a.weight"] == tensors["mtp.0.attn.wq_a.weight"]
    text = (tmp_path / "out" / "config.json").read_text()
    groups = {g["weights"]["num_bits"]: g["targets"] for g in json.loads(text)["quantization_config"]["config_groups"].values()}
    assert "mtp" not in text
    for name, bits in (("model.layers.2.attn.wq_a", 8), ("m.experts.0", 4)):
        fits = {b: any(re.match(t.removeprefix("re:"), name) for t in targets) for b, targets in groups.items()}
        assert fits == {b: b == bits for b in (4, 8)}


# --------------------------------------------------------------------------------------------------- the end of a run


def test_a_wrong_scale_is_named_before_a_byte_is_written(tmp_path):
    """B038, B128: 0x7F in one block scale of many; headers are in order, so only reading shows it."""
    good, bad = nvfp4("l.0.q_proj"), nvfp4("l.1.q_proj")
    dtype, shape, data = bad["l.1.q_proj.weight_scale"]
    bad["l.1.q_proj.weight_scale"] = dtype, shape, data[:5] + b"\x7f" + data[6:]
    source, out = save(tmp_path / "source", {"model.safetensors": good | bad}, MODELOPT), tmp_path / "out"
    assert command("check", "nvfp4_to_bf16", source)[0] == 0
    said = "error[QR601]: `l.1.q_proj.weight_scale`[2, 1] is NaN"
    assert said in refused("check", "nvfp4_to_bf16", source, "--values")
    assert said in refused("apply", "nvfp4_to_bf16", source, out)
    assert not out.exists()
    out.mkdir()
    assert said in refused("apply", "nvfp4_to_bf16", source, out)
    assert content(out) == {}
    code, _, warned = command("apply", "nvfp4_to_bf16", source, out, "--allow-nonfinite")
    assert (code, "warning[QR601]" in warned) == (0, True)
    assert [x == x for x in numbers(stored(out)["l.1.q_proj.weight"])[64:96]] == [True] * 16 + [False] * 16


@pytest.fixture
def source(tmp_path):
    """A checkpoint with a folder, a tokenizer and a template beside its weights."""
    tensors = {k: v for i in range(3) for k, v in nvfp4(f"l.{i}.q_proj").items()} | {"n.weight": bf16(*[1.0] * 8)}
    folder = save(tmp_path / "source", {ONE: tensors, TWO: {"e.weight": bf16(1, 2)}}, MODELOPT)
    (folder / "tokenizer.json").write_text('{"a": 1}')
    (folder / "inference" / "deep").mkdir(parents=True)
    (folder / "inference" / "deep" / "template.jinja").write_text("{{ x }}")
    return folder


def test_two_conversions_are_not_mixed(tmp_path, source, rules):
    """B098: other rules into the same directory are refused, or replace all; what lies beside the weights goes along."""
    out = tmp_path / "out"
    applied("nvfp4_to_bf16", source, out)
    assert (out / "inference" / "deep" / "template.jinja").read_text() == "{{ x }}"
    assert (out / "tokenizer.json").read_text() == '{"a": 1}'
    before = content(out)
    keep = rules("l.{L}.* → drop\n* → keep\n")
    said = refused("apply", keep, source, out)
    assert said.startswith("error[QR343]") and "--overwrite" in said
    assert content(out) == before
    assert sorted(applied(keep, source, out, "--overwrite", "--shard-size", 1)) == ["e.weight", "n.weight"]
    fresh = tmp_path / "fresh"
    applied(keep, source, fresh, "--shard-size", 1)
    assert content(out) == content(fresh)


def test_the_same_input_gives_the_same_bytes(tmp_path, source):
    """Also from a copy in another order of files, with other threads and another budget."""
    applied("nvfp4_to_bf16", source, tmp_path / "a")
    applied("nvfp4_to_bf16", source, tmp_path / "b", "--jobs", 3, "--memory", "1MiB")
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in reversed(sorted(source.iterdir())):
        (shutil.copytree if path.is_dir() else shutil.copy)(path, copy / path.name)
    applied("nvfp4_to_bf16", copy, tmp_path / "c")
    assert content(tmp_path / "a") == content(tmp_path / "b") == content(tmp_path / "c")


SIZES = [("nvfp4_to_bf16", ""), ("nvfp4_modelopt_to_compressed_tensors", "")]
SIZES += [("", "*_proj → drop\n* → keep\n"), ("", "l.{L}.* → unpack | stack(L) → l.*\n* → keep\n")]


@pytest.mark.parametrize("name, text", SIZES)
@pytest.mark.parametrize("shard_size", [1, 300, 5 * 10**9])
def test_what_is_written_is_as_large_as_the_plan_says(tmp_path, source, rules, name, text, shard_size):
    name = name or rules(text)
    totals = json.loads(command("plan", name, source, "--json")[1])["totals"]
    out = tmp_path / "out"
    tensors = applied(name, source, out, "--shard-size", shard_size)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert (len(tensors), sum(len(d) for _, _, d in tensors.values())) == (totals["tensors_out"], totals["bytes_out"])
    assert index["metadata"]["total_size"] == totals["bytes_out"]
    for path in out.glob("*.safetensors"):  # and a file is what its header says
        header, begin = header_of(path)
        assert path.stat().st_size == begin + max(e["data_offsets"][1] for k, e in header.items() if k != "__metadata__")


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
@pytest.mark.parametrize("where", ["source", "source/out", ".", "link", "source/../source"])
def test_nothing_is_written_onto_the_source(tmp_path, source, where, overwrite):
    (tmp_path / "link").symlink_to(source)
    before = content(tmp_path)
    said = refused("apply", "nvfp4_to_bf16", source, tmp_path / where, *overwrite)
    assert said.startswith("error[QR34") and "source" in said
    assert content(tmp_path) == before


def test_nothing_of_others_is_touched(tmp_path, source):
    """Without --overwrite a directory that holds something is left as it is; with it, what is no checkpoint stays."""
    out = save(tmp_path / "out", {"other.safetensors": {"x": bf16(1)}})
    (out / "thesis.txt").write_text("mine")
    before = content(out)
    assert refused("apply", "nvfp4_to_bf16", source, out).startswith("error[QR343]")
    assert content(out) == before
    applied("nvfp4_to_bf16", source, out, "--overwrite")
    assert (out / "thesis.txt").read_text() == "mine" and not (out / "other.safetensors").exists()


def test_a_run_that_is_refused_leaves_what_was_there(tmp_path, source, rules):
    """With --overwrite too: an old output goes only when the new one may begin."""
    out = tmp_path / "out"
    applied("nvfp4_to_bf16", source, out)
    before = content(out)
    path = source / ONE
    raw = bytearray(path.read_bytes())
    header, begin = header_of(path)
    at = begin + header["l.0.q_proj.weight_scale_2"]["data_offsets"][0]
    raw[at : at + 4] = b"\0\0\xc0\x7f"  # NaN
    path.write_bytes(raw)
    assert "`l.0.q_proj.weight_scale_2` is NaN" in refused("apply", "nvfp4_to_bf16", source, out, "--overwrite")
    assert "no rule takes" in refused("apply", rules("n → keep\n"), source, out, "--overwrite")
    assert content(out) == before


def test_a_run_that_is_killed_leaves_no_checkpoint_and_the_next_one_goes_through(tmp_path):
    """B097: killed while a shard is half written: no index, no config, no file with a shard's name that is not whole."""
    folder, size = tmp_path / "large", 96 << 20
    folder.mkdir()
    header = json.dumps({"a.q_proj.weight": {"dtype": "BF16", "shape": [size >> 12, 2048], "data_offsets": [0, size]}}).encode()
    with open(folder / "model.safetensors", "wb") as large:  # zeros that take no room
        large.write(len(header).to_bytes(8, "little") + header)
        large.truncate(8 + len(header) + size)
    (folder / "config.json").write_text("{}")
    out = tmp_path / "out"
    line = [sys.executable, "-m", "quantrules", "apply", "bf16_to_nvfp4", str(folder), str(out), "--jobs", "1"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
    with subprocess.Popen(line, cwd=ROOT, **quiet) as run:
        while not list(out.glob(".*.partial")) and run.poll() is None:
            time.sleep(0.005)
        run.send_signal(signal.SIGKILL)
        assert run.wait() == -signal.SIGKILL, "it was done before it could be killed"
    assert {p.name for p in out.iterdir()} == {".model-00001-of-00001.safetensors.partial", ".quantrules.lock"}
    assert refused("inspect", out).startswith("error[QR320]")
    names = [f"a.q_proj.{s}" for s in ("weight", "weight_scale", "weight_scale_2")]
    assert sorted(applied("bf16_to_nvfp4", folder, out)) == names
    assert not list(out.glob(".*"))


# -------------------------------------------------------------------------------------------------------- rule files


def test_an_unknown_param_and_a_key_that_the_config_lacks_are_errors(source, rules):
    assert "-D attention is given, and no param has that name" in refused("check", "nvfp4_to_bf16", source, "-D", "attention=fp8")
    for text in ("let n = config.nope\n* → keep\n", "l.{L:0..config.nope}.* → keep\n* → keep\n", "* → keep expect config.nope\n",
                 "* → keep when config.nope == 1\n* → keep\n", "* → keep\nconfig.x = config.nope\n"):  # fmt: skip
        said = refused("check", rules(text), source)
        assert "error[QR021]: the source's config has no config.nope" in said and "default(config.nope, …)" in said


@pytest.mark.parametrize("text", ["", "\n\n", "# nothing\n", "let n = 1\n"])
def test_a_rule_file_without_rules_takes_no_key(tmp_path, source, rules, text):
    said = refused("apply", rules(text), source, tmp_path / "out")
    assert "no rule takes n" in said and "no rule takes e" in said and "`* → keep`" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind, said", [
    ("directory", "is a directory"), ("binary", "is not UTF-8"), ("fifo", "not a regular file"), ("nul", "NUL"),
    ("large", "bytes"), ("device", "not a regular file"), ("missing", "there is no rule file"),
    ("dangling", "there is no rule file"),
])  # fmt: skip
def test_what_is_no_rule_file_is_refused(tmp_path, source, kind, said):
    path = tmp_path / "x.rules"
    if kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind in ("device", "dangling"):
        path.symlink_to("/dev/zero" if kind == "device" else "nowhere")
    elif kind != "missing":
        path.write_bytes({"binary": b"\xff\xfe\0\1", "nul": b"\0 -> keep\n", "large": b"#" * (9 << 20)}[kind])
    found = refused("apply", path, source, tmp_path / "out")
    assert said in found and "did you mean `x.rules`" not in found
    assert not (tmp_path / "out").exists()


def test_a_plan_is_the_same_twice(source):
    """Plans compare: the same rules on the same headers are equal, other rules are not."""
    a, b = load("nvfp4_to_bf16").bind(source), load("nvfp4_to_bf16").bind(source)
    assert a == b and view.to_json(a) == view.to_json(b)
    assert a != parse("* → keep\n").bind(source)
