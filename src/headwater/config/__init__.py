"""What describes a model: the configurations, the presets and the plan of layers."""
