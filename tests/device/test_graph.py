"""Generated Triton kernels on the device: every case, tiles whole and shared, against float64; searches and replays, too."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.graph.cases import CASES

# The interpreter, where it stands in, tells of every infinity.
pytestmark = [pytest.mark.device, pytest.mark.filterwarnings("ignore::RuntimeWarning")]


@pytest.mark.parametrize("name", CASES)
def test_kernels_of_a_graph(name: str, triton: torch.device) -> None:
    from anytorch.graph import verify
    from anytorch.graph.back import triton as back
    from anytorch.graph.lower import lowered
    from anytorch.graph.ops import HALVES
    from anytorch.graph.partition import partition
    from anytorch.graph.program import Program, Step
    from anytorch.graph.rewrite import rewritten

    graph, known = CASES[name]()
    if triton.type == "cpu" and any(node.dtype in HALVES for _, node in graph):
        pytest.skip("Triton's interpreter computes half precision wrongly")
    for parts in (1, 3):
        cut = partition(rewritten(lowered(graph)), known, repeats=parts > 1)
        steps = []
        for group in cut.groups:
            if group.library:
                steps.append(Step(group))
                continue
            kernel = cut.kernel(group)
            schedule = back.candidates(triton, kernel, known)[0]
            over = {axis for one in kernel.reductions if one.axes <= set(kernel.axes) for axis in one.over}
            if parts > 1 and over:  # short blocks along what is summed, so that there is something to share
                blocks = {**schedule.blocks, **{axis: 16 for axis in over}}
                schedule = replace(schedule, blocks=blocks, parts=parts)
            steps.append(Step(group, kernel, back.prepare(kernel, schedule), schedule.name))
        program = partial(Program(cut, steps), poison=True)
        for _ in range(2):  # a launch leaves its counters as the next one needs them
            verify.check(graph, known, program, triton)


def test_shared_tiles_in_replays_beside_one_another(graphs: torch.device, triton: torch.device) -> None:
    """Two recordings of one kernel run at once on two streams: each has counters of its own."""
    from anytorch.graph.back import triton as back
    from anytorch.graph.ir import Builder
    from anytorch.graph.partition import partition

    b = Builder()
    graph = b.graph([b.add("matmul", b.input((8, 4096), "float32"), b.input((4096, 256), "float32"))])
    cut = partition(graph, {})
    kernel = cut.kernel(cut.groups[0])
    schedule = next(one for one in back.candidates(triton, kernel, {}) if one.parts > 1)
    launch = back.prepare(kernel, schedule)
    recorded = []
    for seed in range(2):
        made = torch.Generator(triton).manual_seed(seed)
        x, w = (torch.randn(shape, device=triton, generator=made) for shape in ((8, 4096), (4096, 256)))
        out = torch.zeros(8, 256, device=triton)
        launch([x, w, out], {})
        stream, recording = torch.cuda.Stream(triton), torch.cuda.CUDAGraph()
        torch.cuda.synchronize(triton)
        with torch.cuda.graph(recording, stream=stream):
            launch([x, w, out], {})
        recorded.append(
            (stream, recording, out, (x.double() @ w.double()).float(), (x, w))
        )  # a recording keeps no inputs
    for _ in range(50):
        for stream, recording, out, *_ in recorded:
            with torch.cuda.stream(stream):
                out.fill_(torch.nan)
                recording.replay()
        torch.cuda.synchronize(triton)
        for _, _, out, truth, _ in recorded:
            torch.testing.assert_close(out, truth, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_search_and_what_it_remembers(
    dtype: torch.dtype, accelerator: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anytorch import graph

    if accelerator.type == "cpu":
        pytest.skip("tests/graph searches on the CPU")
    monkeypatch.setenv("ANYTORCH_CACHE_DIR", str(tmp_path))
    x, w = torch.randn(8, 512, device=accelerator, dtype=dtype), torch.randn(512, 384, device=accelerator, dtype=dtype)
    for _ in range(2):  # searched, then recalled
        made = graph.new_kernel_graph(backend="auto")
        a, b = (made.new_input(tuple(one.shape), dtype=dtype) for one in (x, w))
        made.mark_output(made.silu(made.matmul(made.rms_norm(a), b)))
        made.superoptimize(x, w, time_limit_s=15)
        (found,) = made(x, w)
        exact = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-6)
        truth = torch.nn.functional.silu(exact @ w.double())
        assert (found.double() - truth).abs().max() <= 4 * torch.finfo(dtype).eps * truth.abs().max() * 8
