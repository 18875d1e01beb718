"""`headwater convert`: a trained model with a smaller cache, healed and measured."""

from collections.abc import Sequence

from headwater.util.errors import HeadwaterError
from headwater_lab.cli.arguments import mechanisms_of, new_folder
from headwater_lab.cli.options import MAKE, FolderPath, command, exclude
from headwater_lab.cli.progress import ProgressReport


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
