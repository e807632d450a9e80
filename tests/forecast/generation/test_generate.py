"""The ways of generating agree: chunks, fixed shapes, mixed lengths, long horizons; and the approximations differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from anytorch.errors import InputError
from anytorch.forecast import predictor as predictor_module
from anytorch.forecast.decoding import decoder as decoder_module
from anytorch.forecast.decoding import sampling
from anytorch.forecast.decoding.sampling import Noise, Sampler, exponential, exponential_from_uniform
from anytorch.forecast.generation import steps as steps_module
from anytorch.forecast.generation.generate import ACCELERATOR_ROWS, HOST_ROWS, Chunk, split
from anytorch.forecast.inputs import read_series
from anytorch.forecast.results import decode_windows

SAMPLER = Sampler(0.9, 0, 0.9)


def series_of(frame: pd.DataFrame, rows: slice, pred_len: int, where: str = "it") -> Any:
    part = frame.iloc[rows]
    return read_series(part.drop(columns="timestamps"), part["timestamps"], None, pred_len, where=where, checks=True)


def same(found: Any, wanted: Any) -> None:
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one.s1, other.s1)
        np.testing.assert_array_equal(one.s2, other.s2)
        np.testing.assert_allclose(one.normal, other.normal, atol=2e-5)


@pytest.fixture
def mixed(minutes: Any) -> list[Any]:
    """Lengths 20, 50, 31, 50, 12: below and above a context of 40."""
    rows = [slice(0, 20), slice(10, 60), slice(5, 36), slice(40, 90), slice(0, 12)]
    return [series_of(minutes, part, 24, f"series {place}") for place, part in enumerate(rows)]


def test_a_mix_of_lengths_is_what_each_is_alone(mixed: Any, predictor: Any) -> None:
    made = predictor("b", max_context=40)
    greedy = Sampler(1.0, 1, 1.0)
    together = made.paths(mixed, greedy, 1)
    same(together, [made.paths([one], greedy, 1)[0] for one in mixed])


@pytest.mark.long
@pytest.mark.parametrize("rolling", ["exact", "evict", "trim"])
def test_chunks_change_nothing(mixed: Any, predictor: Any, rolling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they change the draws: every row has its own numbers, whichever rows are computed with it."""
    made = predictor("b", max_context=40)
    whole = made.paths(mixed, SAMPLER, 3, rolling=rolling, seed=3)
    monkeypatch.setattr(predictor_module, "HOST_WINDOWS", 6)
    monkeypatch.setattr(predictor_module, "HOST_ROWS", 64)
    same(made.paths(mixed, SAMPLER, 3, rolling=rolling, seed=3), whole)
    monkeypatch.setattr(predictor_module, "HOST_WINDOWS", 2)  # fewer than the samples of one series
    monkeypatch.setattr(predictor_module, "HOST_ROWS", 7)
    same(made.paths(mixed, SAMPLER, 3, rolling=rolling, seed=3), whole)


@pytest.mark.parametrize("rolling", ["exact", "evict"])
@pytest.mark.parametrize("greedy", [False, True])
def test_steps_of_fixed_shapes(minutes: Any, mixed: Any, predictor: Any, rolling: str, greedy: bool) -> None:
    """What a recording would replay, computed plainly; twice, since the second forecast uses the first one's memory."""
    sampler = Sampler(1.0, 1, 1.0) if greedy else SAMPLER
    made = predictor("a", max_context=64)
    for several in ([series_of(minutes, slice(0, 36), 40)], [series_of(minutes, slice(9, 45), 40)]):
        made.static = ""
        wanted = made.paths(several, sampler, 3, rolling=rolling, seed=9)
        made.static = "plain"
        same(made.paths(several, sampler, 3, rolling=rolling, seed=9), wanted)
        assert made.decoder().kept.shape.steps == (28 if rolling == "exact" else 39)
    mixed = [replace(one, future_stamp=one.future_stamp[:20], future=one.future[:20]) for one in mixed]
    for several in (mixed, [mixed[1], mixed[0], mixed[2], mixed[3], mixed[4]]):
        made = predictor("b", max_context=80)
        wanted = made.paths(several, sampler, 2, rolling=rolling, seed=9)
        made.static = "plain"
        same(made.paths(several, sampler, 2, rolling=rolling, seed=9), wanted)


@pytest.mark.parametrize("own_rows", [64, 8])
def test_full_windows_prepared_together(
    minutes: Any, predictor: Any, own_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several rolled steps' histories in one pass, then steps of fixed shapes; also when they need several recordings."""
    monkeypatch.setattr(steps_module, "OWN_ROWS", own_rows)
    monkeypatch.setattr(steps_module, "FEW_QUERIES", 700)  # more and fewer than these
    prepared: list[int] = []
    prepare = steps_module.RolledSteps.prepare

    def spy(self: Any, lengths: Any, step: int, count: int, history: Any) -> Any:
        prepared.append(count)
        return prepare(self, lengths, step, count, history)

    monkeypatch.setattr(steps_module.RolledSteps, "prepare", spy)
    made = predictor("b", max_context=40)
    for lengths, samples, sampler, most in (
        ((20,), 3, SAMPLER, 16),
        ((20, 13), 2, SAMPLER, 12),
        ((50,), 1, SAMPLER, 16),
        ((38, 38), 1, Sampler(1.0, 1, 1.0), 13),  # 1024 rows at once
    ):
        several = [series_of(minutes, slice(at, at + length), 44) for at, length in enumerate(lengths)]
        made.static = ""
        wanted = made.paths(several, sampler, samples, seed=5)
        assert not prepared
        made.static = "plain"
        for _ in range(2):  # the second time with the memory of the first
            same(made.paths(several, sampler, samples, seed=5), wanted)
        assert max(prepared) == min(most, own_rows)
        prepared.clear()


def test_windows_that_are_too_much_are_not_prepared(predictor: Any) -> None:
    decoder = predictor("b").decoder()

    def planned(lengths: list[int], step: int, limit: int = 32768, pred_len: int = 120) -> Any:
        return steps_module.plan_rolled(decoder, lengths, 20, 512, pred_len, step, limit, SAMPLER)

    shape = planned([400], 113)
    assert (shape.windows, shape.shared_rows, shape.own_rows) == (7, 399, 119)
    assert planned([400], 114) == shape, "one recording for all of them"
    assert planned([400], 118) is None, "two steps are left"
    assert planned([400] * 20, 113) is None, "47,600 own rows"
    assert planned([400], 113, limit=2500) is not None and planned([400], 113, limit=2000) is None
    assert planned([400], 505, pred_len=600).own_rows == 511 and planned([400], 511, pred_len=600) is None


def test_noise_from_uniform_numbers() -> None:
    """What a device makes of them are the numbers the host would have drawn."""
    assert exponential_from_uniform()
    wanted, found = (Noise.seeded(3, 4, (64, 32)).steps(torch.tensor([0, 2]), uniform) for uniform in (False, True))
    for _, one, other in zip(range(3), wanted, found, strict=False):
        for a, b in zip(one, other, strict=True):
            assert b.dtype == torch.float64
            torch.testing.assert_close(exponential(b), a, rtol=0, atol=0)


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.parametrize("rows", [[0, 1, 2, 3], [0, 2]])
def test_noise_in_blocks_is_that_of_single_steps(uniform: bool, rows: list[int]) -> None:
    one_by_one = Noise.seeded(3, 4, (64, 32)).steps(torch.tensor(rows), uniform)
    wanted = [next(one_by_one) for _ in range(7)]
    draws = Noise.seeded(3, 4, (64, 32)).steps(torch.tensor(rows), uniform)
    blocks = [draws.parts(draws.block(steps)) for steps in (1, 4, 2)]
    for place in (0, 1):
        found = torch.cat([block[place] for block in blocks])
        assert found.shape == (7, len(rows), (64, 32)[place])
        assert torch.equal(found, torch.stack([step[place] for step in wanted]))


def test_a_part_of_the_rows_has_the_numbers_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are made: with the logarithm of that part alone, or where this torch makes them otherwise."""
    every = Noise.seeded(3, 4, (64, 32)).steps(torch.arange(4))
    wanted = [[part[[1, 3]] for part in next(every)] for _ in range(3)]
    for from_uniform in (True, False):
        monkeypatch.setattr(sampling, "exponential_from_uniform", lambda found=from_uniform: found)
        some = Noise.seeded(3, 4, (64, 32)).steps(torch.tensor([1, 3]))
        for step in wanted:
            for found, part in zip(next(some), step, strict=True):
                assert found.dtype == torch.float32 and torch.equal(found, part)


class FakeRecording:
    def __init__(self, work: Any) -> None:
        self.work, self.replays = work, 0

    def replay(self) -> Any:
        self.replays += 1
        return self.work()


class FakeRecorder:
    """Runs the work as a recorder does: twice to warm up, once for the recording, then with every replay."""

    failed = ""

    def __init__(self, device: torch.device) -> None:
        self.recordings: dict[Any, FakeRecording] = {}
        self.seen: set[Any] = set()

    def run(self, shape: Any, work: Any) -> Any:
        if shape in self.recordings:
            return self.recordings[shape].replay()
        if shape in self.seen:
            return self.record(shape, work)
        self.seen.add(shape)
        return work()

    def record(self, shape: Any, work: Any) -> Any:
        for _ in range(2):
            work()
        self.recordings[shape] = FakeRecording(work)
        return self.recordings[shape].replay()


@pytest.mark.parametrize("samples", [1, 3])
def test_recording_leaves_no_trace(minutes: Any, predictor: Any, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Warming up writes rows, ids and places of its own; the forecast must not see them, nor the one before it."""
    made = predictor("a", max_context=64)
    histories = [[series_of(minutes, slice(start, start + 36), 40)] for start in (0, 9, 21)]
    wanted = [made.paths(one, SAMPLER, samples, seed=9 + place) for place, one in enumerate(histories)]
    for module in (steps_module, decoder_module):
        monkeypatch.setattr(module, "Recorder", FakeRecorder)
    made = predictor("a", max_context=64)
    made.static = "recorded"
    for place, (one, answer) in enumerate(zip(histories, wanted, strict=True)):
        same(made.paths(one, SAMPLER, samples, seed=9 + place), answer)
    decoder = made.decoder()
    assert decoder.kept.recorder.recordings["step"].replays == 1 + 3 * 28
    assert decoder.kept_rolled.recorder.recordings["step"].replays == 1 + 3 * 11
    parts = [decoder.replayed, decoder.kept.replayed, decoder.kept_rolled.replayed, made.codec().replayed]
    for part in parts:  # recorded the second time they came, replayed the third time
        assert {recording.replays for recording in part.recorder.recordings.values()} == {2}
    names = sorted(str(key[0]) for part in parts for key in part.recorder.recordings)
    assert [name.strip("('").split("'")[0] for name in names] == [
        "decode",
        "encode",
        "first",
        "prepare",
        "time",
        "time",
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_same_paths_on_a_gpu(minutes: Any, golden: Any, missing: Any) -> None:
    """On the webgpu device, through its recorded graphs; a software adapter will do."""
    import anytorch
    from anytorch.errors import AnytorchError
    from anytorch.forecast import KronosPredictor
    from anytorch.forecast.model import Kronos, KronosTokenizer

    try:
        device = anytorch.resolve("webgpu", strict=True).device
    except AnytorchError as exc:
        missing("webgpu-adapter", str(exc))
    found = []
    for where in ("cpu", device):
        model = Kronos.from_pretrained(golden.folder("a", "model"))
        tokenizer = KronosTokenizer.from_pretrained(golden.folder("a", "tokenizer"))
        made = KronosPredictor(model, tokenizer, device=where, max_context=64)
        found.append(made.paths([series_of(minutes, slice(0, 40), 30)], SAMPLER, 3, seed=3))
    same(found[1], found[0])


def test_evicting_and_trimming_are_other_numbers(minutes: Any, predictor: Any) -> None:
    made = predictor("a", max_context=32)
    series = [series_of(minutes, slice(0, 28), 30)]
    exact, evict, trim = (made.paths(series, SAMPLER, 2, rolling=way, seed=1)[0] for way in ("exact", "evict", "trim"))
    np.testing.assert_array_equal(exact.s1[:, :5], evict.s1[:, :5])  # until the window rolls they are the same
    assert (exact.s1 != evict.s1).any() and (exact.s1 != trim.s1).any()
    # While nothing rolls, all three are one.
    series = [series_of(minutes, slice(0, 20), 12)]
    same(made.paths(series, SAMPLER, 2, rolling="evict", seed=1), made.paths(series, SAMPLER, 2, seed=1))
    same(made.paths(series, SAMPLER, 2, rolling="trim", seed=1), made.paths(series, SAMPLER, 2, seed=1))
    with pytest.raises(InputError, match="rolling='trim' needs pred_len"):
        made.paths([series_of(minutes, slice(0, 28), 32)], SAMPLER, 1, rolling="trim")
    with pytest.raises(InputError, match="rolling is 'slide'; use one of: exact, evict, trim"):
        made.paths(series, SAMPLER, 1, rolling="slide")


def test_evicting_past_the_whole_history(minutes: Any, predictor: Any) -> None:
    """A window in which nothing of the history is left, and the first generated rows are gone, too."""
    made = predictor("a", max_context=16)
    (found,) = made.paths([series_of(minutes, slice(0, 12), 50)], SAMPLER, 2, rolling="evict", seed=1)
    assert found.normal.shape == (2, 50, 6) and np.isfinite(found.normal).all()


def test_a_forecast_longer_than_the_context(minutes: Any, predictor: Any) -> None:
    """Which the published code cannot make. Its first part is what a shorter forecast gives."""
    made = predictor("a", max_context=24)
    long = made.paths([series_of(minutes, slice(0, 20), 70)], SAMPLER, 2, seed=4)[0]
    short = made.paths([series_of(minutes, slice(0, 20), 24)], SAMPLER, 2, seed=4)[0]
    assert long.normal.shape == (2, 70, 6) and np.isfinite(long.normal).all()
    np.testing.assert_array_equal(long.s1[:, :24], short.s1)
    np.testing.assert_allclose(long.normal[:, :24], short.normal, atol=2e-5)


def test_which_rows_are_decoded_together() -> None:
    assert decode_windows(120, 512) == [(0, 120, 0)]
    assert decode_windows(512, 512) == [(0, 512, 0)]
    assert decode_windows(30, 16) == [(0, 16, 0), (8, 24, 8), (14, 30, 10)]
    for pred_len in range(1, 60):
        rows = [row for start, end, skipped in decode_windows(pred_len, 16) for row in range(start + skipped, end)]
        assert rows == list(range(pred_len))


def test_chunks() -> None:
    assert split([5, 9, 7], 2, 6, [1, 1, 1], 100) == [Chunk((1, 2, 0), 0, 2)]
    assert split([5, 9, 7], 2, 4, [1, 1, 1], 100) == [Chunk((1, 2), 0, 2), Chunk((0,), 0, 2)]
    assert split([5, 9, 7], 2, 6, [10, 10, 10], 40) == [Chunk((1, 2), 0, 2), Chunk((0,), 0, 2)]
    assert split([5], 5, 2, [1], 100) == [Chunk((0,), 0, 2), Chunk((0,), 2, 4), Chunk((0,), 4, 5)]
    assert split([5], 3, 64, [60], 100) == [Chunk((0,), 0, 1), Chunk((0,), 1, 2), Chunk((0,), 2, 3)]
    assert split([5], 1, 64, [1000], 100) == [Chunk((0,), 0, 1)]
    assert HOST_ROWS < ACCELERATOR_ROWS


def test_changed_weights_are_noticed(minutes: Any, golden: Any) -> None:
    from anytorch.forecast import KronosPredictor
    from anytorch.forecast.model import Kronos

    model = Kronos.from_pretrained(golden.folder("a", "model"))
    made = KronosPredictor(model, golden.tokenizer("a"), device="cpu", max_context=64)
    series = [series_of(minutes, slice(0, 30), 8)]
    before = made.paths(series, SAMPLER, 1, seed=2)[0]
    assert made.decoder() is made.decoder()
    with torch.no_grad():
        model.embedding.emb_s1.weight.mul_(-1)  # as an optimizer would, in place
    after = made.paths(series, SAMPLER, 1, seed=2)[0]
    assert (before.s1 != after.s1).any()
    model.load_state_dict(golden.model("a").state_dict())
    same(made.paths(series, SAMPLER, 1, seed=2), [before])


def test_a_forecast_leaves_the_model_trainable(minutes: Any, golden: Any) -> None:
    """Fused weights are views, and one optimizer step after a forecast works as before it."""
    from anytorch.forecast import KronosPredictor
    from anytorch.forecast.model import Kronos

    model = Kronos.from_pretrained(golden.folder("b", "model"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    KronosPredictor(model, golden.tokenizer("b"), device="cpu").paths([series_of(minutes, slice(0, 30), 3)], SAMPLER, 1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
    ids = torch.zeros(1, 4, dtype=torch.long)
    sum(part.sum() for part in model(ids, ids)).backward()
    optimizer.step()
    assert not torch.equal(
        model.transformer[0].self_attn.k_proj.weight, before["transformer.0.self_attn.k_proj.weight"]
    )
