"""Models in servers.

`requests` and `stops` handle a client's request, and `server` answers it. `vllm` starts vLLM's server.
"""
