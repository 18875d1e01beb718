"""`headwater generate`, `verify`, `serve`, `export`: use a checkpoint."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.text import Text

from headwater.cli.common import Device, check_writable, device_of, err, one_folder, out, progress_bars, quiet
from headwater.errors import HeadwaterError
from headwater.terminal import Table


def generate(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint's folder, or a run's (its newest checkpoint).")],
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; - reads it from stdin.")] = None,
    file: Annotated[Path | None, typer.Option(help="Read the text to continue from this file.")] = None,
    jsonl: Annotated[
        Path | None,
        typer.Option(
            help='JSONL file with one {"prompt": "…"} per line, or - for stdin; continued in batches, printed as JSONL.'
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, max=2**20, help="Maximum number of tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")] = 0.8,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Sample from the most likely tokens with this total probability.")
    ] = 0.95,
    top_k: Annotated[int, typer.Option(min=0, help="Sample from this many most likely tokens; 0 means all.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed for sampling.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts per batch with --jsonl.")] = 16,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this text; repeatable.")] = None,
    cache: Annotated[
        str,
        typer.Option(
            help="dynamic: grows with the text. static: allocated once, so that a GPU replays each token as one CUDA "
            "graph; the text is the same."
        ),
    ] = "dynamic",
    compile: Annotated[
        bool, typer.Option("--compile", help="With --cache static: compile the model first, for a minute or so.")
    ] = False,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float64; auto: as in the checkpoint.")] = "auto",
    device: Device = "auto",
) -> None:
    """Continue a prompt and print the text as it is generated; or continue many prompts, as JSONL."""
    import json

    import torch

    from headwater.generation import continue_prompts, load_for_generation
    from headwater.models.decoding import Decoder
    from headwater.written import MOST_TEXT, read_text

    quiet()
    if sum(given is not None for given in (prompt, file, jsonl)) != 1:
        raise HeadwaterError("Pass exactly one of: a prompt, - for stdin, --file, --jsonl.")
    if 0 < temperature < 0.01:
        raise HeadwaterError("--temperature below 0.01 is almost greedy; use 0 for greedy decoding.")
    if "" in (stop or ()):
        raise HeadwaterError("--stop needs a text to stop at, not an empty one.")
    if cache not in ("dynamic", "static"):
        raise HeadwaterError(f"--cache is dynamic or static, not {cache!r}.")
    if compile and cache == "dynamic":
        raise HeadwaterError("--compile needs --cache static: with a growing cache every token has another shape.")
    try:
        if jsonl is not None:
            rows = _prompts(sys.stdin.read() if str(jsonl) == "-" else read_text(jsonl, "file", MOST_TEXT), str(jsonl))
        else:
            given = str(prompt)
            if any("\ud800" <= letter <= "\udfff" for letter in given):  # bytes that Python's locale cannot decode
                given = os.fsencode(given).decode("utf-8")
            text = (
                read_text(file, "text", MOST_TEXT) if file is not None else sys.stdin.read() if prompt == "-" else given
            )
            rows = [{"prompt": text}]
    except UnicodeError as error:
        raise HeadwaterError(f"The prompt is not UTF-8 text: {error}.") from error
    device = device_of(device)
    if dtype not in ("auto", "float32", "bfloat16", "float64"):
        raise HeadwaterError(f"--dtype is auto, float32, bfloat16 or float64, not {dtype!r}.")
    model, tokenizer = load_for_generation(checkpoint)
    model.to(device, None if dtype == "auto" else getattr(torch, dtype))
    decoder = Decoder(model, compile) if cache == "static" else None
    tokens, seconds = 0, 0.0
    for begin in range(0, len(rows), batch_size):
        batch = rows[begin : begin + batch_size]
        made = continue_prompts(
            model,
            tokenizer,
            [row["prompt"] for row in batch],
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed + begin,
            stop=stop or (),
            stream=jsonl is None,
            decoder=decoder,
        )
        tokens, seconds = tokens + made.tokens, seconds + made.seconds
        if jsonl is not None:
            for row, completion in zip(batch, made.texts, strict=True):
                print(json.dumps(row | {"completion": completion}, ensure_ascii=False), flush=True)
    err.print(
        f"{tokens} tokens, {tokens / seconds:,.0f} tokens/s, cache {made.cache_bytes:,} bytes "
        f"({made.reserved_bytes:,} reserved)",
        style="dim",
    )


def _prompts(text: str, name: str) -> list[dict[str, Any]]:
    """The lines of a JSONL file, each with a "prompt". Raises `HeadwaterError` for a line without one."""
    import json

    prompts = []
    for number, line in enumerate(text.split("\n"), 1):
        try:
            content = json.loads(line) if line.strip() else None
        except ValueError as error:
            raise HeadwaterError(f"Line {number} of {name!r} is not JSON: {error}.") from error
        if content is not None and not (isinstance(content, dict) and isinstance(content.get("prompt"), str)):
            raise HeadwaterError(f'Line {number} of {name!r} has no text under "prompt".')
        if content is not None:
            prompts.append(content)
    if not prompts:
        raise HeadwaterError(f"{name!r} has no prompts.")
    return prompts


def verify(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(help="A checkpoint's folder, or a run's; default: small random models.", show_default=False),
    ] = None,
    size: Annotated[
        int | None,
        typer.Option(min=1, max=3, help="1: each mechanism alone (default); 2: also all pairs; 3: also all triples."),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=0, help="Number of random greedy requests to check, in random batches.")
    ] = 0,
    sampled: Annotated[
        int, typer.Option(min=0, help="Number of random sampled requests to check, by their logits.")
    ] = 0,
    longest: Annotated[
        int, typer.Option(min=1, max=2**16, help="Maximum number of tokens in a request's prompt.")
    ] = 512,
    seed: Annotated[int, typer.Option(help="Seed for prompts and parameters.")] = 0,
) -> None:
    """Check that every way of decoding with a cache matches the model without one, in fp64."""
    from headwater import verify as verifying
    from headwater.training.trained import open_trained

    quiet()
    table = Table(
        title="Decoding with a cache against without", title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("mechanisms", no_wrap=True)
    for number in range(1, len(verifying.CHECKS) + 1):
        table.add_column(str(number), justify="right")
    table.add_column("fp64", justify="right")
    table.add_column("fp32", justify="right")
    if checkpoint is not None and size is not None:
        raise HeadwaterError("--size applies to small random models; leave it out with a checkpoint.")
    given = None if checkpoint is None else open_trained(checkpoint).model.double()
    if given is not None and not given.config.is_causal:
        raise HeadwaterError(f"{str(checkpoint)!r} is a model of images, which has no cache to verify.")
    wanted = [{}, *(one for number in range(size or 1) for one in verifying.combinations(number + 1))]
    models, refused, failed = [], 0, False
    with progress_bars() as progress:
        task = progress.add_task("verifying", total=1 if given else len(wanted), info="")
        for mechanisms in wanted if given is None else [given.config.mechanisms]:
            model = verifying.tiny(mechanisms, seed=seed) if given is None else given
            progress.advance(task)
            if model is None:
                refused += 1
                continue
            models.append(model)
            found = verifying.verify(model, seed)
            failed |= any(one.ok is False for one in found)
            exact = [one.error for one in found if one.error is not None and one.check != verifying.FP32]
            table.add_row(
                " + ".join(mechanisms) or "none",
                *("–" if one.ok is None else "✓" if one.ok else Text("✗", "red") for one in found),
                f"{max(exact):.0e}",
                f"{found[-1].error:.0e}",
            )
    out.print(table)
    legend = ", ".join(f"{number} {name}" for number, name in enumerate(verifying.CHECKS, 1))
    out.print(
        f"{legend}. ✓ same as without a cache, – does not apply; fp64, fp32: largest relative differences of logits."
    )
    if refused:
        out.print(f"{refused} combinations are not supported.")
    for count, is_sampled, what in ((requests, False, "greedy"), (sampled, True, "sampled")):
        if count:
            with progress_bars() as progress:
                task = progress.add_task(f"{what} requests", total=count, info="")
                for served in verifying.serve_requests(models, count, sampled=is_sampled, longest=longest, seed=seed):
                    progress.update(task, completed=served.requests)
            failed |= served.wrong > 0
            out.print(
                f"{served.requests:,} {what} requests in random batches: {served.wrong} differ from running alone "
                f"without a cache; largest difference of logits {served.error:.0e}, of which generate's rounding to "
                f"fp32 is 6e-08; memory "
                f"{served.early_memory / 1e6:,.0f} MB after a fifth, {served.memory / 1e6:,.0f} MB at the end"
            )
    if failed:
        raise HeadwaterError("Decoding with a cache differs from decoding without one; see ✗ above.")


def serve(
    context: typer.Context,
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint's folder, or a run's (its newest checkpoint).")],
) -> None:
    """Answer OpenAI-style requests over HTTP, through `transformers serve`, which receives all other options.

    Requests use the model name given here. By default the server listens on this machine only; see --host.
    """
    from transformers.utils import is_serve_available

    from headwater.extras import MissingExtra
    from headwater.reading import has_tokenizer, read_config
    from headwater.training.checkpoint import check
    from headwater.training.places import newest_checkpoint

    if not is_serve_available():
        raise MissingExtra("transformers' server", "serve")
    source = newest_checkpoint(checkpoint)
    check(source)
    if not (source / "config.json").is_file():
        raise HeadwaterError(f"{str(source)!r} is not a checkpoint: it has no config.json.")
    if not has_tokenizer(source):
        raise HeadwaterError(f"{str(source)!r} has no tokenizer, so it cannot answer text.")
    if "--continuous-batching" in context.args:
        read_config(source).check_paged()
    if "@" in str(source):
        raise HeadwaterError(
            f"The server reads the part after @ as a revision; serve {str(source)!r} from another path."
        )
    from transformers.cli.transformers import main as transformers_cli

    _serve_one(str(checkpoint), source)
    sys.argv = ["transformers", "serve", str(checkpoint), *context.args]
    transformers_cli()


def _serve_one(name: str, source: Path) -> None:
    """Register the checkpoint `source` with transformers' server as `name`."""
    from transformers.cli.serving import model_manager

    from headwater.models.causal_lm import HeadwaterForCausalLM

    class OneModel(model_manager.ModelManager):
        def process_model_name(self, model_id: str) -> str:  # answers also contain this name
            return name if model_id == name else super().process_model_name(model_id)

        def load_model_and_processor(self, model_id_and_revision: str, *args: Any, **kwargs: Any) -> Any:
            known = f"{source}@main" if model_id_and_revision == name else model_id_and_revision
            return super().load_model_and_processor(known, *args, **kwargs)

        def get_gen_models(self, cache_dir: str | None = None) -> list[dict[str, Any]]:
            created = int((source / "config.json").stat().st_mtime)
            return [{"id": name, "object": "model", "created": created, "owned_by": "headwater"}]

    model_manager.ModelManager = OneModel
    # It looks for a checkpoint's class only among transformers' own.
    model_manager.transformers.HeadwaterForCausalLM = HeadwaterForCausalLM


def export(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint's folder, or a run's (its newest checkpoint).")],
    folder: Annotated[Path | None, typer.Argument(hidden=True)] = None,
    out_folder: Annotated[
        Path | None, typer.Option("--out", file_okay=False, help="The new folder.", show_default=False)
    ] = None,
    materialise: Annotated[
        bool, typer.Option("--materialise", help="For engines with a paged cache: exact, but without the cache saving.")
    ] = False,
    family: Annotated[
        str | None,
        typer.Option(
            help="Export as one of transformers' models, if it fits: gpt2, llama, mistral, qwen2, qwen3, gpt_neox, "
            "vit, deit, "
            "or package.module:NAME; source is the family it was retrofitted from.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Export a checkpoint with its code, so that transformers loads it without headwater (trust_remote_code=True)."""
    from headwater.export import export as write
    from headwater.export import export_family
    from headwater.files import check_free
    from headwater.outside import names_of_a_file
    from headwater.training.trained import open_trained

    quiet()
    folder = one_folder(folder, out_folder)
    check_free(folder)
    check_writable(folder, folder=True)
    trained = open_trained(checkpoint)
    if family is None:
        written = write(trained.model, folder, materialise, trained.tokenizer)
    elif materialise:
        raise HeadwaterError("--materialise is for headwater's own models; leave it out with --family.")
    else:
        if family == "source":
            known = [event.details["family"] for event in trained.history if "family" in event.details]
            if not known or not isinstance(known[0], str):
                raise HeadwaterError(f"{str(checkpoint)!r} was not retrofitted from a family; name one with --family.")
            with names_of_a_file():
                written = export_family(trained.model, folder, known[0], trained.tokenizer)
        else:
            written = export_family(trained.model, folder, family, trained.tokenizer)
    out.print(f"written to {written}", soft_wrap=True)
