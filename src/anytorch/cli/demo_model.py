"""The demo's model and task: a two-layer transformer encoder learns to sort short lists of digits."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any

from anytorch.errors import WrongAnswer

if TYPE_CHECKING:
    import torch

DIGITS, LENGTH, BATCH, WIDTH, HEADS, LAYERS = 10, 12, 32, 64, 4, 2
LEARNING_RATE = 3e-3
# The same room as the device test's: reduced-precision matmuls that a user may have switched on.
TOLERANCE = 5e-3
WARM_UP = 2


@dataclass(frozen=True)
class Trained:
    """One device's run. Times are per training step; `difference` is the largest relative one from the CPU in fp64."""

    difference: float
    first_loss: float
    last_loss: float
    accuracy: float  # share of digits put in the right place, on lists it has not seen
    median_ms: float
    best_ms: float
    iterations: int


def build() -> torch.nn.Module:
    """Always the same weights: made on the CPU from a seed of its own, which leaves the caller's generator alone."""
    import torch
    from torch import nn

    class Sorter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.digits = nn.Embedding(DIGITS, WIDTH)
            self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
            layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
            self.head = nn.Linear(WIDTH, DIGITS)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.encoder(self.digits(x) + self.places))  # type: ignore[no-any-return]

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Sorter()


def lists(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of lists and the same lists sorted. Every step has its own, the same on every device."""
    import torch

    generator = torch.Generator().manual_seed(1000 + step)
    x = torch.randint(0, DIGITS, (BATCH, LENGTH), generator=generator)
    return x, x.sort(dim=1).values


def loss_of(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    import torch

    return torch.nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())


def reference() -> dict[str, torch.Tensor]:
    """The first step in fp64 on the CPU: its loss and the gradient of every weight."""
    return gradients(build().double(), "cpu")


def gradients(model: torch.nn.Module, device: str) -> dict[str, torch.Tensor]:
    model = model.to(device)
    x, y = (part.to(device) for part in lists(0))
    loss = loss_of(model, x, y)
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: weight.grad for name, weight in model.named_parameters()}
    return {"loss": loss.detach().cpu(), **{name: grad.cpu() for name, grad in found.items() if grad is not None}}


def agreement(device: str, want: dict[str, torch.Tensor]) -> float:
    """The largest difference of the first step's loss and gradients, relative to the largest of each.

    Raises WrongAnswer where it is too large: a device that computes wrongly is not timed.
    """
    got = gradients(build(), device)
    worst = 0.0
    for name, exact in want.items():
        scale = float(exact.abs().max()) or 1.0
        difference = float((got[name].double() - exact).abs().max()) / scale
        if not difference <= TOLERANCE:  # also catches NaN
            raise WrongAnswer(
                f"{device}: {name} of the first step is off by {difference:.1e}; the CPU in fp64 is the reference",
                hint="do not trust this device; run `anytorch test` and `anytorch doctor`",
            )
        worst = max(worst, difference)
    return worst


def train(device: str, iterations: int, want: dict[str, torch.Tensor], synchronize: Any) -> Trained:
    """Check the answer, then train for `iterations` timed steps."""
    import torch

    difference = agreement(device, want)
    model = build().to(device)
    optimiser = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    losses: list[float] = []
    seconds: list[float] = []
    for step in range(WARM_UP + iterations):
        x, y = (part.to(device) for part in lists(step))
        synchronize()
        started = perf_counter()
        optimiser.zero_grad(set_to_none=True)
        loss = loss_of(model, x, y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        synchronize()
        if step >= WARM_UP:
            seconds.append(perf_counter() - started)
        losses.append(float(loss.detach()))
    with torch.no_grad():
        x, y = lists(-1)
        accuracy = float((model(x.to(device)).argmax(-1).cpu() == y).float().mean())
    return Trained(difference, losses[0], losses[-1], accuracy, median(seconds) * 1e3, min(seconds) * 1e3, iterations)
