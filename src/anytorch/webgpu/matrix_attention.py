"""Attention on matrix cores: which blocks the kernel of `gpu.spirv.attention` could take, and whether it is faster here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from anytorch import settings
from anytorch.gpu.layer import Spirv
from anytorch.gpu.profile import stopwatch_of
from anytorch.gpu.runtime import Runtime
from anytorch.gpu.spirv import attention as spirv
from anytorch.gpu.wgsl.attention_kernel import Attention
from anytorch.measured.answers import near
from anytorch.measured.engine import Candidate, measure
from anytorch.measured.store import recall, remember
from anytorch.measured.verdict import Question
from anytorch.webgpu.matrix_products import in_use, shape_of
from anytorch.webgpu.tuning import COMPILING, MOST_ERROR, ROUNDS, SAMPLE_S, rounded

FORM = "cores"
BLOCKS = ((128, 32, 2), (64, 64, 2), (64, 32, 1))  # queries, keys, and matrices of queries in a subgroup
SOFTWARE_BLOCKS = ((32, 16, 2),)
LEAST_QUERIES = 16
WORTH_MEASURING = 1 << 24  # multiplications

Run = Callable[[Attention], torch.Tensor]


def offered(runtime: Runtime, kernel: Attention, queries: int) -> list[Attention]:
    """The kernels for matrix cores that could stand in for this one; [] where there are none."""
    dtype = getattr(torch, kernel.dtype)
    if not in_use(runtime, dtype) or queries < LEAST_QUERIES or kernel.dimension % 8:
        return []
    limits = runtime.limits
    memory, threads = (
        int(limits[f"max-compute-{name}"]) for name in ("workgroup-storage-size", "invocations-per-workgroup")
    )
    blocks = SOFTWARE_BLOCKS if runtime.adapter.software else BLOCKS
    made = [replace(kernel, form=FORM, queries=block, keys=keys, stacked=stacked) for block, keys, stacked in blocks]
    return [one for one in made if spirv.fits(one, shape_of(runtime, dtype), memory, threads)]


def rendered(runtime: Runtime, kernel: Attention) -> Spirv:
    shape = shape_of(runtime, getattr(torch, kernel.dtype))
    return Spirv(spirv.render(kernel, shape), runtime.matrix_cores.required_subgroup)


def choose(runtime: Runtime, kernel: Attention, sizes: tuple[int, int, int], run: Run) -> Attention:
    """The faster of a WGSL kernel and those for matrix cores, for so many heads in all, queries and keys.

    `run` computes the output with a kernel, into memory of its own.
    """
    heads, queries, keys = sizes
    made = offered(runtime, kernel, queries)
    if not made:
        return kernel
    if settings.get("webgpu_matrix_cores") == "on":
        return made[0]
    if heads * queries * keys * kernel.dimension < WORTH_MEASURING:
        return kernel
    adapter = runtime.adapter
    hidden = ("causal " if kernel.causal else "") + (f"masked by {kernel.mask} " if kernel.mask else "")
    size = "x".join(str(rounded(length)) for length in sizes)
    title = f"{kernel.dtype} {hidden}{size}x{kernel.dimension}"
    question = Question.of("attention", title, f"{adapter.name} {adapter.driver} {adapter.api}", case=title)
    by_name = {_name(one): one for one in (*made, kernel)}
    budget_s = COMPILING * float(settings.get("measure_s"))
    verdict = recall(question, names=by_name, budget_s=budget_s)
    if verdict is None and runtime.recorder is not None:
        return kernel  # what is tried would be recorded with the rest
    if verdict is None:
        runtime.synchronize()
        try:
            truth = run(kernel)
            check = near(truth, dtype=truth.dtype)
        except torch.OutOfMemoryError:
            return kernel
        verdict = measure(
            question,
            [Candidate.of(name, partial(run, one)) for name, one in by_name.items()],
            check,
            most_error=MOST_ERROR[truth.dtype],
            stopwatch=stopwatch_of(runtime),
            budget_s=budget_s,
            rounds=ROUNDS,
            sample_s=SAMPLE_S,
        )
        remember(verdict)
    return by_name.get(verdict.chosen, kernel)


def _name(kernel: Attention) -> str:
    return f"{'matrix cores' if kernel.form == FORM else kernel.form} {kernel.queries}x{kernel.keys}"
