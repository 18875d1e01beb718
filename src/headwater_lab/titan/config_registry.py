"""Configs for `--module headwater_lab.titan --config NAME`: NAME is a recipe (a file or a name) or a preset."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.config.configs import CommConfig, DebugConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.trainer import Trainer

from headwater.config.presets import PRESETS, preset
from headwater.config.text import HeadwaterConfig
from headwater.integrations.torchtitan import spec
from headwater.integrations.torchtitan.titan_checkpoints import theirs_of
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater_lab.recipe.recipe import Recipe
from headwater_lab.recipe.recipe_files import find_recipe, load_recipe
from headwater_lab.titan.recipe_limits import check_hooks, check_recipe
from headwater_lab.titan.titan_data import NoTokenizer, RecipeLoader
from headwater_lab.training.attention_choice import set_attention
from headwater_lab.training.optimizers import parameter_groups
from headwater_lab.util.machine import set_threads

# torchtitan 0.3 needs this function, which has a public name only in PyTorch after 2.13.
if not hasattr(dist, "set_timeout"):
    dist.set_timeout = dist.distributed_c10d._set_pg_timeout  # type: ignore[attr-defined]


def __getattr__(name: str) -> Callable[[], Trainer.Config]:
    """Find the trainer's config for a preset or a recipe, as a function, which torchtitan looks up."""
    if name.startswith("_"):
        raise AttributeError(name)
    return partial(of_preset, name) if name in PRESETS else partial(of_recipe, name)


def of_preset(name: str) -> Trainer.Config:
    """Configure a preset's model, in bf16 with fp32 weights, and torchtitan's own data and defaults for the rest."""
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader

    config = preset(name)
    return Trainer.Config(
        model_spec=spec(config, name),
        dump_folder=f"runs/titan-{name}",
        training=TrainingConfig(seq_len=config.max_position_embeddings, disable_cuda_graphs=True),
        parallelism=choose_parallelism(),
        optimizer=default_adamw(),
        loss=CrossEntropyLoss.Config(),
        dataloader=HuggingFaceTextDataLoader.Config(dataset="c4"),
        activation_checkpoint=None,
    )


def of_recipe(name: str) -> Trainer.Config:
    """Configure all that `FOLLOWED` and `CHOICES` list. Sets the CPU threads of this process.

    Raises `HeadwaterError` if the recipe cannot be read, or needs a feature that torchtitan's trainer lacks.
    """
    recipe = load_recipe(find_recipe(name))
    check_recipe(recipe)
    training, reporting = recipe.training, recipe.reporting
    data = recipe.data.build()
    config = recipe.config_for(data)
    check_hooks(config)
    set_process(recipe)
    batch_size = training.batch_size
    # torchtitan adds up the gradients of as many forward passes as the global batch takes.
    local = max(1, batch_size // int(os.environ.get("WORLD_SIZE", "1")))
    return Trainer.Config(
        model_spec=spec(with_attention(config, training.attn_implementation), recipe.name),
        hf_assets_path="",
        dump_folder=f"runs/titan-{recipe.name}",
        tokenizer=NoTokenizer.Config(),
        dataloader=RecipeLoader.Config(recipe=name),
        training=TrainingConfig(
            local_batch_size=local,
            global_batch_size=batch_size * training.gradient_accumulation_steps,
            seq_len=data.context,
            max_norm=float("inf") if training.max_grad_norm is None else training.max_grad_norm,
            steps=training.steps,
            disable_cuda_graphs=True,
            dtype=str(training.precision.weights).removeprefix("torch."),
            mixed_precision_param=str(training.precision.compute).removeprefix("torch."),
        ),
        parallelism=choose_parallelism(),
        optimizer=make_optimizer(recipe, config),
        lr_scheduler=LRSchedulersContainer.Config(
            warmup_steps=training.warmup_steps,
            decay_ratio=0.0 if training.schedule == "constant" else None,
            decay_type="cosine",
            min_lr_factor=training.min_learning_rate_ratio,
        ),
        loss=CrossEntropyLoss.Config(),
        compile=CompileConfig(enable=torch.cuda.is_available() if training.compile is None else training.compile),
        activation_checkpoint=FullAC.Config() if training.gradient_checkpointing else None,
        comm=CommConfig(
            init_timeout_seconds=60 * training.timeout_minutes, train_timeout_seconds=60 * training.timeout_minutes
        ),
        metrics=MetricsProcessor.Config(
            log_freq=reporting.log_every,
            enable_tensorboard=reporting.tensorboard,
            enable_wandb=reporting.wandb is not None,
        ),
        checkpoint=CheckpointManager.Config(
            enable=True,
            interval=reporting.save_every or training.steps,
            keep_latest_k=max(2, reporting.keep_checkpoints),
        ),
        debug=DebugConfig(seed=recipe.seed),
    )


def set_process(recipe: Recipe) -> None:
    """Set in this process what torchtitan's config has no fields for: CPU threads, the project of Weights & Biases."""
    if recipe.training.threads is not None:
        set_threads(recipe.training.threads)
    if recipe.reporting.wandb is not None:
        os.environ["WANDB_PROJECT"] = recipe.reporting.wandb


def choose_parallelism() -> ParallelismConfig:
    """Choose the parallelism settings that headwater models need; the command line sets the degrees."""
    return ParallelismConfig(
        spmd_backend="partial_dtensor", enable_sequence_parallel=False, context_parallel_load_balancer=None
    )


def with_attention(config: HeadwaterConfig, name: str | None) -> HeadwaterConfig:
    """Set the attention kernel of a config. Raises `HeadwaterError` if the model does not work with it."""
    if name is not None:
        with torch.device("meta"):
            model = HeadwaterForCausalLM(config)
        set_attention(model, name)
        return model.config
    return config


def make_optimizer(recipe: Recipe, config: HeadwaterConfig) -> OptimizersContainer.Config:
    """Configure AdamW with the groups of `headwater train`: weight decay and the scalars' rate."""
    training = recipe.training
    with torch.device("meta"):
        model = HeadwaterForCausalLM(config)
    name_of = {parameter: name for name, parameter in model.named_parameters()}
    groups: dict[tuple[float, float], list[str]] = {}
    for group in parameter_groups(model, training.weight_decay, training.weight_decay_on):
        rate = training.learning_rate * (
            training.scalar_learning_rate_multiplier if group["name"] == "scalars" else 1.0
        )
        groups.setdefault((rate, group["weight_decay"]), []).extend(name_of[parameter] for parameter in group["params"])
    return OptimizersContainer.Config(
        implementation="fused" if torch.cuda.is_available() else "for-loop",
        param_groups=[
            ParamGroupConfig(
                pattern=match_names(names),
                optimizer_name="AdamW",
                optimizer_kwargs=dict(lr=rate, betas=training.betas, eps=training.epsilon, weight_decay=decay),
            )
            for (rate, decay), names in groups.items()
        ],
    )


def match_names(names: list[str]) -> str:
    """Write a regular expression for exactly these parameters, as torchtitan names them, checkpointed or not."""
    escaped = {re.escape(theirs_of(name)) for name in names}
    patterns = {re.sub(r"^(layers\\\.\d+\\\.)", r"\1(?:_checkpoint_wrapped_module\\.)?", name) for name in escaped}
    return f"^(?:{'|'.join(sorted(patterns))})$"
