"""Benchmarks. Compared runs are interleaved in one process; a ratio is the median over the turns."""

from headwater.bench.decoding import AGAIN, LLAMA, VANILLA, Decoding, bench_decode
from headwater.bench.paired import PairedTimes, interleave
from headwater.bench.prefill import Prefill, bench_prefill
from headwater.bench.training import (
    bench_forms,
    bench_mechanism,
    bench_train,
    form_memory,
    step_memory,
)

__all__ = [
    "AGAIN",
    "LLAMA",
    "VANILLA",
    "Decoding",
    "PairedTimes",
    "Prefill",
    "bench_decode",
    "bench_forms",
    "bench_mechanism",
    "bench_prefill",
    "bench_train",
    "form_memory",
    "interleave",
    "step_memory",
]
