"""After pooling: against torch's own layers, and each row's bits independent of the rows beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anytorch.errors import ModelError, UsageError
from anytorch.text.embed.head import ExactProduct, Head, as_precision, normalized, out_shape
from anytorch.text.embed.recipe import Recipe, Step, read_recipe


def vectors(rows: int, width: int = 24, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, width)).astype(np.float32)


def save(folder: Path, config: dict[str, Any] | None = None, **tensors: np.ndarray) -> Path:
    from safetensors.numpy import save_file

    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config or {}))
    save_file({name.replace("__", "."): value for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


def with_steps(model_folder: Path, *steps: Step) -> Recipe:
    from dataclasses import replace

    return replace(read_recipe(model_folder), steps=steps)


@pytest.mark.parametrize("activation", ["Identity", "Tanh", "ReLU", "Sigmoid", "SiLU", "GELU"])
def test_dense_is_torchs(activation: str, tmp_path: Path, model_folder: Path) -> None:
    torch = pytest.importorskip("torch")
    weight, bias = vectors(10), vectors(1, 10)[0]
    config = {"activation_function": f"torch.nn.modules.activation.{activation}"}
    folder = save(tmp_path / "dense", config, linear__weight=weight, linear__bias=bias)
    head = Head(with_steps(model_folder, Step("dense", folder, config)), 24)
    assert head.out_width == 10 and not head.normalizes
    x = vectors(50, seed=1)
    expected = getattr(torch.nn, activation)()(torch.from_numpy(x.astype(float) @ weight.T + bias))
    np.testing.assert_allclose(head(x), expected.numpy(), atol=2e-6)


def test_residuals_norms_and_normalising(tmp_path: Path, model_folder: Path) -> None:
    torch = pytest.importorskip("torch")
    weight, across, scale, shift = vectors(10), vectors(10, seed=5), vectors(1, 10)[0], vectors(1, 10, 3)[0]
    config = {"activation_function": "torch.nn.modules.linear.Identity", "bias": False, "use_residual": True}
    dense = save(tmp_path / "dense", config, linear__weight=weight, residual__weight=across)
    norm = save(tmp_path / "norm", {"dimension": 10}, norm__weight=scale, norm__bias=shift)
    steps = Step("dense", dense, config), Step("layer_norm", norm), Step("normalize")
    head = Head(with_steps(model_folder, *steps), 24)
    x = vectors(7)
    middle = torch.nn.functional.layer_norm(
        torch.from_numpy(x.astype(float) @ (weight + across).T),
        (10,),
        torch.from_numpy(scale.astype(float)),
        torch.from_numpy(shift.astype(float)),
    )
    np.testing.assert_allclose(head(x), torch.nn.functional.normalize(middle).numpy(), atol=2e-6)
    without = Head(with_steps(model_folder, *steps), 24, normalize=False)
    np.testing.assert_allclose(without(x), middle.numpy(), atol=2e-5)
    assert Head(with_steps(model_folder), 24, normalize=True).normalizes


def test_layers_that_do_not_fit_are_refused(tmp_path: Path, model_folder: Path) -> None:
    folder = save(tmp_path / "dense", linear__weight=vectors(10))
    with pytest.raises(ModelError, match=r"weights \[10, 24\] follows vectors of 30"):
        Head(with_steps(model_folder, Step("dense", folder)), 30)
    for config in ({"activation_function": "os.system"}, {"activation_function": "torch.nn.modules.activation.Mish"}):
        with pytest.raises(ModelError, match="is not supported"):
            Head(with_steps(model_folder, Step("dense", folder, config)), 24)
    with pytest.raises(ModelError, match="token_embeddings"):
        Head(with_steps(model_folder, Step("dense", folder, {"module_input_name": "token_embeddings"})), 24)
    with pytest.raises(ModelError, match="found no weights"):
        Head(with_steps(model_folder, Step("layer_norm", tmp_path)), 24)


def test_matryoshka_is_normalised_again(model_folder: Path) -> None:
    head = Head(read_recipe(model_folder), 24)
    x = vectors(5)
    short = head(x, 8)
    assert short.shape == (5, 8)
    np.testing.assert_allclose(np.linalg.norm(short, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(short, normalized(x[:, :8]), atol=1e-6)
    for bad in (0, 25, -1, True, "8", 8.0):
        with pytest.raises(UsageError, match="24 dimensions"):
            head.check_dim(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize(("rows", "width", "out"), [(1, 384, 384), (31, 384, 96), (33, 100, 7), (200, 24, 384)])
def test_a_rows_bits_do_not_depend_on_its_neighbours(rows: int, width: int, out: int) -> None:
    x, weight = vectors(rows, width), vectors(out, width, 1)
    product = ExactProduct(weight)
    whole = product(x)
    for row in range(0, rows, 13):
        assert np.array_equal(product(x[row : row + 1])[0], whole[row])
    shuffled = np.random.default_rng(2).permutation(rows)
    assert np.array_equal(product(x[shuffled]), whole[shuffled])
    assert np.array_equal(normalized(x[shuffled]), normalized(x)[shuffled])
    assert np.array_equal(normalized(x[:1]), normalized(x)[:1])


def test_a_row_of_zeros_stays_one() -> None:
    assert np.array_equal(normalized(np.zeros((2, 3), np.float32)), np.zeros((2, 3)))
    assert np.array_equal(as_precision(np.zeros((2, 3), np.float32), "int8"), np.zeros((2, 3)))


def test_int8_keeps_cosines_without_calibration(cosine: Any) -> None:
    x = vectors(100, 384)
    small = as_precision(x, "int8")
    assert small.dtype == np.int8 and np.abs(small.astype(int)).max(1).tolist() == [127] * 100
    assert cosine(x, small).min() > 0.9998
    assert np.array_equal(as_precision(x[:1], "int8"), small[:1])


@pytest.mark.parametrize("precision", ["binary", "ubinary"])
def test_binary_is_laid_out_as_sentence_transformers_has_it(precision: str, sentence_transformers: Any) -> None:
    from sentence_transformers.util.quantization import quantize_embeddings as quantize

    x = vectors(9, 24)
    found = as_precision(x, precision)
    expected = quantize(x, precision)
    assert found.dtype == expected.dtype and np.array_equal(found, expected)
    assert out_shape(24, precision) == (3, str(found.dtype))


def test_float16() -> None:
    assert as_precision(vectors(2), "float16").dtype == np.float16 and out_shape(24, "float16") == (24, "float16")
