"""The ways to make a model deeper and wider: which old part each new part is made from.

Deeper, from L layers to L':

    identity     a layer's copy whose output maps are zero follows it: x + 0. LLaMA Pro, arXiv 2401.02415. Exact.
    stack        layers 0 … L-1, 0 … L-1, …: G_stack of arXiv 2405.15319. Changes the function.
    interleave   layers 0, 0, …, 1, 1, …. Changes the function.

Wider, where E says what the new channels (heads, units) hold, x' = E·x:

    exact         E = [I; 0]: what is new writes nothing. Ours. Exact.
    hypercloning  E = [I; I; …]: x' = (x, x, …). Arxiv 2409.12903. Exact; multiples only.
    lemon         E = [I; I; …; 0], or the mean of x in place of 0 under LayerNorm. LEMON, arXiv 2310.07999. Exact.
    net2net       the old block stays, all else is new, as the TokenFormer paper has it. Changes the function.

What reads copies shares the old weight w among them, each w/n ± noise, so that W'·E = W. The noise adds up to zero, and
it lets copies become different: without it they would have equal gradients forever. hypercloning has the paper's
"noisy symmetric" form, 10 dB below the weights, and lemon noise as large as the weights.

"exact" and "lemon" name a way for both directions (identity in depth); two ways are joined by "+": stack+hypercloning.
"""

from __future__ import annotations

from dataclasses import dataclass

from headwater.config.layers import MOST
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.enlarging import Larger
from headwater.util.errors import HeadwaterError, either, nearest

DEEPER = ("identity", "stack", "interleave")
WIDER = ("exact", "hypercloning", "lemon", "net2net")
BOTH = {"exact": "identity", "lemon": "identity"}
CHANGES = ("stack", "interleave", "net2net")
# Growth lists every channel, head and layer.
_MOST_CHANNELS = 2**20
NOISE = {"hypercloning": 10**-0.5, "lemon": 1.0}


def check_whole(name: str, number: object) -> None:
    """Raise `HeadwaterError` for anything but an integer."""
    if type(number) is not int:
        raise HeadwaterError(f"{name} must be a whole number, not {number!r}.")


@dataclass(frozen=True)
class NewSizes:
    """The sizes of a larger model; None keeps one. Key/value heads keep their ratio to the query heads."""

    num_hidden_layers: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None

    def __post_init__(self) -> None:
        for name, size in self.given().items():
            check_whole(name, size)

    def given(self) -> dict[str, int]:
        return {name: size for name, size in vars(self).items() if size is not None}


def ways(method: str) -> tuple[str | None, str | None]:
    """The ways that a method names to make a model deeper and wider; None where it names none."""
    if not isinstance(method, str):
        raise HeadwaterError(f"method must be a name, such as 'exact', not {method!r}.")
    deeper = wider = None
    for part in (parts := method.split("+")):
        if part not in (*DEEPER, *WIDER):
            raise HeadwaterError(f"There is no method {part!r} of growth; {nearest(part, (*DEEPER, *WIDER))}")
        deeper, wider = (part, wider) if part in DEEPER else (deeper, part)
    if len(parts) > 2 or (len(parts) == 2 and None in (deeper, wider)):
        raise HeadwaterError(
            f"The method {method!r} must be one way, or one to make a model deeper ({either([*map(repr, DEEPER)])}) "
            f"and one to make it wider ({either([*map(repr, WIDER)])}), joined by '+'."
        )
    return deeper or BOTH.get(str(wider)), wider


def growth_of(config: HeadwaterConfig, sizes: NewSizes, method: str) -> Larger:
    """What each part of a larger model is made from. Raises `HeadwaterError` for sizes that the method cannot give."""
    deeper, wider = ways(method)
    given = sizes.given()
    for name, size in given.items():
        if size < getattr(config, name):
            raise HeadwaterError(f"{name} would shrink from {getattr(config, name)} to {size}; give at least as much.")
        if size > (most := MOST.get(name, _MOST_CHANNELS)):
            raise HeadwaterError(f"{name} must be at most {most:,}, not {size:,}.")
    if all(size == getattr(config, name) for name, size in given.items()):
        raise HeadwaterError(
            "Nothing would grow: give more layers (num_hidden_layers), a larger hidden_size or intermediate_size, more "
            "heads (num_attention_heads), or more pairs of a model with parameter tokens."
        )
    old = {name: getattr(config, name) for name in vars(sizes)}
    new = old | given
    ratio = config.num_attention_heads // old["num_key_value_heads"]
    if "num_attention_heads" in given and "num_key_value_heads" not in given:
        if given["num_attention_heads"] % ratio:
            raise HeadwaterError(
                f"The model has {ratio} query heads for each key/value head, so num_attention_heads must be a multiple "
                f"of {ratio}, not {given['num_attention_heads']}; or give num_key_value_heads, too."
            )
        new["num_key_value_heads"] = given["num_attention_heads"] // ratio
    grows = {name for name in old if new[name] > old[name]}
    if deeper is None and "num_hidden_layers" in grows:
        raise HeadwaterError(f"The method {method!r} makes no model deeper; use, for example, identity+{method}.")
    if wider is None and grows - {"num_hidden_layers"}:
        raise HeadwaterError(f"The method {method!r} makes no model wider; use, for example, {method}+exact.")
    if "+" in method and not {"num_hidden_layers"} < grows:
        only, unread = (deeper, wider) if "num_hidden_layers" in grows else (wider, deeper)
        raise HeadwaterError(f"It grows in one direction, so {unread!r} would do nothing; use the method {only}.")
    layers, silent = _layers(old["num_hidden_layers"], new["num_hidden_layers"], deeper)
    if wider == "hypercloning":
        for name in grows - {"num_hidden_layers"}:
            if new[name] % old[name]:
                raise HeadwaterError(
                    f"hypercloning multiplies: {name} can be {old[name] * 2} or {old[name] * 3}, not {new[name]}; use "
                    "the method lemon for other sizes."
                )
    kv, q = _heads(config, new["num_attention_heads"], new["num_key_value_heads"], wider in NOISE)
    layer_norm = config.norm == "layer_norm"
    used = {deeper if "num_hidden_layers" in grows else None, wider if grows - {"num_hidden_layers"} else None}
    growth = Larger(
        layers=layers,
        silent=silent,
        stream=_stream(old["hidden_size"], new["hidden_size"], wider in NOISE),
        q=q,
        kv=kv,
        units=_copied(old["intermediate_size"], new["intermediate_size"], wider in NOISE),
        fill="any" if wider == "net2net" else "mean" if layer_norm else "zero",
        keeps=not used & set(CHANGES),
        noise=NOISE.get(str(wider), 0.0),
    )
    if growth.fill != "any":
        _check_exact(config, growth)
    return growth


def _layers(old: int, new: int, way: str | None) -> tuple[tuple[int, ...], frozenset[int]]:
    """For each new layer the old one, and the new layers that add nothing."""
    if way == "stack":
        if new % old:
            raise HeadwaterError(
                f"stack repeats the whole model: num_hidden_layers can be {2 * old} or {3 * old}, not {new}; use the "
                "method interleave for other depths."
            )
        return tuple(layer % old for layer in range(new)), frozenset()
    if way == "interleave":
        return tuple(layer * old // new for layer in range(new)), frozenset()
    layers: list[int] = []
    silent: list[int] = []
    for layer in range(old):  # the new ones as evenly as may be, the last one at the end
        layers.append(layer)
        for _ in range((layer + 1) * (new - old) // old - layer * (new - old) // old):
            silent.append(len(layers))
            layers.append(layer)
    return tuple(layers), frozenset(silent)


def _copied(old: int, new: int, copies: bool) -> tuple[int, ...]:
    return tuple(at % old if copies or at < old else -1 for at in range(new))


def _stream(old: int, new: int, copies: bool) -> tuple[int, ...]:
    """Whole copies of all channels, one after the other, then new ones: so that the first channels stay the first."""
    whole = new // old * old if copies else old
    return tuple(at % old if at < whole else -1 for at in range(new))


def _heads(config: HeadwaterConfig, queries: int, heads: int, copies: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """For each key/value head and for each query head the old one. Copies of a head are placed next to it."""
    assert config.num_key_value_heads is not None
    old, group = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    if queries % heads:
        raise HeadwaterError(
            f"num_attention_heads {queries} is not divisible by num_key_value_heads {heads}; change one of them."
        )
    size = queries // heads
    kv = tuple(at * old // heads if copies else at if at < old else -1 for at in range(heads))
    q = []
    for head, source in enumerate(kv):
        nth = head - kv.index(source)  # which of its copies
        for at in range(size):
            place = nth * size + at if copies else at
            known = source >= 0 and (copies or place < group)
            q.append(source * group + place % group if known else -1)
    if set(q) - {-1} != set(range(config.num_attention_heads)):
        by = "by a whole number" if copies else "only where they are copied, as by the method lemon"
        raise HeadwaterError(
            f"Key/value heads can grow without their query heads {by}, so that each query head keeps its own; or grow "
            "num_attention_heads and num_key_value_heads by the same factor."
        )
    return kv, tuple(q)


def _check_exact(config: HeadwaterConfig, growth: Larger) -> None:
    """Raise `HeadwaterError` where the parts of the model itself would not keep the function."""
    advice = "use the method net2net, which does not keep the function"
    if config.position == "alibi" and len(growth.q) > config.num_attention_heads:
        raise HeadwaterError(f"ALiBi's slopes depend on the number of heads; grow other sizes, or {advice}.")
    if growth.widens and config.position == "sincos":
        raise HeadwaterError(
            f"Fixed sines and cosines are others in a wider residual stream; grow other sizes, or {advice}."
        )
    if not growth.pads:
        return
    whole = f"double hidden_size with the method hypercloning, grow other sizes, or {advice}"
    if not (config.norm_weight and config.final_norm_weight):
        raise HeadwaterError(
            f"New channels change what the residual stream is divided by, and norms without weights cannot make up for "
            f"it; {whole}."
        )
    if config.qk_norm:
        raise HeadwaterError(
            f"New channels of the residual stream need another norm_eps, which the norms of queries and keys (qk_norm) "
            f"share; {whole}."
        )
    if growth.fill == "mean" and (config.output_norms or config.embedding_norm):
        raise HeadwaterError(
            f"Under LayerNorm new channels hold the mean of the others, which output_norms and embedding_norm would "
            f"not give them; {whole}."
        )
