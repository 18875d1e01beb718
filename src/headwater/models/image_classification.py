"""`HeadwaterImageModel` and `HeadwaterForImageClassification`: the same stack of blocks with images in front.

Attention runs in both directions: the config is not causal, and there is no mask.
"""

# No postponed annotations in this file: other packages read the annotations of `forward` at run time.
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForImageClassification
from transformers.modeling_outputs import BaseModelOutputWithPooling, ImageClassifierOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES, MODEL_MAPPING_NAMES
from transformers.utils import TransformersKwargs, can_return_tuple
from transformers.utils.output_capturing import capture_outputs

from headwater.config.vision import HeadwaterVisionConfig
from headwater.models.inputs import ModelInputs
from headwater.models.pretrained import HeadwaterPreTrainedModel, shared_modules
from headwater.models.stack import last_readers, run_blocks
from headwater.nn.block import Block
from headwater.nn.lookback import LookbackLimits, find_reach
from headwater.nn.loss import classification_loss
from headwater.nn.norm import make_norm
from headwater.nn.patches import cut_patches, raster_positions, resize_positions, rotary_angles, sincos_positions
from headwater.nn.stages import run_shared
from headwater.util.errors import HeadwaterError
from headwater.util.layout import IS_EXPORTED


class HeadwaterImagePreTrainedModel(HeadwaterPreTrainedModel):
    """Base class of both image models."""

    config: HeadwaterVisionConfig
    config_class = HeadwaterVisionConfig
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    _input_embed_layer = "embed_patches"
    fan_in_layers = ("embed_patches",)  # maps normalized pixels to size one


class HeadwaterImageModel(HeadwaterImagePreTrainedModel):
    """Patch embedding, class token and positions, the stack of blocks, and the final norm."""

    def __init__(self, config: HeadwaterVisionConfig) -> None:
        super().__init__(config)
        plans = self.plan_layers()
        high, wide = config.patch_shape
        width = config.hidden_size
        self.embed_patches = nn.Linear(config.num_channels * high * wide, width, bias=config.patch_bias)
        self.class_token = nn.Embedding(1, width) if config.pooling == "token" else None
        self.registers = nn.Embedding(config.register_tokens, width) if config.register_tokens else None
        self.embed_positions = nn.Embedding(config.tokens, width) if config.position == "learned" else None
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.layers = nn.ModuleList(Block(config, plan) for plan in plans)
        self.last_reader = last_readers(plans)
        self.mechanisms = shared_modules(config)
        self.lookback = LookbackLimits.from_plans(plans)
        self.norm = make_norm(config, final=True)
        self.gradient_checkpointing = False
        self.post_init()

    @capture_outputs
    def forward(
        self,
        pixel_values: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        **kwargs: Unpack[TransformersKwargs],  # type: ignore[misc]
    ) -> BaseModelOutputWithPooling:
        """Run the model: the tokens after the final norm, [B, T, D], and their pooled output, [B, D].

        pixel_values: [B, C, H, W], normalized.
        interpolate_pos_encoding: learned positions are interpolated bicubically if the images are not of
            `config.image_size`. The other positions do not need it: they are computed for any size.
        Raises `HeadwaterError` for images that the model does not take.
        """
        grid = self.grid_of(pixel_values)
        if kwargs.pop("attention_mask", None) is not None:
            raise HeadwaterError("An image model takes no attention_mask: every patch sees all others; leave it out.")
        x = self.embed_images(pixel_values, grid, interpolate_pos_encoding)
        reach, angles = self.prepare_reach(grid, x.device), self.compute_angles(x, grid)
        inputs = ModelInputs({False: None}, reach=reach, position_embeddings=angles, kwargs=kwargs)  # None: no mask
        shared = run_shared(self.mechanisms.named_mechanisms())
        x = self.norm(run_blocks(self.layers, self.last_reader, self.dropout(x), shared, inputs.arguments()))
        pooled = x[:, self.config.first_patch :].mean(1) if self.class_token is None else x[:, 0]
        return BaseModelOutputWithPooling(last_hidden_state=x, pooler_output=pooled)

    def grid_of(self, images: Tensor | None) -> tuple[int, int]:
        """Count the rows and columns of patches. Raises `HeadwaterError` for images that the model does not take."""
        channels = self.config.num_channels
        if images is None or images.ndim != 4 or images.shape[1] != channels or not images.shape[0]:
            shape = "none" if images is None else list(images.shape)
            raise HeadwaterError(
                f"pixel_values must be [1 or more images, {channels} channels, height, width], not {shape}."
            )
        if not images.is_floating_point():
            raise HeadwaterError(
                f"pixel_values must be normalized numbers, not {images.dtype}; prepare images with an image processor."
            )
        return self.config.grid_of(images.shape[2], images.shape[3])

    def embed_images(self, images: Tensor, grid: tuple[int, int], interpolate: bool) -> Tensor:
        """Compute the input of the first block: class token, registers and patches, with positions, [B, T, D]."""
        x = self.embed_patches(cut_patches(images.to(self.embed_patches.weight.dtype), grid))
        prefixes = [table.weight for table in (self.class_token, self.registers) if table is not None]
        if prefixes:
            x = torch.cat([*(tokens.to(x.dtype).expand(x.shape[0], -1, -1) for tokens in prefixes), x], 1)
        return self.add_positions(x, grid, interpolate)

    def add_positions(self, x: Tensor, grid: tuple[int, int], interpolate: bool) -> Tensor:
        """Add position vectors to x [B, T, D]. Raises `HeadwaterError` for a size not trained on."""
        if self.config.position == "sincos":
            return x + nn.functional.pad(sincos_positions(grid, x.shape[-1], x), (0, 0, self.config.first_patch, 0))
        if self.embed_positions is None:
            return x
        trained = self.config.grid
        if grid != trained and not interpolate:
            raise HeadwaterError(
                f"These images have {grid[0]} x {grid[1]} patches, and the learned positions are for {trained[0]} x "
                f"{trained[1]}; resize the images, or pass interpolate_pos_encoding=True."
            )
        return x + resize_positions(self.embed_positions.weight, trained, grid).to(x.dtype)

    def compute_angles(self, x: Tensor, grid: tuple[int, int]) -> dict[bool, Any]:
        """Compute RoPE's angles, as `rotate` takes them, for the single kind of layer."""
        if self.config.position != "rope":
            return {}
        theta = self.config.rope_parameters["rope_theta"]
        return {False: rotary_angles(grid, self.config.first_patch, self.config.rotary_dim, theta, x)}

    def prepare_reach(self, grid: tuple[int, int], device: torch.device) -> Tensor | None:
        """Number of tokens that mechanisms may look back, [1, T]; None if none does."""
        limit = self.lookback.limit
        if not limit:
            return None
        positions = raster_positions(grid, self.config.first_patch, self.config.stop_at_rows, device)
        return find_reach(positions, None, limit=limit)


class HeadwaterForImageClassification(HeadwaterImagePreTrainedModel):
    """The image model with a linear classifier."""

    # The loss is a mean over images, which transformers' Trainer averages over accumulated batches itself.
    accepts_loss_kwargs = False

    def __init__(self, config: HeadwaterVisionConfig) -> None:
        super().__init__(config)
        self.model = HeadwaterImageModel(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        **kwargs: Unpack[TransformersKwargs],  # type: ignore[misc]
    ) -> ImageClassifierOutput:
        """Logits [B, classes] and, with labels, the mean cross-entropy in nats.

        labels: [B], numbers of classes; or [B, classes], the probability of each, as mixup, CutMix and label smoothing
            make them. Raises `HeadwaterError` for a label that is not a class.
        The other arguments are the same as for `HeadwaterImageModel`.
        """
        outputs: BaseModelOutputWithPooling = self.model(
            pixel_values, interpolate_pos_encoding=interpolate_pos_encoding, **kwargs
        )
        logits = self.classifier(outputs.pooler_output)
        return ImageClassifierOutput(
            loss=None if labels is None else classification_loss(logits, labels),
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


# Register the names as in causal_lm.py.
KIND = HeadwaterVisionConfig.model_type
MODEL_MAPPING_NAMES[KIND] = HeadwaterImageModel.__name__
MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES[KIND] = HeadwaterForImageClassification.__name__

if not IS_EXPORTED:
    AutoConfig.register(KIND, HeadwaterVisionConfig)
    AutoModel.register(HeadwaterVisionConfig, HeadwaterImageModel)
    AutoModelForImageClassification.register(HeadwaterVisionConfig, HeadwaterForImageClassification)
