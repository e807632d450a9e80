"""Every number that the command line, HTTP and Python take has a least and a most, and both are kept."""

from __future__ import annotations

import argparse
import inspect
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from functools import cache
from typing import Any

import numpy as np
import pytest

import anytorch
from anytorch import limits
from anytorch.cli.parser import COMMANDS, command_parser, number
from anytorch.errors import AnytorchError, UsageError

ABSURD = (10**20, -(10**20), math.nan, math.inf, -math.inf)
NAMES = re.compile(r"^(N|K|T|P|SECONDS)$")  # what the help calls a number


def numbers() -> Iterator[tuple[str, argparse.Action]]:
    for name in COMMANDS:
        for action in command_parser(name)._actions:
            if isinstance(action.type, number) or NAMES.match(str(action.metavar)):
                yield name, action


@pytest.mark.parametrize(("command", "action"), [pytest.param(*one, id=f"{one[0]} {one[1].dest}") for one in numbers()])
def test_every_number_of_the_command_line_has_limits(command: str, action: argparse.Action) -> None:
    assert isinstance(action.type, number), "use type=number(limits.…)"
    parser, limit = command_parser(command), action.type.limit
    assert -math.inf < limit.least < limit.most < math.inf
    for text in (
        str(int(limit.least) - 1),
        str(int(limit.most) + 1),
        "9" * 5000,
        "1e400",
        "nan",
        "inf",
        "",
        "four",
        "0x10",
    ):
        with pytest.raises(UsageError, match=rf"{action.option_strings[-1]} .*: use a (whole )?number"):
            parser._get_values(action, [text])
    assert parser._get_values(action, [str(int(limit.most))]) in (limit.most, [limit.most])


def test_no_argument_is_a_bare_int_or_float() -> None:
    for name in COMMANDS:
        for action in command_parser(name)._actions:
            assert action.type not in (int, float), f"{name} {action.dest}"
            assert isinstance(action.type, number) == (type(action.default) in (int, float)) or action.default is None


def schemas() -> Iterator[tuple[str, str, dict[str, Any]]]:
    from anytorch.serve import schemas as bodies
    from anytorch.serve import text_schemas

    def walk(path: str, part: Any, *, data: bool) -> Iterator[tuple[str, dict[str, Any]]]:
        if isinstance(part, list):
            for one in part:
                yield from walk(path, one, data=data)
        if not isinstance(part, dict):
            return
        if part.get("type") in ("integer", "number") and not data:
            yield path, part
        for name, value in part.items():
            inside = f"{path}.{name}" if path.endswith("properties") else name if name == "properties" else path
            # A list of token ids or of prices is data: its length is limited, its values are the model's business.
            yield from walk(inside, value, data=data or (name == "items" and path.rpartition(".")[2] in DATA))

    for name, one in (vars(bodies) | vars(text_schemas)).items():
        if isinstance(one, type) and issubclass(one, bodies.Body) and one is not bodies.Body:
            for path, part in walk("", one.model_json_schema(), data=False):
                yield name, path, part


DATA = ("input", "open", "high", "low", "close", "volume", "amount", "values")


def test_every_number_of_a_request_body_has_limits() -> None:
    found = list(schemas())
    assert len(found) > 15
    for name, path, part in found:
        low = part.get("minimum", part.get("exclusiveMinimum", part.get("const")))
        high = part.get("maximum", part.get("exclusiveMaximum", part.get("const")))
        assert low is not None and high is not None, f"{name}{path}: {part}"


def test_every_number_of_the_service_has_limits() -> None:
    from anytorch.serve.options import LIMITS, ServeOptions

    taken = {field.name for field in fields(ServeOptions) if re.search(r"\b(int|float)\b", str(field.type))}
    assert taken == set(LIMITS)
    for name in taken:
        for value in ABSURD:
            with pytest.raises(UsageError, match=name):
                ServeOptions(**{name: value})


# --- Python ------------------------------------------------------------------------------------------------------------


@cache
def table() -> Any:
    return anytorch.sample_candles(64, seed=1)


@cache
def plain(make: Callable[[], Any]) -> Any:
    """One for all calls."""
    return make()


def predictor(**options: Any) -> Any:
    return anytorch.load_predictor("tiny", device="cpu", **options)


def engine(**options: Any) -> Any:
    return anytorch.ArrowEngine(device="cpu", **options)


def queue(**options: Any) -> Any:
    return anytorch.EngineQueue(plain(engine), **options)


def graph(**options: Any) -> Any:
    made = anytorch.new_kernel_graph()
    x = made.new_input((2, 2), dtype="float32")
    made.mark_output(made.exp(x))
    return made.superoptimize(**options)


def small() -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(8, 8))


def loader(**options: Any) -> Any:
    import torch

    return anytorch.train.World(torch.device("cpu")).loader([1, 2], **{"batch_size": 1, **options})


def optimizer(**options: Any) -> Any:
    import torch

    return anytorch.memory.TieredOptimizer(small(), torch.optim.SGD, **options)


def generator(**options: Any) -> Any:
    return anytorch.TextGenerator("no such folder", **options)


# How each public name that takes a number is called, and which numbers it takes.
CALLS: dict[str, tuple[Callable[..., Any], str]] = {
    "fit_batch": (lambda **given: anytorch.fit_batch(lambda batch: batch, **{"start": 4, **given}), "start minimum"),
    "sample_candles": (lambda **given: anytorch.sample_candles(**given), "rows seed price"),
    "load_predictor": (predictor, "max_context"),
    "KronosPredictor": (
        lambda **given: anytorch.KronosPredictor(plain(predictor).model, plain(predictor).tokenizer, "cpu", **given),
        "max_context threads",
    ),
    "KronosPredictor.forecast": (
        lambda **given: plain(predictor).forecast(table(), **{"pred_len": 2, "verbose": False, **given}),
        "pred_len T top_k top_p sample_count seed quantiles lookback",
    ),
    "ArrowEngine": (engine, "batch_tokens max_length threads"),
    "ArrowEngine.encode": (lambda **given: plain(engine).encode(["one"], **given), "dim"),
    "ArrowEngine.search": (lambda **given: plain(engine).search("one", ["two"], **given), "k"),
    "EngineQueue": (queue, "batch_tokens max_wait_s max_waiting_tokens max_waiting_s"),
    "TextGenerator": (generator, "at_once waiting"),
    "graph.KernelGraph.superoptimize": (graph, "time_limit_s"),
    "PersistentKernel": (
        lambda **given: anytorch.PersistentKernel(**given),
        "num_workers num_local_schedulers num_remote_schedulers max_seq_length",
    ),
    "TextPool": (lambda **given: anytorch.TextPool("no such folder", devices=["cpu"], **given), "at_once"),
    "train.World.loader": (loader, "batch_size seed"),
    "memory.fit": (lambda **given: anytorch.memory.fit(small(), "cpu", device_budget="1MB", **given), "compute_s"),
    "memory.TieredOptimizer": (optimizer, "clip_norm"),
    "memory.with_rescue": (
        lambda **given: anytorch.memory.with_rescue(lambda n: n, small(), **{"batch": 4, **given}),
        "batch minimum",
    ),
    "quant.add_lora": (lambda **given: anytorch.quant.add_lora(small(), **given), "rank alpha dropout"),
    "quant.prune": (lambda **given: anytorch.quant.prune(small(), **given), "amount"),
}
# Which public names are not in the table, and why.
ELSEWHERE = {
    "KronosPredictor.predict": "calls forecast, as predict_batch does forecast_batch",
    "KronosPredictor.generate": "the same checks as forecast",
    "KronosPredictor.paths": "the same checks as forecast",
    "TextGenerator.stream": "tests/text/generate: it needs a model",
    "quant.quantize": "tests/quant/test_formats.py: group_size is one of a few",
    "ArrowEngine.encode_iter": "the same check as encode",
}


@pytest.mark.parametrize("name", CALLS)
def test_numbers_of_python_have_limits(name: str) -> None:
    call, names = CALLS[name]
    for one in names.split():
        for value in ABSURD:
            given = (value,) if one == "quantiles" else value
            with pytest.raises((AnytorchError, ValueError), match=one.removesuffix("s")):
                call(**{one: given})


def test_the_table_names_every_number_of_the_jobs() -> None:
    for name in (
        name for name in CALLS if name[0].isupper() or name in ("fit_batch", "load_predictor", "sample_candles")
    ):
        if "." in name:
            continue
        taken = {
            parameter.name
            for parameter in inspect.signature(getattr(anytorch, name)).parameters.values()
            if re.search(r"\b(int|float)\b", str(parameter.annotation)) and "Callable" not in str(parameter.annotation)
        }
        told_elsewhere = {"clip", "device_budget", "eos_token_id", "world_size", "mpi_rank"}
        assert taken - told_elsewhere == set(CALLS[name][1].split()), name


def test_no_list_of_devices_starts_thousands_of_processes() -> None:
    many = ["cpu"] * 257
    for call in (
        lambda: anytorch.PredictorPool("tiny", devices=many),
        lambda: anytorch.TextPool("no such folder", devices=many),
        lambda: anytorch.ArrowEngine(devices=many),
    ):
        with pytest.raises(UsageError, match="number of devices=257 is invalid: use a whole number from 1 to 256"):
            call()


def test_limits_take_numpy_numbers_and_no_truth_values() -> None:
    assert limits.THREADS.check("threads", np.int64(4)) == 4
    for value in (True, "4", 4.0, None):
        with pytest.raises(UsageError, match=r"threads=.* is invalid: use a whole number from 1 to 1,024"):
            limits.THREADS.check("threads", value)
    assert limits.SECONDS.check("seconds", np.float32(0.5)) == 0.5
    with pytest.raises(UsageError, match="use a number above 0 and up to 86,400"):
        limits.SECONDS.check("seconds", 0)
