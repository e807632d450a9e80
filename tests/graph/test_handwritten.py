"""Hand-written kernels: found by their patterns, raced, refused where wrong, remembered, shown; and ours on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from anytorch.errors import GraphError
from anytorch.graph import handwritten, new_kernel_graph, racing, records, reference, search, verify
from anytorch.graph.backs import back_of
from anytorch.graph.clock import Clock
from anytorch.graph.handwritten import Handwritten, Launch
from anytorch.graph.ir import Builder, Graph
from anytorch.graph.patterns import PREFIX, Match, given, matches, maybe, op
from anytorch.graph.search import EAGER, Search, variants
from anytorch.measured.verdict import Trial, Verdict
from tests.graph.cases import CASES

CPU = torch.device("cpu")
LINEAR = maybe("silu", op("add", op("matmul", given("x"), given("w"), name="product"), given("bias")), name="act")
ran: list[str] = []  # what computed since the clock was last looked at


def _linear(silu: bool = True, *, used: bool = False) -> Graph:
    b = Builder()
    x, w, bias = b.input((4, 64), "float32"), b.input((64, 48), "float32"), b.input((48,), "float32")
    product = b.add("matmul", x, w)
    made = b.add("add", bias, product)  # the other way round than the pattern
    made = b.add("silu", made) if silu else made
    return b.graph([b.add("mul", made, b.constant(2.0, "float32")), *([product] if used else [])])


def _kernel(name: str = "by hand", change: str = "", why: str = "", **more: Any) -> Handwritten:
    """A kernel for `LINEAR` that torch computes, with a planted mistake."""

    def prepare(match: Match, known: Mapping[str, int], device: torch.device) -> Launch:
        def launch(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
            ran.append(name)
            if change == "raises":
                raise RuntimeError("the device is gone")
            (made,) = reference.evaluate(match.graph, tensors)
            if change == "unfinished":
                out[:-1] = made[:-1]
                return
            out.copy_(made)
            if change == "wrong":
                out[-1, -1] += 1.0
            if change == "changes an input":
                tensors[match.place("x")].mul_(2)

        return launch

    return Handwritten(name, "linear", "text/packed/code/norm.h", "cpp", LINEAR, lambda *_: why, prepare, **more)


@pytest.fixture(autouse=True)
def compiled_once(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Libraries are found by the hash of their source, and shared; all else in the cache folder is a test's own."""
    folder = request.config.cache.mkdir("anytorch-native")
    (tmp_path / "anytorch-cache").mkdir(exist_ok=True)
    (tmp_path / "anytorch-cache" / "native").symlink_to(folder, target_is_directory=True)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Register kernels; by the clock what they are in takes a microsecond and all else a thousand."""
    monkeypatch.setattr(handwritten, "MODULES", {})
    monkeypatch.setattr(handwritten, "_registered", {})
    back = search.back_of(CPU)[0]
    assert back is not None
    one = replace(back, candidates=lambda kernel, known, most: back.candidates(kernel, known, 1))
    monkeypatch.setattr(search, "back_of", lambda device: (one, ""))
    monkeypatch.setattr(search, "variants", lambda graph, back, plain=search.variants: list(plain(graph, back))[:1])

    class Told(Clock):
        def __init__(self, device: torch.device) -> None:
            super().__init__(device)

            def seconds(run: Callable[[], object], count: int) -> float:
                ran.clear()
                run()
                return count * (1e-6 if ran else 1e-3)

            self.stopwatch = replace(self.plain, seconds=seconds)

    monkeypatch.setattr(search, "Clock", Told)
    yield lambda *kernels: handwritten.register(*kernels)
    ran.clear()


# --- patterns ----------------------------------------------------------------------------------------------------------


def test_a_pattern_is_found_in_both_orders_with_and_without_its_options() -> None:
    for silu in (True, False):
        graph = _linear(silu)
        found = list(matches(graph, LINEAR))
        best = max(found, key=lambda match: len(match.work))
        assert ("act" in best) is silu and best["product"].op == "matmul"
        assert [graph.nodes[one]["index"] for one in best.arguments] == [0, 1, 2] and best.place("bias") == 2
        part = best.alone()
        assert part.result == best.result and part.shape("x", {}) == (4, 64)
        tensors = verify.example(graph, {}, "normal", CPU)
        torch.testing.assert_close(
            reference.evaluate(part.graph, tensors)[0] * 2, reference.evaluate(graph, tensors)[0]
        )


def test_what_others_need_is_not_hidden_in_a_kernel() -> None:
    assert not list(matches(_linear(used=True), LINEAR))
    b = Builder()
    x = b.input((4, 4), "float32")
    turned = b.add("permute", x, dims=(1, 0))
    graph = b.graph([b.add("exp", turned), turned])
    (found,) = matches(graph, op("exp", op("permute", given("x"))))  # a view may be taken twice
    assert found["x"].op == "input"


def test_the_same_tensor_twice_is_one_argument() -> None:
    b = Builder()
    x = b.input((2, 2, 8, 32), "float32")
    graph = b.graph([b.add("attention", x, x, x)])
    (found,) = matches(graph, op("attention", given("q"), given("k"), given("v")))
    assert found.arguments == (x,) and [found.place(name) for name in "qkv"] == [0, 0, 0]
    assert len(found.alone().graph.inputs) == 1
    assert not list(matches(CASES["gated mlp"]()[0], op("mul", given("x"), given("x"))))


def test_a_graph_with_kernels_by_hand_is_the_same_function(registry: Callable[..., None]) -> None:
    registry(_kernel())
    graph = _linear()
    places = handwritten.apart(handwritten.sites(graph, {}, "cpp", CPU))
    (site,) = places
    assert len(site.match.work) == 3  # the largest place
    made = handwritten.replaced(graph, places)
    assert [node.op for _, node in made if node.kind != "input"] == ["handwritten", "mul"]
    assert handwritten.inlined(made).key == handwritten.inlined(graph).key
    with pytest.raises(GraphError, match="only a search"):
        Builder().add("handwritten", kernel="by hand")


LOADED = """
import sys
import anytorch.graph.records
torch = "torch" in sys.modules
from anytorch.graph import handwritten
import anytorch.graph.search
versions = [handwritten.version(back) for back in ("cpp", "triton", "wgsl", "none")]
slices = ("anytorch.text.packed", "anytorch.text.encoders.", "anytorch.forecast.", "anytorch.quant.")
early = [name for name in sys.modules if name.startswith(slices)]
kernels = [one for back in handwritten.MODULES for one in handwritten.kernels_for(back)]
lost = [one.source for one in kernels if not (handwritten.ROOT / one.source).is_file()]
answer(torch=torch, early=early, versions=versions, count=len({one.name for one in kernels}), lost=lost)
"""


def test_the_table_loads_nothing_before_a_search_needs_it(run_script: Callable[..., Any]) -> None:
    found = run_script(LOADED)
    assert not found["torch"] and not found["early"] and not found["lost"] and found["count"] >= 10
    assert len(set(found["versions"])) == 4


# --- the race ----------------------------------------------------------------------------------------------------------


def test_a_faster_kernel_is_chosen_remembered_and_shown(registry: Callable[..., None]) -> None:
    registry(_kernel())
    g = new_kernel_graph(backend="cpu")
    x, w = g.new_input((4, 64), dtype="float32"), g.new_input((64, 48), dtype="float32")
    g.mark_output(g.silu(x @ w + g.new_input((48,), dtype="float32")) * 2)
    g.superoptimize(time_limit_s=60)
    (found,) = g._found.values()
    assert found.verdict is not None and "handwritten linear" in found.verdict.chosen and found.program is not None
    hand, rest = found.program.steps
    assert hand.by_hand is not None and hand.schedule == f"{PREFIX}by hand" and rest.kernel is not None
    tensors = verify.example(g.graph, {}, "normal", CPU)
    ran.clear()
    torch.testing.assert_close(g(*tensors)[0], torch.nn.functional.silu(tensors[0] @ tensors[1] + tensors[2]) * 2)
    assert ran == ["by hand"]
    assert f"step 0: {PREFIX}by hand, 1 µs, text/packed/code/norm.h" in g.explain()
    (record,) = records.records()
    step = record.steps[0]
    assert (step.source, step.text, step.language) == ("text/packed/code/norm.h", "", "cpp")
    assert step.ops == ("matmul", "add", "silu") and step.nbytes == 4 * (4 * 64 + 64 * 48 + 48 + 4 * 48)
    assert f"{PREFIX}by hand" in record.picture and step.seconds == pytest.approx(1e-6)

    again = Search(g.graph, {}, CPU, 60).run()
    assert again.verdict is not None and again.verdict.remembered and again.program is not None
    assert again.program.steps[0].by_hand is not None
    assert [one.seconds("by hand") for one in again.kernels if one.trial("by hand")] == [pytest.approx(1e-6)]

    # One that computes something else today is neither believed nor used.
    registry(_kernel(change="wrong"))
    damaged = Search(g.graph, {}, CPU, 60).run()
    assert damaged.verdict is not None and "handwritten" not in damaged.verdict.chosen
    assert all(step.by_hand is None for step in (damaged.program.steps if damaged.program else ()))


@pytest.mark.parametrize("change", ["wrong", "unfinished", "changes an input", "raises"])
def test_a_planted_wrong_kernel_is_refused_in_its_own_race(registry: Callable[..., None], change: str) -> None:
    registry(_kernel(change=change), _kernel("an honest one"))
    found = Search(_linear(), {}, CPU, 60).run()
    race = next(one for one in found.kernels if one.trial("by hand"))
    planted, honest = race.trial("by hand"), race.trial("an honest one")
    assert planted is not None and planted.refused and honest is not None and honest.seconds == pytest.approx(1e-6)
    assert found.verdict is not None and found.program is not None and "handwritten" in found.verdict.chosen
    assert found.program.steps[0].schedule == f"{PREFIX}an honest one"


@pytest.mark.parametrize("change", ["wrong", "unfinished", "changes an input"])
def test_the_second_gate_refuses_one_that_slipped_through(
    registry: Callable[..., None], monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Its race is won by a lie; the whole program is still compared with float64."""
    registry(_kernel(change=change))
    monkeypatch.setattr(racing, "measure", _won)
    found = Search(_linear(), {}, CPU, 60).run()
    assert found.verdict is not None and "handwritten" not in found.verdict.chosen
    (tried,) = [one for one in found.verdict.trials if "handwritten" in one.name]
    assert "off by" in tried.refused or "changed its input" in tried.refused


def _won(asked: Any, candidates: Any, *args: Any, **more: Any) -> Any:
    trials = tuple(Trial(one.name, 1e-6) for one in candidates)
    return Verdict(asked, trials, "by hand", "a test wants it")


def test_what_this_machine_lacks_is_no_candidate(
    registry: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry(_kernel(why="no compiler"), replace(_kernel("for another"), back="triton"))
    monkeypatch.setattr(handwritten, "MODULES", {"cpp": ("anytorch.no_such_module_at_all",)})
    found = Search(_linear(), {}, CPU, 60).run()
    assert found.verdict is not None and not any("handwritten" in one.name for one in found.verdict.trials)
    assert "are not used" in caplog.text


def test_what_goes_wrong_beside_the_kernels_leaves_the_search_alone(
    registry: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*args: Any) -> str:
        raise OSError("no such library")

    registry(replace(_kernel("asks in vain"), why_not=broken), _kernel())
    monkeypatch.setattr(racing, "measure", lambda *args, **more: broken())
    found = Search(_linear(), {}, CPU, 60).run()
    assert found.verdict is not None and not any("handwritten" in one.name for one in found.verdict.trials)
    assert "asks in vain is not used: OSError: no such library" in caplog.text and "not raced" in caplog.text


def test_a_remembered_kernel_that_is_gone_is_searched_for_again(
    registry: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handwritten, "version", lambda back: "the same")
    registry(_kernel())
    assert "handwritten" in Search(_linear(), {}, CPU, 60).run().verdict.chosen  # type: ignore[union-attr]
    monkeypatch.setattr(handwritten, "_registered", {})
    found = Search(_linear(), {}, CPU, 60).run()
    assert found.verdict is not None and not found.verdict.remembered and "handwritten" not in found.verdict.chosen


def test_torch_keeps_what_it_computes_as_fast(registry: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    registry(_kernel())
    monkeypatch.setattr(racing, "NOISE", 1e6)  # whatever it gains is not enough
    found = Search(_linear(), {}, CPU, 60).run()
    assert found.verdict is not None and found.verdict.trials[0].name == EAGER
    assert not any("handwritten" in one.name for one in found.verdict.trials)


def test_a_search_without_time_for_the_race_is_no_last_word(registry: Callable[..., None]) -> None:
    registry(_kernel())
    found = Search(_linear(), {}, CPU, 1e-9).run()
    assert found.verdict is not None and found.verdict.cut_short
    assert [one.refused for one in found.verdict.trials if one.name == "handwritten linear"] == [search.NO_TIME]


def test_what_needs_no_compiler_comes_first_and_the_generated_program_is_tried_all_the_same(
    registry: Callable[..., None],
) -> None:
    registry(_kernel())
    b = Builder()
    x, w, bias = b.input((4, 64), "float32"), b.input((64, 48), "float32"), b.input((48,), "float32")
    found = Search(b.graph([b.add("add", b.add("matmul", x, w), bias)]), {}, CPU, 60).run()
    assert found.verdict is not None
    names = [one.name for one in found.verdict.trials]
    said = "all fused, scales after products"
    assert names == [EAGER, f"{said}, handwritten linear", said]
    assert all(one.seconds is not None for one in found.verdict.trials)


def test_the_first_gate_takes_attention_at_its_real_width() -> None:
    """Its scale is a number in one form and follows from a size in the other, which small versions change."""
    b = Builder()
    q, k, v = (b.input((1, 2, 40, 64), "float32") for _ in range(3))
    graph = b.graph([b.add("attention", q, k, v, causal="end")])
    back = search.back_of(CPU)[0]
    assert back is not None
    for variant in search.variants(graph, back):
        Search(graph, {}, CPU, 60)._prove(variant)


def test_a_kernel_by_hand_is_made_anew_for_other_sizes(registry: Callable[..., None]) -> None:
    """`torch.compile` uses a program for all sizes of a magnitude, and such a kernel holds those it was made for."""
    made_for: list[int] = []

    def prepare(match: Match, known: Mapping[str, int], device: torch.device) -> Launch:
        made_for.append(known["b"])

        def launch(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
            assert len(out) == known["b"]
            out.copy_(*reference.evaluate(match.graph, tensors))

        return launch

    def why_not(match: Match, known: Mapping[str, int], device: torch.device) -> str:
        return "too many rows" if known["b"] > 100 else ""

    registry(replace(_kernel(), prepare=prepare, why_not=why_not))
    b = Builder()
    x, w, bias = b.input(("b", 64), "float32"), b.input((64, 48), "float32"), b.input((48,), "float32")
    graph = b.graph([b.add("silu", b.add("add", b.add("matmul", x, w), bias))])
    back, why = back_of(CPU)
    assert back is not None, why
    places = handwritten.apart(handwritten.sites(graph, {"b": 4}, "cpp", CPU))
    variant = next(variants(handwritten.replaced(graph, places), back))
    program = Search(graph, {"b": 4}, CPU, 10.0)._built(back, variant)
    for rows in (4, 9, 3, 9):
        given = [torch.randn(rows, 64), torch.randn(64, 48), torch.randn(48)]
        torch.testing.assert_close(program(given), reference.evaluate(graph, given))
    assert made_for == [4, 9, 3]
    with pytest.raises(GraphError, match="too many rows"):
        program([torch.randn(101, 64), torch.randn(64, 48), torch.randn(48)])
