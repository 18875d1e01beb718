"""No step of a training run waits for the device: nothing on the way asks for a number."""

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from headwater import HeadwaterConfig, HeadwaterForCausalLM
from headwater.kernels import varlen
from headwater.nn.attention_kernel import supported_kernels
from headwater.plugins.mechanisms import MECHANISMS
from headwater_lab.recipe.recipe import parse
from headwater_lab.training.loop import TrainingRun, train
from waits import NoWaits, WaitError, no_waits

LEARNING = {"value_residual": {"mode": "learnable"}, "kv_shift": {"window": 3}}


def test_the_mode_refuses():
    with NoWaits(), pytest.raises(WaitError):
        bool(torch.ones(2).all())
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        bool(torch.ones(2).all())


@pytest.mark.sampled(79)
@pytest.mark.parametrize("documents", [None, "position_ids", "document_starts", "cu_seq_lens_q"])
@pytest.mark.parametrize("position", ["rope", "learned", "alibi", "none"])
@pytest.mark.parametrize("name", [None, *sorted(MECHANISMS.built_in)])
def test_no_mechanism_waits(name, position, documents):
    """On fake tensors, which have no numbers to wait for, as on a GPU."""
    mechanisms = {} if name is None else {name: LEARNING.get(name, {})}
    config = HeadwaterConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        position=position,
        mechanisms=mechanisms,
    )
    with FakeTensorMode():
        model = HeadwaterForCausalLM(config).train()
        ids = torch.zeros(2, 16, dtype=torch.long)
        options = {} if documents is None else {documents: ids.bool() if documents == "document_starts" else ids}
        if documents == "cu_seq_lens_q":
            if supported_kernels(config)[0] is not None:
                pytest.skip("it needs a mask")
            model.set_attn_implementation("varlen")
            options = {"position_ids": ids, documents: torch.zeros(67, dtype=torch.int32)}
        count = torch.zeros((), dtype=torch.long)
        out = model(ids, labels=ids, shift_labels=ids, num_items_in_batch=count, skip_logits=True, **options)
        out.loss.backward()


on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_a_gpu)])
@pytest.mark.parametrize(("gradient_accumulation_steps", "packed"), [(1, False), (2, False), (1, True)])
def test_a_step_of_a_run_does_not_wait(gradient_accumulation_steps, packed, device, tmp_path, monkeypatch):
    """Not in a step that is logged either: it is recorded after the next.

    Data, forward and backward passes, clipping, the optimizer; the outcome of the step before is on the host.

    packed: rows of several documents, with attention document by document.
    """
    data = {"kind": "induction", "vocab_size": 12, "length": 16, "held_out": 8}
    if packed:
        (tmp_path / "texts").mkdir()
        for i in range(15):
            (tmp_path / "texts" / f"{i}.txt").write_text(f"Document {i} says {i * i} and {'na' * (i % 5)}. " * 6)
        data = {"kind": "text", "source": str(tmp_path / "texts"), "context": 512}
        computed = []
        kernel = varlen._run_by_documents
        monkeypatch.setattr(varlen, "_run_by_documents", lambda *args: computed.append(args[3]) or kernel(*args))
    values = {
        "data": data,
        "model": {
            "hidden_size": 16,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "mechanisms": {"kv_shift": {}, "value_residual": {}},
        },
        "training": {
            "steps": 6,
            "batch_size": 4,
            "gradient_accumulation_steps": gradient_accumulation_steps,
            "warmup_steps": 2,
            "threads": 1,
        },
        "reporting": {"log_every": 2, "tensorboard": False},
    }
    values["training"]["device"] = device
    step, steps = TrainingRun.take_step, []

    def watched(self, stop):
        if not self.progress.step:  # the optimizer makes its state in the first
            return step(self, stop)
        with no_waits(self.fabric.device):
            rate = step(self, stop)
        steps.append(self.progress.step)
        return rate

    settle, settled = TrainingRun.settle_step, []

    def on_the_host(self):
        settled.append(None if self.outcome is None else self.progress.step - self.outcome.step)
        with _disable_current_modes():
            settle(self)

    monkeypatch.setattr(TrainingRun, "take_step", watched)
    monkeypatch.setattr(TrainingRun, "settle_step", on_the_host)
    record = train(parse(values, "test"), tmp_path / "run")
    assert steps == [2, 3, 4, 5, 6]
    assert settled[:7] == [None, *[1] * 5, 0], "each step looks at the one before, and only evaluation at its own"
    assert record.status == "finished"
    monkeypatch.undo()
    values["reporting"]["log_every"] = 1
    every = train(parse(values, "test"), tmp_path / "every").curve
    for point, (one, two) in zip(record.curve, zip(every[::2], every[1::2], strict=True), strict=True):
        assert point == two.model_copy(update={"loss": pytest.approx((one.loss + two.loss) / 2, rel=1e-12)})
    assert [point.step for point in record.speed] == [2, 4, 6]
    assert not packed or {len(borders) for borders in computed} == {4 + 64 + 1}
