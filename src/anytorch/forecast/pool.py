"""Forecasts on several devices: a process per device, all served from one queue of series.

with anytorch.PredictorPool("kronos-small", devices=["cuda:0", "cuda:1"]) as pool:
    forecasts = pool.predict_batch(tables, pred_len=24)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from anytorch.device_pool import DevicePool, PoolJob
from anytorch.errors import InputError
from anytorch.forecast.checkpoints import choose_checkpoint
from anytorch.forecast.inputs import one_each

FACTORY = "anytorch.forecast.checkpoints:load_predictor"
PORTIONS = 3  # of the series for each device: the faster ones take more of them


def counted_from(first: int, words: str) -> str:
    """A message about a part of the series, with the numbers that the caller knows them by.

    >>> counted_from(4, "series 1 has 0 rows"), counted_from(4, "the history has 0 rows")
    ('series 5 has 0 rows', 'series 4 has 0 rows')
    """
    words = re.sub(r"^the history\b", "series 0", words)  # what a part of one series is called
    return re.sub(r"\bseries (\d+)\b", lambda found: f"series {first + int(found[1])}", words)


class PredictorPool:
    """Several predictors of one model behind the methods of one. Thread-safe.

    `devices` names them, one process each; a name may be given twice, and "cpu" beside others. `options` are those of
    `load_predictor`. If a device's process dies, others take its series: nothing is lost while one runs.
    """

    def __init__(
        self, model: str | Path = "tiny", tokenizer: str | Path | None = None, *, devices: Sequence[str], **options: Any
    ) -> None:
        chosen = choose_checkpoint(model, tokenizer, options.get("max_context"))  # what cannot be found is told here
        told = {"model": str(model), "tokenizer": None if tokenizer is None else str(tokenizer), **options}
        self.max_context = chosen.max_context
        self._pool = DevicePool([PoolJob(device, FACTORY, {**told, "device": device}) for device in devices])
        self._count = len(devices)

    def predict_batch(
        self,
        df_list: Sequence[Any],
        x_timestamp_list: Sequence[Any] | None = None,
        y_timestamp_list: Sequence[Any] | None = None,
        pred_len: int | None = None,
        **options: Any,
    ) -> list[Any]:
        """`KronosPredictor.predict_batch`, shared out among the devices; the answers come in the order of the series.

        With a `seed` the series are not shared out: the draws of a batch depend on which series are in it.
        """
        if not isinstance(df_list, (list, tuple)):
            raise InputError(f"df_list is a {type(df_list).__name__}, not a list or a tuple of tables")
        options.setdefault("verbose", False)
        x_times = one_each(x_timestamp_list, len(df_list), "x_timestamp_list")
        y_times = one_each(y_timestamp_list, len(df_list), "y_timestamp_list")
        most = 1 if options.get("seed") is not None else self._count * PORTIONS
        size = max(1, -(-len(df_list) // most))
        parts = [slice(begin, begin + size) for begin in range(0, len(df_list), size)]
        futures = [
            self._pool.submit(
                "predict_batch", list(df_list[part]), list(x_times[part]), list(y_times[part]), pred_len, **options
            )
            for part in parts
        ]
        found: list[Any] = []
        for part, future in zip(parts, futures, strict=True):
            try:
                found += future.result()
            except InputError as exc:  # a worker counts the series of its part
                if len(df_list) == 1:
                    raise
                raise InputError(counted_from(part.start, exc.message), hint=exc.hint) from exc
        return found

    def predict(self, df: Any, *args: Any, **options: Any) -> Any:
        """`KronosPredictor.predict` on the device that is free next."""
        options.setdefault("verbose", False)
        return self._pool.submit("predict", df, *args, **options).result()

    def describe(self) -> list[dict[str, Any]]:
        return self._pool.describe()

    @property
    def process_ids(self) -> list[int | None]:
        return self._pool.process_ids

    def close(self) -> None:
        self._pool.close()

    def __enter__(self) -> PredictorPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
