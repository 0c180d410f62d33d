"""The interpreter as a library: load rules, bind them to a source, apply or stream the plan."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from quantrules import lang
from quantrules.checkpoint import Source, open_source
from quantrules.checkpoint.overlay import with_scales
from quantrules.diagnostics import Diagnostic, RuleError, RunError, define
from quantrules.formats import find_modules, load_dialects, load_formats
from quantrules.lang import ast
from quantrules.lang.mistakes import nearest
from quantrules.plan import bind as binding
from quantrules.plan import scales
from quantrules.plan.config import derive
from quantrules.plan.model import Plan
from quantrules.plan.scope import flatten

if TYPE_CHECKING:
    from quantrules.run.local import Result

NO_RULES = define("QR090", "No rule file has this name")


def rules_directory() -> Path:
    """Where the shipped rule files lie: inside the installed package, or beside it in a checkout."""
    inside = Path(__file__).parent / "rules"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "rules"


def shipped_rules() -> dict[str, Path]:
    """Name -> path of every shipped rule file."""
    return {p.stem: p for p in sorted(rules_directory().glob("*.rules")) if p.stem != "formats"}


@cache
def builtin_file() -> ast.File:
    """formats.rules, parsed once a process."""
    return lang.load(rules_directory() / "formats.rules", (rules_directory(),))


def builtin_formats() -> dict[str, Any]:
    """Formats by name, as formats.rules has them."""
    return load_formats(builtin_file())


@frozen(eq=False)
class Rules:
    """A rule file, read and parsed. Use `load` or `parse` to make one."""

    file: ast.File
    name: str
    text: str

    def bind(self, source: Source | str | Path, /, *, only: str | None = None, input_scales: str | Path | None = None, **params: Any) -> Plan:
        """Bind to the headers of a source; no tensor is read.

        Errors of the rules against the source are in `plan.diagnostics` (`plan.raise_for_errors()`); a checkpoint that
        cannot be read raises CheckpointError. `only` is a pattern over target keys; `params` are those of `-D`.
        `input_scales` is a file of activation scales for modules that become quantised (checkpoint.overlay.read_scales).
        """
        source = open_source(source) if isinstance(source, (str, Path)) else source
        formats, dialects = load_formats(builtin_file(), self.file), load_dialects(builtin_file(), self.file)
        table = find_modules(source.table, source.config_files, formats, dialects)
        scope = flatten(self.file, source.config, formats, params)
        binder = binding.make_binder(scope, table)
        if input_scales is not None:
            source = with_scales(source, input_scales)
            scales.attach(binder, source.table, source.split)
        if not scope.failed:
            binding.bind_rules(binder)
        if input_scales is not None:
            binder.diagnostics += scales.check_used(binder)
        found = [*source.warnings, *table.diagnostics, *scope.errors, *binder.diagnostics]
        plan = Plan(source.table, tuple(binder.units), {}, (), scope.params, source.metadata, (self.name,))
        if not any(d.severity == "error" for d in found):
            files, more = derive(plan, source.config_files, scope, dialects)
            plan, found = evolve(plan, config_files=files), [*found, *more]
        plan = evolve(plan, diagnostics=tuple(found), source=source, scope=scope, binder=binder, texts={self.name: self.text})
        return plan if only is None else binding.restrict(plan, only)


def parse(text: str, name: str = "<text>") -> Rules:
    """Rules from text; `include` finds shipped files only. Raises RuleError with every syntax error of the text."""
    return Rules(lang.load(text + "\n", (rules_directory(),), name=name), name, text)


def load(name: str | Path) -> Rules:
    """Rules from a path, or from the name of a shipped rule file."""
    path = Path(name)
    if not os.path.exists(path) or path.is_dir():  # an output may lie there under the rules' name
        shipped = shipped_rules()
        path = shipped.get(str(name).removesuffix(".rules"), path)
        if path.suffix != ".rules":
            raise RuleError(Diagnostic(NO_RULES, f"{name} is neither a file nor a shipped rule file",
                                       help=nearest(str(name), shipped) + "; `quantrules rules` lists what is shipped"))  # fmt: skip
    file = lang.load(path, (path.parent, rules_directory()))
    return Rules(file, path.name, path.read_text(encoding="utf-8"))


def apply(plan: Plan, out: str | Path, **options: Any) -> Result:
    """Run a plan into a new checkpoint directory; options as `run.local.execute` has them (memory, jobs, shard_size, …)."""
    from quantrules.run.local import execute

    plan.raise_for_errors()
    return execute(plan, plan.source, Path(out), **options)


def stream(plan: Plan, device: str = "cpu") -> Iterator[tuple[str, Any]]:
    """(name, torch.Tensor) of every target, in plan order; each tensor owns its data.

    Values are checked before the first one, as `apply` does (RunError).
    """
    from quantrules.run.preflight import preflight
    from quantrules.run.stream import stream as run

    plan.raise_for_errors()
    if errors := [d for d in preflight(plan, plan.source) if d.severity == "error"]:
        raise RunError(errors)
    return run(plan, plan.source, device)
