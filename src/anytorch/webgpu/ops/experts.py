"""Mixtures of experts: a product per group of rows, made of ordinary ones."""

from __future__ import annotations

import torch


def grouped_mm(
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A product per group. A matrix holds the groups one after the other, `offs` are their ends; three dimensions hold one
    each. Waits for the device: the ends decide the sizes."""
    if bias is not None:
        raise RuntimeError("grouped gemm does not support bias yet")
    if first.dim() == second.dim() == 3:
        return torch.bmm(first, second).to(out_dtype or first.dtype)
    if offs is None:
        raise RuntimeError("Have to provide offsets if there is a 2d matrix")
    ends = [int(end) for end in offs.tolist()]
    groups = list(zip([0, *ends], ends, strict=False))
    rows, columns = first.shape[-2], second.shape[-1]
    size = (len(ends), rows, columns) if first.dim() == second.dim() == 2 else (rows, columns)
    result = torch.zeros(size, dtype=out_dtype or first.dtype, device=first.device)
    for i, (start, end) in enumerate(groups):
        if start == end:
            continue
        if first.dim() == second.dim() == 2:  # groups along the summed dimension
            result[i] = first[:, start:end] @ second[start:end]
        elif second.dim() == 3:  # of rows
            result[start:end] = first[start:end] @ second[i]
        else:  # of columns
            result[:, start:end] = first[i] @ second[:, start:end]
    return result
