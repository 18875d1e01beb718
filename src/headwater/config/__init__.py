"""Descriptions of a model: configurations, presets and the plan of layers."""
