"""Tables and texts that users bring: candles, files of texts, keys, the published projects' settings of a fine-tuning."""

from __future__ import annotations

import math

from anytorch.cli.commands import finetune
from anytorch.errors import InputError, UsageError
from anytorch.forecast.candles.columns import parse_given
from anytorch.forecast.candles.read import read_candles
from anytorch.serve.keys import read_keys
from anytorch.text.embed.files_read import FORMATS, Source
from anytorch.text.embed.files_write import read_facts
from anytorch.text.embed.passages import MOST_CHARACTERS, passages_of
from tests.fuzz.kit import scratch, target

CELLS = (
    "2024-01-02", "2024-01-02 09:30", "2024-01-02T09:30:00Z", "1704189600", "1704189600000", "02/01/2024", "timestamps",
    "open", "high", "low", "close", "volume", "amount", "symbol", "date", "time", "1.5", "1,234.5", "-1", "0", "nan", "inf",
    "1e400", "1e39", "$5", "5%", "3k", "2万", '"', "'", ";", "\t", "|", "\r\n", "\n\n", "\ufeff", "9999-12-31", "0001-01-01",
    "AAPL", "", "2262-04-12", "99999999999999999999", "00:00", "+00:00", "1970-01-01", "١", "−5", "--", "N/A",
)  # fmt: skip


@target("candles", "text", errors=(InputError,), words=CELLS, kept_nbytes=2_500)
def candles(data: bytes) -> None:
    """A table of candles is series of finite numbers in the order of time, or refused; the same where it is mended."""
    for series in read_candles(data, repair=len(data) % 2 == 0):
        frame = series.frame
        assert len(frame) >= 2 and frame["timestamps"].is_monotonic_increasing
        for name in frame.columns:
            if name != "timestamps":
                assert all(map(math.isfinite, frame[name])), name


@target("given_columns", "text", errors=(InputError,), words=("open", "=", ",", " "))
def given_columns(data: bytes) -> None:
    """--columns is names by field, or refused."""
    assert all(parse_given(data.decode("utf-8", "replace")).items())


ROWS = ('{"text": "a"}', '{"text": null, "b": 1}', '{"text": [1]}', "text,b", "text\tb", '"', "\n", "\r\n", ",", "\\ud800",
        "9" * 30, '{"text": "\\ud800"}', '{"a": 1e999}', "\ufeff", "\0", "[]")  # fmt: skip


@target("texts", "text", errors=(InputError, UsageError), words=ROWS)
def texts(data: bytes) -> None:
    """A file of texts gives every row once, or is refused with the row, in each of our formats: the first byte names it."""
    format = FORMATS[data[0] % len(FORMATS)] if data else "txt"
    path = scratch.file("texts.dat.gz" if data[1:3] == b"\x1f\x8b" else "texts.dat", data[1:])
    source = Source(path, None, format=format, allow_missing=len(data) % 2 == 0)
    chunks = list(source.chunks(3))
    rows = sum(len(chunk.texts) for chunk in chunks)
    assert source.total() in (None, rows)
    assert sum(len(chunk.texts) for chunk in source.chunks(3, skip=1)) == max(0, rows - 1)


KINDS_OF_FILES = ("a.md", "a.txt", "a.py", "a.csv", "a.jsonl", "a.parquet", "a.txt.gz", "a.json", "a.ipynb")
CELLS = ('{"cells": [', '{"cell_type": "code", "source": ["', '"]}', "]}")


@target(
    "passages",
    "text",
    errors=(InputError, UsageError),
    words=(*ROWS, *CELLS, "# ", "\n\n", "def f():", "    ", "x" * 3000),
)
def passages(data: bytes) -> None:
    """A file of a folder gives passages that are short and say something, or is refused: the first byte names its kind."""
    kind = KINDS_OF_FILES[data[0] % len(KINDS_OF_FILES)] if data else "a.txt"
    for passage in passages_of(scratch.file(kind, data[1:])):
        assert passage.text.strip() and passage.place >= 1
        assert len(passage.text) <= 2 * MOST_CHARACTERS or not kind.endswith(
            (".md", ".txt", ".py", ".json", ".gz", ".ipynb")
        )


@target("facts", errors=())
def facts(data: bytes) -> None:
    """What a finished file of vectors says about its making is a dictionary, or nothing."""
    found = read_facts(scratch.file("out.parquet", data))
    assert found is None or isinstance(found, dict)


@target("keys", "text", errors=(UsageError,), words=("name:", "#", "\n", "0123456789abcdef", " ", "\x85", "\u2028"))
def keys(data: bytes) -> None:
    """A file of keys is keys, or refused; none of them is open to a guess."""
    found = read_keys(scratch.file("keys", data))
    assert len(found.one) >= 16 and found.name_of(found.one.encode()) is not None and found.name_of(b"") is None


YAML = (
    "data:\n", "  lookback_window: ", "  data_path: ", "training:\n", "  batch_size: ", "model_paths:\n", "  base_path: ",
    "1e400", ".inf", ".nan", "&a ", "*a", "!!python/object:os.system", "2024-01-01", "? ", "[", "{", "~", "true", "- ",
    "|\n", "9" * 400,
)  # fmt: skip


@target("finetune", "text", errors=(InputError, UsageError), words=YAML)
def finetune_file(data: bytes) -> None:
    """The settings of a fine-tuning (YAML) are numbers and names, or refused."""
    path = scratch.file("config.yaml", data)
    for kind in ("tokenizer", "predictor"):
        found = finetune.read_config(path, kind)
        assert all(math.isfinite(value) for value in found.plan.values() if isinstance(value, (int, float)))
