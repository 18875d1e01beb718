"""Programs that `torch.export` and ONNX make of a model with a mask or packed rows, of any batch and length."""

import warnings

import pytest
import torch
from torch import Tensor, nn

from conftest import document_positions, shared, tokens
from headwater.nn.lookback import last_marked
from headwater.plugins.mechanisms import MECHANISMS

SHAPES = {0: torch.export.Dim("batch", min=1, max=8), 1: torch.export.Dim("length", min=2, max=64)}
# Batch and length when exported, and when used.
TRACED, USED = (2, 12), ((1, 7), (3, 20))
# With persistent memory a program takes any batch, but one length: torch.export cannot compare the strides of grouped
# heads' keys once they are joined.
ONE_LENGTH = ("persistent_memory",)


class Logits(nn.Module):
    """The logits of a model given ids and a second input by its name."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, input_ids: Tensor, second: Tensor) -> Tensor:
        return self.model(input_ids, use_cache=False, **{self.name: second}).logits


def inputs(name: str, rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Ids, and a mask with left padding in the last row, or the positions of two documents."""
    if name == "position_ids":
        return tokens(rows, length), document_positions([[length // 2, length - length // 2]] * rows)
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[-1, : length // 3] = 0
    return tokens(rows, length), mask


def exported(model: nn.Module) -> torch.export.ExportedProgram:
    given = inputs(model.name, *TRACED)
    shapes = {0: SHAPES[0]} if has_one_length(model) else SHAPES
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        return torch.export.export(model, given, dynamic_shapes=(shapes, shapes), strict=False)


def has_one_length(model: nn.Module) -> bool:
    return any(name in ONE_LENGTH for name in model.model.config.mechanisms)


def assert_same(model: nn.Module, program, tolerance: float) -> None:
    for rows, length in USED:
        given = inputs(model.name, rows, TRACED[1] if has_one_length(model) else length)
        real = given[1].bool() if model.name == "attention_mask" else torch.ones_like(given[0], dtype=torch.bool)
        with torch.no_grad():
            assert (program(*given) - model(*given))[real].abs().max() < tolerance


second = pytest.mark.parametrize("name", ["attention_mask", "position_ids"])


@pytest.mark.sampled(14)
@second
@pytest.mark.parametrize("mechanism", [None, *MECHANISMS.built_in])
def test_programs_take_any_batch_and_length(mechanism, name):
    if (mechanism, name) == ("kv_shift", "attention_mask") and torch.__version__.startswith("2.11."):
        pytest.skip("PyTorch 2.11 ties the length to the strides of keys")
    model = Logits(shared({mechanism: {}} if mechanism else {}), name)
    program = exported(model)
    assert "cummax" not in program.graph_module.code  # which ONNX lacks
    assert_same(model, program.module(), 1e-9)


@pytest.mark.slow
@pytest.mark.sampled(6)
@second
@pytest.mark.parametrize("mechanism", [None, *MECHANISMS.built_in])
def test_onnx_runs_them(mechanism, name, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = Logits(shared({mechanism: {}} if mechanism else {}), name).float()
    file = str(tmp_path / "model.onnx")
    given = dict(input_names=["ids", "second"], dynamo=True, verbose=False)
    torch.onnx.export(exported(model), inputs(name, *TRACED), file, **given)
    session = runtime.InferenceSession(file)
    assert_same(
        model,
        lambda ids, given: torch.tensor(session.run(None, {"ids": ids.numpy(), "second": given.numpy()})[0]),
        1e-4,
    )


def test_last_marked_slot():
    marks = torch.rand(5, 40, generator=torch.Generator().manual_seed(0)) < 0.2
    expected = [[max([-1, *row[: i + 1].nonzero().flatten().tolist()]) for i in range(40)] for row in marks]
    assert last_marked(marks).tolist() == expected


class Marked(nn.Module):
    def forward(self, marks: Tensor) -> Tensor:
        return last_marked(marks)


def test_last_marked_slot_in_a_program():
    marks = torch.rand(5, 40, generator=torch.Generator().manual_seed(1)) < 0.2
    program = torch.export.export(Marked(), (marks,), strict=False).module()
    assert torch.equal(program(marks), last_marked(marks))
