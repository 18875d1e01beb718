"""Recipes: one YAML file says what to train, on what, how, and what to compare.

`written` reads the file and the dotted overrides, and pydantic checks names and types. This module turns their errors
into one sentence that names the field and the nearest known one.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

from huggingface_hub.errors import StrictDataclassError
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    SerializeAsAny,
    ValidationError,
    field_validator,
    model_validator,
)

from headwater.config.planner import plan_layers
from headwater.config.presets import PRESETS, preset
from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.conversion.convert import blended_config, check_conversion, finished_config
from headwater.growth.grow import grown_config
from headwater.growth.methods import GrowthOptions, KeyInit, TauPolicy
from headwater.plugins.outside import trust_names_in
from headwater.plugins.registry import MECHANISMS, Registry, as_mapping
from headwater.util.errors import HeadwaterError, NotTrusted, nearest, sentence, shown
from headwater.util.files import local
from headwater.util.precision import Precision
from headwater_lab.data.base import DATA, Data, DataSettings, DataShape
from headwater_lab.data.images import ImageSettings
from headwater_lab.data.language import LanguageSettings
from headwater_lab.recipe.overrides import merged, overridden, override, plain, read_text
from headwater_lab.recipe.shipped import shipped_recipes
from headwater_lab.util.names import file_name, is_file_name
from headwater_lab.util.settings import Settings

# Names in recipes; outside objects are named "package.module:name", or by an entry point.
OPTIMIZERS = Registry(
    "optimizer",
    "headwater.optimizers",
    {"adamw": "headwater_lab.training.optimizers:adamw", "muon": "headwater_lab.training.optimizers:muon"},
)
SCHEDULES = Registry(
    "schedule",
    "headwater.schedules",
    {"cosine": "headwater_lab.training.optimizers:cosine", "constant": "headwater_lab.training.optimizers:constant"},
)


def _by_kind(values: Any) -> Any:
    """`data:` read by the settings of its kind."""
    if isinstance(values, Settings):
        return values
    kind = values.get("kind") if isinstance(values, dict) else None
    if not isinstance(kind, str) or not (":" in kind or kind in DATA.names):
        raise ValueError(f"data.kind must be one of: {', '.join(DATA.names)}.")
    settings = DATA.resolve(kind)
    try:
        return settings.model_validate(values)
    except ValidationError as error:
        raise ValueError(_sentence(error, settings, "data")) from error


AnyData = Annotated[DataSettings, PlainValidator(_by_kind), SerializeAsAny()]


def _can_name_a_folder(name: str) -> str:
    if not is_file_name(name):
        raise ValueError(
            f"the name {name!r} cannot be a folder's: use up to 200 letters, digits, spaces, dots and dashes, "
            f"without a slash or a leading dot; to choose the run's folder, use --out"
        )
    return name


def _known_in(registry: Registry) -> AfterValidator:
    """A name in `registry`; outside objects are imported, so that a wrong name fails at once."""

    def check(name: str) -> str:
        if name not in registry.own:
            registry.resolve(name)
        return name

    return AfterValidator(check)


# Raise it when a default changes: fields at their defaults do not enter the identity, and records of runs with the old
# default would count as runs with the new one.
IDENTITY_VERSION = 2
Name = Annotated[str, AfterValidator(_can_name_a_folder)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
# Beyond any real training run, and within the range of tensors and clocks.
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Field(ge=0, lt=2**31)]
AttentionKernel = Literal["sdpa", "eager", "flash_attention_2", "flex_attention", "matmul", "varlen"]


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
    """adamw; muon: Muon for the matrices, its step scaled to the size of AdamW's, and AdamW for the rest; or one
    from outside, e.g. torch.optim:SGD (docs/extending.md)."""
    optimizer_options: dict[str, Any] = {}
    """Arguments of an outside optimizer, besides learning rate and weight decay."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Peak learning rate."""
    scalar_learning_rate_multiplier: float = Field(default=1.0, gt=0, le=1e6)
    """Learning rate of the mechanisms' scalars, as a multiple of the others'. Raise it for mechanisms added to a
    trained model, which start as the identity and have far to move in few steps."""
    trainable_mechanisms: list[Annotated[str, _known_in(MECHANISMS)]] | None = Field(default=None, min_length=1)
    """Mechanisms whose parameters are trained; all others stay as they are. null: train everything."""
    schedule: Annotated[str, _known_in(SCHEDULES)] = "cosine"
    """After the warm-up: cosine, a half cosine to `min_learning_rate_ratio`; constant; or one from outside
    (docs/extending.md)."""
    warmup_steps: int = Field(default=50, ge=0, le=2**31 - 1)
    """Steps of linear warm-up from zero."""
    min_learning_rate_ratio: float = Field(default=0.0, ge=0, le=1000)
    """Where the cosine ends, as a fraction of the peak."""
    betas: Annotated[tuple[Fraction, Fraction], Field(strict=False)] = (0.9, 0.95)
    """AdamW's averaging."""
    epsilon: float = Field(default=1e-8, gt=0, le=1)
    """AdamW's epsilon."""
    momentum: Fraction = 0.95
    """Muon's averaging."""
    weight_decay: float = Field(default=0.1, ge=0, le=1e6)
    """Weight decay of AdamW and Muon, on the parameters that `weight_decay_on` names."""
    weight_decay_on: Literal["matrices", "embeddings", "all"] = "matrices"
    """matrices: without the embeddings. embeddings: with them, so all but norms, biases and the mechanisms' scalars, as
    nanoGPT, GPT-NeoX and Hugging Face's Trainer. all: every parameter, as MaxText."""
    max_grad_norm: float | None = Field(default=1.0, gt=0)
    """Largest norm of the gradient; null for none."""
    z_loss: float = Field(default=0.0, ge=0, le=1000)
    """Weight of mean(logsumexp(logits)²), added to the loss (PaLM, arXiv 2204.02311, section 5: 1e-4); the
    reported loss does not include it."""
    label_smoothing: Fraction = 0.0
    """Of images: this share of each label's probability is spread over all classes."""
    ema_decay: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Decay of an exponential moving average of the weights, per step; null for none. The averaged weights are
    evaluated and saved. In step t the decay is at most (1 + t) / (10 + t), so that early weights are soon forgotten."""
    distillation: Distillation | None = None
    """Learn from a trained model's predictions; null: from the data alone."""
    max_skipped_steps: Count = 10
    """Stop after this many consecutive steps whose loss or gradient is not finite; fewer are skipped and counted."""
    precision: Annotated[Precision, Field(strict=False)] = Precision.FP32
    """Precision, as named by Lightning Fabric. The mechanisms' scalars always stay in fp32."""
    attn_implementation: AttentionKernel | None = None
    """The attention kernel, as named by transformers; or matmul, which is faster in bfloat16 on some CPUs; or varlen,
    which computes packed rows document by document, and other rows as sdpa (`headwater bench train` measures both).
    Default: varlen where it can run and packed rows are faster with it, else sdpa if the model allows it."""
    compile: bool | None = None
    """Compile each block, and the output head with the loss, with torch.compile. On a GPU it needs a C compiler, on a
    CPU one for C++. Default: on a GPU that has one."""
    gradient_checkpointing: bool = False
    """Recompute each block's activations in the backward pass, to save memory."""
    loss_chunk_tokens: Count | None = None
    """Tokens whose logits are in memory at once; the output head then costs 4/3 of its FLOPs. Default: all."""
    threads: int | None = Field(default=None, ge=1, le=1024)
    """CPU threads; default: PyTorch's choice. Trials of `headwater compare` use 1."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to train."""
    strategy: Literal["auto", "ddp", "fsdp"] = "auto"
    """How several processes share the work: ddp averages gradients, fsdp (FSDP2) also splits the parameters; auto is
    ddp if there is more than one."""
    devices: Count = 1
    """Devices per node, one process each. torchrun's own number takes precedence."""
    nodes: Count = 1
    """Number of machines. torchrun's own number takes precedence."""
    timeout_minutes: Count = 30
    """Minutes that a process waits for another before it gives up."""

    @model_validator(mode="after")
    def _options_fit(self) -> Self:
        if self.optimizer_options and self.optimizer in OPTIMIZERS.own:
            raise ValueError(
                f"training.optimizer_options are for outside optimizers; {self.optimizer} has its own fields"
            )
        if self.distillation is not None and self.loss_chunk_tokens is not None:
            raise ValueError(
                "training.distillation compares whole rows of logits; leave out training.loss_chunk_tokens"
            )
        if self.ema_decay is not None and self.precision is Precision.BF16:
            raise ValueError(
                "training.ema_decay adds changes too small for bf16 weights; use training.precision=bf16-mixed"
            )
        return self


class Reporting(Settings):
    """`reporting:` how often to evaluate, save and log."""

    log_every: Count = 10
    """Steps between points of the loss curve."""
    evaluate_every: Count | None = None
    """Steps between evaluations on held-out data; there is always one at the end."""
    save_every: Count | None = 200
    """Steps between checkpoints; null saves only at the end."""
    keep_checkpoints: Count = 2
    """Number of newest checkpoints to keep, besides the one with the best held-out result."""
    tensorboard: bool = True
    """Write TensorBoard event files into the run's folder."""
    wandb: str | None = None
    """Weights & Biases project to log to (needs `pip install headwater[wandb]`)."""


class Compare(Settings):
    """`compare:` variants of the recipe, trained side by side."""

    arms: dict[str, dict[str, Any]] = Field(min_length=1)
    """Name of each arm -> its changes to the recipe, e.g. {model: {mechanisms: {kv_shift: {}}}}."""
    baseline: str
    """The arm that the others are compared with, seed by seed."""
    seeds: list[Seed] = Field(default=[0, 1, 2], min_length=1)
    """Each arm is trained once per seed; a seed sets the initial value of every parameter and the order of the data."""
    workers: Count | None = None
    """Trials at a time; default: one per GPU, or one per CPU core."""
    threshold: float | Literal["baseline"] | None = None
    """Report the first step at which the deciding measure reaches this value, and what it cost up to there; baseline:
    the value with which the baseline ends, seed by seed."""
    budget_arms: list[str] = []
    """Arms that are the baseline with other budgets. Report what every other arm's result is worth: the FLOPs for which
    the baseline would have had it (docs/compare.md#what-a-result-is-worth)."""
    match: Literal["tokens", "parameters", "flops"] | None = None
    """Make every arm cost the same as the baseline, through its steps (tokens, flops), or the width of its feed-forward
    or the pairs that replace it (parameters, within 1 %); null leaves arms as written."""
    costs: bool = False
    """Measure after the runs what each arm costs: times of training and of generation (docs/compare.md#prices)."""
    learning_rates: list[Annotated[float, Field(gt=0)]] = []
    """Try each arm at each of these first; the arm gets the best by mean over `tuning_seeds`. With several `sizes`, all
    use the rate found for the first."""
    tuning_seeds: list[Seed] = Field(default=[1000], min_length=1)
    """Seeds for tuning, which are not part of the comparison."""
    sizes: dict[str, dict[str, Any]] = {}
    """Name of each size -> its changes to every arm (and under `arms:` to single arms); with three or more, a scaling
    law is fitted."""
    sequential: bool = False
    """Add seeds until each arm is better, worse or equivalent within the margin; false trains `seeds`."""
    margin: Annotated[float, Field(gt=0)] | None = None
    """The smallest difference of the deciding measure that matters; needed for `sequential`."""
    min_seeds: Annotated[int, Field(ge=2, le=1000)] = 6
    """Seeds before the first look, for `sequential`."""
    max_seeds: Annotated[int, Field(ge=2, le=1000)] = 30
    """Seeds at which an undecided arm is inconclusive, for `sequential`. Those after the listed ones count on from the
    largest."""

    @field_validator("sizes", mode="before")
    @classmethod
    def _none(cls, sizes: Any) -> Any:
        return {} if sizes is None else sizes

    @property
    def all_seeds(self) -> list[int]:
        """The seeds that may be trained, in the order in which they are."""
        if not self.sequential:
            return self.seeds
        further = itertools.count(max(self.seeds) + 1)
        return [*self.seeds, *itertools.islice(further, self.max_seeds - len(self.seeds))]

    @model_validator(mode="after")
    def _names_fit(self) -> Compare:
        if self.baseline not in self.arms:
            raise ValueError(f"baseline {self.baseline!r} is not an arm; {nearest(self.baseline, self.arms)}")
        for size, change in self.sizes.items():
            for arm in change.get("arms", {}):
                if arm not in self.arms:
                    raise ValueError(f"compare.sizes.{size}.arms: {arm!r} is not an arm; {nearest(arm, self.arms)}")
        for what, changes in (("arms", self.arms), ("sizes", self.sizes)):
            for name, change in changes.items():
                if unread := change.keys() & {"seed", "name", "compare"}:
                    raise ValueError(
                        f"compare.{what}.{name}.{min(unread)} has no effect: the comparison sets it; leave it out"
                    )
        self._check_sequential()
        self._check_budget_arms()
        if self.budget_arms and self.match is not None:
            raise ValueError(f"compare.match={self.match} would make all compare.budget_arms the same; leave one out")
        if both := set(self.all_seeds) & set(self.tuning_seeds) if self.learning_rates else set():
            raise ValueError(
                f"compare.tuning_seeds and compare.seeds share {sorted(both)}; seeds that choose a rate flatter it, "
                f"so use other tuning_seeds"
            )
        if "tuning_seeds" in self.model_fields_set and "learning_rates" not in self.model_fields_set:
            raise ValueError(
                "compare.tuning_seeds has no effect without compare.learning_rates; add them, or leave it out"
            )
        if len({f"{rate:g}" for rate in self.learning_rates}) < len(self.learning_rates):
            raise ValueError("compare.learning_rates names a rate twice, up to its sixth digit; list each once")
        for what in ("seeds", "tuning_seeds", "budget_arms"):
            if len(set(names := getattr(self, what))) < len(names):
                raise ValueError(f"compare.{what} has an entry twice: {names}; list each once")
        return self

    def _check_budget_arms(self) -> None:
        for arm in self.budget_arms:
            if arm not in self.arms or arm == self.baseline:
                others = [name for name in self.arms if name != self.baseline]
                raise ValueError(
                    f"compare.budget_arms: {arm!r} is not an arm besides the baseline; {nearest(arm, others)}"
                )
            for arms in (self.arms, *(size.get("arms", {}) for size in self.sizes.values())):
                own, base = (
                    {key: value for key, value in arms.get(name, {}).items() if key != "training"}
                    for name in (arm, self.baseline)
                )
                if other := [key for key in own.keys() | base.keys() if own.get(key) != base.get(key)]:
                    raise ValueError(
                        f"compare.budget_arms: {arm!r} differs from {self.baseline!r} in {min(other)}, but a budget is "
                        "the same model with other fields of training"
                    )

    def _check_sequential(self) -> None:
        if not self.sequential:
            given = self.model_fields_set & {"margin", "min_seeds", "max_seeds"}
            if any(getattr(self, name) != type(self).model_fields[name].default for name in given):
                raise ValueError(f"compare.{min(given)} has no effect without compare.sequential=true; add it")
            return
        if self.margin is None:
            raise ValueError("compare.sequential=true needs compare.margin, the smallest difference that matters")
        if self.min_seeds > self.max_seeds:
            raise ValueError(f"compare.min_seeds={self.min_seeds} is more than compare.max_seeds={self.max_seeds}")
        if len(self.seeds) > self.max_seeds:
            raise ValueError(
                f"compare.seeds lists {len(self.seeds)} seeds, more than compare.max_seeds={self.max_seeds}; list only "
                "the first"
            )
        if not self.arms.keys() - {self.baseline, *self.budget_arms}:
            raise ValueError("compare.sequential=true needs an arm besides the baseline and its budgets")


class Growth(Settings):
    """`grow:` how to make a model larger; the fields are the arguments of `lab.grow`."""

    num_hidden_layers: Count | None = None
    """Layers after growth."""
    hidden_size: Count | None = None
    """Width of the residual stream after growth."""
    intermediate_size: Count | None = None
    """Width of the feed-forward after growth."""
    num_attention_heads: Count | None = None
    """Query heads after growth."""
    num_key_value_heads: Count | None = None
    """Key/value heads after growth; default: in proportion."""
    method: str = "exact"
    """How new layers and widths are made: exact, lemon, identity, stack, interleave, hypercloning, net2net, or one way
    for each direction, as in stack+hypercloning (docs/growth.md)."""
    attention_pairs: Count | None = None
    """Pairs of each attention projection after growth, of a model with parameter tokens."""
    ffn_pairs: Count | None = None
    """Pairs of each feed-forward after growth."""
    key_init: KeyInit = "zero"
    """random changes the function."""
    tau: TauPolicy = "keep"
    """recompute changes the function."""
    freeze: bool = False
    """Train only the new pairs."""

    @property
    def options(self) -> GrowthOptions:
        return GrowthOptions(**self.model_dump())

    @model_validator(mode="after")
    def _possible(self) -> Self:
        _ = self.options
        return self


def _by_name(mechanisms: Any) -> Any:
    """Mechanisms as name -> options, from a list of names too."""
    given = as_mapping(mechanisms)
    return {name: options or {} for name, options in given.items()} if isinstance(given, dict) else given


class CacheConversion(Settings):
    """`convert:` the model to one whose cache is smaller."""

    mechanisms: Annotated[dict[str, dict[str, Any]] | None, BeforeValidator(_by_name)] = None
    """Mechanisms by which layers share keys and values: names with their options, or a list of names."""
    num_key_value_heads: Count | None = None
    """Fewer key/value heads: each is the mean of a group of the model's."""
    align: bool = True
    """First turn keys and values so that those to be shared or pooled are as alike as they can be, which keeps the
    function (docs/convert.md)."""
    anneal: bool = False
    """The model's own keys and values go over to the shared ones in the steps of this run; a stage with
    `finish_conversion: true` then leaves out what no head attends to. false: the model is the smaller one from the
    first step."""

    @model_validator(mode="after")
    def _somewhere(self) -> Self:
        if not self.mechanisms and self.num_key_value_heads is None:
            raise ValueError("convert needs mechanisms that share keys and values, or num_key_value_heads")
        return self


class Change(Settings):
    """How to change a trained model before training continues: one of these, or nothing."""

    grow: Growth | None = None
    """Make it larger."""
    convert: CacheConversion | None = None
    """Make its cache smaller."""
    finish_conversion: bool = False
    """Finish a conversion that was annealed: the same function with the smaller cache."""
    new_classifier: bool = False
    """Draw a new classifier for the data's classes; of an image model."""
    optimizer_state: Literal["fresh", "keep"] = "fresh"
    """keep: carry the optimizer's state along, by the rules of docs/growth.md."""
    tau: Literal["keep", "anneal"] | None = None
    """anneal: each τ moves to the default for its number of pairs, during the warm-up, or half of all steps if there is
    none; null: anneal for a model that was grown with τ kept and nothing frozen, otherwise keep."""

    @model_validator(mode="after")
    def _one_change(self) -> Self:
        if sum(map(bool, (self.grow, self.convert, self.finish_conversion))) > 1:
            raise ValueError("a model is grown, converted or finished, one at a time; make stages of it")
        if self.grow is not None and self.grow.freeze and self.optimizer_state == "keep":
            raise ValueError("grow.freeze trains only what is new, for which no state can be kept; leave out one")
        return self


class Start(Change):
    """`start:` the trained model that a run starts from, under the recipe's own schedule."""

    checkpoint: str
    """A checkpoint's folder, or a run's (its newest)."""
    previous: str | None = None
    """In a stage: the identity of the previous stage, which identifies the checkpoint."""


class TrainingStage(Change):
    """One of `stages:`, which starts from the previous stage's model."""

    name: str = Field(pattern=r"^\w[\w.-]*$", max_length=50)
    """Name in records and folders: letters, digits, dots and dashes."""
    training: dict[str, Any] = Field(default_factory=dict)
    """Changes to `training:`; steps and schedule are the stage's own."""
    data: dict[str, Any] = Field(default_factory=dict)
    """Changes to `data:`."""


class Recipe(Settings):
    """A whole recipe file."""

    name: Name = "run"
    """Name of the run, whose folder is runs/<name> unless --out names another."""
    title: str = ""
    """One line for reports."""
    seed: Seed = 0
    """Sets the initial value of every parameter, the order of the data, and dropout."""
    model: dict[str, Any] = Field(default_factory=dict)
    """Fields of HeadwaterConfig, and `base: llama | gpt2 | a preset` for its defaults; for images, fields of
    HeadwaterVisionConfig, and `base: vit | a preset`. The vocabulary, and images' size and classes, are the data's."""
    data: AnyData
    """`kind:` text, prepared, images, or another (docs/recipes.md), with the fields of that kind."""
    training: Training = Training()
    reporting: Reporting = Reporting()
    start: Start | None = None
    """Start from this model; then `model:` is the checkpoint's."""
    stages: list[TrainingStage] = []
    """Stages after the training that the other sections describe: change the model and train on."""
    compare: Compare | None = None

    @model_validator(mode="before")
    @classmethod
    def _known_model_fields(cls, values: Any) -> Any:
        model = values.get("model") if isinstance(values, dict) else None
        if isinstance(model, dict):
            if model.get("base", "llama") not in BASES:
                raise ValueError(
                    f"model.base must be llama, gpt2, vit or a preset; {nearest(str(model['base']), BASES)}"
                )
            values = _with_mechanisms(values)
            mechanisms = values["model"].get("mechanisms")
            if not isinstance(mechanisms, dict | None):
                raise ValueError(f"model.mechanisms must map names to options, or list names, not {shown(mechanisms)}")
        return values

    @model_validator(mode="after")
    def _fits_data(self) -> Self:
        of_images = isinstance(self.data, ImageSettings)
        known, what = (IMAGE_FIELDS, "images") if of_images else (MODEL_FIELDS, "text")
        for name in self.model:
            if name not in known:
                raise ValueError(f"the model of {what} has no field {name!r}; {nearest(name, known)}")
        for name in ("z_loss", "loss_chunk_tokens", "distillation") if of_images else ("label_smoothing",):
            if getattr(self.training, name) != Training.model_fields[name].default:
                raise ValueError(f"training.{name} is not for data of {what}; leave it out")
        distillation = self.training.distillation
        if distillation is not None and distillation.teacher is None and self.start is None:
            raise ValueError("training.distillation needs a model to learn from; give start.checkpoint, or its teacher")
        return self

    @property
    def known_size(self) -> int | None:
        """The vocabulary, or the number of classes, as far as the recipe tells without its data."""
        if not isinstance(self.data, ImageSettings):
            return self.model.get("vocab_size") or getattr(self.data, "vocab_size", None)
        base = self.model.get("base")
        of_preset = preset(base).num_labels if base in PRESETS else None
        return self.model.get("num_labels") or self.data.known_classes or of_preset

    @property
    def row_length(self) -> int:
        """Tokens in a row of the data; 1 for images."""
        return getattr(self.data, "context", None) or getattr(self.data, "length", None) or 1

    def config_for(self, data: Data | DataShape) -> HeadwaterConfig:
        """The model's config for this data. Raises `HeadwaterError` if fields contradict each other."""
        if isinstance(self.data, ImageSettings):
            return self._image_config(self.data, data)
        fields = dict(self.model)
        base = fields.pop("base", "llama")
        bases = {"llama": HeadwaterConfig, "gpt2": HeadwaterConfig.gpt2}
        make = bases.get(base) or functools.partial(preset, base)
        given = {"vocab_size": data.vocab_size, "max_position_embeddings": data.context, "initializer_seed": self.seed}
        if data.tokenizer is not None:
            for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
                given[token] = getattr(data.tokenizer, token)
        config = _checked_config(make, given | fields)
        if config.vocab_size < data.vocab_size:
            raise HeadwaterError(
                f"model.vocab_size {config.vocab_size} is smaller than the data's {data.vocab_size} tokens; "
                "leave it out."
            )
        if config.position == "learned" and config.max_position_embeddings < data.context:
            raise HeadwaterError(
                f"model.max_position_embeddings {config.max_position_embeddings} is smaller than the data's context "
                f"{data.context}; raise it, or lower the context."
            )
        return config

    def _image_config(self, settings: ImageSettings, data: Data | DataShape) -> HeadwaterConfig:
        fields = dict(self.model)
        base = fields.pop("base", "vit")
        make = HeadwaterVisionConfig if base == "vit" else functools.partial(preset, base)
        names = list(getattr(data, "classes", ())) or [str(number) for number in range(data.vocab_size)]
        size = settings.size[0] if settings.size[0] == settings.size[1] else list(settings.size)
        given: dict[str, Any] = {
            "image_size": size,
            "num_channels": settings.channels,
            "initializer_seed": self.seed,
        }
        count = fields.get("num_labels", len(names))
        if isinstance(count, int) and "id2label" not in fields:
            every = [*names, *(f"LABEL_{number}" for number in range(len(names), count))][: max(0, count)]
            given |= {"num_labels": count, "id2label": dict(enumerate(every))}
            given["label2id"] = {name: number for number, name in enumerate(every)}
        for name in ("image_size", "num_channels"):
            if fields.get(name, given[name]) != given[name]:
                raise HeadwaterError(
                    f"model.{name} {fields[name]} is not the data's {given[name]}; leave it out, or set data."
                    f"{'channels' if name == 'num_channels' else name}."
                )
        if base in ("llama", "gpt2") or (base in PRESETS and not isinstance(preset(base), HeadwaterVisionConfig)):
            raise HeadwaterError(f"model.base {base!r} is a text model; use vit or an image preset.")
        config = _checked_config(make, given | fields)
        if config.num_labels < len(names):
            raise HeadwaterError(
                f"model.num_labels {config.num_labels} is smaller than the data's {len(names)} classes; leave it out."
            )
        return config

    def chain(self, folder: Callable[[str, Recipe], Path]) -> list[tuple[Recipe, Path]]:
        """The runs of a recipe with stages, in order: plain recipes, each with its folder.

        folder: where a run goes, by its stage's name ("start" for the first) and its recipe.
        """
        plain = self.model_copy(update={"stages": [], "compare": None})
        runs = [(plain, folder("start", plain))]
        for stage in self.stages:
            before, at = runs[-1]
            change = stage.model_dump(mode="json", exclude={"name", "training", "data"})
            values = plain.model_dump(mode="json")
            values |= {
                "name": file_name(f"{self.name}-{stage.name}"),
                "start": change | {"checkpoint": str(at), "previous": before.identity},
            }
            values["training"] |= stage.training
            distillation = values["training"].get("distillation")
            if distillation and distillation.get("teacher") is None and self.start is not None:
                values["training"]["distillation"] = distillation | {"teacher": self.start.checkpoint}
            same = stage.data.get("kind", values["data"]["kind"]) == values["data"]["kind"]
            values["data"] = values["data"] | stage.data if same else stage.data
            recipe = parse(values, f"stage {stage.name!r}")
            runs.append((recipe, folder(stage.name, recipe)))
        return runs

    @property
    def unit(self) -> Literal["tokens", "images"]:
        """What the model's training counts: tokens or images."""
        return "images" if isinstance(self.data, ImageSettings) else "tokens"

    @property
    def stage_names(self) -> list[str]:
        """The names of the runs of `chain`, in order."""
        return ["start", *(stage.name for stage in self.stages)]

    def configs(self, config: HeadwaterConfig) -> list[HeadwaterConfig]:
        """The configs of the runs of `chain`; config: the first one's. Raises `HeadwaterError`."""
        configs = [config]
        for stage in self.stages:
            try:
                configs.append(changed_config(configs[-1], stage))
            except HeadwaterError as error:
                raise HeadwaterError(f"Stage {stage.name!r}: {error}") from error
        return configs

    def check_stages(self) -> None:
        """Raise `HeadwaterError` for a stage that would fail, before earlier stages are trained."""
        runs = [recipe for recipe, _ in self.chain(lambda name, _: Path(name))]
        frozen = self.start is not None and self.start.grow is not None and self.start.grow.freeze
        for stage, before, now in zip(self.stages, runs, runs[1:], strict=False):
            if stage.grow is not None:
                if frozen and stage.optimizer_state == "keep":
                    raise HeadwaterError(
                        f"Stage {stage.name!r} trains again what the stage before had frozen, for which it has no "
                        "optimizer's state; leave out optimizer_state: keep."
                    )
                frozen = stage.grow.freeze
            if stage.optimizer_state == "keep" and before.training.optimizer != now.training.optimizer:
                raise HeadwaterError(
                    f"Stage {stage.name!r} keeps the state of {before.training.optimizer} but trains with "
                    f"{now.training.optimizer}; use the same optimizer for both, or leave out optimizer_state: keep."
                )
            if stage.optimizer_state == "keep" and stage.convert is not None and stage.convert.align:
                raise HeadwaterError(
                    f"Stage {stage.name!r} aligns keys and values, which turns their weights, so that the optimizer's "
                    "state does not belong to them; set convert.align to false, or leave out optimizer_state: keep."
                )
        _check_one_metric(runs, "Stages are put on record")
        if self.start is None and self.stages:  # else the model is a checkpoint's
            # This does not read the data, whose vocabulary does not matter here.
            self.configs(self.config_for(DataShape(self.known_size or 1, self.row_length)))

    def arm(self, name: str, seed: int, size: str | None = None) -> Recipe:
        """The recipe of one trial of `compare`: the size's changes, then the arm's, then the arm's at that size."""
        assert self.compare is not None
        values = self.model_dump(mode="json", exclude={"compare"})
        of_size = dict(self.compare.sizes[size]) if size is not None else {}
        of_arm = of_size.pop("arms", {}).get(name, {})
        given = {"seed": seed, "name": file_name(f"{name}-{seed}" if size is None else f"{name}-{size}-{seed}")}
        where = f"arm {name!r}" if size is None else f"arm {name!r} of size {size!r}"
        for change in map(_with_mechanisms, (of_size, self.compare.arms[name], of_arm, given)):
            kept = values["model"].get("mechanisms")
            if kept and isinstance(change.get("model"), dict) and change["model"].get("mechanisms") == {}:
                raise HeadwaterError(
                    f"{where}: empty mechanisms do not remove {', '.join(kept)}, since an arm is merged into the "
                    f"recipe; write mechanisms: null to remove all."
                )
            values = merged(values, change)
        return parse(values, where)

    @property
    def identity(self) -> str:
        """A version and the SHA-256 of what decides the result. Runs of equal identity are the same run.

        Fields at their defaults do not enter it, nor do names, reporting and where a previous stage's checkpoint is.
        """
        aside: dict[str, Any] = dict.fromkeys(("name", "title", "reporting", "compare"), True)
        aside["training"] = {"timeout_minutes"}
        if isinstance(self.data, ImageSettings):
            aside["data"] = {"workers"}
        if self.start is not None and self.start.previous is not None:
            aside["start"] = {"checkpoint"}
        content = self.model_dump(mode="json", exclude=aside, exclude_defaults=True)
        content["data"]["kind"] = self.data.kind
        # Keys are sorted, but mechanisms apply in order, and the order of a mixture's sources decides which rows are
        # drawn.
        for section, name in (("model", "mechanisms"), ("data", "source")):
            if isinstance(content.get(section, {}).get(name), dict):
                content[section][name] = list(content[section][name].items())
        content = {name: value for name, value in content.items() if value}
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return f"{IDENTITY_VERSION}:{hashlib.sha256(text.encode()).hexdigest()}"


def _checked_config(make: Callable[..., HeadwaterConfig], fields: dict[str, Any]) -> HeadwaterConfig:
    try:
        config = make(**fields)
        plan_layers(config)  # or a run would end after others of its comparison have been trained
    except (HeadwaterError, StrictDataclassError) as error:
        raise HeadwaterError(f"model: {sentence(error)}") from error
    return config


def changed_config(config: HeadwaterConfig, change: Change) -> HeadwaterConfig:
    """The config of a changed model. Raises `HeadwaterError` as the change does."""
    if change.grow is not None:
        return grown_config(config, **change.grow.model_dump())
    if change.finish_conversion:
        return finished_config(config)
    if (goal := change.convert) is not None:
        made = blended_config(config, goal.mechanisms, goal.num_key_value_heads)
        check_conversion(made)
        return made if goal.anneal else finished_config(made)
    return config


def _check_one_metric(recipes: Sequence[Recipe], why: str) -> None:
    """Raise `HeadwaterError` if recipes whose results belong together use different metrics."""
    if len({recipe.unit for recipe in recipes}) > 1:
        raise HeadwaterError(f"{why} with data of one sort; use either images or text for all.")
    data = [recipe.data for recipe in recipes if isinstance(recipe.data, LanguageSettings)]
    if len({(one.metric, *sorted(one.held_out_domains or ())) for one in data}) > 1:
        raise HeadwaterError(
            f"{why} by one metric over the same domains; set the same data.metric and the same names in "
            f"data.held_out_domains for all."
        )


def _with_mechanisms(values: dict[str, Any]) -> dict[str, Any]:
    """The same values of a recipe, with a list of mechanisms as a mapping."""
    model = values.get("model")
    if not isinstance(model, dict) or "mechanisms" not in model:
        return values
    return values | {"model": model | {"mechanisms": as_mapping(model["mechanisms"])}}


# Allowed values of `model.base`.
BASES = ("llama", "gpt2", "vit", *PRESETS)
# Allowed fields of `model:`: those headwater adds to a Hugging Face config, without the derived ones.
MODEL_FIELDS = {"base"} | {
    field.name for field in dataclasses.fields(HeadwaterConfig) if field.name in HeadwaterConfig.__annotations__
} - {"layer_types", "materialise", "initializer_seed", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id"}
IMAGE_FIELDS = {"base", "num_labels", *HeadwaterVisionConfig.field_names()} - {"layer_types", "initializer_seed"}


def find_recipe(argument: str | Path) -> Path:
    """The path of a recipe: a file, or one of `shipped_recipes` by its name, or by a unique last part of it.

    Raises `HeadwaterError` if there is neither.
    """
    path = local(argument)
    if path.is_file():
        return path
    known = shipped_recipes()
    name = path.as_posix().removeprefix("recipes/").removesuffix(".yaml")
    if name in known:
        return known[name]
    alike = [one for one in known if one.rpartition("/")[2] == name]
    if len(alike) == 1:
        return known[alike[0]]
    if path.exists():
        return path  # a folder or a device, for which reading raises an error
    if alike:
        raise HeadwaterError(f"Several recipes are named {name!r}; choose one of: {', '.join(alike)}.")
    guess = nearest(name, [*known, *(one.rpartition("/")[2] for one in known)])
    what = f"There is no recipe {shown(str(argument))}, neither a file nor a shipped one"
    raise HeadwaterError(f"{what}; {guess if len(guess) < 80 else '`headwater list recipes` lists the shipped ones.'}")


# As it was written, its key, its value.
Override = tuple[str, list[str], Any]


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe that the user names, whose outside names are trusted from then on.

    overrides: "dotted.key=value"; values are YAML. Raises `HeadwaterError`.
    """
    values = plain(read_text(path, "recipe"), repr(str(path)))
    if not isinstance(values, dict):
        raise HeadwaterError(f"{str(path)!r}: a recipe is a mapping of sections (data, model, training, …).")
    trust_names_in(values)
    return changed_recipe(values, overrides, str(path))


def read_recipe(recipe: Recipe | Mapping[str, Any] | str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from a mapping, or from a file or a shipped recipe by its name. overrides: "dotted.key=value".

    Raises `HeadwaterError`.
    """
    if isinstance(recipe, str | Path):
        return load_recipe(find_recipe(recipe), overrides)
    if isinstance(recipe, Recipe):
        return changed_recipe(recipe.model_dump(mode="json"), overrides, "the recipe") if overrides else recipe
    if not isinstance(recipe, Mapping):
        raise HeadwaterError(f"A recipe is a dict, a file's path or a shipped recipe's name, not {shown(recipe)}.")
    trust_names_in(recipe)
    return changed_recipe(copy.deepcopy(dict(recipe)), overrides, "the recipe")


def changed_recipe(values: dict[str, Any], overrides: Sequence[str], where: str) -> Recipe:
    """A recipe from plain values, which may be a file's and are changed, and the user's overrides."""
    of_stages: list[Override] = []
    others: list[Override] = []
    for text in overrides:
        key, value = override(text)
        (of_stages if key[0] == "stages" and len(key) > 1 else others).append((text, key, value))
        trust_names_in([key, value])
    values = overridden(values, others)
    for number, changes in _by_stage(values.get("stages"), of_stages).items():
        values["stages"][number] = overridden(values["stages"][number], changes)
    return parse(values, where)


def _by_stage(stages: Any, overrides: list[Override]) -> dict[int, list[Override]]:
    """Overrides "stages.NAME.…=value" by the stage's number, for its name or number. Raises `HeadwaterError`."""
    found: dict[int, list[Override]] = {}
    # A stage's name may have dots itself.
    stages = stages if isinstance(stages, list) else []
    names = [str(one.get("name")) if isinstance(one, dict) else "" for one in stages]
    known = [*((name, i) for i, name in enumerate(names) if name), *((str(i), i) for i in range(len(names)))]
    for text, key, value in overrides:
        rest = ".".join(key[1:])
        for name, number in known:
            if rest.startswith(f"{name}."):
                found.setdefault(number, []).append((text, rest.removeprefix(f"{name}.").split("."), value))
                break
        else:
            raise HeadwaterError(
                f"The override {shown(text)} does not fit: "
                f"{'there is no such stage; ' + nearest(key[1], names) if names else 'the recipe has no stages.'}"
            )
    return found


def values_of(overrides: Sequence[str]) -> dict[str, Any]:
    """The plain values of the user's "key=value" overrides, e.g. of fields of a model. Raises `HeadwaterError`."""
    values = overridden({}, [(text, *override(text)) for text in overrides])
    trust_names_in(values)
    return values


def parse(values: Any, where: str) -> Recipe:
    """Check plain values, which may be a file's, against the fields of a recipe.

    Raises `HeadwaterError` for the first error, and for outside names that the user does not trust.
    """
    if not isinstance(values, dict):
        raise HeadwaterError(f"{where}: a recipe is a mapping of sections (data, model, training, …).")
    try:
        recipe = Recipe.model_validate(values)
    except ValidationError as error:
        if (refused := untrusted_in(error)) is not None:
            raise NotTrusted(f"{where}: {refused}") from error
        raise HeadwaterError(f"{where}: {_sentence(error)}") from error
    names = [stage.name for stage in recipe.stages]
    if len(set(names)) < len(names) or "start" in names:
        raise HeadwaterError(f"{where}: stages need different names, other than 'start', not {names}.")
    recipe.check_stages()
    if recipe.compare is not None:
        seed, sizes = recipe.compare.seeds[0], recipe.compare.sizes or [None]
        trials = [recipe.arm(name, seed, size) for name in recipe.compare.arms for size in sizes]
        _check_one_metric(trials, f"{where}: arms are compared")
    return recipe


def untrusted_in(error: ValidationError) -> NotTrusted | None:
    """The refusal of an outside name among pydantic's errors, if there is one."""
    causes = (detail.get("ctx", {}).get("error") for detail in error.errors())
    return next((cause for cause in causes if isinstance(cause, NotTrusted)), None)


def _sentence(error: ValidationError, section: Any = None, *where: str) -> str:
    """A message for the first of pydantic's errors, with the field's full name and the nearest known one.

    section: what was read, default: a recipe; where: its place in the recipe.
    """
    first = error.errors()[0]
    *path, last = [str(part) for part in first["loc"]] or [""]
    section = section or Recipe
    names = list(where)
    for part in path:
        if part.isdigit():  # in a list, whose element's type `_annotation` gives
            names.append(part)
        else:
            section = _annotation(section, part)
            names.append(part)
    field = ".".join([*names, last])
    if first["type"] == "extra_forbidden":
        known = getattr(section, "model_fields", {})
        return f"{'.'.join(names) or 'the recipe'} has no field {last!r}; {nearest(last, known)}"
    if first["type"] == "missing":
        return f"the field {field!r} is missing."
    if first["type"] == "unusable":
        return f"{'.'.join(filter(None, [field, *first['ctx']['path']]))}: {first['msg']}"
    if first["type"] == "value_error":
        return first["msg"].removeprefix("Value error, ")
    return f"{field}: {first['msg'][0].lower()}{first['msg'][1:]}, not {shown(first['input'])}."


def _annotation(section: Any, name: str) -> Any:
    """The type of a section's field, without "or None"."""
    field = getattr(section, "model_fields", {}).get(name)
    if field is None:
        return None
    members = [member for member in get_args(field.annotation) if member is not type(None)]
    return members[0] if len(members) == 1 and isinstance(members[0], type) else field.annotation
