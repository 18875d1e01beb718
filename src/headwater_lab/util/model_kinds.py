"""The model classes of configs."""

from typing import Literal

from headwater.config.text import HeadwaterConfig
from headwater.config.vision import HeadwaterVisionConfig
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.image_classification import HeadwaterForImageClassification

AnyModel = HeadwaterForCausalLM | HeadwaterForImageClassification
# Values of model_type in the config.json of headwater models.
MODEL_TYPES = HeadwaterConfig.model_type, HeadwaterVisionConfig.model_type


def is_of_images(config: HeadwaterConfig) -> bool:
    return isinstance(config, HeadwaterVisionConfig)


def model_class(config: HeadwaterConfig) -> type[AnyModel]:
    """Return the class of the model with its head."""
    return HeadwaterForImageClassification if is_of_images(config) else HeadwaterForCausalLM


def unit_of(config: HeadwaterConfig) -> Literal["tokens", "images"]:
    """Return the unit of a model's training: tokens or images."""
    return "images" if is_of_images(config) else "tokens"
