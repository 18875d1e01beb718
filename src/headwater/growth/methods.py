"""Methods to make a model deeper and wider: which old part each new part copies.

Deeper, from L layers to L':

    identity     a layer's copy whose output maps are zero follows it: x + 0. LLaMA Pro, arXiv 2401.02415. Exact.
    stack        layers 0 … L-1, 0 … L-1, …: G_stack of arXiv 2405.15319. Changes the function.
    interleave   layers 0, 0, …, 1, 1, …. Changes the function.

Wider, where E says what the new channels (heads, units) hold, x' = E·x:

    exact         E = [I; 0]: what is new writes nothing. Ours. Exact.
    hypercloning  E = [I; I; …]: x' = (x, x, …). Arxiv 2409.12903. Exact; multiples only.
    lemon         E = [I; I; …; 0], or the mean of x in place of 0 under LayerNorm. LEMON, arXiv 2310.07999. Exact.
    net2net       the old block stays, all else is new, as the TokenFormer paper has it. Changes the function.

What reads copies shares the old weight w among them, each w/n ± noise, so that W'·E = W. The noise adds up to zero;
without it copies would have equal gradients forever. hypercloning has the paper's "noisy symmetric" form, 10 dB below
the weights, and lemon noise as large as the weights.

"exact" and "lemon" also make models deeper, as identity does. Two methods are joined by "+": stack+hypercloning.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from headwater.config.layers import MOST
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.growth_map import GrowthMap
from headwater.util.errors import HeadwaterError, check_known, either

DEPTH_METHODS = ("identity", "stack", "interleave")
WIDTH_METHODS = ("exact", "hypercloning", "lemon", "net2net")
DEPTH_METHOD_OF = {"exact": "identity", "lemon": "identity"}
INEXACT = ("stack", "interleave", "net2net")
SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
# An upper bound, since growth lists every channel, head and layer.
_MOST_CHANNELS = 2**20
TauPolicy = Literal["keep", "recompute"]
KeyInit = Literal["zero", "random"]
NOISE = {"hypercloning": 10**-0.5, "lemon": 1.0}


def check_whole(name: str, number: object) -> None:
    """Raise `HeadwaterError` for anything but an integer."""
    if type(number) is not int:
        raise HeadwaterError(f"{name} must be a whole number, not {number!r}.")


@dataclass(frozen=True)
class GrowthOptions:
    """The options of `grow`.

    num_hidden_layers, hidden_size, intermediate_size, num_attention_heads, num_key_value_heads: the new sizes; None
        keeps one, and key/value heads keep their ratio to the query heads. The width of a head stays.
    method: how new parts are made from old ones (`headwater.growth.methods`): "exact" (default), "lemon",
        "identity", "stack", "interleave", "hypercloning", "net2net", or two joined by "+", as in "stack+hypercloning".
        "stack", "interleave" and "net2net" change the function.
    attention_pairs, ffn_pairs: pairs of each attention projection and feed-forward of a model with parameter tokens.
    key_init: "random" initializes the keys of new pairs as in a fresh model, which changes the function.
    tau: "recompute" sets τ to the default of the new number of pairs, √n, which changes the function.
    freeze: train only the new pairs. Growing a frozen model again without it unfreezes everything.

    Raises `HeadwaterError` for settings of new pairs where there are none, for frozen ones in other sizes, and for a
    method where only pairs are added.
    """

    attention_pairs: int | None = None
    ffn_pairs: int | None = None
    num_hidden_layers: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    method: str = "exact"
    key_init: KeyInit = "zero"
    tau: TauPolicy = "keep"
    freeze: bool = False

    def __post_init__(self) -> None:
        for name, size in self.sizes.items():
            check_whole(name, size)
        parse_method(self.method)
        for name, choices in (("key_init", get_args(KeyInit)), ("tau", get_args(TauPolicy))):
            if getattr(self, name) not in choices:
                raise HeadwaterError(f"{name} must be {' or '.join(map(repr, choices))}, not {getattr(self, name)!r}.")
        has_pairs = (self.attention_pairs or self.ffn_pairs) is not None
        changes = {"key_init": self.key_init != "zero", "tau": self.tau != "keep", "freeze": self.freeze}
        if (unread := [name for name, is_changed in changes.items() if is_changed]) and not has_pairs:
            raise HeadwaterError(
                f"{unread[0]} applies only to new pairs; leave it out, or give attention_pairs or ffn_pairs."
            )
        if self.method != "exact" and has_pairs and not self.sizes:
            raise HeadwaterError(
                f"The method {self.method!r} applies only to layers and widths; leave it out, or give a new size."
            )
        if self.freeze and self.sizes:
            raise HeadwaterError(
                "freeze trains only the new pairs; leave it out, or grow layers and widths separately."
            )

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes that are set, except numbers of pairs."""
        return {name: size for name in SIZES if (size := getattr(self, name)) is not None}


def parse_method(method: str) -> tuple[str | None, str | None]:
    """Split a method into one to make a model deeper and one to make it wider; None where it names none."""
    if not isinstance(method, str):
        raise HeadwaterError(f"method must be a name, such as 'exact', not {method!r}.")
    deeper = wider = None
    for name in (names := method.split("+")):
        check_known("There is no growth method", name, (*DEPTH_METHODS, *WIDTH_METHODS))
        deeper, wider = (name, wider) if name in DEPTH_METHODS else (deeper, name)
    if len(names) > 2 or (len(names) == 2 and None in (deeper, wider)):
        raise HeadwaterError(
            f"The method {method!r} must be a single method, or one that makes a model deeper "
            f"({either([*map(repr, DEPTH_METHODS)])}) and one that makes it wider "
            f"({either([*map(repr, WIDTH_METHODS)])}), joined by '+'."
        )
    return deeper or DEPTH_METHOD_OF.get(str(wider)), wider


def map_growth(config: HeadwaterConfig, options: GrowthOptions) -> GrowthMap:
    """Map each part of a larger model to an old one. Raises `HeadwaterError` for sizes that the method cannot give."""
    method, sizes = options.method, options.sizes
    deeper, wider = parse_method(method)
    _check_sizes(config, sizes)
    old = {name: getattr(config, name) for name in SIZES}
    new = old | sizes | _scale_kv_heads(config, sizes)
    deepens = new["num_hidden_layers"] > old["num_hidden_layers"]
    widths = [name for name in SIZES[1:] if new[name] > old[name]]
    _check_directions(method, deeper, wider, deepens, bool(widths))
    layers, identity_layers = _map_layers(old["num_hidden_layers"], new["num_hidden_layers"], deeper)
    if wider == "hypercloning":
        for name in widths:
            if new[name] % old[name]:
                raise HeadwaterError(
                    f"hypercloning multiplies: {name} can be {old[name] * 2} or {old[name] * 3}, not {new[name]}; use "
                    "the method lemon for other sizes."
                )
    copies = wider in NOISE
    kv, q = _map_heads(config, new["num_attention_heads"], new["num_key_value_heads"], copies)
    units = old["intermediate_size"]
    methods_used = {deeper if deepens else None, wider if widths else None}
    growth = GrowthMap(
        layers=layers,
        identity_layers=identity_layers,
        stream=_map_stream(old["hidden_size"], new["hidden_size"], copies),
        q=q,
        kv=kv,
        units=tuple(unit % units if copies or unit < units else -1 for unit in range(new["intermediate_size"])),
        padding="fresh" if wider == "net2net" else "mean" if config.norm == "layer_norm" else "zero",
        preserves_function=methods_used.isdisjoint(INEXACT),
        noise=NOISE.get(str(wider), 0.0),
    )
    if growth.zero_init:
        _check_exact(config, growth)
    return growth


def _check_sizes(config: HeadwaterConfig, sizes: dict[str, int]) -> None:
    """Raise `HeadwaterError` for a size that would shrink or is out of bounds."""
    for name, size in sizes.items():
        if size < getattr(config, name):
            raise HeadwaterError(f"{name} would shrink from {getattr(config, name)} to {size}; give at least as much.")
        if size > (most := MOST.get(name, _MOST_CHANNELS)):
            raise HeadwaterError(f"{name} must be at most {most:,}, not {size:,}.")


def _scale_kv_heads(config: HeadwaterConfig, sizes: dict[str, int]) -> dict[str, int]:
    """Count the key/value heads that keep their ratio to more query heads, unless their number is given."""
    if "num_attention_heads" not in sizes or "num_key_value_heads" in sizes:
        return {}
    ratio = config.num_attention_heads // config.num_key_value_heads
    if sizes["num_attention_heads"] % ratio:
        raise HeadwaterError(
            f"The model has {ratio} query heads for each key/value head, so num_attention_heads must be a multiple "
            f"of {ratio}, not {sizes['num_attention_heads']}; or give num_key_value_heads as well."
        )
    return {"num_key_value_heads": sizes["num_attention_heads"] // ratio}


def _check_directions(method: str, deeper: str | None, wider: str | None, deepens: bool, widens: bool) -> None:
    """Raise `HeadwaterError` if the method lacks a direction that grows, or names one that does not."""
    if deepens and deeper is None:
        raise HeadwaterError(f"The method {method!r} does not make models deeper; use, for example, identity+{method}.")
    if widens and wider is None:
        raise HeadwaterError(f"The method {method!r} does not make models wider; use, for example, {method}+exact.")
    if "+" in method and not (deepens and widens):
        only, unread = (deeper, wider) if deepens else (wider, deeper)
        raise HeadwaterError(
            f"The model grows in one direction only, and {unread!r} is for the other; use the method {only}."
        )


def _map_layers(old: int, new: int, method: str | None) -> tuple[tuple[int, ...], frozenset[int]]:
    """Map each new layer to an old one, and list the identity layers."""
    if method == "stack":
        if new % old:
            raise HeadwaterError(
                f"stack repeats the whole model: num_hidden_layers can be {2 * old} or {3 * old}, not {new}; use the "
                "method interleave for other depths."
            )
        return tuple(layer % old for layer in range(new)), frozenset()
    if method == "interleave":
        return tuple(layer * old // new for layer in range(new)), frozenset()
    # Spread the new layers evenly, with the last one at the end. starts: the first copy of each old layer.
    starts = [layer + layer * (new - old) // old for layer in range(old + 1)]
    layers = tuple(layer for layer in range(old) for _ in range(starts[layer], starts[layer + 1]))
    return layers, frozenset(range(new)) - set(starts)


def _map_stream(old: int, new: int, copies: bool) -> tuple[int, ...]:
    """Map new channels to old ones: whole copies one after another, then new ones, so the first stay first."""
    copied = new // old * old if copies else old
    return tuple(index % old if index < copied else -1 for index in range(new))


def _map_heads(
    config: HeadwaterConfig, queries: int, heads: int, copies: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Map each key/value head and each query head to an old one. Copies of a head are placed next to it."""
    old, group = config.num_key_value_heads, config.num_attention_heads // config.num_key_value_heads
    if queries % heads:
        raise HeadwaterError(
            f"num_attention_heads {queries} is not divisible by num_key_value_heads {heads}; change one of them."
        )
    size = queries // heads
    kv = tuple(index * old // heads if copies else index if index < old else -1 for index in range(heads))
    q = []
    for head, source in enumerate(kv):
        nth = head - kv.index(source)  # index of this copy among the copies of its source
        for index in range(size):
            position = nth * size + index if copies else index
            is_copied = source >= 0 and (copies or position < group)
            q.append(source * group + position % group if is_copied else -1)
    if set(q) - {-1} != set(range(config.num_attention_heads)):
        how_many = "by a whole number" if copies else "only where they are copied, as by the method lemon"
        raise HeadwaterError(
            f"Key/value heads can grow without their query heads {how_many}, so that each query head keeps its own; or "
            "grow num_attention_heads and num_key_value_heads by the same factor."
        )
    return kv, tuple(q)


def _check_exact(config: HeadwaterConfig, growth: GrowthMap) -> None:
    """Raise `HeadwaterError` where modules of the model itself would not preserve the function."""
    advice = "use the method net2net, which does not keep the function"
    if config.position == "alibi" and len(growth.q) > config.num_attention_heads:
        raise HeadwaterError(f"ALiBi's slopes depend on the number of heads; grow other sizes, or {advice}.")
    if growth.widens and config.position == "sincos":
        raise HeadwaterError(
            f"Fixed sines and cosines differ in a wider residual stream; grow other sizes, or {advice}."
        )
    if not growth.pads:
        return
    instead = f"double hidden_size with the method hypercloning, grow other sizes, or {advice}"
    if not (config.norm_weight and config.final_norm_weight):
        raise HeadwaterError(
            f"New channels change what the residual stream is divided by, and norms without weights cannot compensate "
            f"for it; {instead}."
        )
    if config.qk_norm:
        raise HeadwaterError(
            f"New channels of the residual stream need another norm_eps, which the norms of queries and keys (qk_norm) "
            f"share; {instead}."
        )
    if growth.padding == "mean" and (config.output_norms or config.embedding_norm):
        raise HeadwaterError(
            f"Under LayerNorm new channels hold the mean of the others, which output_norms and embedding_norm would "
            f"not give them; {instead}."
        )
