"""Whole models: the depth loop, the cache layers, and the Hugging Face models."""
