"""The mechanisms, one file each, which opens with the paper, its equation and our departures from it.

Each class is a plain `nn.Module` for any PyTorch model, but for those by which layers only share, and also describes
what it does in a headwater model.
"""

from headwater.mechanisms.backout import Backout
from headwater.mechanisms.contract import KV, Ancestors, AttentionInputs, Context, Cost, Hidden, Mechanism
from headwater.mechanisms.dense_former import DenseFormer
from headwater.mechanisms.depth_attention import DepthAttention
from headwater.mechanisms.embedding_residual import EmbeddingResidual
from headwater.mechanisms.exclusive import Exclusive
from headwater.mechanisms.kv_shift import KVShift
from headwater.mechanisms.kv_source import KVSource
from headwater.mechanisms.mudd import MUDD
from headwater.mechanisms.neutreno import NeuTRENO
from headwater.mechanisms.ngram_memory import NGramMemory, NGramTable
from headwater.mechanisms.output_gate import OutputGate
from headwater.mechanisms.pattention import Pattention
from headwater.mechanisms.persistent_memory import PersistentMemory
from headwater.mechanisms.short_conv import ShortConv
from headwater.mechanisms.skip_layer import SkipLayer
from headwater.mechanisms.smear import Smear
from headwater.mechanisms.svformer import SVFormer
from headwater.mechanisms.value_embedding import ValueEmbedding, ValueTables
from headwater.mechanisms.value_residual import PlusWeights, ValueResidual

__all__ = [
    "KV",
    "MUDD",
    "Ancestors",
    "AttentionInputs",
    "Backout",
    "Context",
    "Cost",
    "DenseFormer",
    "DepthAttention",
    "EmbeddingResidual",
    "Exclusive",
    "Hidden",
    "KVShift",
    "KVSource",
    "Mechanism",
    "NGramMemory",
    "NGramTable",
    "NeuTRENO",
    "OutputGate",
    "Pattention",
    "PersistentMemory",
    "PlusWeights",
    "SVFormer",
    "ShortConv",
    "SkipLayer",
    "Smear",
    "ValueEmbedding",
    "ValueResidual",
    "ValueTables",
]
