"""Formats as data, what configs declare, and which tensors of a checkpoint are a module. No format's name stands in code."""

from quantrules.formats.declared import Claim, Section, check_declared, read_sections
from quantrules.formats.detect import Modules, ModuleTable, find_modules
from quantrules.formats.load import Dialect, load_dialects, load_formats

__all__ = ["Claim", "Dialect", "ModuleTable", "Modules", "Section", "check_declared", "find_modules"]
__all__ += ["load_dialects", "load_formats", "read_sections"]
