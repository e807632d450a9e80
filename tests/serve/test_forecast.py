"""POST /v1/forecast: JSON, CSV text, uploads, and the queue that computes requests together."""

from __future__ import annotations

import gzip
import math
import shutil
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from anytorch.errors import ModelError, QueueClosed, QueueFull
from anytorch.forecast.candles.generate import sample_candles
from anytorch.serve.forecasting import ForecastQueue, Job, Pace, Terms, take

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def table() -> Any:
    return sample_candles(150, seed=3)


def columns(table: Any) -> dict[str, Any]:
    found = {name: table[name].tolist() for name in ("open", "high", "low", "close", "volume", "amount")}
    return {"timestamps": [moment.isoformat() for moment in table["timestamps"]], **found}


def ask(service: Any, **body: Any) -> Any:
    return service.client.post("/v1/forecast", json={"horizon": 4, "samples": 2, "seed": 7, **body})


def good(answer: Any) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    document: dict[str, Any] = answer.json()
    return document


def test_the_same_candles_in_every_form_give_the_same_forecast(forecaster: Any, table: Any) -> None:
    from_json = good(ask(forecaster, candles=columns(table)))
    text = table.to_csv(index=False)
    from_csv = good(ask(forecaster, csv=text))
    fields = {"horizon": "4", "samples": "2", "seed": "7", "quantiles": "0.1,0.5,0.9"}
    uploaded = good(forecaster.client.post("/v1/forecast", files={"file": ("prices.csv", text.encode())}, data=fields))
    for other in (from_csv, uploaded):
        assert other["forecast"] == from_json["forecast"] and other["quantiles"] == from_json["quantiles"]
    assert len(from_json["forecast"]["close"]) == 4 and len(from_json["history"]["close"]) == 150
    assert list(from_json["quantiles"]) == ["0.1", "0.5", "0.9"]
    assert from_json["forecast"]["timestamps"][0] > from_json["history"]["timestamps"][-1]
    assert from_json["device"] == "cpu" and from_json["model"] == "tiny" and from_json["device_warning"] is None
    assert any("frequency" in note for note in from_json["guessed"])
    assert "samples" not in from_json


def test_the_hours_come_from_the_whole_history(forecaster: Any) -> None:
    """The model sees 64 rows, with no night among them."""
    candles = sample_candles(420, seed=3)
    found = good(ask(forecaster, candles=columns(candles[:300]), horizon=120, samples=1))
    assert found["forecast"]["timestamps"] == [time.isoformat() for time in candles["timestamps"][300:]]


def test_a_seed_gives_the_same_paths_and_the_engine_s_own(forecaster: Any) -> None:
    first = good(ask(forecaster, sample=True, return_samples=True))
    again = good(ask(forecaster, sample=True, return_samples=True))
    assert first["samples"] == again["samples"] and len(first["samples"]) == 2
    other = good(ask(forecaster, sample=True, seed=8))
    assert other["forecast"]["close"] != first["forecast"]["close"]


def test_few_rows_are_told(forecaster: Any, table: Any) -> None:
    document = good(ask(forecaster, candles=columns(table.iloc[:20])))
    assert any("20 rows" in words for words in document["warnings"])


BAD: list[tuple[dict[str, Any], int, str]] = [
    ({}, 422, "one of candles"),
    ({"sample": True, "csv": "x"}, 422, "one of candles"),
    ({"csv": "a,b\n1,2\n"}, 422, "no column"),
    ({"csv": "   "}, 422, "empty"),
    ({"csv": "timestamps,open,high,low,close\n2024-01-01,1,2,0.5,x\n2024-01-02,1,2,0.5,1\n"}, 422, "x"),
    ({"sample": True, "horizon": 0}, 422, "horizon"),
    ({"sample": True, "horizon": 10**6}, 422, "horizon"),
    ({"sample": True, "samples": 10**6}, 422, "samples"),
    ({"sample": True, "quantiles": [1.5]}, 422, "quantiles"),
    ({"sample": True, "quantiles": [0.5] * 30}, 422, "quantiles"),
    ({"sample": True, "temperature": 0}, 422, "temperature"),
    ({"sample": True, "temperature": "hot"}, 422, "temperature"),
    ({"sample": True, "top_p": 0}, 422, "top_p"),
    ({"sample": True, "seed": -1}, 422, "seed"),
    ({"sample": True, "seed": 2**64}, 422, "seed"),
    ({"sample": True, "model": "kronos-huge"}, 404, "kronos-huge"),
    ({"sample": True, "timezone": "Mars/Olympus"}, 422, "Mars"),
    ({"candles": {"timestamps": ["2024-01-01", "2024-01-02"], "open": [1, 2]}}, 422, "candles"),
    ({"candles": {"timestamps": ["a", "b"], "open": [1, 2], "high": [1, 2], "low": [1, 2], "close": [1, 2]}}, 422, "a"),
    ({"candles": {"timestamps": ["2024"] * 2, "open": [1], "high": [1, 2], "low": [1, 2], "close": [1, 2]}}, 422, "open"),
    ({"csv": "\x1f\u008bxxxx"}, 422, "not text"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "words"), BAD)
def test_what_makes_no_sense_is_told(forecaster: Any, body: dict[str, Any], status: int, words: str) -> None:
    answer = ask(forecaster, **body)
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json" and words in answer.json()["detail"]


def test_numbers_that_json_does_not_have(forecaster: Any) -> None:
    body = b'{"candles": {"timestamps": ["2024-01-01", "2024-01-02"], "open": [NaN, 1]}}'
    assert forecaster.client.post("/v1/forecast", content=body).status_code == 400
    assert forecaster.client.post("/v1/forecast", content=b"[1]").status_code == 422
    kind = {"Content-Type": "text/csv"}
    assert forecaster.client.post("/v1/forecast", content=b"a", headers=kind).status_code == 415


def test_uploads_that_are_no_text(forecaster: Any) -> None:
    for body in (gzip.compress(b"0" * 10**6), b"PK\x03\x04xx", b"PAR1xxxx", b"ARROW1xx"):
        assert forecaster.client.post("/v1/forecast", files={"file": ("x", body)}).status_code == 415
    form = {"Content-Type": "multipart/form-data; boundary=x"}
    assert forecaster.client.post("/v1/forecast", content=b"nonsense", headers=form).status_code == 400
    form = {"Content-Type": "multipart/form-data"}
    assert forecaster.client.post("/v1/forecast", content=b"nonsense", headers=form).status_code == 400


def test_too_many_rows(serve: Callable[..., Any], table: Any) -> None:
    service = serve(max_forecast_rows=100)
    assert ask(service, csv=table.to_csv(index=False)).status_code == 413
    assert ask(service, candles=columns(table)).status_code == 413


# --- the queue -------------------------------------------------------------------------------------------------------


class Fake:
    """A predictor that says which histories it was given together."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.gate = threading.Event()

    def predict_batch(self, df_list: Any, **options: Any) -> list[str]:
        assert self.gate.wait(120)
        self.batches.append(list(df_list))
        if "bad" in df_list:
            raise ValueError("a bad one")
        return [f"{name} {options['pred_len']}" for name in df_list]


def terms(**changes: Any) -> Terms:
    return Terms(**{"horizon": 3, "samples": 2, "quantiles": (), "temperature": 1.0, "top_p": 1.0, **changes})


def test_alike_requests_are_computed_together() -> None:
    waiting = deque([Job("a", terms()), Job("b", terms(horizon=9)), Job("c", terms()), Job("d", terms(seed=1)),
                     Job("e", terms())])  # fmt: skip
    assert [job.history for job in take(waiting)] == ["a", "c", "e"]
    assert [job.history for job in take(waiting)] == ["b"]
    assert [job.history for job in take(waiting)] == ["d"] and not waiting


def test_a_batch_is_bounded_and_seeds_are_alone() -> None:
    waiting = deque(Job(str(n), terms(samples=100)) for n in range(9))
    assert len(take(waiting, most_paths=512)) == 5
    seeded = deque(Job(str(n), terms(seed=5)) for n in range(3))
    assert [len(take(seeded)) for _ in range(3)] == [1, 1, 1]


def test_one_bad_request_fails_alone() -> None:
    fake = Fake()
    queue = ForecastQueue(fake)
    first = queue.submit("first", terms())
    rest = [queue.submit(name, terms()) for name in ("good", "bad", "fine")]
    fake.gate.set()
    assert first.result(120) == "first 3" and rest[0].result(120) == "good 3" and rest[2].result(120) == "fine 3"
    with pytest.raises(ValueError, match="a bad one"):
        rest[1].result(120)
    queue.close()


def test_a_cancelled_forecast_is_not_computed_and_the_queue_is_bounded() -> None:
    fake = Fake()
    queue = ForecastQueue(fake, most_waiting=2)
    first = queue.submit("first", terms(horizon=1))
    while queue.waiting:
        threading.Event().wait(0.001)
    gone, kept = queue.submit("gone", terms()), queue.submit("kept", terms())
    with pytest.raises(QueueFull):
        queue.submit("more", terms())
    assert gone.cancel() and not queue.alive()
    fake.gate.set()
    queue.close()
    assert first.result(0) and kept.result(0) == "kept 3"
    assert fake.batches == [["first"], ["kept"]]
    with pytest.raises(QueueClosed):
        queue.submit("late", terms())


class Stepping:
    """A predictor that takes steps until it is told to stop, or enough of them are made."""

    def __init__(self) -> None:
        self.steps = 0

    def predict_batch(self, df_list: Any, *, pred_len: int, verbose: Any, **_: Any) -> list[str]:
        for step in range(pred_len):
            self.steps += 1
            time.sleep(0.002)
            verbose(step, pred_len)
        return list(df_list)


def test_a_forecast_nobody_waits_for_any_more_ends() -> None:
    stepping = Stepping()
    queue = ForecastQueue(stepping, most_waiting_s=1.0)
    long = queue.submit("long", terms(horizon=100_000))
    while not stepping.steps:
        time.sleep(0.001)
    assert not long.cancel(), "it is being computed"
    assert queue.submit("short", terms(horizon=3)).result(120) == "short"
    assert stepping.steps < 50_000 and isinstance(long.exception(120), Exception)
    running = queue.submit("a", terms(horizon=100_000))
    while queue.waiting:
        time.sleep(0.001)
    waiting = queue.submit("b", terms(horizon=2000))  # four seconds, by what was measured
    with pytest.raises(QueueFull, match="take about"):
        queue.submit("c", terms(horizon=5))
    assert waiting.cancel() and queue.waiting == 0
    running.cancel()
    queue.close()


def test_what_cannot_be_ready_in_time_is_refused_at_once() -> None:
    """It would keep the worker from everybody else until its time was up."""
    stepping = Stepping()
    queue = ForecastQueue(stepping)
    assert queue.submit("unknown", terms(horizon=20, samples=4), 0.01).result(120), "nothing is known yet"
    with pytest.raises(TimeoutError, match=r"10000 steps take at least \d+ s here; the request's time limit is 5 s"):
        queue.submit("long", terms(horizon=10_000, samples=4), 5.0)  # 2 ms at least for each
    given_up = queue.submit("late", terms(horizon=10_000, samples=1))
    enough = stepping.steps + 30
    while stepping.steps < enough:
        time.sleep(0.001)
    given_up.cancel()
    assert isinstance(given_up.exception(120), Exception)
    assert queue.submit("short", terms(horizon=1, samples=1)).result(120), "the worker goes on"
    with pytest.raises(TimeoutError):
        queue.submit("again", terms(horizon=10_000, samples=1), 5.0)  # known from the one that was given up
    queue.submit("possible", terms(horizon=100, samples=4), 5.0).cancel()
    queue.close()


def test_the_pace_is_that_of_the_steps_alone() -> None:
    pace = Pace()
    pace.seen(4, [100.0])
    pace.seen(4, [100.0 + 0.5 * n for n in range(7)])
    assert pace.least_s(terms(horizon=10, samples=4)) == 0, "too few steps to know"
    pace.seen(4, [100.0 + 0.5 * n for n in range(9)])
    pace.seen(4, [200.0 + 0.25 * n for n in range(9)])
    pace.seen(4, [300.0 + 0.75 * n for n in range(9)])
    pace.seen(8, [400.0 + 0.125 * n for n in range(9)])
    assert pace.least_s(terms(horizon=10, samples=4)) == 2.5, "the shortest that was seen"
    assert pace.least_s(terms(horizon=10, samples=9)) == 2.5 and pace.least_s(terms(horizon=10, samples=3)) == 0


class Costly:
    """A predictor that takes 20 ms, however little is asked for, and next to nothing for the rest."""

    def predict_batch(self, df_list: Any, **_: Any) -> list[str]:
        time.sleep(0.02)
        return list(df_list)


def test_a_small_forecast_does_not_make_the_large_ones_seem_endless() -> None:
    gate = Fake()
    queue = ForecastQueue(Costly(), most_waiting_s=10.0)
    queue.submit("large", terms(horizon=1000, samples=20)).result(120)
    queue.submit("small", terms(horizon=1, samples=1)).result(120)  # 20 ms for one number
    queue._predictor = gate
    first = queue.submit("first", terms())
    while queue.waiting:
        time.sleep(0.001)
    waiting = [queue.submit(f"large {n}", terms(horizon=1000 + n, samples=20)) for n in range(20)]
    assert queue.waiting == 20, "by the small one alone they would take hours"
    gate.gate.set()
    assert first.result(120) and all(one.result(120) for one in waiting)
    queue.close()


def test_a_deadline_ends_the_computation(forecaster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = forecaster.state.models.loaded("forecast")[0].queue
    computed: list[int] = []
    real = queue._predictor.predict_batch

    def noting(*given: Any, pred_len: int, **options: Any) -> Any:
        found = real(*given, pred_len=pred_len, **options)
        computed.append(pred_len)
        return found

    monkeypatch.setattr(queue._predictor, "predict_batch", noting)
    body = {"sample": True, "horizon": 1000, "samples": 20}
    late = forecaster.client.post("/v1/forecast", json=body, headers={"X-Request-Timeout": "0.5"})
    assert late.status_code == 504, late.text
    assert ask(forecaster, sample=True).status_code == 200
    assert queue.waiting == 0 and len(computed) == 1 and 1000 not in computed, "the long one was computed to its end"


def test_forecasts_at_the_same_time(forecaster: Any) -> None:
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda n: ask(forecaster, sample=True, seed=None, horizon=2 + n % 2), range(6)))
    assert all(math.isfinite(good(answer)["forecast"]["close"][-1]) for answer in answers)


def test_a_folder_of_fine_tuning_is_served_with_what_it_says(tmp_path: Path) -> None:
    """Its tokenizer and its window; a folder that says nothing has its tokenizer inside it or beside it, as before."""
    from anytorch.forecast.model.pretrained import tiny_folder
    from anytorch.serve.loaders import ForecastModel, Wanted
    from anytorch.serve.options import ServeOptions

    folder, options = tmp_path / "mine", ServeOptions(threads=1)
    shutil.copytree(tiny_folder("model"), folder)
    shutil.copytree(tiny_folder("tokenizer"), folder / "its own")

    def length() -> int | None:
        model = ForecastModel(Wanted("mine", "forecast", folder, "cpu"), options)
        model.close()
        return model.info.max_length

    with pytest.raises(ModelError, match="this forecasting model has no tokenizer"):
        length()
    (folder / "anytorch.json").write_text('{"tokenizer": "its own", "max_context": 77}')
    assert length() == 77
    (folder / "its own").rename(folder / "tokenizer")
    with pytest.raises(ModelError, match="there is no folder"):
        length()
    (folder / "anytorch.json").unlink()
    assert length() == 512
