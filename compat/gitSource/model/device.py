"""`model.device` of the original: the one function it has."""

from anytorch_compat.system import resolve_device as resolve_device

__all__ = ["resolve_device"]
