"""`HeadwaterConfig`: one Hugging Face config for Llama-like and GPT-2-like bases, and the mechanisms on top."""

import json
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, Self

from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from headwater.config import auto_map
from headwater.config.layers import MOST, MOST_ANYWHERE, cache_types, complete_sliding, layer_config
from headwater.config.options import complete_options
from headwater.config.rope import check_rope, complete_rope
from headwater.plugins.mechanisms import MECHANISMS, as_mapping, resolve
from headwater.util.errors import HeadwaterError, check_known, find_misspelt, find_unusable, sentence, shown
from headwater.util.layout import IS_EXPORTED

if not IS_EXPORTED:
    from headwater.plugins.trust import trust_names

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
)
# More key/value heads than any model has. Planning lists each one and would never finish with more.
_MOST_PLANNED = 2**17
# A list of names becomes a mapping when a config is created, so type checkers need not know about lists.
if TYPE_CHECKING:
    _Mechanisms = dict[Any, Any]
else:
    _Mechanisms = dict | list


# This file does not postpone annotations: `@strict` checks types, not their names.
@strict
class HeadwaterConfig(PreTrainedConfig):
    """Configuration of a headwater model. The defaults are Llama-like; `HeadwaterConfig.gpt2()` is GPT-2-like.

    Sizes
        vocab_size: number of tokens.
        hidden_size: width D of the residual stream.
        intermediate_size: width of the feed-forward; default 4·D, or 8/3·D rounded up to 64 if it is gated.
        num_hidden_layers: depth L.
        num_attention_heads: query heads H.
        num_key_value_heads: key/value heads K, a divisor of H (GQA); default H.
        head_dim: width d of a head; default D / H.
        max_position_embeddings: the model's context; with learned positions, the size of their table.

    Parts
        feed_forward: "gated" (`down(act(gate(x)) * up(x))`, SwiGLU with act = silu) or "plain" (`down(act(up(x)))`).
        hidden_act: any activation name of transformers.
        norm: "rms_norm" or "layer_norm"; `norm_eps` is the epsilon of both.
        norm_weight, norm_bias: whether norms have a weight, and LayerNorms a bias; False for both is the
            non-parametric LayerNorm.
        unit_offset_norm: RMSNorms multiply by 1 + weight, as in Gemma: half precision then rounds the distance from 1.
        final_norm_weight, final_norm_bias: the same for the norm after the last block; default as the others.
        output_norms: also norm the outputs of attention and the feed-forward before they are added, as in Gemma 2.
        embedding_norm: a norm of the embedding before the first block, as in nanochat.
        embedding_scale: factor on the embedding; "width" is √D, as in Gemma.
        position: "rope", "learned", "alibi" or "none".
        rope_parameters: as in transformers: {"rope_type", "rope_theta", "partial_rotary_factor", "factor", …}.
        parallel_residual: x + attention(norm1(x)) + feed_forward(norm2(x)), as in GPT-NeoX.
        first_residual: False removes the residual connection around the first layer's attention (with
            parallel_residual, around the first block): the value-residual paper's test of V_0 against V_1.
        qk_norm: a norm over each head's width on queries and keys, right after projection, as in Qwen3 (with
            `low_rank_kv`, on keys as they are made).
        attention_scale: factor on the scores; default 1/√d.
        attention_softcap: c in c·tanh(scores / c), before the mask, as in Gemma 2; default none. Eager attention only.
        qkv_bias, output_bias, mlp_bias: biases of the query/key/value, attention output and feed-forward layers.
        sliding_window: attend only to this many most recent tokens (2 or more), including the current one; default all.
        sliding_layers: the layers that have that window; default all. The other layers attend to everything.
        sliding_fields: fields with other values in `sliding_layers`: num_attention_heads, num_key_value_heads, head_dim
            or rope_parameters.
        tie_word_embeddings: the output head is the token embedding.
        logit_scale: factor on the logits; "fan_in" is 1/√D, MaxText's choice for a tied embedding initialized with
            N(0, 1).
        logit_softcap: c in c·tanh(logits / c); default none.
        embedding_dropout, attention_dropout, residual_dropout: probabilities, default 0.

    Initialization
        initializer_range: standard deviation of matrices and embeddings.
        embedding_range: standard deviation of the token and position embeddings. Default: what a mechanism needs
            (0.2 with Pattention; docs/fairness.md), else initializer_range, as for a stored config without it.
        linear_init: "normal" draws linear layers with initializer_range, "fan_in" with 1/√inputs, as in MaxText.
        scaled_residual_init: divide it by √(2·L) for the two layers that write to the residual stream, as in GPT-2.
        initializer_seed: every parameter is drawn from (this seed, its qualified name), so parts in common start equal.

    Mechanisms
        mechanisms: name -> options, in order of application, e.g.
            `{"kv_shift": {}, "value_residual": {"mode": "learnable"}}`; or a list of names. See
            `headwater.mechanisms`. Name an external one as "package.module:Class", or by its package's entry point
            (docs/extending.md). `headwater.plugins.trust` decides which of these are imported.

    Serving
        materialise: cache ordinary keys and values in each layer, for engines with their own (paged) cache; the same
            function without the smaller cache. Not with mechanisms that keep raw tokens.

    Raises `HeadwaterError` (or transformers' strict-dataclass error around it) with one sentence that says what
    to change.
    """

    model_type = "headwater"
    keys_to_ignore_at_inference = ["past_key_values", "cache"]
    # transformers may read `rope_theta` from any of these; a checkpoint always stores it in `rope_parameters`.
    default_theta = 10_000.0
    # Image models override these (vision.py): they are not causal, and may drop whole residual branches.
    is_causal = True
    drop_path = 0.0
    # Derived fields whose types plain transformers does not know.
    unsaved = frozenset({"layer_types"})

    vocab_size: int = 50304
    hidden_size: int = 768
    intermediate_size: int | None = None
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    max_position_embeddings: int = 2048

    feed_forward: Literal["gated", "plain"] = "gated"
    hidden_act: str = "silu"
    norm: Literal["rms_norm", "layer_norm"] = "rms_norm"
    norm_eps: float | int = 1e-5
    norm_weight: bool = True
    norm_bias: bool = True
    unit_offset_norm: bool = False
    final_norm_weight: bool | None = None
    final_norm_bias: bool | None = None
    output_norms: bool = False
    embedding_norm: bool = False
    embedding_scale: float | int | Literal["width"] = 1.0
    position: Literal["rope", "learned", "alibi", "none"] = "rope"
    rope_parameters: dict | None = None
    parallel_residual: bool = False
    first_residual: bool = True
    qk_norm: bool = False
    attention_scale: float | int | None = None
    attention_softcap: float | int | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    sliding_layers: list[int] | None = None
    sliding_fields: dict | None = None
    tie_word_embeddings: bool = False
    logit_scale: float | int | Literal["fan_in"] = 1.0
    logit_softcap: float | int | None = None
    embedding_dropout: float | int = 0.0
    attention_dropout: float | int = 0.0
    residual_dropout: float | int = 0.0

    initializer_range: float | int = 0.02
    embedding_range: float | int | None = None
    linear_init: Literal["normal", "fan_in"] = "normal"
    scaled_residual_init: bool = False
    initializer_seed: int = 0

    mechanisms: _Mechanisms | None = None

    materialise: bool = False

    # Derived, not saved: each layer's kind of cache, from which `DynamicCache(config=…)` and `generate` build caches.
    # Initially a kind that holds whatever mechanisms cache. The model then sets the kind that its plan needs.
    layer_types: list[str] | None = None

    use_cache: bool = True
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None

    # No field has an alias, and layers have no fields of their own (`layer_config` copies the config): the plain lookup
    # is enough. transformers' lookup takes a third of the time in which a small model is built.
    __getattribute__ = object.__getattribute__

    def __post_init__(self, **kwargs: Any) -> None:
        by_hand = "model_type" not in kwargs  # `to_dict` and config files include model_type
        if by_hand:
            self._check_names(kwargs)
            if self.position != "rope" and self.rope_parameters:
                raise HeadwaterError(
                    f"position {self.position!r} has no rope_parameters; leave them out, or set position to rope."
                )
        else:
            for name in as_mapping(self.mechanisms) or {}:
                if isinstance(name, str) and not MECHANISMS.is_built_in(name):
                    resolve(name)  # raises for unknown names, and for names that a file may not import
        kwargs.setdefault("auto_map", {})  # TRL reads it from every config whose class is not transformers' own
        super().__post_init__(**kwargs)
        self.complete_fields()
        if by_hand and self.embedding_range is None:  # files without it were written before this field existed
            ranges = (resolve(name).embedding_range for name in self.mechanisms)
            self.embedding_range = next((std for std in ranges if std is not None), None)

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """transformers' method. Raises `HeadwaterError` for the config of another kind of model."""
        content, unused = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        kind = content.get("model_type", cls.model_type)
        if kind != cls.model_type:
            raise HeadwaterError(
                f"{str(pretrained_model_name_or_path)!r} is a model of type {kind!r}, but {cls.__name__} describes "
                f"models of type {cls.model_type!r}; load it with transformers' AutoModelForCausalLM or another Auto "
                "class, or convert it with `headwater retrofit` first."
            )
        return content, unused

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """transformers' method. Names that headwater does not know are kept and saved again.

        trust: modules and names from outside that the file may name (`headwater.plugins.trust`), as in
        `from_pretrained(folder, trust=["package.module"])`.
        Raises `HeadwaterError` for a keyword that looks like a misspelt field.
        """
        trust = kwargs.pop("trust", None) or ()
        if not IS_EXPORTED:
            trust_names(trust)
        cls._check_kernels(config_dict)
        cls._check_names(name for name in kwargs if name not in config_dict and not hasattr(cls, name))
        return super().from_dict(config_dict | {"model_type": cls.model_type}, **kwargs)

    @classmethod
    def _check_kernels(cls, config_dict: dict[str, Any]) -> None:
        """Raise `HeadwaterError` if a file names an attention kernel of the hub, which is code to download and run."""
        for field, kernel in config_dict.items():
            if "attn_implementation" in field and "/" in str(kernel):
                raise HeadwaterError(
                    f"A config's {field} names the kernel {shown(kernel)}, which would be downloaded and run; remove "
                    "it, and pass attn_implementation if you trust that kernel."
                )

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """The fields of this kind of config that are headwater's own, derived ones included."""
        return tuple(HeadwaterConfig.__annotations__)

    @classmethod
    def _check_names(cls, names: Iterable[str]) -> None:
        for name in names:
            if close := find_misspelt(name, cls.field_names()):
                raise HeadwaterError(f"{cls.__name__} has no field {name!r}; did you mean {close!r}?")

    def complete_fields(self) -> None:
        """Fill in defaults and check everything. Models call it too, since fields may have been set after creation.

        Raises `HeadwaterError` if fields contradict each other; what layers read from each other is checked by the
        planner.
        """
        self._complete_sizes()
        if self.logit_scale == "fan_in":
            self.logit_scale = self.hidden_size**-0.5
        if self.embedding_scale == "width":
            self.embedding_scale = self.hidden_size**0.5
        self.final_norm_weight = self.norm_weight if self.final_norm_weight is None else self.final_norm_weight
        self.final_norm_bias = self.norm_bias if self.final_norm_bias is None else self.final_norm_bias
        complete_sliding(self)
        if self.position == "rope":
            complete_rope(self)
        else:
            self.rope_parameters = None
        self._complete_mechanisms()
        self.layer_types = cache_types(self, windows_are_ordinary=not self.mechanisms)
        self.validate_architecture()  # `@strict` calls it too, but wraps its errors

    def _complete_sizes(self) -> None:
        for name in _SIZES:
            size, most = getattr(self, name), MOST.get(name, MOST_ANYWHERE)
            if size is not None and not 1 <= size <= most:
                bound = "at least 1" if size < 1 else f"at most {most:,}"
                raise HeadwaterError(f"{name} must be {bound}, not {shown(size)}.")
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise HeadwaterError(
                    f"hidden_size {self.hidden_size} is not divisible by num_attention_heads "
                    f"{self.num_attention_heads}; change one of them, or give head_dim."
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.num_hidden_layers * self.num_key_value_heads > _MOST_PLANNED:
            raise HeadwaterError(
                f"{self.num_hidden_layers:,} layers of {self.num_key_value_heads:,} key/value heads are more than any "
                "model has; lower num_hidden_layers or num_key_value_heads."
            )
        if self.intermediate_size is None:
            gated = self.feed_forward == "gated"
            self.intermediate_size = -(-8 * self.hidden_size // 3 // 64) * 64 if gated else 4 * self.hidden_size
        self.check_heads()

    def _complete_mechanisms(self) -> None:
        """Store the options with their defaults filled in, so that a saved config says what the model does."""
        mechanisms = as_mapping(self.mechanisms) or {}
        completed = {}
        for name, options in mechanisms.items():
            registered = _name_of(str(name))
            completed[registered] = complete_options(resolve(registered), options, self)
        if len(completed) < len(mechanisms):
            raise HeadwaterError(f"mechanisms has a repeated name: {', '.join(map(str, mechanisms))}; name each once.")
        self.mechanisms = completed

    def slides(self, layer: int) -> bool:
        """Whether a layer has the sliding window."""
        return self.sliding_window is not None and (self.sliding_layers is None or layer in self.sliding_layers)

    @property
    def per_layer_config(self) -> list["HeadwaterConfig"]:
        """The config of each layer, from which transformers sizes static caches; it cannot be set."""
        return [layer_config(self, layer) for layer in range(self.num_hidden_layers)]

    @per_layer_config.setter
    def per_layer_config(self, configs: Any) -> None:
        if configs is not None:
            raise HeadwaterError(
                "headwater does not support per_layer_config; set fields of some layers with sliding_fields, and the "
                "layers of a mechanism with its options."
            )

    @property
    def kinds(self) -> dict[bool, int]:
        """The first layer of each kind, by whether the kind has the sliding window."""
        layers = {self.slides(layer): layer for layer in reversed(range(self.num_hidden_layers))}
        return dict(sorted(layers.items()))

    def validate_architecture(self) -> None:
        """Check fields against each other. Called by `@strict` after construction and before saving."""
        self.check_heads()
        if self.sliding_window is not None and self.sliding_window < 2:
            raise HeadwaterError(
                f"sliding_window must be at least 2, not {self.sliding_window}; leave it out for none."
            )
        self._check_numbers()
        if self.unit_offset_norm and (self.norm != "rms_norm" or not self.norm_weight):
            raise HeadwaterError("unit_offset_norm needs an RMSNorm with a weight; set norm=rms_norm and norm_weight.")
        if (problem := find_unusable({name: getattr(self, name) for name in self.field_names()})) is not None:
            raise HeadwaterError(f"{'.'.join(problem[0])}: {problem[1]}.")
        check_known("There is no activation named", self.hidden_act, ACT2FN)
        if self.position == "rope":
            self.check_rope()
        for name, options in self.mechanisms.items():
            resolve(name).validate_options(options, self)

    def _check_numbers(self) -> None:
        for name in ("embedding_dropout", "attention_dropout", "residual_dropout", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise HeadwaterError(f"{name} must be a probability below 1, not {getattr(self, name)}.")
        for name in ("norm_eps", "initializer_range", "embedding_range"):
            if getattr(self, name) is not None and not 0 <= getattr(self, name) < float("inf"):
                raise HeadwaterError(f"{name} must be zero or more and finite, not {getattr(self, name)}.")
        for name in ("logit_scale", "embedding_scale", "attention_scale", "attention_softcap", "logit_softcap"):
            factor = getattr(self, name)
            if factor is not None and not isinstance(factor, str) and not 0 < factor < float("inf"):
                raise HeadwaterError(f"{name} must be above zero and finite, not {factor}.")

    def check_heads(self) -> None:
        """Raise `HeadwaterError` if query heads cannot share the key/value heads equally."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise HeadwaterError(
                f"num_attention_heads {self.num_attention_heads} is not divisible by num_key_value_heads "
                f"{self.num_key_value_heads}; change one of them."
            )

    def check_rope(self) -> None:
        """Raise `HeadwaterError` for rope_parameters that contradict the rest of the config."""
        check_rope(self)

    def validate_rope(self) -> None:
        """transformers' check of `rope_parameters`, only for RoPE."""
        if self.position == "rope":
            super().validate_rope()

    def validate_layer_type(self) -> None:
        """transformers' check knows only its own cache layers; ours register themselves in models/cache.py."""

    @classmethod
    def register_for_auto_class(cls, auto_class: str | type = "AutoConfig") -> None:
        """transformers' method, for all code of a model. Raises `HeadwaterError` for another model's Auto class."""
        if not auto_map.register_class(cls, auto_class):
            super().register_for_auto_class(auto_class)

    def save_pretrained(self, save_directory: str | os.PathLike[str], push_to_hub: bool = False, **kwargs: Any) -> None:
        """transformers' method. Raises `HeadwaterError` if the folder lacks the model's code."""
        auto_map.check_code(self, save_directory)
        try:
            super().save_pretrained(save_directory, push_to_hub, **kwargs)
        except StrictDataclassError as error:
            raise HeadwaterError(f"This config cannot be saved: {sentence(error)}") from error

    def to_json_string(self, use_diff: bool = True) -> str:
        """transformers' method, which sorts all keys; but mechanisms keep their order. Derived fields are left out."""
        content = json.loads(super().to_json_string(use_diff))
        content = {name: value for name, value in content.items() if name not in self.unsaved}
        if not content.get("auto_map"):
            content.pop("auto_map", None)
        if content.get("mechanisms"):
            content["mechanisms"] = {name: content["mechanisms"][name] for name in self.mechanisms or {}}
        return json.dumps(content, indent=2) + "\n"

    @property
    def rotary_dim(self) -> int:
        """Channels of a head that RoPE rotates."""
        return int(self.head_dim * (self.rope_parameters or {}).get("partial_rotary_factor", 1.0))

    @classmethod
    def gpt2(cls, **changes: Any) -> Self:
        """A GPT-2-like config: LayerNorm, learned positions, GELU, biases, tied embeddings. `changes` override."""
        base: dict[str, Any] = dict(
            norm="layer_norm",
            position="learned",
            feed_forward="plain",
            hidden_act="gelu_new",
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            scaled_residual_init=True,
            max_position_embeddings=1024,
        )
        return cls(**(base | changes))


def _name_of(name: str) -> str:
    """Return the registered name of a mechanism for any of its names. Raises `HeadwaterError`."""
    kind = resolve(name)
    # A name added by a test or a notebook takes precedence.
    registered = name if MECHANISMS.is_built_in(name) or name in MECHANISMS.added else MECHANISMS.name_of(kind)
    if (class_name := kind.registered_name()) != registered:
        raise HeadwaterError(
            f"Mechanism {registered!r} has a class with the registered name {class_name!r}; remove registered_name() "
            "from the class."
        )
    return registered
