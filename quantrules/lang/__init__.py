"""Text → AST → text: what rule files say, before it means anything."""

from quantrules.lang import ast
from quantrules.lang.evaluate import Env, evaluate, free_names, walk
from quantrules.lang.load import load
from quantrules.lang.parser import parse
from quantrules.lang.printer import print_file

__all__ = ["Env", "ast", "evaluate", "free_names", "load", "parse", "print_file", "walk"]
