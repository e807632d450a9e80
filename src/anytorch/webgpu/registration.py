"""Registers every kernel with torch's dispatcher. The libraries live as long as the process."""

from __future__ import annotations

import torch

from anytorch.webgpu import autocast, copies, fallback, graphs, patches, tensors, torch_accelerator
from anytorch.webgpu.ops import (
    activation,
    arithmetic,
    attention,
    comparison,
    complexes,
    convolution,
    creation,
    ctc,
    decompositions,
    indexing,
    layouts,
    linalg,
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
    sampling,
    scattering,
    shapes,
    softmax,
    sorting,
    spectral,
)

FAMILIES = (
    *(tensors, copies, patches, autocast),
    *(activation, arithmetic, attention, comparison, convolution, creation, ctc, indexing, layouts, linalg),
    *(losses, masks, matmul, norms, optimizers, pooling, quantized, random, recurrent, reductions, resampling),
    *(sampling, scattering, shapes, softmax, sorting, spectral, complexes),
    decompositions,  # after every family: a decomposition is for what none of them has a kernel for
)
_libraries: list[torch.library.Library] = []


def register() -> None:
    library, everything, casts = (torch.library.Library(name, "IMPL") for name in ("aten", "_", "_"))
    _libraries.extend((library, everything, casts))
    for family in FAMILIES:
        family.register(library)
    everything.fallback(fallback.fallback, tensors.KEY)
    layouts.register_fallbacks(everything)
    # Without this every op fails inside autocast; the lists of ops to cast are registered by `autocast`.
    casts.fallback(torch.library.fallthrough_kernel, autocast.KEY)
    graphs.register_back()
    torch_accelerator.register()
