"""AI-OS Diffusion's inference names."""

from anytorch_compat.system import get_best_device as get_best_device

from anytorch import ArrowEngine as ArrowEngine

__all__ = ["ArrowEngine", "get_best_device"]
