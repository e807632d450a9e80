"""Layers rounded to few bits by what texts show about their inputs: every family, nothing left behind, and it helps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from anytorch.quant.linear import QuantLinear  # noqa: E402
from anytorch.text.encoders import calibrate  # noqa: E402
from anytorch.text.encoders.calibrate import LayerQuantizer, first_texts  # noqa: E402
from anytorch.text.encoders.encoder import TorchEncoder  # noqa: E402
from anytorch.text.encoders.loading import load_module  # noqa: E402
from anytorch.text.packed.calibration import Inputs  # noqa: E402

Open = Callable[[str], tuple[Any, Any]]


@pytest.mark.parametrize("family", ["bert", "distilbert", "mpnet", "modernbert", "nomic_bert", "qwen3"])
def test_every_family_runs_through(open_model: Open, family: str, texts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states after the last layer are those of the module run as a whole: the texts saw the layers as they were."""
    spec, checkpoint = open_model(family)
    seen: list[Any] = []
    real = calibrate.observed

    def watched(blocks: Any, module: Any, number: int, linears: Any) -> Any:
        found = real(blocks, module, number, linears)
        if number == spec.layers - 1:
            for block in blocks:
                states = module.final_norm(block.states).reshape(block.layout.rows, block.layout.longest, -1)
                seen.extend(states[i, : int(block.layout.lengths[i])] for i in range(block.layout.rows))
        return found

    monkeypatch.setattr(calibrate, "observed", watched)
    quantizer = LayerQuantizer(spec, "int4", texts)
    module = load_module(spec, checkpoint, torch.device("cpu"), torch.float32, quantizer)
    assert quantizer._blocks == [], "nothing is kept when the last layer is done"
    assert sum(isinstance(one, QuantLinear) for one in module.modules()) == 4 * spec.layers
    exact = TorchEncoder(spec, checkpoint, device="cpu", layout="rows")
    means = sorted(float(one.mean(0).sum()) for one in seen)
    np.testing.assert_allclose(means, sorted(exact.run(*texts).sum(1).tolist()), atol=2e-3)


@pytest.mark.long
def test_weights_of_large_inputs_are_rounded_more_finely() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 48).requires_grad_(False)
    x = torch.randn(500, 64)
    x[:, :4] *= 30  # what the outputs are made of
    seen = Inputs(x.abs().amax(0).numpy(), x.square().mean(0).numpy())
    wanted = linear(x)

    def error(layer: Any) -> float:
        return float((layer(x) - wanted).norm() / wanted.norm())

    aware, blind = calibrate.quantized(linear, "int4-g16", seen), calibrate.quantized(linear, "int4-g16", None)
    assert aware.input_scale is not None and blind.input_scale is None
    assert error(aware) < 0.8 * error(blind)
    torch.testing.assert_close(aware.weight, linear.weight, atol=0.05, rtol=0)


def test_eight_bits_need_no_texts(open_model: Open) -> None:
    spec, checkpoint = open_model("bert")
    module = load_module(spec, checkpoint, torch.device("cpu"), torch.float32, LayerQuantizer(spec, "int8"))
    assert all(one.input_scale is None for one in module.modules() if isinstance(one, QuantLinear))


def test_texts_without_tokens_and_too_many_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = np.arange(20, dtype=np.int32)
    kept, starts = first_texts((ids, np.array([0, 5, 5, 12, 20], np.int32)))
    assert starts.tolist() == [0, 5, 12, 20] and len(kept) == 20
    monkeypatch.setattr(calibrate, "MOST_TOKENS", 13)
    kept, starts = first_texts((ids, np.array([0, 5, 5, 12, 20], np.int32)))
    assert starts.tolist() == [0, 5, 12] and len(kept) == 12
    kept, starts = first_texts((ids, np.array([0, 20], np.int32)))
    assert starts.tolist() == [0, 20], "one at least"
