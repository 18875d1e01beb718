"""The mechanisms, one file each, which opens with the paper, its equation and our departures from it.

Each class is a plain `nn.Module` for any PyTorch model, except the ones that only let layers share, and also describes
what it does in a headwater model. A class is imported when it is first used.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING, Any

from headwater.mechanisms.contract import KV, QKV, Ancestors, AttentionInputs, Context, Cost, Hidden, Mechanism
from headwater.plugins.mechanisms import MECHANISM_CLASSES as _MODULES

if TYPE_CHECKING:  # for editors and type checkers; tests/test_api.py compares it with the folder
    from headwater.mechanisms.backout import Backout as Backout
    from headwater.mechanisms.dense_former import DenseFormer as DenseFormer
    from headwater.mechanisms.depth_attention import DepthAttention as DepthAttention
    from headwater.mechanisms.embedding_residual import EmbeddingResidual as EmbeddingResidual
    from headwater.mechanisms.exclusive import Exclusive as Exclusive
    from headwater.mechanisms.kv_shift import KVShift as KVShift
    from headwater.mechanisms.kv_source import KVSource as KVSource
    from headwater.mechanisms.low_rank_kv import LowRankKV as LowRankKV
    from headwater.mechanisms.mla import MLA as MLA
    from headwater.mechanisms.mudd import MUDD as MUDD
    from headwater.mechanisms.neutreno import NeuTRENO as NeuTRENO
    from headwater.mechanisms.ngram_memory import NGramMemory as NGramMemory
    from headwater.mechanisms.ngram_memory import NGramTable as NGramTable
    from headwater.mechanisms.output_gate import OutputGate as OutputGate
    from headwater.mechanisms.pattention import Pattention as Pattention
    from headwater.mechanisms.persistent_memory import PersistentMemory as PersistentMemory
    from headwater.mechanisms.short_conv import ShortConv as ShortConv
    from headwater.mechanisms.skip_layer import SkipLayer as SkipLayer
    from headwater.mechanisms.smear import Smear as Smear
    from headwater.mechanisms.svformer import SVFormer as SVFormer
    from headwater.mechanisms.value_embedding import ValueEmbedding as ValueEmbedding
    from headwater.mechanisms.value_embedding import ValueTables as ValueTables
    from headwater.mechanisms.value_residual import PlusWeights as PlusWeights
    from headwater.mechanisms.value_residual import ValueResidual as ValueResidual

__all__ = ["KV", "QKV", "Ancestors", "AttentionInputs", "Context", "Cost", "Hidden", "Mechanism"]
__all__ += sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return globals().setdefault(name, getattr(_import_module(_MODULES[name], __package__), name))


def __dir__() -> list[str]:
    return sorted(__all__)
