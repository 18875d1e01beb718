"""Generation with a static cache: every token is the same step on the same memory, which a GPU replays as one graph.

A step runs the model on the last tokens, chooses the next ones and writes them where the next step finds them, all on
the device. The host reads the tokens of a step while the next one runs.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import StaticCache
from transformers.generation import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from headwater.kernels import are_ordinary
from headwater.kernels.autotune import allow_autotuning
from headwater.models.cache import HeadwaterStaticLayer, share_count
from headwater.models.causal_lm import HeadwaterForCausalLM
from headwater.models.compiling import silence_tf32_advice
from headwater.nn.linear import join_linears
from headwater.util.errors import HeadwaterError

# Maximum tokens of a prompt, since attention to all of them takes quadratic memory.
LONGEST = 2**16
# Round the cache's length up to a multiple of this: similar lengths share a graph, and kernels like aligned masks.
SLOTS = 64
# Steps to run before recording. They compile and load kernels, which is not possible while recording.
WARM = 2
# No correct use compiles more shapes than this for one model.
SHAPES = 256


class Choice(NamedTuple):
    """Rule for choosing the next token from logits [B, V], and for ending a row.

    temperature: 0 takes the most likely token. top_k: 0 is no limit. ends: tokens after which a row gets only `pad`.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    ends: tuple[int, ...] = ()
    pad: int = 0

    def make_warpers(self) -> LogitsProcessorList:
        """Processors that `generate` applies to logits before it samples."""
        warpers = LogitsProcessorList()
        if self.temperature not in (0.0, 1.0):
            warpers.append(TemperatureLogitsWarper(self.temperature))
        if self.temperature and self.top_k:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.temperature and self.top_p < 1:
            warpers.append(TopPLogitsWarper(self.top_p))
        return warpers


class Decoder:
    """Generator that continues batches of prompts with a static cache and produces the same tokens as `generate`.

    On a GPU the step is recorded as a CUDA graph after two tokens and replayed for the others. Later calls with as many
    rows, no more tokens and the same options replay it too. Elsewhere it runs directly.

    model: in eval mode. compiled: compile the step with `torch.compile`, as one graph, which takes a minute or so.
    backend: the compiler's. join: multiply once for queries, keys and values, and once for gate and up; moves their
    weights into adjacent memory (`join_linears`). options: of the backend inductor, as in `torch.compile`.
    Raises `HeadwaterError` for RoPE whose frequencies depend on the length.
    """

    def __init__(
        self,
        model: HeadwaterForCausalLM,
        compiled: bool = False,
        backend: str = "inductor",
        *,
        join: bool = False,
        options: dict[str, Any] | None = None,
    ) -> None:
        if model.model.ropes_by_length:
            raise HeadwaterError(
                "This model's RoPE changes its frequencies with the length, so a step with a static cache cannot be "
                "replayed; use a growing cache (generate)."
            )
        self.model, self.compiled, self.backend = model, compiled, backend
        self.join, self.options = join, options
        self.state: DecodingState | None = None

    @torch.no_grad()
    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int = 0,
        watch: Callable[[Tensor], object] | None = None,
    ) -> Tensor:
        """input_ids [B, P] -> [B, P + n], n ≤ max_new_tokens: fewer once every row has ended.

        attention_mask: [B, P] of zeros and ones, for left-padded rows. temperature: 0 is greedy. top_k: 0 is no limit.
        eos_token_id: a row that generates it ends, and is filled with pad_token_id.
        watch: called with the tokens of each step, [B] on the CPU, while the next step runs; ends the generation by
            returning True.
        Raises `HeadwaterError` if there are more tokens than learned positions, for fewer than one new token, and for
            padding after tokens.
        """
        if max_new_tokens < 1:
            raise HeadwaterError(f"max_new_tokens must be at least 1, not {max_new_tokens}.")
        rows, length = input_ids.shape
        real = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids.device)
        if bool((real[:, 1:] < real[:, :-1]).any()):
            raise HeadwaterError("attention_mask has padding after tokens; pad rows on their left.")
        tokens, config = int(real.sum(1).max()) + max_new_tokens, self.model.config
        if config.position == "learned" and tokens > config.max_position_embeddings:
            raise HeadwaterError(
                f"The longest prompt and the new tokens are {tokens} tokens, but this model has "
                f"{config.max_position_embeddings} learned positions; shorten the prompt or generate fewer tokens."
            )
        ends = () if eos_token_id is None else (eos_token_id,) if isinstance(eos_token_id, int) else eos_token_id
        choice = Choice(temperature, top_k, top_p, tuple(ends), pad_token_id)
        device = self.model.device
        on_it = torch.cuda.device(device) if device.type == "cuda" else nullcontext()  # for its streams and events
        joined = join_linears(self.model) if self.join else nullcontext()
        with on_it, joined, allow_autotuning(self.model.packs_weights):
            state, slots = self.state, length + max_new_tokens
            key = rows, choice, find_addresses(self.model)  # a recorded graph reads the weights where they were
            if state is None or (state.rows, state.choice, state.addresses) != key or state.length < slots:
                self.state = state = None  # frees its memory before more is allocated
                self.state = DecodingState(self, rows, slots, choice)
            new_ids = self.state.continue_prompts(input_ids, real, max_new_tokens, seed, watch)
        return torch.cat((input_ids, new_ids.to(input_ids.device)), dim=1)

    @property
    def cache(self) -> StaticCache | None:
        """The cache of the latest call."""
        return None if self.state is None else self.state.cache


class DecodingState:
    """The memory that a step reads and writes, and the step."""

    def __init__(self, decoder: Decoder, rows: int, length: int, choice: Choice) -> None:
        model = decoder.model
        self.model, self.rows, self.choice = model, rows, choice
        self.addresses = find_addresses(model)
        self.length = -(-length // SLOTS) * SLOTS
        self.warpers = choice.make_warpers()
        device = self.device = model.device
        self.cache = StaticCache(config=model.config, max_cache_len=self.length)
        # transformers' own roll a sliding window, by numbers that the host counts and a replayed step would not.
        self.cache.layers = [HeadwaterStaticLayer(max_cache_len=self.length) for _ in self.cache.layers]
        devices = {parameter.device for parameter in model.parameters()}
        if len(devices) == 1:
            share_count(self.cache, device)
        # The last tokens; which slots of the cache are real, including those to come; which rows have ended.
        self.token = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.real = torch.ones(rows, self.length, dtype=torch.long, device=device)
        self.ended = torch.zeros(rows, dtype=torch.bool, device=device)
        # Drawn outside the step, since random numbers in a compiled step would differ from those of `generate`.
        self.noise = torch.ones(rows, model.config.vocab_size if choice.temperature else 0, device=device)
        self.draw = torch.Generator(device)
        self.run: Callable[[], None] = self.step
        if decoder.compiled:
            silence_tf32_advice()
            self.run = torch.compile(
                self.step, fullgraph=True, dynamic=False, backend=decoder.backend, options=decoder.options
            )
        self.steps = 0
        self.graph = torch.cuda.CUDAGraph() if {device.type for device in devices} == {"cuda"} else None

    def continue_prompts(
        self,
        input_ids: Tensor,
        real: Tensor,
        tokens: int,
        seed: int,
        watch: Callable[[Tensor], object] | None,
    ) -> Tensor:
        """The new tokens [B, n], on the CPU."""
        self.cache.reset()
        self.real.fill_(1)
        self.real[:, : real.shape[1]] = real
        self.ended.zero_()
        self.draw.manual_seed(seed)
        prompt = self.model(input_ids, attention_mask=real, past_key_values=self.cache, logits_to_keep=1)
        self.draw_noise()
        self.choose_tokens(prompt.logits[:, -1])

        arrivals = Arrivals(self.rows, self.device)
        new_ids: list[Tensor] = []
        ended = [False] * self.rows

        def over() -> bool:
            """Read the previous step's tokens, and return whether they were the last."""
            new_ids.append(arrivals.receive_tokens())
            for row, token in enumerate(new_ids[-1].tolist()):
                ended[row] |= token in self.choice.ends
            return bool(watch is not None and watch(new_ids[-1])) or all(ended)

        arrivals.send_tokens(self.token)
        for _ in range(tokens - 1):
            self.run_step()
            arrivals.send_tokens(self.token)
            if over():
                break
        else:
            over()
        return torch.stack(new_ids, dim=1)

    def run_step(self) -> None:
        """Run one step: directly, to warm up, or replayed."""
        self.draw_noise()
        if self.graph is None:
            return self.run_and_compile() if self.steps == 0 else self.run()
        if self.steps < WARM:
            side = torch.cuda.Stream(self.device)
            side.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(side):
                self.run_and_compile()
            torch.cuda.current_stream(self.device).wait_stream(side)
            return None
        if self.steps == WARM:
            with torch.cuda.graph(self.graph, stream=torch.cuda.Stream(self.device)):  # records only, runs nothing
                self.run()
            self.steps += 1
        return self.graph.replay()

    def run_and_compile(self) -> None:
        """Run a step that may compile."""
        with torch._dynamo.config.patch(recompile_limit=SHAPES):
            self.run()
        self.steps += 1

    def step(self) -> None:
        """Compute the next tokens from the last ones. Nothing here may wait for the device."""
        out = self.model(self.token, attention_mask=self.real, past_key_values=self.cache)
        self.choose_tokens(out.logits[:, -1])

    def draw_noise(self) -> None:
        if self.choice.temperature:
            self.noise.exponential_(generator=self.draw)

    def choose_tokens(self, logits: Tensor) -> None:
        """Write the tokens that follow, from logits [B, V]."""
        scores = self.warpers(self.token, logits.float())
        if self.choice.temperature:  # the largest of p / noise is a draw from p, as in torch.multinomial
            scores = scores.softmax(-1) / self.noise
        chosen = scores.argmax(-1).masked_fill(self.ended, self.choice.pad)
        for end in self.choice.ends:
            self.ended.logical_or_(chosen == end)
        self.token.copy_(chosen[:, None])


def find_addresses(model: nn.Module) -> list[int]:
    """Find where a model's parameters are in memory."""
    return [parameter.data_ptr() for parameter in model.parameters() if are_ordinary(parameter)]


class Arrivals:
    """The tokens of each step on their way to the host, which waits for one copy while the next step runs."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.slots = [torch.zeros(rows, dtype=torch.long, pin_memory=self.on_gpu) for _ in range(2)]
        self.copied = [torch.cuda.Event() for _ in self.slots] if self.on_gpu else []
        self.sent = self.received = 0

    def send_tokens(self, token: Tensor) -> None:
        """Copy the tokens [B, 1], without waiting."""
        self.slots[self.sent % 2].copy_(token[:, 0], non_blocking=self.on_gpu)
        if self.on_gpu:
            self.copied[self.sent % 2].record()
        self.sent += 1

    def receive_tokens(self) -> Tensor:
        """The earliest tokens that were not received yet, [B]."""
        if self.on_gpu:
            self.copied[self.received % 2].synchronize()
        self.received += 1
        return self.slots[(self.received - 1) % 2].clone()
