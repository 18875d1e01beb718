"""`headwater generate`, `predict`, `serve`, `export`: use a checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from headwater.util.errors import HeadwaterError
from headwater_lab.cli.arguments import check_writable, device_of, print_result, say, stderr, tell_model
from headwater_lab.cli.options import (
    USE,
    CheckpointPath,
    DeviceName,
    FolderPath,
    NaturalInt,
    PositiveInt,
    Values,
    command,
    exclude,
    extra_arguments,
    need,
    refuse,
)


@command(USE, 'generate runs/mine "First Citizen:" --max-new-tokens 100')
def generate_text(
    checkpoint: CheckpointPath,
    prompt: str | None = None,
    *,
    jsonl: Path | None = None,
    chat: bool = False,
    max_new_tokens: Annotated[int, Values(min=1, max=2**20)] = 200,
    temperature: Annotated[float, Values(min=0)] = 0.8,
    top_p: Annotated[float, Values(min=0, max=1)] = 0.95,
    top_k: NaturalInt = 0,
    seed: int = 0,
    batch_size: PositiveInt = 16,
    stop: Sequence[str] = (),
    cache: Literal["dynamic", "static"] = "dynamic",
    cache_bits: Literal[2, 4] | None = None,
    compile: bool = False,
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto",
    device: DeviceName = "auto",
) -> None:
    """Continue a prompt and print the text as it is generated; or continue many prompts, as JSONL.

    prompt: The text to continue; - reads it from stdin.
    jsonl: JSONL file with one {"prompt": "…"} per line, or - for stdin; continued in batches, printed as JSONL
        with "completion" and "finish_reason" (stop or length).
    chat: Answer each prompt as a user's message, in the tokenizer's chat template.
    max_new_tokens: Maximum number of tokens to generate.
    temperature: Sampling temperature; 0 is greedy.
    top_p: Sample from the most likely tokens with this total probability.
    top_k: Sample from this many most likely tokens; 0 means all.
    seed: Seed for sampling.
    batch_size: Prompts per batch with --jsonl.
    stop: Stop before this text; repeatable.
    cache: dynamic: grows with the text. static: allocated once, so that a GPU replays each token as one CUDA graph; the
        text is the same.
    cache_bits: Quantize the growing cache to 2 or 4 bits a number; needs optimum-quanto.
    compile: With --cache static: compile the model first, for a minute or so.
    dtype: The dtype to compute in; auto: as in the checkpoint.
    """
    import torch

    from headwater.models.decoding import Decoder
    from headwater_lab.serving.generation import continue_prompts, load_for_generation
    from headwater_lab.serving.prompts import read_prompt, read_prompts

    if (prompt is None) == (jsonl is None):
        raise HeadwaterError("Pass exactly one of: a prompt, - for stdin, --jsonl.")
    need("--jsonl", "--batch-size")
    _check_sampling(temperature, stop)
    if cache == "static":
        refuse("with --cache static", "--cache-bits")
    if compile and cache == "dynamic":
        raise HeadwaterError("--compile needs --cache static: with a growing cache, shapes change with every token.")
    if jsonl is not None:
        rows = read_prompts(jsonl)
    else:
        rows = [{"prompt": read_prompt(Path("-")) if prompt == "-" else str(prompt)}]
    device = device_of(device)
    model, tokenizer = load_for_generation(checkpoint)
    model.to(device, None if dtype == "auto" else getattr(torch, dtype))
    decoder = Decoder(model, compile) if cache == "static" else None
    tokens, seconds, sizes = 0, 0.0, (0, 0)
    for first in range(0, len(rows), batch_size):
        batch = rows[first : first + batch_size]
        continued = continue_prompts(
            model,
            tokenizer,
            [row["prompt"] for row in batch],
            chat=chat,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed + first,
            stop=stop,
            stream=jsonl is None,
            decoder=decoder,
            cache_bits=cache_bits,
        )
        tokens, seconds = tokens + continued.tokens, seconds + continued.seconds
        sizes = max(sizes, (continued.cache_bytes, continued.reserved_bytes))
        if jsonl is not None:
            for row, completion, finished in zip(batch, continued.texts, continued.finished, strict=True):
                result = {"completion": completion, "finish_reason": "stop" if finished else "length"}
                print_result(row | result, [], as_json=True)
    stderr.print(
        f"{tokens} tokens, {tokens / seconds:,.0f} tokens/s, cache {sizes[0]:,} bytes ({sizes[1]:,} reserved)",
        style="dim",
    )


def _check_sampling(temperature: float, stop: Sequence[str]) -> None:
    if temperature == 0:
        refuse("at --temperature 0, which is greedy", "--top-p", "--top-k", "--seed")
    if 0 < temperature < 0.01:
        raise HeadwaterError("--temperature below 0.01 is almost greedy; use 0 for greedy decoding.")
    if "" in stop:
        raise HeadwaterError("--stop needs a text to stop at, not an empty one.")


@command(USE, "predict runs/digits image.png")
def predict_classes(
    checkpoint: CheckpointPath,
    images: Sequence[Path],
    *,
    top: PositiveInt = 5,
    jsonl: bool = False,
    device: DeviceName = "auto",
) -> None:
    """Print the likeliest classes of images, with their probabilities.

    images: Image files.
    top: How many classes of each image to print.
    jsonl: Print {"image": …, "classes": {NAME: PROBABILITY, …}}, one line per image.
    """
    from headwater_lab.serving.prediction import load_for_prediction, predict_images

    for path in images:
        if not path.is_file():
            kind = "a folder" if path.is_dir() else "no file"
            raise HeadwaterError(f"{str(path)!r} is {kind}; name image files.")
    model, processor = load_for_prediction(checkpoint)
    model.to(device_of(device))
    for path, classes in zip(images, predict_images(model, processor, images), strict=True):
        likeliest = dict(list(classes.items())[:top])
        line = f"{path}: {', '.join(f'{name} {share:.4f}' for name, share in likeliest.items())}"
        print_result({"image": str(path), "classes": likeliest}, [line], jsonl)


@command(
    USE, "serve runs/mine --port 8000", context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def serve_model(
    checkpoint: CheckpointPath,
    *,
    engine: Literal["transformers", "vllm"] = "transformers",
    host: str = "127.0.0.1",
    port: Annotated[int, Values(min=0, max=65535)] = 8000,
    device: DeviceName = "auto",
    dtype: str = "auto",
) -> None:
    """Answer OpenAI-style requests over HTTP.

    In requests, the model is named CHECKPOINT, as given here. With --engine vllm, vLLM's server receives all options
    that are not listed here; `vllm serve --help` lists them.

    engine: Program that generates the text: transformers' generate, or vLLM with the smaller cache (docs/serving.md).
    host: The address to listen on; 127.0.0.1 is for this machine only.
    port: The port to listen on; 0 chooses a free one.
    dtype: The dtype to compute in, such as bfloat16; auto: as in the checkpoint.
    """
    from importlib.util import find_spec

    import torch

    from headwater.util import extras

    options = extra_arguments()
    if engine == "vllm":
        if find_spec("vllm") is None:
            raise extras.MissingExtra("vLLM", "vllm")
        refuse("with --engine vllm", "--device")
        options += ["--host", host, "--port", str(port), *(["--dtype", dtype] if dtype != "auto" else [])]
        from headwater_lab.serving.vllm import serve_with_vllm

        serve_with_vllm(str(checkpoint), _find_text_checkpoint(checkpoint), options)
        return
    extras.check_extra("serve")
    if options:
        raise HeadwaterError(f"There is no option {options[0]} with --engine transformers; leave it out, or use vllm.")
    if dtype != "auto" and not isinstance(getattr(torch, dtype, None), torch.dtype):
        raise HeadwaterError(f"--dtype {dtype} is not a PyTorch dtype; use auto, float32 or bfloat16.")
    from headwater_lab.serving.server import serve_checkpoint

    serve_checkpoint(checkpoint, host, port, device_of(device), None if dtype == "auto" else getattr(torch, dtype))


def _find_text_checkpoint(checkpoint: Path) -> Path:
    """Find the newest checkpoint of a run. Raises `HeadwaterError` if it cannot answer text."""
    from headwater.models.load import check_config
    from headwater_lab.data.tokenizer_files import has_tokenizer
    from headwater_lab.training.checkpoints import check_sums, newest_checkpoint

    source = newest_checkpoint(checkpoint)
    check_sums(source)
    check_config(source)
    if not has_tokenizer(source):
        raise HeadwaterError(f"{str(source)!r} has no tokenizer, so it cannot answer text.")
    return source


@command(USE, "export runs/mine --out exported")
def export_model(
    checkpoint: CheckpointPath,
    *,
    out: FolderPath | None = None,
    push: str | None = None,
    private: bool = False,
    message: str = "",
    overwrite: bool = False,
    materialise: bool = False,
    family: str | None = None,
) -> None:
    """Export a checkpoint with its code, so that transformers loads it without headwater (trust_remote_code=True).

    Its card, README.md, is made from the model's history, unless there is one next to the checkpoint.

    out: The new folder; of a plain Llama also a new file NAME.gguf, for llama.cpp.
    push: Upload the export, and nothing else, to this repository USER/NAME of the Hugging Face hub.
    private: With --push: create the repository as private.
    message: With --push: the message of the commit.
    overwrite: With --push: replace files in the repository that have other content; its history keeps them.
    materialise: For engines with a paged cache: exact, but without the cache saving, and not for mechanisms that look
        back.
    family: Export as one of transformers' models, if it fits: deit, gemma, gemma2, gemma3_text, gpt2, gpt_neox,
        llama, mistral, nanochat, qwen2, qwen3, vit, or package.module:NAME; source is the family it was retrofitted
        from.
    """
    from headwater_lab.api.exporting import GGUF, export_checkpoint, push_to_hub

    exclude("--family", "--materialise")
    need("--push", "--private", "--message", "--overwrite")
    if out is not None:
        check_writable(out, folder=out.suffix != GGUF)
    if push is not None:
        address = push_to_hub(
            checkpoint,
            push,
            private=private,
            message=message,
            overwrite=overwrite,
            materialise=materialise,
            family=family,
            out=out,
        )
        say(f"uploaded to {address}")
    elif out is not None:
        export_checkpoint(checkpoint, out, materialise=materialise, family=family)
    else:
        raise HeadwaterError("Name a new folder with --out, a repository with --push, or both.")
    if out is not None and out.suffix == GGUF:
        say(f"written to {out}\n`llama-cli -m {out}` runs it.")
    elif out is not None:
        tell_model(out)
