"""Checkpoints: strict reading of what strangers wrote, and careful writing of what others will load."""

from quantrules.checkpoint.directory import open_source
from quantrules.checkpoint.place import Placing, Targets, place
from quantrules.checkpoint.source import FileSource, Raw, SideFile, Source, StateDictSource
from quantrules.checkpoint.write import Output

__all__ = ["FileSource", "Output", "Placing", "Raw", "SideFile", "Source", "StateDictSource", "Targets", "open_source", "place"]
