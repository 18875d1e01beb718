"""Models in servers.

`requests` and `stops` are about what a client asks for, `server` answers it. `vllm` starts vLLM's server.
"""
