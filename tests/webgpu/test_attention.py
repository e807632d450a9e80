"""scaled_dot_product_attention against the CPU: each form of the kernel, masks, grouped heads, and the gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.webgpu.agree import adapter_manner, agree  # noqa: F401  (a fixture)
from tests.webgpu.test_matmul import make

from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl.attention_kernel import Attention

pytestmark = pytest.mark.native


def run(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, **more: Any
) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=q.shape[1] != k.shape[1], **more)


def operands(
    heads: int, key_heads: int, queries: int, keys: int, d: int, dtype: torch.dtype = torch.float32, grad: bool = True
) -> list[torch.Tensor]:
    sizes = ((2, heads, queries, d), (2, key_heads, keys, d), (2, key_heads, keys, d + 0))
    q, k, v = (make(*size, dtype=dtype) for size in sizes)
    return [q.requires_grad_(grad), k.requires_grad_(grad), (v * 0.5).detach().requires_grad_(grad)]


def test_gradients(webgpu: Any) -> None:
    agree(run, *operands(2, 2, 5, 7, 8), atol=1e-4)
    agree(lambda q, k, v: run(q, k, v, is_causal=True), *operands(4, 2, 6, 6, 8), atol=1e-4)
    agree(lambda q, k, v: run(q, k, v, scale=0.3), *operands(2, 1, 3, 4, 8), atol=1e-4)


def test_masks(webgpu: Any) -> None:
    hidden = make(2, 1, 5, 7) > 0
    hidden[:, :, 0] = False  # a query that may look at nothing
    agree(lambda q, k, v, m: run(q, k, v, m), *operands(2, 2, 5, 7, 8), hidden, atol=1e-4)
    agree(lambda q, k, v, m: run(q, k, v, m), *operands(2, 2, 5, 7, 8), make(5, 7), atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves(webgpu: Any, dtype: torch.dtype) -> None:
    tolerance = 2e-2 if dtype is torch.float16 else 1e-1
    agree(run, *operands(2, 1, 5, 7, 8, dtype), rtol=tolerance, atol=tolerance)


def test_layouts_and_odd_heads(webgpu: Any) -> None:
    q, k, v = (make(2, 6, 3, 8, grad=True) for _ in range(3))
    agree(lambda *t: run(*[x.transpose(1, 2) for x in t]), q, k, v, atol=1e-4)
    agree(lambda t: run(*t.view(2, 6, 3, 3, 8).permute(2, 0, 3, 1, 4)), make(2, 6, 72, grad=True), atol=1e-4)
    agree(run, *operands(2, 2, 3, 4, 6), atol=1e-4)  # not a multiple of four: torch's own composition


def test_torch_is_told_what_we_take(webgpu: Any) -> None:
    q = make(1, 2, 3, 8).to("webgpu")
    assert torch._fused_sdp_choice(q, q, q) == 4
    assert torch._fused_sdp_choice(q, q, q, dropout_p=0.5) == 0
    assert torch._fused_sdp_choice(q[..., :6], q[..., :6], q[..., :6]) == 0


def split(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
    """Both the lean form and the one that backward needs, on the device."""
    made = run(q, k, v, mask)
    if q.device.type == "webgpu":
        op = torch.ops.aten._scaled_dot_product_fused_attention_overrideable.default
        whole, sums, *_ = op(q, k, v, mask)
        torch.testing.assert_close(whole.cpu(), made.cpu(), rtol=0, atol=0)
        repeated = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = (q.float() @ repeated.float().transpose(2, 3)) / q.shape[3] ** 0.5
        if mask is None:
            torch.testing.assert_close(sums.cpu(), scores.cpu().logsumexp(-1), rtol=1e-3, atol=1e-3)
    return made


@pytest.mark.parametrize("manner", ["hardware"], indirect=True)
@pytest.mark.parametrize("subgroups", [False, True])
def test_split_keys(webgpu: Any, manner: str, monkeypatch: pytest.MonkeyPatch, subgroups: bool) -> None:
    from anytorch.webgpu.ops import attention

    monkeypatch.setattr(attention, "has_subgroups", lambda runtime: subgroups and "subgroup" in runtime.features)
    agree(split, *operands(2, 2, 1, 300, 32, grad=False), atol=1e-4)
    agree(split, *operands(10, 1, 1, 257, 12, grad=False), atol=1e-4)  # more lines than a workgroup takes
    agree(split, *operands(1, 1, 1, 5000, 8, grad=False), atol=1e-4)  # more parts than threads
    hidden = make(2, 1, 3, 300) > 0
    hidden[:, :, 1] = False
    hidden[:, :, 2, :290] = False  # whole parts without a key to look at
    agree(split, *operands(4, 2, 3, 300, 8, grad=False), hidden, atol=1e-4)
    if subgroups:  # what follows does not depend on them, and every line is a shader to compile
        agree(split, *operands(2, 1, 2, 270, 4, grad=False), atol=1e-4)
        agree(split, *operands(4, 2, 1, 300, 8, torch.float16, grad=False), rtol=1e-2, atol=1e-2)
        agree(split, *operands(4, 2, 1, 300, 8, torch.bfloat16, grad=False), rtol=5e-2, atol=5e-2)
        agree(split, *operands(4, 2, 3, 300, 8, grad=False), make(3, 300), atol=1e-4)
        q, k, v = operands(4, 2, 2, 300, 8)
        agree(run, q, k, v, atol=1e-4)
    known = {kernel.form for kernel in open_runtime().programs._programs if isinstance(kernel, Attention)}
    assert {"split", "join"} <= known


@pytest.mark.parametrize("form", ["tile", "short"])
def test_forms_of_gpus(fresh_plans: None, monkeypatch: pytest.MonkeyPatch, form: str) -> None:
    from anytorch.webgpu.ops import attention

    used: list[Attention] = []

    def kernel(runtime: Any, q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None, causal: bool) -> Attention:
        mask_type = str(mask.dtype)[6:] if mask is not None else ""
        used.append(Attention(form, str(q.dtype)[6:], q.shape[3], causal, mask_type, 16, 16))
        return used[-1]

    monkeypatch.setattr(attention, "_kernel", kernel)
    agree(run, *operands(2, 1, 21, 37, 8, grad=False), atol=1e-4)  # wider heads take seconds to compile
    agree(lambda q, k, v: run(q, k, v, is_causal=True), *operands(2, 2, 21, 21, 12, grad=False), atol=1e-4)
    hidden = make(2, 1, 5, 300) > 0
    hidden[:, :, 1] = False
    agree(lambda q, k, v, m: run(q, k, v, m), *operands(2, 2, 5, 300, 8, grad=False), hidden, atol=1e-4)
    agree(run, *operands(2, 2, 3, 20, 8, torch.float16, grad=False), rtol=1e-2, atol=1e-2)
    assert len(used) == 4


def test_workgroup_memory_is_counted() -> None:
    assert Attention("tile", "float32", 128).shared_bytes <= 49_152
    assert Attention("tile", "float32", 64, queries=32, keys=32).shared_bytes <= 16_384 * 2
    assert Attention("tile", "float32", 128, queries=16, keys=16).shared_bytes <= 16_384
