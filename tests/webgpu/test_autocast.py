"""torch.autocast("webgpu"): which dtype each op computes in, and training under it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.native


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_ops_compute_in_the_dtype_of_their_list(webgpu: Any, dtype: torch.dtype) -> None:
    a = torch.randn(4, 4, device="webgpu")
    with torch.autocast("webgpu", dtype=dtype):
        low = a @ a
        assert low.dtype is dtype
        for lower in (F.linear(a, a), torch.mm(a, low), torch.baddbmm(a[None], a[None], a[None]), low.relu(), low * 2):
            assert lower.dtype is dtype
        attended = F.scaled_dot_product_attention(a[None, None], a[None, None], a[None, None])
        assert attended.dtype is dtype
        for full in (
            low.exp(),
            low.softmax(-1),
            low.log_softmax(-1),
            low.sum(),
            low.cumsum(0),
            low.pow(2),
            low.norm(),
            F.layer_norm(low, (4,)),
            F.mse_loss(low, low),
            F.cross_entropy(low, torch.zeros(4, dtype=torch.int64, device="webgpu")),
            torch.addcmul(low, low, a),
            low + a,
        ):
            assert full.dtype is torch.float32
        assert low.sum(dtype=dtype).dtype is dtype
        assert (a.double() @ a.double()).dtype is torch.float64
    assert (a @ a).dtype is torch.float32


def test_it_can_be_switched_off_inside(webgpu: Any) -> None:
    a = torch.randn(4, 4, device="webgpu")
    with torch.autocast("webgpu", dtype=torch.float16):
        with torch.autocast("webgpu", enabled=False):
            assert (a @ a).dtype is torch.float32
        assert (a @ a).dtype is torch.float16


def test_binary_cross_entropy_is_refused_with_advice(webgpu: Any) -> None:
    a = torch.rand(4, device="webgpu")
    with torch.autocast("webgpu", dtype=torch.float16), pytest.raises(RuntimeError, match="with_logits"):
        F.binary_cross_entropy(a, a)


def losses(device: str, dtype: torch.dtype, scaled: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(4 * 36, 16),
        nn.LayerNorm(16),
        nn.GELU(),
        nn.Linear(16, 5),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler(device, enabled=scaled)
    x, y = torch.randn(8, 1, 6, 6).to(device), torch.randint(0, 5, (8,)).to(device)
    found = []
    for _ in range(5):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=dtype):
            result = model(x)
            loss = F.cross_entropy(result, y)
        assert result.dtype is dtype
        assert loss.dtype is torch.float32
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        scaler.step(optimizer)
        scaler.update()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(("dtype", "scaled"), [(torch.bfloat16, False), (torch.float16, True)])
def test_training_follows_the_cpu(webgpu: Any, dtype: torch.dtype, scaled: bool) -> None:
    got, want = losses("webgpu", dtype, scaled), losses("cpu", dtype, scaled)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-2, atol=1e-2)
    assert got[-1] < got[0]
