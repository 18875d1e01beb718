"""Errors, files, seeds and the terminal: what has nothing to do with models."""
