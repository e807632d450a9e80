"""Ops over lists of tensors, as optimizers use them: several tensors of one geometry per launch.

Only the ones an optimizer's step is made of. The others need no kernel: torch loops over the tensors and calls our
elementwise ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from anytorch.gpu.plans import plans
from anytorch.webgpu.dtypes import FLOATS
from anytorch.webgpu.kernels import op_of
from anytorch.webgpu.multiple import launch, most_buffers
from anytorch.webgpu.tensors import KEY

Tensors = Sequence[torch.Tensor]

MOST_BUFFERS = 16  # with their places and a number each, the parameters fit into 32 words


@dataclass(frozen=True)
class Loop:
    """`expression` makes the first of an item's tensors from {0}, {1}, … and its number {n}; `single` does one item."""

    expression: str
    lists: int  # how many lists of tensors
    single: Callable[..., Any]
    number: bool = True


def _numbered(name: str, *loop: Any) -> dict[str, Loop]:
    """One number for all items, or one each."""
    return dict.fromkeys((f"{name}.Scalar", f"{name}.ScalarList"), Loop(*loop))


LOOPS = {
    **_numbered("_foreach_add_", "{0} + {n}", 1, lambda t, n: t.add_(n)),
    **_numbered("_foreach_mul_", "{0} * {n}", 1, lambda t, n: t.mul_(n)),
    **_numbered("_foreach_div_", "divide_f32({0}, {n})", 1, lambda t, n: t.div_(n)),
    **_numbered("_foreach_addcmul_", "{0} + {n} * {1} * {2}", 3, lambda t, u, v, n: t.addcmul_(u, v, value=n)),
    **_numbered(
        "_foreach_addcdiv_", "{0} + {n} * divide_f32({1}, {2})", 3, lambda t, u, v, n: t.addcdiv_(u, v, value=n)
    ),
    "_foreach_add_.List": Loop("{0} + {n} * {1}", 2, lambda t, u, n: t.add_(u, alpha=n)),
    "_foreach_sub_.List": Loop("{0} - {n} * {1}", 2, lambda t, u, n: t.sub_(u, alpha=n)),
    "_foreach_mul_.List": Loop("{0} * {1}", 2, lambda t, u: t.mul_(u), number=False),
    "_foreach_div_.List": Loop("divide_f32({0}, {1})", 2, lambda t, u: t.div_(u), number=False),
    "_foreach_maximum_.List": Loop("maximum_f32({0}, {1})", 2, lambda t, u: t.copy_(t.maximum(u)), number=False),
    "_foreach_lerp_.Scalar": Loop(
        "select({1} - ({1} - {0}) * (1.0 - {n}), {0} + {n} * ({1} - {0}), abs({n}) < 0.5)",
        2,
        lambda t, u, n: t.lerp_(u, n),
    ),
    "_foreach_sqrt_": Loop("sqrt({0})", 1, lambda t: t.sqrt_(), number=False),
    "_foreach_neg_": Loop("-{0}", 1, lambda t: t.neg_(), number=False),
    "_foreach_zero_": Loop("0.0", 1, lambda t: t.zero_(), number=False),
}
SQUARE_ROOT = Loop("sqrt({1})", 2, lambda t, u: t.copy_(u.sqrt()), number=False)


def _runs(loop: Loop, lists: Sequence[Tensors]) -> list[list[int]]:
    """Items that one launch can do together: of one geometry, as many as there are bindings for."""
    most = max(1, min(most_buffers(), MOST_BUFFERS) // loop.lists)
    if loop.number:
        most = min(most, (30 - MOST_BUFFERS))
    groups: dict[Any, list[int]] = {}
    runs = []
    for i, tensor in enumerate(lists[0]):
        key = (tensor.size(), tensor.stride(), *[column[i].dtype for column in lists])
        group = groups.get(key)
        if group is None or len(group) == most:
            group = groups[key] = []
            runs.append(group)
        group.append(i)
    return runs


def run(loop: Loop, lists: Sequence[Tensors], numbers: Sequence[Any]) -> None:
    """Do every item of the lists; `numbers` has one each, or is empty."""
    first = lists[0]
    if any(len(column) != len(first) for column in lists) or (loop.number and len(numbers) != len(first)):
        lengths = [len(column) for column in lists]
        raise RuntimeError(
            f"Tensor lists must have the same number of tensors, got {lengths} and {len(numbers)} numbers"
        )
    # A tensor named twice is changed twice, one after the other.
    twice = len({t.data_ptr() for t in first}) < len(first)
    for items in [[i] for i in range(len(first))] if twice else _runs(loop, lists):
        if not _together(loop, lists, numbers, items):
            for i in items:
                loop.single(*[column[i] for column in lists], *([numbers[i]] if loop.number else []))


def _together(loop: Loop, lists: Sequence[Tensors], numbers: Sequence[Any], items: list[int]) -> bool:
    tensors = [column[i] for i in items for column in lists]
    chosen = [numbers[i] for i in items] if loop.number else []
    if any(t.dtype not in FLOATS for t in tensors) or not all(isinstance(n, (int, float)) for n in chosen):
        return False
    width = loop.lists
    body = _body(loop, len(items))
    written = (True, *(False,) * (width - 1)) * len(items)
    return launch(body, tensors, written, numbers={f"n{k}": float(n) for k, n in enumerate(chosen)})


def _body(loop: Loop, items: int) -> str:
    key = ("foreach", id(loop), items)
    text: str | None = plans[key]
    if text is None:
        lines = []
        for k in range(items):
            expression = loop.expression.replace("{n}", f"n{k}")
            for j in range(loop.lists):
                expression = expression.replace(f"{{{j}}}", f"v{k * loop.lists + j}")
            lines.append(f"    v{k * loop.lists} = {expression};\n")
        text = plans[key] = "".join(lines)
    return text


def _kernel(op: Any, loop: Loop) -> Callable[..., None]:
    arguments = op._schema.arguments
    per_item = op._overloadname == "ScalarList"
    default = next((a.default_value for a in arguments if a.has_default_value()), 1)

    def kernel(*args: Any, **kwargs: Any) -> None:
        lists = args[: loop.lists]
        numbers: Sequence[Any] = ()
        if loop.number:
            given: Any = args[loop.lists] if len(args) > loop.lists else next(iter(kwargs.values()), default)
            numbers = given if per_item else [given] * len(lists[0])
        run(loop, lists, numbers)

    return kernel


def square_roots(self: Tensors) -> list[torch.Tensor]:
    """`_foreach_sqrt`: into new tensors."""
    if any(t.dtype not in FLOATS for t in self):  # of whole numbers they are not such
        return [t.sqrt() for t in self]
    results = [torch.empty_like(t) for t in self]
    run(SQUARE_ROOT, (results, self), ())
    return results


def multiply_by_tensor_(self: Tensors, other: torch.Tensor) -> None:
    """`_foreach_mul_` by one number that is on the device: how gradients are clipped without waiting for the norm."""
    for tensor in self:
        whole = tensor.dtype in FLOATS and other.dim() == 0
        if not whole or not launch("    v0 = v0 * cell0;\n", [tensor], (True,), [other]):
            tensor.mul_(other)


def register(library: torch.library.Library) -> None:
    for name, loop in LOOPS.items():
        library.impl(name, _kernel(op_of(name), loop), KEY)
    library.impl("_foreach_sqrt", square_roots, KEY)
    library.impl("_foreach_mul_.Tensor", multiply_by_tensor_, KEY)
