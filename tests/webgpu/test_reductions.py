"""Reductions: every op against the CPU, over the shapes, layouts and dtypes that have broken kernels before."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from tests.webgpu.agree import adapter_manner, agree, on_device  # noqa: F401  (the fixture `manner`)

pytestmark = pytest.mark.native


def make(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    if dtype is torch.bool:
        return torch.rand(shape, generator=generator) > 0.5
    if not dtype.is_floating_point:
        low = 0 if dtype is torch.uint8 else -9
        return torch.randint(low, 10, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


LAYOUTS = {
    "scalar": lambda: make(1).reshape(()),
    "row": lambda: make(37),
    "matrix": lambda: make(5, 70),
    "tall": lambda: make(300, 3),
    "long": lambda: make(2, 9000),
    "cube": lambda: make(4, 5, 6),
    "transposed": lambda: make(6, 5, 4).permute(2, 0, 1),
    "sliced": lambda: make(9, 20)[2:7, 3:17:2],
    "expanded": lambda: make(4, 1, 6).expand(4, 3, 6),
}
REDUCED = {
    "sum": lambda x, d: x.sum(d),
    "mean": lambda x, d: x.mean(d, keepdim=True),
    "amax": lambda x, d: x.amax(d),
    "amin": lambda x, d: x.amin(d, keepdim=True),
    "max": lambda x, d: x.max(d),
    "min": lambda x, d: x.min(d),
    "argmax": lambda x, d: x.argmax(d),
    "var": lambda x, d: torch.var(x, d, correction=0),
    "std_mean": lambda x, d: torch.std_mean(x, d, correction=0, keepdim=True),
    "any": lambda x, d: (x > 1).any(d),
    "all": lambda x, d: (x > -1).all(d),
    "count_nonzero": lambda x, d: torch.count_nonzero(x > 0, d),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "norm": lambda x, d: torch.linalg.vector_norm(x, 2, d),
    "prod": lambda x, d: x.prod(d),
}


EVERYWHERE = ("sum", "max", "var")  # one of each shape of state; the others share their geometry
CASES = [(n, k) for n in REDUCED for k in LAYOUTS if n in EVERYWHERE or k in ("scalar", "long", "transposed")]


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_one_dimension(manner: str, name: str, layout: str) -> None:
    x = LAYOUTS[layout]()
    for dim in range(-1, max(1, x.dim()) - 1):
        agree(REDUCED[name], x, d=dim)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_whole_tensor_and_several_dimensions(manner: str, layout: str) -> None:
    x = LAYOUTS[layout]()
    agree(
        lambda x: (x.sum(), x.mean(), x.max(), x.min(), x.argmin(), x.var(correction=0), x.norm(), x.any()),
        x,
        atol=1e-4,
    )
    if x.dim() == 3:
        agree(lambda x: (x.sum((0, 2)), x.amax((0, 1), keepdim=True), x.std((1, 2)), x.mean((0, 1, 2))), x)


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool]
)
def test_dtypes(manner: str, dtype: torch.dtype) -> None:
    x = make(7, 130, dtype=dtype)
    loose = {"rtol": 1e-2, "atol": 1e-1} if dtype.is_floating_point else {}
    agree(lambda x: (x.sum(0), x.sum(1), x.sum(), x.sum(1, dtype=torch.float32)), x, **loose)
    agree(lambda x: (x.max(1), x.min(0), x.amax(1), x.any(1), x.all(0), torch.count_nonzero(x, 1)), x)
    if dtype.is_floating_point:
        agree(lambda x: (x.mean(1), x.var(1), x.logsumexp(0), torch.linalg.vector_norm(x, 3, 1)), x, **loose)
    elif dtype is not torch.bool:
        agree(lambda x: (x.prod(1), x.sum(0, dtype=torch.int32)), x)


def test_sums_of_int64_are_exact_beyond_32_bits(manner: str) -> None:
    x = torch.full((3, 1000), 2**40 + 3)
    agree(lambda x: (x.sum(1), x.sum(), x.amax()), x)


def test_gradients(manner: str) -> None:
    x = make(5, 33, grad=True)
    agree(lambda x: (x.sum(0), x.mean(1), x.amax(1), x.var(0), x.std(1), x.logsumexp(1), x.max(0)[0]), x)
    agree(lambda x: (torch.linalg.vector_norm(x, 2, 1), torch.linalg.vector_norm(x, 1, 0), x.prod(1)), x, atol=1e-4)


@pytest.mark.parametrize("order", [0, 1, 2, 3.5, -1.5, math.inf, -math.inf])
def test_norms(manner: str, order: float) -> None:
    agree(lambda x: (torch.linalg.vector_norm(x, order), torch.linalg.vector_norm(x, order, 1)), make(6, 77))


def test_nan_and_infinity_as_torch_has_them(manner: str) -> None:
    x = make(6, 50).clone()
    x[0, 3] = math.nan
    x[1, 7] = math.inf
    x[2, :] = -math.inf
    x[3, 4], x[3, 9] = math.nan, math.inf
    x[4, 0], x[4, 1] = math.inf, -math.inf
    agree(lambda x: (x.amax(1), x.amin(1), x.max(1), x.min(1), x.argmax(1), x.argmin(1), x.sum(1), x.max()), x)
    agree(lambda x: (x.logsumexp(1), x.nansum(1), torch.linalg.vector_norm(x, math.inf, 1), x.var(1)), x)
    agree(lambda x: torch.nanmean(x, 1), x[:1])


def test_the_first_of_equals_is_named(manner: str) -> None:
    x = torch.tensor([1.0, 5.0, 2.0, 5.0, 5.0] * 100)
    agree(lambda x: (x.argmax(), x.argmin(), x.max(0), x.min(0)), x)


def test_variance_of_large_numbers_is_accurate(manner: str) -> None:
    x = make(3, 5000).double().add(10_000).float()
    expected = x.double().var(1)
    torch.testing.assert_close(x.to("webgpu").var(1).cpu().double(), expected, rtol=1e-3, atol=0)


def test_few_elements_for_the_correction(webgpu: Any) -> None:
    for size, value in ((1, math.nan), (2, math.inf)):  # 0/0 and x/0
        found = on_device(make(3, size)).var(1, correction=size).cpu()
        torch.testing.assert_close(found, torch.full((3,), value), equal_nan=True)


def test_empty_tensors(webgpu: Any) -> None:
    agree(
        lambda x: (x.sum(1), x.prod(1), x.mean(1), x.any(1), x.all(1), x.logsumexp(1), x.sum(), x.norm()),
        torch.empty(3, 0),
    )
    agree(lambda x: (x.sum(1), x.amax(1), x.max(1), x.argmax(1)), torch.empty(0, 4))
    with pytest.raises((RuntimeError, IndexError)):
        torch.empty(3, 0, device="webgpu").amax(1)
    with pytest.raises((RuntimeError, IndexError)):
        torch.empty(0, device="webgpu").max()


def test_a_dimension_that_is_not_there(webgpu: Any) -> None:
    with pytest.raises(IndexError):
        torch.ones(2, 2, device="webgpu").sum(2)


def test_out(webgpu: Any) -> None:
    x = make(4, 9)
    out = torch.empty(4, device="webgpu")
    assert torch.sum(on_device(x), 1, out=out) is out
    torch.testing.assert_close(out.cpu(), x.sum(1))
    strided = torch.zeros(4, 3, device="webgpu")
    torch.amax(on_device(x), 1, out=strided[:, 1])
    torch.testing.assert_close(strided.cpu()[:, 1], x.amax(1))
    with pytest.raises(RuntimeError, match="cast"):
        torch.mean(on_device(x), 1, out=torch.empty(4, dtype=torch.int64, device="webgpu"))
    # A sum is computed in the dtype of `out`, so every term is rounded down first.
    whole = torch.sum(on_device(10 * x), 1, out=torch.empty(4, dtype=torch.int64, device="webgpu"))
    assert whole.tolist() == torch.sum(10 * x, 1, out=torch.empty(4, dtype=torch.int64)).tolist()


def test_more_dimensions_than_the_parameters_hold(webgpu: Any) -> None:
    x = make(*[2] * 12).permute(11, 0, 10, 1, 9, 2, 8, 3, 7, 4, 6, 5)
    agree(lambda x: (x.sum((0, 2, 4, 6, 8, 10)), x.amax((1, 3, 5))), x, atol=1e-4)


def test_sums_repeat_to_the_bit(manner: str) -> None:
    x = make(100_000).to("webgpu")
    assert len({x.sum().item() for _ in range(3)}) == 1


def test_without_subgroups(fresh_plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters that have none fold in workgroup memory."""
    from anytorch.gpu.runtime import open_runtime

    runtime = open_runtime()
    monkeypatch.setattr(runtime, "adapter", dataclasses.replace(runtime.adapter, kind="DiscreteGPU"))
    monkeypatch.setattr(runtime, "features", runtime.features - {"subgroup"})
    agree(lambda x: (x.sum(1), x.max(1), x.var(1), x.softmax(1), x.sum(), x.logsumexp(1)), make(6, 900), atol=1e-4)
    agree(lambda x: (x.sum(1), x.mean(1), x.log_softmax(1)), make(6, 37))
