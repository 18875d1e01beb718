"""Models in servers: requests to transformers' server, and what a block of a paged cache holds.

`requests` and `stops` are about what a client asks for, `server` answers it with transformers' server. `pages` and
`paged`, the model's side of attention, are independent of any server; `vllm` is its plugin.
"""
