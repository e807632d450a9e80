"""AI-OS Diffusion's device selection: a re-export of anytorch's."""

from anytorch import get_best_device as get_best_device

__all__ = ["get_best_device"]
