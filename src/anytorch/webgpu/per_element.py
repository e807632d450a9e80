"""Launches kernels with a thread per element of their result (`gpu.wgsl.per_element`) on tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from anytorch.gpu.launch import Plan
from anytorch.gpu.plans import plans
from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl.per_element import WORKGROUP, PerElement, render
from anytorch.webgpu.copies import contiguous, narrowed
from anytorch.webgpu.dtypes import name_of, word_dtype
from anytorch.webgpu.launch import plan_over
from anytorch.webgpu.tensors import new_contiguous, new_tensor

Named = Sequence[tuple[str, torch.Tensor]]
Numbers = Sequence[tuple[str, str, Any]]  # name, WGSL type, value


def per_element_plan(
    inputs: Named, outputs: Named, parameters: Numbers, count: int, body: str, functions: str = "", added: str = ""
) -> Plan:
    """A plan with all its numbers: only the tensors change between two calls."""
    kernel = PerElement(
        tuple((name, name_of(tensor.dtype)) for name, tensor in inputs),
        tuple((name, name_of(tensor.dtype)) for name, tensor in outputs),
        tuple(f"{name}: {kind}" for name, kind, _ in parameters),
        body,
        functions,
        added,
        bool(added) and "shader-float32-atomic" in open_runtime().features,
    )
    places = [tensor.dtype.itemsize for _, tensor in (*inputs, *outputs)]
    tail = [float(value) if kind == "f32" else int(value) for _, kind, value in parameters]
    return plan_over(count, kernel, render, places, kernel.writable, WORKGROUP, tail=tail)


def per_element(
    inputs: Named, outputs: Named, parameters: Numbers, count: int, body: str, functions: str = "", added: str = ""
) -> None:
    """Run `body` for i in range(count). The output named `added` is added to, not written."""
    if not count:
        return
    tensors = [tensor for _, tensor in (*inputs, *outputs)]
    key = (body, functions, added, count, *[value for _, _, value in parameters], *[tensor.dtype for tensor in tensors])
    plan = plans[key]
    if plan is None:
        plan = plans[key] = per_element_plan(inputs, outputs, parameters, count, body, functions, added)
    addresses = [tensor.data_ptr() for tensor in tensors]
    if not all(addresses):  # an empty operand has no buffer; one of another operand stands in and is never read
        stand_in = next(address for address in addresses if address)
        addresses = [address or stand_in for address in addresses]
    plan(addresses)


def computed(
    inputs: Named,
    results: Mapping[str, Sequence[int]],
    dtype: torch.dtype,
    parameters: Numbers,
    body: str,
    functions: str = "",
) -> list[torch.Tensor]:
    """New contiguous tensors of these sizes and of `dtype`: `body` runs per element of the first, on dense inputs."""
    made = [(name, new_contiguous(size, word_dtype(dtype))) for name, size in results.items()]
    dense = [(name, contiguous(tensor)) for name, tensor in inputs]
    per_element(dense, made, parameters, made[0][1].numel(), body, functions)
    return [narrowed(tensor, dtype) for _, tensor in made]


def new_words(like: torch.Tensor) -> torch.Tensor:
    """A tensor with the geometry of a meta tensor, in the dtype a kernel can write it in."""
    return new_tensor(like.size(), like.stride(), word_dtype(like.dtype))
