"""Random numbers and dropout. The device has one seed and one counter (`webgpu.random`), or a CPU generator is given."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from anytorch.gpu.launch import Plan
from anytorch.gpu.native import BindingTooLarge
from anytorch.gpu.plans import plans
from anytorch.gpu.runtime import open_runtime
from anytorch.gpu.wgsl.philox import WORKGROUP, Dropout, Random, render, render_dropout
from anytorch.webgpu import random
from anytorch.webgpu.copies import on_device
from anytorch.webgpu.dtypes import FLOATS, computable, name_of, spoken
from anytorch.webgpu.fallback import fallback
from anytorch.webgpu.kernels import op_of, register_kernels, register_pointwise, resized
from anytorch.webgpu.launch import NoKernel, let_the_cpu_refuse, plan_over
from anytorch.webgpu.oversize import Windows, in_windows
from anytorch.webgpu.pointwise import Rule, clip
from anytorch.webgpu.tensors import KEY, aten, device, new_contiguous, new_tensor

_FLOAT, _WORD = struct.Struct("<f"), struct.Struct("<I")

# Digits of a number in [0, 1) that a type can hold: with more, rounding could make 1 of one just below.
DIGITS = {torch.float16: 11, torch.bfloat16: 8}


def _draw(numbers: int, generator: torch.Generator | None) -> tuple[int, int]:
    if generator is None:
        return random.take(numbers)
    seed = torch.empty((), dtype=torch.int64).random_(-(2**63), None, generator=generator).item()
    return int(seed) & (2**64 - 1), 0


def _plan(kernel: Random | Dropout, n: int, itemsize: int) -> Plan:
    """A plan for n elements; its numbers are those of `_numbers`."""
    key = (kernel, n)
    plan: Plan | None = plans[key]
    if plan is None:
        drawn = isinstance(kernel, Random)
        how: Callable[[Any], str] = render if drawn else render_dropout
        writable, more = (1, {}) if drawn else (0b110, {"unplaced": 2})
        threads = (WORKGROUP, kernel.per_thread)
        plan = plans[key] = plan_over(n, kernel, how, [itemsize], writable, *threads, numbers="9I", **more)
    return plan


def _numbers(seed: int, counter: int, digits: int, words: tuple[int, ...]) -> tuple[int, ...]:
    low = 0xFFFFFFFF
    halves = (seed & low, seed >> 32, counter & low, counter >> 32 & low)
    return (*halves, digits, *words, *(0,) * (4 - len(words)))


def _bits(value: float) -> int:
    """A float32's bits."""
    bits: int = _WORD.unpack(_FLOAT.pack(clip(value)))[0]
    return bits


def _generate(
    self: torch.Tensor,
    distribution: str,
    words: tuple[int, ...],
    kind: torch.dtype,
    generator: torch.Generator | None,
) -> torch.Tensor:
    """Fill a tensor; what is not contiguous or of the kernel's own type is generated beside and copied."""
    n = self.numel()
    if n == 0:
        return self
    kernel = Random(distribution)
    seed, counter = _draw(n * 4 // kernel.per_thread, generator)
    direct = self.dtype is kind and self.is_contiguous()
    target = self if direct else new_contiguous(self.shape, kind)
    digits = DIGITS.get(self.dtype, 24)
    try:
        _plan(kernel, n, kind.itemsize)([target.data_ptr()], *_numbers(seed, counter, digits, words))
    except BindingTooLarge:
        first = target.data_ptr()

        def launch(parts: list[torch.Tensor], windows: Windows) -> None:
            address = parts[0].data_ptr()
            done = (address - first) // (kind.itemsize * kernel.per_thread)
            numbers = _numbers(seed, counter + done, digits, words)
            _plan(kernel, parts[0].numel(), kind.itemsize).within(windows, [address], *numbers)

        in_windows([target.view(-1)], launch)
    return self if direct else on_device(target, self)


@dataclass(frozen=True)
class Distribution:
    """One of the generator's kernels; `wrong` says whether its one or two parameters are, `expects` what they should be."""

    name: str
    wrong: Callable[[float, float], bool] = lambda first, second: False
    expects: str = ""
    integers: bool = False  # may the tensor be of integers?


DISTRIBUTIONS = {
    "uniform_": Distribution(
        "uniform",
        lambda low, high: low > high,
        "uniform_ expects to return a [from, to) range, but found from={} > to={}",
    ),
    "normal_": Distribution("normal", lambda _, std: std < 0, "normal expects std >= 0.0, but found std {1}"),
    "log_normal_": Distribution("log_normal"),
    "exponential_": Distribution(
        "exponential", lambda rate, _: rate <= 0, "exponential_ expects its parameter > 0.0, but found {}"
    ),
    "bernoulli_.float": Distribution(
        "bernoulli", lambda p, _: not 0 <= p <= 1, "bernoulli_ expects p to be in [0, 1], but got p={}", True
    ),
    "geometric_": Distribution(
        "geometric", lambda p, _: not 0 < p < 1, "geometric_ expects p to be in (0, 1), but got p={}", True
    ),
    "cauchy_": Distribution("cauchy", lambda _, sigma: sigma <= 0, "cauchy_ expects sigma > 0.0, but found sigma={1}"),
}


def _distribution(op: Any, drawn: Distribution) -> Callable[..., torch.Tensor]:
    """A kernel of `op(self, a, b, generator)`."""
    arguments = [a for a in op._schema.arguments[1:3] if a.name != "generator"]
    names, defaults = [a.name for a in arguments], [a.default_value for a in arguments if a.has_default_value()]

    def kernel(self: torch.Tensor, *args: float, generator: torch.Generator | None = None, **kwargs: float) -> Any:
        values = [*args, *defaults[len(args) :]]
        for argument, value in kwargs.items():
            values[names.index(argument)] = value
        first, second = (*values, 0.0)[:2]
        if drawn.wrong(float(first), float(second)):
            raise RuntimeError(drawn.expects.format(float(first), float(second)))
        possible = drawn.integers or self.is_floating_point() or self.is_complex()
        if not (possible and self.numel()):
            let_the_cpu_refuse(op, (self, *values), {})  # uniform_ refuses even no integers, normal_ does not
        if not self.numel():
            return self
        if not possible:
            raise NotImplementedError(f'"{op._opname}" not implemented for {spoken(self.dtype)!r}')
        if not computable(self.dtype) or self.dtype is torch.float64:
            return fallback(op, self, *values, generator=generator)
        return _generate(self, drawn.name, (_bits(first), _bits(second)), torch.float32, generator)

    return kernel


def bernoulli_tensor(self: torch.Tensor, p: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:
    uniform = _generate(new_contiguous(self.shape, torch.float32), "uniform", (0, _bits(1.0)), torch.float32, generator)
    return self.copy_(uniform < p.to(device=device(), dtype=torch.float32).expand(self.shape))


LARGEST = {torch.float16: 2**11, torch.bfloat16: 2**8, torch.float32: 2**24, torch.float64: 2**53}


def _check_whole(dtype: torch.dtype) -> None:
    """Leave to the CPU, which mostly refuses them, dtypes whose whole numbers are not known here: complex, float8."""
    if dtype.is_complex or (dtype.is_floating_point and dtype not in LARGEST):
        raise NoKernel


def random_default(self: torch.Tensor, *, generator: torch.Generator | None = None) -> torch.Tensor:
    _check_whole(self.dtype)
    if self.dtype is torch.bool:
        return random_from(self, 0, 2, generator=generator)
    top = LARGEST.get(self.dtype)
    return random_from(self, 0, top + 1 if top else torch.iinfo(self.dtype).max, generator=generator, inclusive=not top)


def _check_bounds(dtype: torch.dtype, low: int, last: int) -> None:
    """Raise as torch does where the dtype does not hold a bound; warn where it does not hold every integer up to it."""
    floating = dtype.is_floating_point
    limits: Any = torch.finfo(dtype) if floating else None if dtype is torch.bool else torch.iinfo(dtype)
    least, most = (0, 1) if limits is None else (limits.min, limits.max)
    for name, value in (("from", low), ("to - 1", last)):
        if not least <= value <= most:
            raise RuntimeError(f"{name} is out of bounds for {spoken(dtype)}")
        if floating and abs(value) > LARGEST[dtype]:
            warnings.warn(
                f"{name} is out of bounds [-{LARGEST[dtype]}, {LARGEST[dtype]}]. Due to precision limitations "
                f"{spoken(dtype)} can support discrete uniform distribution only within this range.",
                stacklevel=3,
            )


def random_from(
    self: torch.Tensor,
    low: int,
    high: int | None,
    *,
    generator: torch.Generator | None = None,
    inclusive: bool = False,
) -> torch.Tensor:
    _check_whole(self.dtype)
    if high is None:
        top = LARGEST.get(self.dtype)
        high, inclusive = top if top else 1 if self.dtype is torch.bool else torch.iinfo(self.dtype).max, True
    length = high - low + inclusive
    if length <= 0:
        raise RuntimeError(f"random_ expects 'from' to be less than 'to', but got from={low} >= to={high}")
    _check_bounds(self.dtype, low, high - 1 + inclusive)
    if not computable(self.dtype):
        raise NoKernel
    if length <= 2**32 and low >= -(2**31) and high <= 2**31:
        return _generate(self, "range", (low & 0xFFFFFFFF, length & 0xFFFFFFFF), torch.int32, generator)
    if not computable(torch.int64):
        raise NoKernel
    start = low & (2**64 - 1)
    words = (start & 0xFFFFFFFF, start >> 32, length & 0xFFFFFFFF, length >> 32 & 0xFFFFFFFF)
    return _generate(self, "wide", words, torch.int64, generator)


def randperm(n: int, generator: torch.Generator | None = None, *, out: torch.Tensor) -> torch.Tensor:
    if n < 0:
        raise RuntimeError(f"n must be non-negative, got {n}")
    _check_whole(out.dtype)
    if out.dtype is torch.bool:  # refused
        raise NoKernel
    top = LARGEST.get(out.dtype) or torch.iinfo(out.dtype).max
    if n - 1 > top:
        raise RuntimeError(
            f"n is too large for result tensor type: {out.dtype} holds whole numbers up to {top}, n is {n}"
        )
    resized(out, (n,))
    if n < 2:
        return out.zero_()
    keys = random_from(new_contiguous((n,), torch.int32), -(2**31), 2**31, generator=generator)
    return out.copy_(torch.argsort(keys))


def _normal(mean: Any, std: Any = 1.0, generator: torch.Generator | None = None) -> torch.Tensor:
    """normal with tensors for its parameters."""
    if isinstance(std, torch.Tensor):
        if not std.is_complex() and std.numel() and bool((std < 0).any()):
            raise RuntimeError("normal expects all elements of std >= 0.0")
    elif std < 0:
        raise RuntimeError(f"normal expects std >= 0.0, but found std {std}")
    tensors = [v for v in (mean, std) if isinstance(v, torch.Tensor)]
    made = torch.empty(torch.broadcast_shapes(*[t.shape for t in tensors]), dtype=tensors[0].dtype, device=device())
    return made.normal_(0.0, 1.0, generator=generator).mul_(std).add_(mean)


def native_dropout(input: torch.Tensor, p: float, train: bool | None) -> tuple[torch.Tensor, torch.Tensor]:
    if not 0 <= p <= 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p}")
    if input.numel() == 0 or p == 0 or train is False:
        return input.clone(), torch.ones(input.shape, dtype=torch.bool, device=input.device)
    if p == 1:
        return torch.zeros_like(input), torch.zeros(input.shape, dtype=torch.bool, device=input.device)
    scale = 1.0 / (1.0 - p)
    n = input.numel()
    native = input.dtype in FLOATS and computable(input.dtype)
    if not native or n * input.dtype.itemsize > open_runtime().binding_limit:
        mask = torch.empty(input.shape, dtype=torch.bool, device=input.device).bernoulli_(1.0 - p)
        return input * mask * scale, mask
    # Element by element in memory: any dense layout will do, and is kept.
    dense = input if aten.is_non_overlapping_and_dense(input) else input.clone()  # which keeps the order of dimensions
    out = new_tensor(input.shape, dense.stride(), input.dtype)
    mask = new_tensor(input.shape, dense.stride(), torch.bool)
    seed, counter = random.take(n)
    numbers = _numbers(seed, counter, 24, (_bits(1.0 - p), _bits(scale)))
    plan = _plan(Dropout(name_of(input.dtype)), n, input.dtype.itemsize)
    plan([dense.data_ptr(), out.data_ptr(), mask.data_ptr()], *numbers)
    return out, mask


def multinomial(
    self: torch.Tensor, num_samples: int, replacement: bool = False, *, generator: torch.Generator | None = None
) -> torch.Tensor:
    """The largest of p/q over exponential q are a sample without replacement; with it, by the cumulative sum."""
    if num_samples <= 0:
        raise RuntimeError("cannot sample n_sample <= 0 samples")
    if self.dim() not in (1, 2):
        raise RuntimeError("prob_dist must be 1 or 2 dim")
    if not self.is_floating_point():
        raise RuntimeError(f"multinomial only supports floating-point dtypes for input, got: {self.dtype}")
    if not replacement and num_samples > self.shape[-1]:
        raise RuntimeError("cannot sample n_sample > prob_dist.size(-1) samples without replacement")
    weights = self.float()
    if num_samples == 1 or not replacement:
        q = torch.empty_like(weights).exponential_(1.0, generator=generator)
        ratio = weights / q
        if num_samples == 1:
            return ratio.argmax(dim=-1, keepdim=True)
        return ratio.topk(num_samples, dim=-1).indices
    steps = weights.cumsum(-1)
    total = steps.narrow(-1, steps.shape[-1] - 1, 1)
    points = torch.empty((*self.shape[:-1], num_samples), device=self.device).uniform_(generator=generator) * total
    return torch.searchsorted(steps.contiguous(), points, right=True).clamp_(max=self.shape[-1] - 1)


KERNELS: dict[str, Callable[..., Any]] = {
    "bernoulli_.Tensor": bernoulli_tensor,
    "random_": random_default,
    "random_.to": lambda self, to, **given: random_from(self, 0, to, **given),
    "random_.from": random_from,
    "randperm.generator_out": randperm,
    "normal.Tensor_float": _normal,
    "normal.float_Tensor": _normal,
    "normal.Tensor_Tensor": _normal,
    "native_dropout": native_dropout,
    "multinomial": multinomial,
}


def register(library: torch.library.Library) -> None:
    for name, drawn in DISTRIBUTIONS.items():
        library.impl(name, _distribution(op_of(name), drawn), KEY)
    register_kernels(library, KERNELS)
    dropout_backward = Rule(lambda scale: f"{{0}} * {{1}} * {{T}}({scale!r})", compute="output")
    register_pointwise(library, aten.native_dropout_backward.default, dropout_backward)
