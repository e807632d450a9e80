"""Losses against the CPU, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.webgpu.agree import agree
from tests.webgpu.test_reductions import make

pytestmark = pytest.mark.native

REDUCTIONS = ["none", "mean", "sum"]


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("shape", [(7,), (5, 7), (3, 7, 4), (2, 7, 4, 5)])
def test_cross_entropy(webgpu: Any, shape: tuple[int, ...], reduction: str) -> None:
    scores = make(*shape, grad=True)
    samples = (shape[0], *shape[2:]) if len(shape) > 1 else ()
    target = torch.randint(0, 7, samples, generator=torch.Generator().manual_seed(2))
    weight = torch.rand(7) + 0.1
    agree(lambda x, t: F.cross_entropy(x, t, reduction=reduction), scores, target)
    agree(lambda x, t, w: F.cross_entropy(x, t, w, reduction=reduction), scores, target, weight)
    agree(lambda x, t: F.cross_entropy(x, t, ignore_index=3, reduction=reduction), scores, target)
    agree(lambda x, t: F.cross_entropy(x, t, label_smoothing=0.2, reduction=reduction), scores, target)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cross_entropy_of_halves(webgpu: Any, dtype: torch.dtype) -> None:
    target = torch.randint(0, 9, (6,))
    agree(lambda x, t: F.cross_entropy(x, t), make(6, 9, dtype=dtype, grad=True), target, rtol=2e-2, atol=2e-2)


def test_every_target_ignored_is_nan_as_in_torch(webgpu: Any) -> None:
    target = torch.full((4,), -100)
    agree(lambda x, t: F.cross_entropy(x, t), make(4, 3, grad=True), target)
    agree(lambda x, t: F.cross_entropy(x, t, reduction="sum"), make(4, 3, grad=True), target)


def test_no_samples(webgpu: Any) -> None:
    target = torch.empty(0, dtype=torch.int64)
    for reduction in REDUCTIONS:
        agree(lambda x, t, r=reduction: F.cross_entropy(x, t, reduction=r), torch.empty(0, 3), target)


def test_a_target_outside_the_classes_is_never_read(webgpu: Any) -> None:
    target = torch.tensor([1, 99, -3], device="webgpu")
    losses = F.nll_loss(torch.zeros(3, 4, device="webgpu"), target, reduction="none")
    with pytest.raises(IndexError, match=r"target (99|-3) is out of bounds"):
        torch.webgpu.synchronize()
    losses = losses.cpu()
    assert losses[0] == 0 and losses[1:].isnan().all()


def test_class_probabilities_as_targets(webgpu: Any) -> None:
    target = torch.rand(5, 7).softmax(1)
    agree(lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), make(5, 7, grad=True), target)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(
    "loss",
    [
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        lambda x, t, reduction: F.binary_cross_entropy(x.sigmoid(), t.sigmoid(), reduction=reduction),
        lambda x, t, reduction: F.binary_cross_entropy_with_logits(x, t.sigmoid(), reduction=reduction),
        lambda x, t, reduction: F.kl_div(
            x.log_softmax(1), t.softmax(1), reduction=reduction.replace("mean", "batchmean")
        ),
    ],
    ids=["mse", "l1", "smooth_l1", "huber", "bce", "bce_logits", "kl"],
)
def test_elementwise_losses(webgpu: Any, loss: Any, reduction: str) -> None:
    agree(lambda x, t: loss(x, t, reduction=reduction), make(5, 8, grad=True), make(5, 8) * 2)


def test_shapes_that_do_not_fit(webgpu: Any) -> None:
    with pytest.raises((RuntimeError, ValueError)):
        F.nll_loss(torch.zeros(3, 4, device="webgpu"), torch.zeros(2, dtype=torch.int64, device="webgpu"))
    with pytest.raises(RuntimeError, match="weight"):
        F.nll_loss(
            torch.zeros(3, 4, device="webgpu"),
            torch.zeros(3, dtype=torch.int64, device="webgpu"),
            torch.ones(5, device="webgpu"),
        )


# Labels end at the first -1; what follows is ignored. A label may stand twice, and a row may have none.
LABELS = torch.tensor([[0, 1, -1, 2], [3, -1, 0, 0], [-1, 1, 2, 3], [1, 1, 2, 0], [0, 1, 2, 3], [2, 2, -1, -1]])


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_margins_of_labels_and_classes(webgpu: Any, monkeypatch: pytest.MonkeyPatch, reduction: str) -> None:
    monkeypatch.setenv("ANYTORCH_WEBGPU_FALLBACK", "silent")  # the gradient of multilabel_margin_loss
    x = make(6, 4, grad=True)
    agree(lambda t, y: F.multilabel_margin_loss(t, y, reduction=reduction), x, LABELS)
    for row in range(6):
        agree(lambda t, y: F.multilabel_margin_loss(t, y, reduction=reduction), make(4, grad=True), LABELS[row])
    classes, weight = torch.tensor([0, 3, 1, 2, 0, 0]), torch.tensor([0.5, 2.0, 0.0, 1.0])
    for p, weights in ((1, None), (2, None), (1, weight), (2, weight)):
        more = {} if weights is None else {"weight": weights}

        def loss(t: Any, y: Any, p: int = p, more: Any = more) -> Any:
            moved = {name: value.to(t.device) for name, value in more.items()}
            return F.multi_margin_loss(t, y, p=p, margin=0.7, reduction=reduction, **moved)

        agree(loss, x, classes)
        agree(loss, make(4, grad=True), classes[1])
        agree(loss, make(4, grad=True), classes[1:2])
    ours = [
        F.multilabel_margin_loss(x[:0].to("webgpu"), LABELS[:0].to("webgpu"), reduction=reduction),
        F.multi_margin_loss(x[:0].to("webgpu"), classes[:0].to("webgpu"), reduction=reduction),
    ]
    for loss_of_none in ours:  # the CPU returns memory as it found it
        expected = {"none": [], "sum": 0.0, "mean": float("nan")}[reduction]
        assert str(loss_of_none.tolist()) == str(expected)
