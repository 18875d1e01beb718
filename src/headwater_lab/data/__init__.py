"""Data: corpora, tokenizers, rows of text, synthetic tasks, images."""
