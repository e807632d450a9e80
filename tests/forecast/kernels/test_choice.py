"""Choosing how a step's parts are computed: what is tried, what is right, what is fastest, what is remembered."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import anytorch
from anytorch.devices.oom import is_out_of_memory
from anytorch.forecast.decoding.sampling import Sampler
from anytorch.forecast.generation import steps as steps_module
from anytorch.forecast.generation.steps import RolledSteps, StaticSteps
from anytorch.forecast.inputs import read_series
from anytorch.forecast.kernels import attention, choice, products, row_step
from anytorch.forecast.kernels.attention import WindowAttention, WindowCut
from anytorch.forecast.kernels.choice import Chooser, Option, Part, decide, told
from anytorch.forecast.kernels.products import (
    Cut,
    Product,
    Products,
    Work,
    by_torch,
    candidates,
    error_of,
    grid_of,
    made_up,
    part_of,
    reference,
    share_of,
    spread,
)
from anytorch.forecast.kernels.row_step import Tiles
from anytorch.forecast.model.fused import attend_masked, turn, window_mask
from anytorch.measured import store
from anytorch.measured.stopwatch import Stopwatch
from anytorch.measured.verdict import Trial, Verdict

CPU = torch.device("cpu")
SAMPLER = Sampler(1.0, 0, 0.9)


# --- what is tried ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 5, 20, 64, 128, 4096])
def test_the_built_in_way_comes_first_and_torch_is_among_them(rows: int) -> None:
    product = Product(rows, 832, 2496, norm=True, bias=True)
    built_in = None if rows > 64 else Tiles.of(rows).cut(product)
    found = candidates(product, built_in)
    assert found[0] == built_in and None in found and len(found) == len(set(found)) >= 4
    assert len({products.name_of(way) for way in found}) == len(found), "choices are remembered by name"
    for cut in found:
        if cut is not None:
            assert cut.dot or rows <= 8
            assert 1 <= cut.splits <= products.MOST_SPLITS
            assert cut.splits == 1 or 832 // cut.splits >= cut.block_k, "a part reads at least once"


def test_parts_of_a_sum_cover_it_once() -> None:
    for width in (64, 96, 832, 2048):
        for splits in (1, 2, 4, 7, 8):
            cut = Cut(16, 32, 4, 2, splits)
            work = Work(torch.empty(20, width), torch.empty(48, width), torch.empty(20, 48))
            share, (_, _, parts) = share_of(width, cut), grid_of(work, cut)
            assert share % cut.block_k == 0 and parts <= splits
            assert share * (parts - 1) < width <= share * parts


def test_attention_of_one_sample_needs_no_matrix_units() -> None:
    assert {share.group for share in attention.candidates(1, Tiles.of(1).share(1))} == {1}
    assert Tiles.of(5).share(1).group == 1, "five series of one sample each"
    several = attention.candidates(20, Tiles.of(20).share(20))
    assert {share.group for share in several} == {0, 2} and len(set(map(str, several))) == len(several)


# --- what is right ----------------------------------------------------------------------------------------------------


def works(rows: int = 20) -> dict[str, Work]:
    torch.manual_seed(0)
    x, inner, weight = torch.randn(rows, 64), torch.randn(rows, 96), torch.randn(160, 64) / 8
    heads = torch.randn(rows, 4 * 64)
    out, wide = torch.empty(rows, 160), torch.empty(rows, 80)
    return {
        "plain": Work(x, weight, out),
        "norm and bias": Work(x, weight, out, bias=torch.randn(160), norm=torch.rand(64)),
        "bias and sum": Work(x, weight, out, bias=torch.randn(160), residual=torch.randn(rows, 160)),
        "gate": Work(x, weight, wide, norm=torch.rand(64), gated=True),
        "sum": Work(inner, torch.randn(160, 96), out, residual=torch.randn(rows, 160)),
        "heads": Work(heads, weight, out, bias=torch.randn(160), per_head=40),
    }


@pytest.mark.parametrize("name", list(works()))
def test_torch_computes_every_kind_of_product(name: str) -> None:
    work = works(70)[name]
    by_torch(work)
    assert error_of(work)(work.out) < 1e-6
    everywhere = reference(work, torch.arange(70), torch.arange(work.out.shape[1]))
    torch.testing.assert_close(work.out.double(), everywhere, rtol=1e-4, atol=1e-4)
    rounded = replace(work, weight=work.weight.bfloat16().float())
    by_torch(rounded)
    assert error_of(work)(rounded.out) > choice.MOST_ERROR, "rounded products are noticed"


def test_what_is_looked_at() -> None:
    assert spread(5).tolist() == [0, 1, 2, 3, 4]
    many = spread(1000)
    assert len(many) == 64 and (many[0], many[-1]) == (0, 999)


def test_measuring_leaves_the_forecast_alone() -> None:
    work = works()["bias and sum"]
    before = [work.x.clone(), work.residual.clone() if work.residual is not None else work.x]
    state = torch.get_rng_state()
    (trial,) = made_up([work])
    assert trial.weight is work.weight and trial.out is not work.out
    by_torch(trial)
    assert torch.equal(before[0], work.x) and work.residual is not None and torch.equal(before[1], work.residual)
    assert torch.equal(state, torch.get_rng_state()), "the caller's random numbers stay where they were"


# --- what is fastest --------------------------------------------------------------------------------------------------


def test_the_fastest_is_taken_if_it_is_worth_it() -> None:
    assert decide([Trial("built in", 10.0), Trial("torch", 9.8), Trial("cut", 9.9)])[0] == "built in"
    assert decide([Trial("built in", 10.0), Trial("torch", 6.0), Trial("cut", 5.0)])[0] == "cut"
    assert decide([Trial("built in", refused="wrong"), Trial("torch", 60.0)])[0] == "torch"
    assert decide([Trial("built in"), Trial("torch")])[0] == "built in"


class FakeStopwatch:
    """Takes as long as it is told, by the options' names; with `step`, every look at the clock takes so many seconds."""

    def __init__(self) -> None:
        self.took: dict[str, float] = {}
        self.timed: list[str] = []
        self.counts: list[int] = []
        self.step = 0.0
        self.clock = 0.0

    def seconds(self, run: Any, count: int) -> float:
        self.timed.append(run.name)
        self.counts.append(count)
        return self.took[run.name] * 1e-6

    def now(self) -> float:
        self.clock += self.step
        return self.clock


@pytest.fixture(autouse=True)
def measuring() -> Iterator[None]:
    with anytorch.use(measure_kernels=True):
        yield


@pytest.fixture
def stopwatch(monkeypatch: pytest.MonkeyPatch) -> FakeStopwatch:
    fake = FakeStopwatch()
    watch = Stopwatch(fake.seconds, is_out_of_memory, fake.now)
    monkeypatch.setattr(choice, "stopwatch_of", lambda device: watch)
    return fake


@dataclass
class Answering:
    """An option's work: the error it answers with, or raises."""

    name: str
    answer: Any

    def __call__(self) -> Tensor:
        if isinstance(self.answer, Exception):
            raise self.answer
        return torch.tensor(float(self.answer))


def part(answers: dict[str, Any], name: str = "a part") -> Part:
    """Options by name; an answer is the error, or an exception."""
    return Part(name, [Option(text, Answering(text, answer)) for text, answer in answers.items()], float, 1)


def chosen(parts: Sequence[Part], chooser: Chooser | None = None) -> dict[str, Verdict]:
    """What a later forecast finds, when everything is compiled."""
    chooser = chooser or Chooser(CPU, False)
    found = chooser.choose(parts)
    if found is None:
        assert chooser.compiling is not None
        chooser.compiling.wait()
        assert chooser.ready
        found = chooser.choose(parts)
    assert found is not None
    return found


def test_only_what_is_right_is_timed(stopwatch: FakeStopwatch) -> None:
    stopwatch.took = {"built in": 95.0, "torch": 55.0, "better": 40.0}
    answers: dict[str, Any] = {"built in": 2e-7, "torch": 1.9e-7, "tf32": 3e-4, "nonsense": math.nan, "better": 2e-7}
    answers["broken"] = RuntimeError("out of registers\nand a long story")
    found = chosen([part(answers)])["a part"]
    assert found.chosen == "better" and not found.remembered
    assert set(stopwatch.timed) == {"built in", "torch", "better"}
    refused = {one.name: one.refused for one in found.trials if one.refused}
    assert refused["broken"] == "RuntimeError: out of registers" and "0.0003" in refused["tf32"]
    assert "nonsense" in refused
    assert told(found) == "a part: better, 40.0 µs (measured; built in 95.0 µs; torch 55.0 µs)"


def test_times_are_of_one_launch_and_samples_of_about_a_millisecond(stopwatch: FakeStopwatch) -> None:
    stopwatch.took = {"built in": 600.0, "torch": 900.0}  # of a run of sixty launches
    found = chosen([replace(part({"built in": 0, "torch": 0}), launches=60)])["a part"]
    assert found.seconds("built in") == pytest.approx(10e-6) and found.seconds("torch") == pytest.approx(15e-6)
    assert max(stopwatch.counts) <= 2


def test_a_choice_is_remembered(stopwatch: FakeStopwatch) -> None:
    stopwatch.took = {"built in": 95.0, "torch": 55.0}
    answers = {"built in": 0, "torch": 0}
    assert chosen([part(answers)])["a part"].chosen == "torch"
    stopwatch.timed.clear()
    stopwatch.took = {"built in": 40.0, "torch": 55.0}  # today the machine is in another mood: the digits stay the same
    again = chosen([part(answers), part(answers, "another part")])
    assert (again["a part"].chosen, again["a part"].remembered) == ("torch", True)
    assert again["another part"].chosen == "built in" and len(stopwatch.timed) == 2 * choice.ROUNDS
    gone = chosen([part({"built in": 0})])["a part"]  # without the way that is remembered
    assert (gone.chosen, gone.remembered) == ("built in", False)


def test_the_question_names_what_a_choice_depends_on() -> None:
    asked = choice.question(CPU, "20x832->2496 norm")
    assert asked.facts["torch"] == torch.__version__ and asked.facts["triton"] and asked.facts["machine"]
    assert asked.title == asked.facts["part"] == "20x832->2496 norm" and "cpu" in asked.device.lower()
    assert asked.key != choice.question(CPU, "5x832->2496 norm").key


def test_a_store_that_cannot_be_read_is_measured_again(stopwatch: FakeStopwatch) -> None:
    stopwatch.took = {"built in": 2.0, "torch": 1.0}
    answers = {"built in": 0, "torch": 0}
    for content in (b"{", b'{"format": 1}'):
        assert chosen([part(answers)])["a part"].chosen == "torch"
        (path,) = store.folder().iterdir()
        path.write_bytes(content)
        store.forget()
        assert chosen([part(answers)])["a part"].remembered is False


def test_nothing_is_measured_where_it_is_turned_off(stopwatch: FakeStopwatch) -> None:
    with anytorch.use(measure_kernels=False):
        assert chosen([part({"built in": 0, "torch": 0})]) == {}
    assert not stopwatch.timed


def test_time_that_runs_out_leaves_what_is_built_in(stopwatch: FakeStopwatch) -> None:
    chooser = Chooser(CPU, False)
    chooser.left_s, stopwatch.step = 9.5, 1.0  # every look at the clock takes a second
    stopwatch.took = {"built in": 3.0, "torch": 2.0, "late": 1.0}
    answers = {"built in": 0, "torch": 0, "late": 0}
    found = chosen([part(answers, "first"), part(answers, "second")], chooser)
    assert found["first"].chosen == "late"
    assert found["second"].chosen == "built in", "with no time left nothing else is known"
    assert all("no time" in one.refused for one in found["second"].trials[1:])
    store.forget()
    assert [one.question.title for one in store.verdicts()] == ["first"], "the next process finds out"


def test_compiling_is_in_nobodys_way(stopwatch: FakeStopwatch) -> None:
    """A forecast that comes meanwhile is told what is known; one that comes later measures."""
    stopwatch.took = {"built in": 3.0, "torch": 2.5, "slowly made": 1.0}
    ended = threading.Event()
    one = part({"built in": 0, "torch": 0, "slowly made": 0})
    ready: dict[str, Any] = {"built in": lambda: None, "slowly made": lambda: ended.wait(120)}
    parts = [replace(one, options=[replace(option, ready=ready.get(option.name)) for option in one.options])]
    chooser = Chooser(CPU, False)
    for _ in range(2):
        assert chooser.choose(parts) is None and not chooser.ready
    assert not stopwatch.timed
    ended.set()
    assert chosen(parts, chooser)["a part"].chosen == "slowly made"


def test_what_is_not_compiled_in_time_is_not_tried(stopwatch: FakeStopwatch, monkeypatch: pytest.MonkeyPatch) -> None:
    stopwatch.took = {"built in": 3.0, "torch": 2.5, "late": 1.0}
    monkeypatch.setattr(choice, "COMPILE_S", 0.0)
    one = part({"built in": 0, "torch": 0, "late": 0})
    ready: dict[str, Any] = {"late": lambda: None}
    options = [replace(option, ready=ready.get(option.name)) for option in one.options]
    found = chosen([replace(one, options=options)])["a part"]
    assert found.chosen == "torch"
    assert [one.refused for one in found.trials] == ["", "", "no time was left to compile it"]


def test_what_there_was_no_time_for_is_not_remembered(
    stopwatch: FakeStopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is used for now; the next process finds out."""
    stopwatch.took = {"built in": 3.0, "ours": 1.0}
    one = part({"built in": 0, "ours": 0})
    parts = [replace(one, options=[one.options[0], replace(one.options[1], ready=lambda: None)])]
    monkeypatch.setattr(choice, "COMPILE_S", 0.0)
    assert chosen(parts)["a part"].chosen == "built in"
    monkeypatch.setattr(choice, "COMPILE_S", 60.0)
    again = chosen(parts)["a part"]
    assert (again.chosen, again.remembered) == ("ours", False)
    assert chosen(parts)["a part"].remembered


def test_windows_are_measured_where_they_were_compiled() -> None:
    """Other steps of the same forecast have other numbers of rows, whose kernels are others."""
    steps: Any = SimpleNamespace(chooser=None, tried_at=(0, 0))
    assert RolledSteps._may_try(steps, (513, 16))
    steps.chooser, steps.tried_at = SimpleNamespace(ready=False), (513, 16)
    assert not RolledSteps._may_try(steps, (513, 16))
    steps.chooser.ready = True
    assert RolledSteps._may_try(steps, (513, 16)) and not RolledSteps._may_try(steps, (529, 7))


def test_only_what_will_be_used_is_compiled(stopwatch: FakeStopwatch) -> None:
    """All of it where it is going to be measured; else what is remembered or built in, and what the step needs besides."""
    stopwatch.took = {"built in": 3.0, "torch": 2.5, "ours": 1.0}
    compiled: list[str] = []
    one = part({"built in": 0, "torch": 0, "ours": 0})
    options = [replace(option, ready=partial(compiled.append, option.name)) for option in one.options]
    parts, also = [replace(one, options=options)], {("step", "rest"): partial(compiled.append, "rest")}
    for wanted, settings in (
        (["built in", "rest"], {"measure_kernels": False}),
        (["built in", "ours", "rest", "torch"], {}),
        (["ours", "rest"], {}),
    ):
        with anytorch.use(**settings):
            chooser = Chooser(CPU, False)
            chooser.choose(parts, also=also)
            assert chooser.compiling is not None
            chooser.compiling.wait()
            chooser.choose(parts, also=also)
        assert sorted(compiled) == wanted
        compiled.clear()


def test_parts_take_turns_in_being_compiled() -> None:
    first, second = part({"a": 0, "b": 0}), part({"c": 0, "d": 0, "e": 0})
    assert [option.name for _, option in choice.in_turns([first, second])] == ["a", "c", "b", "d", "e"]
    assert choice.in_turns([]) == []


def test_compiling_ahead_may_fail(stopwatch: FakeStopwatch) -> None:
    stopwatch.took = {"built in": 3.0, "torch": 2.0}
    compiled: list[str] = []

    def fails() -> None:
        compiled.append("tried")
        raise RuntimeError("no such target")

    one = part({"built in": 0, "torch": 0})
    found = chosen([replace(one, options=[replace(o, ready=fails) for o in one.options])])
    assert found["a part"].chosen == "torch" and compiled == ["tried", "tried"]


def test_a_real_measurement_on_the_cpu() -> None:
    """No recording and no Triton here: torch's own product is right, our kernel is refused, and time is taken."""
    work = works()["norm and bias"]
    ours = Products(CPU, lambda product: None)
    one, ways = part_of(ours, work.product, [work])
    assert one.launches == 8 and None in ways.values()
    kept = [option for option in one.options if option.name == "torch"]
    (found,) = chosen([replace(one, options=kept)]).values()
    assert found.chosen == "torch" and found.trials[0].seconds is not None and found.trials[0].seconds > 0
    assert found.trials[0].error is not None and found.trials[0].error < 1e-6


# --- full windows -----------------------------------------------------------------------------------------------------


def series_of(frame: Any, rows: slice, pred_len: int) -> Any:
    part = frame.iloc[rows]
    return read_series(part.drop(columns="timestamps"), part["timestamps"], None, pred_len, where="it", checks=True)


def ids_of(paths: Sequence[Any]) -> list[Any]:
    return [np.concatenate((path.s1, path.s2)).tolist() for path in paths]


def attended(windows: WindowAttention, layer: int, qkv: Tensor) -> Tensor:
    """What our kernel computes, sample by sample."""
    _, _, series, heads, _, head_width = windows.keys.shape
    window, step = windows.counters.tolist()
    before, own_rows = windows.max_context - step, windows.own_rows
    own = qkv.view(series * windows.samples, own_rows, 3, heads, head_width).permute(2, 0, 3, 1, 4)
    cos, sin = (table[:, :, before : before + own_rows] for table in windows.tables)
    q, k = turn(own[:2], (cos, sin))
    keys, values = (part[layer, window, :, :, :before] for part in (windows.keys, windows.values))
    found = attend_masked(q, (keys, values), (k, own[2]), window_mask(before, own_rows, q))
    return found.transpose(1, 2).reshape(len(qkv), -1)


@pytest.mark.parametrize("kernel", ["right", "wrong at once", "wrong later", "raises", "slow"])
def test_full_windows_use_what_measured_best(
    kernel: str, minutes: Any, predictor: Any, stopwatch: FakeStopwatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our kernel is played by torch's product; the ids are those of the plain loop whatever it does."""
    calls: list[str] = []
    checked: list[str] = []
    plain = Products.compute

    def compute(self: Products, work: Work, way: Any) -> None:
        if way is None:
            return plain(self, work, way)
        calls.append(str(way))
        if kernel == "raises":
            raise RuntimeError("an unlikely story")
        by_torch(work)
        if kernel == "wrong at once" or (kernel == "wrong later" and checked):
            work.out.add_(0.1)
        return None

    def attend(self: WindowAttention, cut: Any, layer: int, qkv: Tensor) -> Tensor:
        calls.append(str(cut))
        if kernel == "raises":
            raise RuntimeError("an unlikely story")
        found = attended(self, layer, qkv)
        return found + 0.1 if kernel == "wrong at once" or (kernel == "wrong later" and checked) else found

    def taken(*given: Any, **more: Any) -> Any:
        found = take(*given, **more)
        checked.extend(found or ())  # from now on it is used
        return found

    take = steps_module.take
    stopwatch.took = {"torch": 1e6, "ours": 2e6 if kernel == "slow" else 5e5}
    monkeypatch.setattr(steps_module, "take", taken)
    monkeypatch.setattr(
        Chooser, "_replayed", lambda self, option: Answering("torch" if option.name == "torch" else "ours", 0)
    )
    monkeypatch.setattr(Products, "compute", compute)
    monkeypatch.setattr(Products, "compile", lambda self, work, way: None)
    monkeypatch.setattr(WindowAttention, "attend", attend)
    monkeypatch.setattr(WindowAttention, "compile", lambda self, cut, qkv: None)
    monkeypatch.setattr(steps_module, "why_not", lambda decoder, rows: "")
    monkeypatch.setattr(row_step, "find_spec", lambda name: None)
    made = predictor("b", max_context=40)
    several = [series_of(minutes, slice(0, 20), 44)]
    wanted = ids_of(made.paths(several, SAMPLER, 3, seed=5))
    made.static, made.kernels = "plain", True
    for number in range(4):
        assert ids_of(made.paths(several, SAMPLER, 3, seed=5)) == wanted
        steps = made.decoder().kept_rolled
        assert (steps.tried_kernels or steps.chooser is not None) == (number > 0), "the second forecast begins"
        if steps.chooser is not None:
            steps.chooser.compiling.wait()
    assert steps.tried_kernels and calls
    words = made.explain()
    if kernel == "right":
        assert steps.no_kernels == "" and isinstance(steps.cut, WindowCut)
        assert {name.split()[0].split("x")[0] for name in steps.choices} == {"256", "512", "attention"}
        assert "our kernels where they are faster" in words and "measured; torch" in words
    else:
        assert steps.no_kernels and steps.blocks is made.decoder().blocks and steps.cut is None
        assert steps.no_kernels in words
    assert ("differ" in steps.no_kernels) == (kernel == "wrong later")


class FakeStep:
    """Our kernels of a growing window's step, played by torch's; wrong or out of order as `mode` says."""

    mode = "right"

    _noise_at = StaticSteps._noise_at

    def __init__(self, cache: Any, sampler: Any, counters: Tensor, ids: Any, future: Tensor, noise: Any) -> None:
        self.cache, self.sampler, self.counters, self.future, self.noise = cache, sampler, counters, future, noise
        self.at, self.slot = counters[:1], counters[1:]
        self.s1, self.s2 = ids
        self.shape = SimpleNamespace(samples=cache.samples)
        self.decoder, self.chosen, self.choices, self.asked = cache.decoder, False, {}, False

    def start(self, s1: Tensor, s2: Tensor, time: Tensor) -> None:
        """torch's step looks its row up itself."""

    def choose(self, chooser: Chooser) -> bool:
        if not self.asked:
            self.asked = True
            return False  # the compiler is at work
        self.chosen = True
        if self.mode == "cannot measure":
            raise RuntimeError("the clock is broken")
        return True

    def forget(self) -> bool:
        before, self.chosen = self.chosen, False
        return before

    def __call__(self) -> None:
        if self.mode == "too large":
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.last, logits = StaticSteps._step_by_torch(self)  # type: ignore[arg-type]
        wrong = self.mode == "always wrong" or (self.mode == "chosen is wrong" and self.chosen)
        self.logits = [logits, logits + (1.0 if wrong else 0.0)]


@pytest.mark.parametrize(
    ("mode", "used", "chosen"),
    [
        ("right", True, True),
        ("chosen is wrong", True, False),
        ("cannot measure", True, False),
        ("always wrong", False, False),
        ("too large", False, False),
    ],
)
def test_growing_windows_fall_back_to_what_is_right(
    mode: str, used: bool, chosen: bool, minutes: Any, predictor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeStep, "mode", mode)
    monkeypatch.setattr(steps_module, "KernelStep", FakeStep)
    monkeypatch.setattr(steps_module, "why_not", lambda decoder, rows: "")
    made = predictor("b", max_context=64)
    several = [series_of(minutes, slice(0, 30), 24)]
    wanted = ids_of(made.paths(several, SAMPLER, 2, seed=5))
    made.static, made.kernels = "plain", True
    monkeypatch.setattr(Chooser, "ready", True)
    for _ in range(4):
        assert ids_of(made.paths(several, SAMPLER, 2, seed=5)) == wanted
    step = made.decoder().kept.kernel_step
    assert (step is not None, step is not None and step.chosen) == (used, chosen)
    words = {"always wrong": "differ", "too large": "not enough memory"}.get(mode, "")
    assert words in made.decoder().kept.no_kernels and bool(made.decoder().kept.no_kernels) == (not used)
    assert made.decoder().kept.chooser is None and made.decoder().kept.trial is None


@pytest.mark.parametrize(
    ("why", "said"),
    [
        ("", "torch's kernels; ours are compiled beside the next forecasts of the same shape"),
        ("triton is not installed", "torch's kernels (triton is not installed)"),
    ],
)
def test_explaining_before_and_after(
    why: str, said: str, minutes: Any, predictor: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_module, "why_not", lambda decoder, rows: why)
    made = predictor("b", max_context=40)
    before = made.explain().splitlines()
    assert before[1:] == ["windows of 40 rows; steps are computed one after the other"]
    made.static, made.kernels = "plain", True
    made.paths([series_of(minutes, slice(0, 20), 44)], SAMPLER, 1, seed=5)
    parts = ("a step of growing windows", "the products of full windows")
    assert made.explain().splitlines() == [*before, *(f"{part}: {said}" for part in parts)]
