"""POST /v1/forecast: JSON, CSV text, uploads, deadlines."""

from __future__ import annotations

import gzip
import math
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from anytorch.errors import InputError, ModelError
from anytorch.forecast.candles.generate import sample_candles
from anytorch.serve import schemas
from anytorch.serve.routes import forecast

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


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"csv": ""}, "csv is empty: send a header and rows"),
        ({"csv": "\n"}, "the data is empty"),
        ({"csv": "timestamps,open,high,low,close\n"}, "the data has a header but no rows"),
        ({"csv": "timestamps,open,high,low,close\n2024-01-01,1,2,1,2\n"}, "the data has 1 usable row"),
        ({"csv": "date,sales\n" + "2024-01-01,5\n2024-01-02,\n2024-01-03,6\n"}, "line 3, column 'close': nan is not a"),
        ({"values": []}, "values: List should have at least 2 items"),
        ({"values": [1.0]}, "values: List should have at least 2 items"),
        ({"values": [None, None]}, "values.0: Input should be a valid number"),
        ({"values": [1.0, 2.0], "timestamps": []}, "values has 2 entries and timestamps has 0"),
        (
            {"candles": {"timestamps": [], "open": [], "high": [], "low": [], "close": []}},
            "timestamps: List should have",
        ),
        ({}, "send exactly one of candles, values, csv and sample; sent: none"),
    ],
)
def test_a_history_of_nothing_is_refused_in_words(forecaster: Any, body: dict[str, Any], said: str) -> None:
    told = ask(forecaster, **body)
    assert told.status_code == 422 and said in told.json()["detail"], told.text


def test_a_series_of_single_values(forecaster: Any) -> None:
    values = [round(20 * math.sin(row / 5) + row / 10, 3) for row in range(100)]  # negative ones, too
    days = [f"2024-{1 + row // 28:02}-{1 + row % 28:02}" for row in range(100)]
    document = good(ask(forecaster, values=values))
    assert document["history"]["close"] == values and len(document["forecast"]["close"]) == 4
    assert all(math.isfinite(value) for value in document["forecast"]["close"])
    assert any("each row counts as a day" in note for note in document["guessed"])
    assert document["forecast"]["timestamps"][0] > document["history"]["timestamps"][-1]
    dated = good(ask(forecaster, values=values, timestamps=days))
    assert dated["history"]["timestamps"][0].startswith("2024-01-01") and dated["history"]["close"] == values
    text = "day,sales\n" + "".join(f"{day},{value}\n" for day, value in zip(days, values, strict=True))
    assert good(ask(forecaster, csv=text))["forecast"] == dated["forecast"]


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
    ({"values": [1.0, 2.0, 3.0], "timestamps": ["2024-01-01"]}, 422, "values has 3 entries and timestamps has 1"),
    ({"values": [1.0]}, 422, "values"),
    ({"values": [1.0, 2.0], "sample": True}, 422, "one of candles"),
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


def test_a_deadline_ends_the_computation(forecaster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = forecaster.state.models.loaded("forecast")[0].queue
    computed: list[int] = []
    real = queue._predictor.forecast_batch

    def noting(*given: Any, pred_len: int, **options: Any) -> Any:
        found = real(*given, pred_len=pred_len, **options)
        computed.append(pred_len)
        return found

    monkeypatch.setattr(queue._predictor, "forecast_batch", noting)
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


HEAD = "timestamps,open,high,low,close"


@pytest.mark.parametrize(
    ("csv", "code"),
    [
        (",".join(["c"] * 100_000) + "\n", "too-many-columns"),
        (";".join(["c"] * 100_000) + "\n", "too-many-columns"),
        (f"{HEAD}\n2024-01-01,1,2,1,2{',1' * 100_000}\n", "too-many-columns"),  # pandas would make an index of them
        ("\n".join([",".join("c" * 400)] * 12_000), "too-many-cells"),
        (f"{HEAD}\r" + "2024-01-01,1,2,1,2\r" * 30_000, "too-many-rows"),
        (f"{HEAD}\r\n" + "2024-01-01,1,2,1,2\r\n" * 30_000, "too-many-rows"),
    ],
    ids=["wide", "semicolons", "wide rows", "cells", "old line ends", "line ends of Windows"],
)
def test_a_table_that_would_take_long_is_refused_before_it_is_read(forecaster: Any, csv: str, code: str) -> None:
    answer = ask(forecaster, csv=csv)
    assert answer.status_code == 413 and answer.json()["type"].endswith(f":{code}"), answer.text
    assert len(answer.content) < 1000


def test_only_the_instrument_that_is_meant_is_read(forecaster: Any, table: Any) -> None:
    """Each of ten thousand would take milliseconds; what is wrong with the others does not matter either."""
    rows = [",".join(map(str, row)) for row in table[["timestamps", "open", "high", "low", "close"]].to_numpy()]
    csv = "\n".join(
        [f"{HEAD},symbol", *(f"{row},MINE" for row in rows), *(f"2024-01-01,x,1,2,3,S{n}" for n in range(10_000))]
    )
    alone = good(ask(forecaster, csv="\n".join([HEAD, *rows])))
    found = good(ask(forecaster, csv=csv, symbol="MINE"))
    assert found["forecast"] == alone["forecast"] and found["name"] == "MINE"
    answer = ask(forecaster, csv=csv)
    assert answer.status_code == 422 and "10001 instruments" in answer.json()["detail"]
    answer = ask(forecaster, csv=csv, symbol="NOT")
    assert answer.status_code == 422 and "unknown symbol" in answer.json()["detail"]


def named(rows: list[str], *names: str) -> str:
    return "\n".join([f"{HEAD},symbol", *(f"{row},{name}" for name in names for row in rows)])


def test_a_part_is_meant_by_its_number_alone(table: Any) -> None:
    """A pair such as BTC/USDT is an instrument of its own: the candles of BTC are no answer to it."""
    rows = [",".join(map(str, row)) for row in table[["timestamps", "open", "high", "low", "close"]].to_numpy()]
    later = [f"2034{row[4:]}" for row in rows]
    for csv, symbol, found in (
        (named(rows, "BTC", "BTC/USDT"), "BTC/USDT", "BTC/USDT"),
        (named([*rows, *later], "BTC", "ETH"), "BTC/2", "BTC/2"),
        (named([*rows, *later], "BTC", "ETH"), "BTC", "BTC/2"),
        (named(rows, "BTC", "BTC/2"), "BTC/2", "BTC/2"),
    ):
        asked = schemas.ForecastRequest(csv=csv, symbol=symbol, repair=True)
        assert forecast.history_of(asked).name == found
    for csv, symbol in (
        (named(rows, "BTC"), "BTC/USDT"),
        (named(rows, "BTC"), "BTC/2"),
        (named(rows, "BTC"), "BTC/"),
        (named([*rows, *later], "BTC"), "BTC/3"),
    ):
        asked = schemas.ForecastRequest(csv=csv, symbol=symbol, repair=True)
        with pytest.raises(InputError, match=f"unknown symbol '{symbol}'; known: BTC"):
            forecast.history_of(asked)


@pytest.mark.parametrize(
    "csv",
    [
        f"{HEAD}\n2024-01-01,1,2,1,{'9' * 1_000_000}x\n",
        f"{HEAD}\n{'9' * 1_000_000},1,2,1,2\n",
        f"{HEAD}\n2024-01-01,1,2,1,2\n2024-01-01{'x' * 1_000_000},1,2,1,2\n",
        f"timestamps,{'_' * 1_000_000}open,high,low,close\n2024-01-01,x,2,1,2\n",
        f"{'word ' * 200_000}\n",
        f"{HEAD},symbol\n2024-01-01,1,2,1,2,{'a' * 500_000}\n2024-01-01,1,2,1,2,{'b' * 500_000}\n",
    ],
    ids=["number", "epoch", "time", "header", "no separator", "symbol"],
)
def test_an_answer_does_not_repeat_a_long_cell(forecaster: Any, csv: str) -> None:
    answer = ask(forecaster, csv=csv)
    assert answer.status_code == 422 and len(answer.content) < 2000, len(answer.content)


def test_what_was_guessed_is_told_in_few_words(forecaster: Any, table: Any) -> None:
    long = table.rename(columns={"open": "_" * 1_000_000 + "open"})
    found = good(ask(forecaster, csv=long.to_csv(index=False)))
    assert sum(map(len, found["guessed"])) < 2000
