"""Models to evaluate: headwater's checkpoints and runs, and any causal Hugging Face model."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from headwater.config.text import HeadwaterConfig
from headwater.conversion.families import find_family
from headwater.models.load import check_finite, check_size, describe_reason, model_type, read_config, weight_files
from headwater.models.weights import check_files
from headwater.util.errors import HeadwaterError, first_line
from headwater_lab.data.tokenizer import find_begin, separator_id
from headwater_lab.training.checkpoints import check_sums, load_model, newest_checkpoint
from headwater_lab.training.hub_models import check_source, explaining_code
from headwater_lab.training.trained_models import read_tokenizer

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
# Context of models that have no limit of their own, as in lm-evaluation-harness.
CONTEXT = 2048
PROBE = "Sphinx of black quartz,\n\tjudge my vow: 1234.5 + 67 = 1302; naïve 水源 🦉\r\n  def f(x): return x"


@dataclass(frozen=True)
class Candidate:
    """A model to evaluate, before its weights are read.

    begin: the token before each document. is_headwater: whether it is a headwater checkpoint.
    """

    name: str
    source: str
    config: Any
    tokenizer: PreTrainedTokenizerBase
    begin: int
    is_headwater: bool
    trust_remote_code: bool

    @cached_property
    def skeleton(self) -> PreTrainedModel:
        """The model without its weights. Raises `HeadwaterError` if it is not a causal language model."""
        try:
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(self.config, trust_remote_code=self.trust_remote_code)
        except HeadwaterError:
            raise
        except Exception as error:
            if type(self.config) not in AutoModelForCausalLM._model_mapping:
                raise HeadwaterError(
                    f"{self.source!r} is a {self.config.model_type} model, not a causal language model; choose one "
                    "that AutoModelForCausalLM loads."
                ) from error
            raise HeadwaterError(
                f"The config of {self.source!r} describes no model that can be built: {describe_reason(error)}; "
                "correct it."
            ) from error

    @cached_property
    def own_config(self) -> HeadwaterConfig | None:
        """Its config as a model of headwater's, to which those of transformers can be converted; None if it cannot."""
        if self.is_headwater:
            return self.config
        with suppress(HeadwaterError):
            return find_family(self.config.model_type).read_config(self.config)
        return None

    @property
    def positions(self) -> int | None:
        """The number of learned positions; None for a model without them."""
        learned = [
            module
            for name, module in self.skeleton.named_modules()
            if isinstance(module, nn.Embedding) and ("pos" in name.split(".")[-1] or name.split(".")[-1] == "wpe")
        ]
        return self.longest if learned else None

    @property
    def longest(self) -> int:
        """The number of tokens that it takes at a time, by its config."""
        lengths = (getattr(self.config, name, None) for name in ("n_positions", "max_position_embeddings", "n_ctx"))
        return next((length for length in lengths if length), CONTEXT)

    def load_model(self, device: str, dtype: str) -> PreTrainedModel:
        """Load the model with its weights, in eval mode. Raises `HeadwaterError` if any are missing."""
        if self.is_headwater:
            check_sums(Path(self.source))
            model = load_model(Path(self.source))
        else:
            model = self._load_foreign()
        return model.to(device, None if dtype == "auto" else getattr(torch, dtype)).eval()

    def _load_foreign(self) -> PreTrainedModel:
        """Load a model from outside headwater with transformers."""
        if (folder := Path(self.source)).is_dir():  # transformers checks that all files of the index exist
            files = weight_files(folder, pickled=True)
            check_size(self.skeleton, 2 * sum(file.stat().st_size for file in files), folder)  # of 4 bits or more
            check_files(files, repr(self.source), self.skeleton)
        try:
            model, info = AutoModelForCausalLM.from_pretrained(
                self.source,
                dtype="auto",
                trust_remote_code=self.trust_remote_code,
                weights_only=True,
                output_loading_info=True,
            )
        except Exception as error:  # libraries can raise anything for damaged files
            raise HeadwaterError(f"The checkpoint {self.source!r} cannot be loaded: {first_line(error)}") from error
        model.config.return_dict = True
        if missing := sorted(map(str, info.get("missing_keys") or ())):
            raise HeadwaterError(
                f"The weights in {self.source!r} are incomplete: {len(missing)} are missing, including "
                f"{missing[0]}; use a complete checkpoint."
            )
        check_finite(model.state_dict(), repr(self.source))
        return model


def find_candidates(sources: Sequence[str], trust_remote_code: bool = False) -> list[Candidate]:
    """Find the models to evaluate, with unique names. Raises `HeadwaterError` for anything but a text model."""
    paths = [
        str(newest_checkpoint(Path(source))) if Path(source).is_dir() else source.rstrip("/") for source in sources
    ]
    names = unique_names([source.rstrip("/") for source in sources])
    return [_read_candidate(name, path, trust_remote_code) for name, path in zip(names, paths, strict=True)]


def _read_candidate(name: str, source: str, trust_remote_code: bool) -> Candidate:
    check_source(source)
    path = Path(source)
    local = path.is_dir()
    is_headwater = local and model_type(path) == HeadwaterConfig.model_type
    with explaining_code(source, f"The config of {source!r} cannot be read"):
        if is_headwater:
            config = read_config(path)
        else:
            config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
    tokenizer = read_tokenizer(path if local else source, config.vocab_size if is_headwater else None)
    if tokenizer is None and trust_remote_code:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=True)
    if tokenizer is None:
        raise HeadwaterError(
            f"{source!r} has no tokenizer, so it cannot read text; add its tokenizer's files to that folder."
        )
    if separator_id(tokenizer) is None:
        raise HeadwaterError(
            f"The tokenizer of {source!r} has neither an end-of-text nor a begin-of-text token to begin a document "
            "with; add one with tokenizer.add_special_tokens."
        )
    candidate = Candidate(name, source, config, tokenizer, find_begin(tokenizer), is_headwater, trust_remote_code)
    _ = candidate.skeleton
    return candidate


def unique_names(sources: Sequence[str]) -> list[str]:
    """Name each path by its last part, or by all of it if two would be the same; number repeated paths."""
    stems = [Path(source).name for source in sources]
    names = stems if len(set(stems)) == len(set(sources)) else sources
    return [name if name not in names[:i] else f"{name} ({names[:i].count(name) + 1})" for i, name in enumerate(names)]


def same_tokenizer(candidate: Candidate, reference: Candidate) -> bool:
    """Whether two models split text into the same tokens."""
    a, b = candidate.tokenizer, reference.tokenizer
    return (
        candidate.begin == reference.begin
        and a.get_vocab() == b.get_vocab()
        and a(PROBE, add_special_tokens=False).input_ids == b(PROBE, add_special_tokens=False).input_ids
    )
