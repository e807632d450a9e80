"""TorchEncoder: the contract of `anytorch.text.embed.protocol`, on the CPU."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from anytorch.errors import InputError, ModelError, UsageError

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

Open = Callable[[str], tuple[Any, Any]]
Texts = tuple[np.ndarray, np.ndarray]
POOLINGS = ("cls", "mean", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")


def pooled(states: np.ndarray, pooling: str) -> np.ndarray:
    weights = np.arange(1, len(states) + 1)[:, None]
    return {  # type: ignore[no-any-return]
        "cls": lambda: states[0],
        "mean": lambda: states.mean(0),
        "max": lambda: states.max(0),
        "mean_sqrt_len_tokens": lambda: states.sum(0) / np.sqrt(len(states)),
        "weightedmean": lambda: (states * weights).sum(0) / weights.sum(),
        "lasttoken": lambda: states[-1],
    }[pooling]()


def make(opened: tuple[Any, Any], **options: Any) -> Any:
    from anytorch.text.encoders.encoder import TorchEncoder

    return TorchEncoder(*opened, **{"device": "cpu", "layout": "rows", **options})


@pytest.mark.parametrize("layout", ["rows", "one-by-one"])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_pooling(
    pooling: str, layout: str, open_model: Open, reference: Callable[[str], list[np.ndarray]], texts: Texts
) -> None:
    wanted = np.stack([pooled(states, pooling) for states in reference("bert")])
    with make(open_model("bert"), pooling=pooling, layout=layout) as encoder:
        found = encoder.run(*texts)
    assert found.dtype == np.float32 and found.flags.c_contiguous
    np.testing.assert_allclose(found, wanted, atol=2e-4, rtol=2e-4)


def test_several_poolings_are_joined_and_normalised(
    open_model: Open, reference: Callable[[str], list[np.ndarray]], texts: Texts
) -> None:
    states = reference("qwen3")
    wanted = np.stack([np.concatenate([pooled(s, "lasttoken"), pooled(s, "mean")]) for s in states])
    wanted /= np.linalg.norm(wanted, axis=1, keepdims=True)
    encoder = make(open_model("qwen3"), pooling=("lasttoken", "mean"), normalize=True)
    assert encoder.width == 96
    np.testing.assert_allclose(encoder.run(*texts), wanted, atol=1e-4)


def test_is_the_engines_encoder(open_model: Open) -> None:
    from anytorch.text.embed.protocol import AsyncEncoder

    assert isinstance(make(open_model("bert")), AsyncEncoder)


@pytest.mark.parametrize("layout", ["rows", "one-by-one"])
def test_small_chunks_keep_the_order(layout: str, open_model: Open, texts: Texts) -> None:
    """A budget of 16 tokens cuts these texts into many chunks; one text alone is longer than it."""
    whole = make(open_model("modernbert"), layout=layout).run(*texts)
    parts = make(open_model("modernbert"), layout=layout, chunk_tokens=16).run(*texts)
    np.testing.assert_allclose(parts, whole, atol=1e-5, rtol=1e-5)


def test_many_batches_under_way(open_model: Open, texts: Texts) -> None:
    """More than there are slots, and fetched backwards; inputs are overwritten as soon as `submit` has returned."""
    encoder = make(open_model("bert"))
    ids, starts = texts
    alone = [encoder.run(ids[a:b], np.array([0, b - a], np.int32)).copy() for a, b in pairwise(starts)]
    under_way = []
    for a, b in pairwise(starts):
        scratch = ids[a:b].copy()
        under_way.append(encoder.submit(scratch, np.array([0, b - a], np.int32)))
        scratch[:] = 5
    for pending, wanted in reversed(list(zip(under_way, alone, strict=True))):
        np.testing.assert_allclose(pending.result(), wanted, atol=1e-5)


def test_two_threads(open_model: Open, texts: Texts) -> None:
    from concurrent.futures import ThreadPoolExecutor

    encoder = make(open_model("bert"), chunk_tokens=32)
    wanted = encoder.run(*texts)
    with ThreadPoolExecutor(2) as pool:
        for found in pool.map(lambda _: encoder.run(*texts), range(12)):
            np.testing.assert_array_equal(found, wanted)


def test_fills_the_callers_array(open_model: Open, texts: Texts) -> None:
    encoder = make(open_model("bert"))
    target = np.full((8, 48), np.nan, np.float32)
    assert encoder.submit(*texts, out=target).result() is target
    np.testing.assert_array_equal(target, encoder.run(*texts))


@pytest.mark.parametrize("layout", ["rows", "one-by-one"])
def test_writes_to_the_callers_places(layout: str, open_model: Open, texts: Texts) -> None:
    encoder = make(open_model("bert"), layout=layout, chunk_tokens=32)
    target = np.full((12, 48), 7, np.float32)
    places = np.array([11, 0, 3, 4, 5, 9, 8, 7])
    encoder.submit(*texts, out=target, places=places).result()
    np.testing.assert_array_equal(target[places], encoder.run(*texts))
    assert (target[[1, 2, 6, 10]] == 7).all()


@pytest.mark.parametrize(
    ("out", "places"),
    [
        (np.empty((8, 48)), None),
        (np.empty((7, 48), np.float32), None),
        (np.empty((8, 47), np.float32), None),
        (np.empty((9, 48), np.float32), np.arange(9)),
    ],
    ids=["dtype", "rows", "width", "places"],
)
def test_refuses_an_array_that_does_not_fit(out: Any, places: Any, open_model: Open, texts: Texts) -> None:
    with pytest.raises(UsageError):
        make(open_model("bert")).submit(*texts, out=out, places=places)


def test_a_fused_activation_computes_the_same(open_model: Open, texts: Texts) -> None:
    encoder = make(open_model("bert"))
    plain = encoder.run(*texts)
    assert encoder.module.can_fuse()
    encoder.module.fuse(True)
    np.testing.assert_allclose(encoder.run(*texts), plain, atol=5e-3)
    assert not make(open_model("qwen3")).module.can_fuse(), "a gated feed-forward has no GELU to fuse"


def test_no_texts(open_model: Open) -> None:
    found = make(open_model("bert")).run(np.zeros(0, np.int32), np.zeros(1, np.int32))
    assert found.shape == (0, 48)


def test_half_precision_is_close(open_model: Open, texts: Texts) -> None:
    from anytorch.text.encoders.strategy import worst_cosine

    exact = make(open_model("bert"), dtype="float32").run(*texts)
    encoder = make(open_model("bert"), dtype="bfloat16")
    assert {p.dtype for p in encoder.module.parameters()} == {torch.bfloat16}
    assert 0.99 < worst_cosine(exact, encoder.run(*texts)) < 1.0


def test_describe_and_close(open_model: Open, texts: Texts) -> None:
    encoder = make(open_model("bert"))
    about = encoder.describe()
    json.dumps(about)
    assert about["device"] == "cpu" and about["dtype"] == "float32" and about["layout"] == "rows"
    assert about["weight_nbytes"] == 4 * sum(p.numel() for p in encoder.module.parameters())
    encoder.close()
    encoder.close()
    with pytest.raises(UsageError, match="closed"):
        encoder.run(*texts)


@pytest.mark.parametrize(
    ("ids", "starts", "message"),
    [
        (np.zeros(3, np.int64), np.array([0, 3], np.int32), "int32"),
        (np.full(3, 7, np.int32), np.array([0, 2], np.int32), "from 0 to the 3 ids"),
        (np.full(3, 7, np.int32), np.array([0, 3, 3], np.int32), "text 1 has 0 tokens"),
        (np.full(70, 7, np.int32), np.array([0, 70], np.int32), "text 0 has 70 tokens; the model takes 1 to 64"),
        (np.full(3, 120, np.int32), np.array([0, 3], np.int32), "vocabulary of 120"),
        (np.full(3, -1, np.int32), np.array([0, 3], np.int32), "vocabulary of 120"),
    ],
)
def test_refuses_bad_batches(ids: np.ndarray, starts: np.ndarray, message: str, open_model: Open) -> None:
    with pytest.raises(InputError, match=message):
        make(open_model("bert")).run(ids, starts)


@pytest.mark.parametrize(
    "options", [{"pooling": "average"}, {"pooling": ()}, {"dtype": "fp12"}, {"layout": "circles"}], ids=str
)
def test_refuses_unknown_options(options: dict[str, Any], open_model: Open) -> None:
    with pytest.raises(UsageError):
        make(open_model("bert"), **options)


# --- checkpoints that do not fit -----------------------------------------------------------------------------------


def changed(folder: Path, target: Path, change: Callable[[dict[str, Any]], None], **config: Any) -> tuple[Any, Any]:
    """The checkpoint with its tensors changed, opened with the config changed."""
    from safetensors.torch import load_file, save_file

    from anytorch.text.checkpoints.checkpoint import Checkpoint
    from anytorch.text.checkpoints.spec import read_spec

    shutil.copytree(folder, target)
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    return read_spec({**json.loads((folder / "config.json").read_text()), **config}), Checkpoint(target)


def test_a_missing_tensor_is_named(checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> None:
    def drop(tensors: dict[str, Any]) -> None:
        del tensors["encoder.layer.1.output.dense.weight"]

    opened = changed(checkpoint_folder("bert"), tmp_path / "changed", drop)
    with pytest.raises(ModelError, match=r"layers\.1\.down\.weight"):
        make(opened)


def test_one_bias_of_three_is_refused(checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> None:
    def drop(tensors: dict[str, Any]) -> None:
        del tensors["encoder.layer.1.attention.self.key.bias"]

    with pytest.raises(ModelError, match=r"no bias for 'layers\.1\.k'"):
        make(changed(checkpoint_folder("bert"), tmp_path / "changed", drop))


def test_a_layer_too_many_is_refused(checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> None:
    opened = changed(checkpoint_folder("bert"), tmp_path / "changed", lambda tensors: None, num_hidden_layers=2)
    with pytest.raises(ModelError, match=r"does not use: encoder\.layer\.2\."):
        make(opened)


def test_heads_and_old_tables_are_left_alone(
    checkpoint_folder: Callable[[str], Path], open_model: Open, texts: Texts, tmp_path: Path
) -> None:
    def add(tensors: dict[str, Any]) -> None:
        for name in list(tensors):
            tensors[f"bert.{name}"] = tensors.pop(name)
        tensors["bert.embeddings.position_ids"] = torch.arange(64)[None]
        tensors["cls.predictions.bias"] = torch.zeros(120)

    with (
        make(changed(checkpoint_folder("bert"), tmp_path / "changed", add)) as beside,
        make(open_model("bert")) as alone,
    ):
        np.testing.assert_array_equal(beside.run(*texts), alone.run(*texts))


def test_weights_that_are_no_numbers_are_refused(checkpoint_folder: Callable[[str], Path], tmp_path: Path) -> None:
    def quantized(tensors: dict[str, Any]) -> None:
        name = "encoder.layer.0.output.dense.weight"
        tensors[name] = tensors[name].to(torch.int8)

    with pytest.raises(ModelError, match="dtype I8"):
        make(changed(checkpoint_folder("bert"), tmp_path / "changed", quantized))


def test_loading_holds_one_tensor_at_a_time(open_model: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    """No float32 copy of a model that is wanted in bfloat16: what is allocated is of the wanted dtype."""
    from anytorch.text.encoders import loading

    made: list[Any] = []
    real = torch.empty

    def watched(*args: Any, **options: Any) -> Any:
        tensor = real(*args, **options)
        if tensor.device.type != "meta":  # the module's shape, which takes no memory
            made.append(tensor.dtype)
        return tensor

    monkeypatch.setattr(torch, "empty", watched)
    spec, checkpoint = open_model("qwen3")
    loading.load_module(spec, checkpoint, torch.device("cpu"), torch.bfloat16)
    assert made and set(made) == {torch.bfloat16}


@pytest.mark.long
def test_quantizes_layer_by_layer(open_model: Open, texts: Texts) -> None:
    """At most one layer is unpacked at a time, and all of them are packed in the end."""
    pytest.importorskip("anytorch.quant.model")
    from anytorch.text.encoders.strategy import worst_cosine

    exact = make(open_model("bert"))
    packed = make(open_model("bert"), quantization="int8")
    kinds = {type(one).__name__ for one in packed.module.modules()}
    assert "Linear" not in kinds and "QuantLinear" in kinds
    assert worst_cosine(exact.run(*texts), packed.run(*texts)) > 0.99
    assert packed.describe()["weight_nbytes"] < exact.describe()["weight_nbytes"]
    assert not packed.module.can_fuse()


def test_layers_are_handed_over_as_soon_as_they_are_filled(open_model: Open) -> None:
    from anytorch.text.encoders.loading import load_module

    seen: list[tuple[int, int]] = []
    spec, checkpoint = open_model("modernbert")
    made: list[Any] = []

    def look(whole: Any, number: int) -> None:
        layer = whole.layers[number]
        made.append(layer)
        assert not any(parameter.is_meta for parameter in layer.parameters())
        seen.append((len(made), sum(p.numel() for p in layer.parameters())))

    module = load_module(spec, checkpoint, torch.device("cpu"), torch.float32, look)
    assert made == list(module.layers)
    assert [number for number, _ in seen] == [1, 2, 3, 4]
