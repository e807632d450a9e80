"""Our loop for Adam on the host gives the bits of torch's fused kernel, or is not used."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from anytorch import native
from anytorch.errors import NativeUnavailable
from anytorch.memory import fused
from anytorch.memory.fused import MOMENTS, Update


@pytest.fixture(autouse=True)
def built(missing: Callable[[str, str], NoReturn]) -> None:
    if fused._library() is None:
        missing("compiler", "the native library could not be built")
    if native.level().name == "baseline":
        pytest.skip("a processor without fused multiply-add computes otherwise than torch's vectors")


def both(
    factory: Any, dtype: torch.dtype, count: int, parts: int, options: dict[str, Any], scale: float | None, threads: int
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    torch.manual_seed(count)
    theirs = torch.nn.Parameter(torch.randn(count).to(dtype))
    optimizer = factory([theirs], fused=True, **options)
    cuts = [theirs.detach().clone()]
    if parts == 2:
        at = count // 2 // 64 * 64
        cuts = [theirs.detach()[:at].clone(), theirs.detach()[at:].clone()]
    state = {"step": torch.zeros(()), **{key: torch.zeros(count, dtype=dtype) for key in MOMENTS}}
    kind = fused.kind_of(factory)
    assert kind is not None
    for _ in range(4):
        gradient = (torch.randn(count) * 10 ** float(torch.randn(()))).to(dtype)
        update = Update(cuts, gradient.clone(), state, optimizer.param_groups[0])
        assert fused.can_do(kind, update)
        fused.step(kind, [update], scale, threads)
        theirs.grad = gradient if scale is None else gradient * torch.tensor(scale)
        optimizer.step()
    kept = optimizer.state[theirs]
    ours = [torch.cat(cuts), state["step"], *(state[key] for key in MOMENTS)]
    return ours, [theirs.detach(), kept["step"], *(kept[key] for key in MOMENTS)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("factory", [torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize(
    ("count", "parts", "scale", "threads"), [(64, 1, None, 1), (100_003, 1, 0.37, 3), (200_000, 2, None, 2)]
)
@pytest.mark.parametrize("options", [{"lr": 1e-3}, {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}])
def test_the_bits_of_torch(
    factory: Any, dtype: torch.dtype, count: int, parts: int, scale: float | None, threads: int, options: dict[str, Any]
) -> None:
    ours, theirs = both(factory, dtype, count, parts, options, scale, threads)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_numbers_that_are_none() -> None:
    """Zeros, infinities, NaN and numbers too small for a normal float."""
    odd = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 1e38, -1e-45] * 8)
    for dtype in fused.DTYPES:
        theirs = torch.nn.Parameter(torch.ones(64, dtype=dtype))
        optimizer = torch.optim.AdamW([theirs], fused=True)
        ours = theirs.detach().clone()
        state = {"step": torch.zeros(()), **{key: torch.zeros_like(ours) for key in MOMENTS}}
        for _ in range(3):
            theirs.grad = odd.to(dtype)
            optimizer.step()
            fused.step("adamw", [Update([ours], theirs.grad, state, optimizer.param_groups[0])], None, 1)
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(7.0), theirs.detach().nan_to_num(7.0))


def good() -> tuple[Any, dict[str, Any]]:
    state = {"step": torch.zeros(()), **{key: torch.zeros(64) for key in MOMENTS}}
    options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "fused": True, **fused.PLAIN}
    return (lambda **changed: Update([torch.zeros(64)], torch.zeros(64), state, {**options, **changed})), state


def test_what_is_left_to_torch() -> None:
    update, state = good()
    assert fused.can_do("adamw", update())
    assert fused.kind_of(torch.optim.SGD) is None
    assert fused.kind_of(type("Mine", (torch.optim.AdamW,), {})) is None
    other: list[dict[str, Any]] = [{"fused": None}, {"amsgrad": True}, {"maximize": True}, {"betas": (0.3, 0.9)}]
    for changed in (*other, {"lr": torch.tensor(0.1)}):
        assert not fused.can_do("adamw", update(**changed))
    assert not fused.can_do("adamw", Update([torch.zeros(64)], torch.zeros(64), {}, update().options))
    half = torch.zeros(64, dtype=torch.float16)
    assert not fused.can_do("adamw", Update([half], half, state, update().options))
    strided = torch.zeros(128)[::2]
    assert not fused.can_do("adamw", Update([torch.zeros(64)], strided, state, update().options))


def test_a_loop_that_gives_other_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    update, _ = good()
    real = fused._spans

    def wrong(*arguments: Any) -> Any:
        spans = real(*arguments)
        for span in spans:
            span.epsilon *= 1.01
        return spans

    monkeypatch.setattr(fused, "_spans", wrong)
    monkeypatch.setattr(fused, "_proofs", {})
    assert not fused.can_do("adamw", update())


def test_without_memory_for_the_list_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    library = fused._library()
    assert library is not None
    endless = fused.Span(count=1 << 62)  # its list of parts has no room in any machine's addresses
    assert library.anytorch_adam((fused.Span * 1)(endless), 1, 2) == 1, "and the process lives"
    update, state = good()
    one = update()
    before = [tensor.clone() for tensor in (*one.weight, *state.values())]
    monkeypatch.setattr(fused, "_loaded", [SimpleNamespace(anytorch_adam=lambda *_: 1)])
    with pytest.raises(MemoryError, match="no weight was changed"):
        fused.step("adamw", [one], None, 1)
    assert all(map(torch.equal, before, (*one.weight, *state.values())))


def test_without_a_compiler_torch_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise NativeUnavailable("no compiler here")

    monkeypatch.setattr(fused.native, "load", refuse)
    monkeypatch.setattr(fused, "_loaded", [])
    monkeypatch.setattr(fused, "_proofs", {})
    update, _ = good()
    assert not fused.can_do("adamw", update())
