"""Registries of names, and code from outside headwater."""
