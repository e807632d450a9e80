"""Models of the configured folders: what may be loaded, what may not, and what the lists say."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from anytorch.errors import ModelError, UsageError
from anytorch.serve.loaders import first_models, list_models, require
from anytorch.serve.options import ServeOptions
from anytorch.text.checkpoints.locate import packaged_model


class Exploit:
    def __reduce__(self) -> Any:
        return os.system, ("touch /tmp/anytorch-was-exploited",)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model folders of all kinds: good ones, pickles, links that lead out, and things that are none."""
    tmp_path = tmp_path_factory.mktemp("service")
    root = tmp_path / "models"
    source = packaged_model()
    assert source is not None
    shutil.copytree(source, root / "team" / "mini")
    make(root / "pickled", {"model_type": "bert"}, "pytorch_model.bin", pickle.dumps(Exploit()))
    make(root / "empty", {"model_type": "bert"})
    make(root / "writer", {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, "model.safetensors")
    make(root / "kronos", {"s1_bits": 4, "n_layers": 2}, "model.safetensors")
    make(root / "tokenizer", {"s1_bits": 4, "n_enc_layers": 2}, "model.safetensors")
    (root / "notes").mkdir()
    make(root / "broken", None)
    (root / "broken" / "config.json").write_text("{")
    make(tmp_path / "outside", {"model_type": "bert"}, "model.safetensors")
    (root / "linked").symlink_to(tmp_path / "outside")
    make(root / "borrowed", {"model_type": "bert"})
    (root / "borrowed" / "model.safetensors").symlink_to(tmp_path / "outside" / "model.safetensors")
    return root


def make(path: Path, config: dict[str, Any] | None, weights: str = "", body: bytes = b"") -> None:
    path.mkdir(parents=True)
    if config is not None:
        (path / "config.json").write_text(json.dumps(config))
    if weights:
        (path / weights).write_bytes(body)


def test_what_is_found_and_what_is_refused(folder: Path) -> None:
    found = list_models([folder])
    assert {name: one.job for name, one in found.items()} == {
        "team/mini": "embeddings",
        "pickled": "embeddings",
        "empty": "embeddings",
        "linked": "embeddings",
        "borrowed": "embeddings",
        "writer": "text",
        "kronos": "forecast",
    }
    assert not found["team/mini"].refused and require(found["team/mini"]).name == "mini"
    assert "pickle" in found["pickled"].refused and "no .safetensors" in found["empty"].refused
    assert "leads out" in found["linked"].refused and "leads out" in found["borrowed"].refused
    with pytest.raises(ModelError, match="pickle"):
        require(found["pickled"])


def test_a_model_folder_may_be_a_model_itself(folder: Path) -> None:
    assert list(list_models([folder / "team" / "mini"])) == ["mini"]


def test_a_client_loads_a_model_by_its_id_alone(serve: Callable[..., Any], folder: Path) -> None:
    service = serve(model_folders=(folder,))
    listed = {info["id"]: info for info in service.client.get("/api/models").json()["models"]}
    assert listed["all-MiniLM-L6-v2"]["loaded"] and not listed["team/mini"]["loaded"]
    assert {"pickled", "linked", "borrowed", "empty"}.isdisjoint(listed)
    answer = service.client.post("/api/load-model", json={"model": "team/mini", "device": "cpu"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"]["id"] == "team/mini"
    assert service.client.post("/v1/embeddings", json={"input": "x"}).json()["model"] == "team/mini"
    assert [m["id"] for m in service.client.get("/v1/models").json()["data"]] == ["team/mini"]
    assert service.client.get("/v1/models/team/mini").json()["id"] == "team/mini"
    unknown = service.client.get("/v1/models/gpt")
    assert unknown.status_code == 404 and "loaded: team/mini" in unknown.json()["detail"]
    gone = service.client.post("/v1/embeddings", json={"input": "x", "model": "all-MiniLM-L6-v2"})
    assert gone.status_code == 404
    assert service.client.post("/api/load-model", json={"model": "all-MiniLM-L6-v2"}).status_code == 200


REFUSED = {
    "pickled": 422, "linked": 422, "borrowed": 422, "empty": 422, "../outside": 404, "/etc": 404, "team/../team/mini": 404,
    "team//mini": 404, "team/mini/": 404, "~": 404, "nowhere": 404, "broken": 404, "BAAI/bge-small-en": 404,
    "team/mini\0": 404,
}  # fmt: skip


def test_nothing_else_can_be_loaded(serve: Callable[..., Any], folder: Path) -> None:
    service = serve(model_folders=(folder,))
    for name, status in REFUSED.items():
        answer = service.client.post("/api/load-model", json={"model": name})
        assert answer.status_code == status, answer.text
        assert not Path("/tmp/anytorch-was-exploited").exists()
    assert service.client.post("/v1/embeddings", json={"input": "x"}).status_code == 200
    wrong = service.client.post("/api/load-model", json={"model": "team/mini", "job": "text"}).json()
    assert wrong["status"] == 404 and "a model for embeddings, not for text" in wrong["detail"]
    assert "did you mean" not in wrong["hint"]


@pytest.mark.parametrize(
    ("body", "status"),
    [({}, 422), ({"model": ""}, 422), ({"model": "x" * 500}, 422), ({"model": 1}, 422),
     ({"model": "all-MiniLM-L6-v2", "quantization": "int3"}, 422), ({"model": "all-MiniLM-L6-v2", "device": "gpu9"}, 422),
     ({"model": "all-MiniLM-L6-v2", "job": "text"}, 404), ({"model": "all-MiniLM-L6-v2", "job": "art"}, 422)],
)  # fmt: skip
def test_loading_what_makes_no_sense_leaves_the_old_model(service: Any, body: dict[str, Any], status: int) -> None:
    answer = service.client.post("/api/load-model", json=body)
    assert answer.status_code == status and answer.headers["content-type"] == "application/problem+json"
    assert service.client.get("/v1/readyz").status_code == 200


def test_a_device_that_is_not_here_is_told(serve: Callable[..., Any]) -> None:
    pytest.importorskip("torch")
    service = serve()
    answer = service.client.post("/api/load-model", json={"model": "all-MiniLM-L6-v2", "device": "xpu"}).json()
    assert answer["device"] == "cpu" and "xpu" in answer["device_warning"]
    health = service.client.get("/v1/readyz").json()
    assert health["device"] == "cpu" and "xpu" in health["device_warning"]


def test_the_command_line_s_models(folder: Path) -> None:
    def ids(**options: Any) -> list[tuple[str, str]]:
        return [(one.job, one.id) for one in first_models(ServeOptions(**options))]

    writer = ("text", "tiny-writer")
    assert ids() == [("embeddings", "all-MiniLM-L6-v2"), ("forecast", "tiny"), writer]
    assert ids(forecast=False, text=False) == [("embeddings", "all-MiniLM-L6-v2")]
    assert ids(models=(str(folder / "team" / "mini"),)) == [("embeddings", "mini"), ("forecast", "tiny"), writer]
    assert ids(models=("tiny",)) == [("forecast", "tiny"), writer]
    assert ids(models=("kronos-small",)) == [("forecast", "kronos-small"), writer]
    assert ids(models=("tiny-writer",), forecast=False) == [writer, ("embeddings", "all-MiniLM-L6-v2")]
    assert [one.at_once for one in first_models(ServeOptions())] == [True, True, False], "the writer waits to be asked"
    assert ids(text_model=str(folder / "writer"), forecast=False) == [
        ("text", "writer"),
        ("embeddings", "all-MiniLM-L6-v2"),
    ]
    with pytest.raises(UsageError, match="no such folder"):
        ids(text_model="/nowhere")
    with pytest.raises(ModelError, match="no such folder"):
        ids(models=("./nowhere",))
    with pytest.raises(ModelError, match="does not say what it is"):
        ids(models=(str(folder / "tokenizer"),))
