"""`headwater grow`, `shrink`, `retrofit`, `convert`: make a new model from a trained one."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from headwater.util.errors import HeadwaterError
from headwater_lab.cli.arguments import mechanisms_of, new_folder
from headwater_lab.cli.options import MAKE, CheckpointPath, FolderPath, Values, command, exclude, need
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


@command(MAKE, "convert runs/llama --num-key-value-heads 1 --text 'texts/*.txt' --out runs/smaller")
def convert_model(
    source: str,
    overrides: Sequence[str] = (),
    *,
    mechanism: Sequence[str] = (),
    num_key_value_heads: int | None = None,
    latent_width: int | None = None,
    choose: bool = False,
    heal: str = "10M",
    text: str | None = None,
    no_anneal: bool = False,
    control: bool = False,
    resume: bool = False,
    plan: bool = False,
    out: FolderPath | None = None,
) -> None:
    """Make the cache of a trained model smaller by shared layers, fewer heads or a latent; heal and measure it.

    source: A folder, or a name on the Hugging Face hub. It is not changed.
    overrides: Override a field of the recipe that is written: data.context=1024, training.batch_size=16,
        training.learning_rate=1e-4, …
    mechanism: Mechanism that lets layers share keys and values: NAME, or "NAME={option: value}"; repeatable.
    num_key_value_heads: Number of key/value heads after pooling (GQA).
    latent_width: Channels of one latent, from which the keys and values of all heads are made; a multiple of
        head_dim.
    choose: Choose the layers that share by how similar their keys and values are, where the mechanism leaves it open.
    heal: Tokens of healing, e.g. 20M or 1e9.
    text: Heal and measure on this text (path, folder or glob); default: the model's training data.
    no_anneal: Use the smaller model from the first step instead of gradually.
    control: Also train the original on the same tokens by the same schedule, and compare with it.
    resume: Continue an interrupted conversion: the same command, with this option.
    plan: Print what it costs and saves, and stop.
    out: The new folder. Default: next to the source.
    """
    from headwater_lab.api.converting import convert
    from headwater_lab.data.corpus import local_files

    mechanisms = mechanisms_of(mechanism)
    if not mechanisms and num_key_value_heads is None and latent_width is None:
        raise HeadwaterError(
            "Choose how to make the cache smaller: --mechanism NAME to let layers share, --num-key-value-heads N, or "
            "--latent-width N."
        )
    exclude("--latent-width", "--no-anneal")
    if text is not None:
        local_files(text)  # raises if there are none, also with --plan
    with ProgressReport() as report:
        convert(
            source,
            new_folder(out, source, "converted", may_exist=True),
            mechanisms=mechanisms,
            num_key_value_heads=num_key_value_heads,
            latent_width=latent_width,
            choose=choose,
            heal=heal,
            text=text,
            anneal=not no_anneal,
            control=control,
            overrides=overrides,
            resume=resume,
            only_plan=plan,
            watch=report,
        )
