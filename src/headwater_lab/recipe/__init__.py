"""Recipes: what a YAML file says, its overrides, and the recipes that are shipped."""
