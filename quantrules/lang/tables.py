"""The LALR parser of grammar.lark. Its tables are kept beside the byte code of this package: building them takes longer
than reading a rule file. lark is imported by the first use.
"""

from __future__ import annotations

import hashlib
import io
import os
import sys
from contextlib import suppress
from functools import cache
from importlib.util import cache_from_source
from pathlib import Path

STARTS = """rule under definition let param fuse rename tie include side edit format element block value spelling declared part
dialect entry further reads capture star range form alternation members""".split()


@cache
def lark_parser():
    """The parser, from tables kept in __pycache__ where that can be written, and built anew where not."""
    import lark

    grammar = Path(__file__).with_name("grammar.lark").read_text(encoding="utf-8")
    key = hashlib.sha256(f"{sys.version}{lark.__version__}{STARTS}{grammar}".encode()).digest()
    kept = Path(cache_from_source(__file__)).with_name(f"grammar.{sys.implementation.cache_tag}.tables")
    try:
        content = kept.read_bytes()
        if content.startswith(key):
            return lark.Lark.load(io.BytesIO(content[len(key) :]))
    except Exception:  # absent or cut short: all the same
        pass
    made = lark.Lark(grammar, parser="lalr", start=STARTS, keep_all_tokens=True, maybe_placeholders=False)
    if not sys.dont_write_bytecode:
        with suppress(OSError):  # an installation that cannot be written to
            tables = io.BytesIO()
            made.save(tables)
            kept.parent.mkdir(parents=True, exist_ok=True)
            part = kept.with_suffix(f".{os.getpid()}")
            part.write_bytes(key + tables.getvalue())
            part.replace(kept)
    return made
