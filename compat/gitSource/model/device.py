"""`model.device` of the original: the one function it has."""

from anytorch import resolve_device as resolve_device

__all__ = ["resolve_device"]
