"""Ops that are one launch once their geometry has been seen: the second call, not only the first, gives the CPU's answer.

Nobody who must see the ops they are made of (autograd, transforms, modes) is passed over.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.webgpu.agree import adapter_manner, agree, on_device  # noqa: F401  (the fixture `manner`)
from tests.webgpu.test_matmul import make
from torch._subclasses.fake_tensor import FakeTensorMode

from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl.rows import Rows

pytestmark = pytest.mark.native

HALVES = [torch.float16, torch.bfloat16]


def again(function: Callable[..., Any]) -> Callable[..., Any]:
    """The results of three calls; from the second on the geometry is known."""
    return lambda *tensors: [function(*tensors) for _ in range(3)]


@pytest.mark.parametrize("shape", [(4, 12), (2, 3, 12), (1, 1, 12), (2, 2, 3, 12)])
def test_linear(manner: str, shape: tuple[int, ...]) -> None:
    x, weight, bias = make(*shape), make(8, 12), make(8)
    agree(again(F.linear), x, weight, bias)
    agree(again(F.linear), x, weight)
    agree(again(F.linear), x, make(12, 8).t(), bias)
    agree(again(F.linear), x, make(9, 24)[1:, 3:15], make(20)[2:18:2])
    agree(again(F.linear), make(12, 3).t(), weight, bias)
    for dtype in HALVES:
        agree(again(F.linear), x.to(dtype), weight.to(dtype), bias.to(dtype), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("manner", ["hardware"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("shape", [(1, 1536), (3, 1536), (40, 1536)])
def test_linear_in_parts(manner: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """So long a sum for so few results is split over workgroups and added up by a second launch."""
    tolerance = 1e-3 if dtype is torch.float32 else 5e-2
    tensors = [tensor.to(dtype) * 0.2 for tensor in (make(*shape), make(20, 1536), make(20))]
    agree(again(F.linear), *tensors, rtol=tolerance, atol=tolerance)
    agree(again(F.linear), *tensors[:2], rtol=tolerance, atol=tolerance)


def test_linear_says_what_is_wrong(webgpu: Any) -> None:
    x, weight = make(4, 12).to("webgpu"), make(8, 12).to("webgpu")
    for _ in range(2):
        F.linear(x, weight)
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            F.linear(x[:, :11], weight)
        with pytest.raises(RuntimeError, match="webgpu"):
            F.linear(x, make(8, 12))


@pytest.mark.parametrize("length", [8, 70, 1030, 1024, 4100, 5000])
def test_norms(manner: str, length: int) -> None:
    x, weight, bias = make(2, 3, length), make(length), make(length)
    agree(again(lambda x: F.layer_norm(x, (length,))), x)
    agree(again(lambda x, w, b: F.layer_norm(x, (length,), w, b)), x, weight, bias)
    agree(again(lambda x, w: F.rms_norm(x, (length,), w, 1e-6)), x, weight)
    agree(again(lambda x: F.rms_norm(x, (length,))), x)
    agree(again(lambda x, w, b: F.layer_norm(x, (3, length), w, b)), x, make(3, length), make(3, length))
    agree(
        again(lambda x, w, b: F.layer_norm(x, (2,), w, b)), x.t() if x.dim() == 2 else x.mT[..., :2], make(2), make(2)
    )


@pytest.mark.parametrize("manner", ["hardware"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("length", [36, 512, 1024, 2048, 4096, 4104, 9000])
def test_rows_in_registers(manner: str, length: int, dtype: torch.dtype) -> None:
    """Rows that are held whole, and rows whose rest is read again; with what is not finite in each part."""
    tolerance = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}[dtype]
    x = make(6, length)
    x[0, :5], x[0, -3:] = -torch.inf, -torch.inf
    x[1] = -torch.inf
    x[2, 7], x[3, -2], x[4, 1] = torch.nan, torch.nan, torch.inf
    x = x.to(dtype)
    agree(again(lambda x: (x.softmax(-1), x.log_softmax(-1))), x, rtol=tolerance, atol=tolerance)
    finite, weight, bias = make(3, length).to(dtype) + 3, make(length).to(dtype), make(length).to(dtype)
    agree(
        again(lambda x, w, b: (F.layer_norm(x, (length,), w, b), F.rms_norm(x, (length,), w, 1e-5))),
        *(finite, weight, bias),
        rtol=tolerance,
        atol=tolerance,
    )
    name = str(dtype)[6:]
    kernels = [k for k in open_runtime().programs._programs if isinstance(k, Rows) and k.inputs[0].dtype == name]
    assert any(kernel.held and kernel.twice is not None for kernel in kernels)


def test_embedding_and_index_select(manner: str) -> None:
    table = make(9, 12)
    for index in (torch.tensor([[1, 8], [0, 3]]), torch.tensor([7, 7, 0], dtype=torch.int32), torch.tensor(4)):
        agree(again(F.embedding), index, table)
        agree(again(lambda i, t: F.embedding(i, t)), index, make(10, 16)[1:, 4:])
        agree(again(F.embedding), index, table.to(torch.bfloat16)[:, :3])
    agree(again(F.embedding), torch.arange(12).view(3, 4).t() % 9, table)
    for dim in (0, 1, -1):
        agree(again(lambda t, i, d=dim: t.index_select(d, i)), table, torch.tensor([3, 1, 1]))
        agree(again(lambda t, i, d=dim: t.index_select(d, i)), table.t(), torch.tensor([0, 8, 4, 2])[::2])
    agree(again(F.embedding), torch.tensor([1, 2, 1]), make(5, 3, grad=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
def test_cat(webgpu: Any, dtype: torch.dtype) -> None:
    a, b = ((make(2, 3, 4, 8) * 3).to(dtype) for _ in range(2))
    for dim in range(-1, 4):
        agree(again(lambda x, y, d=dim: torch.cat((x, y), d)), a, b)
    agree(again(lambda x, y: torch.cat((x[..., 4:], y[..., :4]), -1)), a, b)  # as rotary embeddings do
    agree(again(lambda x, y: torch.cat((x[..., 3:], y[..., :3]), -1)), a, b)
    agree(again(lambda x, y: torch.cat((x.transpose(1, 2), y.transpose(1, 2)), 1)), a, b)
    agree(again(lambda x, y: torch.cat((x, y[:, 1:], x[:, :1], y), 1)), a, b)
    agree(again(lambda x, y: torch.cat((x.permute(3, 2, 1, 0), y.permute(3, 2, 1, 0)[1:3]))), a, b)
    agree(again(lambda x, y: torch.cat([x, y] * 8, 2)), a, b)
    agree(again(lambda x, y: torch.cat((x.flatten()[1:6], y.flatten()))), a, b)
    agree(again(lambda x, y: torch.cat((x[:1, :1], x[:1, 1:2]), 1)), a, b)


def test_cat_is_one_launch(webgpu: Any) -> None:
    runtime = open_runtime()
    a, b = make(2, 3, 8).to("webgpu"), make(2, 3, 8).to("webgpu")

    def launches(function: Callable[[], Any]) -> int:
        function()
        runtime.synchronize()
        before = runtime.statistics.commands
        function()
        runtime.synchronize()
        return runtime.statistics.commands - before

    assert launches(lambda: torch.cat((a[..., 4:], b[..., :4], a), -1)) == 1
    assert launches(lambda: F.linear(a, b[0])) == 1
    assert launches(lambda: F.layer_norm(a, (8,))) == 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own forward derivatives
def test_those_who_watch_still_see(webgpu: Any) -> None:
    x, weight, bias = (tensor.to("webgpu") for tensor in (make(3, 8), make(8, 8), make(8)))
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: F.linear(t, weight, bias),
        lambda t: F.layer_norm(t, (8,), bias, bias),
        lambda t: F.rms_norm(t, (8,), bias),
        lambda t: F.scaled_dot_product_attention(*[t.view(1, 1, *t.shape)] * 3)[0, 0],
    ]
    for function in functions:
        plain = function(x).cpu()
        torch.testing.assert_close(function(x).cpu(), plain)
        negated = torch._neg_view(x)
        torch.testing.assert_close(function(negated).cpu(), function(-x).cpu())
        wanting = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(function(wanting).sum(), wanting)
        assert gradient.shape == x.shape
        with torch.inference_mode():
            torch.testing.assert_close(function(x).cpu(), plain)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            fake = function(mode.from_tensor(x))
        assert fake.shape == x.shape and type(fake) is not torch.Tensor
    mapped = torch.vmap(functions[0])(torch.stack((x, x)))
    torch.testing.assert_close(mapped[1].cpu(), functions[0](x).cpu())
    _, tangent = torch.func.jvp(functions[0], (x,), (x,))
    torch.testing.assert_close(tangent.cpu(), (x @ weight.t()).cpu())
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        unpacked = torch.autograd.forward_ad.unpack_dual(functions[0](dual))
        torch.testing.assert_close(unpacked.tangent.cpu(), (x @ weight.t()).cpu())
