"""`torch.compile`: inductor where it can compile for the device, else the device's own compiler, else plain running."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch

from anytorch.run.ledger import Ledger, is_inside
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
        trace_as_the_program_sees_it(patches, place, sys.modules[DYNAMO])


def trace_as_the_program_sees_it(patches: Patches, place: Place, dynamo: Any) -> None:
    """Tell torch's tracer, once it is loaded, about the functions behind ours, and what tensors say to the program."""
    rules: dict[Any, Any] = dynamo.trace_rules.get_torch_obj_rule_map()
    folded: dict[Any, Any] = dynamo.variables.torch.constant_fold_functions
    for ours, plain in list(patches.replaced):
        if not isinstance(ours, FunctionType):
            continue
        # A tracer that is loaded now has looked functions up by their names in torch, and found ours there: give it
        # the plain ones, which stay right when ours have gone.
        if ours in folded and plain not in folded:
            folded[plain] = folded.pop(ours)
        if ours in rules and plain not in rules:
            rules[plain] = rules.pop(ours)
        if plain in folded:  # computed while tracing: ours gives the answer
            patches.set_item(folded, ours, None)
            patches.set_item(rules, ours, rules.get(plain))
    tensor = dynamo.variables.TensorVariable
    constant = dynamo.variables.ConstantVariable.create
    answers: dict[str, Callable[[torch.device], Any]] = {
        "method_attr_device": lambda shown: shown,
        "method_attr_is_cuda": lambda shown: True,
        "method_get_device": lambda shown: shown.index,
    }

    def answering(plain: Any, answer: Callable[[torch.device], Any]) -> Any:
        def ask(self: Any, tx: Any) -> Any:
            shown = place.shown_of.get(self.device)
            if shown is None or is_inside(tx.f_globals.get("__name__", "")):
                return plain(self, tx)
            return constant(answer(shown))

        return ask

    for name, answer in answers.items():
        if hasattr(tensor, name):
            patches.set(tensor, name, answering(getattr(tensor, name), answer))
