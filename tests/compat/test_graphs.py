"""YiRage's and Mirage's spelling of kernel graphs, as their documents and programs write it."""

from __future__ import annotations

import pytest
import torch
import yirage as yr
from torch.nn import functional as F

import anytorch


def test_mirages_first_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """RMSNorm and a product, in half precision, as Mirage's README builds, searches and calls it."""
    from anytorch.graph import calling
    from anytorch.graph.search import Found

    searched = []
    # The search itself is not what this test is about.
    nothing = Found(None, None, why="not searched")
    monkeypatch.setattr(calling.Search, "run", lambda search: searched.append(search) or nothing)
    graph = yr.new_kernel_graph(backend="cpu")
    x = graph.new_input(dims=(16, 64), dtype=yr.float16)
    w = graph.new_input(dims=(64, 32), dtype=yr.float16)
    y = graph.rms_norm(x, normalized_shape=(64,))
    graph.mark_output(graph.matmul(y, w))
    graph.superoptimize(config="mlp", backend="cuda", warmup_iters=16, profile_iters=1000)
    assert len(searched) == 1
    given = [torch.randn(16, 64).half(), torch.randn(64, 32).half()]
    (found,) = graph(inputs=given)
    torch.testing.assert_close(found, F.rms_norm(given[0], (64,), eps=1e-6) @ given[1], atol=0.02, rtol=0.01)


def test_softmax_by_mirages_ops_and_every_dtype() -> None:
    for dtype in (yr.float32, yr.bfloat16, yr.float16):
        graph = yr.new_kernel_graph()
        x = graph.new_input(dims=(3, 8), dtype=dtype)
        e = graph.exp(x)
        graph.mark_output(graph.div(e, graph.reduction(e, 1)))
        given = torch.randn(3, 8).to(getattr(torch, dtype))
        torch.testing.assert_close(graph(inputs=[given])[0], given.softmax(1), atol=0.02, rtol=0.02)


def test_thread_block_graphs_say_what_to_do_instead() -> None:
    assert yr.new_kernel_graph is anytorch.new_kernel_graph
    graph = yr.new_kernel_graph()
    x = graph.new_input((4, 4))
    with pytest.raises(NotImplementedError, match=r"superoptimize\(\) finds the tiles"):
        yr.new_threadblock_graph(grid_dim=(1, 1, 1), block_dim=(128, 1, 1), forloop_range=4, reduction_dimx=64)
    with pytest.raises(NotImplementedError, match="write what they compute with the graph's own ops"):
        graph.customized([x], None)
