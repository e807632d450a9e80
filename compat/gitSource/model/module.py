"""`model.module` of the original: its layers, which are anytorch's under other names; they take the published arguments."""

from anytorch.forecast.model.layers import CrossAttention as MultiHeadCrossAttentionWithRoPE
from anytorch.forecast.model.layers import FeedForward as FeedForward
from anytorch.forecast.model.layers import RMSNorm as RMSNorm
from anytorch.forecast.model.layers import Rotary as RotaryPositionalEmbedding
from anytorch.forecast.model.layers import SelfAttention as MultiHeadAttentionWithRoPE
from anytorch.forecast.model.layers import TransformerBlock
from anytorch.forecast.model.model import DependencyLayer as DependencyAwareLayer
from anytorch.forecast.model.model import DualHead as DualHead
from anytorch.forecast.model.model import FixedEmbedding as FixedEmbedding
from anytorch.forecast.model.model import PairEmbedding as HierarchicalEmbedding
from anytorch.forecast.model.model import TimeEmbedding as TemporalEmbedding
from anytorch.forecast.model.tokenizer import BinarySphericalQuantizer as BinarySphericalQuantizer
from anytorch.forecast.model.tokenizer import BitQuantizer as BSQuantizer

__all__ = [
    "BSQuantizer",
    "BinarySphericalQuantizer",
    "DependencyAwareLayer",
    "DualHead",
    "FeedForward",
    "FixedEmbedding",
    "HierarchicalEmbedding",
    "MultiHeadAttentionWithRoPE",
    "MultiHeadCrossAttentionWithRoPE",
    "RMSNorm",
    "RotaryPositionalEmbedding",
    "TemporalEmbedding",
    "TransformerBlock",
]
