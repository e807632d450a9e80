"""`model.module` of the original: its layers, which are anytorch's under other names; they take the published arguments."""

from anytorch.models.kronos.layers import Block as TransformerBlock
from anytorch.models.kronos.layers import CrossAttention as MultiHeadCrossAttentionWithRoPE
from anytorch.models.kronos.layers import FeedForward as FeedForward
from anytorch.models.kronos.layers import RMSNorm as RMSNorm
from anytorch.models.kronos.layers import Rotary as RotaryPositionalEmbedding
from anytorch.models.kronos.layers import SelfAttention as MultiHeadAttentionWithRoPE
from anytorch.models.kronos.model import DependencyLayer as DependencyAwareLayer
from anytorch.models.kronos.model import DualHead as DualHead
from anytorch.models.kronos.model import FixedEmbedding as FixedEmbedding
from anytorch.models.kronos.model import PairEmbedding as HierarchicalEmbedding
from anytorch.models.kronos.model import TimeEmbedding as TemporalEmbedding
from anytorch.models.kronos.quantiser import BinarySphericalQuantizer as BinarySphericalQuantizer
from anytorch.models.kronos.tokenizer import BitQuantizer as BSQuantizer

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
