"""Checkpoints: strict reading of what strangers wrote, and careful writing of what others will load."""

from quantrules.checkpoint.directory import open_source
from quantrules.checkpoint.source import FileSource, Raw, SideFile, Source, StateDictSource

__all__ = ["FileSource", "Raw", "SideFile", "Source", "StateDictSource", "open_source"]
