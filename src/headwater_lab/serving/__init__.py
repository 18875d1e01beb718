"""Models in servers.

`requests` and `stops` are about what a client asks for, `server` answers it with transformers' server. `vllm` is the
plugin of vLLM, on top of `headwater.engines`.
"""
