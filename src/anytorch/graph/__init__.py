"""Kernel graphs: one form of a computation that all of our generated kernels come from, searched and verified.

ir ops sizes          the graph: nodes with shapes that may be known later
kernel_graph capture  how one is made: op by op, or from a PyTorch function
tracer tracing whole  ATen's ops, one by one, and functions that are kept whole
lower rewrite         composite ops by their parts; other graphs for the same function
loops partition       groups of nodes as loops over axes
emit/                 loops → text: C++, Triton, WGSL
back/ program         text → something that runs
field verify          the gates: whole numbers modulo a prime, then float64
patterns handwritten  kernels that were written by hand: what they compute, and where they could
racing search         theirs and generated ones: variants, kernels, schedules; checked, timed, remembered
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytorch.lazy import lazy_names

if TYPE_CHECKING:
    from anytorch.graph.capture import TracedGraph as TracedGraph
    from anytorch.graph.capture import trace as trace
    from anytorch.graph.kernel_graph import DTensor as DTensor
    from anytorch.graph.kernel_graph import KernelGraph as KernelGraph
    from anytorch.graph.kernel_graph import new_kernel_graph as new_kernel_graph

__getattr__, __dir__, __all__ = lazy_names(
    __name__, {"capture": "TracedGraph trace", "kernel_graph": "DTensor KernelGraph new_kernel_graph"}
)
