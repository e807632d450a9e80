"""Wrong numbers that PyTorch's own device tests found, each as the class it belongs to; beside the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from tests.webgpu.agree import adapter_manner, on_device  # noqa: F401  (a fixture)

F = torch.nn.functional
Function = Callable[..., Any]
EDGES = [-1, 2**31, 2**32 - 1, 2**32, 3_000_000_000, -(2**31) - 1, 2**62, 2**63 - 1]


def same(ours: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to the last bit, of the same dtype; a NaN equals a NaN."""
    torch.testing.assert_close(ours.cpu(), expected, rtol=0, atol=0, equal_nan=True)


WORDS = [
    torch.float32,
    torch.float16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.uint16,
    torch.uint64,
    torch.complex64,
]


@pytest.mark.native
@pytest.mark.parametrize("number", EDGES)
def test_a_64_bit_number_reaches_the_shader_whole(webgpu: Any, number: int) -> None:
    values = torch.tensor([number, 7, -9, 0], dtype=torch.int64)
    other = max(-(2**62), min(2**62, number))  # room for the sums
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x + other,
        lambda x: x * other,
        lambda x: x - other,
        lambda x: x < number,
        lambda x: x == number,
        lambda x: x & number,
        lambda x: x | number,
        lambda x: x.clamp(max=number),
        lambda x: torch.where(x > 0, x, number),
        lambda x: x.masked_fill(x == 7, number),
        lambda x: torch.full_like(x, number),
        lambda x: x.clone().fill_(number),
        lambda x: x.new_full((3,), number),
        lambda x: torch.arange(other, other + 9, 3, device=x.device),
    ]
    if number:
        functions += [lambda x: x % number, lambda x: torch.div(x, number, rounding_mode="floor")]
    for function in functions:
        same(function(values.to("webgpu")), function(values))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_lazily_conjugated_and_negated_operands_are_seen_as_they_are(webgpu: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = torch.randn(2, 3, 3, dtype=dtype)
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x,
        lambda x: x.conj(),
        lambda x: x.mH,
        lambda x: torch._neg_view(x),
        lambda x: torch._neg_view(x.conj()),
    ]
    products: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        lambda a, b: a @ b,
        lambda a, b: a[0] @ b[0],
        lambda a, b: a[0] @ b[0, :, 1],
        lambda a, b: torch.dot(a[0, 0], b[0, 0]),
        lambda a, b: torch.vdot(a[0, 0], b[0, 0]),
        lambda a, b: torch.baddbmm(a, a, b),
        lambda a, b: torch.addmm(a[0], a[0], b[0], beta=2, alpha=3),
        lambda a, b: torch.einsum("bij,bjk->ik", a, b),
        lambda a, b: torch.cov(a[0]) + b[0].imag,
        lambda a, b: torch.linalg.solve(a, b),
        lambda a, b: (a * b).real - b.imag,
    ]
    for view, other, multiply in product(views, views, products):
        expected = multiply(view(plain), other(plain))
        found = multiply(view(plain.to("webgpu")), other(plain.to("webgpu")))
        torch.testing.assert_close(found.cpu(), expected)
    for view in views:  # and written to, and read one by one
        target, ours = plain.clone(), plain.to("webgpu")
        view(target).copy_(plain * 2)
        view(ours).copy_(plain.to("webgpu") * 2)
        same(ours, target)
        assert view(ours)[0, 0, 1].item() == view(target)[0, 0, 1].item()


def test_gradients_of_complex_products_are_the_cpus(webgpu: Any) -> None:
    torch.manual_seed(0)
    a, b = (torch.randn(3, 3, dtype=torch.complex64, requires_grad=True) for _ in range(2))
    ours = [on_device(t) for t in (a, b)]
    for left, right in ((a, b), ours):
        torch.autograd.backward((left @ right.mH).abs().square().sum() + (left * right).real.sum())
    for have, want in zip(ours, (a, b), strict=True):
        torch.testing.assert_close(have.grad.cpu(), want.grad)  # type: ignore[union-attr]


NUMBERS = [torch.tensor(0.5), torch.tensor(0.5, dtype=torch.float64), torch.tensor(3), torch.tensor(True), 0.5, 3, True]
TWO: list[Callable[[Any, Any], Any]] = [torch.add, torch.mul, torch.sub, torch.div, torch.eq, torch.maximum, torch.pow]


@pytest.mark.parametrize("default", [torch.float32, torch.float64, torch.float16])
def test_a_result_does_not_depend_on_what_was_computed_before(webgpu: Any, default: torch.dtype) -> None:
    """A plan is found by everything that decides its result: the dtypes of 0-dim tensors and the default dtype too."""
    ints, floats = torch.arange(1, 5), torch.arange(1, 5, dtype=torch.float32)
    before = torch.get_default_dtype()
    try:
        for dtype in (before, default):  # the same geometry under two defaults, one after the other
            torch.set_default_dtype(dtype)
            for tensor, other, function in product((ints, floats), NUMBERS, TWO):
                if isinstance(other, bool) and function is torch.sub:
                    continue
                if function is torch.maximum and not isinstance(other, torch.Tensor):
                    continue
                if isinstance(other, torch.Tensor) and other.dtype is torch.bool and function is torch.sub:
                    continue
                expected, found = function(tensor, other), function(tensor.to("webgpu"), other)
                torch.testing.assert_close(found.cpu(), expected)
            for unary in (torch.sqrt, torch.exp, torch.sigmoid, lambda x: x.logsumexp(0), lambda x: x / x):
                torch.testing.assert_close(unary(ints.to("webgpu")).cpu(), unary(ints), rtol=1e-3, atol=1e-3)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64])
def test_scales_of_products_are_used_as_given(webgpu: Any, dtype: torch.dtype) -> None:
    a, b, v = (torch.arange(1, 5).view(2, 2).to(dtype) for _ in range(3))
    scales = ((0.5, 0.25), (1.5, -0.5), (0, 2), (2, 0)) if dtype.is_floating_point else ((2, 3), (0, 2), (2, 0))
    for alpha, beta in scales:
        more = {"alpha": alpha, "beta": beta}
        functions: tuple[Function, ...] = (
            lambda a, b, v, more=more: torch.addmm(v, a, b, **more),
            lambda a, b, v, more=more: torch.addmv(v[0], a, b[0], **more),
            lambda a, b, v, more=more: torch.baddbmm(v[None], a[None], b[None], **more),
            lambda a, b, v, more=more: torch.addbmm(v, a[None], b[None], **more),
            lambda a, b, v, more=more: torch.addr(v, a[0], b[0], **more),
        )
        for function in functions:
            found = function(a.to("webgpu"), b.to("webgpu"), v.to("webgpu"))
            torch.testing.assert_close(found.cpu(), function(a, b, v))


LONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.view(40, -1).sum(1),
    "sum of columns": lambda x: x.view(-1, 40).sum(0),
    "mean": lambda x: x.mean(),
    "var": lambda x: x.var(),
    "norm": lambda x: x.norm(),
    "norm of order 3": lambda x: x.norm(3),
    "logsumexp": lambda x: x.logsumexp(0),
    "cumsum": lambda x: x.cumsum(0),
    "cumsum of rows": lambda x: x.view(40, -1).cumsum(1),
    "dot": lambda x: torch.dot(x, x),
    "layer_norm": lambda x: F.layer_norm(x, x.shape),
    "rms_norm": lambda x: F.rms_norm(x, x.shape),
    "group_norm": lambda x: F.group_norm(x.view(1, 4, -1), 1),
    "batch_norm": lambda x: F.batch_norm(x.view(-1, 4, 10), None, None, training=True),
    "softmax": lambda x: x.softmax(0),
    "mse_loss": lambda x: F.mse_loss(x, x.flip(0)),
    "bias gradient": lambda x: torch.autograd.grad(
        (F.linear(x.view(-1, 4), x[:8].view(2, 4), bias := x[:2].clone().requires_grad_()) ** 2).sum(), bias
    )[0],
}


@pytest.mark.parametrize("length", [40_000, 1_000_000])
@pytest.mark.parametrize("name", LONG)
def test_long_sums_are_at_most_four_times_as_far_off_as_the_cpus(
    webgpu: Any, manner: str, name: str, length: int
) -> None:
    """By the largest error against float64; a result within two roundings of it is right whatever the CPU's luck."""
    torch.manual_seed(length)
    values = torch.rand(length) + 0.5
    function = LONG[name]
    exact = function(values.double())
    scale = exact.abs().max()
    cpu, ours = (
        ((function(x).detach().cpu().double() - exact).abs().max() / scale).item()
        for x in (values, values.to("webgpu"))
    )
    assert ours <= 4 * cpu + 4 * torch.finfo(torch.float32).eps, f"{ours:.2e}, the CPU {cpu:.2e}"


FACTORIES: dict[str, Callable[[torch.Tensor], Any]] = {
    "arange": lambda out: torch.arange(4, out=out),
    "arange of floats": lambda out: torch.arange(0.0, 2.0, 0.5, out=out),
    "range": lambda out: torch.range(0, 3, out=out),
    "linspace": lambda out: torch.linspace(1, 2, 4, out=out),
    "logspace": lambda out: torch.logspace(1, 2, 4, out=out),
    "full": lambda out: torch.full((2, 2), 3.0, out=out),
    "ones": lambda out: torch.ones((2, 2), out=out),
    "zeros": lambda out: torch.zeros((2, 2), out=out),
    "eye": lambda out: torch.eye(2, out=out),
    "add": lambda out: torch.add(torch.ones(2, 2, device=out.device), 1, out=out),
    "mm": lambda out: torch.mm(*[torch.ones(2, 2, device=out.device)] * 2, out=out),
    "sum": lambda out: torch.sum(torch.ones(2, 2, 3, device=out.device), 2, out=out),
    "cat": lambda out: torch.cat([torch.ones(1, 2, device=out.device)] * 2, out=out),
    "tril": lambda out: torch.tril(torch.ones(2, 2, device=out.device), out=out),
    "gather": lambda out: torch.gather(
        torch.ones(2, 2, device=out.device), 1, torch.zeros(2, 2, dtype=torch.int64, device=out.device), out=out
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FACTORIES)
def test_out_writes_into_the_view_and_nowhere_else(webgpu: Any, name: str) -> None:
    expected, found = torch.full((3, 4), -1.0), torch.full((3, 4), -1.0, device="webgpu")
    for whole in (expected, found):
        view = whole[:2, 1:3] if name != "logspace" else whole[0]
        FACTORIES[name](view)
        assert view.data_ptr() == (whole[:2, 1:3] if name != "logspace" else whole[0]).data_ptr()
    torch.testing.assert_close(found.cpu(), expected)


NAN, INF = math.nan, math.inf
ODD = [[NAN, 1.0, 0.0], [0.0, 0.0, 0.0], [NAN, NAN, NAN], [INF, -INF, 1.0], [0.0, 2.0, -3.0], [-0.0, NAN, INF]]
FOLDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **{
        name: lambda x, name=name: getattr(x, name)(1)  # type: ignore[misc]
        for name in (
            "any",
            "all",
            "sum",
            "mean",
            "prod",
            "count_nonzero",
            "amax",
            "amin",
            "nansum",
            "nanmean",
            "std",
            "var",
        )
    },
    **{
        f"norm {order}": lambda x, order=order: torch.linalg.vector_norm(x, order, 1)  # type: ignore[misc]
        for order in (0, 0.5, 1, 2, 3, INF, -INF, -1, -2.5)
    },
    "argmax": lambda x: x.argmax(1),
    "logsumexp": lambda x: x.logsumexp(1),
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(1),
    "cummax": lambda x: x.cummax(1).values,
    "softmax": lambda x: x.softmax(1),
    "nonzero": lambda x: x.nonzero(),
    "bool": lambda x: x.bool(),
    "sort": lambda x: x.sort(1).values,
    "median": lambda x: x.median(1).values,
    "nanmedian": lambda x: x.nanmedian(1).values,
    "maximum": lambda x: torch.maximum(x, x.flip(0)),
    "where": lambda x: torch.where(x.bool(), x, 9.0),
    "clamp": lambda x: x.clamp(0, 1),
    "unique": lambda x: torch.unique(x[3:5]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FOLDS)
def test_what_is_not_a_number_is_not_lost(webgpu: Any, manner: str, name: str, dtype: torch.dtype) -> None:
    values = torch.tensor(ODD, dtype=dtype)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    found, expected = FOLDS[name](values.to("webgpu")).cpu(), FOLDS[name](values)
    torch.testing.assert_close(found, expected, equal_nan=True, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("value", [0.5, -0.5, 0.0, -0.0, 2, 2**32, INF, -INF, NAN, True, False])
def test_a_bool_tensor_is_true_where_a_number_is_not_zero(webgpu: Any, value: Any) -> None:
    functions: tuple[Function, ...] = (
        lambda d: torch.full((3,), value, dtype=torch.bool, device=d),
        lambda d: torch.zeros(3, dtype=torch.bool, device=d).fill_(value),
        lambda d: torch.zeros(3, dtype=torch.bool, device=d).masked_fill(
            torch.tensor([True, False, True], device=d), value
        ),
        lambda d: torch.zeros(3, dtype=torch.bool, device=d).copy_(
            torch.full((3,), value, dtype=torch.float64, device=d)
        ),
        lambda d: torch.tensor([value], device=d).bool(),
    )
    for function in functions:
        same(function("webgpu"), function("cpu"))


def test_a_boolean_mask_of_a_decoder(webgpu: Any) -> None:
    torch.manual_seed(0)
    decoder = torch.nn.TransformerDecoder(torch.nn.TransformerDecoderLayer(4, 1, 8, batch_first=True), 1).eval()
    x, mask = torch.randn(1, 3, 4), torch.ones(3, 3, dtype=torch.bool).triu(1)
    expected = decoder(x, x, tgt_mask=mask)
    found = decoder.to("webgpu")(x.to("webgpu"), x.to("webgpu"), tgt_mask=mask.to("webgpu"))
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)


NARROW = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_out_gets_what_the_operands_own_dtype_can_hold(webgpu: Any, dtype: torch.dtype) -> None:
    values = torch.tensor([100, 77, 5, 126]).to(dtype)
    functions: tuple[Function, ...] = (torch.add, torch.mul, torch.sub, torch.maximum)
    for wide, function in product((torch.int64, torch.int32, torch.float32, torch.float64), functions):
        if dtype.is_floating_point and not wide.is_floating_point:
            continue
        expected, found = torch.empty(4, dtype=wide), torch.empty(4, dtype=wide, device="webgpu")
        function(values, values, out=expected)
        function(values.to("webgpu"), values.to("webgpu"), out=found)
        same(found, expected)


FILLED = ((10,), (0,)), ((2, 3), (0, 1)), ((2, 3), (1, 0)), ((2, 3, 4), (1, 0, 1)), ((2, 3, 4), (0, 0, 0))


MORE = [torch.int16, torch.bfloat16, torch.uint32, torch.complex128, torch.float64, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", [*WORDS, *MORE], ids=str)
def test_an_expanded_tensor_of_any_dtype_may_be_filled(webgpu: Any, dtype: torch.dtype) -> None:
    for (size, stride), offset in product(FILLED, (0, 2)):
        for write in (lambda x: x.fill_(3), lambda x: x.zero_()):
            held = torch.tensor([5, 6, 7, 8, 9, 10, 11, 12], dtype=torch.float32).to(dtype)
            ours = held.to("webgpu")
            for base in (held, ours):
                view = base.as_strided(size, stride, offset)
                assert write(view) is view
            same(ours.to(torch.complex128), held.to(torch.complex128))
    if dtype in (torch.float32, torch.bfloat16):
        expanded = torch.zeros((), dtype=dtype, device="webgpu").expand(10)
        assert (F.threshold(expanded, 0.5, 3.0, inplace=True) == 3).all()


@pytest.mark.parametrize("scale", [1.0, 1e-20, 1e-38, 1e20])
def test_hypot_is_right_to_the_last_place(webgpu: Any, scale: float) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(10_000) * 10 * scale, torch.randn(10_000) * scale
    exact = torch.hypot(a.double(), b.double())
    step = (torch.nextafter(exact.float(), torch.tensor(INF)) - exact.float()).double()
    found = torch.hypot(a.to("webgpu"), b.to("webgpu")).cpu().double()
    assert ((found - exact).abs() / step).max() < 1


def test_fourier_transforms_are_as_near_as_the_cpus(webgpu: Any) -> None:
    torch.manual_seed(0)
    for shape in ((20, 1024), (20, 1000), (20, 343), (20, 127), (4, 5, 6, 7, 8)):
        x = torch.randn(shape, dtype=torch.complex64)
        exact = torch.fft.fftn(x.to(torch.complex128))
        cpu, ours = ((torch.fft.fftn(each).cpu() - exact).abs().square().mean().sqrt() for each in (x, x.to("webgpu")))
        assert ours < 1.2 * cpu, shape


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_a_number_keeps_its_say_in_the_dtype_of_a_fallback(webgpu: Any) -> None:
    makers: tuple[Function, ...] = (
        lambda d: torch.tensor(2.5, dtype=torch.float16, device=d) * (1 + 0j),
        lambda d: torch.tensor(5.5, dtype=torch.complex32, device=d) * 2.2,
        lambda d: torch.tensor([2], dtype=torch.complex128, device=d) * 2.2,
    )
    for make in makers:
        same(make("webgpu"), make("cpu"))


HALF_STEPS: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "eq": torch.eq,
    "le": torch.le,
    "lt": torch.lt,
    "gt": torch.gt,
    "ge": torch.ge,
    "fmod": torch.fmod,
    "remainder": torch.remainder,
    "trunc": lambda t, v: torch.div(t, v, rounding_mode="trunc"),
    "floor": lambda t, v: torch.div(t, v, rounding_mode="floor"),
    "threshold": lambda t, v: F.threshold(t, v, 5.0),
    "hardshrink": F.hardshrink,
    "pow": torch.pow,
    "a power of it": lambda t, v: torch.pow(v, t),
    "eq of a tensor": lambda t, v: t == torch.tensor(v, device=t.device),
    "fmod of a tensor": lambda t, v: torch.fmod(t, torch.tensor(v, dtype=torch.float64, device=t.device)),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", HALF_STEPS)
def test_a_number_is_rounded_to_the_half_type_it_is_compared_with(webgpu: Any, name: str, dtype: torch.dtype) -> None:
    """float16(0.1) is equal to 0.1, and a whole number of times in it."""
    numbers = (0.1, 0.3, 0.7, 1.1, 2.7, 0.05)
    values = torch.tensor(numbers).to(dtype)
    for number in numbers:
        found, expected = HALF_STEPS[name](values.to("webgpu"), number).cpu(), HALF_STEPS[name](values, number)
        torch.testing.assert_close(found, expected, equal_nan=True, rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
def test_an_out_that_is_resized_has_the_strides_of_a_new_result(webgpu: Any) -> None:
    functions: tuple[Function, ...] = (torch.add, torch.eq, torch.maximum)
    for function, permutation in product(functions, ((0, 1, 2), (2, 0, 1), (1, 2, 0))):
        strides = []
        for device in ("cpu", "webgpu"):
            x = torch.randn(2, 3, 4, device=device).permute(permutation)
            made = function(x, x)
            assert function(x, x, out=torch.empty(0, dtype=made.dtype, device=device)).stride() == made.stride()
            strides.append(made.stride())
        assert strides[0] == strides[1]


def test_a_factor_has_no_say_in_the_dtype_of_a_sum_of_masks(webgpu: Any) -> None:
    masks = torch.tensor([True, True, False])
    for dtype in (torch.bool, torch.int16, torch.float32):
        expected, found = torch.empty(3, dtype=dtype), torch.empty(3, dtype=dtype, device="webgpu")
        torch.add(masks, masks, out=expected)
        torch.add(masks.to("webgpu"), masks.to("webgpu"), out=found)
        same(found, expected)


@pytest.mark.parametrize("first", [0, 1_000_000])
def test_random_ops_on_random_tensors_are_the_cpus(webgpu: Any, first: int) -> None:
    """A few cases of `tests.webgpu.differential`, which runs as long as one likes."""
    from tests.webgpu.differential import examine

    wrong = [(number, *found) for number in range(first, first + 400) if (found := examine(number))[1]]
    assert not wrong


def test_complex_functions_of_what_is_no_number_and_into_real_targets(webgpu: Any) -> None:
    ends = [complex(-INF, NAN), complex(-INF, 1), complex(-INF, INF), complex(INF, 1), complex(1, INF)]
    for device in ("cpu", "webgpu"):
        x = torch.tensor(ends, device=device)
        assert x.exp()[:3].abs().tolist() == [0, 0, 0]
    x = torch.tensor([1 + 2j, 3 - 4j])
    for function, dtype in product((torch.abs, torch.angle), (torch.complex64, torch.complex128)):
        expected = torch.empty(2, dtype=dtype.to_real())
        found = torch.empty(2, dtype=dtype.to_real(), device="webgpu")
        function(x.to(dtype), out=expected)
        function(x.to("webgpu", dtype), out=found)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=0)


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", ["mean", "prod"])
def test_halves_that_are_put_together_by_place_are_rounded_once(webgpu: Any, mode: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    target, source = torch.rand(5, 40).add(0.5).to(dtype), torch.rand(30, 40).add(0.5).to(dtype)
    places = torch.randint(0, 5, (30,))
    exact = target.double().index_reduce(0, places, source.double(), mode)
    found = target.to("webgpu").index_reduce(0, places.to("webgpu"), source.to("webgpu"), mode)
    torch.testing.assert_close(found.cpu().double(), exact, rtol=torch.finfo(dtype).eps / 2 * 1.01, atol=0)


def test_pooling_keeps_the_layout_of_a_sample_without_a_batch(webgpu: Any) -> None:
    for device in ("cpu", "webgpu"):
        x = torch.randn(1, 4, 6, 6, 6, device=device).contiguous(memory_format=torch.channels_last_3d)[0]
        for made in F.max_pool3d(x, 2, return_indices=True):
            assert made.unsqueeze(0).is_contiguous(memory_format=torch.channels_last_3d)


def test_matrices_without_columns_are_taken_apart(webgpu: Any) -> None:
    for shape in ((0, 0), (3, 0), (0, 3), (2, 0, 0), (2, 3, 0)):
        x = torch.zeros(shape)
        found, expected = torch.linalg.lu(x.to("webgpu")), torch.linalg.lu(x)
        for have, want in zip(found, expected, strict=True):
            same(have, want)


def test_shifts_in_place_are_the_cpus(webgpu: Any) -> None:
    for dtype, by in product((torch.int64, torch.int32, torch.int16, torch.uint8), (1, 3)):
        pair = [torch.arange(1, 6, dtype=dtype).to(device) for device in ("cpu", "webgpu")]
        for x in pair:
            x <<= by
            x >>= torch.ones_like(x)
        same(pair[1], pair[0])


def test_adaptive_maxima_of_float64_go_to_the_cpu(webgpu: Any) -> None:
    x = torch.randn(2, 3, 6, 6, dtype=torch.float64)
    same(F.adaptive_max_pool2d(x.to("webgpu"), 3), F.adaptive_max_pool2d(x, 3))


CUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "all of it": lambda x: x,
    "a part": lambda x: x[:, :, 1:-2, 2:-1],
    "every other": lambda x: x[:, :, ::2, ::2],
    "a sample": lambda x: x[1:2],
    "two channels": lambda x: x[:, :2],
}


@pytest.mark.parametrize("view", CUTS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_pictures_of_bytes_keep_the_layout_of_the_view_they_come_from(
    webgpu: Any, layout: torch.memory_format, view: str
) -> None:
    """torch resizes bytes on the CPU, and asks their layout there."""
    torch.manual_seed(0)
    for channels, mode, antialias in product((3, 5), ("bilinear", "bicubic"), (False, True)):
        x = torch.randint(0, 256, (2, channels, 20, 24), dtype=torch.uint8).contiguous(memory_format=layout)
        expected = F.interpolate(CUTS[view](x), size=(9, 31), mode=mode, antialias=antialias)
        found = F.interpolate(CUTS[view](x.to("webgpu")), size=(9, 31), mode=mode, antialias=antialias)
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0)
