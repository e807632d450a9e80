"""/v1/graphs: every choice that was measured, and kernel graphs with their records."""

from __future__ import annotations

from typing import Any

import pytest
from tests.graph import made

from anytorch.devices import oom
from anytorch.graph import records
from anytorch.measured.store import remember
from anytorch.measured.verdict import Question, Trial, Verdict


def test_graphs_may_be_none(service: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("ANYTORCH_CACHE_DIR", str(tmp_path))
    assert service.client.get("/v1/graphs").json() == {"graphs": []}
    (tmp_path / "measured").mkdir()
    (tmp_path / "measured" / "odd.json").write_text("{")
    assert service.client.get("/v1/graphs").json() == {"graphs": []}


def test_graphs_show_what_was_measured(service: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("ANYTORCH_CACHE_DIR", str(tmp_path))
    trials = (Trial("slow", 0.004), Trial("quick", 0.001), Trial("wrong", refused="wrong: rounds its inputs"))
    question = Question.of("quantized product", "int8 weights 1536x384, 1 row", "cpu", size="1536x384")
    kept = remember(Verdict(question, trials, "quick", "1 ms; next is slow, 4 ms"))
    (product,) = service.client.get("/v1/graphs").json()["graphs"]
    assert product["speedup"] == 4 and product["device"] == "cpu" and "int8" in product["title"]
    assert product["kind"] == "quantized product" and product["when"] == kept.when
    assert [one["name"] for one in product["candidates"] if one["chosen"]] == ["quick"]
    assert [one["correct"] for one in product["candidates"]] == [True, True, False]
    assert product["candidates"][2]["reason"] == "wrong: rounds its inputs" and product["picture"] is None
    whole = service.client.get(f"/v1/graphs/{product['id']}").json()
    assert whole["why"] == kept.why and whole["candidates"] == product["candidates"] and whole["steps"] == []


def test_a_kernel_graph_is_shown_with_its_record(service: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("ANYTORCH_CACHE_DIR", str(tmp_path))
    older = made.stored(width=7, eager=True, when="2026-11-15T07:00:00Z", kernels=())
    one = made.stored(kernels=("kernel",))
    listed = service.client.get("/v1/graphs").json()["graphs"]
    assert [row["id"] for row in listed] == [one.key, older.key], "the kernels' own choices belong to their graph"
    first = listed[0]
    assert (first["title"], first["sizes"], first["kernels"], first["speedup"]) == (one.title, {"b": 4}, 2, 2.5)
    assert first["kind"] == "kernel graph" and first["picture_svg"] is None and "text" not in str(first)
    whole = service.client.get(f"/v1/graphs/{one.key}").json()
    assert whole["steps"][0]["text"] == made.CPP and whole["steps"][2] == {
        **dict.fromkeys(whole["steps"][0]),
        "ops": ["matmul"],
    }
    assert (whole["steps"][1]["source"], whole["steps"][1]["text"]) == ("norm.h", None)
    assert whole["graph"] == one.graph and whole["picture_svg"] == one.picture and whole["least_nbytes"] == 13824
    reasons = {row["name"]: row["reason"] for row in whole["candidates"]}
    assert "off by 3" in reasons[made.REFUSED] and reasons[made.FUSED] is None
    assert [choice["kind"] for choice in whole["kernel_choices"]] == ["kernel of a graph"]
    picture = service.client.get(first["picture"])
    assert picture.text == one.picture and picture.headers["content-type"] == "image/svg+xml"
    assert "default-src 'none'" in picture.headers["content-security-policy"]
    eager = service.client.get(f"/v1/graphs/{older.key}").json()
    assert eager["steps"] == [] and eager["kernels"] == 0 and eager["speedup"] == 1


def test_a_graph_without_its_record_is_a_choice_like_others(
    service: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setenv("ANYTORCH_CACHE_DIR", str(tmp_path))
    one = made.stored(kernels=("kernel",))
    (records.folder() / f"{one.key}.json").write_text("{")
    listed = service.client.get("/v1/graphs").json()["graphs"]
    assert {row["kind"] for row in listed} == {"kernel graph", "kernel of a graph"}
    assert service.client.get(f"/v1/graphs/{one.key}").json()["picture_svg"] is None
    assert service.client.get(f"/v1/graphs/{one.key}/picture.svg").status_code == 404


@pytest.mark.parametrize("path", ["0" * 32, f"{'0' * 32}/picture.svg", "..%2Fmeasured", "x"])
def test_an_unknown_graph(service: Any, path: str) -> None:
    answer = service.client.get(f"/v1/graphs/{path}")
    assert answer.status_code == 404 and answer.json()["type"].startswith("urn:anytorch:problem:")
    if "%" not in path:
        assert answer.json()["type"].endswith("no-such-graph") and "/v1/graphs" in answer.json()["hint"]


def test_sizes_of_batches_are_nobodys_business(service: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.setenv("ANYTORCH_CACHE_DIR", str(tmp_path))
    private = Question.of(oom.KIND, "my secret model", "cpu")
    remember(Verdict(private, (Trial("8", 1.0),), "8", "the only one"))
    assert service.client.get("/v1/graphs").json() == {"graphs": []}
    assert service.client.get(f"/v1/graphs/{private.key}").status_code == 404
