"""TorchScript: `.cuda()` and "cuda" in a compiled function are C++'s, so the function's graph is changed when it is made."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from anytorch.run.ledger import Ledger
from anytorch.run.patches import Patches
from anytorch.run.place import NAME, Place

CALL = """
graph(%x):
  %moved = aten::cuda(%x)
  return (%moved)"""
MOVE = """
graph(%x):
  %device : Device = prim::Constant[value="{device}"]()
  %none : NoneType = prim::Constant()
  %false : bool = prim::Constant[value=0]()
  %moved = aten::to(%x, %device, %none, %false, %false)
  return (%moved)"""


def install(patches: Patches, place: Place, ledger: Ledger) -> None:
    def rewrite(graph: Any) -> None:
        moves = len(graph.findAllNodes("aten::cuda", True))
        if moves:
            torch._C._jit_pass_custom_pattern_based_rewrite_graph(CALL, MOVE.format(device=place.real()), graph)
        named = [
            node
            for node in graph.findAllNodes("prim::Constant", True)
            if str(node.output().type()) == "Device" and node.s("value").split(":")[0] == NAME
        ]
        for node in named:
            node.s_("value", str(place.of(node.s("value"))))
        for _ in range(moves + len(named)):
            ledger.redirect("cuda in TorchScript")

    plain_compile: Any = torch._C._jit_script_compile
    recursive: Any = torch.jit._recursive
    plain_module = recursive.create_script_module_impl

    def compile_function(*args: Any, **kwargs: Any) -> Any:
        function = plain_compile(*args, **kwargs)
        rewrite(function.graph)
        return function

    def make_module(*args: Any, **kwargs: Any) -> Any:
        module = plain_module(*args, **kwargs)
        for name in module._c._method_names():
            rewrite(module._c._get_method(name).graph)
        return module

    # What torch has compiled before names another device, and what it compiles now is of no use afterwards.
    for name in ("_jit_caching_layer", "_jit_function_overload_caching"):
        patches.set(torch.jit._state, name, weakref.WeakKeyDictionary())
    patches.set(recursive, "concrete_type_store", recursive.ConcreteTypeStore())
    patches.set(torch._C, "_jit_script_compile", compile_function)
    patches.set(recursive, "create_script_module_impl", make_module)
