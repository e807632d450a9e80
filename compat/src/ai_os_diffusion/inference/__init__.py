"""AI-OS Diffusion's inference names: re-exports of anytorch's."""

from anytorch_compat import later

from anytorch import get_best_device as get_best_device

__getattr__ = later(__name__, {"ArrowEngine": "the embedding engine (issue 4)"})
__all__ = ["get_best_device"]
