"""Indices out of range: read as zero, written nowhere, and raised once where the host next waits for the device."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from anytorch.gpu.buffers import bucket
from anytorch.gpu.transfer import ARENA, SMALL_READ


@pytest.fixture
def torch(webgpu: Any) -> Iterator[Any]:
    yield webgpu
    webgpu.webgpu.synchronize()  # nothing is left behind for the next test


@pytest.fixture
def checks(fresh_plans: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets `webgpu_checks` of the open device, which reads it once, for one test."""
    from anytorch.gpu.runtime import open_runtime

    return lambda value: monkeypatch.setattr(open_runtime().faults, "checks", value)


def on_device(torch: Any, values: Any, dtype: Any = None) -> Any:
    return torch.tensor(values, device="webgpu", dtype=dtype)


def embedding(torch: Any, i: Any) -> Any:
    return torch.nn.functional.embedding(i, torch.ones(3, 4, device=i.device))


def embedding_bag(torch: Any, i: Any) -> Any:
    return torch.nn.functional.embedding_bag(i.view(1, -1), torch.ones(3, 4, device=i.device))


def values(torch: Any, i: Any) -> Any:
    return torch.ones(i.numel(), device=i.device)


def three(torch: Any, i: Any) -> Any:
    return torch.ones(3, device=i.device)


def classes(torch: Any, i: Any) -> Any:
    return torch.zeros(i.numel(), 3, device=i.device)


# Each takes indices for a dimension of three and returns a tensor.
def unpooled(torch: Any, index: Any, rank: int) -> Any:
    """Two planes of three places: what is out of the first would be in the second."""
    places = index.view(*[1] * (rank + 1), -1).expand(1, 2, *[1] * (rank - 1), -1)
    unpool = torch.ops.aten.max_unpool2d if rank == 2 else torch.ops.aten.max_unpool3d
    more = () if rank == 2 else ((1, 1, 1), (0, 0, 0))
    return unpool(torch.ones(places.shape, device=index.device), places, (1,) * (rank - 1) + (3,), *more)


OPS: dict[str, Callable[[Any, Any], Any]] = {
    "embedding": embedding,
    "embedding_bag": embedding_bag,
    "index_select": lambda t, i: three(t, i).index_select(0, i),
    "index": lambda t, i: three(t, i)[i],
    "index of bytes": lambda t, i: three(t, i).to(t.uint8)[i],
    "index of the second dimension": lambda t, i: t.ones(2, 3, device=i.device)[:, i],
    "gather": lambda t, i: three(t, i).gather(0, i),
    "take": lambda t, i: three(t, i).take(i),
    "one_hot": lambda t, i: t.nn.functional.one_hot(i, 3),
    "index_put": lambda t, i: three(t, i).index_put_((i,), values(t, i)),
    "index_put accumulated": lambda t, i: three(t, i).index_put_((i,), values(t, i), accumulate=True),
    "put": lambda t, i: three(t, i).put_(i, values(t, i)),
    "scatter": lambda t, i: three(t, i).scatter_(0, i, values(t, i)),
    "scatter a number": lambda t, i: three(t, i).scatter_(0, i, 2.0),
    "scatter of halves": lambda t, i: three(t, i).half().scatter_(0, i, 2.0),
    "scatter_add": lambda t, i: three(t, i).scatter_add_(0, i, values(t, i)),
    "scatter_add of halves": lambda t, i: three(t, i).half().scatter_add_(0, i, values(t, i).half()),
    "scatter_reduce": lambda t, i: three(t, i).scatter_reduce_(0, i, values(t, i), "amax"),
    "scatter_reduce mean": lambda t, i: three(t, i).scatter_reduce_(0, i, values(t, i), "mean", include_self=False),
    "index_add": lambda t, i: three(t, i).index_add_(0, i, values(t, i)),
    "index_copy": lambda t, i: three(t, i).index_copy_(0, i, values(t, i)),
    "index_fill": lambda t, i: three(t, i).index_fill_(0, i, 2.0),
    "index_reduce": lambda t, i: three(t, i).index_reduce_(0, i, values(t, i), "prod"),
    "nll_loss": lambda t, i: t.nn.functional.nll_loss(classes(t, i), i),
    "nll_loss of a picture": lambda t, i: t.nn.functional.nll_loss(classes(t, i)[..., None, None], i[..., None, None]),
    "weighted nll_loss": lambda t, i: t.nn.functional.nll_loss(classes(t, i), i, three(t, i)),
    "cross_entropy": lambda t, i: t.nn.functional.cross_entropy(classes(t, i), i, reduction="none"),
    "multi_margin_loss": lambda t, i: t.nn.functional.multi_margin_loss(classes(t, i), i),
    "max_unpool2d": lambda t, i: unpooled(t, i, 2),
    "max_unpool3d": lambda t, i: unpooled(t, i, 3),
}  # fmt: skip
SECOND = "index of the second dimension"
WRAPPED = {"index", "index of bytes", SECOND, "take", "index_put", "index_put accumulated", "put"}
WIDE = {name for name in OPS if name not in {"one_hot", "embedding_bag"}}  # these read their indices by other ops too


def reported(torch: Any, name: str, indices: list[int], wrong: int) -> None:
    """The op goes unheard, the next wait raises, and the device computes as before."""
    index = on_device(torch, indices)
    result = OPS[name](torch, index)
    with pytest.raises(
        IndexError,
        match=rf"(aten\.\w+|embedding_bag).*(index|target) {wrong} is out of bounds for dimension \d with size 3",
    ):
        torch.webgpu.synchronize()
    torch.webgpu.synchronize()  # once
    assert result.cpu().shape == OPS[name](torch, on_device(torch, [0, 2])).cpu().shape


@pytest.mark.parametrize("name", OPS)
def test_every_op_reports_an_index_that_is_too_large(torch: Any, name: str) -> None:
    reported(torch, name, [1, 3], 3)


@pytest.mark.parametrize("name", OPS)
def test_every_op_reports_an_index_that_is_too_small(torch: Any, name: str) -> None:
    reported(torch, name, [1, -4], -4)
    if name in WRAPPED:
        OPS[name](torch, on_device(torch, [-1, -3]))
    else:
        reported(torch, name, [1, -1], -1)


@pytest.mark.parametrize("name", sorted(WIDE))
def test_every_op_reports_an_index_beyond_32_bits(torch: Any, name: str) -> None:
    """Its low half would be in range."""
    reported(torch, name, [1, 2**32 + 1], 2**32 + 1)
    reported(torch, name, [1, -(2**40)], -(2**40))


@pytest.mark.filterwarnings("ignore:index_reduce")
@pytest.mark.parametrize("name", OPS)
def test_every_op_is_quiet_in_range(torch: Any, name: str) -> None:
    index = torch.tensor([0, 2])
    torch.testing.assert_close(OPS[name](torch, index.to("webgpu")).cpu(), OPS[name](torch, index))


@pytest.mark.native
@pytest.mark.parametrize("dtype", ["int32", "uint8"])
def test_narrow_indices(torch: Any, dtype: str) -> None:
    bad = on_device(torch, [0, 200], getattr(torch, dtype))
    scores = torch.zeros(2, 3, device="webgpu")
    loss = torch.nn.functional.nll_loss(scores, bad) if dtype == "uint8" else scores.index_select(1, bad)
    with pytest.raises(IndexError, match="200 is out of bounds"):
        loss.cpu()


@pytest.mark.parametrize("nbytes", [4, SMALL_READ - 32, SMALL_READ, ARENA - 4, ARENA, ARENA + 4, 2 * ARENA + 8])
def test_a_report_comes_with_any_read_and_the_read_is_whole(torch: Any, nbytes: int) -> None:
    """The words travel in the last staging buffer, whatever its size."""
    x = torch.arange(nbytes // 4, dtype=torch.int32, device="webgpu")
    three = torch.ones(3, device="webgpu")
    three[on_device(torch, [2])]
    assert torch.equal(x.cpu(), torch.arange(nbytes // 4, dtype=torch.int32))
    three[on_device(torch, [3])]
    with pytest.raises(IndexError, match="index 3"):
        x.cpu()
    assert torch.equal(x.cpu(), torch.arange(nbytes // 4, dtype=torch.int32))


@pytest.mark.parametrize("wait", ["item", "cpu", "tolist", "synchronize", "copy", "bool", "nonzero"])
def test_every_wait_raises(torch: Any, wait: str) -> None:
    other = torch.ones(1, device="webgpu")
    host = torch.empty(1)
    waits: dict[str, Callable[[], object]] = {
        "item": other.item,
        "cpu": other.cpu,
        "tolist": other.tolist,
        "synchronize": torch.webgpu.synchronize,
        "copy": lambda: host.copy_(other),
        "bool": lambda: bool(other > 0),
        "nonzero": other.nonzero,
    }
    other[on_device(torch, [7])]
    with pytest.raises(IndexError, match=r"index 7 is out of bounds for dimension 0 with size 1.*CHECKS=now"):
        waits[wait]()
    waits[wait]()


def test_the_first_index_is_told_with_its_dimension(torch: Any) -> None:
    x = torch.ones(3, 4, 5, device="webgpu")
    x[on_device(torch, [0, 1]), :, on_device(torch, [0, 9])]
    x[on_device(torch, [8])]
    with pytest.raises(IndexError, match=r"aten\.index\.Tensor: index 9 is out of bounds for dimension 2 with size 5"):
        x.cpu()
    assert x.cpu().sum() == 60


def test_memory_outside_is_not_touched(torch: Any) -> None:
    x = torch.arange(1.0, 7.0, device="webgpu").view(2, 3)
    guard = torch.full((8,), 9.0, device="webgpu")
    bad = on_device(torch, [1, 2, -3, 2**40])
    read, y, z = x[bad], x.clone(), x.clone()
    y[bad] = -1.0
    z.scatter_add_(0, bad.view(4, 1), torch.ones(4, 3, device="webgpu"))
    with pytest.raises(IndexError):
        torch.webgpu.synchronize()
    assert read.cpu().tolist() == [[4.0, 5.0, 6.0], [0.0] * 3, [0.0] * 3, [0.0] * 3]
    assert y.cpu().tolist() == [[1.0, 2.0, 3.0], [-1.0] * 3]
    assert z.cpu().tolist() == [[1.0, 2.0, 3.0], [5.0, 5.0, 6.0]]
    assert guard.cpu().tolist() == [9.0] * 8


@pytest.mark.parametrize("name", ["embedding", "index_select", "index", "gather", "take"])
def test_an_empty_dimension_has_no_index(torch: Any, name: str) -> None:
    empty, index = torch.ones(0, 2, device="webgpu"), on_device(torch, [0])
    calls: dict[str, Callable[[], object]] = {
        "embedding": lambda: torch.nn.functional.embedding(index, empty),
        "index_select": lambda: empty.index_select(0, index),
        "index": lambda: empty[index],
        "gather": lambda: empty.gather(0, index.view(1, 1)),
        "take": lambda: empty.take(index),
    }
    with pytest.raises(IndexError):
        calls[name]()
    with pytest.raises(IndexError):
        torch.ones(0, device="webgpu").scatter_(0, index, 1.0)


def test_recorded_graphs_report_at_every_replay(torch: Any) -> None:
    weight, index = torch.randn(3, 4, device="webgpu"), on_device(torch, [0, 1])
    torch.nn.functional.embedding(index, weight).sum(1)  # compiled before it is recorded
    graph = torch.webgpu.Graph()
    with graph:
        sums = torch.nn.functional.embedding(index, weight).sum(1)
    for _ in range(2):
        index.copy_(torch.tensor([2, 5]))
        graph.replay()
        with pytest.raises(IndexError, match=r"embedding.*index 5"):
            sums.cpu()
        index.copy_(torch.tensor([2, 0]))
        graph.replay()
        torch.testing.assert_close(sums.cpu(), weight.cpu()[[2, 0]].sum(1))
    graph.close()


def test_long_graphs_and_the_recording_itself_report(torch: Any) -> None:
    x, index = torch.ones(3, device="webgpu"), on_device(torch, [3])
    graph = torch.webgpu.Graph()
    with graph:
        for _ in range(70):  # so many launches in a row are encoded by C++
            y = x[index]
    with pytest.raises(IndexError):
        torch.webgpu.synchronize()
    graph.replay()
    with pytest.raises(IndexError):
        y.cpu()
    graph.close()


def test_a_graph_without_indices_needs_no_look(torch: Any) -> None:
    from anytorch.gpu.runtime import open_runtime

    x = torch.ones(3, device="webgpu")
    x + 1
    torch.webgpu.synchronize()
    graph = torch.webgpu.Graph()
    with graph:
        x.add_(1)
    graph.replay()
    assert not open_runtime().faults.pending
    graph.close()


def test_backward_and_a_compiled_function_report(torch: Any) -> None:
    weight = torch.ones(3, 4, device="webgpu", requires_grad=True)
    torch.nn.functional.embedding(on_device(torch, [0, 4]), weight).sum().backward()
    with pytest.raises(IndexError, match="index 4"):
        weight.grad.cpu()
    assert weight.grad.cpu().sum() == 4

    compiled = torch.compile(lambda w, i: torch.nn.functional.embedding(i, w) * 2 + 1, backend="anytorch")
    compiled(weight.detach(), on_device(torch, [0, 1])).cpu()
    result = compiled(weight.detach(), on_device(torch, [0, 4]))
    with pytest.raises(IndexError, match="index 4"):
        result.cpu()


def test_a_search_does_not_swallow_a_report(torch: Any) -> None:
    """It tries candidates and goes on after any error, and so does a recall: an earlier op's must come before that."""
    for _ in ("searched", "recalled"):
        torch.ones(3, device="webgpu")[on_device(torch, [3])]
        compiled = torch.compile(lambda x: (x * 2 + 1).softmax(-1) * 3, backend="anytorch")
        with pytest.raises(IndexError, match="index 3"):
            compiled(torch.ones(5, 77, device="webgpu")).cpu()
        compiled(torch.ones(5, 77, device="webgpu")).cpu()
        torch._dynamo.reset()


def test_memory_pressure_leaves_the_report_to_who_waits(torch: Any) -> None:
    torch.ones(3, device="webgpu")[on_device(torch, [3])]
    torch.webgpu.empty_cache()
    with pytest.raises(IndexError, match="index 3"):
        torch.webgpu.synchronize()


def test_a_report_of_another_thread_is_raised_once(torch: Any) -> None:
    x, index = torch.ones(3, device="webgpu"), on_device(torch, [3])
    raised: list[str] = []

    def work() -> None:
        for _ in range(20):
            try:
                x[index].cpu()
            except IndexError as exc:
                raised.append(str(exc))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with suppress(IndexError):  # of a launch that was recorded while another thread read
        torch.webgpu.synchronize()
    assert raised and len(raised) <= 80 and all("index 3 is out of bounds" in said for said in raised)
    assert x[on_device(torch, [2])].item() == 1.0


@pytest.mark.parametrize("name", OPS)
def test_now_raises_at_the_op(torch: Any, checks: Callable[[str], None], name: str) -> None:
    checks("now")
    with pytest.raises(IndexError, match=r"3 is out of bounds for dimension \d with size 3$"):
        OPS[name](torch, on_device(torch, [1, 3]))
    OPS[name](torch, on_device(torch, [1, 2]))


def test_off_says_nothing_and_binds_nothing(torch: Any, checks: Callable[[str], None]) -> None:
    from anytorch.gpu.runtime import open_runtime

    checks("off")
    x = torch.ones(3, device="webgpu")
    assert x[on_device(torch, [0, 3])].cpu().tolist() == [1.0, 0.0]
    assert torch.nn.functional.nll_loss(torch.zeros(1, 3, device="webgpu"), on_device(torch, [3])).isnan().item()
    assert not open_runtime().faults.pending


def test_an_adapter_that_binds_no_more_reports_nothing(
    torch: Any, fresh_plans: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anytorch.gpu.runtime import open_runtime
    from anytorch.webgpu.faults import BINDS

    monkeypatch.setitem(open_runtime().limits, BINDS, 3)
    x = torch.ones(3, device="webgpu")
    assert x[on_device(torch, [0, 3])].cpu().tolist() == [1.0, 0.0]


def test_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    from anytorch import settings
    from anytorch.errors import ConfigError

    assert settings.get("webgpu_checks") == "on"
    for text, value in (("1", "on"), ("off", "off"), ("0", "off"), ("NOW", "now"), ("true", "on")):
        monkeypatch.setenv("ANYTORCH_WEBGPU_CHECKS", text)
        assert settings.get("webgpu_checks") == value
    monkeypatch.setenv("ANYTORCH_WEBGPU_CHECKS", "sometimes")
    with pytest.raises(ConfigError, match="use on, off or now"):
        settings.get("webgpu_checks")


def test_the_buffer_counts_as_nobodys_memory(torch: Any) -> None:
    from anytorch.gpu.runtime import open_runtime

    runtime = open_runtime()
    before = torch.webgpu.memory_allocated()
    assert runtime.faults.buffer.nbytes == bucket(32)
    assert torch.webgpu.memory_allocated() == before
    torch.webgpu.empty_cache()
    assert runtime.faults.buffer.key in runtime.buffers
