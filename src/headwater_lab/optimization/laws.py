"""Laws that set batch, learning rate, warm-up and decay from a model's size or its training tokens.

N: parameters without embeddings. T: training tokens. W: width of the model. B: tokens of a step.
"""

from typing import NamedTuple


class Hyperparameters(NamedTuple):
    """The settings of a law. batch, warmup: tokens. decay_fraction: share of all steps."""

    batch: float
    learning_rate: float
    warmup: float
    decay_fraction: float
    weight_decay: float


def follow_olmo(parameters: int, width: int, tokens: float, base: Hyperparameters) -> Hyperparameters:
    """OLMo's ladder: B = 327,680·(N/108M)^(2/3), rate = 0.00235·(N/108M)^(-1/3), a warm-up of N tokens, decay 10 %.

    Source: wsds_chinchilla_run_configurator.py in allenai/OLMo-core at fa6c501. There, β2 is 0.99 below 524,288 tokens
    a step; here it is the recipe's.
    """
    size = parameters / 108e6
    return Hyperparameters(327_680 * size ** (2 / 3), 0.00235 * size ** (-1 / 3), parameters, 0.1, base.weight_decay)


def follow_marin(parameters: int, width: int, tokens: float, base: Hyperparameters) -> Hyperparameters:
    """marin's Adam: rate = 0.02547·T^-0.2813·W^-0.3678·√B for the recipe's B, warm-up 10 %, decay 20 %.

    marin (April 2026) trains embeddings, norms and biases by it, and matrices with another optimizer.
    """
    # 0.02547 = 1.63 / √4096: fitted with B in rows of 4,096 tokens.
    rate = 1.63 / 64 * tokens**-0.2813 * width**-0.3678 * base.batch**0.5
    return Hyperparameters(base.batch, rate, 0.1 * tokens, 0.2, base.weight_decay)


def follow_nanochat(parameters: int, width: int, tokens: float, base: Hyperparameters) -> Hyperparameters:
    """nanochat: B = 524,288·(T/1.156G)^0.383, the recipe's rate·√(B/524,288) and weight decay·(768/W)², decay 50 %.

    The reference is its 12 layers at 10.5 tokens a parameter, for which the recipe's rate and weight decay hold. The
    warm-up is the recipe's, in tokens. Source: karpathy/nanochat at f41dd3c (February 2026). Later versions decay for
    longer.
    """
    batch = 2**19 * (tokens / 1.156e9) ** 0.383
    rate = base.learning_rate * (batch / 2**19) ** 0.5
    return Hyperparameters(batch, rate, base.warmup, 0.5, base.weight_decay * (768 / width) ** 2)


LAWS = {"olmo": follow_olmo, "marin": follow_marin, "nanochat": follow_nanochat}
# The fields of `training:` in a recipe that a law reads; it replaces the others of its fields.
READ_FIELDS = {
    "olmo": ("weight_decay",),
    "marin": ("batch_size", "weight_decay"),
    "nanochat": ("learning_rate", "warmup_steps", "batch_size", "weight_decay"),
}
# Laws by which the constant rate of a run depends on its tokens, so that runs of several lengths share no trunk.
OF_TOKENS = ("marin", "nanochat")
