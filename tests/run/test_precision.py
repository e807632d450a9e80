"""Mixed precision that names "cuda"."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.cuda.amp:FutureWarning")


def test_autocast(cuda: Any) -> None:
    a = cuda.randn(4, 4, device="cuda")
    for context in (
        cuda.autocast("cuda", dtype=cuda.bfloat16),
        cuda.amp.autocast("cuda", dtype=cuda.bfloat16),
        cuda.cuda.amp.autocast(dtype=cuda.bfloat16),
        cuda.autocast(device_type=a.device.type, dtype=cuda.bfloat16),
    ):
        with context:
            assert (a @ a).dtype == cuda.bfloat16 and cuda.is_autocast_enabled() and cuda.is_autocast_enabled("cuda")
            assert cuda.get_autocast_gpu_dtype() == cuda.get_autocast_dtype("cuda") == cuda.bfloat16
        assert (a @ a).dtype == cuda.float32 and not cuda.is_autocast_enabled()
    for context in (cuda.autocast("cuda", enabled=False), cuda.autocast("cuda", dtype=cuda.float32)):
        with context:
            assert (a @ a).dtype == cuda.float32

    @cuda.cuda.amp.autocast(dtype=cuda.float16)
    def product() -> Any:
        return a @ a

    assert product().dtype == cuda.float16


@pytest.mark.parametrize("make", [lambda t: t.cuda.amp.GradScaler(), lambda t: t.amp.GradScaler("cuda")])
def test_scaled_gradients(cuda: Any, make: Any) -> None:
    model = cuda.nn.Linear(4, 2).cuda()
    optimizer = cuda.optim.SGD(model.parameters(), lr=0.1)
    scaler = make(cuda)
    before = model.weight.detach().cpu()
    with cuda.cuda.amp.autocast(dtype=cuda.bfloat16):
        loss = model(cuda.randn(3, 4, device="cuda")).float().square().mean()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    cuda.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.is_enabled() and scaler.get_scale() == 65536.0
    assert (model.weight.detach().cpu() - before).abs().max() > 0


def test_functions_with_a_precision_of_their_own(cuda: Any) -> None:
    class Double(cuda.autograd.Function):  # type: ignore[misc]
        @staticmethod
        @cuda.amp.custom_fwd(device_type="cuda", cast_inputs=cuda.float32)
        def forward(ctx: Any, x: Any) -> Any:
            assert not cuda.is_autocast_enabled()
            return x * 2

        @staticmethod
        @cuda.amp.custom_bwd(device_type="cuda")
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient * 2

    x = cuda.ones(2, device="cuda", dtype=cuda.bfloat16, requires_grad=True)
    with cuda.autocast("cuda", dtype=cuda.bfloat16):
        y = Double.apply(x)
    assert y.dtype == cuda.float32
    y.sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


def test_the_slow_ones_are_told(cuda: Any, device: str, fresh_ledger: Any) -> None:
    from anytorch.devices.registry import registry

    fast = registry().get(device).caps(0).fast_dtypes
    with cuda.autocast("cuda", dtype=cuda.float16):
        pass
    told = [what for what in fresh_ledger.redirected if "slow" in what]
    assert bool(told) is ("float16" not in fast)
