"""Indexing and scattering against the CPU: mixes of indices, dtypes, layouts, accumulation, what is out of range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.native


@pytest.fixture(scope="module")
def torch(webgpu: Any) -> Any:
    webgpu.manual_seed(0)
    return webgpu


DTYPES = ("float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "float64", "complex64")


def values(torch: Any, shape: tuple[int, ...], dtype: str) -> Any:
    kind = getattr(torch, dtype)
    if kind.is_floating_point or kind.is_complex:
        return torch.randn(shape, dtype=torch.complex64 if kind.is_complex else torch.float32).to(kind)
    return torch.randint(0, 2 if dtype == "bool" else 100, shape).to(kind)


def same(torch: Any, function: Callable[..., Any], *tensors: Any, **tolerance: float) -> None:
    """`function` of copies on either device; the arguments too must end alike (in-place ops)."""
    host = [t.clone() if isinstance(t, torch.Tensor) else t for t in tensors]
    ours = [t.to("webgpu") if isinstance(t, torch.Tensor) else t for t in tensors]
    expected, found = function(*host), function(*ours)
    assert found.device.type == "webgpu"
    torch.testing.assert_close(found.cpu(), expected, **tolerance)
    for a, b in zip(ours, host, strict=True):
        if isinstance(b, torch.Tensor):
            torch.testing.assert_close(a.cpu(), b, **tolerance)


INDICES: dict[str, Callable[[Any], tuple[Any, ...]]] = {
    "one": lambda t: (t.tensor([2, 0, -1, 1]),),
    "one, twice over": lambda t: (t.tensor([[2, 0], [1, 1], [-3, 2]]),),
    "int32": lambda t: (t.tensor([2, 0, 1], dtype=t.int32),),
    "second": lambda t: (slice(None), t.tensor([3, 0])),
    "last": lambda t: (..., t.tensor([4, 0, -5, 2])),
    "two adjacent": lambda t: (t.tensor([0, 2]), t.tensor([3, 1])),
    "two adjacent, later": lambda t: (slice(None), t.tensor([0, 2]), t.tensor([3, 1])),
    "two apart": lambda t: (t.tensor([0, 2]), slice(None), t.tensor([3, 1])),
    "broadcast": lambda t: (t.tensor([[0], [2]]), t.tensor([3, 1, 0])),
    "three": lambda t: (t.tensor([0, 2]), t.tensor([3, 1]), t.tensor([-1, 0])),
    "with a number": lambda t: (1, t.tensor([3, 1])),
    "with a slice": lambda t: (slice(1, 3), t.tensor([3, 1]), slice(None, None, 2)),
    "with a new dimension": lambda t: (None, t.tensor([1, 0]), ..., None),
    "empty": lambda t: (t.tensor([], dtype=t.int64),),
    "mask of all": lambda t: (t.arange(60).view(3, 4, 5) % 3 == 0,),
    "mask of the first": lambda t: (t.tensor([True, False, True]),),
    "mask of two": lambda t: (t.arange(12).view(3, 4) % 2 == 0,),
    "mask in the middle": lambda t: (slice(None), t.tensor([True, False, False, True])),
    "mask and index": lambda t: (t.tensor([True, False, True]), t.tensor([1, 3])),
    "mask of nothing": lambda t: (t.zeros(3, 4, 5, dtype=t.bool),),
}


@pytest.mark.parametrize("name", INDICES)
def test_every_mix_of_indices(torch: Any, name: str) -> None:
    index = INDICES[name](torch)

    def on(device: Any) -> tuple[Any, ...]:
        return tuple(i.to(device) if isinstance(i, torch.Tensor) else i for i in index)

    x = torch.arange(60.0).view(3, 4, 5)
    for source in (x, x.flip(0).permute(2, 1, 0).contiguous().permute(2, 1, 0)):
        same(torch, lambda t: t[on(t.device)], source)
    shape = x[index].shape
    new = torch.randn(shape)

    def put(t: Any, v: Any) -> Any:
        t[on(t.device)] = v
        return t

    duplicates = name == "one, twice over"  # which of the writers wins is nobody's promise
    if not duplicates:
        same(torch, put, x, new)
    same(torch, put, x, torch.tensor(7.0))
    indices = tuple(i for i in index if isinstance(i, torch.Tensor))
    if len(indices) == len(index):
        same(
            torch,
            lambda t, v: t.index_put_(tuple(i.to(t.device) for i in indices), v, accumulate=True),
            x,
            new,
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_reading_and_writing_every_dtype(torch: Any, dtype: str) -> None:
    x = values(torch, (5, 7), dtype)
    rows, columns = torch.tensor([4, 0, 2]), torch.tensor([6, 1, 3])
    narrow = torch.tensor([[0, 3], [6, 1], [2, 2], [5, 0], [4, 4]])
    same(torch, lambda t, i, j: t[i, j], x, rows, columns)
    same(torch, lambda t, i: t.index_select(1, i), x, columns)
    same(torch, lambda t, i: t.index_select(0, i), x, rows)
    same(torch, lambda t, i: t.gather(1, i), x, narrow)
    same(torch, lambda t, i: t.take(i), x, torch.tensor([[34, -35], [0, 8]]))
    same(torch, lambda t, v, i: t.index_copy_(1, i, v), x, values(torch, (5, 3), dtype), columns)
    distinct = torch.tensor([[0, 3], [6, 1], [2, 5], [5, 0], [4, 1]])
    same(torch, lambda t, v, i: t.scatter_(1, i, v), x, values(torch, (5, 2), dtype), distinct)
    same(torch, lambda t, i: t.index_fill_(0, i, 1), x, rows)
    same(torch, lambda t, m: t[m], x, torch.arange(35).view(5, 7) % 4 == 0)
    same(torch, lambda t: t.flip(0, 1), x)
    same(torch, lambda t: t[1:, 2:].flip(1), x)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8"])
def test_sums_with_duplicates(torch: Any, dtype: str) -> None:
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype in ("float16", "bfloat16") else {}
    x, src = values(torch, (5, 7), dtype), values(torch, (9, 7), dtype)
    rows = torch.tensor([0, 4, 0, 2, 2, 2, 0, 1, 4])
    same(torch, lambda t, s, i: t.index_add_(0, i, s), x, src, rows, **tolerance)
    same(torch, lambda t, s, i: t.index_add(0, i, s, alpha=2), x, src, rows, **tolerance)
    index = torch.randint(0, 5, (9, 7))
    same(torch, lambda t, s, i: t.scatter_add(0, i, s), x, src, index, **tolerance)
    same(torch, lambda t, s, i: t.index_put((i,), s, accumulate=True), x, src, rows, **tolerance)
    same(
        torch,
        lambda t, s, i: t.put_(i, s, accumulate=True),
        x,
        src[0],
        torch.tensor([0, 0, 3, 34, 3, 3, -1]),
        **tolerance,
    )


def test_a_64_bit_sum_carries(torch: Any) -> None:
    x = torch.tensor([2**32 - 1, -1, 0])
    src = torch.tensor([1, 1, -(2**40), 2**32 - 1, 2**32 - 1])
    same(torch, lambda t, s, i: t.index_add(0, i, s), x, src, torch.tensor([0, 1, 2, 2, 2]))


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", ["sum", "prod", "mean", "amin", "amax"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_scatter_reduce(torch: Any, dtype: str, reduce: str, include_self: bool) -> None:
    tolerance = {"rtol": 3e-2, "atol": 3e-2} if dtype == "bfloat16" else {}
    x, src = values(torch, (4, 5), dtype), values(torch, (6, 5), dtype)
    if dtype == "int32":
        x, src = x % 5 - 2, src % 5 - 2
    index = torch.randint(0, 3, (6, 5))

    def run(t: Any, s: Any, i: Any) -> Any:
        return t.scatter_reduce(0, i, s, reduce, include_self=include_self)

    same(torch, run, x, src, index, **tolerance)


def test_a_nan_survives_min_and_max(torch: Any) -> None:
    x, src = torch.tensor([1.0, float("nan"), 3.0]), torch.tensor([float("nan"), 0.0, 5.0, 2.0])
    index = torch.tensor([0, 1, 2, 2])
    for reduce in ("amin", "amax"):
        same(torch, lambda t, s, i, r=reduce: t.scatter_reduce(0, i, s, r), x, src, index, equal_nan=True)


@pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter:UserWarning")
def test_scatter_with_values_smaller_indices_and_reductions(torch: Any) -> None:
    x, src = torch.randn(4, 5), torch.randn(6, 7)
    index = torch.tensor([[0, 1, 2], [3, 0, 1]])
    same(torch, lambda t, s, i: t.scatter(0, i, s), x, src, index)
    same(torch, lambda t, i: t.scatter(1, i, 2.5), x, index)
    same(torch, lambda t, s, i: t.scatter(0, i, s, reduce="add"), x, src, index)
    same(torch, lambda t, s, i: t.scatter(0, i, s, reduce="multiply"), x, src, index)
    same(torch, lambda t, i: t.scatter(0, i, 3.0, reduce="multiply"), x, index)


def test_source_target_and_index_may_share_a_storage(torch: Any) -> None:
    def run(device: str) -> Any:
        x = torch.arange(12.0, device=device).view(3, 4)
        x[1:].index_copy_(0, torch.tensor([1], device=device), x[:1])
        x[1:].index_add_(0, torch.tensor([1, 1], device=device), x[:1].expand(2, 4))
        i = torch.tensor([3, 0, 1, 2, 9, 9, 9, 9], device=device)
        i[4:].scatter_(0, i[:4], i[:4])
        return torch.cat([x.view(-1), i.float()]).cpu()

    assert torch.equal(run("webgpu"), run("cpu"))


def test_scalars_and_empty_tensors(torch: Any) -> None:
    scalar, zero = torch.tensor(3.0), torch.tensor(0)
    same(torch, lambda t, i: t.gather(0, i), scalar, zero)
    same(torch, lambda t, i: t.index_select(0, i), scalar, zero)
    same(torch, lambda t, i: t.scatter(0, i, 5.0), scalar, zero)
    same(torch, lambda t, i: t.index_add(0, i, t), scalar, zero)
    same(torch, lambda t, i: t.take(i), scalar, zero)
    empty = torch.empty(0, 4)
    same(torch, lambda t, i: t.index_select(1, i), empty, torch.tensor([1, 3]))
    same(torch, lambda t, i: t[:, i], empty, torch.tensor([1, 3]))
    same(torch, lambda t: t.nonzero(), empty)
    same(torch, lambda t: t.nonzero(), torch.tensor(5.0))


def test_masks(torch: Any) -> None:
    x, mask = torch.randn(4, 5), torch.rand(4, 5) > 0.5
    same(torch, lambda t, m: t.masked_select(m), x, mask)
    same(torch, lambda t, m: t.masked_select(m), x, mask[0])
    same(torch, lambda t, m, s: t.masked_scatter(m, s), x, mask, torch.randn(20))
    same(torch, lambda t, m, s: t.masked_scatter_(m, s), x, mask[:1], torch.randn(5, 4))
    for dtype in ("float32", "int64", "bool", "bfloat16"):
        same(
            torch,
            lambda t: t.nonzero(),
            values(torch, (3, 4, 5), dtype) * (torch.rand(3, 4, 5) > 0.5).to(getattr(torch, dtype)),
        )
    one, two = torch.nonzero(mask.to("webgpu"), as_tuple=True)
    assert torch.equal(x[mask], x.to("webgpu")[one, two].cpu())


def test_a_mask_beyond_one_workgroup(torch: Any) -> None:
    x = torch.arange(5000) % 7 == 3
    same(torch, lambda t: t.nonzero(), x)


@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("scale", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_embedding_and_its_gradient(torch: Any, padding_idx: int | None, scale: bool, dtype: str) -> None:
    weight = torch.randn(6, 8).to(getattr(torch, dtype))
    tokens = torch.tensor([[0, 2, 5, 2], [2, 1, 1, 1]])
    upstream = torch.randn(2, 4, 8).to(weight.dtype)

    def run(device: str) -> tuple[Any, Any]:
        w = weight.to(device).requires_grad_()
        out = torch.nn.functional.embedding(tokens.to(device), w, padding_idx, scale_grad_by_freq=scale)
        out.backward(upstream.to(device))
        return out.detach().cpu(), w.grad.cpu()

    tolerance = {"rtol": 1e-2, "atol": 1e-2} if dtype == "float16" else {}
    for ours, expected in zip(run("webgpu"), run("cpu"), strict=True):
        torch.testing.assert_close(ours, expected, **tolerance)


def test_gradients(torch: Any) -> None:
    rows = torch.tensor([0, 2, 2, 1])

    def run(device: str) -> list[Any]:
        x = torch.arange(12.0, device=device).view(3, 4).requires_grad_()
        i = rows.to(device)
        total = (x[i] ** 2).sum() + (x.gather(1, i.view(1, 4)) * 3).sum() + x.index_select(0, i).prod(1).sum()
        total = total + (x.scatter(0, i.view(1, 4), 2.0) ** 2).sum() + x[x > 4].sum() + x.flip(0)[0].sum()
        total.backward()
        return [x.grad.cpu()]

    torch.testing.assert_close(run("webgpu"), run("cpu"))


def test_counting_and_repeating(torch: Any) -> None:
    same(torch, lambda t: torch.bincount(t), torch.tensor([0, 3, 3, 1, 3]))
    same(torch, lambda t: torch.bincount(t, minlength=9), torch.tensor([0, 3, 3, 1, 3]))
    same(torch, lambda t, w: torch.bincount(t, w), torch.tensor([0, 3, 3]), torch.tensor([0.5, 1.0, 2.0]))
    same(torch, lambda r: torch.repeat_interleave(r), torch.tensor([0, 2, 0, 0, 3, 1, 0]))
    same(torch, lambda t, r: t.repeat_interleave(r, dim=0), torch.randn(3, 2), torch.tensor([2, 0, 3]))
    same(torch, lambda t: torch.nn.functional.one_hot(t, 6), torch.tensor([[0, 5], [2, 2]]))


def test_torchs_own_errors(torch: Any) -> None:
    x = torch.ones(2, 3, device="webgpu")
    index = torch.tensor([0, 1], device="webgpu")
    with pytest.raises(IndexError, match="too many indices"):
        x[index, index, index]
    with pytest.raises(IndexError, match="could not be broadcast"):
        x[index, torch.tensor([0, 1, 2], device="webgpu")]
    with pytest.raises(IndexError, match="mask"):
        x[torch.tensor([True, False, True], device="webgpu")]
    with pytest.raises(IndexError, match="Dimension out of range"):
        x.index_select(2, index)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        x[index] = torch.ones(5, 3, device="webgpu")
    with pytest.raises(RuntimeError, match="to be on the same device"):
        x.gather(0, torch.zeros(1, 3, dtype=torch.int64))
    with pytest.raises(RuntimeError, match="to be on the same device"):
        x.scatter_add(0, index.view(1, 2), torch.ones(1, 2))


def test_more_indices_than_the_parameters_hold(torch: Any) -> None:
    x = torch.randn(2, 3, 4, 5, 3)
    where = [
        torch.tensor([0, 1]),
        torch.tensor([2, 0]),
        torch.tensor([3, 1]),
        torch.tensor([4, 0]),
        torch.tensor([2, 1]),
    ]
    same(torch, lambda t, *i: t[i], x, *where)
    same(torch, lambda t, *i: t[i[0], :, i[2], :, i[4]], x, *where)
    y = torch.randn(2, 2, 3, 2, 2, 2, 3).permute(6, 0, 5, 1, 4, 2, 3)
    same(torch, lambda t, i: t[:, :, i], y, torch.tensor([1, 0, 1]))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding_idx", [None, 3])
def test_embedding_bag_and_its_gradient(torch: Any, mode: str, padding_idx: int | None) -> None:
    weight = torch.randn(7, 5)
    tokens, offsets = torch.tensor([0, 3, 6, 3, 2, 2, 3, 1]), torch.tensor([0, 3, 3, 6, 7])

    def run(device: str) -> tuple[Any, Any]:
        w = weight.to(device).requires_grad_()
        out = torch.nn.functional.embedding_bag(
            tokens.to(device), w, offsets.to(device), mode=mode, padding_idx=padding_idx
        )
        (out * torch.arange(25.0).view(5, 5).to(device)).sum().backward()
        return out.detach().cpu(), w.grad.cpu()

    for ours, expected in zip(run("webgpu"), run("cpu"), strict=True):
        torch.testing.assert_close(ours, expected)


def test_embedding_bag_with_weights(torch: Any) -> None:
    def run(device: str) -> list[Any]:
        w = torch.arange(12.0, device=device).view(4, 3).requires_grad_()
        share = torch.tensor([0.5, 2.0, -1.0, 3.0], device=device, requires_grad=True)
        tokens, offsets = torch.tensor([1, 3, 1, 0], device=device), torch.tensor([0, 2, 4], device=device)
        out = torch.nn.functional.embedding_bag(
            tokens, w, offsets, mode="sum", per_sample_weights=share, include_last_offset=True
        )
        (out * out).sum().backward()
        return [t.detach().cpu() for t in (out, w.grad, share.grad)]

    for ours, expected in zip(run("webgpu"), run("cpu"), strict=True):
        torch.testing.assert_close(ours, expected)


def test_out_forms(torch: Any) -> None:
    x, index = torch.arange(12.0).view(3, 4), torch.tensor([[1, 0, 2]])

    def run(device: str) -> list[Any]:
        source, i = x.to(device), index.to(device)
        exact, part = torch.zeros(1, 3, device=device), torch.zeros(2, 3, device=device)
        torch.gather(source, 1, i, out=exact)
        torch.gather(source, 1, i, out=part[1:])
        empty = torch.empty(0, device=device)
        torch.index_select(source, 1, i[0], out=empty)
        narrow = torch.zeros(5, dtype=torch.bool, device=device)
        torch.take(source > 4, i[0] + 4, out=narrow[1:4])
        same = source.clone()
        torch.gather(same, 1, torch.tensor([[3, 2, 1, 0]] * 3, device=device), out=torch.empty(3, 4, device=device))
        return [t.cpu() for t in (exact, part, empty, narrow, same)]

    for ours, expected in zip(run("webgpu"), run("cpu"), strict=True):
        torch.testing.assert_close(ours, expected)


def test_offsets_change_between_launches_of_one_geometry(torch: Any) -> None:
    """A launch is kept per geometry: where the tensors begin is not part of it, except how well they are aligned."""
    for dtype in ("float32", "float16", "uint8"):
        x = values(torch, (9, 8), dtype)
        flat = x.reshape(-1)
        for start in range(6):
            for width in (4, 8, 3):

                def rows(t: Any, i: Any, start: int = start, width: int = width) -> Any:
                    return t[start:].as_strided((3, width), (8, 1), start).index_select(0, i)

                same(torch, rows, flat, torch.tensor([2, 0]))
