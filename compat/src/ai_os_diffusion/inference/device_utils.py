"""AI-OS Diffusion's device selection."""

from anytorch_compat.system import get_best_device as get_best_device

__all__ = ["get_best_device"]
