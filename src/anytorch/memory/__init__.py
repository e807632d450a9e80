"""Run models that are larger than the device: tiers of memory with enforced budgets, a planner, and a mover.

Importing this package imports nothing else. The way data flows: `units` (what moves) → `plan` (where it rests; pure) →
`fitted_model` (puts it there) → `mover` (brings it up, pass after pass) → the module's own forward.
`anytorch.memory("cpu")` still answers with the memory facts of a device: the package can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from anytorch.devices.types import MemoryUse
    from anytorch.memory.caching import tiered_cache as tiered_cache
    from anytorch.memory.checkpointing import activations as activations
    from anytorch.memory.fitted_model import Fitted as Fitted
    from anytorch.memory.fitting import fit as fit
    from anytorch.memory.fitting import fitted as fitted
    from anytorch.memory.fitting import unfit as unfit
    from anytorch.memory.levels import create_tiers as create_tiers
    from anytorch.memory.loading import load as load
    from anytorch.memory.plan import make_plan as make_plan
    from anytorch.memory.rescue import with_rescue as with_rescue
    from anytorch.memory.resume import resume_training as resume_training
    from anytorch.memory.resume import save_training as save_training
    from anytorch.memory.stack import VGPULevel as VGPULevel
    from anytorch.memory.stack import VGPUStack as VGPUStack
    from anytorch.memory.stack import VGPUStackLinear as VGPUStackLinear
    from anytorch.memory.stack import create_vgpu_stack as create_vgpu_stack
    from anytorch.memory.training import TieredOptimizer as TieredOptimizer
    from anytorch.memory.types import Budgets as Budgets
    from anytorch.memory.types import Speeds as Speeds
    from anytorch.memory.types import Step as Step
    from anytorch.memory.types import TierPlan as TierPlan
    from anytorch.memory.types import WeightBlock as WeightBlock

PUBLIC: dict[str, str] = {
    "Budgets": "anytorch.memory.types",
    "Fitted": "anytorch.memory.fitted_model",
    "Speeds": "anytorch.memory.types",
    "Step": "anytorch.memory.types",
    "TierPlan": "anytorch.memory.types",
    "TieredOptimizer": "anytorch.memory.training",
    "VGPULevel": "anytorch.memory.stack",
    "VGPUStack": "anytorch.memory.stack",
    "VGPUStackLinear": "anytorch.memory.stack",
    "WeightBlock": "anytorch.memory.types",
    "activations": "anytorch.memory.checkpointing",
    "create_tiers": "anytorch.memory.levels",
    "create_vgpu_stack": "anytorch.memory.stack",
    "fit": "anytorch.memory.fitting",
    "fitted": "anytorch.memory.fitting",
    "load": "anytorch.memory.loading",
    "make_plan": "anytorch.memory.plan",
    "resume_training": "anytorch.memory.resume",
    "save_training": "anytorch.memory.resume",
    "tiered_cache": "anytorch.memory.caching",
    "unfit": "anytorch.memory.fitting",
    "with_rescue": "anytorch.memory.rescue",
}
__all__ = list(PUBLIC)


def __getattr__(name: str) -> Any:
    if name not in PUBLIC:
        raise AttributeError(f"module 'anytorch.memory' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(PUBLIC[name]), name)
    globals()[name] = value
    return value


class _CallablePackage(ModuleType):
    """A package that is also the question `anytorch.memory(device)`: bytes allocated, free and total on a device."""

    def __call__(self, device: str | torch.device | None = None) -> MemoryUse:
        from anytorch.devices.memory import memory

        return memory(device)


sys.modules[__name__].__class__ = _CallablePackage
