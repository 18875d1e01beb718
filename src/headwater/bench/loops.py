"""Whole training loops, interleaved step by step: data, optimizer, logging and all."""

from __future__ import annotations

import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from headwater.bench.paired import PairedTimes
from headwater.bench.training import bases, training_step
from headwater.data.corpus import STDLIB
from headwater.data.language import LanguageData
from headwater.errors import HeadwaterError
from headwater.models.compiling import compile_model
from headwater.recipe import Recipe, parse
from headwater.records import RunRecord
from headwater.training.loop import train

# A loop calls what it is given after each of its steps.
Loop = Callable[[Callable[[], None]], object]


class Stepped:
    """A loop in a separate thread that runs one step per call."""

    def __init__(self, loop: Loop) -> None:
        self.go, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.error: BaseException | None = None
        self.result: object = None
        self.threads = torch.get_num_threads()
        threading.Thread(target=self._run, args=(loop,), daemon=True).start()

    def _run(self, loop: Loop) -> None:
        torch.set_num_threads(self.threads)
        self.go.acquire()
        try:
            self.result = loop(self._after_step)
        except BaseException as error:
            self.error = error
        self.done.release()

    def _after_step(self) -> None:
        self.done.release()
        self.go.acquire()

    def __call__(self) -> None:
        self.go.release()
        self.done.acquire()
        if self.error is not None:
            raise self.error


@dataclass(frozen=True)
class Loops:
    """Seconds per step of each interleaved loop.

    bare: our model's step alone, without data, schedule, checks and logging. record: our run's, with what it measured
    of itself. tokens: in a step.
    """

    ours: list[float]
    trainer: list[float]
    bare: list[float]
    tokens: int
    record: RunRecord

    @property
    def against_trainer(self) -> PairedTimes:
        return PairedTimes(self.ours, self.trainer)

    @property
    def overhead(self) -> PairedTimes:
        return PairedTimes(self.ours, self.bare)


def loop_recipe(
    *,
    layers: int,
    width: int,
    context: int,
    batch_size: int,
    vocabulary: int,
    precision: str,
    compile: bool,
    steps: int,
) -> Recipe:
    """headwater's side: a model without mechanisms on the standard library's sources, in rows as in nanoGPT."""
    return parse(
        {
            "name": "bench",
            "data": {
                "kind": "text",
                "source": STDLIB,
                "context": context,
                "rows": "contiguous",
                "held_out_bytes": 2000,
            },
            "model": {
                "vocab_size": vocabulary,
                "hidden_size": width,
                "num_hidden_layers": layers,
                "num_attention_heads": width // 64,
                "norm_eps": 1e-6,
            },
            "training": {
                "steps": steps,
                "batch_size": batch_size,
                "precision": precision,
                "compile": compile,
                "device": "cpu",
                "threads": torch.get_num_threads(),
            },
            "reporting": {"log_every": 10, "save_every": None, "tensorboard": False},
        },
        "bench",
    )


def bench_loops(
    precision: str = "32-true",
    *,
    layers: int = 6,
    width: int = 384,
    context: int = 256,
    batch_size: int = 8,
    vocabulary: int = 512,
    compile: bool = False,
    turns: int = 20,
) -> Loops:
    """`headwater train` against transformers' Llama under its Trainer, and against our own bare step, on a CPU.

    Same shape, rows, batch, optimizer (fused AdamW, clipping at 1) and precision. The first three turns, which compile
    and allocate, are not counted.
    """
    if precision not in ("32-true", "bf16-mixed"):
        raise HeadwaterError(f"bench loop has precision 32-true and bf16-mixed, as Trainer has, not {precision!r}.")
    warmup = 3
    recipe = loop_recipe(
        layers=layers,
        width=width,
        context=context,
        batch_size=batch_size,
        vocabulary=vocabulary,
        precision=precision,
        compile=compile,
        steps=turns + warmup + 1,
    )
    data = recipe.data.build()
    assert isinstance(data, LanguageData)
    own, theirs = bases("llama", layers=layers, width=width, context=context, vocabulary=vocabulary)
    ids = next(data.batches(0, batch_size, 0))["input_ids"]
    if compile:
        compile_model(own)
    alone = training_step(own, ids, precision == "bf16-mixed", {"skip_logits": True})

    with tempfile.TemporaryDirectory() as folder:
        arms: dict[str, Callable[[], None]] = {
            "ours": Stepped(lambda after: train(recipe, Path(folder) / "run", on_event=_each_step(after))),
            "trainer": Stepped(
                lambda after: trainer_loop(
                    theirs, data, Path(folder), batch_size, precision, compile, recipe.training.steps, after
                )
            ),
            # In a thread too, since memory is allocated differently there.
            "bare": Stepped(lambda after: endless(alone, after)),
        }
        times: dict[str, list[float]] = {name: [] for name in arms}
        for turn in range(turns + warmup):
            order = list(arms) if turn % 2 == 0 else list(reversed(arms))
            for name in order:
                started = time.perf_counter()
                arms[name]()
                if turn >= warmup:
                    times[name].append(time.perf_counter() - started)
        # The last step returns the record; its evaluation and checkpoint are not counted.
        stepped = arms["ours"]
        assert isinstance(stepped, Stepped)
        while stepped.result is None:
            stepped()
        record = stepped.result
        assert isinstance(record, RunRecord)
    return Loops(times["ours"], times["trainer"], times["bare"], batch_size * context, record)


def endless(step: Callable[[], None], after: Callable[[], None]) -> None:
    while True:
        step()
        after()


def _each_step(after: Callable[[], None]) -> Callable[[int, object], None]:
    def on_event(step: int, point: object) -> None:
        if point is None:
            after()

    return on_event


def trainer_loop(
    model: PreTrainedModel,
    data: LanguageData,
    folder: Path,
    batch_size: int,
    precision: str,
    compile: bool,
    steps: int,
    after: Callable[[], None],
) -> None:
    """transformers' Trainer on the same rows."""

    class Step(TrainerCallback):
        def on_step_end(self, *args: object, **kwargs: object) -> None:
            after()

    class Rows(Dataset):
        def __len__(self) -> int:
            return data.train.counts[0]

        def __getitem__(self, row: int) -> dict[str, Tensor]:
            ids = data.train.batch([(0, row)])["input_ids"][0]
            return {"input_ids": ids, "labels": ids}

    settings = TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=batch_size,
        max_steps=steps + 1,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=50,
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        bf16=precision == "bf16-mixed",
        torch_compile=compile,
        logging_steps=10,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
    )
    trainer = Trainer(model=model, args=settings, train_dataset=Rows(), callbacks=[Step()])
    trainer.pop_callback(PrinterCallback)
    trainer.train()
