"""Elementwise ops on the webgpu device against the CPU: accuracy, special values, dtypes, layouts, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.webgpu.agree import agree

from anytorch.gpu.wgsl.functions import FUNCTIONS, computable, needed

pytestmark = pytest.mark.native


def names(text: str) -> list[str]:
    return text.split()


INF, NAN = float("inf"), float("nan")
SPECIAL = [0.0, -0.0, INF, -INF, NAN, 1.0, -1.0, 0.5, 2.0, 88.7, 88.73, -87.0, -103.0, 127.9, 128.0, 1e-30, 1e30, -1e30]
ELEMENTARY = [
    *names("exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh"),
    *names("sigmoid erf erfc erfinv sqrt rsqrt reciprocal"),
]
EXACT = names("floor ceil round trunc sign sgn abs neg frac relu isnan isinf isfinite isposinf isneginf signbit")


def values() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.cat(
        [
            torch.linspace(-1, 1, 201),
            *[torch.randn(100, generator=generator) * scale for scale in (5, 50, 1e4)],
            torch.logspace(-30, 30, 100),
            -torch.logspace(-30, 30, 100),
            torch.tensor(SPECIAL),
        ]
    )


def same(got: torch.Tensor, want: torch.Tensor, rtol: float | None = None, atol: float | None = None) -> None:
    assert got.device.type == "webgpu"
    torch.testing.assert_close(got.detach().cpu(), want.detach(), rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.parametrize("name", ELEMENTARY)
def test_an_elementary_function_is_right_to_a_millionth(webgpu: Any, name: str) -> None:
    x = values()
    function = getattr(torch, name)
    got, want, exact = function(x.to("webgpu")).cpu(), function(x), function(x.double())
    assert torch.equal(got.isnan(), want.isnan())
    infinite = want.isinf()
    assert torch.equal(got[infinite], want[infinite])
    usual = want.isfinite() & got.isfinite() & (want.abs() > 1e-35)  # below that a device may flush to zero
    error = ((got.double() - exact) / exact).abs()[usual]
    assert error.max() < 1e-6, x[usual][error.argmax()]


@pytest.mark.parametrize("name", EXACT)
def test_an_exact_function_is_exact(webgpu: Any, name: str) -> None:
    x = values()
    same(getattr(torch, name)(x.to("webgpu")), getattr(torch, name)(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["lgamma", "digamma", "sinc", "trigamma"])
def test_gamma_functions_are_right_near_zero_and_for_negatives(webgpu: Any, name: str) -> None:
    x = torch.cat([torch.linspace(-5.3, 12.1, 301), torch.tensor([1e-6, -1e-6, 1.0, 2.0, 33.3, 171.5])])
    function = getattr(torch, name, lambda v: torch.polygamma(1, v))
    same(function(x.to("webgpu")), function(x.double()).float(), rtol=2e-5, atol=2e-5)


BINARY = names(
    "add sub mul div true_divide pow fmod remainder maximum minimum fmax fmin atan2 hypot copysign logaddexp"
)
COMPARISONS = names("eq ne lt le gt ge logical_and logical_or logical_xor")


@pytest.mark.parametrize("name", [*BINARY, *COMPARISONS, "floor_divide", "logaddexp2", "xlogy", "heaviside"])
def test_a_binary_op_agrees_for_every_pair_of_special_values(webgpu: Any, name: str) -> None:
    """Every value with every other, so that each combination of signs, zeros, infinities and NaN occurs."""
    x = torch.tensor([*SPECIAL[:9], -0.3, 3.0, -7.0, 1e10, 5.5, 1e-3])
    a, b = x[:, None], x[None, :]
    function = getattr(torch, name)
    got, want = function(a.to("webgpu"), b.to("webgpu")), function(a, b)
    if name == "remainder":  # torch's own CPU kernel returns NaN or x for an infinite divisor, by vector width
        finite = b.isfinite().expand(want.shape)
        assert torch.equal(got.cpu()[finite].isnan(), want[finite].isnan())
        return
    same(got, want, rtol=2e-6, atol=1e-6)


LAYOUTS: dict[str, Any] = {
    "scalars": lambda: (torch.randn(()), torch.randn(())),
    "empty": lambda: (torch.randn(0, 3), torch.randn(0, 3)),
    "odd": lambda: (torch.randn(7, 13), torch.randn(7, 13)),
    "aligned": lambda: (torch.randn(8, 16), torch.randn(8, 16)),
    "broadcast": lambda: (torch.randn(5, 1, 3), torch.randn(4, 1)),
    "transposed": lambda: (torch.randn(6, 4).t(), torch.randn(4, 6)),
    "offset": lambda: (torch.randn(9, 5)[1:, 1:], torch.randn(33)[1:].view(8, 4)),
    "stepped": lambda: (torch.randn(10, 6)[::2, ::3], torch.randn(5, 2)),
    "channels last": lambda: (
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(1, 3, 1, 1),
    ),
    "seven dimensions": lambda: (torch.randn(2, 1, 2, 3, 2, 1, 2).transpose(0, 3), torch.randn(3, 2, 2, 2, 2, 2, 2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool])
def test_every_layout_and_dtype(webgpu: Any, layout: str, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    a, b = LAYOUTS[layout]()
    a, b = [(t > 0 if dtype is torch.bool else (t * 40).to(dtype)) for t in (a, b)]
    x, y = a.to("webgpu"), b.to("webgpu")
    same(x + y, a + b)
    same(x < y, a < b)
    same(torch.where(x > 0, x, y), torch.where(a > 0, a, b))
    if a.shape == (a + b).shape:
        same(x.mul_(y), a.mul_(b))
    assert (x + y).stride() == (a + b).stride()


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_integer_division_and_bits(webgpu: Any, dtype: torch.dtype) -> None:
    low = 0 if dtype is torch.uint8 else -100
    generator = torch.Generator().manual_seed(2)
    a = torch.randint(low, 100, (400,), generator=generator).to(dtype)
    b = torch.randint(low, 100, (400,), generator=generator).to(dtype)
    b[b == 0] = 7
    x, y = a.to("webgpu"), b.to("webgpu")
    for mode in (None, "trunc", "floor"):
        same(torch.div(x, y, rounding_mode=mode), torch.div(a, b, rounding_mode=mode))
    for function in (torch.floor_divide, torch.remainder, torch.fmod, torch.gcd, torch.bitwise_and, torch.bitwise_xor):
        same(function(x, y), function(a, b))
    same(x << (y & 7), a << (b & 7))
    same(x >> (y & 7), a >> (b & 7))
    same(~x, ~a)
    same(x**3, a**3)
    same(x // 3, a // 3)
    same(x % -5 if low else x % 5, a % -5 if low else a % 5)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8])
def test_division_of_integers_by_zero_gives_what_the_guide_says(webgpu: Any, dtype: torch.dtype) -> None:
    a = torch.arange(0 if dtype is torch.uint8 else -4, 8).to(dtype)
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        torch.floor_divide(a, torch.zeros_like(a))
    x, all_bits = a.to("webgpu"), ~torch.zeros_like(a)
    for zero in (torch.zeros_like(x), 0):
        for quotient in (x // zero, *(torch.div(x, zero, rounding_mode=mode) for mode in ("floor", "trunc"))):
            same(quotient, all_bits)
        for remainder in (x % zero, torch.remainder(x, zero), torch.fmod(x, zero)):
            same(remainder, a)
        same(x / zero, a / 0)
    same(x + 1, a + 1)  # the device goes on


def test_integers_wrap_round_and_are_exact_beyond_32_bits(webgpu: Any) -> None:
    a = torch.tensor([250, 255, 0, 1], dtype=torch.uint8)
    same(a.to("webgpu") + 10, a + 10)
    same(-a.to("webgpu"), -a)
    b = torch.tensor([2**40 + 1, -(2**50) - 3])
    same(b.to("webgpu") * 3 + (2**41 + 1), b * 3 + (2**41 + 1))
    same((b.to("webgpu") // 7) == b.to("webgpu"), (b // 7) == b)


def test_nan_is_kept_where_torch_keeps_it(webgpu: Any) -> None:
    x = torch.tensor([NAN, 1.0, -INF, INF, -2.0])
    on = x.to("webgpu")
    same(on == on, x == x)  # a compiler may take x == x for true
    same(on >= on, x >= x)
    for function in (F.relu, F.hardtanh, F.leaky_relu, F.hardswish, F.softplus, F.softshrink, F.hardshrink, F.silu):
        same(function(on), function(x), rtol=1e-5, atol=1e-6)
    same(on.clamp(-1, 1), x.clamp(-1, 1))
    same(on.clamp(min=torch.zeros(5, device="webgpu")), x.clamp(min=torch.zeros(5)))
    same(on.nan_to_num(), x.nan_to_num())
    same(on.half().nan_to_num(7.0, posinf=3.0), x.half().nan_to_num(7.0, posinf=3.0))


ACTIVATIONS: dict[str, Any] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "mish": F.mish,
    "softplus": lambda x: F.softplus(x, 2.0, 3.0),
    "elu": lambda x: F.elu(x, 1.3),
    "selu": F.selu,
    "leaky relu": lambda x: F.leaky_relu(x, 0.2),
    "hardtanh": lambda x: F.hardtanh(x, -0.7, 1.2),
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "log sigmoid": F.logsigmoid,
    "glu": F.glu,
    "prelu": lambda x: F.prelu(x, torch.tensor([0.3], device=x.device, dtype=x.dtype)),
    "softshrink": F.softshrink,
    "hardshrink": F.hardshrink,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "logit": lambda x: torch.logit(torch.sigmoid(x), 0.05),
    "power": lambda x: (x.abs() + 0.1) ** 2.7,
    "in place": lambda x: F.elu_(F.relu_(x * 2) - 1),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_and_its_gradient(webgpu: Any, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    a = (torch.randn(6, 10) * 3).to(dtype)
    g = torch.randn(6, 10).to(dtype)
    x = a.to("webgpu").requires_grad_()
    a.requires_grad_()
    got, want = ACTIVATIONS[name](x), ACTIVATIONS[name](a)
    rtol, atol = (1e-5, 2e-6) if dtype is torch.float32 else (2e-2, 1e-2)
    same(got, want, rtol, atol)
    g = g[:, : want.shape[1]]
    got.backward(g.to("webgpu"))
    want.backward(g)
    assert x.grad is not None and a.grad is not None
    same(x.grad, a.grad, rtol, atol)


LOSSES: dict[str, Any] = {
    "mse": F.mse_loss,
    "smooth l1": lambda a, b, reduction: F.smooth_l1_loss(a, b, reduction=reduction, beta=0.5),
    "huber": lambda a, b, reduction: F.huber_loss(a, b, reduction=reduction, delta=0.7),
    "l1": F.l1_loss,
    "binary": lambda a, b, reduction: F.binary_cross_entropy(a.sigmoid(), b.sigmoid(), reduction=reduction),
    "weighted": lambda a, b, reduction: F.binary_cross_entropy(
        a.sigmoid(), b.sigmoid(), weight=b.abs(), reduction=reduction
    ),
    "logits": lambda a, b, reduction: F.binary_cross_entropy_with_logits(a, b.sigmoid(), reduction=reduction),
}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_and_its_gradient(webgpu: Any, name: str, reduction: str) -> None:
    torch.manual_seed(4)
    a, b = torch.randn(5, 7, requires_grad=True), torch.randn(5, 7)
    x = a.detach().to("webgpu").requires_grad_()
    got, want = LOSSES[name](x, b.to("webgpu"), reduction=reduction), LOSSES[name](a, b, reduction=reduction)
    same(got, want, 1e-5, 1e-6)
    got.sum().backward()
    want.sum().backward()
    assert x.grad is not None and a.grad is not None
    same(x.grad, a.grad, 1e-5, 1e-6)


def test_ternary_ops(webgpu: Any) -> None:
    torch.manual_seed(5)
    a, b, c = torch.randn(3, 4), torch.randn(4), torch.randn(3, 1)
    x, y, z = a.to("webgpu"), b.to("webgpu"), c.to("webgpu")
    same(torch.addcmul(x, y, z, value=0.3), torch.addcmul(a, b, c, value=0.3))
    same(torch.addcdiv(x, y, z), torch.addcdiv(a, b, c))
    same(torch.lerp(x, y, 0.3), torch.lerp(a, b, 0.3))
    same(torch.lerp(x, y, z), torch.lerp(a, b, c))
    same(x.clamp(y, y + 1), a.clamp(b, b + 1))
    same(x.masked_fill(x > 0, -INF), a.masked_fill(a > 0, -INF))
    same(F.threshold(x, 0.1, 20.0), F.threshold(a, 0.1, 20.0))
    same(torch.round(x, decimals=2), torch.round(a, decimals=2))
    same(torch.where(x > 0, 1.5, x), torch.where(a > 0, 1.5, a))


def test_creation(webgpu: Any) -> None:
    def both(make: Any, rtol: float = 0, atol: float = 0) -> None:
        same(make("webgpu"), make("cpu"), rtol, atol)

    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool):
        both(lambda d, dtype=dtype: torch.full((3, 5), 1, dtype=dtype, device=d))
        both(lambda d, dtype=dtype: torch.ones(7, dtype=dtype, device=d).zero_())
        both(lambda d, dtype=dtype: torch.eye(5, 3, dtype=dtype, device=d))
        both(lambda d, dtype=dtype: torch.ones(2, 5, 300, dtype=dtype, device=d).tril(2))
        both(lambda d, dtype=dtype: torch.ones(5, 4, dtype=dtype, device=d).t().triu(-1))
    both(lambda d: torch.arange(2, 40, 3, device=d))
    both(lambda d: torch.arange(0, 1, 0.05, device=d), rtol=1e-6, atol=1e-7)
    both(lambda d: torch.linspace(-3, 7, 50, device=d), rtol=1e-6, atol=1e-6)
    both(lambda d: torch.full((2,), 0.1, dtype=torch.float64, device=d))
    both(lambda d: torch.full((70_001,), 3, dtype=torch.uint8, device=d)[1:].zero_())
    both(lambda d: torch.ones(40_000, device=d).zero_())
    both(lambda d: torch.empty(3, 0, device=d).zero_().fill_(2))
    both(lambda d: torch.zeros(4, 4, device=d).fill_diagonal_(2.0))


def test_out_is_resized_converted_and_may_be_an_input(webgpu: Any) -> None:
    a = torch.arange(6.0).view(2, 3)
    x = a.to("webgpu")
    out = torch.empty(0, dtype=torch.float64, device="webgpu")
    same(torch.add(x, 1, out=out), torch.add(a, 1, out=torch.empty(0, dtype=torch.float64)))
    same(torch.exp(x, out=x), torch.exp(a))
    for device in ("cpu", "webgpu"):
        square = torch.arange(9.0, device=device).view(3, 3)
        with pytest.raises(RuntimeError, match="single memory location"):
            square.add_(square.t())
    with pytest.raises(RuntimeError, match=r"cast|Promotion"):
        torch.arange(3, device="webgpu").add_(0.5)


def test_what_torch_refuses_is_refused(webgpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYTORCH_WEBGPU_FALLBACK", "silent")  # some of the messages are the CPU kernels' own
    integers, floats, truths = [
        torch.ones(3, dtype=t, device="webgpu") for t in (torch.int64, torch.float32, torch.bool)
    ]
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: integers.pow(-1), "negative integer powers"),
        (lambda: floats.clamp(), "At least one"),
        (lambda: truths - truths, "bool"),
        (lambda: floats & floats, "not implemented"),
        (lambda: F.silu(integers), "not implemented"),
        (lambda: F.hardswish(integers), "not implemented|Undefined|type"),
        (lambda: floats + torch.ones(4, device="webgpu"), "broadcast|size"),
        (lambda: torch.div(floats, 2, rounding_mode="up"), "rounding_mode"),
        (lambda: torch.arange(0, 5, 0, device="webgpu"), "step"),
        (lambda: floats.fill_(floats), "0-dimension"),
    ]
    for wrong, says in cases:
        with pytest.raises(RuntimeError, match=says):
            wrong()


def test_tensors_of_two_devices_do_not_mix(webgpu: Any) -> None:
    with pytest.raises(RuntimeError, match="webgpu"):
        torch.ones(3, device="webgpu") + torch.ones(3)
    same(torch.ones(3, device="webgpu") + torch.tensor(2.0), torch.full((3,), 3.0))


def test_only_the_functions_that_are_called_are_in_a_shader() -> None:
    text = needed("tanh_f32(x0)")
    assert "fn tanh_f32(" in text and "fn exp_f32(" in text and "fn is_nan(" in text
    assert "fn erf" not in text
    assert needed("x0 + x1") == ""
    for name, body in FUNCTIONS.items():
        assert f"fn {name}(" in body


def test_a_function_exists_only_for_the_types_it_can_compute_in() -> None:
    assert computable("exp_f32(x0)", "f32")
    assert not computable("exp_f64(x0)", "f64")
    assert not computable("exp(x0)", "f64")
    assert computable("divide_f64(x0, x1)", "f64")
    assert computable("floor_divide_i64(x0, x1)", "i64")
    assert not computable("normal_cdf(x0)", "i32")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_single_factor_is_not_rounded_to_a_half_type(webgpu: Any, dtype: torch.dtype) -> None:
    """A float32 scale of 70000 is infinite in float16, and 3e-8 twice as large. As on the CPU, the first is rounded."""
    x = torch.tensor([0.1, 1e-5, 3.0, -2.5], dtype=dtype)
    for factor in (torch.tensor(70000.0), torch.tensor([3e-8]).sum(), torch.tensor([70001]), torch.tensor(1 / 3)):
        agree(lambda a, b: (a * b, b * a, a / b, b / a, torch.floor_divide(a, b)), x, factor, rtol=1e-6)
        agree(lambda a, b: torch.div(a, b, rounding_mode="trunc"), x.half(), factor, rtol=1e-6)


@pytest.mark.parametrize("name", ["xlogy", "pow", "xlog1py"])
def test_numbers_of_functions_with_a_step_are_rounded(webgpu: Any, name: str) -> None:
    x = torch.tensor([0.1, 3.0, -2.0], dtype=torch.float16)
    function = getattr(torch, name, None) or getattr(torch.special, name)
    for number in (1e-8, 0.1, 2049.0):
        agree(lambda a, number=number: (function(a, number), function(a, torch.tensor(number))), x, rtol=1e-3)


@pytest.mark.native
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.uint8, torch.int64])
def test_numbers_beyond_a_dtype_are_refused_as_on_the_cpu_at_every_call(webgpu: Any, dtype: torch.dtype) -> None:
    """A plan serves all numbers of a type: one that fits, before, must not let those through that do not."""
    inf = float("inf")
    calls: dict[str, Callable[[torch.Tensor, Any], Any]] = {
        "least": lambda x, v: x.clamp(min=v),
        "most": lambda x, v: x.clamp(max=v),
        "both": lambda x, v: x.clamp(0, v),
        "in place": lambda x, v: x.clone().clamp_(max=v),
        "out": lambda x, v: torch.clamp(x, max=v, out=torch.empty_like(x)),
        "power": lambda x, v: x**v,
        "power in place": lambda x, v: x.clone().pow_(v),
    }
    for name, call in calls.items():
        if "power" in name and not dtype.is_floating_point:
            continue
        for value in (2, 2.5, 100, 300, 65504, 65520.0, 70000, -70000, 1e39, -1e39, inf, -inf, 2.5):
            said: list[Any] = []
            for device in ("cpu", "webgpu"):
                try:
                    said.append(call(torch.arange(4).to(dtype).to(device), value).cpu())
                except RuntimeError as exc:
                    said.append(str(exc))
            if isinstance(said[0], str) or isinstance(said[1], str):
                assert isinstance(said[0], str) and said[0] == said[1], (name, value, said)
            else:
                torch.testing.assert_close(said[1], said[0], msg=lambda words, at=(name, value): f"{at}: {words}")
