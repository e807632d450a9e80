"""CTC loss against the CPU and against float64, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

TIME, BATCH, CLASSES, LABELS = 12, 3, 6, 4


def case(
    time: int = TIME, batch: int = BATCH, classes: int = CLASSES, labels: int = LABELS
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    return (
        torch.randn(time, batch, classes, generator=generator) * 2,
        torch.randint(1, classes, (batch, labels), generator=generator),
    )


def loss_and_gradient(
    scores: torch.Tensor, targets: torch.Tensor, device: str, dtype: torch.dtype, *lengths: Any, **options: Any
) -> list[torch.Tensor]:
    x = scores.to(dtype).to(device).detach().requires_grad_()
    loss = F.ctc_loss(x.log_softmax(-1), targets.to(device), *lengths, **options)
    (gradient,) = torch.autograd.grad(loss.sum(), x)
    return [loss.detach().cpu(), gradient.cpu()]


def check(scores: torch.Tensor, targets: torch.Tensor, *lengths: Any, **options: Any) -> None:
    """As the CPU's, infinities and NaN included; and at most four times as far from float64 as that is."""
    ours, theirs, exact = (
        loss_and_gradient(scores, targets, device, dtype, *lengths, **options)
        for device, dtype in (("webgpu", torch.float32), ("cpu", torch.float32), ("cpu", torch.float64))
    )
    for have, want, true in zip(ours, theirs, exact, strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4, equal_nan=True)
        errors = [(each.double() - true).nan_to_num(0, 0, 0).abs().max() for each in (have, want)]
        assert errors[0] <= 4 * errors[1] + 1e-6 * true.nan_to_num(0, 0, 0).abs().max()


@pytest.mark.native
@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_lengths_of_every_kind(webgpu: Any, reduction: str, zero_infinity: bool) -> None:
    scores, targets = case()
    options = {"reduction": reduction, "zero_infinity": zero_infinity}
    for inputs, sizes in (
        ([12, 10, 8], [4, 2, 3]),
        ([12, 10, 2], [4, 0, 3]),  # an empty target, and one that is too long for its input
        ([12, 0, 0], [4, 0, 3]),  # no time at all
        ([1, 1, 5], [1, 0, 4]),
        ([12] * 3, [0] * 3),
    ):
        check(scores, targets, inputs, sizes, **options)
        check(scores, targets, torch.tensor(inputs), torch.tensor(sizes), **options)
        joined = torch.cat([targets[i, :size] for i, size in enumerate(sizes)])
        check(scores, joined, inputs, sizes, **options)


@pytest.mark.native
def test_blanks_repeats_and_layouts(webgpu: Any) -> None:
    scores, targets = case()
    lengths = [12, 10, 8], [4, 2, 3]
    check(scores, targets - 1, *lengths, blank=CLASSES - 1)
    check(scores, torch.full_like(targets, 2), *lengths)  # every label the same: a blank must lie between two
    check(scores, targets.int(), *lengths)
    check(scores.permute(1, 0, 2).contiguous().permute(1, 0, 2), targets.t().contiguous().t(), *lengths)
    check(scores[:, :1], targets[:1], *([length[0]] for length in lengths))
    check(scores[:, 0], targets[0], torch.tensor(12), torch.tensor(4))  # without a batch


@pytest.mark.native
def test_long_walks(webgpu: Any) -> None:
    scores, targets = case(400, 2, 20, 90)
    check(scores, targets, [400, 350], [90, 70], reduction="sum")


@pytest.mark.native
def test_the_parts_of_the_loss(webgpu: Any) -> None:
    """The ops below `ctc_loss`, with lengths as lists and as tensors; and a batch of none."""
    scores, targets = case()
    logs, inputs, sizes = scores.log_softmax(-1), [12, 10, 8], [4, 2, 3]
    aten = torch.ops.aten
    loss, walk = aten._ctc_loss(logs, targets, inputs, sizes)
    moved = logs.to("webgpu"), targets.to("webgpu")
    for lengths in ((inputs, sizes), (torch.tensor(inputs), torch.tensor(sizes))):
        ours, kept = aten._ctc_loss(*moved, *lengths)
        torch.testing.assert_close(ours.cpu(), loss)
        assert kept.shape == walk.shape
        gradient = aten._ctc_loss_backward(ours, *moved, *lengths, ours, kept, 0)
        expected = aten._ctc_loss_backward(loss, logs, targets, inputs, sizes, loss, walk, 0)
        torch.testing.assert_close(gradient.cpu(), expected, rtol=1e-4, atol=1e-4)
    none = aten._ctc_loss(moved[0][:, :0], moved[1][:0], [], [])
    assert [tuple(each.shape) for each in none] == [(0,), (0, 12, 1)]


def test_errors_are_the_cpus(webgpu: Any) -> None:
    scores, targets = case()
    wrong: list[tuple[Any, ...]] = [
        (scores, targets, [13, 10, 8], [4, 2, 3], 0),  # longer than there is time
        (scores, targets, [12, 10], [4, 2, 3], 0),
        (scores, targets, [12, 10, 8], [5, 2, 3], 0),
        (scores, targets, [12, 10, 8], [4, -2, 3], 0),
        (scores, targets, [12, 10, 8], [4, 2, 3], CLASSES),
        (scores, targets.flatten(), [12, 10, 8], [4, 2, 3], 0),
        (scores, targets.float(), [12, 10, 8], [4, 2, 3], 0),
        (scores.half(), targets, [12, 10, 8], [4, 2, 3], 0),
    ]
    for given, labels, *rest in wrong:
        with pytest.raises(Exception) as expected:
            torch.ops.aten._ctc_loss(given, labels, *rest)
        with pytest.raises(type(expected.value)):
            torch.ops.aten._ctc_loss(given.to("webgpu"), labels.to("webgpu"), *rest)


def test_targets_that_are_a_part_of_others(webgpu: Any) -> None:
    """In int32, which needs no conversion, a slice begins somewhere in its buffer."""
    scores = torch.randn(6, 3, 5, generator=torch.Generator().manual_seed(3)).log_softmax(2)
    targets = torch.randint(1, 5, (8, 2), generator=torch.Generator().manual_seed(4), dtype=torch.int32)
    lengths = [6, 6, 6], [2, 2, 2]
    want = F.ctc_loss(scores, targets[4:7], *lengths, reduction="none")
    found = F.ctc_loss(scores.to("webgpu"), targets.to("webgpu")[4:7], *lengths, reduction="none")
    torch.testing.assert_close(found.cpu(), want)


@pytest.mark.parametrize("zero_infinity", [False, True])
def test_not_a_number_stays_one(webgpu: Any, zero_infinity: bool) -> None:
    def losses(device: str) -> tuple[torch.Tensor, torch.Tensor]:
        scores = torch.zeros(4, 2, 3).log_softmax(2)
        scores[:, 1] = float("nan")
        scores = scores.to(device).requires_grad_()
        targets = torch.tensor([[1], [2]]).to(device)
        loss = F.ctc_loss(scores, targets, [4, 4], [1, 1], reduction="none", zero_infinity=zero_infinity)
        loss.sum().backward()
        assert scores.grad is not None
        return loss.detach().cpu(), scores.grad.cpu()

    for ours, theirs in zip(losses("webgpu"), losses("cpu"), strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
