"""Each family of the webgpu device's operations on a real GPU's own driver, forward and backward, against the CPU.

The same agreement as in tests/webgpu, on few and larger shapes, and without any fallback to the CPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pytest
import torch
import torch.nn.functional as F
from tests.webgpu.agree import agree
from torch import nn

pytestmark = pytest.mark.device


@pytest.fixture(scope="module", autouse=True)
def webgpu(missing: Callable[[str, str], NoReturn]) -> Iterator[None]:
    """The device, on a GPU; a software adapter stands in for one only where the CPU does."""
    pytest.importorskip("wgpu")
    from anytorch.errors import DeviceUnavailable

    try:
        import anytorch.webgpu  # noqa: F401  (registers the device)
        from anytorch.gpu.runtime import open_runtime

        runtime = open_runtime()
    except DeviceUnavailable as exc:
        missing("webgpu-adapter", str(exc))
    if runtime.adapter.kind == "CPU" and os.environ.get("ANYTORCH_TEST_DEVICE") != "cpu":
        missing("webgpu-gpu", f"{runtime.adapter.name} is a software adapter")
    yield
    torch.webgpu.synchronize()  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def no_fallback(isolation: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYTORCH_WEBGPU_FALLBACK", "error")


def x(*shape: int, seed: int = 0, grad: bool = True) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def whole(*shape: int, high: int = 8) -> torch.Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(1))


CASES: dict[str, tuple[Callable[..., Any], list[torch.Tensor]]] = {
    "arithmetic": (lambda a, b: (a + b) * (a - 2) / (b.abs() + 1), [x(64, 33), x(33, seed=2)]),
    "elementary functions": (lambda a: (a.exp(), a.sin(), a.tanh(), a.abs().add(1).log().sqrt()), [x(37, 41)]),
    "strided and broadcast": (lambda a, b: a.t() + b.expand(41, 37), [x(37, 41), x(41, 1, seed=3)]),
    "whole numbers": (lambda a, b: (a + b, a * b, a // (b + 1), a & b, a << 2), [whole(100), whole(100, high=5)]),
    "comparison and where": (lambda a, b: torch.where(a > b, a, b * 2), [x(50, 20), x(50, 20, seed=4)]),
    "activations": (lambda a: (F.gelu(a), F.silu(a), F.relu(a), F.softplus(a), F.leaky_relu(a)), [x(40, 50)]),
    "matmul": (torch.matmul, [x(130, 70), x(70, 90, seed=5)]),
    "batched matmul": (torch.matmul, [x(4, 33, 65), x(4, 65, 17, seed=6)]),
    "linear": (F.linear, [x(5, 64), x(96, 64, seed=7), x(96, seed=8)]),
    "matrix and vector": (lambda a, b: a @ b, [x(200, 300), x(300, seed=9)]),
    "convolution": (
        lambda a, w, b: F.conv2d(a, w, b, stride=2, padding=1), [x(2, 3, 17, 19), x(8, 3, 3, 3, seed=10), x(8, seed=11)]
    ),
    "transposed convolution": (lambda a, w: F.conv_transpose2d(a, w, stride=2), [x(1, 4, 7, 9), x(4, 3, 3, 3, seed=12)]),
    "reductions": (lambda a: (a.sum(0), a.mean(1), a.amax(), a.var(1), a.prod(1)), [x(60, 7)]),
    "arg reductions": (lambda a: (a.argmax(1), a.argmin(0), a.any(), (a > 3).sum()), [x(60, 70, grad=False)]),
    "norms": (lambda a, w, b: F.layer_norm(a, (48,), w, b), [x(30, 48), x(48, seed=13), x(48, seed=14)]),
    "group norm": (lambda a, w, b: F.group_norm(a, 2, w, b), [x(3, 8, 5, 6), x(8, seed=15), x(8, seed=16)]),
    "batch norm": (lambda a, w, b: F.batch_norm(a, None, None, w, b, True), [x(9, 4, 5), x(4, seed=17), x(4, seed=18)]),
    "rms norm": (lambda a, w: F.rms_norm(a, (48,), w), [x(30, 48), x(48, seed=19)]),
    "softmax": (lambda a: (a.softmax(-1), a.log_softmax(0)), [x(33, 257)]),
    "attention": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        [x(2, 4, 65, 32), x(2, 4, 65, 32, seed=20), x(2, 4, 65, 32, seed=21)],
    ),
    "losses": (lambda a, b: F.cross_entropy(a, b), [x(40, 8), whole(40)]),
    "pointwise losses": (lambda a, b: F.smooth_l1_loss(a, b) + F.mse_loss(a, b), [x(40, 8), x(40, 8, seed=22)]),
    "pooling": (lambda a: (F.max_pool2d(a, 3, 2, 1), F.avg_pool2d(a, 2)), [x(2, 3, 13, 14)]),
    "adaptive pooling": (lambda a: F.adaptive_avg_pool2d(a, (3, 5)), [x(2, 3, 13, 14)]),
    "resampling": (lambda a: F.interpolate(a, scale_factor=2, mode="bilinear", align_corners=False), [x(1, 3, 7, 9)]),
    "indexing": (lambda a, i: (a[i], a.index_select(1, i), a[:, 2:9:3]), [x(20, 21), whole(15, high=20)]),
    "gathering": (lambda a, i: a.gather(1, i), [x(20, 21), whole(20, 5, high=21)]),
    "scattering": (lambda a, i, b: a.scatter_add(1, i, b), [x(20, 9), whole(20, 5, high=9), x(20, 5, seed=23)]),
    "embedding": (lambda w, i: F.embedding(i, w), [x(50, 16), whole(7, 9, high=50)]),
    "shapes": (lambda a, b: (torch.cat([a, b], 1), torch.stack([a, a]), a.flip(0), a.roll(2, 1)), [x(9, 8), x(9, 3)]),
    "padding": (lambda a: (F.pad(a, (1, 2)), F.pad(a[None], (2, 1), mode="reflect")), [x(5, 8)]),
    "scans": (lambda a: (a.cumsum(1), a.cumsum(0)), [x(7, 600)]),
    "sorting": (lambda a: (a.sort(1).values, a.topk(5, 1).values), [x(9, 300)]),
    "masks": (lambda a: (a.tril(), a.triu(1), a.masked_fill(a > 0, -1.0)), [x(30, 40)]),
    "creation": (lambda a: torch.arange(40, device=a.device) * 2 + torch.ones_like(a[0]).long(), [x(3, 40, grad=False)]),
    "half": (lambda a, b: a.half() @ b.half(), [x(40, 64, grad=False), x(64, 24, seed=24, grad=False)]),
    "bfloat16": (lambda a, b: a.bfloat16() * b.bfloat16(), [x(40, 64, grad=False), x(40, 64, seed=25, grad=False)]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_family(name: str) -> None:
    function, tensors = CASES[name]
    loose = {"half": 2e-2, "bfloat16": 2e-2}.get(name, 1e-4)
    agree(function, *tensors, rtol=loose, atol=max(1e-4, loose))


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers(kind: str) -> None:
    torch.manual_seed(0)
    host = getattr(nn, kind)(6, 8, num_layers=2)
    wanted = host(x(5, 3, 6))[0]
    found = host.to("webgpu")(x(5, 3, 6).detach().to("webgpu"))[0]
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop"])
def test_optimizers(kind: str) -> None:
    """Three steps of a small network: forward, losses, backward and the fused updates."""
    options = {"momentum": 0.9} if kind == "SGD" else {}
    found = []
    for device in ("cpu", "webgpu"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4)).to(device)
        optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, **options)
        for step in range(3):
            given = x(24, 16, seed=step, grad=False).to(device)
            optimizer.zero_grad()
            F.cross_entropy(model(given), whole(24, high=4).to(device)).backward()
            optimizer.step()
        found.append([parameter.detach().cpu() for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-3)


def test_a_transformer_layer() -> None:
    torch.manual_seed(0)
    host = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True).eval()
    given = x(3, 17, 32, grad=False)
    with torch.no_grad():
        wanted = host(given)
        found = host.to("webgpu")(given.to("webgpu"))
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-3, atol=1e-4)


def test_a_recorded_graph_and_a_compiled_one() -> None:
    a = x(33, 33, grad=False)
    there = a.to("webgpu")
    graph: Any = torch.webgpu.Graph()  # type: ignore[attr-defined]
    with graph:
        y = (there @ there).relu() @ there + 1
    for scale in (1.0, 0.5):
        there.copy_(a * scale)
        graph.replay()
        host = a * scale
        torch.testing.assert_close(y.cpu(), (host @ host).relu() @ host + 1, rtol=1e-3, atol=1e-3)


def test_random_numbers_are_of_their_kinds() -> None:
    torch.manual_seed(0)
    uniform, normal = torch.rand(20_000, device="webgpu").cpu(), torch.randn(20_000, device="webgpu").cpu()
    assert float(uniform.min()) >= 0 and float(uniform.max()) < 1 and abs(float(uniform.mean()) - 0.5) < 0.02
    assert abs(float(normal.mean())) < 0.05 and abs(float(normal.std()) - 1) < 0.05
    dropped = F.dropout(torch.ones(20_000, device="webgpu"), 0.25).cpu()
    assert abs(float((dropped == 0).float().mean()) - 0.25) < 0.02


INDICES: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "index": lambda table, rows: table[rows],
    "index_select": lambda table, rows: table.index_select(0, rows),
    "gather": lambda table, rows: table.gather(0, rows[:, None].expand(-1, table.shape[1])),
    "embedding": lambda table, rows: F.embedding(rows, table),
    "index_add": lambda table, rows: table.index_add(0, rows, torch.ones(len(rows), table.shape[1], device="webgpu")),
}


@pytest.mark.parametrize("name", INDICES)
def test_an_index_out_of_range_is_reported_and_the_device_goes_on(name: str) -> None:
    """A GPU's own driver reads zeros there, or worse, and says nothing: the report must be ours."""
    table = torch.arange(40.0, device="webgpu").reshape(10, 4)
    with pytest.raises(IndexError, match="10"):
        INDICES[name](table, torch.tensor([1, 10, 3], device="webgpu"))
        torch.webgpu.synchronize()  # type: ignore[attr-defined]
    rows = torch.tensor([1, 9, 3], device="webgpu")
    torch.testing.assert_close(INDICES["index"](table, rows).cpu(), table.cpu()[rows.cpu()], rtol=0, atol=0)


HALVES = [torch.float16, torch.bfloat16]


@pytest.fixture
def matrix_cores(missing: Callable[[str, str], NoReturn]) -> Iterator[None]:
    """Products run on the GPU's matrix cores whatever is faster."""
    from anytorch import settings
    from anytorch.gpu.plans import plans
    from anytorch.gpu.runtime import open_runtime

    if why := open_runtime().matrix_cores.why_not:
        missing("matrix-cores", why)
    plans.clear()
    with settings.use(webgpu_matrix_cores="on"):
        yield
    plans.clear()


def close_in_half(function: Callable[..., torch.Tensor], *inputs: torch.Tensor, dtype: torch.dtype) -> None:
    rounded = [one.detach().to(dtype) for one in inputs]
    wanted = function(*(one.double() for one in rounded))
    answer = function(*(one.to("webgpu") for one in rounded)).cpu().double()
    assert float((answer - wanted).norm() / wanted.norm()) < (1e-3 if dtype is torch.float16 else 8e-3)


@pytest.mark.parametrize("dtype", HALVES, ids=["float16", "bfloat16"])
@pytest.mark.parametrize(("m", "n", "k"), [(256, 256, 256), (200, 136, 72), (123, 77, 211), (64, 96, 8192)])
def test_products_on_matrix_cores(matrix_cores: None, dtype: torch.dtype, m: int, n: int, k: int) -> None:
    a, b = x(m, k), x(k, n, seed=1)
    close_in_half(torch.mm, a, b, dtype=dtype)
    close_in_half(lambda a, b: a.t() @ b.t(), x(k, m), x(n, k, seed=1), dtype=dtype)
    close_in_half(lambda a, b, d: torch.addmm(d, a, b, beta=0.5, alpha=2.0), a, b, x(n, seed=2), dtype=dtype)
    close_in_half(torch.bmm, x(3, m, k), x(3, k, n, seed=1), dtype=dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("queries", "keys", "dimension"), [(64, 64, 64), (100, 75, 64), (130, 130, 128), (40, 300, 32)]
)
def test_attention_on_matrix_cores(
    matrix_cores: None, dtype: torch.dtype, queries: int, keys: int, dimension: int
) -> None:
    attend = F.scaled_dot_product_attention
    q, k, v = x(2, 4, queries, dimension), x(2, 2, keys, dimension, seed=1), x(2, 2, keys, dimension, seed=2)
    close_in_half(lambda q, k, v: attend(q, k, v, enable_gqa=True), q, k, v, dtype=dtype)
    close_in_half(lambda q, k, v: attend(q, k, v, is_causal=True, enable_gqa=True), q, k, v, dtype=dtype)
    seen = torch.rand(queries, keys, generator=torch.Generator().manual_seed(3)) > 0.3
    close_in_half(lambda q, k, v: attend(q, k, v, seen.to(q.device), enable_gqa=True), q, k, v, dtype=dtype)
