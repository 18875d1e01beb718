"""Benchmarks. Compared runs are interleaved in one process; a ratio is the median over the turns."""
