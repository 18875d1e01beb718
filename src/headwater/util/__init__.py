"""Errors, files, seeds, processes and the terminal: what has nothing to do with models."""
