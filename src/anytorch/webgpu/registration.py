"""Registers every kernel with torch's dispatcher. The libraries live as long as the process."""

from __future__ import annotations

import torch

from anytorch.webgpu import autocast, copies, fallback, patches, tensors
from anytorch.webgpu.ops import (
    activation,
    arithmetic,
    attention,
    bags,
    comparison,
    convolution,
    creation,
    decompositions,
    foreach,
    indexing,
    losses,
    masks,
    matmul,
    norms,
    optimizers,
    pointwise_losses,
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

ELEMENTWISE = (arithmetic, comparison, activation, pointwise_losses, creation)
FAMILIES = (
    *(
        tensors,
        copies,
        patches,
        *ELEMENTWISE,
        random,
        optimizers,
        foreach,
        autocast,
        reductions,
        matmul,
        softmax,
        norms,
    ),
    *(convolution, losses, indexing, scattering, masks, bags, shapes, scans, attention, pooling, sorting, resampling),
    *(recurrent, quantized, fallback),
    decompositions,  # after every family: a decomposition is for what none of them has a kernel for
)
_libraries: list[torch.library.Library] = []


def register() -> None:
    library, everything, casts = (torch.library.Library(name, "IMPL") for name in ("aten", "_", "_"))
    _libraries.extend((library, everything, casts))
    for family in FAMILIES:
        family.register(library)
    everything.fallback(fallback.fallback, tensors.KEY)
    # Without this every op fails inside autocast; the lists of ops to cast are registered by `autocast`.
    casts.fallback(torch.library.fallthrough_kernel, autocast.KEY)
