"""The functions of the published `model.kronos`, for programs that call them by name.

They take and give what the published ones do. Where those loop over a whole window per step, these use the exact cache;
where those would use train mode by accident, these use eval mode, which is what the published results were made with.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from anytorch.forecast.decoding.sampling import keep
from anytorch.forecast.generation.generate import Verbose
from anytorch.forecast.inputs import as_times, check_arrays, stamps
from anytorch.forecast.model import STAMPS, Kronos, KronosTokenizer
from anytorch.forecast.predictor import KronosPredictor

if TYPE_CHECKING:
    import pandas as pd  # type: ignore[import-untyped]


model_dict: dict[str, type] = {
    "kronos_tokenizer": KronosTokenizer,
    "kronos": Kronos,
    "kronos_predictor": KronosPredictor,
}


def get_model_class(model_name: str) -> type:
    """The class of that name. As published, another name is a NotImplementedError; this one says which there are."""
    if model_name not in model_dict:
        raise NotImplementedError(f"unknown model class {model_name!r}; known: {', '.join(model_dict)}")
    return model_dict[model_name]


def auto_regressive_inference(
    tokenizer: KronosTokenizer,
    model: Kronos,
    x: Tensor,
    x_stamp: Tensor,
    y_stamp: Tensor,
    max_context: int,
    pred_len: int,
    clip: float = 5,
    T: float = 1.0,
    top_k: int | None = 0,
    top_p: float | None = 0.99,
    sample_count: int = 5,
    verbose: Verbose = False,
) -> np.ndarray:
    """Normalised candles [series, rows, 6], the mean of `sample_count` paths; the last `pred_len` rows are the forecast.

    `x` [series, history, 6] is normalised, the stamps [series, …, 5] hold minute, hour, weekday, day, month. As
    published, as much history as the window holds stands before the forecast, as the tokenizer gives it back. Model and
    tokenizer are left in eval mode, on the device of `x`. Of a `pred_len` above `max_context` all rows come back (the
    published function loses the first of them).
    """
    values = torch.as_tensor(x)
    predictor = KronosPredictor(model, tokenizer, device=values.device, max_context=max_context, clip=clip)
    check_arrays(values, x_stamp, y_stamp, pred_len)
    forecast = predictor.generate(values, x_stamp, y_stamp, pred_len, T, top_k, top_p, sample_count, verbose)
    before = min(values.shape[1], max(0, max_context - pred_len))
    if not before:
        return forecast
    with torch.inference_mode():
        s1, s2 = tokenizer.encode(values.float().clip(-clip, clip), half=True)
        history = tokenizer.decode([s1[:, -before:], s2[:, -before:]], half=True)
    return np.concatenate((history.float().cpu().numpy(), forecast), axis=1)


def calc_time_stamps(x_timestamp: Any) -> pd.DataFrame:
    """Minute, hour, weekday, day and month of every timestamp: a Series of datetimes, or anything that predict takes."""
    import pandas as pd

    index = x_timestamp.index if isinstance(x_timestamp, pd.Series) else None
    return pd.DataFrame(stamps(as_times(x_timestamp, "x_timestamp")), columns=list(STAMPS), index=index)


def top_k_top_p_filtering(
    logits: Tensor,
    top_k: int = 0,
    top_p: float = 1.0,
    filter_value: float = -math.inf,
    min_tokens_to_keep: int = 1,
) -> Tensor:
    """Logits [rows, ids] with `filter_value` for every id that is not to be drawn; changed in place, as published.

    With `top_k` above 0 `top_p` is not used. Of `top_p` and a `min_tokens_to_keep` above 1, as published, one id more
    than that is kept. Without either nothing is cut (the published function then returns None).
    """
    flat = logits.reshape(-1, logits.shape[-1])
    if top_k > 0:
        removed = torch.isneginf(keep(flat, max(top_k, min_tokens_to_keep), 1.0))
    elif top_p < 1.0:
        removed = torch.isneginf(keep(flat, 0, top_p))
        if min_tokens_to_keep > 1:
            likeliest = torch.sort(flat, dim=-1, descending=True).indices[:, : min_tokens_to_keep + 1]
            removed = removed.scatter(1, likeliest, False)
    else:
        return logits
    return logits.masked_fill_(removed.view_as(logits), filter_value)


def sample_from_logits(
    logits: Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    sample_logits: bool = True,
) -> Tensor:
    """One id per row [rows, 1], drawn with torch's own generator; the likeliest one without `sample_logits`."""
    scaled = logits / temperature
    scaled = top_k_top_p_filtering(scaled, top_k=top_k or 0, top_p=1.0 if top_p is None else top_p)
    likely = torch.softmax(scaled, dim=-1)
    return torch.multinomial(likely, num_samples=1) if sample_logits else likely.argmax(dim=-1, keepdim=True)
