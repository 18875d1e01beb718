"""The commands as functions of `headwater_lab`: see docs/reference/python.md.

A recipe is a dict, the path of a file, or the name of a shipped one. Results have `table()`, a list of rows as dicts,
and `to_pandas()`. A function's module imports what the function needs.
"""
