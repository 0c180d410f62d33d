"""Files, includes and the search path."""

from __future__ import annotations

import os

import pytest

from quantrules.diagnostics import RuleError
from quantrules.lang import load, print_file


@pytest.fixture
def files(tmp_path):
    def write(**texts: str):
        for name, text in texts.items():
            path = tmp_path / (name.replace("__", "/") + ".rules")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return write


def refused(*args, **kwargs):
    with pytest.raises(RuleError) as error:
        load(*args, **kwargs)
    return error.value.diagnostics


def test_a_path_a_name_and_a_text_are_loaded(files):
    folder = files(a="x → keep")
    expected = load("x → keep")
    assert (
        load(folder / "a.rules") == load(str(folder / "a.rules")) == load("a", [folder]) == load("a.rules", [folder]) == expected
    )


def test_includes_are_read_where_they_stand(files):
    folder = files(
        a='include "sub/b.rules"\nunder p\n    include "c.rules"\n', sub__b='include "../c.rules"\ny → keep', c="z → drop"
    )
    outer, under = load(folder / "a.rules").statements
    inner, y = outer.body
    (z,) = inner.body
    assert (y.sources[0].pattern.nodes[0].text, z.pipeline.steps[0].name) == ("y", "drop")
    assert under.body[0].body == (z,)
    assert z.span.text.name.endswith("c.rules")
    assert print_file(load(folder / "a.rules")) == 'include "sub/b.rules"\nunder p\n    include "c.rules"\n'


def test_an_include_is_also_looked_up_in_the_search_path(files, tmp_path):
    folder = files(shipped__base="x → keep", mine__a='include "base.rules"')
    assert load(folder / "mine/a.rules", [folder / "shipped"]).statements[0].body
    assert load('include "base.rules"\n', [folder / "shipped"]).statements[0].body


def test_mistakes_of_all_files_come_together(files):
    folder = files(a='x → y.z\ninclude "b.rules"\ninclude "d.rules"', b='y\ninclude "c.rules"', c="let", d="z →")
    assert {d.span.text.name.rsplit("/", 1)[-1] for d in refused(folder / "a.rules")} == {"a.rules"}
    folder = files(a='include "b.rules"\ninclude "d.rules"')
    assert {d.span.text.name.rsplit("/", 1)[-1] for d in refused(folder / "a.rules")} == {"b.rules", "d.rules"}


def test_cycles_are_named(files):
    folder = files(a='include "b.rules"', b='include "a.rules"', c='include "c.rules"')
    (found,) = refused(folder / "a.rules")
    assert "a.rules → b.rules → a.rules" in found.message and found.span.source == 'include "a.rules"'
    assert "c.rules → c.rules" in refused(folder / "c.rules")[0].message


def test_files_that_include_each_other_twice_do_not_grow_without_bound(files):
    names = [f"f{i}" for i in range(15)]
    texts = {n: f'include "{m}.rules"\n' * 2 for n, m in zip(names, [*names[1:], "end"])}
    folder = files(**texts, end="x → keep")
    assert "includes" in refused(folder / "f0.rules")[0].message


@pytest.mark.parametrize("path", ["../outside.rules", "/etc/passwd", "sub/../../outside.rules", "link.rules"])
def test_an_include_cannot_leave_the_search_path(files, path):
    folder = files(outside="x → keep", in__a=f'include "{path}"', in__sub__b="")
    os.symlink(folder / "outside.rules", folder / "in/link.rules")
    (found,) = refused(folder / "in/a.rules")
    assert found.code == "QR017" and found.span.source == f'include "{path}"'


def test_a_missing_file_suggests_the_nearest_name(files):
    folder = files(a='include "formts.rules"', formats="x → keep")
    assert "`formats.rules`" in refused(folder / "a.rules")[0].help
    assert "`formats`" in refused("fromats", [folder])[0].help
    assert "`formats.rules`" in refused(folder / "formatz.rules")[0].help


def test_only_regular_files_of_bounded_size_in_utf8_are_read(files):
    folder = files(a='include "pipe.rules"', b='include "big.rules"', c='include "latin.rules"', d='include "dir.rules"')
    os.mkfifo(folder / "pipe.rules")
    (folder / "big.rules").write_bytes(b"#" * (5 << 20))
    (folder / "latin.rules").write_bytes("ä: keep".encode("latin-1"))
    (folder / "dir.rules").mkdir()
    for name, said in (("a", "not a regular file"), ("b", "more than"), ("c", "byte 0 is not UTF-8"), ("d", "irectory")):
        (found,) = refused(folder / f"{name}.rules")
        assert found.code == "QR016" and said in found.message


@pytest.mark.parametrize("name", ["", ".", "a\0b", "x" * 5000, "../../..", "no such"])
def test_odd_names_are_refused(name, tmp_path):
    assert refused(name, [tmp_path])[0].code == "QR016"
    assert all(d.code in ("QR016", "QR017") for d in refused(f'include "{name}"\n'.replace("\0", "\\u0000"), [tmp_path]))
