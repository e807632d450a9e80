"""Run models that are larger than the device: tiers of memory with enforced budgets, a planner, and a mover.

Importing this package imports nothing else. The way data flows: `units` (what moves) → `plan` (where it rests; pure) →
`placement` (puts it there) → `mover` (brings it up, pass after pass) → the module's own forward.
`anytorch.memory("cpu")` still answers with the memory facts of a device: the package can be called.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

from anytorch.lazy import lazy_names

if TYPE_CHECKING:
    import torch

    from anytorch.devices.types import MemoryUse
    from anytorch.memory.caching import tiered_cache as tiered_cache
    from anytorch.memory.checkpointing import activations as activations
    from anytorch.memory.fitting import fit as fit
    from anytorch.memory.fitting import fitted as fitted
    from anytorch.memory.fitting import unfit as unfit
    from anytorch.memory.handle import Fitted as Fitted
    from anytorch.memory.levels import create_tiers as create_tiers
    from anytorch.memory.loading import load as load
    from anytorch.memory.plan import make_plan as make_plan
    from anytorch.memory.rescue import with_rescue as with_rescue
    from anytorch.memory.resume import resume_training as resume_training
    from anytorch.memory.resume import save_training as save_training
    from anytorch.memory.stack import TensorStack as TensorStack
    from anytorch.memory.training import TieredOptimizer as TieredOptimizer
    from anytorch.memory.types import Block as Block
    from anytorch.memory.types import Budgets as Budgets
    from anytorch.memory.types import Plan as Plan
    from anytorch.memory.types import Speeds as Speeds
    from anytorch.memory.types import Step as Step

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        "caching": "tiered_cache",
        "checkpointing": "activations",
        "fitting": "fit fitted unfit",
        "handle": "Fitted",
        "levels": "create_tiers",
        "loading": "load",
        "plan": "make_plan",
        "rescue": "with_rescue",
        "resume": "resume_training save_training",
        "stack": "TensorStack",
        "training": "TieredOptimizer",
        "types": "Block Budgets Plan Speeds Step",
    },
    moved={"apt_model.optimization.vgpu_stack": "VGPULevel VGPUStack VGPUStackLinear create_vgpu_stack"},
)


class _CallablePackage(ModuleType):
    """A package that is also the question `anytorch.memory(device)`: bytes allocated, free and total on a device."""

    def __call__(self, device: str | torch.device | None = None) -> MemoryUse:
        from anytorch.devices.memory import memory

        return memory(device)


sys.modules[__name__].__class__ = _CallablePackage
