"""The engine around its encoder: shapes, order, options, streams, and every kind of bad input. No compiler needed."""

from __future__ import annotations

import json
import sqlite3
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.faulty_disk import left_since

from anytorch.errors import InputError, ModelError, UsageError
from anytorch.text.embed import encoder_builder
from anytorch.text.embed.engine import ArrowEngine
from anytorch.text.embed.recipe import MOST_TOLD

TEXTS = [f"sentence {n} " + "and more words " * (n % 11) for n in range(300)]


def expected(engine: ArrowEngine, encoder: Any, texts: list[str]) -> np.ndarray:
    return np.concatenate([engine.finish(encoder.run(t.ids, t.starts)) for t in (engine.tokenize([x]) for x in texts)])


# --- shapes and order ---------------------------------------------------------------------------------------------------


def test_order_is_kept_whatever_the_batches(fake_engine: Callable[..., ArrowEngine], make_encoder: Any) -> None:
    encoder = make_encoder()
    one_by_one = expected(fake_engine(encoder), encoder, TEXTS)
    for tokens in ("auto", 1, 64, 5000):
        assert np.array_equal(fake_engine(batch_tokens=tokens).encode(TEXTS), one_by_one)


def test_one_text_many_texts_none(engine: ArrowEngine) -> None:
    assert engine.dim == 16
    one = engine.encode("Hello")
    assert one.shape == (16,) and one.dtype == np.float32
    assert np.array_equal(engine.encode(["Hello"])[0], one)
    assert engine.encode([]).shape == (0, 16) and engine.encode(iter(())).shape == (0, 16)
    assert engine.encode([""]).shape == (1, 16) and np.isfinite(engine.encode(["", " ", "\n"])).all()


def test_any_iterable(engine: ArrowEngine) -> None:
    whole = engine.encode(TEXTS)
    for texts in (tuple(TEXTS), iter(TEXTS), (text for text in TEXTS), dict.fromkeys(TEXTS), np.array(TEXTS)):
        assert np.array_equal(engine.encode(texts), whole)
    pandas = pytest.importorskip("pandas")
    assert np.array_equal(engine.encode(pandas.Series(TEXTS, index=range(5, 305))), whole)


def test_a_cursor_stays_in_its_thread(engine: ArrowEngine) -> None:
    """sqlite3 refuses a cursor in another thread; drawing texts there would break it."""
    with sqlite3.connect(":memory:") as database:
        database.execute("create table t (x text)")
        database.executemany("insert into t values (?)", [(text,) for text in TEXTS])
        assert engine.encode(row[0] for row in database.execute("select x from t")).shape == (300, 16)
    database.close()


def test_outputs(engine: ArrowEngine) -> None:
    vectors = engine.encode(TEXTS[:5])
    assert engine.encode(TEXTS[:5], output="list") == vectors.tolist()
    torch = pytest.importorskip("torch")
    assert torch.equal(engine.encode(TEXTS[:5], output="torch"), torch.from_numpy(vectors))
    arrow = engine.encode(TEXTS[:5], output="arrow")
    assert arrow.type.list_size == 16 and arrow.to_pylist() == vectors.tolist()
    assert len(engine.encode([], output="arrow")) == 0
    with pytest.raises(UsageError, match="output='csv' is not one of numpy, torch, arrow, list"):
        engine.encode(TEXTS, output="csv")  # type: ignore[arg-type]


def test_precisions_and_dimensions(engine: ArrowEngine) -> None:
    vectors = engine.encode(TEXTS)
    small = engine.encode(TEXTS, dim=5)
    assert small.shape == (300, 5) and np.allclose(np.linalg.norm(small, axis=1), 1, atol=1e-6)
    assert np.allclose(small, vectors[:, :5] / np.linalg.norm(vectors[:, :5], axis=1, keepdims=True), atol=1e-6)
    for precision, columns, dtype in (("int8", 16, np.int8), ("binary", 2, np.int8), ("ubinary", 2, np.uint8)):
        found = engine.encode(TEXTS, precision=precision)
        assert found.shape == (300, columns) and found.dtype == dtype
        assert np.array_equal(engine.encode(iter(TEXTS), precision=precision), found)
    with pytest.raises(UsageError, match="precision='int3'"):
        engine.encode(TEXTS, precision="int3")
    with pytest.raises(UsageError, match="dim=17"):
        engine.encode(TEXTS, dim=17)


def test_normalize_and_pooling_can_be_chosen(fake_engine: Callable[..., ArrowEngine]) -> None:
    assert not np.allclose(np.linalg.norm(fake_engine(normalize=False).encode(TEXTS), axis=1), 1)
    engine = fake_engine(pooling="last")
    assert engine.pooling == ("lasttoken",)
    with pytest.raises(UsageError, match="'middle' is not one of"):
        fake_engine(pooling="middle")


# --- streaming ----------------------------------------------------------------------------------------------------------


def test_a_stream_is_bounded_and_the_same(engine: ArrowEngine) -> None:
    drawn = 0

    def source() -> Iterator[str]:
        nonlocal drawn
        for number in range(100_000):
            drawn = number + 1
            yield TEXTS[number % 300]

    stream = engine.encode_iter(source())
    first = [next(stream) for _ in range(300)]
    assert drawn < 20_000, "it reads far ahead of what it was asked for"
    assert np.array_equal(np.stack(first), engine.encode(TEXTS))
    stream.close()
    (one,) = engine.encode_iter("one text, not eight letters and some")
    assert np.array_equal(one, engine.encode("one text, not eight letters and some"))


def test_progress(engine: ArrowEngine, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[tuple[int, int | None]] = []
    engine.encode(TEXTS, progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (300, 300) and [done for done, _ in calls] == sorted({done for done, _ in calls})
    calls.clear()
    engine.encode(iter(TEXTS), progress=lambda done, total: calls.append((done, total)))
    assert calls[-1] == (300, None)
    engine.encode(TEXTS, progress=True)
    assert capsys.readouterr() == ("", ""), "there is no terminal: no bar"


def test_a_bar_on_a_terminal(engine: ArrowEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    engine.encode(TEXTS, progress=True)
    assert "encoding" in screen.getvalue() and "300/300" in screen.getvalue()


# --- bad input ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("texts", [None, 5, b"bytes", 3.5])
def test_what_is_no_list_of_texts(texts: Any, engine: ArrowEngine) -> None:
    for encode in (engine.encode, lambda t: list(engine.encode_iter(t))):
        with pytest.raises(InputError, match=rf"not {type(texts).__name__}"):
            encode(texts)


def test_a_bad_text_among_many_is_named(engine: ArrowEngine) -> None:
    for bad, says in ((None, "NoneType"), (7, "int"), ("a\udfffb", "lone surrogate"), (["x"], "list")):
        with pytest.raises(InputError, match=rf"text 250 .*{says}"):
            engine.encode([*TEXTS[:250], bad, *TEXTS[251:]])  # type: ignore[list-item]
    assert engine.encode(TEXTS).shape == (300, 16), "it works on"


def test_long_texts_are_cut_and_counted(fake_engine: Callable[..., ArrowEngine]) -> None:
    engine = fake_engine()
    long = "word " * 400
    vectors = engine.encode(["short", long, long + "more", "word " * 254])
    assert np.array_equal(vectors[1], vectors[2]) and np.array_equal(vectors[1], vectors[3])
    assert (engine.stats.texts, engine.stats.truncated) == (4, 2) and engine.stats.tokens == 3 + 3 * 256
    assert "truncated so far: 2 of 4 texts" in engine.explain()
    assert engine.encode(["x" * 2_000_000]).shape == (1, 16)
    strict = fake_engine(truncate=False, max_length=20)
    with pytest.raises(InputError, match="1 of the texts 0 to 1 have more than 20 tokens"):
        strict.encode(["short", long])


def test_lengths_that_lie(engine: ArrowEngine) -> None:
    class Liar(list[str]):
        def __len__(self) -> int:
            return 200

    with pytest.raises(InputError, match="length of the texts is 200"):
        engine.encode(Liar(TEXTS))
    with pytest.raises(InputError, match="length of the texts is 200, but 3 were read"):
        engine.encode(Liar(TEXTS[:3]))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"quantization": "int9"}, "quantization='int9' is not one of int8, int4, int2, fp4"),
        ({"dtype": "float8"}, "dtype='float8'"),
        ({"batch_tokens": 0}, "batch_tokens=0"),
        ({"batch_tokens": "many"}, "batch_tokens='many'"),
        ({"batch_tokens": True}, "batch_tokens=True"),
        ({"max_length": 513}, "the model has 512 positions"),
        ({"max_length": 2}, "leaves no room"),
        ({"device": "gpux"}, "unknown device 'gpux'"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], says: str, fake_engine: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match=says):
        fake_engine(**options)


def test_damaged_folders_are_refused_before_anything_is_built(copied_model: Path) -> None:
    weights = copied_model / "model.safetensors"
    whole = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a whole safetensors file: it is cut off"):
        ArrowEngine(copied_model, "cpu")
    weights.unlink()
    (copied_model / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(ModelError, match="a pickle"):
        ArrowEngine(copied_model, "cpu")
    (copied_model / "pytorch_model.bin").unlink()
    with pytest.raises(ModelError, match="found no weights"):
        ArrowEngine(copied_model, "cpu")
    (copied_model / "tokenizer.json").unlink()
    (copied_model / "vocab.txt").unlink()
    with pytest.raises(ModelError, match="found no tokenizer"):
        ArrowEngine(copied_model, "cpu")


# --- prompts ------------------------------------------------------------------------------------------------------------


def test_prompts(copied_model: Path, fake_engine: Callable[..., ArrowEngine]) -> None:
    plain = fake_engine()
    assert np.array_equal(plain.encode("x", prompt="query"), plain.encode("x")), "a model without prompts"
    assert np.array_equal(plain.encode("x", prompt="find: "), plain.encode("find: x"))
    settings = {"prompts": {"query": "query: ", "document": "passage: "}, "default_prompt_name": "document"}
    (copied_model / "config_sentence_transformers.json").write_text(json.dumps(settings))
    engine = fake_engine(model_path=copied_model)
    assert engine.prompts == settings["prompts"]
    for prompt, text in (
        ("query", "query: x"),
        ("passage", "passage: x"),
        ("document", "passage: x"),
        (None, "passage: x"),
        ("", "x"),
    ):
        assert np.array_equal(engine.encode("x", prompt=prompt), engine.encode(text, prompt="")), prompt
    (copied_model / "1_Pooling" / "config.json").write_text('{"include_prompt": false}')
    with pytest.raises(UsageError, match="leaves its prompt's tokens out"):
        fake_engine(model_path=copied_model).encode("x", prompt="query")


@pytest.mark.parametrize("threads", [0, -1, "2", True, 1.5, 40_000, 2**40])
def test_threads_that_cannot_be(threads: Any, model_folder: Path) -> None:
    with pytest.raises(UsageError, match="threads="):
        ArrowEngine(model_folder, "cpu", threads=threads)


def test_an_unknown_prompts_name_is_warned_about_once(
    copied_model: Path, fake_engine: Callable[..., ArrowEngine]
) -> None:
    settings = {"prompts": {"query": "query: ", "document": "passage: "}}
    (copied_model / "config_sentence_transformers.json").write_text(json.dumps(settings))
    engine = fake_engine(model_path=copied_model)
    with pytest.warns(UserWarning, match=r"unknown prompt name 'qurey'; known: query, document\."):
        found = engine.encode(["x"], prompt="qurey")
    assert np.array_equal(engine.encode(["x"], prompt="qurey"), found), "not warned again"
    assert np.array_equal(found, engine.encode(["qureyx"], prompt=""))
    engine.encode(["x"], prompt="Find: ")  # a text: no warning
    with pytest.warns(UserWarning, match="known: none"):
        fake_engine().encode("x", prompt="title")


def test_odd_prompts_are_not_kept_for_ever(copied_model: Path, fake_engine: Callable[..., ArrowEngine]) -> None:
    """A client of a service may send another word with every request."""
    engine = fake_engine(model_path=copied_model)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for number in range(3 * MOST_TOLD):
            engine.prompt_text(f"word{number}")
    assert len(said) == MOST_TOLD == len(engine._prompts._told)


def test_device_and_devices_are_one_question() -> None:
    with pytest.raises(UsageError, match=r"device='cpu' and devices=.*cannot be combined"):
        ArrowEngine(device="cpu", devices=["cpu", "cpu"])


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_not_the_working_folder(name: str) -> None:
    with pytest.raises(ModelError, match="the name of the model is empty"):
        ArrowEngine(name)


def test_a_prompt_that_is_no_text(engine: ArrowEngine) -> None:
    with pytest.raises(UsageError, match="prompt=5"):
        engine.encode("a", prompt=5)  # type: ignore[arg-type]


# --- life ---------------------------------------------------------------------------------------------------------------


def test_threads_share_one_engine(engine: ArrowEngine) -> None:
    whole = engine.encode(TEXTS)
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda n: engine.encode(TEXTS[n : n + 40]), range(0, 260, 10)))
    for number, vectors in enumerate(found):
        assert np.array_equal(vectors, whole[number * 10 : number * 10 + 40])
    assert engine.stats.texts == 300 + 26 * 40


def test_closing(fake_engine: Callable[..., Any], make_encoder: Any) -> None:
    encoder, before = make_encoder(), set(threading.enumerate())
    with fake_engine(encoder) as engine:
        assert engine.warmup() is engine and encoder.calls
    assert encoder.closed
    with pytest.raises(UsageError, match="closed"):
        engine.encode("x")
    engine.close()
    assert not left_since(before)


def test_explain_and_describe(engine: ArrowEngine) -> None:
    text = engine.explain()
    for words in ("model: ", "mean pooling, then normalize", "device: cpu, because you asked for 'cpu'", "kernels: fake",
                  "quantization: none", "batches: 4096 tokens (default, being measured)"):  # fmt: skip
        assert words in text
    json.dumps(engine.describe())
    assert repr(engine) == "ArrowEngine('model', device='cpu', quantization=None)"


def test_the_batch_size_is_measured_and_remembered(
    fake_engine: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoder_builder, "CPU_TOKENS", 512)
    engine = fake_engine()
    for _ in range(20):
        engine.encode(TEXTS * 5)
    assert engine._runner.budget.settled and engine.describe()["batch"]["source"] == "measured"
    again = fake_engine()
    assert again.batch_tokens == engine.batch_tokens and again.describe()["batch"]["source"] == "remembered"


def test_a_device_may_normalise_and_write_the_rows(
    fake_engine: Callable[..., Any], make_encoder: Any, monkeypatch: pytest.MonkeyPatch, model_folder: Path
) -> None:
    wanted = fake_engine()
    asked: list[bool] = []

    class Device(make_encoder):  # type: ignore[misc, valid-type]
        normalize, in_flight = True, 2

        def run(self, ids: np.ndarray, starts: np.ndarray) -> np.ndarray:
            pooled = super().run(ids, starts)
            return pooled / np.linalg.norm(pooled, axis=1, keepdims=True)

        def submit(self, ids: np.ndarray, starts: np.ndarray, out: Any = None, places: Any = None) -> Any:
            made = self.run(ids, starts)
            if out is not None:
                out[places] = made
            return type("Pending", (), {"result": lambda self: made if out is None else out})()

    def build(*given: Any, normalize: bool, **named: Any) -> tuple[Any, str]:
        asked.append(normalize)
        return Device(), "a test's"

    monkeypatch.setattr(encoder_builder, "build_encoder", build)
    with ArrowEngine(model_folder, "cpu") as engine:
        assert engine.head.does_nothing and engine.head.normalizes and asked == [True]
        np.testing.assert_allclose(engine.encode(TEXTS), wanted.encode(TEXTS), atol=1e-6)
        np.testing.assert_allclose(engine.encode(iter(TEXTS)), wanted.encode(TEXTS), atol=1e-6)
        np.testing.assert_allclose(engine.encode(TEXTS, dim=5), wanted.encode(TEXTS, dim=5), atol=1e-6)
        assert (
            np.abs(engine.encode(TEXTS, precision="int8").astype(int) - wanted.encode(TEXTS, precision="int8")).max()
            <= 1
        )
    ArrowEngine(model_folder, "cpu", normalize=False).close()
    assert asked == [True, False]
