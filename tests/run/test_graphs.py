"""Graphs: operations noted once and run again on the CPU, recordings on webgpu. A capture counts for nothing on either."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def torch(cuda: Any) -> Any:
    return cuda


def test_a_capture_counts_for_nothing(torch: Any, device: str) -> None:
    """With CUDA, capturing runs nothing: the first replay is the first step."""
    count = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.manual_seed(0)
    with torch.cuda.graph(graph):
        count += 1
        drawn = torch.rand(2, device="cuda")
    assert count.item() == 0
    graph.replay()
    graph.replay()
    assert count.item() == 2
    if device != "cpu":
        return  # recorded launches repeat their random numbers (docs/guide/run-cuda-programs.md)
    torch.manual_seed(0)
    first = torch.rand(2)
    graph.replay()
    assert drawn.tolist() != first.tolist(), "every replay draws anew"


def test_a_whole_training_step(torch: Any) -> None:
    def trained(captured: bool) -> list[float]:
        torch.manual_seed(1)
        model = torch.nn.Linear(4, 1).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x, y = torch.randn(8, 4, device="cuda"), torch.randn(8, 1, device="cuda")
        inputs, targets = [torch.randn(8, 4) for _ in range(3)], [torch.randn(8, 1) for _ in range(3)]

        def step() -> Any:
            optimizer.zero_grad(set_to_none=False)
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        step()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                loss = step()
        losses = []
        for a, b in zip(inputs, targets, strict=True):
            x.copy_(a), y.copy_(b)
            if captured:
                graph.replay()
            else:
                loss = step()
            losses.append(loss.item())
        return losses

    assert trained(True) == pytest.approx(trained(False), rel=1e-6)


def test_begin_and_end_by_hand(torch: Any) -> None:
    x = torch.ones(2, device="cuda")
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin()
    assert torch.cuda.is_current_stream_capturing()
    y = x + 1
    graph.capture_end()
    x.fill_(9)
    graph.replay()
    assert y.tolist() == [10.0, 10.0] and graph.pool() == torch.cuda.graph_pool_handle()
    graph.reset()
