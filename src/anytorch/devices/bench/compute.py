"""The workloads that compute: a matrix product sized for the device, and one transformer block."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from anytorch.devices.bench.timing import quickest
from anytorch.devices.bench.workloads import Bench, Case, Prepared

if TYPE_CHECKING:
    import torch

ENOUGH_S = 2e-3  # a product that takes this long is large enough to show the device's rate
SMALLEST, SMALLEST_FAST, LARGEST_HURRIED, LARGEST = 128, 512, 2048, 8192
CHECKED = 64  # rows and columns of a product that are compared with fp64, spread over all of it


# --- matrix product ---------------------------------------------------------------------------------------------------


def matmul(dtype: str) -> Case:
    return Case("matmul", dtype, dtype, "TFLOP/s", lambda bench: _prepare_matmul(bench, dtype))


def _prepare_matmul(bench: Bench, dtype: str) -> Prepared:
    import torch

    kind = getattr(torch, dtype)
    largest = LARGEST_HURRIED if bench.hurried else LARGEST
    # A busy machine makes a small product look slow: where the dtype is fast, do not even ask about small ones.
    n = SMALLEST_FAST if dtype in bench.caps.fast_dtypes else SMALLEST
    while True:
        a = host_matrix(n, 0).to(kind).to(bench.device)
        b = host_matrix(n, 1).to(kind).to(bench.device)
        once_s = quickest(partial(torch.matmul, a, b), bench.synchronize)
        if once_s >= ENOUGH_S or n >= largest or not bench.room_for(3 * (2 * n) ** 2 * a.element_size()):
            break
        n *= 2
    return Prepared(
        run=lambda: torch.matmul(a, b),
        answer=lambda: spread(torch.matmul(a, b).cpu(), n),
        reference=lambda: matmul_reference(n, kind),
        case=f"{dtype} {n}×{n}",
        flop=2.0 * n**3,
        parameters={"n": n, "matmul_precision": torch.get_float32_matmul_precision()},
    )


@lru_cache(maxsize=2)
def host_matrix(n: int, seed: int) -> torch.Tensor:
    import torch

    generator = torch.Generator().manual_seed(seed)
    return torch.rand(n, n, generator=generator).sub_(0.5)


def spread(product: torch.Tensor, n: int) -> torch.Tensor:
    """CHECKED rows and columns of a product, the first and the last among them; all of a small one."""
    import torch

    at = torch.linspace(0, n - 1, min(n, CHECKED)).long()
    return product[at][:, at]


def matmul_reference(n: int, kind: torch.dtype) -> torch.Tensor:
    """The same rows and columns, from the same rounded inputs, in fp64 on the CPU."""
    import torch

    at = torch.linspace(0, n - 1, min(n, CHECKED)).long()
    return host_matrix(n, 0)[at].to(kind).double() @ host_matrix(n, 1)[:, at].to(kind).double()


# --- transformer block ------------------------------------------------------------------------------------------------


def transformer(batch: int, seq: int, hidden: int, dtype: str) -> Case:
    flop = block_flop(batch, seq, hidden)
    parameters = {"batch": batch, "seq": seq, "hidden": hidden, "heads": heads_of(hidden)}
    case = f"{dtype} batch {batch} × seq {seq} × hidden {hidden}"

    def prepare(bench: Bench) -> Prepared:
        import torch

        kind = getattr(torch, dtype)
        weights = {name: value.to(kind).to(bench.device) for name, value in block_weights(hidden).items()}
        x = block_input(batch, seq, hidden).to(kind).to(bench.device)

        def run() -> torch.Tensor:
            return block(x, weights)

        def answer() -> torch.Tensor:
            return run().cpu()[checked_elements(batch)]

        return Prepared(run, answer, lambda: block_reference(batch, seq, hidden), case, flop, parameters=parameters)

    return Case("transformer", case, dtype, "TFLOP/s", prepare, flop=flop, parameters=parameters)


def heads_of(hidden: int) -> int:
    """Heads of 64, as most models have; one head where that does not divide."""
    return hidden // 64 if hidden % 64 == 0 else 1


def block_flop(batch: int, seq: int, hidden: int) -> float:
    """Projections (q, k, v, out, and an MLP four times as wide) and the two products of attention."""
    return 2.0 * batch * seq * 12 * hidden**2 + 4.0 * batch * seq**2 * hidden


def block(x: torch.Tensor, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Pre-norm attention and MLP with residuals, forward only."""
    import torch
    from torch.nn import functional

    batch, seq, hidden = x.shape
    heads = heads_of(hidden)
    y = functional.layer_norm(x, (hidden,))
    q, k, v = functional.linear(y, weights["qkv"]).view(batch, seq, 3, heads, hidden // heads).permute(2, 0, 3, 1, 4)
    y = functional.scaled_dot_product_attention(q, k, v)  # (batch, heads, seq, hidden / heads)
    x = x + functional.linear(y.transpose(1, 2).reshape(batch, seq, hidden), weights["out"])
    y = functional.gelu(functional.linear(functional.layer_norm(x, (hidden,)), weights["up"]))
    return torch.add(x, functional.linear(y, weights["down"]))


@lru_cache(maxsize=2)
def block_weights(hidden: int) -> dict[str, torch.Tensor]:
    import torch

    generator = torch.Generator().manual_seed(hidden)
    shapes = {"qkv": (3 * hidden, hidden), "out": (hidden, hidden), "up": (4 * hidden, hidden)}
    shapes["down"] = (hidden, 4 * hidden)
    return {name: torch.randn(*shape, generator=generator) / math.sqrt(shape[1]) for name, shape in shapes.items()}


@lru_cache(maxsize=4)
def block_input(batch: int, seq: int, hidden: int) -> torch.Tensor:
    import torch

    return torch.randn(batch, seq, hidden, generator=torch.Generator().manual_seed(7))


def checked_elements(batch: int) -> list[int]:
    """The first and the last of the batch: they do not depend on the others, and fp64 on a CPU is slow."""
    return sorted({0, batch - 1})


@lru_cache(maxsize=32)
def block_reference(batch: int, seq: int, hidden: int) -> Any:
    weights = {name: value.double() for name, value in block_weights(hidden).items()}
    return block(block_input(batch, seq, hidden)[checked_elements(batch)].double(), weights)
