"""Cheaper calls in an FX graph: the same results from fewer calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule
from torch.nn import functional as F

from anytorch.graph.calls import CHEAP, cheaper

aten = torch.ops.aten


def _compiled(function: Callable[..., Any], seen: list[GraphModule], inputs: list[torch.Tensor]) -> Any:
    def compiler(module: GraphModule, examples: Any) -> Any:
        seen.append(cheaper(module))
        return make_boxed_func(module.forward)

    torch._dynamo.reset()
    return torch.compile(function, backend=aot_autograd(fw_compiler=compiler), dynamic=False)(*inputs)


def _targets(module: GraphModule) -> list[Any]:
    return [node.target for node in module.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8), (2, 3, 5, 8)])
def test_a_linear_layer_is_one_call(shape: tuple[int, ...], bias: bool) -> None:
    layer, x = nn.Linear(8, 6, bias), torch.randn(shape)
    seen: list[GraphModule] = []
    with torch.no_grad():
        made = _compiled(layer, seen, [x])
        torch.testing.assert_close(made, layer(x))
    assert _targets(seen[0]) == [F.linear]


def test_other_products_stay() -> None:
    a, b, c = torch.randn(4, 8), torch.randn(8, 6), torch.randn(4, 6)
    seen: list[GraphModule] = []
    made = _compiled(lambda a, b, c: (a @ b, torch.addmm(c, a, b), torch.addmm(c[0], a, b, beta=2.0)), seen, [a, b, c])
    for ours, plain in zip(made, (a @ b, c + a @ b, 2 * c[0] + a @ b), strict=True):
        torch.testing.assert_close(ours, plain)
    assert F.linear not in _targets(seen[0])
    # A matrix that is added is no bias, however its second factor lies.
    made = _compiled(lambda a, w, c: torch.addmm(c, a, w.t()), seen, [a, b.t().contiguous(), c])
    torch.testing.assert_close(made, c + a @ b)
    assert F.linear not in _targets(seen[1])


def test_rows_that_are_not_flattened_and_restored_alike() -> None:
    x, w = torch.randn(2, 3, 8), torch.randn(6, 8)
    seen: list[GraphModule] = []
    made = _compiled(lambda x, w: (x.view(6, 8) @ w.t()).view(3, 2, 6), seen, [x, w])
    torch.testing.assert_close(made, (x.view(6, 8) @ w.t()).view(3, 2, 6))
    made = _compiled(lambda x, w: (x.view(12, 4) @ w.view(12, 4).t()).view(2, 6, 12), seen, [x, w])
    torch.testing.assert_close(made, (x.view(12, 4) @ w.view(12, 4).t()).view(2, 6, 12))


def test_a_view_of_a_view_is_one_where_all_shapes_are() -> None:
    x = torch.randn(4, 6)
    seen: list[GraphModule] = []
    made = _compiled(lambda x: (x + 1).view(2, 12).view(8, 3) * 2, seen, [x])
    torch.testing.assert_close(made, (x + 1).view(8, 3) * 2)
    assert _targets(seen[0]).count(torch.Tensor.view) == 1
    made = _compiled(lambda x: x.t().view(2, 3, 4).view(6, 4) + 1, seen, [x])  # no view of that shape of any strides
    torch.testing.assert_close(made, x.t() + 1)


def test_the_cheap_functions_take_what_the_ops_take() -> None:
    x, y, w = torch.randn(2, 3, 4), torch.randn(2, 3, 4), torch.randn(4)
    given: dict[Any, tuple[tuple[Any, ...], dict[str, Any]]] = {
        aten.view.default: ((x, [6, 4]), {}),
        aten.expand.default: ((w, [2, 3, 4]), {}),
        aten.permute.default: ((x, [2, 0, 1]), {}),
        aten.transpose.int: ((x, 0, -1), {}),
        aten.select.int: ((x, 1, 2), {}),
        aten.squeeze.dim: ((x[:1], 0), {}),
        aten.unsqueeze.default: ((x, 1), {}),
        aten.clone.default: ((x.transpose(0, 1),), {"memory_format": torch.contiguous_format}),
        aten.cat.default: (([x, y], -1), {}),
        aten.add.Tensor: ((x, y), {"alpha": 3}),
        aten.sub.Tensor: ((x, 2.5), {}),
        aten.div.Tensor_mode: ((x, y), {"rounding_mode": "floor"}),
        aten.pow.Tensor_Scalar: ((x, 2), {}),
        aten.mean.dim: ((x, [-1], True), {}),
        aten.sum.dim_IntList: ((x, [0, 2]), {"dtype": torch.float64}),
        aten.amax.default: ((x, [-1], True), {}),
        aten.gelu.default: ((x,), {"approximate": "tanh"}),
        aten.native_layer_norm.default: ((x, [4], w, None, 1e-5), {}),
        aten.where.self: ((x > 0, x, y), {}),
        aten.embedding.default: ((x[0], torch.tensor([1, 2])), {}),
    }
    for op, (args, kwargs) in given.items():
        torch.testing.assert_close(CHEAP[op](*args, **kwargs), op(*args, **kwargs))
    assert aten.add_.Tensor not in CHEAP and aten.add.out not in CHEAP


def test_what_a_graph_writes_stays_though_nobody_reads_it() -> None:
    x, total = torch.randn(3, 4), torch.zeros(3, 4)

    def count(x: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return x * 2

    def compiler(module: GraphModule, examples: Any) -> Any:
        return make_boxed_func(cheaper(module).forward)

    torch._dynamo.reset()
    kept = aot_autograd(fw_compiler=compiler, keep_inference_input_mutations=True)
    torch.testing.assert_close(torch.compile(count, backend=kept, dynamic=False)(x, total), x * 2)
    torch.testing.assert_close(total, x)
