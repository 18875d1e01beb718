"""Settings of recipes that torchtitan's trainer does not follow, one sentence each."""

from pydantic import BaseModel

from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.capabilities import ActsInTraining
from headwater.plugins.mechanisms import MECHANISMS, resolve
from headwater.util.errors import HeadwaterError
from headwater.util.precision import Precision
from headwater_lab.recipe.recipe import Recipe

# Parts of a recipe that `config_registry.of_recipe` reads. A recipe with any other is refused.
SECTIONS = ("name", "title", "seed", "model", "data", "training", "reporting")
# Settings that it passes on, whatever their value; torchrun has its own devices and nodes. Any other setting is refused
# unless it has its default or a value of CHOICES, so that a new one is not ignored.
FOLLOWED = {
    "training": (
        *("steps", "batch_size", "gradient_accumulation_steps", "learning_rate", "scalar_learning_rate_multiplier"),
        *("warmup_steps", "min_learning_rate_ratio", "betas", "epsilon", "weight_decay", "weight_decay_on"),
        *("max_grad_norm", "attn_implementation", "gradient_checkpointing"),
        *("threads", "devices", "nodes", "timeout_minutes"),
    ),
    "reporting": ("log_every", "save_every", "keep_checkpoints", "tensorboard", "wandb"),
}
# Settings that it passes on with some values only, next to the default. FSDP2, which always runs there, casts the
# weights: bf16-mixed is bf16-stream.
CHOICES = {
    "schedule": ("constant",),
    "precision": (Precision.BF16_MIXED, Precision.BF16_STREAM, Precision.BF16),
    "compile": (True, False),
    "device": ("cuda",),
    "strategy": ("fsdp",),
}


def check_recipe(recipe: Recipe) -> None:
    """Raise `HeadwaterError` for settings that torchtitan's trainer would silently ignore."""
    for section in type(recipe).model_fields:
        if section not in SECTIONS and getattr(recipe, section):
            raise HeadwaterError(
                f"torchtitan's trainer trains one model from scratch, and this recipe has {section}; remove the "
                "section, or use `headwater train` or `headwater compare`."
            )
    for section, followed in FOLLOWED.items():
        _check_settings(section, getattr(recipe, section), followed)


def _check_settings(section: str, settings: BaseModel, followed: tuple[str, ...]) -> None:
    """Raise `HeadwaterError` for the first setting of a section that is not followed and not at its default."""
    for name, field in type(settings).model_fields.items():
        value, default = getattr(settings, name), field.get_default(call_default_factory=True)
        if name not in followed and value not in (default, *CHOICES.get(name, ())):
            raise HeadwaterError(
                f"torchtitan's trainer does not support {section}.{name}={value}; leave it out, or use "
                "`headwater train`."
            )


def check_hooks(config: HeadwaterConfig) -> None:
    """Raise `HeadwaterError` for an external mechanism with a hook per step, which torchtitan's trainer never calls."""
    for name in config.mechanisms:
        if name not in MECHANISMS.built_in and isinstance(resolve(name), ActsInTraining):
            raise HeadwaterError(
                f"torchtitan's trainer does not call prepare_step, which {name!r} has; use `headwater train`."
            )
