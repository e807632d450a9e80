"""Requests nobody should send: each gets a problem document, none a 500, and the service goes on as if nothing had been."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytest.importorskip("schemathesis")

# A benchmark that is asked for rightly takes its time; that it is refused when asked for wrongly is tested by bytes.
SLOW = ("POST /v1/benchmark", "GET /v1/devices", "GET /v1/doctor", "GET /v1/doctor/{code}")


@pytest.mark.long
def test_requests_made_from_the_schema_never_get_a_500(service: Any, malformed: ModuleType) -> None:
    status, schema = service.ask("/openapi.json")
    assert status == 200 and len(schema["paths"]) > 10
    answers = malformed.from_schema(service.url, schema, 8, seed=1, skip=SLOW)
    assert not answers.wrong, answers.wrong[:5]
    assert answers.sent > 40, answers.statuses
    assert any(name.endswith(" 422") for name in answers.statuses), "some were wrong"
    assert any(name.endswith(" 200") for name in answers.statuses), "some were right"
    assert service.ask(body={"input": "still there"})[0] == 200


def test_broken_bytes_never_get_a_500(service: Any, malformed: ModuleType) -> None:
    answers = malformed.from_bytes(service.url, 200, seed=2, skip=SLOW)
    assert not answers.wrong, answers.wrong[:5]
    refused = sum(count for name, count in answers.statuses.items() if name.rpartition(" ")[2][0] == "4")
    assert answers.sent == 200 and refused > 120, answers.statuses
    assert service.ask(body={"input": "still there"})[0] == 200


@pytest.mark.slow
def test_thousands_with_every_engine_loaded(start: Callable[..., Any], malformed: ModuleType, tmp_path: Path) -> None:
    """All end points, with a forecasting and a text model behind them."""
    from tests.text.generate.conftest import make_model, make_tokenizer

    make_model(tmp_path, "llama")
    make_tokenizer(tmp_path)
    service = start(forecast=True, text_model=str(tmp_path), max_texts=64, timeout_s=20.0)
    _, schema = service.ask("/openapi.json")
    for answers in (
        malformed.from_schema(service.url, schema, 60, seed=3),
        malformed.from_bytes(service.url, 2000, seed=4),
    ):
        assert not answers.wrong, answers.wrong[:5]
    status, done = service.ask("/v1/completions", {"prompt": "The", "max_tokens": 3})
    assert status == 200 and done["usage"]["completion_tokens"] == 3
