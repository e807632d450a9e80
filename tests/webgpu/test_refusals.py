"""What torch refuses or warns of on the CPU is refused and warned of on webgpu, in its words."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from tests.webgpu.test_right_numbers import INF, same

F = torch.nn.functional
Function = Callable[..., Any]


def test_a_result_that_does_not_fit_its_target_is_refused_in_torchs_words(webgpu: Any) -> None:
    functions: tuple[Function, ...] = (
        lambda d: torch.tensor([3], device=d).mul_(1.5),
        lambda d: torch.tensor([3], device=d).div_(2),
        lambda d: torch.tensor([3], device=d).add_(torch.tensor([1.5], device=d)),
        lambda d: torch.tensor([True], device=d).add_(2),
        lambda d: torch.mul(torch.ones(1, device=d), 2, out=torch.ones(1, dtype=torch.int64, device=d)),
        lambda d: torch.sqrt(torch.ones(1, device=d), out=torch.ones(1, dtype=torch.int32, device=d)),
        lambda d: torch.full((1,), INF, device=d, dtype=torch.int32),
    )
    for function in functions:
        with pytest.raises(RuntimeError) as expected:
            function("cpu")
        with pytest.raises(RuntimeError) as found:
            function("webgpu")
        assert str(found.value)[:30] == str(expected.value)[:30]
    same(torch.tensor([3], device="webgpu").eq_(1.5), torch.tensor([3]).eq_(1.5))


def test_an_expanded_tensor_may_be_filled_and_not_written(webgpu: Any) -> None:
    expanded = torch.zeros(1, 2, device="webgpu").expand(3, 2)
    assert expanded.fill_(2.0).tolist() == [[2.0, 2.0]] * 3
    writes: tuple[Function, ...] = (
        lambda: expanded.add_(1),
        lambda: expanded.copy_(torch.ones(3, 2, device="webgpu")),
        lambda: expanded.put_(torch.tensor([0], device="webgpu"), torch.ones(1, device="webgpu")),
    )
    for write in writes:
        with pytest.raises(RuntimeError, match="more than one element of the written-to tensor"):
            write()


NONE_OF: dict[str, Function] = {
    "nested": lambda x: torch.nested.as_nested_tensor([x, x]),
    "nested, no gradient": lambda x: torch.nested.as_nested_tensor([x.detach(), x.detach()]) + 1,
    "sparse": lambda x: x.to_sparse(),
    "sparse, from the CPU": lambda x: torch.eye(3).to_sparse().to(x.device),
    "sparse rows": lambda x: torch.eye(3, device=x.device).to_sparse_csr(),
    "quantized": lambda x: torch.quantize_per_tensor(x.detach(), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NONE_OF)
def test_layouts_that_the_device_does_not_have_are_refused(webgpu: Any, name: str) -> None:
    with pytest.raises(NotImplementedError, match=f"the webgpu device has no {name.split()[0].rstrip(',')} tensors"):
        NONE_OF[name](torch.ones(2, device="webgpu", requires_grad=True))
    assert torch.ones(2, device="webgpu").sum().item() == 2


def test_what_shares_memory_with_its_target_is_refused_as_on_the_cpu(webgpu: Any) -> None:
    """A kernel reads what another thread has written already; torch refuses where two dense tensors overlap in part."""
    functions: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
        "copy_ to its neighbour": lambda y, i: y[:3].copy_(y[1:4]),
        "copy_ to its transpose": lambda y, i: y.view(3, 3).copy_(y.view(3, 3).t()),
        "add_ of a neighbour": lambda y, i: y[:3].add_(y[1:4]),
        "mul_ by an element": lambda y, i: y.mul_(y[0]),
        "exp into a neighbour": lambda y, i: torch.exp(y[:3], out=y[1:4]),
        "masked_fill_ by itself": lambda y, i: (y > 0)[1:].masked_fill_((y > 0)[:-1], False),
        "masks": lambda y, i: (lambda m: m[1:].masked_fill_(m[:-1], False))(y > 0),
        "index_put_ of an element": lambda y, i: y.index_put_((i,), y[0]),
        "index_put_ of a part": lambda y, i: y.index_put_((i,), y[:3]),
        "index_put_ into the index": lambda y, i: i.index_put_((i,), i.clone()),
        "index_put_ of itself": lambda y, i: i.index_put_((i.clone(),), i),
        "put_ of a part": lambda y, i: y.put_(i, y[:3]),
        "put_ into the index": lambda y, i: i.put_(i, i.clone()),
        "with gaps, which is let through": lambda y, i: y[::2].index_put_((i,), y[1:7:2]),
        "masked_fill_ of an element": lambda y, i: y.masked_fill_(y > 3, y[0]),
        "a mask, and an element of itself": lambda y, i: y.__setitem__(y > 3, y[1]),
        "add_ of itself": lambda y, i: y.add_(y),
        "copy_ of another part": lambda y, i: y[:3].copy_(y[3:6]),
    }
    for _ in range(2):  # the second time with plans that are known
        for name, function in functions.items():
            outcomes = []
            for device in ("cpu", "webgpu"):
                y, i = torch.arange(9.0).to(device), torch.tensor([2, 1, 0]).to(device)
                try:
                    function(y, i)
                    outcomes.append(("", y.cpu().tolist()))
                except RuntimeError as exc:
                    outcomes.append((str(exc)[:21], []))
            assert outcomes[0] == outcomes[1], name


def test_an_expanded_target_is_warned_of(webgpu: Any) -> None:
    for device in ("cpu", "webgpu"):
        x, mask = torch.rand(1, device=device).expand(6), torch.ones(6, dtype=torch.bool, device=device)
        with pytest.warns(UserWarning, match="expanded tensors"):
            x.masked_fill_(mask, 0.0)


def test_put_says_that_it_has_no_order(webgpu: Any) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        for device in ("cpu", "webgpu"):
            x, index = torch.zeros(4, device=device), torch.tensor([0, 0], device=device)
            with pytest.raises(RuntimeError, match="put_ does not have a deterministic implementation"):
                x.put_(index, torch.ones(2, device=device))
            assert x.put_(index, torch.ones(2, device=device), accumulate=True)[0].item() == 2
    finally:
        torch.use_deterministic_algorithms(False)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "out on another device": lambda d: torch.nonzero(torch.ones(2, device=d), out=torch.empty(0, dtype=torch.int64)),
    "roll without shifts": lambda d: torch.ones(3, device=d).roll((), ()),
    "complex into float": lambda d: torch.complex(*[torch.ones(2, device=d)] * 2, out=torch.ones(2, device=d)),
    "index_fill_ by a complex": lambda d: torch.ones(3, device=d).index_fill_(0, torch.tensor([0], device=d), 1j),
    "random_ below the dtype": lambda d: torch.empty(3, dtype=torch.uint8, device=d).random_(-5, 9),
    "random_ above the dtype": lambda d: torch.empty(3, dtype=torch.int8, device=d).random_(0, 300),
    "random_ above float16": lambda d: torch.empty(3, dtype=torch.float16, device=d).random_(0, 1 << 20),
    "an alpha that is true": lambda d: torch.add(_ones(d), _ones(d), alpha=True),
    "an alpha with a fraction": lambda d: torch.add(_ones(d, torch.int32), _ones(d, torch.int32), alpha=0.5),
    "the difference of masks": lambda d: _ones(d, torch.bool) - _ones(d, torch.bool),
    "a mask less a number": lambda d: _ones(d, torch.bool).sub_(True),
    "a number less a mask": lambda d: True - _ones(d, torch.bool),
    "relu of a mask": lambda d: torch.relu(_ones(d, torch.bool)),
    "heaviside of two dtypes": lambda d: torch.heaviside(_ones(d), _ones(d, torch.int32)),
    "a negative power in place": lambda d: _ones(d, torch.int32).pow_(-1),
    "addcdiv of integers": lambda d: torch.addcdiv(*[_ones(d, torch.int32)] * 3),
    "a complex number into floats": lambda d: _ones(d).fill_(1j),
    "neg into another dtype": lambda d: torch.neg(_ones(d), out=_ones(d, torch.float64)),
    "a float mask": lambda d: _ones(d).masked_fill_(_ones(d), 1.0),
    "shapes that do not fit": lambda d: torch.ones(10, 10, device=d) + torch.ones(11, 11, device=d),
    "a target too small": lambda d: _ones(d).add_(torch.ones(2, 3, device=d)),
    "shapes that do not fit, and an out": lambda d: torch.mul(_ones(d), torch.ones(4, device=d), out=_ones(d)),
    "matrices that do not fit": lambda d: torch.mm(torch.ones(2, 2, device=d), torch.ones(3, 2, device=d)),
    "a dimension named twice": lambda d: torch.ones(3, 3, device=d).sum((0, 0)),
    "a shift of what it overlaps": lambda d: (lambda x: x[:-1].__ilshift__(x[1:]))(_ones(d, torch.int32)),
    "attention of vectors": lambda d: F.scaled_dot_product_attention(_ones(d), _ones(d), _ones(d)),
    "a bag of a vector": lambda d: torch.embedding_bag(_ones(d), _ones(d, torch.int64), _ones(d, torch.int64)),
    "rows by fractions": lambda d: F.embedding(_ones(d), torch.ones(3, 3, device=d)),
    "rows by fractions of the CPU": lambda d: F.embedding(_ones("cpu"), torch.ones(3, 3, device=d)),
    "fewer than no places": lambda d: torch.nonzero_static(_ones(d), size=-2),
    "a float factor of an outer product of integers": lambda d: torch.addr(
        torch.ones(3, 3, dtype=torch.int32, device=d), *[_ones(d, torch.int32)] * 2, alpha=2.5
    ),
    "a bool factor of an outer product": lambda d: torch.ones(3, 3, device=d).addr_(_ones(d), _ones(d), beta=True),
    "counts with too many weights": lambda d: torch.bincount(_ones(d, torch.int64), torch.ones(4, device=d)),
    "a norm of a complex order": lambda d: torch.linalg.vector_norm(_ones(d), ord=1j),
    "the variance of integers": lambda d: _ones(d, torch.int32).var(),
    "a range to nothing": lambda d: torch.arange(-5, math.nan, device=d),
    "a range from infinity": lambda d: torch.arange(-INF, 5, device=d),
    "a range away from its end": lambda d: torch.arange(0, 5, -1, device=d),
    "random integers by rand": lambda d: torch.rand(3, dtype=torch.int32, device=d),
    "no random integers by rand": lambda d: torch.rand(0, 2, dtype=torch.uint8, device=d),
    "several targets": lambda d: F.nll_loss(torch.ones(4, 3, device=d), torch.zeros(4, 2, dtype=torch.int64, device=d)),
    "targets of planes": lambda d: F.nll_loss(
        torch.ones(4, 3, 2, 2, device=d), torch.zeros(4, 2, 1, dtype=torch.int64, device=d)
    ),
    "weights of other classes": lambda d: F.nll_loss(
        torch.ones(4, 3, device=d), torch.zeros(4, dtype=torch.int64, device=d), torch.ones(4, device=d)
    ),
    "margins of too few targets": lambda d: F.multi_margin_loss(
        torch.ones(5, 3, device=d), torch.zeros(3, dtype=torch.int64, device=d)
    ),
    "margins of a vector's labels": lambda d: F.multilabel_margin_loss(
        torch.ones(5, 3, device=d), torch.zeros(3, dtype=torch.int64, device=d)
    ),
    "margins of no classes": lambda d: F.multilabel_margin_loss(
        torch.ones(5, 0, device=d), torch.zeros(5, 0, dtype=torch.int64, device=d)
    ),
    "too few channels to shuffle": lambda d: F.pixel_shuffle(torch.ones(1, 8, 6, 6, device=d), 3),
    "a height that does not split": lambda d: F.pixel_unshuffle(torch.ones(1, 8, 6, 6, device=d), 4),
    "a cross product in four dimensions": lambda d: torch.linalg.cross(*[torch.ones(3, 4, device=d)] * 2),
    "the gradient of a pool of nothing": lambda d: _pooled(F.adaptive_avg_pool2d, d),
    "the gradient of a pool of maxima of nothing": lambda d: _pooled(F.adaptive_max_pool2d, d),
    "the gradient of a pool in space of nothing": lambda d: _pooled(F.adaptive_max_pool3d, d),
    "adaptive pooling of integers": lambda d: F.adaptive_max_pool2d(
        torch.ones(1, 1, 4, 4, dtype=torch.int32, device=d), 2
    ),
}


def _pooled(pool: Function, device: Any) -> None:
    pool(torch.ones(1, 4, 10, 9, device=device, requires_grad=True), 0).sum().backward()


def _ones(device: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(3, dtype=dtype, device=device)


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused(webgpu: Any, name: str) -> None:
    with pytest.raises(RuntimeError) as found:
        REFUSED[name]("webgpu")
    if name != "out on another device":
        with pytest.raises(RuntimeError) as expected:
            REFUSED[name]("cpu")
        assert str(found.value)[:20] == str(expected.value)[:20]


def test_random_beyond_what_a_float_holds_is_warned_of(webgpu: Any) -> None:
    with pytest.warns(UserWarning, match="to - 1 is out of bounds"):
        torch.empty(3, device="webgpu").random_(0, 1 << 30)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize(
    "dtype",
    [torch.uint8, torch.bool, torch.float16, torch.float64, torch.complex64, torch.complex32, torch.float8_e5m2],
)
def test_whole_random_numbers_of_any_dtype_are_refused_where_the_cpu_refuses_them(
    webgpu: Any, dtype: torch.dtype
) -> None:
    functions: tuple[Function, ...] = (
        lambda length, d: torch.randint(2, (length,), dtype=dtype, device=d),
        lambda length, d: torch.zeros(length, dtype=dtype, device=d).random_(),
        lambda length, d: torch.zeros(length, dtype=dtype, device=d).random_(2),
        lambda length, d: torch.zeros(length, dtype=dtype, device=d).random_(0, None),
        lambda length, d: torch.randperm(length // 2, dtype=dtype, device=d),
    )
    for function, length in product(functions, (0, 3)):
        outcomes = []
        for device in ("cpu", "webgpu"):
            try:
                outcomes.append((function(length, device).shape, dtype))
            except RuntimeError as exc:
                outcomes.append((type(exc), str(exc)))
        assert outcomes[0] == outcomes[1], (dtype, length)


@pytest.mark.parametrize("name", ["uniform_", "normal_", "log_normal_", "exponential_", "cauchy_", "geometric_"])
def test_random_numbers_of_any_dtype_are_refused_where_the_cpu_refuses_them(webgpu: Any, name: str) -> None:
    arguments = (0.5,) if name == "geometric_" else ()
    for dtype, length in product((torch.uint8, torch.int64, torch.float32, torch.complex64), (0, 3)):
        outcomes = []
        for device in ("cpu", "webgpu"):
            try:
                made = getattr(torch.empty(length, dtype=dtype, device=device), name)(*arguments)
                outcomes.append((made.shape, made.dtype))
            except RuntimeError as exc:
                outcomes.append((type(exc), str(exc)))
        assert outcomes[0] == outcomes[1], (dtype, length)


def test_shapes_that_torch_refuses(webgpu: Any) -> None:
    x = torch.ones([1] * 65)
    reductions: list[Function] = [
        torch.mean,
        torch.sum,
        torch.nansum,
        torch.std,
        torch.logsumexp,
        torch.var,
        torch.norm,
    ]
    for device, function in product(("cpu", "webgpu"), reductions):
        with pytest.raises(RuntimeError, match="only tensors with up to 64 dims are supported"):
            function(x.to(device), dim=64)
    for device in ("cpu", "webgpu"):
        with pytest.raises(RuntimeError, match=r"sizes \(1\) must match dimensionality of strides \(0\)"):
            torch.empty(3, device=device).new_empty_strided((3,), ())


@pytest.mark.parametrize(
    "name", ["max", "min", "amax", "amin", "argmax", "argmin", "aminmax", "sum", "prod", "any", "mean", "norm"]
)
def test_what_has_no_elements_gives_what_the_cpu_gives(webgpu: Any, name: str) -> None:
    for shape, arguments in product(((2, 0), (0, 2), (0,)), ({}, {"dim": 0}, {"dim": -1})):
        outcomes: list[Any] = []
        for device in ("cpu", "webgpu"):
            try:
                made = getattr(torch, name)(torch.ones(shape, device=device), **arguments)
                outcomes.append([each.tolist() for each in (made if isinstance(made, tuple) else (made,))])
            except (RuntimeError, IndexError) as exc:
                outcomes.append((type(exc), str(exc)))
        assert str(outcomes[0]) == str(outcomes[1])  # a NaN is itself in text


def test_an_index_out_of_range_is_the_error_that_either_kind_of_op_raises_on_the_cpu(webgpu: Any) -> None:
    index = torch.tensor([5], device="webgpu")
    for kind in (IndexError, RuntimeError):
        with pytest.raises(kind, match="index 5 is out of bounds"):
            torch.ones(3, device="webgpu").gather(0, index).cpu()


def test_a_range_says_that_it_resizes_its_target(webgpu: Any) -> None:
    for device in ("cpu", "webgpu"):
        out = torch.empty(2, device=device)
        with pytest.warns(UserWarning, match="The out tensor will be resized to a tensor of shape"):
            torch.arange(4, out=out)
        assert out.tolist() == [0, 1, 2, 3]
