"""`training:` and `reporting:` of a recipe."""

from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from headwater.plugins.mechanisms import MECHANISMS
from headwater.plugins.registry import Registry
from headwater.util.precision import Precision
from headwater_lab.optimization.registry import OPTIMIZERS, SCHEDULES, fields_read
from headwater_lab.optimization.schedules import find_decay_start
from headwater_lab.util.settings import Count, Fraction, ReadIf, Settings

AttentionKernel = Literal[
    "sdpa", "eager", "flash_attention_2", "kernels-community/flash-attn3", "flex_attention", "matmul", "varlen"
]

BY_OPTIMIZER = ReadIf(
    lambda run, name: name in fields_read(OPTIMIZERS.resolve(run.training.optimizer)),
    "with training.optimizer={0.training.optimizer}",
)
BY_SCHEDULE = ReadIf(
    lambda run, name: name in fields_read(SCHEDULES.resolve(run.training.schedule)),
    "with training.schedule={0.training.schedule}",
)
OF_TEXT = ReadIf(lambda run, name: run.unit == "tokens", "on data of images")
OF_IMAGES = ReadIf(lambda run, name: run.unit == "images", "on data of text")
OF_DECAY = ReadIf(lambda run, name: run.training.weight_decay > 0, "with training.weight_decay=0")
OF_MECHANISMS = ReadIf(lambda run, name: run.has_mechanisms, "without mechanisms")
WITHIN_THE_RUN = ReadIf(
    lambda run, name: (getattr(run.reporting, name) or 1) <= run.training.steps, "in a run of {0.training.steps} steps"
)


def _known_in(registry: Registry) -> AfterValidator:
    """Require a name in `registry`; external objects are imported, so that a wrong name fails immediately."""

    def check(name: str) -> str:
        if name not in registry.built_in:
            registry.resolve(name)
        return name

    return AfterValidator(check)


class Distillation(Settings):
    """`distillation:` learn from another model's predictions too (arXiv 1503.02531)."""

    teacher: str | None = None
    """The model to learn from, any that `headwater retrofit` reads; default: the one that the first run starts from, as
    it was before it was changed."""
    weight: float = Field(default=0.5, ge=0, le=1)
    """w in (1 - w)·loss + w·T²·KL(teacher ‖ model), over the tokens that have a label; the reported loss is the usual
    one."""
    temperature: float = Field(default=1.0, gt=0, le=1000)
    """T, which divides both models' logits."""


class Training(Settings):
    """`training:` optimization. The defaults are the papers' (AdamW 0.9/0.95, weight decay 0.1, gradient norm 1)."""

    steps: Count = 1000
    """Optimizer steps."""
    batch_size: Count = 16
    """Rows in a forward pass, over all processes."""
    gradient_accumulation_steps: Count = 1
    """Forward passes per step; the loss is the mean over all their tokens."""
    optimizer: Annotated[str, _known_in(OPTIMIZERS)] = "adamw"
    """adamw; muon: Muon for the matrices, its step scaled to the size of AdamW's, and AdamW for the rest; or an
    external one, e.g. torch.optim:SGD (docs/extending.md)."""
    optimizer_options: Annotated[dict[str, Any], BY_OPTIMIZER] = {}
    """Arguments of an external optimizer, except learning rate and weight decay."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    scalar_learning_rate_multiplier: Annotated[float, OF_MECHANISMS] = Field(default=1.0, gt=0, le=1e6)
    """Learning rate of the mechanisms' scalars, as a multiple of the others'. Raise it for mechanisms added to a
    trained model, which start as the identity and have far to move in few steps."""
    trainable_mechanisms: list[Annotated[str, _known_in(MECHANISMS)]] | None = Field(default=None, min_length=1)
    """Mechanisms whose parameters are trained; all others stay as they are. null: train everything. FLOPs
    are counted as if all were trained."""
    schedule: Annotated[str, _known_in(SCHEDULES)] = "cosine"
    """After the warm-up: cosine, a half cosine to `min_learning_rate_ratio`; linear, a straight line to it; constant;
    wsd, constant and then a decay to it, so that runs of several lengths can share a trunk (docs/compare.md); or an
    external one (docs/extending.md)."""
    warmup_steps: int = Field(default=50, ge=0, le=2**31 - 1)
    """Steps of linear warm-up from zero; in a shorter run, the rate ends below its peak."""
    min_learning_rate_ratio: Annotated[float, BY_SCHEDULE] = Field(default=0.0, ge=0, le=1000)
    """Where the schedule ends, as a fraction of the peak."""
    decay_fraction: Annotated[float, BY_SCHEDULE] = Field(default=0.2, gt=0, le=1)
    """Length of the decay of wsd, as a fraction of all steps."""
    decay_form: Annotated[Literal["linear", "1-sqrt"], BY_SCHEDULE] = "linear"
    """How far wsd has come down after the fraction x of its decay: linear, x; 1-sqrt, √x."""
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False), BY_OPTIMIZER] = (0.9, 0.95)
    """AdamW's averaging."""
    epsilon: Annotated[float, BY_OPTIMIZER] = Field(default=1e-8, gt=0, le=1)
    """AdamW's epsilon."""
    momentum: Annotated[Fraction, BY_OPTIMIZER] = 0.95
    """Muon's averaging."""
    weight_decay: float = Field(default=0.1, ge=0, le=1e6)
    """Weight decay of AdamW and Muon, on the parameters that `weight_decay_on` names."""
    weight_decay_on: Annotated[Literal["matrices", "embeddings", "all"], OF_DECAY] = "matrices"
    """matrices: without the embeddings. embeddings: with them, so all but norms, biases and the mechanisms' scalars, as
    nanoGPT, GPT-NeoX and Hugging Face's Trainer. all: every parameter, as MaxText."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Largest norm of the gradient; null for none."""
    z_loss: Annotated[float, OF_TEXT] = Field(default=0.0, ge=0, le=1000)
    """Weight of mean(logsumexp(logits)²), added to the loss (PaLM, arXiv 2204.02311, section 5: 1e-4); the
    reported loss does not include it."""
    label_smoothing: Annotated[Fraction, OF_IMAGES] = 0.0
    """For images: this share of each label's probability is spread over all classes."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights, per step; null for none. The averaged weights are
    evaluated and saved. In step t the decay is at most (1 + t) / (10 + t), so that early weights are soon forgotten."""
    distillation: Annotated[Distillation | None, OF_TEXT] = None
    """Learn from a trained model's predictions; null: from the data alone."""
    max_skipped_steps: Count = 10
    """Stop after this many consecutive steps whose loss or gradient is not finite; fewer are skipped and counted."""
    precision: Annotated[Precision, Field(strict=False)] = Precision.FP32
    """Precision of weights and matmuls, as named by Lightning Fabric. The mechanisms' scalars always stay in fp32.
    bf16-stream: weights and optimizer state in fp32 as in bf16-mixed, and all activations in bf16, the residual stream
    too; the loss and the statistics of norms are computed in fp32. With fsdp, bf16-mixed does the same."""
    attn_implementation: AttentionKernel | None = None
    """The attention kernel, as named by transformers; or matmul, which is faster in bfloat16 on some CPUs; or varlen,
    which computes packed rows document by document, and other rows as sdpa (`headwater bench train` measures both).
    kernels-community/flash-attn3 is FlashAttention 3, which the package kernels downloads and runs on an H100 or H200.
    Default: varlen where it can run and packed rows are faster with it, else sdpa if the model allows it."""
    compile: bool | Literal["whole"] | None = None
    """Compile each block, and the output head with the loss, with torch.compile; whole: the model as one graph, for a
    single device. On a GPU it needs a C compiler, on a CPU one for C++. Default: true on a GPU that has one."""
    cuda_graphs: bool = False
    """With compile=whole on one GPU, replay forward and backward pass as CUDA graphs: faster for small models, whose
    kernels run in less time than it takes to start them."""
    gradient_checkpointing: bool = False
    """Recompute each block's activations in the backward pass, to save memory."""
    loss_chunk_tokens: Annotated[Count | None, OF_TEXT] = None
    """Tokens whose logits are in memory at once: the forward pass computes their gradients. Default: all, or 1,024 with
    `distillation`."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads; default: as many as there are free cores at the start. Trials of `headwater compare` use 1."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to train. CUDA_VISIBLE_DEVICES chooses the GPUs."""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """How several processes share the work: ddp averages gradients, fsdp (FSDP2) also splits the parameters; auto is
    ddp if there is more than one."""
    devices: Count = 1
    """Devices per node, one process each. torchrun's own number takes precedence."""
    nodes: Count = 1
    """Number of machines. torchrun's own number takes precedence."""
    timeout_minutes: Count = 30
    """Minutes that a process waits for another before it gives up."""

    @property
    def world_size(self) -> int:
        """The number of processes, one for each device."""
        return self.devices * self.nodes

    @property
    def decay_start(self) -> int | None:
        """The step after which wsd decays, where longer runs branch off; None with another schedule."""
        return find_decay_start(self.steps, self.decay_fraction) if self.schedule == "wsd" else None

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.decay_start is not None and self.decay_start < self.warmup_steps:
            raise ValueError(
                f"the decay of training.schedule=wsd begins after step {self.decay_start}, within the "
                f"{self.warmup_steps} warm-up steps; lower training.warmup_steps or training.decay_fraction"
            )
        unfit = ["strategy=fsdp"] if self.strategy == "fsdp" else []
        unfit += [name for name in ("loss_chunk_tokens", "distillation") if getattr(self, name) is not None]
        if self.compile == "whole" and unfit:
            raise ValueError(f"training.compile=whole does not fit training.{unfit[0]}; use training.compile=true")
        if self.cuda_graphs and (self.compile != "whole" or self.world_size * self.gradient_accumulation_steps > 1):
            raise ValueError(
                "training.cuda_graphs needs training.compile=whole, a single device, and "
                "training.gradient_accumulation_steps=1; set them, or leave it out"
            )
        if self.ema_decay is not None and self.precision is Precision.BF16:
            raise ValueError(
                "training.ema_decay adds changes too small for bf16 weights; use training.precision=bf16-mixed"
            )
        return self


class Reporting(Settings):
    """`reporting:` how often to evaluate, save and log."""

    log_every: Annotated[Count, WITHIN_THE_RUN] = 10
    """Steps between points of the loss curve."""
    evaluate_every: Annotated[Count | None, WITHIN_THE_RUN] = None
    """Steps between evaluations on held-out data; there is always one at the end."""
    save_every: Annotated[Count | None, WITHIN_THE_RUN] = 200
    """Steps between checkpoints; null saves only at the end."""
    keep_checkpoints: Count = 2
    """Number of newest checkpoints to keep, in addition to the one with the best held-out result."""
    tensorboard: bool = True
    """Write TensorBoard event files into the run's folder."""
    wandb: str | None = None
    """Weights & Biases project to log to (needs the package wandb)."""
