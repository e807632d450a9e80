"""Optimizers on the webgpu device against the CPU's: fused steps, loops over tensors, gradient scaling."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from anytorch.gpu.wgsl.multi import Multi, render

pytestmark = pytest.mark.native

Optimizer = Callable[[Any], torch.optim.Optimizer]

FUSED: dict[str, Optimizer] = {
    "adam": lambda p: torch.optim.Adam(p, 1e-2, fused=True),
    "adam, decay, amsgrad": lambda p: torch.optim.Adam(p, 1e-2, fused=True, amsgrad=True, weight_decay=0.1),
    "adamw, maximize": lambda p: torch.optim.AdamW(p, 1e-2, fused=True, maximize=True),
    "adamw, rate in a tensor": lambda p: torch.optim.AdamW(p, torch.tensor(1e-2), fused=True),
    "adamw, rate on the device": lambda p: torch.optim.AdamW(
        (kept := list(p)), torch.tensor(1e-2, device=kept[0].device), fused=True
    ),
    "sgd": lambda p: torch.optim.SGD(p, 1e-2, fused=True),
    "sgd, nesterov, decay": lambda p: torch.optim.SGD(
        p, 1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True
    ),
    "sgd, dampening": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9, dampening=0.2, maximize=True, fused=True),
}
LOOPED: dict[str, Optimizer] = {
    "adam, foreach": lambda p: torch.optim.Adam(p, 1e-2, foreach=True),
    "adamw, default": lambda p: torch.optim.AdamW(p, 1e-2),
    "adam, one by one": lambda p: torch.optim.Adam(p, 1e-2, foreach=False),
    "sgd, default": lambda p: torch.optim.SGD(p, 1e-2, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 1e-2),
    "adagrad": lambda p: torch.optim.Adagrad(p, 1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, 1e-2),
    "radam": lambda p: torch.optim.RAdam(p, 1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, 1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p, 1e-2),
}


def train(device: str, make: Optimizer, dtype: torch.dtype, scaled: bool) -> list[torch.Tensor]:
    """Parameters after four steps; with scaling, the second step meets an overflow and the scale is returned too."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Tanh(), torch.nn.Linear(13, 3)).to(dtype).to(device)
    optimizer = make(model.parameters())
    x, y = torch.randn(5, 7, dtype=dtype).to(device), torch.randn(5, 3, dtype=dtype).to(device)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=2, enabled=scaled)
    for i in range(4):
        optimizer.zero_grad()
        scaler.scale(((model(x) - y) ** 2).mean()).backward()
        if scaled and i == 1:
            next(model.parameters()).grad[0, 0] = float("inf")  # type: ignore[index]
        scaler.step(optimizer)
        scaler.update()
    found = [p.detach().cpu().float() for p in model.parameters()]
    return [*found, torch.tensor(scaler.get_scale())] if scaled else found


@pytest.mark.parametrize("name", [*FUSED, *LOOPED])
def test_steps_agree_with_the_cpu(webgpu: Any, name: str) -> None:
    make = {**FUSED, **LOOPED}[name]
    torch.testing.assert_close(
        train("webgpu", make, torch.float32, False), train("cpu", make, torch.float32, False), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
    "name", ["adam, decay, amsgrad", "adamw, rate on the device", "sgd, nesterov, decay", "adam, foreach"]
)
def test_scaled_steps_agree_with_the_cpu(webgpu: Any, name: str) -> None:
    make = {**FUSED, **LOOPED}[name]
    torch.testing.assert_close(
        train("webgpu", make, torch.float32, True), train("cpu", make, torch.float32, True), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_parameters_of_odd_sizes(webgpu: Any, dtype: torch.dtype) -> None:
    make = FUSED["adamw, maximize"]
    torch.testing.assert_close(
        train("webgpu", make, dtype, False), train("cpu", make, dtype, False), rtol=1e-2, atol=1e-3
    )


def test_a_fused_step_is_one_launch_per_parameter(webgpu: Any) -> None:
    from anytorch.gpu.runtime import open_runtime

    runtime = open_runtime()
    parameter = torch.nn.Parameter(torch.randn(10, 3, device="webgpu"))
    optimizer = torch.optim.AdamW([parameter], 1e-2, fused=True)
    counts = []
    for _ in range(3):
        parameter.grad = torch.ones_like(parameter)
        runtime.synchronize()
        before = runtime.statistics.commands
        optimizer.step()
        runtime.synchronize()
        counts.append(runtime.statistics.commands - before)
    assert counts[-1] == 2  # the step count goes up by one, then everything else


def test_layouts_of_parameter_and_gradient_may_differ(webgpu: Any) -> None:
    def step(device: str) -> torch.Tensor:
        torch.manual_seed(1)
        weight = torch.randn(4, 3, 2, 2).to(device).to(memory_format=torch.channels_last)
        parameter = torch.nn.Parameter(weight)
        parameter.grad = torch.randn(4, 3, 2, 2).to(device)
        torch.optim.Adam([parameter], 1e-1, fused=device == "webgpu").step()  # the CPU's fused one mixes layouts up
        return parameter.detach().cpu()

    torch.testing.assert_close(step("webgpu"), step("cpu"))


def test_parameters_may_share_one_storage(webgpu: Any) -> None:
    flat = torch.ones(12, device="webgpu")
    gradients = torch.full((12,), 2.0, device="webgpu")
    parameters = [torch.nn.Parameter(part) for part in (flat[:4], flat[4:8], flat[8:])]
    for parameter, grad in zip(parameters, (gradients[:4], gradients[4:8], gradients[8:]), strict=True):
        parameter.grad = grad
    torch.optim.SGD(parameters, 0.25, fused=True).step()
    assert flat.tolist() == [0.5] * 12
    parameters[0].grad = flat[4:8]  # the gradient lies beside the parameter
    torch.optim.SGD(parameters[:1], 1.0, fused=True).step()
    assert flat.tolist() == [0.0] * 4 + [0.5] * 8


def test_loops_over_tensors(webgpu: Any) -> None:
    torch.manual_seed(2)
    a = [torch.randn(3), torch.randn(2, 5), torch.randn(())]
    b = [torch.randn(3), torch.randn(2, 5), torch.randn(())]
    x, y = [t.to("webgpu") for t in a], [t.to("webgpu") for t in b]

    def same(got: Any, want: Any) -> None:
        for g, w in zip(got, want, strict=True):
            torch.testing.assert_close(g.cpu(), w, rtol=1e-5, atol=1e-6)

    for name in ("_foreach_add", "_foreach_mul", "_foreach_div", "_foreach_maximum"):
        same(getattr(torch, name)(x, y), getattr(torch, name)(a, b))
        same(getattr(torch, name)(x, 1.5), getattr(torch, name)(a, 1.5))
    for name in ("_foreach_neg", "_foreach_abs", "_foreach_exp", "_foreach_norm", "_foreach_sign"):
        same(getattr(torch, name)(x), getattr(torch, name)(a))
    same(torch._foreach_addcdiv(x, y, y, 0.5), torch._foreach_addcdiv(a, b, b, 0.5))
    same(torch._foreach_lerp(x, y, 0.3), torch._foreach_lerp(a, b, 0.3))
    torch._foreach_copy_(x, y)
    same(x, b)
    torch._foreach_zero_(x)
    same(x, [torch.zeros_like(t) for t in a])


def test_a_list_may_name_a_tensor_twice_and_mix_dtypes(webgpu: Any) -> None:
    x = torch.zeros(4, device="webgpu")
    torch._foreach_add_([x, x], 1.5)
    assert x.tolist() == [3.0] * 4
    mixed = [torch.ones(3, dtype=dtype, device="webgpu") for dtype in (torch.float16, torch.int32, torch.bfloat16)]
    torch._foreach_mul_(mixed, 3)
    assert [t.tolist() for t in mixed] == [[3] * 3] * 3
    with pytest.raises(RuntimeError, match="same number"):
        torch._foreach_add_([x], [x, x])


def test_a_half_tensor_of_odd_length_leaves_its_neighbour_alone(webgpu: Any) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        flat = torch.ones(8, dtype=dtype, device="webgpu")
        torch._foreach_add_([flat[:3], flat[4:5]], 1.0)
        assert flat.tolist() == [2, 2, 2, 1, 2, 1, 1, 1]
        torch._foreach_add_([flat[1:2]], 1.0)  # does not begin on a word
        assert flat.tolist() == [2, 3, 2, 1, 2, 1, 1, 1]


def test_clipping_of_gradients(webgpu: Any) -> None:
    def clip(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(3)
        parameter = torch.nn.Parameter(torch.zeros(5, 4, device=device))
        parameter.grad = torch.randn(5, 4).to(device)
        total = torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        return total.cpu(), parameter.grad.cpu()

    torch.testing.assert_close(clip("webgpu"), clip("cpu"))


def test_a_narrow_tensor_is_written_by_whole_words() -> None:
    kernel = Multi("    v0 = v0 * scale;\n", ("bfloat16",), (True,), numbers=("scale",))
    assert kernel.per_thread == 2
    assert "v0 * p.scale" in render(kernel)
    assert Multi("", ("float32",), (True,)).per_thread == 1


def test_operands_in_one_buffer_are_all_bound_writable() -> None:
    kernel = Multi("", ("float32", "float32"), (True, False), cells=1)
    assert kernel.writable == 0b001
    assert Multi("", ("float32", "float32"), (True, False), cells=1, shared=True).writable == 0b111
