"""`SyncBatchNorm` by collectives of whole tensors: torch's is made of kernels that few devices have."""

from __future__ import annotations

from typing import Any

import torch

from anytorch.run.ledger import Ledger
from anytorch.run.patches import Patches
from anytorch.run.place import Place

KERNEL = "aten::batch_norm_stats"


def install(patches: Patches, place: Place, ledger: Ledger) -> None:
    if torch._C._dispatch_has_kernel_for_dispatch_key(KERNEL, torch._C._dispatch_key_for_device(place.kind)):
        return
    norm: Any = torch.nn.SyncBatchNorm

    def forward(self: Any, input: torch.Tensor) -> torch.Tensor:
        from torch import distributed

        together = self.training and distributed.is_available() and distributed.is_initialized()
        group = self.process_group or distributed.group.WORLD if together else None
        if not together or distributed.get_world_size(group) == 1:
            alone: torch.Tensor = plain(self, input)
            return alone
        ledger.redirect("SyncBatchNorm")
        self._check_input_dim(input)
        return _normalised(self, input, group)

    plain: Any = torch.nn.modules.batchnorm._BatchNorm.forward
    patches.set(norm, "forward", forward)
    parallel: Any = torch.nn.parallel.DistributedDataParallel
    # It would refuse such layers on the CPU, and has nothing else to do.
    patches.set(parallel, "_passing_sync_batchnorm_handle", lambda self, module: None)


class _Sum(torch.autograd.Function):
    """The sum of a tensor over the processes of a group. Its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        total = tensor.detach().clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _Sum.forward(ctx, gradients[0], ctx.group), None


def _normalised(self: Any, input: torch.Tensor, group: Any) -> torch.Tensor:
    """The batch of all processes at mean 0 and variance 1; the running values follow."""
    everywhere: Any = _Sum.apply
    dims = [0, *range(2, input.dim())]
    shape = [1, -1, *[1] * (input.dim() - 2)]
    values = input.float()
    count = values.new_full((1,), values.numel() / values.shape[1])
    sums = everywhere(torch.cat([values.sum(dims), count]), group)
    total, mean = sums[-1].detach(), sums[:-1] / sums[-1].detach()
    centred = values - mean.view(shape)
    variance = everywhere(centred.square().sum(dims), group) / total
    if self.track_running_stats:
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            part = 1.0 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), part)
            unbiased = variance * total / (total - 1)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), part)
    made = centred * (variance + self.eps).rsqrt().view(shape)
    if self.affine:
        made = made * self.weight.view(shape) + self.bias.view(shape)
    told: torch.Tensor = made.to(input.dtype)
    return told
