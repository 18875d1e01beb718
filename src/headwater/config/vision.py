"""`HeadwaterVisionConfig`: the config of image models, with the same blocks and mechanisms as the language model."""

from collections.abc import Sequence
from typing import Any, Literal

from huggingface_hub.dataclasses import strict

from headwater.config.text import HeadwaterConfig
from headwater.plugins.mechanisms import resolve
from headwater.util.errors import HeadwaterError, shown

# Fields that mean nothing for images, with the values that disable them.
LANGUAGE: dict[str, Any] = {
    "vocab_size": None,
    "max_position_embeddings": None,
    "sliding_window": None,
    "sliding_layers": None,
    "sliding_fields": None,
    "embedding_norm": False,
    "embedding_scale": 1.0,
    "tie_word_embeddings": False,
    "logit_scale": 1.0,
    "logit_softcap": None,
    "materialise": False,
    "use_cache": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


# This file does not postpone annotations: `@strict` checks types, not their names.
@strict
class HeadwaterVisionConfig(HeadwaterConfig):
    """Configuration of a headwater image model. Defaults: ViT-B/16. What differs from `HeadwaterConfig`:

    Images
        image_size: height and width in pixels, one number for both or [height, width]. The trained model also takes
            images of other sizes.
        patch_size: the same of a patch; image_size must be divisible by it.
        num_channels: color channels.
        num_labels, id2label, label2id: the classes, as in transformers.

    Parts
        pooling: what the classifier reads after the final norm: "token", the class token, which comes before the
            patches; or "mean", the mean of the patches. Then there is no class token.
        register_tokens: learned tokens between the class token and the patches that no classifier reads, such as
            DeiT's distillation token; or registers (arXiv 2309.16588). Default 0.
        position: "learned", one vector for each token; "sincos", fixed sines and cosines of the
            column and the row; "rope", rotary with half of a head's channel pairs rotated by the row and half by the
            column (`rope_parameters` with rope_theta, default 100, and partial_rotary_factor); or "none". Only
            learned positions are also given to the tokens before the patches.
        patch_bias: bias of the patch embedding.
        drop_path: stochastic depth (arXiv 1603.09382): the probability with which the last layer's attention and its
            feed-forward are each left out for an image in training; it rises linearly from 0 in the first layer.
        stop_at_rows: mechanisms that look at previous tokens, such as kv_shift, see only those in the same row
            of patches. By default they see all earlier patches in raster order. They never look at tokens
            before the patches.

    Initialization
        embedding_range: standard deviation of the class token, registers and learned positions. The patch embedding
            is drawn with 1/√inputs.

    Raises `HeadwaterError` (or transformers' strict-dataclass error around it) with one sentence that says what
    to change, also for a field that only language models have.
    """

    model_type = "headwater_vision"
    # RoPE-ViT's choice (arXiv 2403.13298): rows and columns count to a few dozen, not to thousands.
    default_theta = 100.0
    is_causal = False
    unsaved = frozenset({"layer_types", *LANGUAGE})

    image_size: int | list[int] | tuple[int, ...] = 224
    patch_size: int | list[int] | tuple[int, ...] = 16
    num_channels: int = 3
    pooling: Literal["token", "mean"] = "token"
    register_tokens: int = 0
    position: Literal["learned", "sincos", "rope", "none"] = "learned"  # type: ignore[assignment]
    patch_bias: bool = True
    drop_path: float | int = 0.0
    stop_at_rows: bool = False

    feed_forward: Literal["gated", "plain"] = "plain"
    hidden_act: str = "gelu"
    norm: Literal["rms_norm", "layer_norm"] = "layer_norm"
    norm_eps: float | int = 1e-6
    qkv_bias: bool = True
    output_bias: bool = True
    mlp_bias: bool = True

    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    use_cache: bool = False

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """List the fields as `HeadwaterConfig.field_names` does, without those that only language models have."""
        names = dict.fromkeys((*HeadwaterVisionConfig.__annotations__, *super().field_names()))
        return tuple(name for name in names if name not in LANGUAGE)

    def complete_fields(self) -> None:
        """Complete and check the fields as `HeadwaterConfig.complete_fields` does."""
        self._check_images()
        super().complete_fields()
        for name in self.mechanisms:
            if resolve(name).needs_input_ids:
                raise HeadwaterError(f"Mechanism {name!r} reads token ids, and images have none; leave it out.")

    def _check_images(self) -> None:
        for name, neutral in LANGUAGE.items():
            if getattr(self, name) != neutral:
                raise HeadwaterError(f"{name} is a field of language models; leave it out of an image model's config.")
        for name in ("image_size", "patch_size"):
            sizes = getattr(self, name)
            if isinstance(sizes, tuple):  # as read from a file
                setattr(self, name, sizes := list(sizes))
            if isinstance(sizes, list) and len(sizes) != 2:
                raise HeadwaterError(f"{name} must be one number, or [height, width], not {shown(sizes)}.")
            if not all(1 <= size < 2**20 for size in _as_pair(sizes)):
                raise HeadwaterError(f"{name} must be at least 1 pixel and below a million, not {shown(sizes)}.")
        if not 1 <= self.num_channels < 2**20:
            raise HeadwaterError(f"num_channels must be at least 1, not {shown(self.num_channels)}.")
        if not 0 <= self.register_tokens < 2**20:
            raise HeadwaterError(f"register_tokens must be zero or more, not {shown(self.register_tokens)}.")
        if not self.id2label:
            raise HeadwaterError("num_labels must be at least 1, the number of classes.")
        self.grid_of(*self.image_shape)

    def validate_architecture(self) -> None:
        super().validate_architecture()
        if self.position == "sincos" and self.hidden_size % 4:
            raise HeadwaterError(
                "position 'sincos' gives a quarter of the channels to each sine and cosine of rows and columns, so "
                f"hidden_size must be divisible by 4, not {self.hidden_size}."
            )

    def check_rope(self) -> None:
        """Check RoPE as `HeadwaterConfig.check_rope` does. Images support fewer kinds."""
        super().check_rope()
        if self.rope_parameters["rope_type"] != "default":
            raise HeadwaterError(
                f"rope_type {self.rope_parameters['rope_type']!r} stretches the positions of text; images support "
                "only 'default'."
            )
        if self.rotary_dim % 4:
            raise HeadwaterError(
                "RoPE on images rotates half of the channel pairs by the row and half by the column, but "
                f"a head has {self.rotary_dim} rotated channels; make that a multiple of 4."
            )

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width of an image in pixels."""
        return _as_pair(self.image_size)

    @property
    def patch_shape(self) -> tuple[int, int]:
        """Height and width of a patch in pixels."""
        return _as_pair(self.patch_size)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches in an image of `image_size`."""
        return self.grid_of(*self.image_shape)

    @property
    def first_patch(self) -> int:
        """Number of tokens before the patches: the class token, if there is one, and the registers."""
        return (self.pooling == "token") + self.register_tokens

    @property
    def tokens(self) -> int:
        """Tokens of an image of `image_size`: its patches, and the tokens before them."""
        rows, columns = self.grid
        return self.first_patch + rows * columns

    def grid_of(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches in an image. Raises `HeadwaterError` if patches do not cover it exactly."""
        high, wide = self.patch_shape
        if height < high or width < wide:
            raise HeadwaterError(
                f"An image of {height} x {width} pixels is smaller than a patch of {high} x {wide}; give larger "
                "images, or train with a smaller patch_size."
            )
        if height % high or width % wide:
            raise HeadwaterError(
                f"An image of {height} x {width} pixels is not divisible into patches of {high} x {wide}; resize or "
                f"crop it to {height // high * high} x {width // wide * wide}, or change patch_size."
            )
        return height // high, width // wide


def _as_pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])
