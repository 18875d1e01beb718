"""Reproduce the papers' tables and figures at an affordable scale, and judge each claim by its interval."""
