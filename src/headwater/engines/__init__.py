"""Paged caches, for servers that lay out their own memory: pages, attention over them, models split by heads."""
