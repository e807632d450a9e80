"""Optimisers: what turns gradients into better parameters. Schedules: how the step size changes. Clipping."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from anytorch.errors import UsageError
from anytorch.lite.dtypes import Array
from anytorch.lite.moving import on_gpu
from anytorch.lite.tensors import CustomTensor


class Optimizer:
    """Holds the parameters; subclasses say how one of them moves, in `update`."""

    def __init__(self, parameters: Iterable[CustomTensor], lr: float, weight_decay: float = 0.0) -> None:
        self.parameters = list(parameters)
        if not self.parameters:
            raise UsageError("an optimiser needs at least one parameter", hint="pass model.parameters()")
        if lr < 0:
            raise UsageError(f"invalid learning rate {lr}: use a number from 0 on")
        self.lr, self.weight_decay = lr, weight_decay
        self.steps = 0
        self.state: list[dict[str, Array]] = [{} for _ in self.parameters]

    def zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        self.steps += 1
        for parameter, state in zip(self.parameters, self.state, strict=True):
            if parameter.grad is not None:
                self.update(parameter.data, parameter.grad.data, state)
                parameter._shared_version().count += 1  # it is changed in place

    def update(self, p: Array, g: Array, state: dict[str, Array]) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "lr": self.lr, "state": [dict(state) for state in self.state]}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        if len(saved["state"]) != len(self.parameters):
            raise UsageError(f"the state has {len(saved['state'])} parameters, the optimiser {len(self.parameters)}")
        self.steps, self.lr = saved["steps"], saved["lr"]
        self.state = [{name: np.array(value) for name, value in state.items()} for state in saved["state"]]


class SGD(Optimizer):
    """p ← p − lr · g, with momentum: v ← momentum · v + g, p ← p − lr · v."""

    def __init__(
        self,
        parameters: Iterable[CustomTensor],
        lr: float = 0.01,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(parameters, lr, weight_decay)
        self.momentum, self.nesterov = momentum, nesterov

    def update(self, p: Array, g: Array, state: dict[str, Array]) -> None:
        if self.weight_decay:
            g = g + self.weight_decay * p
        if self.momentum:
            if "v" in state:
                v = state["v"]
                v *= self.momentum
                v += g
            else:
                v = state["v"] = g.copy()
            g = g + self.momentum * v if self.nesterov else v
        p -= self.lr * g


class Adam(Optimizer):
    """Steps of about `lr` in every direction: the mean of the gradients over the root of the mean of their squares."""

    decoupled = False
    usual_decay = 0.0

    def __init__(
        self,
        parameters: Iterable[CustomTensor],
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float | None = None,
    ) -> None:
        super().__init__(parameters, lr, self.usual_decay if weight_decay is None else weight_decay)
        if not all(0 <= beta < 1 for beta in betas):
            raise UsageError(f"invalid betas {betas}", hint="use two numbers from 0 to below 1")
        self.betas, self.eps = betas, eps

    def update(self, p: Array, g: Array, state: dict[str, Array]) -> None:
        b1, b2 = self.betas
        if self.weight_decay and self.decoupled:
            p *= 1 - self.lr * self.weight_decay
        elif self.weight_decay:
            g = g + self.weight_decay * p
        if not state:
            state["m"], state["v"] = np.zeros_like(p), np.zeros_like(p)
        # The means begin at 0 and are too small at first: what is missing is made up for.
        step, scale = self.lr / (1 - b1**self.steps), 1 / math.sqrt(1 - b2**self.steps)
        adam_step(p, g, state["m"], state["v"], b1, b2, step, scale, self.eps)


@on_gpu
def adam_step(
    p: Array, g: Array, m: Array, v: Array, b1: float, b2: float, step: float, scale: float, eps: float
) -> None:
    """m ← b1·m + (1 − b1)·g;  v ← b2·v + (1 − b2)·g²;  p ← p − step · m / (scale·√v + eps). In place."""
    m *= b1
    m += (1 - b1) * g
    v *= b2
    v += (1 - b2) * (g * g)
    root = np.sqrt(v)
    root *= scale
    root += eps
    np.divide(m, root, out=root)
    root *= step
    p -= root


class CustomAdam(Adam):
    """Document 4's name, and its two dictionaries: the means of the gradients, `m`, and of their squares, `v`."""

    @property
    def m(self) -> dict[int, Array]:
        return {number: state["m"] for number, state in enumerate(self.state) if state}

    @property
    def v(self) -> dict[int, Array]:
        return {number: state["v"] for number, state in enumerate(self.state) if state}


class AdamW(Adam):
    """Adam whose weight decay shrinks the weights themselves instead of joining the gradient."""

    decoupled = True
    usual_decay = 0.01


class Schedule:
    """Sets `optimizer.lr` to its first value times `factor(epoch)` at every `step()`."""

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float]) -> None:
        self.optimizer, self.factor = optimizer, factor
        self.base, self.epoch = optimizer.lr, 0
        optimizer.lr = self.base * factor(0)

    def step(self) -> None:
        self.epoch += 1
        self.optimizer.lr = self.base * self.factor(self.epoch)


def step_schedule(optimizer: Optimizer, step_size: int, gamma: float = 0.1) -> Schedule:
    """Multiply the learning rate by `gamma` every `step_size` epochs."""
    return Schedule(optimizer, lambda epoch: gamma ** (epoch // step_size))


def exponential_schedule(optimizer: Optimizer, gamma: float) -> Schedule:
    return Schedule(optimizer, lambda epoch: gamma**epoch)


def cosine_schedule(optimizer: Optimizer, epochs: int, warmup: int = 0) -> Schedule:
    """The learning rate rises linearly for `warmup` epochs, then falls along a cosine to 0 at `epochs`."""

    def factor(epoch: int) -> float:
        if epoch < warmup:
            return (epoch + 1) / warmup
        return 0.5 * (1 + math.cos(math.pi * min(1, (epoch - warmup) / max(1, epochs - warmup))))

    return Schedule(optimizer, factor)


def clip_grad_norm(parameters: Iterable[CustomTensor], max_norm: float) -> float:
    """Scale all gradients together so that their common norm is at most `max_norm`; returns what it was."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    norm = math.sqrt(sum(float(np.sum(g.data * g.data, dtype=np.float64)) for g in gradients))
    scale = max_norm / (norm + 1e-6)
    if scale < 1:
        for g in gradients:
            g.data = g.data * g.data.dtype.type(scale)
    return norm


def clip_grad_value(parameters: Iterable[CustomTensor], limit: float) -> None:
    for p in parameters:
        if p.grad is not None:
            p.grad.data = np.clip(p.grad.data, -limit, limit)
