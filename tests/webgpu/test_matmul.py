"""Matrix products against the CPU: every schedule, operands in every layout, every dtype; and how a schedule is chosen."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from tests.webgpu.agree import agree

from anytorch.errors import WrongAnswer
from anytorch.gpu.adapters import Adapter
from anytorch.gpu.native import ShaderError
from anytorch.gpu.wgsl.matmul import Schedule
from anytorch.measured import store
from anytorch.webgpu.tuning import DIRECT, TILES, Shape, Tiling, candidates, choose, splits_for

pytestmark = pytest.mark.native

SHAPES = [(1, 1, 1), (3, 5, 7), (1, 16, 8), (12, 16, 20), (17, 20, 33), (40, 12, 1)]  # m, k, n

# Small relatives of the real tiles: the text is the same, and lavapipe compiles them in a second.
FORMS = {
    "tiled": Schedule("tiled", 16, 16, 8, 4, 4, unroll=1),
    "tiled double": Schedule("tiled", 16, 16, 8, 4, 4, unroll=2, double=True),
    "tiled 8x8, 4x8 warps": Schedule("tiled", 32, 64, 8, 8, 8, unroll=1),
}


def make(*shape: int, dtype: torch.dtype = torch.float32, grad: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.randn(shape, generator=generator)
    values = values if dtype.is_floating_point else values * 5
    return values.to(dtype).requires_grad_(grad)


@pytest.fixture
def forced(fresh_plans: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[Tiling], None]:
    """Make every product of floats run with one schedule."""
    from anytorch.gpu.plans import plans
    from anytorch.webgpu import products

    def force(choice: Tiling) -> None:
        plans.clear()
        monkeypatch.setattr(products, "choose", lambda *_, **__: choice)

    return force


def in_every_layout(m: int, k: int, n: int, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
    left = [make(2, m, k, dtype=dtype), make(2, k, m, dtype=dtype).mT]
    right = [make(2, k, n, dtype=dtype), make(2, n, k, dtype=dtype).mT]
    return list(itertools.product(left, right))


@pytest.mark.parametrize("form", FORMS)
def test_tiles(forced: Callable[[Tiling], None], form: str) -> None:
    forced(Tiling(FORMS[form]))
    layouts = in_every_layout(20, 36, 24, torch.float32)
    for a, b in layouts[1:3] if form == "tiled" else layouts[:1]:
        agree(lambda d, x, y: torch.baddbmm(d, x, y, alpha=0.5, beta=2), make(24), a, b)
    a, b = in_every_layout(19, 37, 23, torch.float32)[1]  # no whole vectors
    agree(lambda d, x, y: torch.baddbmm(d, x, y, alpha=0.5, beta=2), make(23), a, b)


def test_parts_of_k_are_added_up(forced: Callable[[Tiling], None]) -> None:
    forced(Tiling(FORMS["tiled"], 3))
    a, b = in_every_layout(20, 36, 24, torch.float32)[0]
    agree(lambda d, x, y: torch.baddbmm(d, x, y, alpha=0.5, beta=2), make(24), a, b)


@pytest.mark.parametrize("half", [False, True])
def test_tiles_of_halves(forced: Callable[[Tiling], None], half: bool) -> None:
    forced(Tiling(Schedule("tiled", 16, 16, 8, 4, 4, unroll=1, half=half)))
    a, b = in_every_layout(20, 36, 24, torch.float16)[1]
    agree(torch.bmm, a, b, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize(("m", "k", "n", "splits"), [(1, 64, 40, 1), (3, 64, 40, 2), (2, 37, 23, 1)])
def test_few_rows(forced: Callable[[Tiling], None], m: int, k: int, n: int, splits: int) -> None:
    for form, width, at in (("rows", 8, 1), ("columns", 32, 0)):
        forced(Tiling(Schedule(form, bn=width, tm=m), splits))
        a, b = in_every_layout(m, k, n, torch.float32)[at]
        agree(lambda d, x, y: torch.baddbmm(d, x, y), make(n), a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8])
def test_dtypes(webgpu: Any, dtype: torch.dtype) -> None:
    rtol = {torch.float16: 1e-2, torch.bfloat16: 5e-2}.get(dtype, 1e-4)
    for m, k, n in SHAPES[:: 1 if dtype is torch.float32 else 3]:
        agree(torch.mm, make(m, k, dtype=dtype), make(k, n, dtype=dtype), rtol=rtol, atol=rtol)
        agree(torch.mm, make(k, m, dtype=dtype).t(), make(n, k, dtype=dtype).t(), rtol=rtol, atol=rtol)


def test_gradients(webgpu: Any) -> None:
    agree(torch.mm, make(5, 6, grad=True), make(6, 7, grad=True))
    agree(torch.bmm, make(3, 5, 6, grad=True), make(3, 6, 7, grad=True))
    agree(torch.nn.functional.linear, make(4, 3, 6, grad=True), make(7, 6, grad=True), make(7, grad=True))


def test_relatives(webgpu: Any) -> None:
    a, b, x = make(5, 6), make(6, 7), make(6)
    agree(torch.mv, a, x)
    agree(torch.dot, x, x)
    agree(torch.vdot, x, x)
    agree(torch.outer, x, a[:, 0])
    agree(lambda d, p, q: torch.addmv(d, p, q, alpha=3, beta=0.5), make(5), a, x)
    agree(lambda d, p, q: torch.addbmm(d, p, q, alpha=2), make(5, 7), make(3, 5, 6), make(3, 6, 7))
    agree(lambda d, p, q: d.clone().addmm_(p, q), make(5, 7), a, b)
    agree(lambda p, q: torch.einsum("ij,jk->ki", p, q), a, b)
    agree(lambda d, p, q: torch._addmm_activation(d, p, q), make(7), a, b)
    agree(lambda d, p, q: torch.addmm(d, p, q, beta=0.2, alpha=0.6), make(5, 7).long(), a.long(), b.long())


def test_slices_nothing_and_out(webgpu: Any) -> None:
    base = make(9, 12)
    agree(lambda t: t[1:5, 2:9] @ t[2:9, 1:8:2], base)
    agree(lambda t: t[:, :0] @ t[:0], base)
    agree(lambda t: t[:0] @ t.t(), base)
    agree(lambda d, t: torch.addmm(d, t[:, :0], t[:0], beta=2), make(12), base)
    out = torch.empty(9, 9, device="webgpu")
    moved = base.to("webgpu")
    assert torch.mm(moved, moved.t(), out=out) is out
    torch.testing.assert_close(out.cpu(), base @ base.t())


def test_what_is_added_is_not_read_when_it_counts_for_nothing(webgpu: Any) -> None:
    broken = torch.full((4, 4), float("nan"))
    agree(lambda d, p, q: torch.addmm(d, p, q, beta=0), broken, make(4, 6), make(6, 4))


def test_errors_are_torchs_own(webgpu: Any) -> None:
    x = make(3, 4).to("webgpu")
    with pytest.raises(RuntimeError, match=r"same reduction dim|cannot be multiplied"):
        torch.mm(x, x)


def test_quantized_weights(webgpu: Any) -> None:
    for m in (1, 6):
        x = make(m, 64)
        weight = torch.arange(-1280, 1280).remainder(255).sub(127).view(40, 64).to(torch.int8)
        scales = make(40).abs()
        ours = torch._weight_int8pack_mm(x.to("webgpu"), weight.to("webgpu"), scales.to("webgpu"))
        torch.testing.assert_close(ours.cpu(), (x @ weight.float().t()) * scales, rtol=1e-4, atol=1e-2)
        nibbles = torch.arange(2560).remainder(16).view(40, 64)
        both = make(2, 40, 2)  # scale and zero, per group of 32
        packed = (nibbles[:, ::2] << 4 | nibbles[:, 1::2]).to(torch.uint8)
        scale, zero = (both[:, :, i].t().unsqueeze(2) for i in range(2))
        dense = ((nibbles - 8).view(40, 2, 32) * scale + zero).view(40, 64)
        words = torch.ops.aten._convert_weight_to_int4pack(packed.to("webgpu"), 2)
        ours = torch.ops.aten._weight_int4pack_mm(x.to("webgpu"), words, 32, both.to("webgpu"))
        torch.testing.assert_close(ours.cpu(), x @ dense.t(), rtol=1e-4, atol=1e-3)


# --- choosing ------------------------------------------------------------------------------------------------------


def of(m: int, n: int, k: int, **more: Any) -> list[Tiling]:
    limits: dict[str, Any] = {"software": False, "integrated": False, "shared_bytes": 49_152, **more}
    return candidates(Shape(1, m, n, k, "k"), **limits)


def test_cpu_adapters_get_no_barriers() -> None:
    for m in (1, 64):
        assert {choice.schedule.form for choice in of(m, 64, 64, software=True)} == {"direct"}


def test_decoding_gets_a_schedule_for_exactly_its_rows() -> None:
    assert all(c.schedule.form == "rows" and c.schedule.tm == 3 for c in of(3, 4096, 1024))


def test_a_large_product_is_not_split_and_a_deep_one_is() -> None:
    assert of(4096, 4096, 4096)[0].splits == 1
    assert of(64, 64, 16_384)[0].splits > 1
    assert splits_for(1, 400, 128) == 1


def test_tiles_fit_the_workgroup_memory() -> None:
    assert len(of(4096, 4096, 4096)) > len(of(4096, 4096, 4096, shared_bytes=16_384)) > 0
    assert all(c.schedule.shared_bytes <= 16_384 for c in of(4096, 4096, 4096, shared_bytes=16_384))


def test_every_tile_divides_into_threads_and_vectors() -> None:
    for tile in TILES:
        assert tile.threads <= 256
        assert tile.bm % tile.tm == tile.bn % tile.tn == tile.tm % 4 == tile.tn % 4 == tile.bk % tile.unroll == 0


class Card:
    """The name and limit of the GPU in docs of this repository's measurements; products are made up, on the CPU."""

    adapter = Adapter("NVIDIA H200", "Vulkan", "DiscreteGPU", "580.159.04", 0x10DE, 0)
    limits: ClassVar[dict[str, int]] = {"max-compute-workgroup-storage-size": 49_152}
    features: ClassVar[tuple[str, ...]] = ()
    recorder: Any = None
    profiler: Any = None

    def __init__(self) -> None:
        self.runs: list[Tiling] = []
        self.spoilt: dict[Schedule, Callable[[Any], Any]] = {}

    def synchronize(self) -> None: ...
    def wait(self) -> None: ...

    def run(self, tiling: Tiling) -> Any:
        self.runs.append(tiling)
        return self.spoilt.get(tiling.schedule, lambda right: right)(torch.linspace(-1, 1, 64).view(8, 8))

    def choose(self, *sizes: int) -> Tiling:
        return choose(self, Shape(1, *sizes, "n"), "float32", self.run)  # type: ignore[arg-type]


def test_a_measurement_is_made_once_and_remembered() -> None:
    card = Card()
    first = card.choose(1024, 1024, 1024)
    tried = len(card.runs)
    assert tried > 0
    store.forget()  # a new process: only the file is left
    assert card.choose(1000, 1000, 1000).schedule == first.schedule
    assert len(card.runs) == tried
    card.choose(32, 32, 32)  # too small to be worth it
    assert len(card.runs) == tried
    (verdict,) = store.verdicts()
    assert verdict.question.device == "NVIDIA H200 580.159.04 Vulkan" and verdict.chosen == first.name
    card.adapter = Adapter("NVIDIA H200", "Vulkan", "DiscreteGPU", "590.1", 0x10DE, 0)
    card.choose(1024, 1024, 1024)
    assert len(card.runs) > tried, "another driver is another question"


def test_schedules_are_compiled_before_they_are_tried() -> None:
    card, shape = Card(), Shape(1, 1024, 1024, 1024, "n")
    compiled: list[Tiling] = []

    def prepare(tiling: Tiling) -> None:
        assert not card.runs, "one was tried first"
        compiled.append(tiling)
        raise ShaderError("the candidate that is tried will say so")

    choose(card, shape, "float32", card.run, prepare=prepare)  # type: ignore[arg-type]
    options = candidates(shape, software=False, integrated=False, shared_bytes=49_152)
    assert {one.name for one in compiled} == {Tiling(DIRECT).name, *[one.name for one in options]}


def test_while_a_tape_records_nothing_is_measured() -> None:
    card = Card()
    card.recorder = object()
    card.choose(1024, 1024, 1024)
    assert not card.runs and not list(store.verdicts())


def refuse(right: Any) -> Any:
    raise ShaderError("webgpu: a shader does not compile\nand why")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (refuse, "ShaderError: webgpu: a shader does not compile"),
        (lambda right: right * 1.01, "wrong: off by 0.01"),
        (lambda right: right * float("nan"), "wrong: off by nan"),
        (lambda right: right.half(), "not torch.float32"),
        (lambda right: right[:4], "shape"),
    ],
)
def test_a_schedule_that_is_refused_or_wrong_is_left_out(spoil: Callable[[Any], Any], words: str) -> None:
    card = Card()
    options = candidates(Shape(1, 1024, 1024, 1024, "n"), software=False, integrated=False, shared_bytes=49_152)
    card.spoilt = {option.schedule: spoil for option in options[:-1]}
    assert card.choose(1024, 1024, 1024).schedule == options[-1].schedule
    (verdict,) = store.verdicts()
    assert all(words in trial.refused for trial in verdict.trials[:-1])
    card.spoilt[options[-1].schedule] = spoil
    store.clear()
    assert card.choose(1024, 1024, 1024).schedule == DIRECT, "the plainest is what is left"


def test_names_tell_schedules_apart() -> None:
    assert len({Tiling(schedule).name for schedule in TILES}) == len(TILES)
    assert Tiling(DIRECT, 3).name == Tiling(DIRECT).name == "direct tm=4 tn=8 unroll=4"


@pytest.mark.parametrize("kind", ["plain", "sliced and added", "few columns", "halves", "compared there"])
def test_what_is_tried_for_real_is_the_product(kind: str, fresh_plans: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every schedule that is tried gives the right answer, split or not, swapped or not: none is refused."""
    from anytorch.gpu.runtime import open_runtime
    from anytorch.webgpu import tuning

    runtime = open_runtime()
    monkeypatch.setattr(runtime, "adapter", replace(runtime.adapter, kind="DiscreteGPU"))
    monkeypatch.setattr(tuning, "WORTH_MEASURING", 1)
    if kind == "compared there":
        monkeypatch.setattr(tuning, "READ_BACK", 0)
    monkeypatch.setattr(tuning, "TILES", (FORMS["tiled"], FORMS["tiled double"]))
    dtype = torch.float16 if kind == "halves" else torch.float32
    a, b, d = make(40, 512, dtype=dtype), make(512, 3 if kind == "few columns" else 24, dtype=dtype), None
    if kind == "sliced and added":
        a, d = make(41, 513)[1:, 1:], make(24)
    there = [None if one is None else one.to("webgpu") for one in (a, b, d)]
    monkeypatch.setenv("ANYTORCH_MEASURE_S", "60")  # lavapipe compiles slowly
    found = torch.addmm(there[2], there[0], there[1]) if d is not None else there[0] @ there[1]  # type: ignore[operator]
    expected = a.double() @ b.double() + (0 if d is None else d)
    torch.testing.assert_close(found.cpu().double(), expected, rtol=2e-3, atol=2e-2 if kind == "halves" else 1e-3)
    (verdict,) = store.verdicts()
    assert len(verdict.trials) > 1 and all(one.seconds for one in verdict.trials), verdict.explain()
    assert "x512" in verdict.question.title


def test_a_large_answer_is_compared_on_the_device(webgpu: Any) -> None:
    from anytorch.webgpu.tuning import _near_on_device

    truth = make(30, 40)
    truth[3, 4] = float("inf")
    check = _near_on_device(truth.to("webgpu"))
    wrong, unknown = truth.clone(), truth.clone()
    wrong[0, 0] += 1
    unknown[1, 1] = float("nan")
    assert check(truth.to("webgpu")) == 0
    assert check(wrong.to("webgpu")) == pytest.approx(1 / float(truth[truth.isfinite()].norm()), rel=1e-4)
    assert not check(unknown.to("webgpu")) <= 1e9
    for other in (truth[:, :39], truth.half()):
        with pytest.raises(WrongAnswer, match="the answer is"):
            check(other.to("webgpu"))


@pytest.mark.parametrize("shape", [(5, 7), (7,), (1, 7), (1,), ()])
@pytest.mark.parametrize("beta", [0, 1])
def test_addbmm_in_place_grows_what_it_adds_to(webgpu: Any, shape: tuple[int, ...], beta: int) -> None:
    """As on the CPU; the other products in place refuse a tensor of another shape."""
    a, b = make(3, 5, 6), make(3, 6, 7)
    own, ours = make(*shape), make(*shape).to("webgpu")
    made = ours.addbmm_(a.to("webgpu"), b.to("webgpu"), beta=beta)
    assert made is ours
    torch.testing.assert_close(ours.cpu(), own.addbmm_(a, b, beta=beta), rtol=1e-4, atol=1e-4)
    if shape != (5, 7):
        with pytest.raises(RuntimeError):
            make(*shape).to("webgpu").addmm_(a[0].to("webgpu"), b[0].to("webgpu"))


@pytest.mark.parametrize("shape", [(2, 5, 7), (5, 6)])
def test_addbmm_in_place_refuses_what_does_not_fit(webgpu: Any, shape: tuple[int, ...]) -> None:
    a, b = make(3, 5, 6), make(3, 6, 7)
    for device in ("cpu", "webgpu"):
        with pytest.raises(RuntimeError):
            make(*shape).to(device).addbmm_(a.to(device), b.to(device))
