"""Products and attention on matrix cores, beside the same in float64: run by test_matrix_cores.py under such a driver.

    .cache/matrix-vulkan/run python tests/webgpu/matrix_products_child.py [TILE] CASE …

prints a JSON object: for each case the error relative to the answer's size and the tiles that were used. A TILE is used in
place of the one for software adapters: "32x32x32x2x2" is 32 x 32 in steps of 32 by 2 x 2 subgroups, from one buffer.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from typing import Any

import torch

import anytorch.webgpu  # noqa: F401  (registers the device)
from anytorch.gpu.spirv.matmul import Tile
from anytorch.webgpu import matrix_attention, matrix_convolution, matrix_products

F = torch.nn.functional
Case = tuple[Callable[..., torch.Tensor], list[torch.Tensor]]


def numbers(*size: int) -> torch.Tensor:
    return torch.randn(size).half()


def cases() -> dict[str, Case]:
    torch.manual_seed(0)
    nan = numbers(40, 64)
    nan[3, 5] = torch.nan
    padded = numbers(48, 136)
    return {
        "whole tiles": (torch.mm, [numbers(64, 64), numbers(64, 32)]),
        "ragged": (torch.mm, [numbers(50, 72), numbers(72, 104)]),
        "both transposed": (torch.mm, [numbers(72, 50).t(), numbers(104, 72).t()]),
        "one transposed": (torch.mm, [numbers(50, 72), numbers(104, 72).t()]),
        "odd sizes": (torch.mm, [numbers(33, 71), numbers(71, 45)]),
        "a view off the beat": (torch.mm, [padded[:, 3:75], numbers(72, 40)]),
        "split sums": (torch.mm, [numbers(32, 2048), numbers(2048, 32)]),
        "batches": (torch.bmm, [numbers(3, 40, 64), numbers(3, 64, 48)]),
        "shared batch": (torch.matmul, [numbers(3, 40, 64), numbers(64, 48).expand(3, 64, 48)]),
        "bias": (lambda d, a, b: torch.addmm(d, a, b, beta=0.5, alpha=2.0), [numbers(48), numbers(40, 64), numbers(64, 48)]),
        "bias of columns": (torch.addmm, [numbers(40, 1), numbers(40, 64), numbers(64, 48)]),
        "linear": (F.linear, [numbers(2, 20, 64), numbers(48, 64), numbers(48)]),
        "gelu": (gelu, [numbers(48), numbers(40, 64) / 4, numbers(64, 48) / 4]),
        "relu keeps NaN": (torch._addmm_activation, [numbers(48), nan, numbers(64, 48)]),
        "attention": (attend, [numbers(2, 4, 20, 32), numbers(2, 2, 23, 32), numbers(2, 2, 23, 32)]),
        "causal attention": (causal, [numbers(1, 2, 40, 32) for _ in range(3)]),
        "masked attention": (attend, [*[numbers(1, 2, 40, 32) for _ in range(3)], masked()]),
        "added mask": (attend, [*[numbers(1, 2, 40, 32) for _ in range(3)], numbers(2, 40, 40)]),
        "convolution": (F.conv2d, [numbers(2, 16, 11, 13), numbers(24, 16, 3, 3), numbers(24)]),
        "strided convolution": (strided, [numbers(2, 32, 12, 12), numbers(48, 16, 3, 3)]),
        "convolution of a line": (F.conv1d, [numbers(2, 16, 52), numbers(24, 16, 5), numbers(24)]),
        "gradients": (gradient, [numbers(40, 64), numbers(64, 48)]),
    }  # fmt: skip


def masked() -> torch.Tensor:
    """Which keys are seen; the fourth query sees none."""
    seen = torch.rand(40, 40) > 0.4
    seen[3] = False
    return seen


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1])


def causal(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def strided(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Padding, and two groups."""
    return F.conv2d(x, weight, stride=2, padding=1, groups=2)


def gelu(d: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch._addmm_activation(d, a, b, use_gelu=True)


def gradient(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    a, b = (tensor.detach().requires_grad_() for tensor in (a, b))
    (a @ b).square().mean().backward()
    assert a.grad is not None and b.grad is not None
    return torch.cat((a.grad.flatten(), b.grad.flatten()))


def main() -> None:
    if sys.argv[1:] and re.fullmatch(r"\d+(x\d+){4}", sys.argv[1]):
        matrix_products.SOFTWARE_TILES = (Tile(*map(int, sys.argv.pop(1).split("x")), buffers=1),)
    used: list[str] = []
    plan = matrix_products.plan

    def noted(runtime: Any, geometry: Any, tiling: matrix_products.MatrixTiling) -> Any:
        used.append(f"{tiling.tile.name}, {tiling.splits}")
        return plan(runtime, geometry, tiling)

    def attended(runtime: Any, kernel: Any) -> Any:
        used.append(f"attention {kernel.queries}x{kernel.keys}")
        return rendered(runtime, kernel)

    def convolved(runtime: Any, gather: Any, tiling: Any, *more: Any) -> Any:
        used.append(f"convolution {tiling.tile.name}")
        return convolution_plan(runtime, gather, tiling, *more)

    matrix_products.plan = noted
    convolution_plan, matrix_convolution.plan = matrix_convolution.plan, convolved
    rendered, matrix_attention.rendered = matrix_attention.rendered, attended
    found: dict[str, Any] = {"matrix cores": torch.webgpu.get_device_properties()["matrix_cores"]}
    for name, (function, inputs) in cases().items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        used.clear()
        wanted = function(*(one.double() if one.is_floating_point() else one for one in inputs))
        answer = function(*(_moved(one) for one in inputs)).cpu().double()
        same_nan = bool((answer.isnan() == wanted.isnan()).all())
        error = float((answer - wanted).nan_to_num().norm() / wanted.nan_to_num().norm())
        found[name] = {
            "error": error,
            "same_nan": same_nan,
            "tiles": list(used),
            "size": list(answer.shape) == list(wanted.shape),
        }
    found["fallbacks"] = torch.webgpu.fallback_stats()
    print(json.dumps(found))


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on the device with the same steps."""
    if tensor.is_contiguous():
        return tensor.to("webgpu")
    base = tensor._base
    assert base is not None
    return base.to("webgpu").as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


if __name__ == "__main__":
    main()
