"""What `headwater serve --engine vllm` adds to vLLM's options, before vLLM is imported."""

import pytest

from conftest import build
from headwater import HeadwaterError
from headwater_lab.serving.vllm import _count_processes, serve_with_vllm


@pytest.mark.parametrize("options", [["--config", "vllm.yaml"], ["--config=vllm.yaml"]], ids=str)
def test_a_file_of_options_is_refused(tmp_path, options):
    """The options that headwater adds would override the file's without a word."""
    build({}).save_pretrained(tmp_path)
    with pytest.raises(HeadwaterError, match="pass vLLM's as options, not --config"):
        serve_with_vllm("name", tmp_path, options)


def test_memory_is_divided_among_all_processes():
    assert _count_processes([]) == _count_processes(["--tensor-parallel-size", "many"]) == 1
    assert _count_processes(["-tp", "2", "--data-parallel-size", "4"]) == 8
    assert _count_processes(["-dp=3"]) == 3
