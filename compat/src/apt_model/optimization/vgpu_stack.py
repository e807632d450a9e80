"""The tiers of memory as document 5 names them: re-exports of anytorch's."""

from anytorch.memory.stack import VGPULevel as VGPULevel
from anytorch.memory.stack import VGPUStack as VGPUStack
from anytorch.memory.stack import VGPUStackLinear as VGPUStackLinear
from anytorch.memory.stack import create_vgpu_stack as create_vgpu_stack

__all__ = ["VGPULevel", "VGPUStack", "VGPUStackLinear", "create_vgpu_stack"]
