"""Convolutions of one to three dimensions, plain and transposed, grouped and dilated, with their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from anytorch.gpu.buffers import OFFSET_MASK
from anytorch.gpu.launch import Plan
from anytorch.gpu.plans import plans
from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl import conv as wgsl
from anytorch.gpu.wgsl.matmul import render
from anytorch.webgpu import matrix_convolution
from anytorch.webgpu.copies import contiguous, narrowed, on_device
from anytorch.webgpu.dtypes import FLOATS, computable, name_of, word_dtype
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.launch import check_devices
from anytorch.webgpu.matrix_convolution import Gather, convolve, offered
from anytorch.webgpu.matrix_products import MatrixTiling, in_use
from anytorch.webgpu.ops.pooling import Triple, triple
from anytorch.webgpu.oversize import halving
from anytorch.webgpu.products import finish, schedule_grid
from anytorch.webgpu.tensors import KEY, aten, new_contiguous, new_tensor
from anytorch.webgpu.tuning import DIRECT, AnyTiling, Shape, Tiling, choose


def _spatial(tensor: torch.Tensor) -> Triple:
    return triple(tensor.shape[2:], tensor.dim() - 2, 1) if tensor.dim() > 2 else (1, 1, 1)


def _place_stride(tensor: torch.Tensor) -> int | None:
    """The distance between neighbouring places, if one number reaches them all (channels first or last); else None."""
    expected = None
    for length, step in zip(reversed(tensor.shape[2:]), reversed(tensor.stride()[2:]), strict=True):
        if length == 1:
            continue
        if expected is None:
            first = step
            expected = step
        if step != expected:
            return None
        expected = step * length
    return first if expected is not None else 1


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if _place_stride(tensor) is not None else contiguous(tensor)


def _strides(tensor: torch.Tensor) -> tuple[int, int, int]:
    place = _place_stride(tensor)
    assert place is not None
    return tensor.stride(0), tensor.stride(1), place


def _compute(
    kind: str,
    a: torch.Tensor,
    x: torch.Tensor,
    other: torch.Tensor,
    result: torch.Tensor,
    bias: torch.Tensor | None,
    sizes: tuple[int, int, int],
    groups: int,
    geometry: tuple[Triple, Triple, Triple, Triple],
) -> None:
    """One product per group. `other` is the tensor whose places are walked in step: the result, or the gradient g."""
    m, n, k = sizes
    aligned = (a.data_ptr() & OFFSET_MASK) // a.dtype.itemsize % 4 == 0
    layouts = (x.size(), x.stride(), other.size(), other.stride())
    alignment = (aligned, x.data_ptr() & 15)
    key = ("convolution", kind, x.dtype, result.dtype, sizes, groups, geometry, layouts, bias is None, alignment)

    channels = x.shape[1] // groups
    kernel, stride, _, dilation = geometry
    phases = prod(stride) if kind == "scatter" and wgsl.has_phases(kernel, stride, dilation) else 1
    by_phase = n, k
    if phases > 1:
        by_phase = (
            x.shape[0] * prod(wgsl.phase_sizes(_spatial(other), stride)),
            channels * prod(wgsl.phase_taps(kernel, stride)),
        )

    def planned(choice: Tiling, output: torch.dtype) -> Plan:
        plan: Plan | None = plans[key, choice, output]
        if plan is None:
            split, schedule = choice.splits > 1, choice.schedule
            tiled = kind == "gather" and schedule.form == "tiled"
            dtypes = name_of(x.dtype), name_of(output)
            fours = tiled and n // x.shape[0] % 4 == 0  # columns, in whole vec4s of one image
            taps_first = tiled and channels % schedule.bk == 0
            own_places = geometry[0] == geometry[1] == (1, 1, 1) and geometry[2] == (0, 0, 0)
            spec = wgsl.Convolution(
                *(kind, *dtypes, *geometry, bias is not None),
                a_vector=tiled and k % 4 == 0 and aligned,
                split=split,
                by_taps=taps_first,
                b_vector=taps_first and own_places and fours and _in_fours(x),
                columns=tiled and not split,
                c_vector=fours and not split and _in_fours(result),
                by_phase=phases > 1 and not split,
            )
            batches, columns, steps = (groups * phases, *by_phase) if spec.by_phase else (groups, n, k)
            numbers, launched = schedule_grid(schedule, batches, m, columns, steps, choice.splits)
            bound = [a, x, *([bias] if bias is not None and not split else [])]
            plan = plans[key, choice, output] = Plan(
                (spec, schedule),
                lambda kernel: render(wgsl.convolution(kernel[0]), kernel[1]),
                launched,
                [*[tensor.dtype.itemsize for tensor in bound], output.itemsize],
                1 << len(bound),
                tail=(*numbers, channels, *_spatial(x), *_spatial(other), *_strides(x), *_strides(other)),
            )
        return plan

    def launched(choice: Tiling, target: torch.Tensor) -> None:
        weight = a
        if kind == "gather" and choice.schedule.form == "tiled" and channels % choice.schedule.bk == 0:
            weight = contiguous(a.flatten(2).transpose(1, 2))  # [rows, taps, channels]
        bound = [weight, x, *([bias] if bias is not None and choice.splits == 1 else []), target]
        planned(choice, target.dtype)([tensor.data_ptr() for tensor in bound])

    def prepare(choice: Tiling) -> None:
        planned(choice, result.dtype if choice.splits == 1 else torch.float32)

    def computed(choice: Tiling) -> torch.Tensor:
        if choice.splits == 1:
            launched(choice, result)
            return result
        parts = new_contiguous((groups, choice.splits, m, n), torch.float32)
        launched(choice, parts)
        if kind == "weight":
            finish(parts, result.view(groups, m, n))
            return result
        images, places = result.shape[0], n // result.shape[0]
        if groups == 1:
            by_image = parts.view(choice.splits, m, images, places).permute(2, 0, 1, 3)
            finish(by_image, _flat_places(result, places), bias.view(1, m, 1) if bias is not None else None)
            return result
        summed = new_contiguous((groups, m, n), torch.float32)
        finish(parts, summed, bias.view(groups, m, 1) if bias is not None else None)
        on_device(summed.view(groups * m, images, places).transpose(0, 1), _flat_places(result, places))
        return result

    choice = plans[key]
    if choice is None:
        choice = Tiling(DIRECT)
        if x.dtype in FLOATS:
            along = "k" if kind == "weight" else "n"
            shape = Shape(groups * phases, m, *by_phase, along, gathered=True)
            choice = choose(open_runtime(), shape, name_of(x.dtype), computed, prepare=prepare)
        plans[key] = choice
    computed(choice)


def _in_fours(tensor: torch.Tensor) -> bool:
    """Whether its places lie side by side, each image and channel at a multiple of four elements."""
    image, channel, place = _strides(tensor)
    first = (tensor.data_ptr() & OFFSET_MASK) // tensor.dtype.itemsize
    return place == 1 and not (image % 4 or channel % 4 or first % 4)


def _flat_places(result: torch.Tensor, places: int) -> torch.Tensor:
    """[images, channels, places] over the same memory; places are evenly spaced by construction."""
    image, channel, place = _strides(result)
    return result.as_strided((result.shape[0], result.shape[1], places), (image, channel, place))


def _channels_last(*tensors: torch.Tensor) -> bool:
    """Whether one of these is channels-last, and not also channels-first."""
    last = torch.channels_last
    return any(t.dim() == 4 and t.is_contiguous(memory_format=last) and not t.is_contiguous() for t in tensors)


def _new_result(size: Sequence[int], dtype: torch.dtype, like: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Channels last if the input or the weight is, as torch's own convolutions do."""
    if _channels_last(like, weight):
        _, channels, height, width = size
        return new_tensor(size, (channels * height * width, 1, width * channels, channels), dtype)
    return new_contiguous(size, dtype)


class Settings:
    """A convolution's geometry, in three dimensions."""

    def __init__(self, weight: torch.Tensor, stride: Any, padding: Any, dilation: Any, transposed: bool) -> None:
        self.rank = weight.dim() - 2
        self.kernel = triple(weight.shape[2:], self.rank, 1)
        self.stride = triple(stride, self.rank, 1)
        self.padding = triple(padding, self.rank, 0)
        self.dilation = triple(dilation, self.rank, 1)
        self.transposed = transposed
        self.taps = self.kernel[0] * self.kernel[1] * self.kernel[2]

    @property
    def geometry(self) -> tuple[Triple, Triple, Triple, Triple]:
        return self.kernel, self.stride, self.padding, self.dilation


def _apply(
    kind: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    size: Sequence[int],
    s: Settings,
    groups: int,
    like: torch.Tensor,
) -> torch.Tensor:
    """A plain ("gather") or transposed ("scatter") convolution of x into a tensor of `size`."""
    if kind == "gather" and (done := _on_matrix_cores(x, weight, bias, size, s, groups, like)) is not None:
        return done
    return _by_shaders(kind, x, weight, bias, size, s, groups, like)


def _on_matrix_cores(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    size: Sequence[int],
    s: Settings,
    groups: int,
    like: torch.Tensor,
) -> torch.Tensor | None:
    """The plain convolution by the GPU's matrix cores; None where they cannot compute it or are slower."""
    runtime = open_runtime()
    if not in_use(runtime, x.dtype) or s.rank > 2 or 0 in (x.numel(), weight.numel(), *size):
        return None
    if _channels_last(like, weight):
        return None  # so must the result be then
    weight, x = contiguous(weight), _readable(x)
    bias = contiguous(bias) if bias is not None else None
    (_, *kernel), (_, *stride), (_, *padding), (_, *dilation) = s.geometry
    _, height, width = _spatial(x)
    gather = Gather(
        *(groups, x.shape[1] // groups, size[1] // groups, size[0]),
        size=(height, width),
        result=(size[-2] if s.rank == 2 else 1, size[-1]),
        kernel=(kernel[0], kernel[1]),
        stride=(stride[0], stride[1]),
        padding=(padding[0], padding[1]),
        dilation=(dilation[0], dilation[1]),
    )
    key = ("matrix convolution", x.dtype, gather, _strides(x), weight.data_ptr() & 15, bias is None)

    def launch(choice: MatrixTiling) -> Plan:
        return matrix_convolution.plan(runtime, gather, choice, name_of(x.dtype), _strides(x), bias is not None)

    def run(choice: AnyTiling) -> torch.Tensor:
        if isinstance(choice, MatrixTiling):
            return convolve(launch(choice), x, weight, bias, size)
        return _by_shaders("gather", x, weight, bias, size, s, groups, like)

    known = plans[key]
    if known is None:
        known = "slower, or not possible"
        if tiles := offered(runtime, x, weight, gather):
            shape = Shape(groups, gather.rows, gather.columns, gather.steps, "n", gathered=True)
            choice = choose(runtime, shape, name_of(x.dtype), run, tiles)
            if isinstance(choice, MatrixTiling):
                known = launch(choice)
        plans[key] = known
    return convolve(known, x, weight, bias, size) if isinstance(known, Plan) else None


def _by_shaders(
    kind: str,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    size: Sequence[int],
    s: Settings,
    groups: int,
    like: torch.Tensor,
) -> torch.Tensor:
    result = _new_result(size, word_dtype(x.dtype), like, weight)
    if result.numel() == 0:
        return narrowed(result, x.dtype)
    rows = size[1] // groups
    places = result.numel() // (size[0] * size[1])
    inner = x.shape[1] // groups * s.taps
    if inner == 0 or x.numel() == 0:
        result.zero_()
        return narrowed(result if bias is None else result.add_(bias.view(-1, *[1] * s.rank)), x.dtype)
    sizes = (rows, size[0] * places, inner)
    bias = contiguous(bias) if bias is not None else None
    _compute(kind, contiguous(weight), _readable(x), result, result, bias, sizes, groups, s.geometry)
    return narrowed(result, x.dtype)


def convolution(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> torch.Tensor:
    check_devices("convolution", x, weight, bias)
    settings = Settings(weight, stride, padding, dilation, transposed)
    same = x.dtype is weight.dtype and (bias is None or bias.dtype is x.dtype)
    args = (x, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    if not same or settings.rank > 3 or not computable(x.dtype) or x.dtype not in (*FLOATS, torch.int32, torch.int64):
        return torch.as_tensor(fallback(aten.convolution.default, *args))
    size = [x.shape[0], weight.shape[1] * groups if transposed else weight.shape[0]]
    extra = triple(output_padding, settings.rank, 0)
    for i, length in enumerate(x.shape[2:], 3 - settings.rank):
        kernel, step, pad, apart = [each[i] for each in settings.geometry]
        reach = apart * (kernel - 1) - 2 * pad
        size.append((length - 1) * step + reach + extra[i] + 1 if transposed else (length - reach - 1) // step + 1)
    return _apply("scatter" if transposed else "gather", x, weight, bias, size, settings, groups, x)


def convolution_backward(
    gradient: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    settings = Settings(weight, stride, padding, dilation, transposed)
    if settings.rank > 3 or not computable(x.dtype) or x.dtype not in FLOATS:
        bias_sizes = [weight.shape[1] * groups if transposed else weight.shape[0]]
        found = fallback(
            aten.convolution_backward.default,
            *(gradient, x, weight, bias_sizes, stride, padding, dilation, transposed, output_padding, groups),
            list(output_mask),
        )
        return found[0], found[1], found[2]
    to_x = to_weight = to_bias = None
    if output_mask[0]:
        # The gradient of a plain convolution's input is a transposed one, and the other way round.
        to_x = _apply("gather" if transposed else "scatter", gradient, weight, None, x.shape, settings, groups, x)
    if output_mask[1]:
        to_weight = _weight_gradient(gradient, x, weight, settings, groups)
    if output_mask[2]:
        to_bias = gradient.sum([0, *range(2, gradient.dim())])
    return to_x, to_weight, to_bias


def _weight_gradient(
    gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, s: Settings, groups: int
) -> torch.Tensor:
    result = new_contiguous(weight.shape, word_dtype(weight.dtype))
    walked, read = (x, gradient) if s.transposed else (gradient, x)
    if result.numel() == 0 or walked.numel() == 0 or read.numel() == 0:
        return narrowed(result.zero_(), weight.dtype)
    walked, read = _readable(walked), _readable(read)
    rows, columns = weight.shape[0] // groups, weight.shape[1] * s.taps
    inner = walked.numel() // walked.shape[1]
    _compute("weight", walked, read, walked, result, None, (rows, columns, inner), groups, s.geometry)
    return narrowed(result, weight.dtype)


def register(library: torch.library.Library) -> None:
    for op, kernel in (
        (aten.convolution_overrideable.default, convolution),
        (aten.convolution_backward_overrideable.default, convolution_backward),
    ):
        library.impl(op, halving(op, kernel), KEY)
