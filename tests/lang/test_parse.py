"""What texts mean as trees: the examples of the language page, layout, comments, names, braces."""

from __future__ import annotations

from pathlib import Path

import pytest

from quantrules.diagnostics import RuleError
from quantrules.lang import ast, parse, walk

EXAMPLES = sorted((Path(__file__).parent / "examples").glob("*.rules"))


def one(text: str) -> ast.Statement:
    (statement,) = parse(text).statements
    return statement


def pattern(text: str) -> tuple:
    return one(f"{text} → keep").sources[0].pattern.nodes


def expression(text: str):
    return one(f"let x = {text}").value


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.stem)
def test_the_examples_of_the_language_page_parse(path):
    assert parse(path.read_text(), path.name).statements


def test_the_card_says_what_it_says():
    fuse, cat, rest = parse((Path(__file__).parent / "examples/card.rules").read_text()).statements
    assert fuse == ast.Fuse("fused_wkv_wgate", (ast.Member("kv_proj"), ast.Member("gate_proj")))
    assert cat.sources == (ast.SourcePattern(ast.Pattern((ast.Star(), ast.Lit(".compressor.indexer.kv_proj")))),)
    assert [c.name for c in cat.pipeline.steps] == ["unpack", "dequant", "cat"] and cat.targets == ()
    assert cat.comment == "takes gate_proj too, makes *.compressor.indexer.fused_wkv_wgate"
    assert rest == ast.Rule((ast.SourcePattern(ast.Pattern((ast.Star(),))),), ast.Pipeline((ast.Call("keep"),)))


def test_the_flagship_says_what_it_says():
    file = parse((Path(__file__).parent / "examples/flagship.rules").read_text())
    kinds = [type(s).__name__ for s in file.statements]
    assert kinds == ["Param"] * 2 + ["Let"] * 4 + ["Def"] * 5 + ["Under"] * 4 + ["Rule"] * 3 + ["ConfigEdit"]
    attention, shared = file.statements[:2]
    assert attention.choices == (ast.Literal("bf16"), ast.Literal("fp8"))
    assert shared.choices[0] == ast.Name("attention")
    indexer = file.statements[11]
    assert (indexer.section, len(indexer.body)) == ("compressors", 4)
    assert indexer.target.nodes == (ast.Lit("layers."), ast.Capture("L"), ast.Lit(".attn.indexer"))
    first = indexer.body[0]
    assert first.sources[0].pattern.nodes == (ast.Members("", (ast.Member("kv_proj"), ast.Member("gate_proj"))),)
    width = ast.Binary("*", ast.Literal(4), ast.Config(("index_head_dim",)))
    assert first.type == ast.TypeExpr("bf16", (width, ast.Config(("hidden_size",))))
    assert first.expect == (ast.Name("csa"),)
    assert indexer.body[2].sources[0].pattern.nodes == (
        ast.Alternation(
            "x", (ast.Alternative("scorer.weights_proj", "weights_proj"), ast.Alternative("weights_proj", "weights_proj"))
        ),
    )
    assert file.statements[-1] == ast.ConfigEdit(("quantization_config",), "=",
                                                 ast.Apply("derive", (ast.Name("deepseek_v4"),)),
                                        section="experts and the rest")  # fmt: skip


def test_the_hard_cases_say_what_they_say():
    statements = parse((Path(__file__).parent / "examples/hard.rules").read_text()).statements
    rotary = next(s for s in statements if isinstance(s, ast.Rule) and any(c.name == "at" for c in s.pipeline.steps))
    at = next(c for c in rotary.pipeline.steps if c.name == "at")
    assert [a.value for a in at.args[:2]] == [ast.Name("q_proj"), ast.Name("k_proj")]
    assert at.args[2].name == "ops" and at.args[2].value.steps[0].name == "rope"
    draft = next(s for s in statements if isinstance(s, ast.Rule) and s.targets and s.targets[0].nodes[0] == ast.Lit("mtp."))
    assert draft.sources[0].pattern.nodes[1] == ast.Capture("L", ast.Config(("num_hidden_layers",)))
    assert draft.targets[0].nodes[1] == ast.IntForm(ast.Binary("-", ast.Name("L"), ast.Config(("num_hidden_layers",))))
    ranks = next(s for s in statements if isinstance(s, ast.Rule) and s.sources[0].pattern.file)
    assert ranks.sources[0].pattern.file.nodes == (ast.Lit("consolidated."), ast.Capture("R"), ast.Lit(".safetensors"))


def test_formats_and_dialects():
    dense, nvfp4, fp8_block, modelopt = parse((Path(__file__).parent / "examples/formats.rules").read_text()).statements
    assert [(s.name, s.parts[0].suffix, s.parts[0].words) for s in dense.spellings] == [
        ("bare", "", (("dense", ""),)), ("weight", ".weight", (("dense", ".weight"),))]  # fmt: skip
    assert dense.spellings[0].parts[0].dtypes == () and dense.spellings[0].parts[0].grid == (ast.Rest(),)
    assert (nvfp4.element, nvfp4.block) == (("e2m1", 2, "u8", "low"), (1, 16))
    assert nvfp4.value == ast.Binary("*", ast.Name("codes"), ast.Binary("*", ast.Name("scale"), ast.Name("global")))
    codes, scale, whole, act = nvfp4.spellings[0].parts
    assert codes.dtypes == ("u8", "i8", "f4")
    assert codes.grid == (ast.Name("N"), ast.Binary("/", ast.Name("K"), ast.Literal(2)))
    assert scale.words == (("cat", "follow"), ("stack", "follow")) and whole.grid == ()
    assert act.words == (("optional", ""), ("cat", "max"), ("stack", "collect"))
    assert nvfp4.spellings[0].declared == ast.Binary("==", ast.Name("quant_algo"), ast.Literal("NVFP4"))
    assert fp8_block.element == ("f8_e4m3", 1, "f8_e4m3", "low")
    assert modelopt.entries[0][:2] == ("nvfp4", "modelopt")
    assert modelopt.entries[0][2].items[-1] == ("ignore", ast.Name("dense_modules"))
    assert modelopt.files[0][:2] == ("hf_quant_config.json", "nvfp4")


# ------------------------------------------------------------------------------------------------------------- layout


def test_indented_lines_and_open_brackets_continue_a_statement():
    text = "*.a\n  → keep\n      → *.b\nlet x = [1,\n2,\n3]\n"
    assert parse(text) == parse("*.a → keep → *.b\nlet x = [1, 2, 3]")


def test_blank_and_comment_lines_end_nothing():
    assert one("*.a\n\n# why\n\n  → keep") == one("# why\n*.a → keep")


def test_comments_go_to_the_statement_below_and_sections_to_all_that_follow():
    file = parse("# a\n#  b\n\n## one\n# c\n*.x → keep   # d\n*.y\n    # e\n    → keep   # f\n## two\n*.z → keep\n# g\n")
    x, y, z = file.statements
    assert (x.comments, x.comment, x.section, x.blank) == (("a", " b", "c"), "d", "one", True)
    assert (y.comments, y.comment, y.section, y.blank) == (("e",), "f", "one", False)
    assert (z.section, file.comments) == ("two", ("g",))


def test_a_hash_begins_a_comment_only_outside_quotes():
    rule = one('"a #b" → keep   # "not a quote')
    assert rule.sources[0].pattern.nodes == (ast.Lit("a #b"),) and rule.comment == '"not a quote'


def test_under_blocks_nest_and_end_by_their_column():
    text = "under a → b\n    under c\n        x → keep\n          → y\n        z → keep\n    w → keep\nv → drop"
    outer, last = parse(text).statements
    inner, w = outer.body
    assert [len(inner.body), inner.body[0].targets[0].nodes] == [2, (ast.Lit("y"),)]
    assert w.sources[0].pattern.nodes == (ast.Lit("w"),) and last.pipeline.steps[0].name == "drop"


def test_the_head_of_an_under_may_go_on_after_an_arrow():
    assert one("under a\n    → b\n    x → keep") == one("under a → b\n    x → keep")


def test_byte_order_mark_and_windows_lines_are_read():
    plain = parse("# c\na.* → keep\n  → b.*  # d\n")
    assert parse("\ufeff# c\r\na.* -> keep\r\n  -> b.*  # d\r\n") == plain


def test_spans_are_places_in_the_whole_text():
    text = "# first\nunder a.b\n    x.{L} → cat(1) → y : bf16[2*N]\n"
    for node in walk(parse(text).statements):
        assert node.span.text.content == text
        if isinstance(node, ast.Lit | ast.Call | ast.Capture | ast.Name):
            expected = {ast.Lit: "text", ast.Call: "name", ast.Capture: "name", ast.Name: "name"}[type(node)]
            assert getattr(node, expected) in node.span.source
    call = next(n for n in walk(parse(text).statements) if isinstance(n, ast.Call))
    assert (str(call.span), call.span.source) == ("<text>:3:13", "cat(1)")


def test_a_word_is_a_keyword_only_before_a_space_and_no_mark():
    for word in ("tie", "source", "under", "format", "let"):
        for rest in (" → keep", ", b → keep", " @ f → keep", ".x → keep"):
            assert isinstance(one(word + rest), ast.Rule)
        assert isinstance(one(f"{word} : bf16"), ast.SchemaKey)


# -------------------------------------------------------------------------------------------------- names and patterns


def test_each_character_of_a_name_stands_for_itself():
    name = "a-b/c+d?e;f'g<h>i!j%k&l~m^n$o.ü.0"
    assert pattern(name) == (ast.Lit(name),)


def test_quotes_and_backslashes_take_the_meaning_from_a_character():
    assert pattern('"a:b c".weight') == (ast.Lit("a:b c.weight"),)
    assert pattern(r'a\*b\{c\\d"*{}"') == (ast.Lit("a*b{c\\d*{}"),)
    assert pattern(r"a\ b.{x\,y,z}")[0] == ast.Lit("a b.")


def test_arrows_end_a_name():
    assert one("a->keep->b") == one("a → keep → b")
    assert one("a-→keep") == one("a- → keep")


def test_a_prefix_names_the_source():
    rule = one("fp8:a.b, c → cat → d")
    assert [s.pattern.source for s in rule.sources] == ["fp8", ""]
    assert one("a : bf16[2] → keep") == one("a: bf16[2] → keep")


@pytest.mark.parametrize("text, node", [
    ("*", ast.Star()),
    ("{**n}", ast.Star("n")),
    ("{L}", ast.Capture("L")),
    ("{L:3..}", ast.Capture("L", ast.Literal(3))),
    ("{L:..3}", ast.Capture("L", None, ast.Literal(3))),
    ("{L:0..config.n}", ast.Capture("L", ast.Literal(0), ast.Config(("n",)))),
    ("{L:n/2..max(a, b)}", ast.Capture("L", ast.Binary("/", ast.Name("n"), ast.Literal(2)),
     ast.Apply("max", (ast.Name("a"), ast.Name("b"))))),
    ("{2*L+1}", ast.IntForm(ast.Binary("+", ast.Binary("*", ast.Literal(2), ast.Name("L")), ast.Literal(1)))),
    ("{config.n}", ast.IntForm(ast.Config(("n",)))),
    ("{x:leaf}", ast.Reference("x", "leaf")),
    ("{a,b}", ast.Members("", (ast.Member("a"), ast.Member("b")))),
    ("{ a , b }", ast.Members("", (ast.Member("a"), ast.Member("b")))),
    ("{b?}", ast.Members("", (ast.Member("b", True),))),
    ("{p:a,b?=zeros}", ast.Members("p", (ast.Member("a"), ast.Member("b", True, "zeros")))),
    ("{a-1,b.c}", ast.Members("", (ast.Member("a-1"), ast.Member("b.c")))),
    ('{"a,b",c}', ast.Members("", (ast.Member("a,b"), ast.Member("c")))),
    ("{a|b}", ast.Alternation("", (ast.Alternative("a", "a"), ast.Alternative("b", "b")))),
    ("{x:a=b}", ast.Alternation("x", (ast.Alternative("a", "b"),))),
    ('{x:a=b|c|"d|"=""}', ast.Alternation("x", (ast.Alternative("a", "b"), ast.Alternative("c", "c"),
     ast.Alternative("d|", "")))),
])  # fmt: skip
def test_braces_say_what_they_are(text, node):
    assert pattern(f"m.{text}.w") == (ast.Lit("m."), node, ast.Lit(".w"))


def test_a_let_may_hold_a_part_of_patterns():
    assert one("let leaf = {wq_a=q_a_proj|wq_b=q_b_proj}").value == ast.Alternation(
        "", (ast.Alternative("wq_a", "q_a_proj"), ast.Alternative("wq_b", "q_b_proj")))  # fmt: skip


# -------------------------------------------------------------------------------------------- clauses and expressions


def test_clauses_come_in_any_order():
    text = "*.a → keep → *.b : bf16[N] also expect 0 | 30 when L > 3 except *.c, *.d"
    rule = one(text)
    assert rule == one("*.a → keep → *.b : bf16[N] when L > 3 except *.c, *.d expect 0 | 30 also")
    assert (rule.expect, rule.also, len(rule.excepts)) == ((ast.Literal(0), ast.Literal(30)), True, 2)


@pytest.mark.parametrize("text, same", [
    ("1 + 2 * 3", "1 + (2 * 3)"),
    ("1 - 2 - 3", "(1 - 2) - 3"),
    ("-a[0]", "-(a[0])"),
    ("not a == b and c or d", "((not (a == b)) and c) or d"),
    ("a not in [1] or b in c", "(a not in [1]) or (b in c)"),
])  # fmt: skip
def test_operators_bind_as_in_python(text, same):
    assert expression(text) == expression(same)


def test_a_minus_before_a_number_is_part_of_it():
    assert expression("[-1, -0.5, - 2]") == ast.ListOf((ast.Literal(-1), ast.Literal(-0.5), ast.Literal(-2)))


def test_json_is_an_expression():
    edit = one('config.a."b-c" += {"x": [1, 2.5e3, null, true], "y": "\\u00e4"}')
    value = ast.ListOf((ast.Literal(1), ast.Literal(2500.0), ast.Literal(None), ast.Literal(True)))
    assert edit == ast.ConfigEdit(("a", "b-c"), "+=", ast.DictOf((("x", value), ("y", ast.Literal("ä")))))
    assert one("delete config.a.b") == ast.ConfigEdit(("a", "b"), "delete")


def test_equal_literals_of_different_kinds_are_different_trees():
    assert expression("1") != expression("true")


def test_a_schema_key_has_a_type_and_no_arrow():
    key = one("m.{L:0..config.n}.w : nvfp4[...; 2] when config.q")
    assert isinstance(key, ast.SchemaKey) and key.type == ast.TypeExpr("nvfp4", (ast.Rest(),), ast.Literal(2))


# ---------------------------------------------------------------------------------------------------------- all at once


def test_every_mistake_of_a_file_comes_in_one_run():
    text = 'a → b.*\nlet x 3\nok → keep\n{a,b|c} → keep\nunder p\n    q → keep # fine\n    r =\n"s → keep\nt → cat(0\nu → keep'
    with pytest.raises(RuleError) as error:
        parse(text)
    assert [d.span.text.position(d.span.start)[0] for d in error.value.diagnostics] == [1, 2, 4, 7, 8, 9]
