"""Converts quantised LLM checkpoints by rules: a language, a plan that is checked before a byte is read, and a runner.

The public API, and nothing else. Every name is imported when it is first asked for, so `import quantrules` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from quantrules.api import Rules, apply, load, parse, stream
    from quantrules.checkpoint import open_source
    from quantrules.diagnostics import CheckpointError, Diagnostic, PlanError, QuantrulesError, RuleError, RunError
    from quantrules.plan.model import Plan

_HOMES = {
    **dict.fromkeys(("Rules", "apply", "load", "parse", "stream"), "quantrules.api"),
    "open_source": "quantrules.checkpoint",
    "Plan": "quantrules.plan.model",
    **dict.fromkeys(
        ("CheckpointError", "Diagnostic", "PlanError", "QuantrulesError", "RuleError", "RunError"), "quantrules.diagnostics"
    ),
}

__all__ = [
    "CheckpointError", "Diagnostic", "Plan", "PlanError", "QuantrulesError", "RuleError", "Rules", "RunError",
    "__version__", "apply", "load", "open_source", "parse", "stream",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
