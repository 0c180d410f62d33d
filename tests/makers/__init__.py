"""Makers of test input. None of them imports quantrules: what they write is evidence from outside."""
