"""torch.compile(backend="anytorch") fuses, and recorded graphs replay; both give eager's answers."""

from __future__ import annotations

import copy
import ctypes
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch

from anytorch.errors import UsageError
from anytorch.gpu import tape
from anytorch.gpu.runtime import open_runtime

pytestmark = pytest.mark.usefixtures("webgpu")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16), torch.nn.LayerNorm(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.nn.functional.gelu(self.up(x)) * 1.5 + 0.25
        y = self.down(h.sigmoid() * h.tanh() + h)
        result: torch.Tensor = self.norm(x + torch.where(y > 0, y, y * 0.1))
        return result


def step(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    loss = model(x).square().mean()
    loss.backward()
    assert x.grad is not None
    return loss.detach(), x.grad


def commands(function: Any) -> int:
    runtime = open_runtime()
    runtime.synchronize()
    before = runtime.statistics.commands
    function()
    runtime.synchronize()
    return runtime.statistics.commands - before


@pytest.mark.long
def test_a_compiled_model_trains_like_the_cpu_with_fewer_commands(ours: None) -> None:
    from anytorch.graph.compiler import compile_graph

    torch.manual_seed(0)
    reference, x = Block(), torch.randn(8, 16)
    eager = copy.deepcopy(reference).to("webgpu")
    compiled = torch.compile(eager, backend=compile_graph)
    want_loss, want_grad = step(reference, x)
    loss, grad = step(compiled, x.to("webgpu"))
    torch.testing.assert_close(loss.cpu(), want_loss)
    torch.testing.assert_close(grad.cpu(), want_grad, rtol=1e-4, atol=1e-6)
    for ours, theirs in zip(eager.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, rtol=1e-4, atol=1e-6)
    on_device = x.to("webgpu")
    assert commands(lambda: step(compiled, on_device)) < commands(lambda: step(eager, on_device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_chain_becomes_one_command_in_every_float(dtype: torch.dtype, ours: None) -> None:
    from anytorch.graph.compiler import compile_graph

    def chain(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        c = (a * 2 + b).sigmoid() - 0.5
        return c * a, c > 0  # a float and a bool: outputs of different widths from one kernel

    torch.manual_seed(0)
    a, b = torch.randn(5, 7).to(dtype), torch.randn(7).to(dtype)  # 35 elements: the last word is ragged
    compiled = torch.compile(chain, backend=compile_graph)
    x, y = a.to("webgpu"), b.to("webgpu")
    got, want = compiled(x, y), chain(a, b)
    torch.testing.assert_close(got[0].cpu(), want[0], rtol=2e-2 if dtype is not torch.float32 else 1e-5, atol=1e-2)
    assert got[1].dtype is torch.bool
    assert (got[1].cpu() == want[1]).float().mean() > 0.95  # rounding may decide a value next to zero
    assert commands(lambda: compiled(x, y)) == 1


def test_strides_that_the_trace_did_not_promise(ours: None) -> None:
    """A convolution of a channels-last image returns other strides than its meta function says."""
    from anytorch.graph.compiler import compile_graph

    torch.manual_seed(0)
    reference = torch.nn.Conv2d(3, 4, 3).eval()
    model = copy.deepcopy(reference).to("webgpu")
    image = torch.randn(2, 8, 8, 3).permute(0, 3, 1, 2)
    with torch.no_grad():
        compiled = torch.compile(lambda v: (model(v).relu() * 2 + 1).sigmoid(), backend=compile_graph)
        got = compiled(image.to("webgpu")).cpu()
        torch.testing.assert_close(got, (reference(image).relu() * 2 + 1).sigmoid(), rtol=1e-4, atol=1e-5)


def test_views_take_the_strides_that_kernels_really_give(monkeypatch: pytest.MonkeyPatch, ours: None) -> None:
    """torch promises an attention's gradients with its inputs' strides, ours are dense: a view fitted the trace alone."""
    from anytorch.graph import search
    from anytorch.graph.compiler import compile_graph

    monkeypatch.setattr(search, "back_of", lambda device: (None, "a test wants torch's own ops"))
    torch.manual_seed(0)
    reference = torch.nn.MultiheadAttention(32, 4, batch_first=True)
    model = copy.deepcopy(reference).to("webgpu")

    def mixed(module: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = module(x, x, x, need_weights=False)[0] * 2
        return made

    x = torch.randn(2, 6, 32)
    _, wanted = step(lambda x: mixed(reference, x), x)
    compiled = torch.compile(lambda x: mixed(model, x), backend=compile_graph)
    _, found = step(compiled, x.to("webgpu"))
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-6)


def test_sizes_that_change_are_parameters_of_one_kernel(ours: None) -> None:
    from anytorch.graph.compiler import compile_graph

    def chain(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) + 1

    compiled = torch.compile(chain, backend=compile_graph, dynamic=True)
    for rows in (3, 5, 9):
        x = torch.randn(rows, 20)
        on_device = x.to("webgpu")
        torch.testing.assert_close(compiled(on_device).cpu(), chain(x), rtol=1e-4, atol=1e-5)
        assert commands(lambda: compiled(on_device)) == 1  # noqa: B023  (called at once)


def test_a_graph_goes_to_the_compiler_of_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    from anytorch.graph.compiler import compile_graph
    from anytorch.webgpu import compiler

    asked = []

    def ours(module: torch.fx.GraphModule, inputs: Any) -> Any:
        asked.append([value.device.type for value in inputs])
        return module.forward

    monkeypatch.setattr(compiler, "compile_graph", ours)
    for device in ("cpu", "webgpu"):
        torch._dynamo.reset()
        made = torch.compile(lambda x: x + 1, backend=compile_graph)(torch.ones(2, device=device))
        assert made.tolist() == [2, 2]
    assert asked == [["webgpu"]]


def test_a_recorded_graph_replays_on_new_inputs() -> None:
    torch.manual_seed(0)
    reference = Block().eval()
    model = copy.deepcopy(reference).to("webgpu")
    static = torch.randn(4, 16).to("webgpu")
    with torch.no_grad():
        model(static)
        graph = torch.webgpu.Graph()
        with graph:
            out = model(static)
        for _ in range(3):
            fresh = torch.randn(4, 16)
            static.copy_(fresh)
            torch.full((64, 64), 7.0, device="webgpu")  # what others allocate must not land in the graph's buffers
            graph.replay()
            torch.testing.assert_close(out.cpu(), reference(fresh), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", ["C++", "Python"])
def test_a_long_tape_is_encoded_the_same_by_both_ways(
    way: str, monkeypatch: pytest.MonkeyPatch, missing: Callable[[str, str], NoReturn]
) -> None:
    if way == "Python":
        monkeypatch.setattr(tape, "_encoder", lambda: None)
    elif tape._encoder() is None:
        missing("compiler", "there is none")
    x = torch.randn(300, device="webgpu")
    y = torch.empty(300, device="webgpu")

    def work() -> torch.Tensor:
        made = x
        for number in range(tape.LONG):
            made = made * 0.5 if number % 3 else (made + x).sin()
            if number == 20:
                y.copy_(made)  # no launch: it comes between two runs of them
        return made + y

    work()
    graph = torch.webgpu.Graph()
    with graph:
        out = work()
    for _ in range(2):
        x.copy_(torch.randn(300))
        truth = work().cpu()
        graph.replay()
        assert torch.equal(out.cpu(), truth)
    assert any(isinstance(run, ctypes.Array) for run in graph._runs) is (way == "C++")


def test_one_new_token_of_a_decoder_takes_few_commands(ours: None) -> None:
    """The row of a cache is written in place, the queries' and keys' products stand in one region, norms in the products."""
    from anytorch.graph.compiler import compile_graph

    torch.manual_seed(0)
    normed = torch.nn.RMSNorm(32, eps=1e-6)
    weights = [torch.randn(32, 32) * 0.2 for _ in range(3)]
    given = (torch.randn(1, 1, 32), torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8, 16))

    def step(
        x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, norm: torch.Tensor, w: list[torch.Tensor]
    ) -> torch.Tensor:
        y = torch.nn.functional.rms_norm(x, (32,), norm, 1e-6)
        q, k, v = (torch.nn.functional.linear(y, one).view(1, 1, 2, 16).transpose(1, 2) for one in w)
        q, k = (torch.nn.functional.rms_norm(one, (16,), eps=1e-6) * 2 + one.cos() for one in (q, k))
        keys[:, :, 7:8] = k
        values[:, :, 7:8] = v
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values)

    def moved() -> list[Any]:
        return [one.clone().to("webgpu") for one in (*given, normed.weight.detach())] + [
            [one.to("webgpu") for one in weights]
        ]

    compiled = torch.compile(step, backend=compile_graph, dynamic=False)
    plain, fused = moved(), moved()
    with torch.no_grad():
        compiled(*fused)
        truth, found = step(*plain), compiled(*fused)
        torch.testing.assert_close(found.cpu(), truth.cpu(), rtol=1e-4, atol=1e-5)
        for ours_, theirs in zip(fused[1:3], plain[1:3], strict=True):
            torch.testing.assert_close(ours_.cpu(), theirs.cpu(), rtol=1e-4, atol=1e-5)
        counts = [commands(lambda f=f, t=t: f(*t)) for f, t in ((step, plain), (compiled, fused))]
    assert counts[1] <= counts[0] - 5


def test_a_graph_outlives_an_emptied_cache() -> None:
    x = torch.ones(8, device="webgpu")
    graph = torch.webgpu.Graph()
    with graph:
        y = (x + 1) * 3
    torch.webgpu.empty_cache()  # drops the bind groups that the runtime keeps, and every buffer that nobody holds
    torch.zeros(8, device="webgpu")
    x.copy_(torch.arange(8.0))
    graph.replay()
    assert y.tolist() == [(i + 1) * 3 for i in range(8)]


def test_a_graphs_memory_is_held_while_it_lives_and_no_longer() -> None:
    x = torch.ones(1000, device="webgpu")
    torch.webgpu.synchronize()
    before = torch.webgpu.memory_allocated()
    graph = torch.webgpu.Graph()
    with graph:
        y = (x + 1) * 2
    del y
    assert torch.webgpu.memory_allocated() > before
    graph.replay()
    graph.close()
    assert torch.webgpu.memory_allocated() == before


def test_emptying_the_cache_while_recording_takes_nothing_from_the_graph() -> None:
    a = torch.randn(16, 16, device="webgpu")
    a @ a
    graph = torch.webgpu.Graph()
    with graph:
        y = (a @ a).relu() @ a + 1
        torch.webgpu.empty_cache()
    graph.replay()
    host = a.cpu()
    torch.testing.assert_close(y.cpu(), (host @ host).relu() @ host + 1, rtol=1e-4, atol=1e-4)


def test_an_optimizer_that_counts_steps_is_not_recorded() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, device="webgpu"))
    optimizer = torch.optim.Adam([parameter])
    parameter.sum().backward()
    optimizer.step()
    with pytest.raises(UsageError, match="counts its steps"), torch.webgpu.Graph():
        optimizer.step()
    optimizer.step()


def test_what_cannot_be_replayed_is_refused_and_leaves_no_recording_behind() -> None:
    x = torch.ones(4, device="webgpu")
    graph = torch.webgpu.Graph()
    with pytest.raises(UsageError, match="reading back"), graph:
        (x + 1).sum().item()
    with pytest.raises(UsageError, match="nothing has been recorded"):
        graph.replay()
    assert (x + 1).tolist() == [2, 2, 2, 2]


def test_a_backward_before_the_import_does_no_harm(run_python: Any) -> None:
    """autograd starts its device threads once: with none for a device that is registered later."""
    run_python(
        "import torch\n"
        "torch.ones(2, requires_grad=True).sum().backward()\n"
        "import anytorch.webgpu\n"
        "x = torch.ones(2, device='webgpu', requires_grad=True)\n"
        "(x * 3).sum().backward()\n"
        "assert x.grad.tolist() == [3, 3]\n",
        warm=True,
    )


@pytest.mark.long
def test_after_a_reset_everything_is_made_anew(run_python: Any) -> None:
    """What a lost device leaves behind, plans with its programs above all, must not be used on the next one."""
    run_python(
        "import torch, anytorch.webgpu\n"
        "def work():\n"
        "    x = torch.arange(12., device='webgpu').view(3, 4)\n"
        "    return (torch.softmax(x @ x.t() + 1, 1).sum() + x.sum(0).max() + x[[0, 2]].mean()).item()\n"
        "first = work()\n"
        "anytorch.webgpu.reset()\n"
        "assert work() == first\n",
        warm=True,
    )


def test_other_threads_wait_while_something_is_recorded_alone() -> None:
    counted, x = torch.zeros(4, device="webgpu"), torch.ones(4, device="webgpu")
    x * 2
    graph = torch.webgpu.Graph()
    with graph.alone():
        out = x * 2
        other = threading.Thread(target=lambda: counted.add_(1))
        other.start()
        other.join(0.2)
        assert other.is_alive()
    other.join(60)
    for _ in range(3):
        graph.replay()
    assert counted.cpu().tolist() == [1.0] * 4 and out.cpu().tolist() == [2.0] * 4
