"""Models in servers with a paged cache: what a block of it holds, and the model's side of attention.

`pages` and `paged` are independent of any server; `vllm` is its plugin.
"""
