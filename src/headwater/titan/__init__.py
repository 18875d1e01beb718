"""Recipes for torchtitan's trainer: `--module headwater.titan --config RECIPE`. docs/titan.md."""
