"""What answers hold: small prices with all their digits, and never many times what was asked."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import orjson
import pytest

from anytorch.errors import InputError
from anytorch.forecast.candles.generate import sample_candles
from anytorch.serve.bodies import opened, parse_json, refuse_crowds
from anytorch.serve.problems import Problem
from anytorch.serve.routes import forecast as candle_input

pytest.importorskip("torch")


def test_a_large_body_is_parsed_without_the_garbage_collector() -> None:
    """It would walk what has been made so far again and again, while every other client waits."""
    body, runs = b'{"input":[' + b",".join([b"[]"] * 100_000) + b"]}", []

    def note(phase: str, info: Any) -> None:
        runs.append(phase)

    gc.callbacks.append(note)
    try:
        found = parse_json(body)
        during = len(runs)
    finally:
        gc.callbacks.remove(note)
    assert len(found["input"]) == 100_000 and during <= 2 and gc.isenabled()  # one, at most, once it is over
    with pytest.raises(orjson.JSONDecodeError):
        parse_json(b"[1," * 100_000)
    assert gc.isenabled()


def test_brackets_of_texts_are_not_lists() -> None:
    assert opened(b'{"a": [1, [], {}], "b": "x"}') == 4
    tricky = {"[": '[[{{"\\[', "b\\": ["\\", '"', "[", '\\"[{', {"c": "\u005b["}]}
    assert opened(orjson.dumps(tricky)) == 3
    text = orjson.dumps({"input": "[" * 200_000})
    refuse_crowds(text)
    with pytest.raises(Problem, match="200001 lists and objects; the limit is 65536"):
        refuse_crowds(text.replace(b'"[', b"[").replace(b'["', b"["))


@pytest.mark.parametrize(
    ("path", "field"),
    [("/v1/embeddings", "input"), ("/v1/similarity", "a"), ("/v1/search", "queries"), ("/v1/forecast", "csv"),
     ("/v1/completions", "prompt"), ("/v1/chat/completions", "messages"), ("/api/load-model", "model"),
     ("/v1/benchmark", "devices")],
)  # fmt: skip
def test_a_crowd_of_small_lists_is_refused_before_it_is_made(service: Any, path: str, field: str) -> None:
    """5 million of them would hold up every client for seconds, whatever the end point then thinks of them."""
    body = b'{"%s":[' % field.encode() + b",".join([b"[]"] * 70_000) + b"]}"
    for kind in ("application/json", "multipart/form-data; boundary=x"):
        answer = service.client.post(path, content=body, headers={"Content-Type": kind})
        assert answer.status_code == 413 and answer.json()["type"].endswith(":too-much"), answer.text


def test_every_json_body_is_read_the_same_way(service: Any) -> None:
    for path in ("/v1/embeddings", "/v1/similarity", "/v1/forecast"):
        for body in (b"{", b'{"a": NaN}', b'{"a": "\\ud800"}', b"\xff"):
            answer = service.client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert answer.status_code == 400 and answer.json()["type"].endswith(":not-json"), (path, body, answer.text)


def test_small_prices_keep_their_digits(forecaster: Any) -> None:
    table = sample_candles(80, seed=2)
    prices = ["open", "high", "low", "close"]
    table[prices] *= 8e-8
    answer = forecaster.client.post(
        "/v1/forecast", json={"csv": table.to_csv(index=False), "horizon": 3, "samples": 2, "quantiles": [0.5]}
    )
    assert answer.status_code == 200, answer.text
    document = answer.json()
    assert document["history"]["close"] == pytest.approx(table["close"].tolist(), rel=1e-8)
    assert len({f"{value:.4g}" for value in document["forecast"]["close"]}) == 3


def test_numbers_that_a_model_cannot_hold_are_refused(forecaster: Any) -> None:
    table = sample_candles(80, seed=2)
    good = forecaster.client.post(
        "/v1/forecast", json={"csv": table.assign(volume=1e17).to_csv(index=False), "horizon": 2}
    )
    assert good.status_code == 200 and None not in good.json()["forecast"]["volume"], good.text
    table["volume"] = table["volume"].astype(float)
    table.loc[7, "volume"] = 1e300
    answer = forecaster.client.post("/v1/forecast", json={"csv": table.to_csv(index=False), "horizon": 2})
    assert answer.status_code == 422 and "row 8, column 'volume'" in answer.json()["detail"], answer.text


def test_a_forecast_that_is_not_finite_is_an_error() -> None:
    mean = sample_candles(4, seed=1)
    candle_input.require_finite(SimpleNamespace(mean=mean))
    mean.loc[2, "close"] = float("nan")
    with pytest.raises(InputError, match="not finite"):
        candle_input.require_finite(SimpleNamespace(mean=mean))


def test_levels_that_are_close_keep_a_name_each(forecaster: Any) -> None:
    body = {"sample": True, "horizon": 2, "samples": 3, "quantiles": [0.50000001, 0.50000002, 0, 1]}
    answer = forecaster.client.post("/v1/forecast", json=body)
    assert list(answer.json()["quantiles"]) == ["0", "0.50000001", "0.50000002", "1"]


@pytest.mark.parametrize("zone", ["", "x" * 5000, "Mars/Base", "../../etc/passwd"])
def test_a_time_zone_that_is_none_is_the_clients_mistake(forecaster: Any, zone: str) -> None:
    text = sample_candles(80, seed=2).to_csv(index=False)
    answer = forecaster.client.post("/v1/forecast", json={"csv": text, "timezone": zone, "horizon": 3})
    assert answer.status_code == 422, answer.text


def test_a_search_finds_and_does_not_multiply(service: Any) -> None:
    corpus = ["fresh bread and coffee", "the driver is too old for this card", "shares fell again"]
    found = service.client.post("/v1/search", json={"queries": ["a bakery"], "corpus": corpus, "k": 2})
    assert found.status_code == 200, found.text
    (hits,) = found.json()["results"]
    assert hits[0]["index"] == 0 and len(hits) == 2
    long = [f"{n} " + "x" * 20_000 for n in range(100)]
    many = service.client.post("/v1/search", json={"queries": ["a"] * 100, "corpus": long, "k": 100})
    assert many.status_code == 413 and "characters" in many.json()["detail"]
    wide = service.client.post("/v1/search", json={"queries": ["a"] * 2000, "corpus": ["b"] * 1000, "k": 1000})
    assert wide.status_code == 413 and "2000 × 1000" in wide.json()["detail"]


def test_a_forecasting_model_in_fewer_bits(forecaster: Any) -> None:
    def load(quantization: str | None) -> Any:
        return forecaster.client.post("/api/load-model", json={"model": "tiny", "quantization": quantization})

    refused = load("int3")
    assert refused.status_code == 422, refused.text
    answer = load("int8")
    try:
        assert answer.status_code == 200 and answer.json()["model"]["quantization"] == "int8"
        again = forecaster.client.post("/v1/forecast", json={"sample": True, "horizon": 2, "samples": 1})
        assert again.status_code == 200, again.text
    finally:
        assert load(None).status_code == 200  # as it was, for the other tests


def test_health_tells_strangers_no_paths(service: Any) -> None:
    """They are asked for no key."""
    (known,) = [one for one in service.client.get("/api/models").json()["models"] if one["loaded"]]
    assert known["path"] and known["path"] not in service.client.get("/v1/readyz").text
