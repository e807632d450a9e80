"""CTC loss: the forward walk with its losses, and the gradient. Lengths are the host's on every device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch

from anytorch.gpu.launch import grid
from anytorch.gpu.wgsl import ctc as wgsl
from anytorch.webgpu.copies import contiguous
from anytorch.webgpu.kernels import register_kernels
from anytorch.webgpu.launch import NoKernel, check_devices, launch, to_meta
from anytorch.webgpu.tensors import NAME, aten, new_contiguous

Lengths = Sequence[int]


class _Samples:
    """What the kernels are told of a batch."""

    def __init__(self, scores: torch.Tensor, targets: torch.Tensor, lengths: Sequence[Lengths], blank: int) -> None:
        self.scores = contiguous(scores)
        self.time, self.batch, self.classes = scores.shape
        inputs, sizes = (list(each) for each in lengths)
        self.longest = max(sizes, default=0)
        width = targets.shape[1] if targets.dim() == 2 else 0
        starts = [0, *accumulate(sizes)] if targets.dim() == 1 else [i * width for i in range(len(sizes))]
        triples = [number for triple in zip(inputs, sizes, starts, strict=False) for number in triple]
        self.lengths = torch.tensor(triples, dtype=torch.int32).to(NAME)
        # An operand without elements has no buffer to bind; nobody reads this one.
        self.targets = contiguous(targets.to(torch.int32)) if targets.numel() else self.lengths
        if self.targets.storage_offset():  # the kernels know no place in it: only the scores have one
            self.targets = self.targets.clone()
        self.states = 2 * self.longest + 1
        self.head = (self.time, self.batch, self.classes, self.states, self.longest, blank)

    def rows(self, groups: int) -> tuple[int, ...]:
        return (*self.head, grid(groups)[0])


def _groups(count: int) -> int:
    return -(-count // wgsl.THREADS)


def forward(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    op = aten._ctc_loss.default
    check_devices(op, log_probs, targets)
    # Checks what fits together as the CPU does. Not by `infer`: no two batches have the same lengths.
    loss, walk = op(to_meta(log_probs), to_meta(targets), list(input_lengths), list(target_lengths), blank)
    if log_probs.dtype is not torch.float32:
        raise NoKernel
    losses, alpha = (new_contiguous(each.shape, torch.float32) for each in (loss, walk))
    if not losses.numel():
        return losses, alpha
    if not alpha.numel():  # no time at all
        nothing = [0.0 if size == 0 else float("inf") for size in target_lengths]
        return torch.tensor(nothing).to(NAME), alpha
    samples = _Samples(log_probs, targets, (input_lengths, target_lengths), blank)
    _walk(samples, False, alpha, losses)
    return losses, alpha


def _walk(samples: _Samples, backward: bool, *written: torch.Tensor) -> None:
    """The scores alone have a place: the others are new."""
    bound = [samples.scores, samples.targets, samples.lengths, *written]
    writable = ((1 << len(written)) - 1) << 3
    kernel, groups = wgsl.Walk(backward), samples.batch
    launch(kernel, wgsl.render_walk, bound, groups, writable=writable, head=samples.rows(groups))


def backward(
    gradient: torch.Tensor,
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Lengths,
    target_lengths: Lengths,
    losses: torch.Tensor,
    alpha: torch.Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> torch.Tensor:
    check_devices(aten._ctc_loss_backward.default, gradient, log_probs, targets, losses, alpha)
    if any(t.dtype is not torch.float32 for t in (gradient, log_probs, losses, alpha)):
        raise NoKernel
    result = new_contiguous(log_probs.shape, torch.float32)
    if not result.numel():
        return result
    samples = _Samples(log_probs, targets, (input_lengths, target_lengths), blank)
    beta = new_contiguous(alpha.shape, torch.float32)
    _walk(samples, True, beta)
    labels = samples.longest * samples.batch
    chain = new_contiguous((max(labels, 1),), torch.int32)
    if labels:
        groups, bound = _groups(labels), [samples.targets, samples.lengths, chain]
        launch(wgsl.Chain(), wgsl.render_chain, bound, groups, placed=0, writable=4, head=samples.rows(groups))
    pairs = torch.stack((losses, gradient.expand_as(losses)), 1)  # eight bindings are all that every adapter has
    first = [samples.scores, samples.targets, samples.lengths, pairs]
    kept = alpha if alpha.is_contiguous() and alpha.storage_offset() == 0 else alpha.clone().contiguous()
    for stage, walks, count in (
        ("all", [], result.numel()),
        ("states", [kept, beta, chain], samples.time * samples.batch * (samples.longest + 1)),
    ):
        bound = [*first, *walks, result]
        groups, kernel = _groups(count), wgsl.Gradient(stage, zero_infinity)
        writable = 1 << (len(bound) - 1)
        launch(kernel, wgsl.render_gradient, bound, groups, writable=writable, head=samples.rows(groups))
    return result


def _listed(kernel: Callable[..., Any], at: int) -> Callable[..., Any]:
    """The form with lengths as tensors, the arguments `at` and the next one."""

    def listed(*args: Any, **kwargs: Any) -> Any:
        lengths = [length.tolist() for length in args[at : at + 2]]
        return kernel(*args[:at], *lengths, *args[at + 2 :], **kwargs)

    return listed


def register(library: torch.library.Library) -> None:
    kernels: dict[str, Callable[..., Any]] = {
        "_ctc_loss": forward,
        "_ctc_loss_backward": backward,
        "_ctc_loss.Tensor": _listed(forward, 2),
        "_ctc_loss_backward.Tensor": _listed(backward, 3),
    }
    register_kernels(library, kernels)
