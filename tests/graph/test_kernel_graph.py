"""`new_kernel_graph`: building by Mirage's names, calling, searching, remembering, explaining."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from torch.nn import functional as F

from anytorch import native, settings
from anytorch.devices.types import Caps
from anytorch.errors import GraphError, UnknownDevice, WrongAnswer
from anytorch.graph import KernelGraph, backs, new_kernel_graph, search, trace, verify
from anytorch.graph.back import cpp as back
from anytorch.graph.compiler import compile_graph
from anytorch.graph.emit import cpp_schedules
from anytorch.graph.emit.schedule import Schedule
from anytorch.graph.loops import Kernel
from anytorch.graph.search import EAGER, Search
from anytorch.measured import store
from tests.graph.cases import CASES

CPU = torch.device("cpu")


def _mlp() -> KernelGraph:
    g = new_kernel_graph(backend="cpu")
    x, w = g.new_input(("b", 64), dtype="float32", name="x"), g.new_input((64, 48), dtype=torch.float32)
    g.mark_output(g.silu(g.rms_norm(x) @ w) * 2 + 1)
    return g


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(4, 64), torch.randn(64, 48)]


def test_every_method_is_torchs_function() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(3, 8), torch.randn(3, 8).abs() + 0.5
    ids, table = torch.tensor([2, 0]), torch.randn(5, 8)
    g = new_kernel_graph()
    a, b = g.new_input((3, 8), dtype="float32"), g.new_input((3, 8), dtype="float32")
    i, t = g.new_input((2,), dtype="int64"), g.new_input((5, 8), dtype="float32")
    pairs: list[tuple[Any, torch.Tensor]] = [
        (g.add(a, b), x + y),
        (1 - a, 1 - x),
        (2 / b, 2 / y),
        (-a, -x),
        (b**2, y**2),
        (g.exp(a), x.exp()),
        (g.log(b), y.log()),
        (g.sqrt(b), y.sqrt()),
        (g.rsqrt(b), y.rsqrt()),
        (g.square(a), x.square()),
        (g.silu(a), F.silu(x)),
        (g.gelu(a), F.gelu(x)),
        (g.gelu(a, approximate="tanh"), F.gelu(x, approximate="tanh")),
        (g.relu(a), x.relu()),
        (g.sigmoid(a), x.sigmoid()),
        (g.tanh(a), x.tanh()),
        (g.clamp(a, -0.5, 0.5), x.clamp(-0.5, 0.5)),
        (g.clamp(a, max_val=0.1), x.clamp(max=0.1)),
        (g.reduction(a, 1), x.sum(1, keepdim=True)),
        (g.reduction(a, 0, "max", keepdim=False), x.amax(0)),
        (g.reduction(a, (0, 1), "mean"), x.mean((0, 1), keepdim=True)),
        (g.softmax(a), x.softmax(-1)),
        (g.rms_norm(a, (8,)), F.rms_norm(x, (8,), eps=1e-6)),
        (g.layer_norm(a), F.layer_norm(x, (8,))),
        (g.concat([a, b], dim=1), torch.cat([x, y], 1)),
        (g.concat(a, b, 0), torch.cat([x, y], 0)),
        (g.split(a, 4, dim=1)[1], x[:, 4:]),
        (g.split(a, [1, 7], dim=1)[0], x[:, :1]),
        (g.transpose(a, 0, 1), x.T),
        (g.reshape(a, (-1, 2)), x.reshape(-1, 2)),
        (g.expand(g.reshape(a, (3, 1, 8)), (3, 2, 8)), x[:, None].expand(3, 2, 8)),
        (g.embedding(t, i), table[ids]),
        (g.where(g.cast(g.relu(a), "bool"), a, 0.0), x.relu()),
        (g.maximum(a, b), torch.maximum(x, y)),
    ]
    for made, _ in pairs:
        g.mark_output(made)
    found = g(x, y, ids, table)
    for answer, (made, wanted) in zip(found, pairs, strict=True):
        torch.testing.assert_close(answer, wanted, msg=repr(made.node))


def test_a_graph_is_called_both_ways_and_searched(few: None, tensors: list[torch.Tensor], tmp_path: Path) -> None:
    g = _mlp()
    (plain,) = g(*tensors)
    torch.testing.assert_close(plain, F.silu(F.rms_norm(tensors[0], (64,), eps=1e-6) @ tensors[1]) * 2 + 1)
    assert "was not searched" in g.explain()
    assert g.superoptimize(sizes={"b": 4}, time_limit_s=60, config="mlp", griddims=None) is g
    (fast,) = g(inputs=tensors)
    torch.testing.assert_close(fast, plain, atol=1e-4, rtol=1e-5)
    said = g.explain()
    assert "eager torch" in said and "in one kernel" in said and "least bytes" in said
    assert " % of what is allowed" in said and "allowed: 8 times eager torch's largest error from float64" in said
    picture = g.visualize(tmp_path / "g.svg").read_text()
    assert picture.startswith("<svg") and "matmul" in picture and "lanes" in picture
    (other,) = g(torch.ones(2, 64), tensors[1])  # sizes that were not searched run through torch
    assert other.shape == (2, 48)


def test_a_graph_is_saved_and_read(tensors: list[torch.Tensor], tmp_path: Path) -> None:
    g = _mlp()
    for source in (g.to_json(tmp_path / "g.json"), tmp_path / "g.json"):
        again = KernelGraph.from_json(source)
        assert again.backend == "cpu" and torch.equal(again(*tensors)[0], g(*tensors)[0])
    with pytest.raises(GraphError, match="cannot be read"):
        KernelGraph.from_json(tmp_path / "none.json")
    with pytest.raises(GraphError, match="damaged"):
        KernelGraph.from_json("{")
    with pytest.raises(GraphError, match="nested too deeply"):
        KernelGraph.from_json('{"a":' * 100_000)
    (tmp_path / "g.json").write_bytes(b'{"format": \xff}')
    with pytest.raises(GraphError, match="is not UTF-8 text"):
        KernelGraph.from_json(tmp_path / "g.json")


def test_wrong_calls_name_the_input(tensors: list[torch.Tensor]) -> None:
    g = _mlp()
    x, w = tensors
    with pytest.raises(GraphError, match=r"input 0 \(x\) has dtype float64; the graph wants float32"):
        g(x.double(), w)
    with pytest.raises(GraphError, match=r"input 1 has shape \[48, 64\]; the graph wants \[64, 48\]"):
        g(x, w.T)
    with pytest.raises(GraphError, match="takes 2 inputs, not 1"):
        g(x)
    with pytest.raises(GraphError, match="input 1 is list, not a tensor"):
        g(x, [1])
    with pytest.raises(GraphError, match="not both"):
        g(x, w, inputs=[x, w])
    with pytest.raises(GraphError, match=r"input 1 is on meta"):
        g(x, w.to("meta"))
    strict = new_kernel_graph()
    strict.mark_output(strict.exp(strict.new_input((4, 8), strides=(1, 4), dtype="float32")))
    with pytest.raises(GraphError, match=r"input 0 has strides \(8, 1\); the graph wants \(1, 4\)"):
        strict(torch.ones(4, 8))
    assert strict(torch.ones(8, 4).T)[0].shape == (4, 8)


def test_wrong_graphs_are_refused() -> None:
    with pytest.raises(UnknownDevice, match="unknown back end 'tpu'; known: auto, cuda"):
        new_kernel_graph(backend="tpu")
    g, other = new_kernel_graph(), new_kernel_graph()
    x = g.new_input((4, 4))
    with pytest.raises(GraphError, match="no outputs"):
        g(torch.ones(4, 4))
    with pytest.raises(GraphError, match="belongs to another graph"):
        other.exp(x)
    with pytest.raises(GraphError, match="is not a tensor of a graph"):
        g.exp("x")  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="unknown dtype 'float8'"):
        g.new_input((4,), dtype="float8")
    with pytest.raises(GraphError, match=r"size 1\.5 is invalid"):
        g.new_input((1.5,))  # type: ignore[arg-type]
    g.mark_output(x * 2)
    with pytest.raises(GraphError, match="unknown options threads"):
        g.superoptimize(threads=4)
    with pytest.raises(GraphError, match="time_limit_s=0 is invalid"):
        g.superoptimize(time_limit_s=0)
    symbolic = _mlp()
    with pytest.raises(GraphError, match="sizes without a number: b"):
        symbolic.superoptimize()
    with pytest.raises(GraphError, match="unknown sizes: c"):
        symbolic.superoptimize(sizes={"b": 4, "c": 1})


def test_inputs_that_want_gradients_get_them(few: None, tensors: list[torch.Tensor]) -> None:
    g = _mlp().superoptimize(*tensors)
    assert next(iter(g._found.values())).program is not None
    (plain,) = g(*tensors)
    tensors[1].requires_grad_()
    (made,) = g(*tensors)
    made.sum().backward()  # type: ignore[no-untyped-call]
    assert tensors[1].grad is not None and torch.allclose(made, plain, atol=1e-4)
    with torch.no_grad():
        assert not g(*tensors)[0].requires_grad


def test_a_result_is_never_an_input(tensors: list[torch.Tensor]) -> None:
    x = tensors[0]
    same, other = trace(lambda x: (x.clone(), x * 2), x)(x)
    same.zero_()
    assert x.abs().sum() > 0 and torch.equal(other, x * 2)


def test_a_search_that_was_stopped_is_repeated_by_who_has_time(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, known = CASES["gated mlp"]()
    plain = Search._try

    def stopped(self: Search, *args: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Search, "_try", stopped)
    first = Search(graph, known, CPU, 60).run()
    assert first.program is None and first.verdict is not None and first.verdict.budget_s < 60
    monkeypatch.setattr(Search, "_try", plain)
    assert Search(graph, known, CPU, 60).run().program is not None


def test_schedules_that_there_was_no_time_for_are_tried_when_there_is(
    few: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, known = CASES["gated mlp"]()
    some = search.back_of(CPU)[0]
    assert some is not None
    many = replace(some, candidates=lambda kernel, known, most: back.candidates(kernel, known, 2))
    monkeypatch.setattr(search, "back_of", lambda device: (many, ""))
    compiled = Search._compiled
    monkeypatch.setattr(Search, "_compiled", lambda self, *args: {args[2][0].name})  # time for the first one alone
    short = Search(graph, known, CPU, 60).run()
    assert [one.refused for one in short.kernels[0].trials] == ["", search.NO_TIME]
    monkeypatch.setattr(Search, "_compiled", compiled)
    longer = Search(graph, known, CPU, 120, quick=True).run()  # another search, the same kernels
    assert [one.refused for one in longer.kernels[0].trials] == ["", ""]


def test_a_program_of_kernels_that_were_cut_short_is_no_last_word(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, known = CASES["gated mlp"]()
    some = search.back_of(CPU)[0]
    assert some is not None
    two = replace(some, candidates=lambda kernel, known, most: back.candidates(kernel, known, 2))
    monkeypatch.setattr(search, "back_of", lambda device: (two, ""))
    with monkeypatch.context() as short:
        short.setattr(Search, "_compiled", lambda self, *args: {args[2][0].name})  # time for the first one alone
        first = Search(graph, known, CPU, 60, quick=True).run()
    assert first.verdict is not None and first.verdict.cut_short and first.kernels[0].cut_short
    assert all(one.refused != search.NO_TIME for one in first.verdict.trials)  # no program was
    store.forget()  # as in another process
    again = Search(graph, known, CPU, 60, quick=True).run().verdict
    assert again is not None and again.remembered and again.cut_short
    longer = Search(graph, known, CPU, 90, quick=True).run()
    assert longer.verdict is not None and not longer.verdict.remembered and not longer.verdict.cut_short
    assert not any(one.cut_short for one in longer.kernels)


def test_what_goes_wrong_in_a_search_leaves_torch(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler's bug or a lack of memory ends no call that eager torch can serve."""
    graph, known = CASES["gated mlp"]()

    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(search.verify, "check", full)
    found = Search(graph, known, CPU, 60).run()
    assert found.program is None and found.verdict is not None


def test_every_call_is_checked_even_after_one_that_was_right(few: None, tensors: list[torch.Tensor]) -> None:
    x, w = tensors
    g = _mlp().superoptimize(x, w)
    g(x, w)
    for wrong, said in (((x.double(), w), "input 0"), ((x,), "takes 2 inputs"), ((x, 3), "not a tensor")):
        with pytest.raises(GraphError, match=said):
            g(*wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", verify.KINDS)
def test_what_was_found_is_remembered_and_checked_again(few: None, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    graph, known = CASES["gated mlp"]()
    first = Search(graph, known, CPU, 60, quick=True).run()
    assert first.program is not None and first.verdict is not None and first.verdict.chosen != EAGER
    checks: list[Sequence[str]] = []
    plain = verify.check

    def counted(*args: Any) -> float:
        checks.append(args[4] if len(args) > 4 else verify.KINDS)
        return plain(*args)

    def slow(*args: Any) -> Any:
        raise AssertionError("a recall neither writes schedules that it does not use nor asks what the machine is")

    monkeypatch.setattr(search.verify, "check", counted)
    with monkeypatch.context() as recalling:
        recalling.setattr(cpp_schedules, "render", slow)
        recalling.setattr(search, "Clock", slow)
        again = Search(graph, known, CPU, 60, quick=True).run()
    assert again.verdict is not None and again.verdict.remembered and again.program is not None
    assert not checks  # the same bits as then
    # A kernel that computes something else today, as from a damaged cache, is neither believed nor used: also if it shows
    # on one kind of inputs alone, as that of another compiler would whose exponential overflows sooner.
    honest = search.back_of(CPU)[0]
    assert honest is not None

    def prepare(kernel: Kernel, schedule: Schedule) -> Any:
        launch = honest.prepare(kernel, schedule)

        def broken(tensors: Sequence[torch.Tensor], known: dict[str, int]) -> None:
            launch(tensors, known)
            for tensor, buffer in zip(tensors, kernel.buffers, strict=True):
                if buffer.written and any(kind_of(one) == kind for one in tensors if one is not tensor):
                    tensor.view(-1)[0] += 1.0 + tensor.abs().max()

        return broken

    def kind_of(tensor: torch.Tensor) -> str:
        largest = float(tensor.abs().max())
        ones = bool(((tensor == 0) | (tensor == 1)).all())
        return "one-hot" if ones else "large" if largest > 20 else "tiny" if largest < 0.01 else "normal"

    monkeypatch.setattr(search, "back_of", lambda device: (replace(honest, prepare=prepare), ""))
    damaged = Search(graph, known, CPU, 60, quick=True).run()
    assert checks[0] == verify.KINDS and damaged.program is None


def test_a_search_that_was_cut_short_is_no_last_word(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, known = CASES["gated mlp"]()
    plain, tried = Search._try, []

    def stopped(self: Search, *args: Any) -> None:
        tried.append(args[1].name)
        if len(tried) == 2:
            raise KeyboardInterrupt
        plain(self, *args)

    monkeypatch.setattr(Search, "_try", stopped)
    first = Search(graph, known, CPU, 60, quick=True).run()
    assert len(tried) == 2 and first.program is not None and first.verdict is not None and first.verdict.cut_short
    again = Search(graph, known, CPU, 60, quick=True).run()
    assert len(tried) == 4 and again.verdict is not None and not again.verdict.cut_short
    assert Search(graph, known, CPU, 90, quick=True).run().verdict.remembered  # type: ignore[union-attr]
    assert len(tried) == 4


@pytest.mark.parametrize("kind", ["wrong", "unfinished", "raises"])
def test_a_planted_wrong_kernel_is_refused_and_eager_stays(
    few: None, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    honest = search.back_of(CPU)[0]
    assert honest is not None

    def prepare(kernel: Kernel, schedule: Schedule) -> Any:
        launch = honest.prepare(kernel, schedule)

        def broken(tensors: Sequence[torch.Tensor], known: dict[str, int]) -> None:
            if kind == "raises":
                raise WrongAnswer("the device is gone")
            if kind == "wrong":
                launch(tensors, known)
                place = next(n for n, buffer in enumerate(kernel.buffers) if buffer.written)
                tensors[place].view(-1)[-1] += 1.0

        return broken

    planted = replace(honest, prepare=prepare)
    monkeypatch.setattr(search, "back_of", lambda device: (planted, ""))
    graph, known = CASES["gated mlp"]()
    found = Search(graph, known, CPU, 60, quick=True).run()
    assert found.program is None and found.verdict is not None and found.verdict.chosen == EAGER
    refused = [one.refused for one in found.verdict.trials if one.name != EAGER]
    assert refused and all("off by" in one or "the device is gone" in one for one in refused)


def test_a_missing_compiler_leaves_torch_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tensors: list[torch.Tensor], tmp_path: Path
) -> None:
    """Once, however many graphs are searched: torch.compile has one for every region of a model."""
    said: list[str] = []
    monkeypatch.setattr(search.log, "warning", lambda text, *args: said.append(text % args))
    monkeypatch.setattr(back, "_pool", lambda cache, level: None)
    search._say_once.cache_clear()
    with settings.use(compiler="a-compiler-that-is-not-here", cache_dir=str(tmp_path)):
        for _ in range(2):
            g = _mlp()
            g.superoptimize(sizes={"b": 4})
            assert "a-compiler-that-is-not-here" in g.explain() and g(*tensors)[0].shape == (4, 48)
        compiled = torch.compile(lambda x: torch.tanh(x * 3) + 1, backend=compile_graph)
        x = torch.randn(3, 5)
        torch.testing.assert_close(compiled(x), torch.tanh(x * 3) + 1)
    assert len(said) == 1 and "through torch" in said[0] and "a-compiler-that-is-not-here" in said[0]


@pytest.mark.parametrize(
    ("no_triton", "said"),
    [("Triton is not installed: pip install triton", "Triton is not installed"), ("", "no emitter for such a device")],
)
def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch, no_triton: str, said: str) -> None:
    caps = Caps(("float32",), ("float32",), None, no_triton=no_triton)
    monkeypatch.setattr(backs, "locate", lambda device: (SimpleNamespace(caps=lambda index: caps), 0))
    back, why = backs.back_of(torch.device("cuda:0"))
    assert back is None and said in why and "cuda:0" in why


def test_a_norms_weight_may_come_second() -> None:
    def keys(norm: str, *ways: Any) -> set[str]:
        found = set()
        for way in ways:
            g = new_kernel_graph(backend="cpu")
            x, w, b = (g.new_input(shape, dtype="float32") for shape in ((3, 8), (8,), (8,)))
            g.mark_output(way(getattr(g, norm), x, w, b))
            found.add(g.graph.key)
        return found

    ways = (lambda f, x, w, b: f(x, w), lambda f, x, w, b: f(x, 8, w), lambda f, x, w, b: f(x, (8,), weight=w))
    assert len(keys("rms_norm", *ways)) == 1 and len(keys("layer_norm", *ways)) == 1
    ways = (lambda f, x, w, b: f(x, w, b), lambda f, x, w, b: f(x, (8,), w, b), lambda f, x, w, b: f(x, w, bias=b))
    assert len(keys("layer_norm", *ways)) == 1
    for norm, way in (("rms_norm", lambda f, x, w, b: f(x, w, b)), ("layer_norm", lambda f, x, w, b: f(x, w, b, b))):
        with pytest.raises(GraphError, match="has two weights"):
            keys(norm, way)


def test_sizes_and_layouts_that_are_none_are_told() -> None:
    g = new_kernel_graph(backend="cpu")
    wrong_dims: tuple[Any, ...] = (3, "ab", None)
    for dims in wrong_dims:
        with pytest.raises(GraphError, match="pass a list or tuple of sizes"):
            g.new_input(dims)
    x = g.new_input(("b", 3), dtype="float32")
    g.mark_output(g.exp(x))
    with pytest.raises(GraphError, match="input 0 has layout sparse_coo"):
        g(torch.eye(3).to_sparse())
    for number in (-2, 2.5, "2", None):
        with pytest.raises(GraphError, match="size b="):
            g.superoptimize(sizes={"b": number})  # type: ignore[dict-item]


def test_autocast_changes_no_graph() -> None:
    """A graph says what dtype every op has, and is compared with what it says."""
    g = new_kernel_graph()
    x, w = g.new_input((5, 33), dtype="float32"), g.new_input((33, 9), dtype="float32")
    g.mark_output(g.exp(g.matmul(x, w) * 0.1))
    inputs = [torch.randn(5, 33), torch.randn(33, 9)]
    wanted = torch.exp(inputs[0] @ inputs[1] * 0.1)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(g(*inputs)[0], wanted)
            g.superoptimize(*inputs, time_limit_s=0.1)


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda g, x: g.sub(x, g._op("gt", x, 0.0)), r"sub of float32\[b, 5\] and bool\[b, 5\] is invalid"),
        (lambda g, x: g.pow(g._op("gt", x, 0.0), g._op("lt", x, 0.0)), "pow of bool.* it needs numbers, not bools"),
        (lambda g, x: g.reshape(x, 5), "reshape of .* to 5 is invalid: pass a list"),
        (lambda g, x: g.clamp(x, "a"), "clamp: 'a' is invalid: use a number"),
        (lambda g, x: g.rms_norm(x, eps="a"), "rms_norm: eps='a' is invalid"),
        (lambda g, x: g.new_input((2,), strides=("a",)), "strides=.* is invalid: pass whole numbers"),
        (lambda g, x: g(None, torch.ones(2, 5)), "input 0 is NoneType, not a tensor"),
        (lambda g, x: g.superoptimize(sizes=[8]), "pass a dict such as"),
        (lambda g, x: g.superoptimize(sizes={"b": "8"}), "size b='8' is invalid: use a whole number"),
        (lambda g, x: g.superoptimize(sizes={"b": 8}, time_limit_s="a"), "time_limit_s='a' is invalid: use a number"),
    ],
)
def test_what_is_wrong_with_an_argument_is_told(build: Any, said: str) -> None:
    g = new_kernel_graph()
    x = g.new_input(("b", 5), dtype="float32")
    g.mark_output(g.add(x, g.new_input(("b", numpy.int64(5)), dtype="float32")))
    with pytest.raises(GraphError, match=said):
        build(g, x)


def test_what_was_measured_for_one_simd_level_does_not_hold_for_another() -> None:
    graph, known = CASES["gated mlp"]()
    found, _ = backs.back_of(CPU)
    assert found is not None and found.target == native.level().name
    asked = [search.question(graph, known, CPU, False, replace(found, target=name)).key for name in ("avx2", "avx512")]
    assert asked[0] != asked[1]
