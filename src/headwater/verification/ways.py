"""The ways of decoding, each against one uncached forward pass.

`WAYS` is the one table: a name, explained in docs/verify.md, and a function of a `Probe`, which compares every call it
makes. The texts are rows of random ids; the last begins like the first, so that one cached prefix can continue in two
ways.
"""

import contextlib
import copy
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, StaticCache

from headwater.nn.cache_name import CACHE, cache_of
from headwater.util.errors import HeadwaterError
from headwater.verification.subject import CallOutput, Subject, in_double

# Number of texts, tokens in each, and tokens that the last text shares with the first.
ROWS, LENGTH, SHARED = 4, 20, 12
# Tokens in a prompt, tokens that `generate` adds, and the length of the longest row.
PROMPT, NEW = 13, 8
LONGEST = PROMPT + NEW + 3 + NEW
# Left padding of each row, and of each prompt.
PADS = (0, 5, LENGTH - 3)
PROMPT_PADS = (0, 4, PROMPT - 1)


class DoesNotApply(Exception):
    """A way of decoding does not apply to a model."""


@dataclass(frozen=True)
class Parting:
    """The first difference from the model without a cache: a token, by its row in the batch (of packed documents,
    the document) and its position in that row's text, and the first layer that writes something else there (None: it
    cannot be seen, or only the logits differ).
    """

    row: int
    position: int
    layer: str | None = None


@dataclass(frozen=True)
class Texts:
    """ids [ROWS, LENGTH], an id for padding, and the model's output for them without a cache."""

    ids: Tensor
    pad: int
    alone: CallOutput

    @property
    def scale(self) -> float:
        return float(self.alone.logits.abs().max())


def texts_for(subject: Subject, seed: int = 0) -> Texts:
    """Draw random ids, no special tokens of the model, and run one uncached forward pass of them."""
    config = subject.config
    special = {value for key, value in vars(config).items() if key.endswith(("_token_id", "_token_index"))}
    allowed = torch.tensor([token for token in range(config.vocab_size) if token not in special])
    allowed = allowed[min(5, len(allowed) // 2) :]
    draw = torch.Generator().manual_seed(seed)
    ids = allowed[torch.randint(len(allowed), (ROWS, LENGTH), generator=draw)]
    ids[-1, :SHARED] = ids[0, :SHARED]
    pad = getattr(config, "pad_token_id", None)
    pad = pad if isinstance(pad, int) and 0 <= pad < config.vocab_size else int(allowed[0])
    texts = Texts(ids, pad, subject(ids, use_cache=False))
    if texts.scale == 0:
        raise HeadwaterError("All logits of this model are 0, so nothing can be compared; train its output head first.")
    return texts


# (row, slot, text, position, length): slots in a row of a call, and where these tokens are in the texts.
CallSpan = tuple[int, int, int, int, int]


class Probe:
    """One way with one model: compares what calls return with the uncached pass, and keeps the first parting."""

    def __init__(self, subject: Subject, texts: Texts, tolerance: float) -> None:
        self.subject, self.texts, self.tolerance = subject, texts, tolerance
        self.error = 0.0
        self.parting: Parting | None = None

    def compare_call(self, output: CallOutput, spans: Sequence[CallSpan], packed: bool = False) -> None:
        """Compare what a call returned at `spans` with the uncached pass, and keep the first parting."""
        differing = []
        for row, slot, text, position, length in spans:
            if length <= 0:
                continue
            logits = output.logits[row, slot : slot + length]
            error = _find_errors(logits, self.texts.alone.logits[text, position : position + length], self.texts.scale)
            self.error = max(self.error, float(error.max()))
            parted = (error > self.tolerance).nonzero()
            if len(parted):
                step = int(parted[0])
                differing.append((position + step, row, slot + step, text))
        if differing and self.parting is None:
            position, row, slot, text = min(differing)
            layer = self._find_layer(output, row, slot, text, position)
            self.parting = Parting(text if packed else row, position, layer)

    def _find_layer(self, output: CallOutput, row: int, slot: int, text: int, position: int) -> str | None:
        for name, wrote in output.layers.items():
            alone = self.texts.alone.layers.get(name)
            if alone is None or wrote.shape[2:] != alone.shape[2:]:
                continue
            scale = float(alone.abs().max())
            if (
                scale
                and float(_find_errors(wrote[row, slot][None], alone[text, position][None], scale)) > self.tolerance
            ):
                return name
        return None

    def record_error(self, row: int, position: int, error: float) -> None:
        """Record a comparison that was made elsewhere."""
        self.error = max(self.error, error)
        if error > self.tolerance and self.parting is None:
            self.parting = Parting(row, position)

    def make_cache(self) -> Any:
        """Make an empty cache as `generate` does; None: the model makes its own."""
        supports = getattr(self.subject.model, "_supports_default_dynamic_cache", None)
        if self.subject.cache_name in (CACHE, "past_key_values", "cache_params") and (supports is None or supports()):
            return DynamicCache(config=self.subject.model.config)
        return None


def _find_errors(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """The largest difference of each token, relative to `scale`; infinite where a number is not finite."""
    difference = (x.double() - y.double()).abs().flatten(1).amax(1) / scale
    return difference.nan_to_num(nan=math.inf)


class Feed:
    """A batch of texts, perhaps left-padded, of which some tokens have been read into a cache.

    rows: the texts; default: all. bare: the model is given ids and cache, without a mask or positions.
    """

    def __init__(
        self,
        probe: Probe,
        rows: Sequence[int] | None = None,
        pads: Sequence[int] | None = None,
        cache: Any = None,
        bare: bool = False,
    ) -> None:
        self.probe, self.rows, self.bare = probe, list(range(ROWS) if rows is None else rows), bare
        self.pads = list(pads) if pads is not None else [0] * len(self.rows)
        self.cache = probe.make_cache() if cache is None else cache
        self.position = 0

    def read_tokens(
        self, tokens: int | None = None, wrong: Sequence[int] | None = None, use_cache: bool = True
    ) -> CallOutput:
        """Read the next tokens (default: all that are left). wrong: of these texts instead, without a comparison."""
        until = LENGTH if tokens is None else self.position + tokens
        mask = (torch.arange(until) >= torch.tensor(self.pads)[:, None]).long()
        positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 0)[:, self.position :]  # counted as in `generate`
        arguments: dict[str, Any] = {} if self.bare else {"mask": mask, "positions": positions}
        texts = self.probe.texts
        lines = [
            torch.cat((torch.full((pad,), texts.pad), texts.ids[text, : LENGTH - pad]))
            for text, pad in zip(self.rows if wrong is None else wrong, self.pads, strict=True)
        ]
        ids = torch.stack(lines)[:, self.position : until]
        output = self.probe.subject(ids, self.cache if use_cache else None, use_cache=use_cache, **arguments)
        if use_cache:
            if output.cache is None:
                raise DoesNotApply("the model returns no cache")
            self.cache = output.cache
        if wrong is None:
            spans = []
            for row, (text, pad) in enumerate(zip(self.rows, self.pads, strict=True)):
                begin = max(self.position, pad)
                spans.append((row, begin - self.position, text, begin - pad, until - begin))
            self.probe.compare_call(output, spans)
        self.position = until
        return output

    def find_method(self, name: str) -> Callable[..., Any]:
        """Find a method of the cache. Raises `DoesNotApply` if it has none of that name."""
        if not hasattr(self.cache, name):
            raise DoesNotApply(f"{type(self.cache).__name__} has no {name}")
        return getattr(self.cache, name)

    def read_singly(self, tokens: int | None = None) -> None:
        """Read tokens one by one."""
        for _ in range(LENGTH - self.position if tokens is None else tokens):
            self.read_tokens(1)


# Without a cache


def _read_uncached(
    probe: Probe,
    batches: Sequence[Sequence[int] | None] = (None,),
    lengths: Sequence[int | None] = (None,),
    pads: Sequence[int] | None = None,
) -> None:
    """Read batches of texts; default: all texts. lengths: how many tokens; default: all."""
    for texts, length in itertools.product(batches, lengths):
        Feed(probe, texts, pads).read_tokens(length, use_cache=False)


# Documents in one row, as DataCollatorWithFlattening packs them: (text, tokens).
PACKED = ((0, 7), (1, 9), (2, 1), (3, 6))


def read_packed(probe: Probe, with_borders: bool = False, promised: bool = False) -> None:
    """Read packed documents.

    with_borders: pass all arguments that say where documents begin. promised: the model claims to separate them.
    """
    if "position_ids" not in probe.subject.takes:
        raise DoesNotApply(f"{type(probe.subject.model).__name__} takes no position_ids")
    if not probe.subject.positions:
        raise DoesNotApply("its position_ids do not begin at 0")
    ids = torch.cat([probe.texts.ids[text, :tokens] for text, tokens in PACKED])[None]
    positions = torch.cat([torch.arange(tokens) for _, tokens in PACKED])[None]
    borders = _border_arguments(probe) if with_borders else {}
    output = probe.subject(ids, positions=positions, use_cache=False, **borders)
    spans, slot = [], 0
    for text, tokens in PACKED:
        spans.append((0, slot, text, 0, tokens))
        slot += tokens
    unpromised = Probe(probe.subject, probe.texts, probe.tolerance)
    unpromised.compare_call(output, spans, packed=True)
    if unpromised.parting is not None and not promised:
        # With a mask, transformers does not look for documents. If that changes nothing, the model never does.
        joined = probe.subject(ids, positions=positions, use_cache=False, mask=torch.ones_like(ids), **borders)
        if torch.equal(output.logits, joined.logits):
            raise DoesNotApply(
                "it does not begin a new document where position_ids restart: each document sees the earlier ones"
            )
    probe.compare_call(output, spans, packed=True)


def _border_arguments(probe: Probe) -> dict[str, Any]:
    """List the arguments that say where documents begin and that the model takes."""
    begins = torch.tensor([0, *(tokens for _, tokens in PACKED)]).cumsum(0).int()
    longest = max(tokens for _, tokens in PACKED)
    number = torch.cat([torch.full((tokens,), text, dtype=torch.int32) for text, tokens in PACKED])[None]
    arguments = dict(cu_seq_lens_q=begins, cu_seq_lens_k=begins, max_length_q=longest, max_length_k=longest)
    arguments["seq_idx"] = number
    if "kwargs" not in probe.subject.takes:
        arguments = {name: value for name, value in arguments.items() if name in probe.subject.takes}
    if not arguments:
        raise DoesNotApply(f"{type(probe.subject.model).__name__} takes no seq_idx or cu_seq_lens")
    return arguments


# With a cache


def _in_chunks(
    probe: Probe, sizes: Sequence[int], padded: bool = False, static: bool = False, bare: bool = False
) -> None:
    """Chunks of these sizes, and then of the last one until the end.

    padded: of left-padded rows. static: into a static cache. bare: see `Feed`.
    """
    rows, pads = (range(len(PADS)), PADS) if padded else (None, None)
    if static and probe.make_cache() is None:
        raise DoesNotApply("the model makes its own cache")
    cache = StaticCache(config=probe.subject.model.config, max_cache_len=LENGTH + 4) if static else None
    feed = Feed(probe, rows, pads, cache, bare)
    for size in itertools.chain(sizes, itertools.repeat(sizes[-1])):
        if feed.position == LENGTH:
            break
        feed.read_tokens(min(size, LENGTH - feed.position))


def _crop_cache(probe: Probe) -> None:
    """Read tokens that turn out wrong, and take them back, as assisted decoding does."""
    feed = Feed(probe, [0, 1, 2])
    if hasattr(feed.cache, "activate_past_recording"):
        feed.cache.activate_past_recording()
    feed.read_tokens(7)
    for right, wrong in ((2, 3), (1, 1), (3, 5)):
        feed.read_tokens(right)
        feed.read_tokens(wrong, wrong=[1, 2, 0])
        crop = feed.find_method("crop")
        if getattr(feed.cache, "is_croppable", True) is False:
            raise DoesNotApply("the cache is not croppable")
        crop(-wrong)
        feed.position -= wrong
    feed.read_singly()


REORDER, SELECT = "reorder_cache", "batch_select_indices"


def _change_rows(
    probe: Probe, changes: Sequence[tuple[str, Any, Sequence[int]]], texts: Sequence[int] = (0, 1, 2)
) -> None:
    """Change the cache's rows and continue, several times: (method, rows to take or copies, texts that follow)."""
    feed = Feed(probe, texts)
    feed.read_tokens(SHARED - 1)
    feed.read_singly(1)
    for method, argument, rows in changes:
        feed.find_method(method)(torch.tensor(argument) if isinstance(argument, list) else argument)
        feed.rows, feed.pads = list(rows), [0] * len(rows)
        feed.read_singly(3)
    feed.read_tokens()


def _reuse_prefix(probe: Probe) -> None:
    """Continue one row's cached prefix in two ways, from copies of the cache."""
    feed = Feed(probe, [0])
    feed.read_tokens(SHARED)
    cache = feed.cache
    for text in (0, 3, 0):
        feed = Feed(probe, [text], cache=copy.deepcopy(cache))
        feed.position = SHARED
        feed.read_tokens(3)
        feed.read_singly(2)
        feed.read_tokens()


def _two_streams(probe: Probe) -> None:
    """Read two texts in turn, each with its own cache."""
    feeds = [Feed(probe, [text]) for text in (1, 2)]
    for feed in feeds:
        feed.read_tokens(6)
    for tokens in (1, 1, 2, 1, LENGTH - 11):
        for feed in feeds:
            feed.read_tokens(tokens)


def _reset_cache(probe: Probe) -> None:
    feed = Feed(probe, [1, 2])
    feed.read_tokens(9)
    feed.find_method("reset")()
    second = Feed(probe, [0, 1], cache=feed.cache)
    second.read_tokens(6)
    second.read_singly(3)
    second.read_tokens()


# Calls of `generate`. Each generated row is compared with one uncached forward pass of that row alone.


@contextlib.contextmanager
def without_end(model: Any) -> Iterator[None]:
    """Let `generate` ignore the model's stop settings in this context, so that all rows have one length."""
    settings = model.generation_config
    model.generation_config = GenerationConfig(pad_token_id=0)
    try:
        yield
    finally:
        model.generation_config = settings


def _run_generate(probe: Probe, ids: Tensor, mask: Tensor | None = None, **options: Any) -> Any:
    model = probe.subject.model
    if not hasattr(model, "generate"):
        raise DoesNotApply(f"{type(model).__name__} has no generate")
    defaults: dict[str, Any] = dict(
        max_new_tokens=NEW, do_sample=False, return_dict_in_generate=True, output_logits=True
    )
    torch.manual_seed(0)
    with without_end(model), in_double(probe.subject.dtype == torch.float64), torch.no_grad():
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids) if mask is None else mask,
            pad_token_id=probe.texts.pad,
            **(defaults | options),
        )


def _check_generated(probe: Probe, output: Any, pads: Sequence[int], prompt: int, logits: bool = True) -> None:
    """Compare logits (or only tokens) of `generate` with one uncached forward pass of each row."""
    for row, ids in enumerate(output.sequences):
        tokens = ids[pads[row] :]
        new = len(ids) - prompt
        alone = probe.subject(tokens[None, :-1], use_cache=False).logits[0, -new:].double()
        scale = float(alone.abs().max())
        if logits:
            errors = _find_errors(torch.stack([step[row] for step in output.logits]), alone, scale)
        else:  # how much less likely the token is than the likeliest
            errors = (alone.amax(1) - alone.gather(1, tokens[-new:, None])[:, 0]) / scale
        for step, error in enumerate(errors.tolist()):
            probe.record_error(row, len(tokens) - new + step, error)


def _generate_rows(probe: Probe, pads: Sequence[int], copies: int, **options: Any) -> tuple[Any, list[int]]:
    """Run `generate` on prompts with this much padding on the left; return its output and each row's padding."""
    mask = (torch.arange(PROMPT) >= torch.tensor(pads)[:, None]).long()
    ids = probe.texts.ids[: len(pads), :PROMPT].masked_fill(mask == 0, probe.texts.pad)
    return _run_generate(probe, ids, mask, **options), [pad for pad in pads for _ in range(copies)]


def generate_rows(probe: Probe, padded: bool = False, **options: Any) -> None:
    """Generate the most likely tokens of each row, or several continuations as `options` say."""
    pads, copies = PROMPT_PADS if padded else (0, 0, 0), options.get("num_return_sequences", 1)
    _check_generated(probe, *_generate_rows(probe, pads, copies, **options), PROMPT)


def search_beams(probe: Probe, padded: bool = False, **options: Any) -> None:
    """The score of each beam is the sum of its tokens' log-probabilities."""
    options |= dict(num_beams=3, num_return_sequences=3, length_penalty=0.0, output_logits=False, output_scores=True)
    output, pads = _generate_rows(probe, PROMPT_PADS[:2] if padded else (0, 0), 3, **options)
    for row, (ids, pad) in enumerate(zip(output.sequences, pads, strict=True)):
        alone = probe.subject(ids[None, pad:-1], use_cache=False).logits[0, PROMPT - pad - 1 :]
        score = alone.double().log_softmax(-1).gather(1, ids[PROMPT:, None]).sum()
        probe.record_error(row, PROMPT - pad, float(abs(score - output.sequences_scores[row]) / abs(score)))


def generate_assisted(probe: Probe, distance: float = 0.05) -> None:
    """Generate with an assistant whose parameters are off by random numbers; by 0.05, most proposals are rejected."""
    if getattr(probe.subject.model, "_is_stateful", False):
        raise DoesNotApply(f"{type(probe.subject.model).__name__} is stateful: generate refuses an assistant")
    assistant = copy.deepcopy(probe.subject.model)
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in assistant.parameters():
            parameter.add_(distance * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype))
    output = _run_generate(probe, probe.texts.ids[:1, :PROMPT], assistant_model=assistant)
    _check_generated(probe, output, [0], PROMPT, logits=False)


def _look_up_prompt(probe: Probe) -> None:
    output = _run_generate(probe, probe.texts.ids[:1, :4].repeat(1, 3), prompt_lookup_num_tokens=3)
    _check_generated(probe, output, [0], 12, logits=False)


def _continue_turn(probe: Probe) -> None:
    """Continue from the first turn's cache in a second turn."""
    ids = probe.texts.ids[:3, :PROMPT]
    output_of_first = _run_generate(probe, ids)
    cache = cache_of(output_of_first)
    if cache is None:
        raise DoesNotApply(f"generate returns no {CACHE}")
    longer = torch.cat((output_of_first.sequences, ids[:, :3]), dim=1)
    output = _run_generate(probe, longer, **{CACHE: cache})
    _check_generated(probe, output, [0] * len(ids), longer.shape[1])


class Way:
    """A way of decoding, `run` with these options. generates: it runs `generate`, and once, not in each precision."""

    def __init__(self, name: str, run: Callable[..., None], generates: bool = False, **options: Any) -> None:
        self.name, self.generates = name, generates
        self.run: Callable[[Probe], None] = partial(run, **options)


# All other ways rest on this one: if uncached logits depend on later tokens, there is no cache to verify.
CAUSAL = "prefixes"
STATIC: dict[str, Any] = dict(cache_implementation="static", disable_compile=True)
SAMPLED: dict[str, Any] = dict(do_sample=True, top_k=0, num_return_sequences=2)
WAYS = [
    Way(CAUSAL, _read_uncached, lengths=(1, 2, 7, SHARED, LENGTH - 1)),
    Way("rows alone", _read_uncached, batches=[[text] for text in range(ROWS)]),
    Way("padding", _read_uncached, batches=[range(len(PADS))], pads=PADS),
    Way("packing", read_packed),
    Way("packing+", read_packed, with_borders=True),
    Way("1 by 1", _in_chunks, sizes=[1]),
    Way("prefill", _in_chunks, sizes=[SHARED, 1]),
    Way("chunks of 3", _in_chunks, sizes=[3]),
    Way("chunks of 8", _in_chunks, sizes=[8]),
    Way("mixed", _in_chunks, sizes=[6, 1, 2, 1, 7, 3]),
    Way("only cache", _in_chunks, sizes=[6, 1, 1, 9, 3], bare=True),
    # The shortest row has one token after the first chunk.
    Way("padded, 1 by 1", _in_chunks, sizes=[LENGTH - 2, 1], padded=True),
    Way("padded, chunks", _in_chunks, sizes=[4], padded=True),
    Way("crop", _crop_cache),
    # As beam search does: the first row's prefix continues in two ways, and another row is dropped.
    Way("reorder", _change_rows, changes=[(REORDER, [2, 0, 0], [2, 0, 3]), (REORDER, [1, 2, 0], [0, 3, 2])]),
    Way("select", _change_rows, changes=[(SELECT, [2, 0], [2, 0])]),
    Way("permute", _change_rows, changes=[(SELECT, [2, 0, 1], [2, 0, 1])]),
    Way("repeat", _change_rows, changes=[("batch_repeat_interleave", 2, [0, 3, 1, 1])], texts=(0, 1)),
    Way("prefix reuse", _reuse_prefix),
    Way("two streams", _two_streams),
    Way("reset", _reset_cache),
    Way("static", _in_chunks, sizes=[SHARED, 1], static=True),
    Way("static, chunks", _in_chunks, sizes=[5, 1, 4, 3, 7], static=True),
    Way("static, padded", _in_chunks, sizes=[LENGTH - 2, 1], padded=True, static=True),
    Way("greedy", generate_rows, True),
    Way("generate, padded", generate_rows, True, padded=True),
    Way("generate, chunked", generate_rows, True, prefill_chunk_size=4),
    Way("sampling", generate_rows, True, **SAMPLED),
    Way("beams", search_beams, True),
    Way("assisted", generate_assisted, True),
    Way("prompt lookup", _look_up_prompt, True),
    Way("second turn", _continue_turn, True),
    Way("generate, static", generate_rows, True, **STATIC),
    Way("static, chunked", generate_rows, True, **STATIC, prefill_chunk_size=4),
]
