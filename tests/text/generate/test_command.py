"""`anytorch generate`: text as it is made, one document with --json, clear words for what is wrong."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from anytorch.cli.main import main
from anytorch.cli.output import Output
from anytorch.text.generate.generator import TextGenerator

Answer = tuple[int, str, str]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Callable[..., Answer]:
    def call(*arguments: str) -> Answer:
        capsys.readouterr()
        status = main(["generate", *arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return call


def test_the_text_goes_to_standard_output_and_the_words_do_not(
    models: dict[str, Path], cli: Callable[..., Answer]
) -> None:
    folder = models["llama"]
    with TextGenerator(folder, device="cpu") as generator:
        wanted = generator.complete("The quick", max_tokens=12, temperature=0).text
    status, out, err = cli("The quick", "--model", str(folder), "--max-tokens", "12", "--temperature", "0", "--explain")
    assert status == 0
    assert out == wanted + "\n"
    assert "12 tokens in" in err and "tokens/s" in err and "computes on cpu" in err


def test_json_is_one_document(models: dict[str, Path], cli: Callable[..., Answer]) -> None:
    arguments = ("The", "--model", str(models["llama"]), "--max-tokens", "5", "--temperature", "1", "--seed", "3")
    status, out, _ = cli(*arguments, "--json")
    answer = json.loads(out)
    assert status == 0
    assert answer["completion_tokens"] <= 5 and answer["generator"]["device"] == "cpu"
    assert json.loads(cli(*arguments, "--json")[1])["text"] == answer["text"]


def test_a_chat_and_standard_input(
    models: dict[str, Path], cli: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello"))
    model = ("--model", str(models["llama"]), "--max-tokens", "3", "--json")
    status, out, _ = cli("-", *model, "--chat", "--system", "Be brief.")
    with TextGenerator(models["llama"], device="cpu") as generator:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
        count = len(generator.tokenize(messages))
    assert status == 0
    assert json.loads(out)["prompt_tokens"] == count
    assert cli("x", *model, "--system", "y")[0] == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "nowhere"], "no such folder"),
        (["--model", "MODEL", "--max-tokens", "0"], "--max-tokens 0: use a whole number"),
        (["--model", "MODEL", "--device-budget", "lots"], "--device-budget lots: use a size"),
        (["--model", "MODEL", "--dtype", "float8"], "--dtype float8"),
        (["--model", "MODEL", "--quantization", "int9"], "int9"),
        (["--model", "MODEL", "--stop", ""], "stop=''"),
        (["--model", "MODEL", "--device", ""], "--device is empty"),
        (["--model", "PLAIN", "--chat"], "has no chat template"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    models: dict[str, Path],
    cli: Callable[..., Answer],
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loaded(*given: object, **named: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("anytorch.text.generate.TextGenerator", loaded)
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "config.json").write_bytes((models["llama"] / "config.json").read_bytes())
    (plain / "tokenizer_config.json").write_text("{}")
    arguments = [str(plain) if word == "PLAIN" else word for word in arguments]
    status, out, err = cli("x", *(str(models["llama"]) if word == "MODEL" else word for word in arguments))
    assert (status, out) == (2, "")
    assert words in err


def test_the_model_that_comes_along_is_waited_for_by_its_name(
    models: dict[str, Path], cli: Callable[..., Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[str] = []

    @contextmanager
    def waiting(self: Any, what: str) -> Iterator[None]:
        waited.append(what)
        yield

    monkeypatch.setattr(Output, "waiting", waiting)
    assert cli("The", "--max-tokens", "2")[0] == cli("The", "--max-tokens", "2", "--model", str(models["gpt2"]))[0] == 0
    assert waited == ["loading tiny-writer", f"loading {models['gpt2']}"]
