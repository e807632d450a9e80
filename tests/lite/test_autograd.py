"""How gradients come about: accumulation, hooks, no_grad, freeing, and the guard against changes in place."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytorch import lite
from anytorch.errors import UsageError
from anytorch.lite import functional as F


def leaf(*values: float) -> lite.CustomTensor:
    return lite.CustomTensor(values, requires_grad=True)


def test_gradients_add_up_until_they_are_cleared() -> None:
    x = leaf(1, 2)
    for times in (1, 2):
        (x * x).sum().backward()
        assert x.grad.tolist() == [2 * times, 4 * times]
    x.zero_grad()
    assert x.grad is None


def test_two_leaves_do_not_share_a_gradient() -> None:
    x, y = leaf(1), leaf(2)
    (x + y).backward()
    x.grad.zero_()
    assert y.grad.tolist() == [1]


def test_a_second_backward_needs_the_graph() -> None:
    y = (leaf(1, 2) ** 2).sum()
    y.backward(retain_graph=True)
    y.backward()
    with pytest.raises(UsageError, match="retain_graph"):
        y.backward()


def test_no_grad() -> None:
    x = leaf(1)
    with lite.no_grad():
        assert not (x * 2).requires_grad
        with lite.enable_grad():
            assert (x * 2).requires_grad

    @lite.no_grad()
    def double() -> lite.CustomTensor:
        return x * 2

    assert not double().requires_grad
    assert (x * 2).requires_grad


def test_no_grad_is_not_another_threads() -> None:
    seen = []
    x = leaf(1)
    with lite.no_grad():
        thread = threading.Thread(target=lambda: seen.append((x * 2).requires_grad))
        thread.start()
        thread.join()
    assert seen == [True]


def test_hooks() -> None:
    x = leaf(1, 2)
    seen = []
    y = x * 3
    remove = y.register_hook(lambda g: seen.append(g.tolist()))
    y.register_hook(lambda g: g * 10)
    x.register_hook(lambda g: g + 1)
    y.retain_grad()
    y.sum().backward(retain_graph=True)
    assert seen == [[1, 1]]
    assert y.grad.tolist() == [10, 10]
    assert x.grad.tolist() == [31, 31]
    remove()
    y.sum().backward()
    assert len(seen) == 1


def test_changing_what_backward_needs_is_noticed() -> None:
    x = leaf(1, 2)
    h = x * 2
    y = h * h
    h += 1
    with pytest.raises(UsageError, match="changed in place"):
        y.sum().backward()


def test_changing_what_it_does_not_need_is_fine() -> None:
    x = leaf(1, 2)
    h = x * 2
    y = h + 1
    h += 5
    y.sum().backward()
    assert x.grad.tolist() == [2, 2]


def test_an_output_that_was_saved_is_guarded_too() -> None:
    y = leaf(1, 2).exp()
    z = y.sum()
    with lite.no_grad():
        y *= 2
    with pytest.raises(UsageError, match="changed in place"):
        z.backward()


def test_a_view_written_to_is_noticed_through_its_base() -> None:
    x = leaf(1, 2)
    h = x * 2
    y = h * h
    h.detach()[0] = 7
    with pytest.raises(UsageError, match="changed in place"):
        y.sum().backward()


@pytest.mark.parametrize("op", ["__iadd__", "__isub__", "__imul__", "__itruediv__"])
def test_in_place_on_computed_tensors(op: str) -> None:
    """The history is that of the new value, as in torch."""
    a, b = np.array([1.0, 2.0]), np.array([3.0, 5.0])
    x, w = lite.tensor(a, requires_grad=True), lite.tensor(b, requires_grad=True)
    p, q = torch.from_numpy(a).requires_grad_(), torch.from_numpy(b).requires_grad_()
    h, k = x * 2, p * 2
    getattr(h, op)(w)
    k = getattr(k, op)(q)
    (h * h).sum().backward()
    (k * k).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), p.grad.numpy())
    np.testing.assert_allclose(w.grad.numpy(), q.grad.numpy())


def test_in_place_with_an_operand_that_has_a_history() -> None:
    x = leaf(1, 2)
    total = lite.zeros(2)
    total += x * 3
    total *= x
    total.sum().backward()
    assert x.grad.tolist() == [6, 12]


def test_setitem_carries_gradients() -> None:
    x, rest = leaf(1, 2), leaf(5, 6, 7)
    buffer = rest * 1
    buffer[1:] = x * 2
    (buffer * lite.CustomTensor([1, 10, 100])).sum().backward()
    assert x.grad.tolist() == [20, 200]
    assert rest.grad.tolist() == [1, 0, 0]


def test_leaves_and_views_are_protected() -> None:
    x = leaf(1, 2)
    with pytest.raises(UsageError, match="leaf"):
        x += 1
    with pytest.raises(UsageError, match="leaf"):
        x[0] = 1
    with pytest.raises(UsageError, match="view"):
        (x * 2)[0].add_(1)
    with lite.no_grad():
        x += 1
    assert x.tolist() == [2, 3]


def test_a_slice_of_every_step_costs_one_tensor() -> None:
    """Two thousand slices of one tensor: with a full gradient each, this would take 16 GB."""
    x = lite.zeros(2000, 1000, requires_grad=True)
    total = lite.zeros(1000)
    for i in range(2000):
        total = total + x[i]
    total.sum().backward()
    assert (x.grad == 1).all()


def test_long_chains_do_not_exhaust_the_stack() -> None:
    x = leaf(0)
    y = x
    for _ in range(20_000):
        y = y + 1
    y.backward()
    assert x.grad.tolist() == [1]


def test_refusals() -> None:
    with pytest.raises(UsageError, match="needs a tensor that requires gradients"):
        lite.zeros(1).backward()
    with pytest.raises(UsageError, match="shape"):
        (leaf(1, 2) * 2).backward()
    with pytest.raises(UsageError, match="floating"):
        lite.tensor([1], requires_grad=True)
    with pytest.raises(UsageError, match="detach"):
        leaf(1).numpy()
    with pytest.raises(UsageError, match="never be called"):
        lite.zeros(1).register_hook(lambda g: None)


def test_grad_fn_names_the_op() -> None:
    assert repr((leaf(1) * 2).grad_fn) == "<MulBackward>"
    assert leaf(1).is_leaf
    assert not F.relu(leaf(1)).is_leaf


@given(st.lists(st.sampled_from("+-*@trsv"), min_size=1, max_size=12), st.integers(0, 10**6))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_random_programs_agree_with_torch(program: list[str], seed: int) -> None:
    """Graphs in which tensors are used several times, and views of them too."""
    start = np.random.default_rng(seed).standard_normal((3, 3))
    gradients, results = [], []
    for make in (lambda: lite.tensor(start, requires_grad=True), lambda: torch.from_numpy(start).requires_grad_()):
        x = make()
        pool = [x, x * 0.5]
        random = np.random.default_rng(seed)
        for op in program:
            a, b = (pool[i] for i in random.integers(0, len(pool), 2))
            out = {
                "+": lambda a, b: a + b,
                "-": lambda a, b: a - b * 2,
                "*": lambda a, b: a * b,
                "@": lambda a, b: a @ b,
                "t": lambda a, b: a.tanh(),
                "r": lambda a, b: a.transpose(0, 1),
                "s": lambda a, b: a.sum(0) + b[1],
                "v": lambda a, b: a[::1].reshape(9).reshape(3, 3) * b[0],
            }[op](a.tanh(), b.tanh())
            pool.append(out if tuple(out.shape) == (3, 3) else out.unsqueeze(0).expand(3, 3))
        total = sum((t.sum() for t in pool[1:]), pool[0].sum())
        total.backward()
        results.append(total.item())
        gradients.append(np.asarray(x.grad))
    np.testing.assert_allclose(results[0], results[1], rtol=1e-9)
    np.testing.assert_allclose(gradients[0], gradients[1], rtol=1e-8, atol=1e-10)


def test_a_hook_must_keep_the_shape() -> None:
    x = lite.tensor([1.0, 2.0], requires_grad=True)
    x.register_hook(lambda g: lite.ones(5))
    with pytest.raises(UsageError, match="hook"):
        (x * 2).sum().backward()
    assert x.grad is None
