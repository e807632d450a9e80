"""A training step, threads of backward, second derivatives, checkpointing, functorch and hooks."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from typing import Any

import pytest
from tests.webgpu.agree import close


def step(torch: Any, device: str, model: Any, x: Any) -> list[Any]:
    model = copy.deepcopy(model).to(device)
    model(x.to(device)).pow(2).mean().backward()
    return [p.grad.cpu() for p in model.parameters()]


def test_a_training_step(torch: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    x = torch.randn(5, 6)
    for ours, expected in zip(step(torch, "webgpu", model, x), step(torch, "cpu", model, x), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)


def test_threads_of_backward(torch: Any) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)), torch.randn(4, 8)
    expected = step(torch, "cpu", model, x)
    found: list[Any] = []
    troubles: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(5):
                found.append(step(torch, "webgpu", model, x))
        except BaseException as exc:  # noqa: BLE001  (handed to the test's own thread)
            troubles.append(exc)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not troubles and len(found) == 10
    for gradients in found:
        for ours, wanted in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-5)


def test_double_backward(torch: Any) -> None:
    def second(device: str) -> Any:
        x = torch.tensor([0.5, -1.0, 2.0], device=device, requires_grad=True)
        (first,) = torch.autograd.grad((x**3).sum() + x.exp().sum(), x, create_graph=True)
        (again,) = torch.autograd.grad((first * first).sum(), x)
        return again.cpu()

    torch.testing.assert_close(second("webgpu"), second("cpu"), rtol=1e-4, atol=1e-4)


def test_checkpointing(torch: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Dropout(0.5)), torch.randn(3, 4)
    model.to("webgpu")
    x = x.to("webgpu").requires_grad_()
    torch.manual_seed(0)
    y = checkpoint(model, x, use_reentrant=False)
    y.sum().backward()
    first = x.grad.cpu()
    x.grad = None
    torch.manual_seed(0)
    model(x).sum().backward()
    torch.testing.assert_close(first, x.grad.cpu())  # the second run of dropout drew the same numbers


def test_functorch(torch: Any) -> None:
    x, w = torch.randn(5, 3), torch.randn(3)

    def f(w: Any, x: Any) -> Any:
        return (x * w).sum() ** 2

    grad = torch.func.grad(f)
    close(grad(w.to("webgpu"), x[0].to("webgpu")), grad(w, x[0]), rtol=1e-4, atol=1e-5)
    batched = torch.func.vmap(grad, in_dims=(None, 0))
    close(batched(w.to("webgpu"), x.to("webgpu")), batched(w, x), rtol=1e-4, atol=1e-5)


def test_hooks_and_accumulation(torch: Any) -> None:
    x = torch.ones(3, device="webgpu", requires_grad=True)
    seen: list[Any] = []
    x.register_hook(lambda grad: seen.append(grad.cpu()))
    for _ in range(2):
        (x * 2).sum().backward()
    close(x.grad, torch.full((3,), 4.0))
    assert len(seen) == 2
    with torch.no_grad():
        assert not (x * 2).requires_grad


def test_a_failed_assertion_about_streams_is_explained() -> None:
    """CUDA's gradients beside this device: torch fails an internal assertion there. This machine has no CUDA."""
    import anytorch.webgpu

    def engine(trouble: str) -> Any:
        raise RuntimeError(trouble)

    explained = anytorch.webgpu._gradients_elsewhere_explained(engine)
    with pytest.raises(RuntimeError, match="in a process of its own"):
        explained("opt_ready_stream && opt_parent_stream INTERNAL ASSERT FAILED")
    with pytest.raises(RuntimeError, match=r"^another$"):
        explained("another")


@pytest.mark.long
def test_threads_after_a_backward_that_came_before_the_device() -> None:
    """autograd starts its devices' threads once, at the first backward of the process."""
    script = (
        "import threading, torch\n"
        "torch.ones(1, requires_grad=True).sum().backward()\n"
        "import anytorch.webgpu\n"
        "def work():\n"
        "    x = torch.ones(3, device='webgpu', requires_grad=True)\n"
        "    (x * 2).sum().backward()\n"
        "    found.append(x.grad.tolist())\n"
        "found = []\n"
        "threads = [threading.Thread(target=work) for _ in range(2)]\n"
        "for thread in threads: thread.start()\n"
        "for thread in threads: thread.join()\n"
        "print(found)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[[2.0, 2.0, 2.0], [2.0, 2.0, 2.0]]\n", done.stderr
