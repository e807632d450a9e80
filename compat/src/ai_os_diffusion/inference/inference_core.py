"""AI-OS Diffusion's engine: a re-export of anytorch's."""

from anytorch import ArrowEngine as ArrowEngine

__all__ = ["ArrowEngine"]
