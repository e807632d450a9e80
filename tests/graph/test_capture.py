"""`trace`: functions and modules of PyTorch as kernel graphs that are called as the function is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anytorch.errors import GraphError
from anytorch.graph import KernelGraph, TracedGraph, trace
from anytorch.graph.search import EAGER

X, W = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(0)), torch.linspace(-1, 2, 8)
IDS = torch.tensor([[1, 2, 3], [4, 5, 0]])
FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "rms norm": (lambda x, w: F.rms_norm(x, (8,), w), (X, W)),
    "rms norm of halves": (lambda x: F.rms_norm(x, (8,)), (X.half() * 1e-4,)),
    "layer norm": (lambda x, w: F.layer_norm(x, (8,), w, w), (X, W)),
    "silu and gelu": (lambda x: F.silu(x) + F.gelu(x) * F.gelu(x, approximate="tanh"), (X,)),
    "linear": (lambda x, w, b: F.linear(x, w, b), (X, X[0], W[:4])),
    "softmax": (lambda x: F.softmax(x, 1) + F.log_softmax(x, -1), (X,)),
    "cat, chunk and split": (lambda x: torch.cat([*x.chunk(2, -1), *x.split([1, 3], 2)[:1]], 2), (X[..., :4],)),
    "stack and unbind": (lambda x: torch.stack(list(x.unbind(1)[1:]), 2), (X,)),
    "embedding": (lambda ids, table: F.embedding(ids, table), (IDS, X[1].repeat(2, 1))),
    "rope": (lambda x: x * 2 + torch.cat([-x[..., 4:], x[..., :4]], -1), (X,)),
    "positions": (lambda x: x * torch.arange(1, 9) + torch.arange(0, 4, 0.5), (X,)),
    "order": (lambda x: x.tril().masked_fill(~((x > 0) & (x < 1) | (x < -1)), 3.0), (X,)),
    "statistics": (lambda x: x.var(-1) + x.std(1).amax(-1, keepdim=True) + x.max(-1).values + x.max(), (X,)),
    "in place": (lambda x, w: (x * 2).add_(w).relu_(), (X, W)),
    "numbers of torch": (lambda x: x * torch.tensor(2.0) + torch.ones_like(x) + torch.full((8,), 0.5), (X,)),
    "repeats": (lambda x: x.repeat(1, 2, 1) + x.repeat_interleave(2, 1), (X,)),
    "activations": (lambda x: F.softplus(x) + F.leaky_relu(x) + F.mish(x) + F.hardswish(x) + F.elu(x), (X,)),
    "unit vectors": (lambda x: F.normalize(x, dim=-1), (X,)),
    "einsum": (lambda x, w: torch.einsum("abc,c->ab", x, w), (X, W)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_gives_what_torch_gives(name: str) -> None:
    function, examples = FUNCTIONS[name]
    wanted = function(*examples)
    torch.testing.assert_close(trace(function, *examples)(*examples), wanted, rtol=1e-5, atol=1e-5)


Q, K = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8)
ATTENTIONS: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "plain": (lambda q: F.scaled_dot_product_attention(q, q, q), (Q,)),
    "shared keys": (lambda q, k: F.scaled_dot_product_attention(q, k, k * 2, enable_gqa=True), (Q, K)),
    "causal": (
        lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True, scale=0.2, enable_gqa=True),
        (Q, K),
    ),
    "bools": (
        lambda q, k, m: F.scaled_dot_product_attention(q, k, k, m, enable_gqa=True),
        (Q, K, torch.tensor([True, False, True, True, False, True, True]).repeat(5, 1)),
    ),
    "added": (
        lambda q, k, m: F.scaled_dot_product_attention(q, k, k, attn_mask=m, enable_gqa=True),
        (Q, K, torch.randn(2, 1, 5, 7)),
    ),
    "three dimensions": (lambda q, m: F.scaled_dot_product_attention(q, q, q, m), (Q[0], torch.randn(4, 5, 5))),
    "two dimensions": (lambda q: F.scaled_dot_product_attention(q, q, q), (Q[0, 0],)),
    "one key head for all": (lambda q, k: F.scaled_dot_product_attention(q, k, k), (Q, K[:1, :1])),
}


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_stays_whole(name: str) -> None:
    function, examples = ATTENTIONS[name]
    g = trace(function, *examples)
    assert [node.op for _, node in g.graph].count("attention") == 1
    torch.testing.assert_close(g(*examples), function(*examples), rtol=1e-5, atol=1e-5)


def test_attention_that_torch_refuses_is_refused_by_torch() -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        trace(lambda q, k: F.scaled_dot_product_attention(q, k, k), Q, K)
    with pytest.raises(GraphError, match="dropout") as caught:
        trace(lambda q: F.scaled_dot_product_attention(q, q, q, dropout_p=0.1), Q)
    assert "eval()" in str(caught.value.hint)


class Block(nn.Module):
    """Tied weights, a buffer, a parameter that is not used, keyword arguments, a dictionary of results."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("shift", torch.arange(8.0))

    def forward(self, x: torch.Tensor, *, times: float = 1.0, mask: torch.Tensor | None = None) -> dict[str, Any]:
        y = self.second(F.silu(self.first(x + self.shift))) * times
        return {"y": y if mask is None else y.masked_fill(mask, 0.0), "times": times, "both": (x, y)}


def test_a_module_is_called_with_its_own_arguments() -> None:
    block, mask = Block(), X > 0
    g = trace(block, X, mask=mask, times=2.0)
    assert [name for name, _ in g.held] == ["first.weight", "first.bias", "second.bias", "shift"]
    found = g(X, mask=mask, times=2.0)
    torch.testing.assert_close(found, block(X, mask=mask, times=2.0))
    assert found["times"] == 2.0 and not found["y"].requires_grad
    with torch.no_grad():  # what a module learns, its graph knows
        block.first.weight.mul_(0.5)
    block.second.bias = nn.Parameter(torch.ones(8))
    torch.testing.assert_close(g(X, times=2.0, mask=mask), block(X, mask=mask, times=2.0))
    assert len(g(inputs=[X, mask])) == 3
    with pytest.raises(GraphError, match=r"an argument is 3\.0; the graph was traced with 2\.0"):
        g(X, mask=mask, times=3.0)
    with pytest.raises(GraphError, match="other arguments"):
        g(X, mask)
    with pytest.raises(GraphError, match=r"input 0 \(x\) has dtype float64"):
        g(X.double(), mask=mask, times=2.0)
    with pytest.raises(GraphError, match="not both"):
        g(X, inputs=[X, mask])


def test_modules_of_torch() -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with pytest.raises(GraphError, match="dropout has no kernel graph"):
        trace(encoder, X)
    encoder.eval()
    g = trace(encoder, X)
    assert "attention" in [node.op for _, node in g.graph]
    torch.testing.assert_close(g(X), encoder(X), rtol=1e-5, atol=1e-5)
    for module, x in ((nn.Embedding(10, 8), IDS), (nn.BatchNorm1d(4).eval(), X), (nn.RMSNorm(8), X)):
        torch.testing.assert_close(trace(module, x)(x), module(x), rtol=1e-5, atol=1e-5)
    several = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    torch.testing.assert_close(trace(several, X, X, X)(X, X, X), several(X, X, X), rtol=1e-5, atol=1e-5)


def test_tensors_from_around_are_held() -> None:
    outside, factor, layer = torch.randn(8, 3), torch.tensor(0.5), nn.Linear(3, 2)
    g = trace(lambda x: layer(x @ outside) * factor, X)
    assert len(g.held) == 4
    outside.mul_(2)
    factor.mul_(3)
    torch.testing.assert_close(g(X), layer(X @ outside).detach() * 1.5)


PRODUCTS: dict[str, Callable[..., Any]] = {
    "a matrix": lambda x: x @ X[0].t()[:, :3],
    "a vector": lambda x: torch.matmul(x, W),
    "a row": lambda x: W @ x.mT,
    "itself": lambda x: x.matmul(x.transpose(1, 2)),
    "four dimensions": lambda x: x[:, None] @ x[:, None].mT,
    "one for all": lambda x: X[0] @ x.mT,
    "all by all": lambda x: x @ x[:, None].mT,  # torch says (b**2)//b for a size of the result
    "all by all, turned": lambda x: x @ x.mT[:, None],
    "attention": nn.MultiheadAttention(8, 2, batch_first=True).eval(),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_keep_named_sizes(name: str) -> None:
    """torch's own matmul fixes them before torch 2.13."""
    function = PRODUCTS[name]
    examples = (X, X, X) if name == "attention" else (X,)
    g = trace(function, *examples, dynamic={"b": [(place, 0) for place in range(len(examples))]})
    more = [torch.cat([x, x * 0.5, x + 1]) for x in examples]
    torch.testing.assert_close(g(*more), function(*more), rtol=1e-5, atol=1e-5)


def test_named_sizes() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))
    g = trace(model, X, dynamic={"b": (0, 0)})
    assert g.graph.sizes == {"b"}
    for rows in (1, 2, 5):
        x = torch.randn(rows, 4, 8)
        torch.testing.assert_close(g(x), model(x), rtol=1e-5, atol=1e-5)

    def attend(q: torch.Tensor, k: torch.Tensor, *, mask: torch.Tensor) -> torch.Tensor:
        made = F.scaled_dot_product_attention(q, k, k, mask, enable_gqa=True)
        return made.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1) / q.shape[2]

    g = trace(attend, Q, K, mask=torch.randn(5, 7), dynamic={
        "b": [(0, 0), (1, 0)], "n": [(0, 2), ("mask", 0)], "t": [(1, -2), ("mask", 1)],
    })  # fmt: skip
    assert str(g.graph.nodes[g.graph.inputs[2]].shape) == "(n, t)"
    q, k, mask = torch.randn(1, 4, 3, 8), torch.randn(1, 2, 9, 8), torch.randn(3, 9)
    torch.testing.assert_close(g(q, k, mask=mask), attend(q, k, mask=mask), rtol=1e-5, atol=1e-5)
    with pytest.raises(GraphError, match="size t is 9 here and 8"):
        g(q, k[:, :, :8], mask=mask)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[0] * 2,
        lambda x: x[-1].exp(),
        lambda x: x[:, 0] + x[:, -1],
        lambda x: (x - x[0]).softmax(-1) @ x[-1].mT,
        lambda x: torch.cat([x, x])[-2] + x[0],
    ],
)
def test_a_constant_position_in_a_named_size(function: Any) -> None:
    g = trace(function, X, dynamic={"b": (0, 0)})
    for rows in (1, 2, 5):
        x = torch.randn(rows, 4, 8)
        torch.testing.assert_close(g(x), function(x), rtol=1e-5, atol=1e-5)
    again = TracedGraph.from_json(g.to_json())
    torch.testing.assert_close(again(X)[0], function(X), rtol=1e-5, atol=1e-5)
    with pytest.raises(GraphError, match="depends on whether b > 3"):
        trace(lambda x: x[3], torch.randn(5, 8), dynamic={"b": (0, 0)})


@pytest.mark.parametrize(
    ("function", "dynamic", "said"),
    [
        (lambda x, y: x + y, {"b": (0, 0)}, "works only for b = 2"),
        (lambda x, y: x + y, {"b": (0, 0), "c": (1, 0)}, "needs equal sizes among b, c"),
        (lambda x, y: x if x.shape[0] > 5 else -x, {"b": (0, 0)}, "depends on whether b <= 5"),
        (lambda x, y: x, {"b": (2, 0)}, "not a tensor among the examples"),
        (lambda x, y: x, {"b": (0, 3)}, "dimension 3 of a tensor that has 3"),
        (lambda x, y: x, {"b c": (0, 0)}, "not a name for a size"),
    ],
)
def test_named_sizes_that_are_not_free(function: Any, dynamic: Any, said: str) -> None:
    with pytest.raises(GraphError, match=said):
        trace(function, X, X, dynamic=dynamic)


def test_what_has_no_kernel_graph_says_why() -> None:
    with pytest.raises(GraphError, match=r"no kernel graph: aten\.linalg_inv_ex"):
        trace(lambda x: torch.linalg.inv(x), torch.eye(3))
    with pytest.raises(GraphError, match="depends on the values of tensors"):
        trace(lambda x: x if x.sum() > 0 else -x, X)
    with pytest.raises(GraphError, match=r"result 1 of aten\.max\.dim"):
        trace(lambda x: x.max(-1).indices, X)


def test_a_traced_module_is_searched_and_saved(few: None) -> None:
    layers, factor = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.SiLU()), torch.tensor(0.5)

    def model(x: torch.Tensor, *, shift: float = 2.0) -> torch.Tensor:
        made: torch.Tensor = layers(x) * factor + shift
        return made

    g = trace(model, X, shift=2.0, dynamic={"b": (0, 0)})
    assert g.superoptimize(X, shift=2.0, time_limit_s=60) is g
    assert "in one kernel" in g.explain() and all(f.verdict and f.verdict.chosen != EAGER for f in g._found.values())
    torch.testing.assert_close(g(X, shift=2.0), model(X).detach(), rtol=1e-5, atol=1e-5)
    g.superoptimize(sizes={"b": 3}, time_limit_s=60)
    assert len(g._found) == 2
    again = TracedGraph.from_json(g.to_json())  # the parameters are inputs then
    assert isinstance(again, KernelGraph) and not isinstance(again, TracedGraph)
    torch.testing.assert_close(again(X, *(read() for _, read in g.held))[0], model(X).detach(), rtol=1e-5, atol=1e-5)


class Decoder(nn.Module):
    """A block as in Llama: RMS norms, rotary positions, shared key heads, a gated MLP."""

    def __init__(self, width: int = 32, heads: int = 4, groups: int = 2) -> None:
        super().__init__()
        self.each = width // heads
        self.before, self.after = nn.RMSNorm(width, eps=1e-6), nn.RMSNorm(width, eps=1e-6)
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * groups * self.each, bias=False)
        self.up, self.down = nn.Linear(width, 96, bias=False), nn.Linear(48, width, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        b, n, _ = x.shape
        y = self.before(x)
        q, k, v = (one.view(b, n, -1, self.each).transpose(1, 2) for one in (self.q(y), *self.kv(y).chunk(2, -1)))

        def turned(t: torch.Tensor) -> torch.Tensor:
            first, second = t.chunk(2, -1)
            return t * cos + torch.cat([-second, first], -1) * sin

        mixed = F.scaled_dot_product_attention(turned(q), turned(k), v, is_causal=True, enable_gqa=True)
        x = x + self.o(mixed.transpose(1, 2).reshape(b, n, -1))
        gate, up = self.up(self.after(x)).chunk(2, -1)
        made: torch.Tensor = x + self.down(F.silu(gate) * up)
        return made


def test_a_decoder_block_with_named_sizes() -> None:
    torch.manual_seed(0)
    block = Decoder().eval()
    angles = torch.randn(6, 8)
    given = (torch.randn(2, 6, 32), angles.cos(), angles.sin())
    g = trace(block, *given, dynamic={"b": (0, 0), "n": [(0, 1), (1, 0), (2, 0)]})
    ops = [node.op for _, node in g.graph]
    assert (ops.count("attention"), ops.count("rms_norm"), g.graph.sizes) == (1, 2, {"b", "n"})
    for rows, count in ((2, 6), (3, 1), (1, 4)):
        now = (torch.randn(rows, count, 32), given[1][:count], given[2][:count])
        torch.testing.assert_close(g(*now), block(*now).detach(), rtol=1e-5, atol=1e-5)
