"""Recipes for torchtitan's trainer: `--module headwater_lab.titan --config RECIPE`. docs/devices.md."""
