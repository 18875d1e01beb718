"""What `headwater serve --engine vllm` adds to vLLM's options, before vLLM is imported."""

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from conftest import build
from headwater import HeadwaterError
from headwater_lab.serving.vllm import _count_processes, serve_with_vllm


@pytest.mark.parametrize("options", [["--config", "vllm.yaml"], ["--config=vllm.yaml"]], ids=str)
def test_a_file_of_options_is_refused(tmp_path, options):
    """The options that headwater adds would override the file's without a word."""
    build({}).save_pretrained(tmp_path)
    with pytest.raises(HeadwaterError, match="pass vLLM's as options, not --config"):
        serve_with_vllm("name", tmp_path, options)


@pytest.mark.parametrize(
    "option", ["--gpu-memory-utilization", "--gpu_memory_utilization=0.3", "--gpu-memory", "--kv-cache-memory-bytes"]
)
def test_a_cache_size_of_the_user_is_not_overridden(tmp_path, monkeypatch, option):
    build({}).save_pretrained(tmp_path)
    server = SimpleNamespace(main=lambda: None)
    monkeypatch.setitem(sys.modules, "vllm.entrypoints.launchers.api_server.entry", server)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["headwater"])
    monkeypatch.setattr(os, "environ", {})
    serve_with_vllm("name", tmp_path, [option, "0.3"])
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
    serve_with_vllm("name", tmp_path, ["-tp", "2", "--kv-cache-dtype", "auto"])
    assert int(os.environ["VLLM_CPU_KVCACHE_SPACE"]) >= 1


def test_memory_is_divided_among_all_processes():
    assert _count_processes([]) == _count_processes(["--tensor-parallel-size", "many"]) == 1
    assert _count_processes(["-tp", "2", "--data-parallel-size", "4"]) == 8
    assert _count_processes(["-dp=3"]) == 3
    assert _count_processes(["-tp", "2", "-dp", "4", "-dpl", "2"]) == 4  # the others run on other machines
    assert _count_processes(["--data_parallel_size_local=2", "--data-parallel-size=4"]) == 2
