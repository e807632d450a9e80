"""Recorded steps: a replay computes, from new inputs in the same memory, what the CPU computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.device


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 8))


def test_replays_of_several_shapes(graphs: torch.device) -> None:
    from anytorch.recorded.graphs import Recorder

    host, there, recorder = network(), network().to(graphs), Recorder(graphs)
    inputs = {rows: torch.zeros(rows, 32, device=graphs) for rows in (3, 17)}
    with torch.inference_mode():
        for turn in range(4):
            for rows, given in inputs.items():
                x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(10 * turn + rows))
                given.copy_(x)
                found = recorder.run(rows, lambda given=given: there(given)).cpu()
                torch.testing.assert_close(found, host(x), rtol=1e-4, atol=1e-4)
    assert not recorder.failed and sorted(recorder.recordings) == [3, 17]


def test_a_training_step(graphs: torch.device) -> None:
    """Three steps of AdamW: losses and weights are the CPU's, and they were replayed."""
    from anytorch.forecast.training.recorded import RecordedStep, distance

    def trained(device: torch.device, recorded: bool) -> tuple[list[float], list[Tensor]]:
        model = network().to(device)
        rate = torch.tensor(0.01, device=device) if recorded else 0.01
        optimiser = torch.optim.AdamW(model.parameters(), lr=rate, capturable=recorded)

        def work(values: Tensor, stamps: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss = (model(values) - stamps).square().mean()
            loss.backward()
            optimiser.step()
            optimiser.zero_grad(set_to_none=False)
            return loss.detach(), {}

        def state() -> list[Tensor]:
            return [value for kept in optimiser.state.values() for value in kept.values()]

        step: Any = work
        if recorded:
            step = RecordedStep(work, device, optimiser.zero_grad, lambda: None, list(model.parameters()), state)
        losses = []
        for number in range(3):
            made = torch.Generator().manual_seed(number)
            values, stamps = torch.randn(16, 32, generator=made), torch.randn(16, 8, generator=made)
            losses.append(float(step(values.to(device), stamps.to(device))[0]))
        assert not recorded or not step.failed, step.failed
        assert not recorded or step.graph is not None
        return losses, [parameter.detach().cpu() for parameter in model.parameters()]

    losses, weights = trained(graphs, True)
    wanted, wanted_weights = trained(torch.device("cpu"), False)
    assert losses == pytest.approx(wanted, rel=1e-4)
    begun = [parameter.detach() for parameter in network().parameters()]
    assert distance(weights, wanted_weights) < 0.02 * distance(begun, wanted_weights)  # of how far they have come
