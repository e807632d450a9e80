"""Every family computes what transformers computes, in every layout."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

FAMILIES = (
    "bert", "bert-tanh", "roberta", "xlm-roberta", "distilbert", "mpnet", "modernbert", "nomic_bert", "qwen3",
)  # fmt: skip


def one_by_one(module: Any, ids: np.ndarray, starts: np.ndarray) -> list[np.ndarray]:
    from anytorch.text.encoders.layouts import OneByOne

    longest = int(np.diff(starts).max())
    layout = OneByOne(torch.from_numpy(starts), len(ids), longest, starts.tolist())
    states = module(torch.from_numpy(ids), layout).numpy()
    return [states[a:b] for a, b in pairwise(starts)]


def rows(module: Any, ids: np.ndarray, starts: np.ndarray, extra: int = 3) -> list[np.ndarray]:
    """Padded further than the longest text needs, and with noise in the filling: it may not be seen."""
    from anytorch.text.encoders.layouts import Rows

    lengths = np.diff(starts)
    longest = int(lengths.max()) + extra
    padded = np.random.default_rng(1).integers(5, 120, (len(lengths), longest)).astype(np.int32)
    for row, (a, b) in enumerate(pairwise(starts)):
        padded[row, : b - a] = ids[a:b]
    layout = Rows(torch.from_numpy(lengths.astype(np.int32)), longest)
    states = module(torch.from_numpy(padded).view(-1), layout).view(len(lengths), longest, -1).numpy()
    return [states[row, :length] for row, length in enumerate(lengths)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("way", [one_by_one, rows], ids=["packed", "padded"])
def test_same_states_as_transformers(
    family: str,
    way: Callable[..., list[np.ndarray]],
    open_model: Callable[[str], tuple[Any, Any]],
    reference: Callable[[str], list[np.ndarray]],
    texts: tuple[np.ndarray, np.ndarray],
) -> None:
    from anytorch.text.encoders.loading import load_module

    spec, checkpoint = open_model(family)
    module = load_module(spec, checkpoint, torch.device("cpu"), torch.float32)
    with torch.inference_mode():
        found = way(module, *texts)
    for ours, theirs in zip(found, reference(family), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4, rtol=2e-4)
