"""Multi-head latent attention, absorbed: one cached vector is both key and value. arXiv 2405.04434 (DeepSeek-V2).

    V_l := K_l        as attended to: after the layer's mechanisms, norm and RoPE

In section 2.1 of the paper the keys and values of all heads are linear maps of a latent vector c of few channels, and
one more key, with RoPE, is shared by all heads. At inference the query and output projections absorb these maps: all
heads attend to one key [RoPE(k), c], and read c as its value. That is this mechanism in a model with one key/value head
whose `head_dim` is the width of that vector and whose `partial_rotary_factor` is the share of its channels with RoPE.
It caches `head_dim` numbers per token and layer. With more key/value heads, each is its own value.

Departures: heads also read the channels with RoPE, which the output projection may ignore. The latent has no norm, and
the queries no low-rank map. For a latent that keeps RoPE on whole keys, and is expanded, see `low_rank_kv`.
"""

from headwater.config.plan import LayerPlan
from headwater.config.text import HeadwaterConfig
from headwater.mechanisms.contract import Mechanism, OptionValues
from headwater.mechanisms.shared_options import keep_options


class MLA(Mechanism):
    """Lets heads read the keys as values, without a module. No layer projects or caches values."""

    source = "the current token, through one vector for keys and values"
    order = 85
    paper = "2405.04434"

    @classmethod
    def redirect_heads(cls, options: OptionValues, config: HeadwaterConfig, plans: list[LayerPlan]) -> list[LayerPlan]:
        return [plan.reading_keys() for plan in plans]

    # Capabilities

    grow_options = staticmethod(keep_options)

    per_head = per_token = True
