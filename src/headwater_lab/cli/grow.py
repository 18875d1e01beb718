"""`headwater grow`, `shrink`, `retrofit`: make a new model from a trained one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from headwater_lab.cli.arguments import mechanisms_of, new_folder
from headwater_lab.cli.options import MAKE, CheckpointPath, Values, command, exclude, need
from headwater_lab.cli.progress import ProgressReport

Out = Annotated[Path | None, Values(file_okay=False, help="The new folder. Default: next to the source.")]
SampleRows = Annotated[int, Values(min=4, max=2**16)]


@command(MAKE, "grow runs/mine ffn_pairs=1024")
def grow_model(checkpoint: str, fields: Sequence[str] = (), *, out: Out = None) -> None:
    """Make a trained model deeper or wider, or add parameter tokens, by default without changing its function.

    checkpoint: A checkpoint's or a run's folder, or a Hugging Face model: its folder, or its name on the hub.
    fields: What to grow, as under `grow:` in a recipe: num_hidden_layers=16, hidden_size=512, ffn_pairs=1024,
        method=lemon, …
    """
    from headwater_lab.api.growing import grow
    from headwater_lab.recipe.recipe_files import read_overrides

    values = read_overrides(fields)
    grow(checkpoint, **values, out=new_folder(out, checkpoint, "grown"), watch=ProgressReport())


@command(MAKE, "shrink runs/mine --ffn-pairs 512")
def shrink_model(
    checkpoint: CheckpointPath,
    *,
    attention_pairs: int | None = None,
    ffn_pairs: int | None = None,
    text: Path | None = None,
    rows: SampleRows = 32,
    out: Out = None,
) -> None:
    """Remove the parameter tokens that matter least, by mean |score|·‖V‖ over a sample.

    attention_pairs: Pairs of each attention projection after the change.
    ffn_pairs: Pairs of each feed-forward after the change.
    text: Measure on this text; default: the model's training data.
    rows: Rows in the sample.
    """
    from headwater_lab.api.growing import shrink

    out = new_folder(out, checkpoint, "shrunk")
    with ProgressReport() as report:
        shrink(checkpoint, attention_pairs, ffn_pairs, text=text, rows=rows, out=out, watch=report)


@command(MAKE, "retrofit meta-llama/Llama-3.2-1B --mechanism NAME --out llama-more")
def retrofit_model(
    source: str,
    *,
    mechanism: Sequence[str] = (),
    allow_change: bool = False,
    layout: str | None = None,
    family: str | None = None,
    set: Sequence[str] = (),
    text: Path | None = None,
    rows: SampleRows = 32,
    out: Out = None,
) -> None:
    """Convert a trained model to a headwater checkpoint, and add mechanisms without changing its logits.

    source: A folder, a file of tensors, or a name on the Hugging Face hub.
    mechanism: Mechanism to add: NAME, or "NAME={option: value}"; repeatable.
    allow_change: Allow mechanisms that change what the model computes.
    layout: An original checkpoint's layout: tokenformer, resformer, kv-shifting, nanochat.
    family: The model's family; default: from its config.
    set: With --layout: a config field, key=value; repeatable.
    text: Measure on this text; default: Python's language reference.
    rows: Rows in the sample of --text.
    """
    from headwater_lab.api.growing import retrofit
    from headwater_lab.recipe.recipe_files import read_overrides

    need("--layout", "--set")
    need("--text", "--rows")
    need("--mechanism", "--allow-change")
    exclude("--layout", "--family")
    retrofit(
        source,
        mechanisms_of(mechanism),
        allow_change=allow_change,
        layout=layout,
        settings=read_overrides(set),
        family=family,
        text=text,
        rows=rows,
        out=new_folder(out, source, "headwater"),
        watch=ProgressReport(),
    )
