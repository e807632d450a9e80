"""A small deep-learning library with no torch: tensors, gradients, layers, optimisers, quantization, in NumPy alone.

Importing this package imports nothing; every name below is loaded when it is first used. To read the whole of it, in order:

    device, dtypes      where numbers live and of what type a result is
    autograd            how gradients come about
    ops/                what can be computed, each with its gradient
    tensors, create     the tensor itself
    nn/                 layers
    optim, saving, quantize
    gpu/                the same on a GPU, through WebGPU
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytorch.lazy import lazy_names

if TYPE_CHECKING:
    from anytorch.lite import functional as functional
    from anytorch.lite.autograd import enable_grad as enable_grad
    from anytorch.lite.autograd import no_grad as no_grad
    from anytorch.lite.create import arange as arange
    from anytorch.lite.create import from_dlpack as from_dlpack
    from anytorch.lite.create import from_numpy as from_numpy
    from anytorch.lite.create import full as full
    from anytorch.lite.create import ones as ones
    from anytorch.lite.create import rand as rand
    from anytorch.lite.create import randn as randn
    from anytorch.lite.create import seed as seed
    from anytorch.lite.create import tensor as tensor
    from anytorch.lite.create import zeros as zeros
    from anytorch.lite.device import CustomDevice as CustomDevice
    from anytorch.lite.nn.layers import GELU as GELU
    from anytorch.lite.nn.layers import GRU as GRU
    from anytorch.lite.nn.layers import LSTM as LSTM
    from anytorch.lite.nn.layers import AvgPool2d as AvgPool2d
    from anytorch.lite.nn.layers import BatchNorm1d as BatchNorm1d
    from anytorch.lite.nn.layers import BatchNorm2d as BatchNorm2d
    from anytorch.lite.nn.layers import BCEWithLogitsLoss as BCEWithLogitsLoss
    from anytorch.lite.nn.layers import CrossEntropyLoss as CrossEntropyLoss
    from anytorch.lite.nn.layers import CustomConv2d as CustomConv2d
    from anytorch.lite.nn.layers import CustomLinear as CustomLinear
    from anytorch.lite.nn.layers import CustomMSELoss as CustomMSELoss
    from anytorch.lite.nn.layers import Dropout as Dropout
    from anytorch.lite.nn.layers import Embedding as Embedding
    from anytorch.lite.nn.layers import Flatten as Flatten
    from anytorch.lite.nn.layers import L1Loss as L1Loss
    from anytorch.lite.nn.layers import LayerNorm as LayerNorm
    from anytorch.lite.nn.layers import MaxPool2d as MaxPool2d
    from anytorch.lite.nn.layers import MultiheadAttention as MultiheadAttention
    from anytorch.lite.nn.layers import ReLU as ReLU
    from anytorch.lite.nn.layers import Sigmoid as Sigmoid
    from anytorch.lite.nn.layers import SiLU as SiLU
    from anytorch.lite.nn.layers import Softmax as Softmax
    from anytorch.lite.nn.layers import Tanh as Tanh
    from anytorch.lite.nn.layers import TransformerEncoderLayer as TransformerEncoderLayer
    from anytorch.lite.nn.module import Module as Module
    from anytorch.lite.nn.module import ModuleList as ModuleList
    from anytorch.lite.nn.module import Parameter as Parameter
    from anytorch.lite.nn.module import Sequential as Sequential
    from anytorch.lite.optim import SGD as SGD
    from anytorch.lite.optim import Adam as Adam
    from anytorch.lite.optim import AdamW as AdamW
    from anytorch.lite.optim import CustomAdam as CustomAdam
    from anytorch.lite.optim import Schedule as Schedule
    from anytorch.lite.optim import clip_grad_norm as clip_grad_norm
    from anytorch.lite.optim import clip_grad_value as clip_grad_value
    from anytorch.lite.optim import cosine_schedule as cosine_schedule
    from anytorch.lite.optim import exponential_schedule as exponential_schedule
    from anytorch.lite.optim import step_schedule as step_schedule
    from anytorch.lite.profiler import profile as profile
    from anytorch.lite.profiler import profiled as profiled
    from anytorch.lite.quantize import convert as convert
    from anytorch.lite.quantize import prepare as prepare
    from anytorch.lite.quantize import quantize_dynamic as quantize_dynamic
    from anytorch.lite.saving import load as load
    from anytorch.lite.saving import save as save
    from anytorch.lite.tensors import AutogradTensor as AutogradTensor
    from anytorch.lite.tensors import CustomTensor as CustomTensor

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "autograd": "enable_grad no_grad",
        "create": "arange from_dlpack from_numpy full ones rand randn seed tensor zeros",
        "device": "CustomDevice",
        "functional": "functional",
        "nn.layers": (
            "AvgPool2d BCEWithLogitsLoss BatchNorm1d BatchNorm2d CrossEntropyLoss CustomConv2d CustomLinear "
            "CustomMSELoss Dropout Embedding Flatten GELU GRU L1Loss LSTM LayerNorm MaxPool2d MultiheadAttention ReLU SiLU "
            "Sigmoid Softmax Tanh TransformerEncoderLayer"
        ),
        "nn.module": "Module ModuleList Parameter Sequential",
        "optim": (
            "Adam AdamW CustomAdam SGD Schedule clip_grad_norm clip_grad_value cosine_schedule exponential_schedule "
            "step_schedule"
        ),
        "profiler": "profile profiled",
        "quantize": "convert prepare quantize_dynamic",
        "saving": "load save",
        "tensors": "AutogradTensor CustomTensor",
    },
)
