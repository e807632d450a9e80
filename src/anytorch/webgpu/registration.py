"""Registers every kernel with torch's dispatcher. The libraries live as long as the process."""

from __future__ import annotations

import torch

from anytorch.webgpu import autocast, copies, fallback, moving, pinning, printing, tensors
from anytorch.webgpu.ops import (
    attention,
    bags,
    batch_norm,
    convolution,
    decompositions,
    elementwise,
    foreach,
    indexing,
    losses,
    masks,
    matmul,
    norms,
    optimizers,
    pooling,
    quantized,
    random,
    recurrent,
    reductions,
    resampling,
    scans,
    scattering,
    shapes,
    softmax,
    sorting,
)

_libraries: list[torch.library.Library] = []


def register() -> None:
    library = torch.library.Library("aten", "IMPL")
    everything = torch.library.Library("_", "IMPL")
    _libraries.extend((library, everything))
    tensors.register(library)
    moving.patch_modules()
    printing.patch_formatter()
    copies.register(library)
    pinning.register(library)
    elementwise.register(library)
    random.register(library)
    optimizers.register(library)
    foreach.register(library)
    autocast.register(library)
    reductions.register(library)
    matmul.register(library)
    softmax.register(library)
    norms.register(library)
    batch_norm.register(library)
    convolution.register(library)
    losses.register(library)
    indexing.register(library)
    scattering.register(library)
    masks.register(library)
    bags.register(library)
    shapes.register(library)
    scans.register(library)
    attention.register(library)
    pooling.register(library)
    sorting.register(library)
    resampling.register(library)
    recurrent.register(library)
    quantized.register(library)
    fallback.register(library)
    everything.fallback(fallback.fallback, "PrivateUse1")
    # Without this every op fails inside autocast; the lists of ops to cast are registered by `autocast`.
    casts = torch.library.Library("_", "IMPL")
    _libraries.append(casts)
    casts.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    # After every family: a decomposition is for what none of them has a kernel for.
    decompositions.register(library)
