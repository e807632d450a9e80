"""`KronosPredictor`: histories in, forecasts out, on any device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from anytorch import limits, logs
from anytorch.counts import counted
from anytorch.devices.choose import resolve
from anytorch.devices.locate import locate
from anytorch.devices.memory import memory
from anytorch.devices.oom import is_out_of_memory
from anytorch.devices.precision import capabilities
from anytorch.devices.types import Caps
from anytorch.errors import InputError, OutOfMemory, UsageError
from anytorch.forecast.candles.tables import FIELDS, PRICES
from anytorch.forecast.decoding.decoder import Cache, Codec, Decoder, check_pair, layer_maker, prepared
from anytorch.forecast.decoding.sampling import Noise, Sampler
from anytorch.forecast.generation.generate import (
    ACCELERATOR_ROWS,
    ACCELERATOR_WINDOWS,
    HOST_ROWS,
    HOST_WINDOWS,
    Chunk,
    GenerationPlan,
    Prompts,
    Verbose,
    generate,
    progress,
    quiet_threads,
    split,
)
from anytorch.forecast.generation.steps import RolledSteps, StaticSteps
from anytorch.forecast.inputs import (
    Series,
    check_arrays,
    from_arrays,
    make_sampler,
    one_each,
    quantile_levels,
    read_series,
    real_number,
    whole_number,
)
from anytorch.forecast.kernels.choice import told
from anytorch.forecast.model import STAMPS, Kronos, KronosTokenizer
from anytorch.forecast.results import Forecast, Paths, joined, make_forecast, values_of

log = logs.logger(__name__)
Rolling = Literal["exact", "evict", "trim"]
ROLLING = ("exact", "evict", "trim")
SMALL_NBYTES, UNKNOWN_NBYTES = 2**28, 2**32


class KronosPredictor:
    """A model and its tokenizer on a device, ready to forecast.

    `device` is anything `anytorch.resolve` takes; `.device` is the torch device that was chosen, and `.device_warning`
    says why if it is not the one asked for ("" otherwise). Model and tokenizer are put into eval mode and moved there.
    `dtype` ("bfloat16", "float16") computes with a rounded copy of the model; `quantization` ("int8") computes the
    blocks' linear layers with packed weights, beside the full ones; the tokenizer stays as it is. `threads` is the number
    of CPU threads while forecasting ("auto" looks at what else the machine is doing; None leaves torch alone).

    >>> predictor = KronosPredictor(model, tokenizer)                                    # doctest: +SKIP
    >>> predictor.predict(df, x_timestamp, y_timestamp, pred_len=120, sample_count=5)    # doctest: +SKIP
    """

    def __init__(
        self,
        model: Kronos,
        tokenizer: KronosTokenizer,
        device: str | torch.device | None = "auto",
        max_context: int = 512,
        clip: float = 5,
        *,
        dtype: str | torch.dtype | None = None,
        quantization: str | None = None,
        threads: int | Literal["auto"] | None = "auto",
    ) -> None:
        check_pair(model, tokenizer)
        max_context = whole_number("max_context", max_context, limits.WINDOW, "a window has at least 2 rows")
        clip = real_number("clip", clip)
        if not clip > 0:
            raise UsageError(f"clip is {clip} and must be above 0")
        if threads is not None and not (isinstance(threads, str) and threads == "auto"):
            threads = whole_number("threads", threads, limits.THREADS, "use at least one, or 'auto'")
        if not isinstance(quantization, (str, type(None))):
            raise UsageError(f"quantization is {quantization!r}, not a name", hint='quantization="int8"')
        self.resolution = resolve(device)
        self.device: torch.device = self.resolution.device
        self.device_warning = self.resolution.warning
        self.max_context, self.clip, self.threads = max_context, clip, threads
        # As published; what the columns are called is not for the caller to change.
        self.price_cols, self.vol_col, self.amt_vol = list(PRICES), *FIELDS[len(PRICES) :]
        self.time_cols = list(STAMPS)
        self.tokenizer = tokenizer.to(self.device).eval()
        layer_maker(quantization)  # an unknown one is refused now, not with the first forecast
        self.quantization = quantization
        self.model = prepared(model, self.device, dtype)
        self._decoder: Decoder | None = None
        self._codec: Codec | None = None
        # Where steps can be recorded, they are; elsewhere fixed shapes would only mean more work.
        caps = capable(self.device)
        self.on_host = self.device.type == "cpu"  # its memory is the host's
        self.static: Literal["", "plain", "recorded"] = "recorded" if caps.graphs else ""
        self.kernels = caps.triton
        self.uniform_noise = "float64" in caps.dtypes and not self.on_host

    # --- the published calls -----------------------------------------------------------------------------------------

    def predict(
        self,
        df: Any,
        x_timestamp: Any = None,
        y_timestamp: Any = None,
        pred_len: int | None = None,
        T: float = 1.0,
        top_k: int | None = 0,
        top_p: float = 0.9,
        sample_count: int = 1,
        verbose: Verbose = True,
        seed: int | None = None,
        **options: Any,
    ) -> Any:
        """Forecast one series: a float32 DataFrame with open, high, low, close, volume, amount, indexed by time.

        `df` has open, high, low, close and perhaps volume and amount (pandas, polars, or an array in that order), or is a
        series of single values (a column, a pandas Series, a list of numbers), whose forecast is `close`.
        Timestamps may be left out: the history's are then looked for in `df`, the future's continue its rhythm.
        `T`, `top_k` and `top_p` shape the draws (`top_k=1` is greedy); the answer is the mean of `sample_count` paths.
        The same `seed` gives the same paths on every device; without one, torch's own generator decides.
        Paths and quantiles: `forecast`, which also says what the `options` are.
        Raises InputError naming the row and column that cannot be used.
        """
        given = (x_timestamp, y_timestamp, pred_len, T, top_k, top_p, sample_count, verbose, seed)
        refuse_details(options)
        return self.forecast(df, *given, **options).mean

    def predict_batch(
        self,
        df_list: Sequence[Any],
        x_timestamp_list: Sequence[Any] | None = None,
        y_timestamp_list: Sequence[Any] | None = None,
        pred_len: int | None = None,
        T: float = 1.0,
        top_k: int | None = 0,
        top_p: float = 0.9,
        sample_count: int = 1,
        verbose: Verbose = True,
        seed: int | None = None,
        **options: Any,
    ) -> list[Any]:
        """`predict` for many series at once, in one batched pass; histories may differ in length.

        All series are forecast by the same number of steps. The answers come in the order of the series.
        """
        given = (x_timestamp_list, y_timestamp_list, pred_len, T, top_k, top_p, sample_count, verbose, seed)
        refuse_details(options)
        return [found.mean for found in self.forecast_batch(df_list, *given, **options)]

    # --- with paths and quantiles ------------------------------------------------------------------------------------

    def forecast(
        self,
        df: Any,
        x_timestamp: Any = None,
        y_timestamp: Any = None,
        pred_len: int | None = None,
        T: float = 1.0,
        top_k: int | None = 0,
        top_p: float = 0.9,
        sample_count: int = 1,
        verbose: Verbose = True,
        seed: int | None = None,
        **options: Any,
    ) -> Forecast:
        """`predict`, with every path, the quantiles asked for, and the warnings: a `Forecast`, whose `mean` is its answer.

        `quantiles=(0.1, 0.9)`: levels, each a DataFrame. `lookback=N`: only the last N rows of the history count.
        `rolling` says what happens when history and forecast outgrow `max_context`: "exact" is the published
        behaviour, "evict" and "trim" are faster and give other numbers (see docs/concepts/kronos.md).
        `checks=False` takes prices of zero and below, and times out of order, as the published code does.
        `rescale=True` counts a column in a unit of its own where the published scaling loses it: prices around 1e-6, of
        which a warning tells, and amounts around 1e30, which are refused otherwise. `non_negative_volume=True` cuts
        volumes at 0.
        """
        given = (pred_len, T, top_k, top_p, sample_count, verbose, seed)
        (found,) = self.forecast_batch([df], [x_timestamp], [y_timestamp], *given, **options)
        return found

    def forecast_batch(
        self,
        df_list: Sequence[Any],
        x_timestamp_list: Sequence[Any] | None = None,
        y_timestamp_list: Sequence[Any] | None = None,
        pred_len: int | None = None,
        T: float = 1.0,
        top_k: int | None = 0,
        top_p: float = 0.9,
        sample_count: int = 1,
        verbose: Verbose = True,
        seed: int | None = None,
        *,
        quantiles: Sequence[float] | None = None,
        lookback: int | None = None,
        non_negative_volume: bool = False,
        rolling: Rolling = "exact",
        checks: bool = True,
        rescale: bool = False,
    ) -> list[Forecast]:
        """`forecast` for many series at once, as `predict_batch` is to `predict`."""
        if not isinstance(df_list, (list, tuple)):
            raise InputError(f"df_list is a {type(df_list).__name__}, not a list or a tuple of tables")
        x_times = one_each(x_timestamp_list, len(df_list), "x_timestamp_list")
        y_times = one_each(y_timestamp_list, len(df_list), "y_timestamp_list")
        sampler, levels = make_sampler(T, top_k, top_p), quantile_levels(quantiles)
        if lookback is not None:
            lookback = whole_number("lookback", lookback, limits.WINDOW)
        names = ["the history"] if len(df_list) == 1 else [f"series {place}" for place in range(len(df_list))]
        series = [
            self._told_if_unseen(
                read_series(table, x, y, pred_len, where=name, checks=checks, rescale=rescale, lookback=lookback)
            )
            for table, x, y, name in zip(df_list, x_times, y_times, names, strict=True)
        ]
        paths = self.paths(series, sampler, sample_count, rolling=rolling, seed=seed, verbose=verbose)
        return [
            make_forecast(one, found.normal, levels=levels, non_negative_volume=non_negative_volume)
            for one, found in zip(series, paths, strict=True)
        ]

    def _told_if_unseen(self, series: Series) -> Series:
        """The series; one that is longer than what the model sees with a warning, since its scale is that of all rows."""
        rows, seen = len(series.normal), self.max_context
        if rows <= seen:
            return series
        words = (
            f"{series.where} has {rows:,} rows and the model sees the last {seen:,}: the published code takes mean and "
            f"spread of all of them, which moves the forecast (lookback={seen} forecasts from what the model sees)"
        )
        log.warning("%s", words)
        return replace(series, warnings=(*series.warnings, words))

    def __getstate__(self) -> dict[str, Any]:
        """The state for pickle and copy, without what was prepared for this device."""
        return {**self.__dict__, "_decoder": None, "_codec": None}

    def explain(self) -> str:
        """Where and how forecasts are computed, in words; after two forecasts of a shape also what was measured for it."""
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        dtype = self.quantization or str(self.model.norm.weight.dtype).removeprefix("torch.")
        why = self.device_warning or f"you asked for {self.resolution.requested}"
        how = "recorded once and replayed" if self.static == "recorded" else "computed one after the other"
        lines = [
            f"{parameters / 1e6:,.1f} million parameters in {dtype} on {self.device} ({why})",
            f"windows of {self.max_context} rows; steps are {how}",
        ]
        if self._decoder is not None:
            lines += told_of("a step of growing windows", self._decoder.kept, "our kernels")
            ours = "our kernels where they are faster"
            lines += told_of("the products of full windows", self._decoder.kept_rolled, ours)
        return "\n".join(lines)

    def generate(
        self,
        x: Any,
        x_stamp: Any,
        y_stamp: Any,
        pred_len: int,
        T: float = 1.0,
        top_k: int | None = 0,
        top_p: float | None = 0.9,
        sample_count: int = 1,
        verbose: Verbose = False,
        seed: int | None = None,
    ) -> np.ndarray:
        """Normalised candles [series, rows, 6] and stamps [series, …, 5] → the mean of the paths, [series, pred_len, 6].

        What `predict` does between scaling a table and scaling back; arrays or tensors of any device.
        """
        pred_len = whole_number("pred_len", pred_len, limits.STEPS)
        check_arrays(x, x_stamp, y_stamp, pred_len)
        series = from_arrays(
            as_array(x).astype(np.float32), as_array(x_stamp).astype(np.int64), as_array(y_stamp).astype(np.int64)
        )
        sampler = make_sampler(T, top_k, top_p)
        found = self.paths(series, sampler, sample_count, seed=seed, verbose=verbose)
        means = [np.mean(one.normal, axis=0) for one in found]
        return np.stack(means) if means else np.zeros((0, pred_len, 6), np.float32)

    # --- what they stand on ------------------------------------------------------------------------------------------

    def paths(
        self,
        series: Sequence[Series],
        sampler: Sampler,
        samples: int,
        *,
        rolling: str = "exact",
        seed: int | None = None,
        verbose: Verbose = False,
    ) -> list[Paths]:
        """The generated ids and normalised values of every series: what `predict` takes the mean of."""
        samples = whole_number("sample_count", samples, limits.PATHS)
        seed = None if seed is None else whole_number("seed", seed, limits.SEED)
        if rolling not in ROLLING:
            raise InputError(f"rolling is {rolling!r}; use one of: {', '.join(ROLLING)}")
        if not series:
            return []
        pred_len = len(series[0].future_stamp)
        for one in series:
            if len(one.future_stamp) != pred_len:
                raise InputError(
                    f"{one.where} has {len(one.future_stamp)} times to forecast, {series[0].where} has {pred_len}"
                )
        noise = None if sampler.greedy else Noise.seeded(seed, len(series) * samples, self.decoder().sizes)
        distinct = 1 if sampler.greedy else samples  # greedy paths are all the same
        limit_rows = HOST_ROWS if self.on_host else ACCELERATOR_ROWS
        plan = GenerationPlan(
            pred_len, distinct, self.max_context, rolling, sampler, limit_rows, self.static, self.kernels
        )
        try:
            with torch.inference_mode(), quiet_threads(self.threads):
                found = self._generate(series, plan, samples, noise, verbose)
        except (RuntimeError, MemoryError) as exc:
            if not is_out_of_memory(exc):
                raise
            asked = f"{counted(len(series) * samples, 'path')} of {counted(pred_len, 'step')}"
            raise OutOfMemory(
                f"{self.device} has too little memory for {asked}",
                hint="draw fewer paths or steps, or use another device",
            ) from exc
        if noise is not None:
            noise.finish()
        if distinct == samples:
            return found
        return [Paths(*(np.repeat(part, samples, axis=0) for part in (p.s1, p.s2, p.normal))) for p in found]

    def _generate(
        self, series: Sequence[Series], plan: GenerationPlan, samples: int, noise: Noise | None, verbose: Verbose
    ) -> list[Paths]:
        decoder, codec, pred_len = self.decoder(), self.codec(), plan.pred_len
        values = [torch.from_numpy(np.clip(one.normal, -self.clip, self.clip)) for one in series]
        ids = codec.encode(values, self.window(pred_len, plan.rolling), plan.limit_rows)
        chunks = self.chunks([len(s1) for s1, _ in ids], plan)
        found: list[list[Paths]] = [[] for _ in series]
        with progress(verbose, pred_len * len(chunks)) as tick:
            for number, chunk in enumerate(chunks):
                prompts, rows = self._prompts(chunk, series, ids, samples)
                draws = None if noise is None else noise.steps(rows, self.uniform_noise)
                part = replace(plan, samples=chunk.last - chunk.first)
                s1, s2 = generate(
                    decoder,
                    prompts,
                    part,
                    draws,
                    lambda done, n=number: tick(n * pred_len + done),  # type: ignore[misc]
                )
                for place, one in zip(chunk.series, values_of(codec, prompts, s1, s2, part), strict=True):
                    found[place].append(one)
        return [joined(parts) for parts in found]

    def decoder(self) -> Decoder:
        """The model made ready; made again when its weights have changed."""
        if self._decoder is None or not self._decoder.fits(self.model):
            self.model.eval()
            make, record = layer_maker(self.quantization), self.static == "recorded"
            self._decoder = Decoder(self.model, make, tables=not self.on_host, record=record)
        return self._decoder

    def codec(self) -> Codec:
        if self._codec is None or not self._codec.fits(self.tokenizer):
            self._codec = Codec(self.tokenizer.eval(), fuse=not self.on_host, record=self.static == "recorded")
        return self._codec

    def window(self, pred_len: int, rolling: str) -> int:
        """How many rows of history the prompt may have."""
        if rolling != "trim":
            return self.max_context
        if pred_len >= self.max_context:
            raise InputError(
                f"rolling='trim' needs pred_len ({pred_len}) below max_context ({self.max_context})",
                hint="use rolling='exact' or 'evict', or forecast fewer steps",
            )
        return self.max_context - pred_len

    def chunks(self, lengths: Sequence[int], plan: GenerationPlan) -> list[Chunk]:
        decoder = self.decoder()
        nbytes = [
            Cache.nbytes(decoder, length, plan.samples, plan.cached_steps(length)) // plan.samples + 1
            for length in lengths
        ]
        needed = sum(nbytes) * plan.samples
        # Asking takes as long as some steps do; a little memory is always there.
        free = memory(self.device).free if needed > SMALL_NBYTES else None
        budget = max(SMALL_NBYTES, (free or UNKNOWN_NBYTES) // 4)
        return split(lengths, plan.samples, HOST_WINDOWS if self.on_host else ACCELERATOR_WINDOWS, nbytes, budget)

    def _prompts(
        self, chunk: Chunk, series: Sequence[Series], ids: Sequence[tuple[Tensor, Tensor]], samples: int
    ) -> tuple[Prompts, Tensor]:
        """A chunk's prompts, and the rows of the whole forecast that its windows are."""
        decoder, pad = self.decoder(), torch.nn.utils.rnn.pad_sequence
        lengths = [len(ids[place][0]) for place in chunk.series]
        stamp = pad(
            [torch.from_numpy(series[p].stamp[-n:]) for p, n in zip(chunk.series, lengths, strict=True)],
            batch_first=True,
        )
        future = torch.stack([torch.from_numpy(series[place].future_stamp) for place in chunk.series])
        prompts = Prompts(
            pad([ids[place][0] for place in chunk.series], batch_first=True),
            pad([ids[place][1] for place in chunk.series], batch_first=True),
            lengths,
            decoder.time(stamp),
            decoder.time(future),
        )
        rows = torch.tensor([p * samples + s for p in chunk.series for s in range(chunk.first, chunk.last)])
        return prompts, rows


def refuse_details(options: Mapping[str, Any]) -> None:
    """Raise UsageError for options of `forecast` that ask for more than the DataFrame `predict` returns."""
    for name in ("quantiles", "return_samples"):
        if options.get(name) is not None and options[name] is not False:
            raise UsageError(
                f"predict() does not take {name}=: it returns one DataFrame",
                hint="use predictor.forecast(…), which returns mean, samples and quantiles",
            )


def as_array(values: Any) -> np.ndarray:
    return values.detach().float().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)


def capable(device: torch.device) -> Caps:
    backend, index = locate(device)
    return capabilities(backend.name, index)


def told_of(name: str, steps: StaticSteps | RolledSteps | None, ours: str) -> list[str]:
    """Which kernels compute these steps, and what was measured for that; nothing before the first forecast has any."""
    if steps is None:
        return []
    if not steps.tried_kernels:
        return [f"{name}: torch's kernels; ours are compiled beside the next forecasts of the same shape"]
    which = f"torch's kernels ({steps.no_kernels})" if steps.no_kernels else ours
    return [f"{name}: {which}", *(f"  {told(choice)}" for choice in steps.choices.values())]
