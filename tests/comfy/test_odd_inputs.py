"""Whatever is connected and typed: a node computes what torch computes, or says a sentence; nothing else comes out of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from anytorch.comfy import nodes
from anytorch.comfy.places import place_for
from anytorch.comfy.values import DeviceChoice
from anytorch.comfy.weights import chosen, next_free
from anytorch.errors import InputError

SIZES = st.integers(0, 5)
SHAPES = st.lists(SIZES, min_size=0, max_size=5).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.float64, torch.int64, torch.bool, torch.uint8])
PLACES = st.sampled_from(["cpu", "numpy"]).map(DeviceChoice)
quick = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


def made(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    numbers = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 3
    return numbers.to(dtype)


def ran(call: Any) -> Any:
    """The node's answer, or None where it said a sentence."""
    try:
        return call()
    except InputError as exc:
        assert 1 <= len(str(exc).splitlines()) <= 2
        return None


@quick
@given(
    SHAPES,
    DTYPES,
    PLACES,
    SIZES,
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 2),
    st.booleans(),
)
def test_convolution(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    place: DeviceChoice,
    ins: int,
    outs: int,
    size: int,
    stride: int,
    padding: int,
    bias: bool,
) -> None:
    image = made(shape, dtype)
    answer = ran(lambda: nodes.CustomPyTorchConv2D().run(image, ins, outs, size, stride, padding, bias, device=place))
    if answer is None:
        return
    shown, tensor, weights = answer
    whole = image.float() if image.ndim == 4 else image.float()[..., None]
    wanted = F.conv2d(whole.movedim(-1, 1), weights["weight"], weights.get("bias"), stride, padding).movedim(1, -1)
    torch.testing.assert_close(tensor, wanted, rtol=1e-4, atol=1e-4)
    assert shown.ndim == 4 and float(shown.min()) >= 0 and float(shown.max()) <= 1


@quick
@given(SHAPES, DTYPES, PLACES, st.integers(0, 40), st.integers(1, 4), st.booleans())
def test_linear(
    shape: tuple[int, ...], dtype: torch.dtype, place: DeviceChoice, ins: int, outs: int, bias: bool
) -> None:
    tensor = made(shape, dtype)
    answer = ran(lambda: nodes.CustomPyTorchLinear().run(tensor, ins, outs, bias, device=place))
    if answer is None:
        return
    out, weights = answer
    width = weights["weight"].shape[1]
    given_rows = tensor.float().reshape((*out.shape[:-1], width))
    torch.testing.assert_close(out, F.linear(given_rows, weights["weight"], weights.get("bias")), rtol=1e-4, atol=1e-4)


@quick
@given(SHAPES, SHAPES, DTYPES, PLACES, st.sampled_from(list(nodes.OPERATIONS)), st.booleans())
def test_operations(
    left: tuple[int, ...], right: tuple[int, ...], dtype: torch.dtype, place: DeviceChoice, operation: str, same: bool
) -> None:
    a, b = made(left, dtype), made(left if same else right, torch.float32, 1) + 1
    answer = ran(lambda: nodes.CustomPyTorchTensorOps().run(a, b, operation, device=place))
    try:
        wanted = nodes.OPERATIONS[operation](a.float(), b)
    except RuntimeError:
        assert answer is None, "torch refuses it"
        return
    if answer is None:
        assert 0 in (a.numel(), b.numel()), "torch computes it"
        return
    torch.testing.assert_close(answer[0], wanted, rtol=1e-4, atol=1e-5)


@quick
@given(SHAPES, SHAPES, PLACES, st.sampled_from(list(nodes.LOSSES)), st.booleans())
def test_losses(left: tuple[int, ...], right: tuple[int, ...], place: DeviceChoice, loss: str, same: bool) -> None:
    a, b = made(left, torch.float32), made(left if same else right, torch.float32, 1)
    answer = ran(lambda: nodes.CustomPyTorchLoss().run(a, b, loss, device=place))
    if answer is None:
        assert a.shape != b.shape or a.numel() == 0
    else:
        (value,) = answer["result"]
        assert value == pytest.approx(float(getattr(F, nodes.LOSSES[loss])(a, b)), rel=1e-4, abs=1e-6)


@quick
@given(SHAPES, DTYPES, PLACES, st.sampled_from(nodes.ACTIVATIONS))
def test_activations(shape: tuple[int, ...], dtype: torch.dtype, place: DeviceChoice, name: str) -> None:
    tensor = made(shape, dtype)
    answer = ran(lambda: nodes.CustomPyTorchActivation().run(tensor, name, device=place))
    if answer is None:
        assert tensor.numel() == 0
        return
    options = {"dim": -1} if name == "softmax" else {}
    torch.testing.assert_close(answer[0], getattr(F, name)(tensor.float(), **options), rtol=1e-4, atol=1e-5)


@quick
@given(
    SHAPES,
    DTYPES,
    st.sampled_from(nodes.RANGES),
    st.sampled_from(nodes.LAYOUTS),
    st.sampled_from(nodes.COLOURS),
    st.integers(-1, 6),
)
def test_converters(
    shape: tuple[int, ...], dtype: torch.dtype, scale: str, layout: str, channels: str, channel: int
) -> None:
    tensor = made(shape, dtype)
    image = ran(lambda: nodes.AnytorchTensorToImage().run(tensor, scale, layout, channels))
    if image is not None:
        assert image[0].ndim == 4 and image[0].shape[-1] in (3, 4) and image[0].dtype == torch.float32
        assert scale == "raw" or (float(image[0].min()) >= 0 and float(image[0].max()) <= 1)
    mask = ran(lambda: nodes.AnytorchTensorToMask().run(tensor, channel, scale))
    assert mask is None or mask[0].ndim == 3
    ran(lambda: nodes.AnytorchImageToTensor().run(tensor, layout))
    ran(lambda: nodes.AnytorchTensorToLatent().run(tensor))
    ran(lambda: nodes.AnytorchTensorInfo().run(tensor))


def test_what_has_three_dimensions_is_a_mask() -> None:
    """Also one that is 1, 3 or 4 wide: ComfyUI's pictures always have four."""
    for width in (1, 3, 4, 7):
        (mask,) = nodes.AnytorchTensorToMask().run(torch.rand(2, 8, width), -1, "clamp")
        assert mask.shape == (2, 8, width)
    (image,) = nodes.AnytorchTensorToImage().run(torch.rand(3, 8, 9), "clamp", "channels first", "as they are")
    assert image.shape == (1, 8, 9, 3)


def test_infinities_do_not_blacken_a_picture() -> None:
    numbers = torch.tensor([[float("inf"), -float("inf")], [0.0, 4.0], [float("nan"), 1.0]])
    (image,) = nodes.AnytorchTensorToImage().run(numbers, "normalize", "channels last", "as they are")
    assert image[0, :, :, 0].tolist() == [[1.0, 0.0], [0.0, 1.0], [0.0, 0.25]]
    for row, wanted in (([5, 6, float("inf"), 5.5], [0, 1, 1, 0.5]), ([-3e38, 3e38, 0, 1.0], [0, 1, 0.5, 0.5])):
        (image,) = nodes.AnytorchTensorToImage().run(torch.tensor([row]), "normalize", "channels last", "as they are")
        assert image[0, 0, :, 0].tolist() == pytest.approx(wanted)


def test_quantized_numbers_are_not_taken_for_weights() -> None:
    with pytest.raises(InputError, match="was quantized"):
        chosen({"weight": torch.ones(3, 4, dtype=torch.int8)}, "", (3, 4), bias=False)


def test_names_with_brackets_are_counted_too(tmp_path: Path) -> None:
    first = next_free(tmp_path / "layer[1].safetensors")
    first.touch()
    assert first.name == "layer[1]_00001.safetensors"
    assert next_free(tmp_path / "layer[1].safetensors").name == "layer[1]_00002.safetensors"


def test_a_card_that_is_not_there_falls_back() -> None:
    found = place_for(DeviceChoice("cpu:9"))
    assert found.name == "cpu" and "cpu" in found.note
