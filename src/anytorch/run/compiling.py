"""`torch.compile`: inductor where it can compile for the device, else the device's own compiler, else plain running."""

from __future__ import annotations

import shutil
import sys
from types import FunctionType
from typing import Any

import torch

from anytorch.run.ledger import Ledger
from anytorch.run.patches import Patches
from anytorch.run.place import Place

DYNAMO = "torch._dynamo"
FOR_CUDA = frozenset({"inductor", "cudagraphs"})
COMPILERS = ("c++", "g++", "clang++", "cl")


def install(patches: Patches, place: Place, ledger: Ledger) -> None:
    plain: Any = torch.compile
    own = getattr(place.module, "compile_graph", None)
    inductor = (place.host and any(map(shutil.which, COMPILERS))) or place.caps(0).triton

    def compile(model: Any = None, *, backend: Any = "inductor", **kwargs: Any) -> Any:
        if backend not in FOR_CUDA or (inductor and backend == "inductor"):
            return plain(model, backend=backend, **kwargs)
        for name in ("mode", "options"):  # inductor's own
            if kwargs.pop(name, None) is not None:
                ledger.ignore(f"torch.compile({name}=…)")
        if own is not None:
            ledger.redirect("torch.compile(), by the device's own compiler")
            return plain(model, backend=own, **kwargs)
        ledger.ignore("torch.compile()")
        return plain(model, backend="eager", **kwargs)

    patches.set(torch, "compile", compile)
    if DYNAMO in sys.modules:
        know_the_plain_functions(patches, sys.modules[DYNAMO])


def know_the_plain_functions(patches: Patches, dynamo: Any) -> None:
    """Tell torch's tracer, once it is loaded, about the functions behind ours: it looks them up by their names in torch,
    finds ours there, and would not know what those call."""
    rules: dict[Any, Any] = dynamo.trace_rules.get_torch_obj_rule_map()
    for ours, plain in patches.replaced:
        if isinstance(ours, FunctionType) and ours in rules and plain not in rules:
            rules[plain] = rules.pop(ours)
