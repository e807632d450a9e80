"""A small real computation on a device, compared with the CPU: the only proof that a device works.

`is_available()` is no proof: it says True for a card the wheel has no kernels for (pytorch#150733) and for a virtual
Mac whose first 256-byte allocation fails (runner-images#9918).
"""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from anytorch.errors import WrongAnswer

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Check:
    name: str
    seconds: float
    error: float  # largest relative difference from the CPU


# Room for tf32 and other reduced-precision matmul modes a user may have switched on; a broken device is off by far more.
TOLERANCE = 5e-3
SIZE = 64


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference, relative to the largest wanted value."""
    return float((got - want).abs().max()) / (float(want.abs().max()) or 1.0)


def exercise(device: str) -> list[Check]:
    """Allocate, copy, multiply and differentiate on `device`. Raises WrongAnswer, or whatever the device raises."""
    import torch

    generator = torch.Generator().manual_seed(0)
    a = torch.randn(SIZE, SIZE, generator=generator)
    b = torch.randn(SIZE, SIZE, generator=generator)
    checks: list[Check] = []

    def check(name: str, got: torch.Tensor, want: torch.Tensor, started: float) -> None:
        error = difference(got.detach().cpu().double(), want.double())  # the copy back is part of every check
        if not error <= TOLERANCE:  # also catches NaN
            raise WrongAnswer(
                f"{device}: {name} is off by {error:.2e} of the largest value; the CPU's answer is the reference",
                hint="do not trust this device; run `anytorch doctor`, and report it with `anytorch info --probe --json`",
            )
        checks.append(Check(name, perf_counter() - started, error))

    started = perf_counter()
    check("allocate", torch.empty(256, dtype=torch.uint8, device=device).fill_(7), torch.full((256,), 7.0), started)

    started = perf_counter()
    check("copy", a.to(device), a, started)

    started = perf_counter()
    check("matmul", a.to(device) @ b.to(device), a.double() @ b.double(), started)

    started = perf_counter()
    weight = b.to(device, copy=True).requires_grad_()
    torch.relu(a.to(device) @ weight).square().mean().backward()
    reference = b.double().requires_grad_()
    torch.relu(a.double() @ reference).square().mean().backward()
    assert weight.grad is not None and reference.grad is not None
    check("backward", weight.grad, reference.grad, started)
    return checks
