"""Recipes: YAML files, overrides, and the shipped recipes."""
