"""Views share storage and version, and writing through them reaches nobody else."""

from __future__ import annotations

from typing import Any

import pytest
from tests.webgpu.agree import close


def test_views_share_storage_and_version(torch: Any) -> None:
    x = torch.arange(12.0, device="webgpu").view(3, 4)
    row, column, flat = x[1], x[:, 2], x.view(-1)
    for view in (row, column, flat, x.t(), x.unfold(1, 2, 1), x.diagonal(), x.unsqueeze(0), x.narrow(1, 1, 2)):
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
        assert view._is_view() and view._base is not None
    before = x._version
    row.fill_(-1)
    assert x._version == before + 1 and column._version == x._version
    expected = torch.arange(12.0).view(3, 4)
    expected[1] = -1
    close(x, expected)
    column.mul_(2)
    expected[:, 2] *= 2
    close(x, expected)
    close(flat, expected.view(-1))


def test_writing_into_narrow_types_leaves_their_neighbours(torch: Any) -> None:
    for dtype in (torch.bool, torch.int8, torch.uint8, torch.bfloat16, torch.int16, torch.float16):
        expected = torch.zeros(5, 7, dtype=dtype)
        x = expected.to("webgpu")
        for t in (x, expected):
            t[1, 2:5] = 1
            t[:, 3] = 1
            t[4, 6] = 1
        close(x, expected)


def test_in_place_on_a_view_with_autograd(torch: Any) -> None:
    def run(device: str) -> tuple[Any, Any]:
        x = torch.arange(6.0, device=device).view(2, 3).requires_grad_()
        y = x * 2
        y[0].mul_(3)
        y[:, 1].add_(x[:, 0])
        (y * y).sum().backward()
        return y.detach().cpu(), x.grad.cpu()

    for ours, expected in zip(run("webgpu"), run("cpu"), strict=True):
        torch.testing.assert_close(ours, expected)


def test_a_changed_saved_tensor_is_noticed(torch: Any) -> None:
    x = torch.ones(3, device="webgpu", requires_grad=True)
    y = x * 2
    z = (y * y).sum()
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()
    with pytest.raises(RuntimeError, match="leaf Variable"):
        x.add_(1)


def test_an_overlapping_copy_within_one_storage(torch: Any) -> None:
    x, expected = torch.arange(10.0, device="webgpu"), torch.arange(10.0)
    x[1:] = x[:-1].clone()
    expected[1:] = expected[:-1].clone()
    close(x, expected)
    for tensor in (x, expected):
        with pytest.raises(RuntimeError, match="single memory location"):
            tensor[2:].add_(tensor[:-2])
    y = expected.clone()  # torch does not look whether tensors with gaps meet; ours are computed beside
    x[2:8:2].add_(x[:6:2])
    y[2:8:2] = expected[2:8:2] + expected[:6:2]
    close(x, y)


def test_indexing(torch: Any) -> None:
    expected = torch.arange(60).view(3, 4, 5)
    x = expected.to("webgpu")
    mask = expected % 2 == 0
    rows = torch.tensor([2, 0, -1])
    for index in (1, -1, slice(0, 2), (1, 2), (..., 3), (slice(None), None, 1), (slice(None, None, 2), slice(1, 3))):
        close(x[index], expected[index])
    close(x[rows.to("webgpu")], expected[rows])
    close(x[rows], expected[rows])  # torch lets CPU indices select from a device's tensor
    close(x[:, rows.to("webgpu")], expected[:, rows])
    close(x[mask.to("webgpu")], expected[mask])
    x[mask.to("webgpu")] = -5
    x[1, rows.to("webgpu")] = 100
    expected[mask] = -5
    expected[1, rows] = 100
    close(x, expected)


def test_conjugate_and_negative_views(torch: Any) -> None:
    x = torch.randn(4, dtype=torch.complex64)
    y = x.to("webgpu")
    assert torch.equal(y.conj().cpu(), x.conj())
    assert torch.equal(y.conj().resolve_conj().cpu(), x.conj().resolve_conj())
    assert torch.equal(y.conj().imag.cpu(), x.conj().imag)
    z = torch.zeros(4, dtype=torch.complex64, device="webgpu")
    z.copy_(y.conj())
    assert torch.equal(z.cpu(), x.conj().resolve_conj())
    negative = y.conj().imag
    assert negative.is_neg()
    close(negative + 1, x.conj().imag + 1)
    assert negative[0].item() == x.conj().imag[0].item()
