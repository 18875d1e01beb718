"""Helpers that do not depend on models: errors, files, seeds and precision."""
