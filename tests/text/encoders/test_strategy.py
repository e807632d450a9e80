"""Choosing how to compute: what is tried, what is refused, what is remembered; and recording graphs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from anytorch.devices.types import Caps  # noqa: E402
from anytorch.measured import store  # noqa: E402
from anytorch.recorded.graphs import MOST_GRAPHS, Recorder, graph_class  # noqa: E402
from anytorch.text.encoders import strategy  # noqa: E402
from anytorch.text.encoders.encoder import TorchEncoder  # noqa: E402
from anytorch.text.encoders.strategy import EncoderPlan  # noqa: E402

Open = Callable[[str], tuple[Any, Any]]
GPU = Caps(("float32", "float16", "bfloat16"), ("float32", "float16", "bfloat16"), "bfloat16", True, True, True)
PLAIN = Caps(("float32",), ("float32",), None)


def plans(caps: Caps, spec: Any, dtype: str, host: bool = False, **asked: Any) -> set[tuple[str, bool]]:
    options = {"layout": "auto", "graphs": None, **asked}
    return {(p.layout, p.graphs) for p in strategy.candidates(caps, spec, dtype, host, **options)}


def test_candidates_follow_what_the_device_can_do(open_model: Open) -> None:
    bert, mpnet = open_model("bert")[0], open_model("mpnet")[0]
    every = {("rows", False), ("rows", True), ("packed", False), ("packed", True)}
    assert plans(GPU, bert, "float16") == every
    own = [p for p in strategy.candidates(GPU, bert, "float16", False, "auto", None, can_fuse=True) if p.kernels]
    assert own == [
        EncoderPlan("float16", "packed", True, fused=True, kernels=True, blocks=blocks) for blocks in (0, 2, 4)
    ]
    assert own[1].short.endswith("in blocks by 2 warps") and own[1].words.endswith("our Triton kernels in blocks")
    no_triton = replace(GPU, triton=False)
    assert not any(p.kernels for p in strategy.candidates(no_triton, bert, "float16", False, "auto", None))
    assert plans(GPU, bert, "float32") == {("rows", False), ("rows", True)}, "flash kernels are for half precision"
    assert plans(GPU, mpnet, "float16") == {("rows", False), ("rows", True)}, "and add no bias"
    assert plans(PLAIN, bert, "float32") == {("rows", False)}
    assert plans(PLAIN, bert, "float32", host=True) == {("rows", False), ("one-by-one", False)}
    assert plans(GPU, bert, "float16", layout="packed", graphs=False) == {("packed", False)}
    found = strategy.candidates(GPU, bert, "float16", False, "auto", None, can_fuse=True)
    assert [(p.layout, p.graphs) for p in found if p.fused and not p.kernels] == [("rows", True), ("packed", True)]
    assert not found[0].fused and not found[0].graphs, "the reference is the plainest"
    assert not any(p.fused for p in strategy.candidates(GPU, bert, "float32", False, "auto", None, can_fuse=True))


def test_half_precision_by_device_and_checkpoint() -> None:
    assert strategy.half_dtypes(GPU, False, stored_bfloat16=False) == ["float16", "bfloat16"]
    assert strategy.half_dtypes(GPU, False, stored_bfloat16=True) == ["bfloat16", "float16"]
    assert strategy.half_dtypes(GPU, True, stored_bfloat16=False) == []
    assert strategy.half_dtypes(PLAIN, False, stored_bfloat16=False) == []


def test_worst_cosine_finds_the_one_bad_row() -> None:
    good = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    bad = good.copy()
    assert strategy.worst_cosine(good, bad) > 0.999999
    bad[3] *= -1
    assert strategy.worst_cosine(good, bad) < -0.999
    bad[3] = np.nan
    assert strategy.worst_cosine(good, bad) == -1.0


def test_chosen_by_measurement_and_remembered(open_model: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    first = TorchEncoder(*open_model("bert"), device="cpu")
    assert first.plan.layout in ("rows", "one-by-one") and "rows" in first.plan.why and "one-by-one" in first.plan.why
    monkeypatch.setattr(strategy, "choose", lambda *args: pytest.fail("it was measured again"))
    assert TorchEncoder(*open_model("bert"), device="cpu").plan == first.plan
    with pytest.raises(pytest.fail.Exception):
        TorchEncoder(*open_model("bert"), device="cpu", pooling="cls")


def test_a_remembered_plan_with_kernels_needs_triton(open_model: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strategy, "recalled", lambda *_: EncoderPlan("float32", "packed", False, kernels=True))
    assert not TorchEncoder(*open_model("bert"), device="cpu").plan.kernels


def test_a_layout_that_answers_wrongly_is_not_used(open_model: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    from anytorch.text.encoders.layouts import OneByOne

    real = OneByOne.attend
    monkeypatch.setattr(OneByOne, "attend", lambda self, q, k, v, **more: real(self, q, v, k, **more))
    assert TorchEncoder(*open_model("bert"), device="cpu").plan.layout == "rows"
    (verdict,) = store.verdicts()
    refused = verdict.trial("one-by-one")
    assert refused is not None and refused.refused.startswith("wrong: off by")


@pytest.mark.parametrize("error", [RuntimeError("no such kernel"), MemoryError()])
def test_the_plainest_way_has_nothing_to_fall_back_to(
    error: Exception, open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anytorch.text.encoders.layouts import Rows

    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Rows, "attend", fails)
    with pytest.raises(type(error)):
        TorchEncoder(*open_model("bert"), device="cpu")
    assert not list(store.verdicts())


def test_a_lack_of_memory_in_another_way_is_not_remembered(open_model: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    from anytorch.text.encoders.layouts import OneByOne

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(OneByOne, "attend", full)
    assert TorchEncoder(*open_model("bert"), device="cpu").plan.layout == "rows"
    assert not list(store.verdicts()), "another day there may be enough"


def test_a_dtype_that_loses_accuracy_is_not_used(
    open_model: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Asked for a cosine of 0.99999, bfloat16 is not accurate enough here and float16 is."""
    monkeypatch.setattr(strategy, "HALF_COSINE", 0.99999)
    monkeypatch.setattr(strategy, "half_dtypes", lambda *args: ["bfloat16", "float16"])
    spec, checkpoint = open_model("bert")
    with caplog.at_level("INFO", logger="anytorch"):
        encoder = TorchEncoder(spec, checkpoint, device="cpu", layout="rows")
    assert encoder.dtype_name == "float16"
    assert "bfloat16 gives vectors with a cosine of 0.999" in caplog.text
    monkeypatch.setattr(strategy, "half_dtypes", lambda *args: ["bfloat16"])
    assert TorchEncoder(spec, checkpoint, device="cpu", layout="rows", pooling="cls").dtype_name == "float32"


def test_on_a_very_slow_device_the_plainest_way_is_taken_unmeasured(
    open_model: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A software adapter: comparing ways there took minutes."""
    monkeypatch.setattr(strategy, "affordable", lambda *_: (64, 5.0))
    monkeypatch.setattr(strategy, "measure", lambda *_, **__: pytest.fail("it was measured"))
    plans = [EncoderPlan("float32", "rows", False), EncoderPlan("float32", "rows", True)]
    slow: Any = SimpleNamespace(device=torch.device("meta"), spec=open_model("bert")[0])
    monkeypatch.setattr(strategy, "budget_of", lambda device: 3.0)
    verdict = strategy._measure(slow, plans, strategy.Question("kind", "title", "slow"))
    assert verdict.chosen == "rows" and verdict.cut_short and "too long to compare" in verdict.why
    assert strategy.plan_of(verdict).layout == "rows"
    store.remember(verdict)
    assert store.recall(verdict.question, budget_s=3.0) and not store.recall(verdict.question, budget_s=30.0)


# --- graphs --------------------------------------------------------------------------------------------------------


class FakeGraph:
    """Records nothing and replays by calling again: enough to see who is called when."""

    replays = 0

    def __enter__(self) -> FakeGraph:
        return self

    def __exit__(self, *about: object) -> None: ...

    def replay(self) -> None:
        FakeGraph.replays += 1


@pytest.fixture
def recorder() -> Recorder:
    made = Recorder(torch.device("cpu"))
    made.module = SimpleNamespace(FakeGraph=FakeGraph, __name__="fake")
    FakeGraph.replays = 0
    return made


def test_a_shape_is_recorded_when_it_comes_again(recorder: Recorder) -> None:
    calls = []

    def work() -> Any:
        calls.append(1)
        return torch.zeros(1)

    recorder.run("a", work)
    assert (len(calls), len(recorder.recordings)) == (1, 0)
    recorder.run("a", work)  # two warm-ups and the recording itself
    assert (len(calls), len(recorder.recordings), FakeGraph.replays) == (4, 1, 1)
    recorder.run("a", work)
    assert (len(calls), FakeGraph.replays) == (4, 2)


def test_the_number_of_recordings_is_bounded(recorder: Recorder) -> None:
    for shape in range(MOST_GRAPHS + 5):
        recorder.record(shape, lambda: torch.zeros(1))
    assert len(recorder.recordings) == MOST_GRAPHS
    assert 4 not in recorder.recordings and 5 in recorder.recordings


def test_a_device_that_cannot_record_computes_plainly(recorder: Recorder) -> None:
    recorder.module = SimpleNamespace(__name__="fake")
    for _ in range(3):
        assert recorder.run("a", lambda: torch.ones(1)).item() == 1.0
    assert "no graph to record into" in recorder.failed


def test_records_on_a_stream_of_its_own_where_the_module_has_them(recorder: Recorder) -> None:
    """The seam to `torch.cuda` and those that follow it: warm-ups beside, one pool for all, other threads left alone."""
    seen: list[Any] = []

    class Stream:
        def __init__(self, device: Any = None) -> None: ...

        def wait_stream(self, other: Any) -> None: ...

    class record(FakeGraph):  # named as torch.cuda.graph is
        def __init__(
            self, graph: Any, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
        ) -> None:
            seen.append((pool, type(stream).__name__, capture_error_mode))

    recorder.module = SimpleNamespace(
        CUDAGraph=FakeGraph, graph=record, Stream=Stream, current_stream=Stream, stream=lambda stream: FakeGraph(),
        graph_pool_handle=lambda: "pool", __name__="fake",
    )  # fmt: skip
    for shape in ("a", "b"):
        recorder.record(shape, lambda: torch.zeros(1))
    assert seen == [("pool", "Stream", "thread_local")] * 2
    assert not recorder.failed and len(recorder.recordings) == 2


def test_finds_a_vendors_graph_by_its_name() -> None:
    assert graph_class(SimpleNamespace(XPUGraph=FakeGraph, Graphics=1)) is FakeGraph
    assert graph_class(SimpleNamespace()) is None


def test_plans_in_words() -> None:
    assert (
        EncoderPlan("float16", "packed", True).words == "packed texts, variable-length flash attention, recorded graphs"
    )


@pytest.mark.parametrize(("per_call", "per_token", "wanted"), [(0.012, 1e-7, 4096), (0.0, 1e-4, 333), (0.0, 1.0, 64)])
def test_a_fast_device_is_measured_with_a_full_chunk(
    monkeypatch: pytest.MonkeyPatch, open_model: Open, per_call: float, per_token: float, wanted: int
) -> None:
    """A few tokens tell a fast device's launches alone; a slow one must not be given many."""
    clock = [0.0]
    monkeypatch.setattr(strategy.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(strategy, "synchronize", lambda device: None)

    class Timed:
        spec, chunk_tokens, device = open_model("bert")[0], 4096, None

        def use(self, plan: EncoderPlan) -> None: ...

        def run(self, ids: Any, starts: Any) -> None:
            clock[0] += per_call + per_token * len(ids)

    found, seconds = strategy.affordable(Timed(), EncoderPlan("float32", "rows", False))  # type: ignore[arg-type]
    assert abs(found - wanted) <= 1
    assert seconds == pytest.approx(per_call + per_token * found, rel=0.1)
    assert clock[0] < 2 + 130 * per_token, "and it took no longer than that"
