"""AI-OS Diffusion's inference names: re-exports of anytorch's."""

from anytorch import ArrowEngine as ArrowEngine
from anytorch import get_best_device as get_best_device

__all__ = ["ArrowEngine", "get_best_device"]
