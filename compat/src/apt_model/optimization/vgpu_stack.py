"""The tiers of memory as document 5 names them."""

from anytorch_compat.stack import VGPULevel as VGPULevel
from anytorch_compat.stack import VGPUStack as VGPUStack
from anytorch_compat.stack import VGPUStackLinear as VGPUStackLinear
from anytorch_compat.stack import create_vgpu_stack as create_vgpu_stack

__all__ = ["VGPULevel", "VGPUStack", "VGPUStackLinear", "create_vgpu_stack"]
