"""Folders that cannot be used, dtypes, packed weights, models larger than their budget, and the measured bandwidth."""

from __future__ import annotations

import gc
import json
import logging
import shutil
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from anytorch.devices.types import Caps  # noqa: E402
from anytorch.errors import BudgetTooSmall, DeviceFallbackWarning, ModelError, UsageError  # noqa: E402
from anytorch.text.generate import bandwidth, loading  # noqa: E402
from anytorch.text.generate.generator import TextGenerator  # noqa: E402

TEXT = "The quick brown fox"


@pytest.fixture
def copy(models: dict[str, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(models["llama"], tmp_path / "copy"))


def test_pickled_weights_are_refused(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pickle") as caught:
        TextGenerator(copy, device="cpu")
    assert "safetensors" in caught.value.hint


def test_code_in_the_folder_is_not_run(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    config["model_type"] = "mine"
    config["auto_map"] = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "mine.py").write_text(f"open({str(copy / 'ran')!r}, 'w').close()\n")
    with pytest.raises(ModelError):
        TextGenerator(copy, device="cpu")
    assert not (copy / "ran").exists()


def test_a_vocabulary_that_is_missing_is_told(models: dict[str, Path], tmp_path: Path) -> None:
    """transformers makes a GPT-2 tokenizer of no files at all, for which every prompt is empty."""
    folder = Path(shutil.copytree(models["gpt2"], tmp_path / "copy"))
    for path in folder.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelError, match="vocabulary is missing"):
        TextGenerator(folder, device="cpu")


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda f: (f / "config.json").unlink(), "no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "cannot be read"),
        (lambda f: (f / "config.json").write_text("[]"), "not a JSON object"),
        (lambda f: (f / "model.safetensors").unlink(), "no weights"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\0" * 20), "model.safetensors"),
        (lambda f: [p.unlink() for p in f.glob("tokenizer*")], "tokenizer"),
        (lambda f: (f / "generation_config.json").write_text("{x"), "generation_config.json: cannot be read"),
    ],
)
def test_a_folder_that_cannot_be_used_says_why(copy: Path, break_it: Any, words: str) -> None:
    break_it(copy)
    with pytest.raises(ModelError, match=words):
        TextGenerator(copy, device="cpu")


@pytest.mark.parametrize(
    ("told", "words"),
    [
        ({"do_sample": True, "temperature": "hot"}, "temperature='hot'"),
        ({"do_sample": True, "top_p": 1.5}, "top_p=1.5"),
        ({"repetition_penalty": -1}, "repetition_penalty=-1"),
        ({"eos_token_id": "x"}, "eos_token_id='x'"),
        ({"eos_token_id": [1, None]}, "eos_token_id=None"),
        ({"stop_strings": [5]}, "stop=5"),
    ],
)
def test_a_setting_of_a_models_file_that_is_none_is_told_with_the_file(
    copy: Path, told: dict[str, Any], words: str
) -> None:
    (copy / "generation_config.json").write_text(json.dumps(told))
    with pytest.raises(ModelError, match=f"generation_config.json: {words}"):
        TextGenerator(copy, device="cpu")


def test_a_models_file_may_name_stop_strings_and_is_told_what_has_no_effect(copy: Path) -> None:
    with TextGenerator(copy, device="cpu") as generator:
        whole = generator.complete("The quick brown", max_tokens=30, temperature=0).text
    stop, other = whole[5:7], whole[12:14]
    (copy / "generation_config.json").write_text(json.dumps({"stop_strings": stop, "no_repeat_ngram_size": 2}))
    with TextGenerator(copy, device="cpu") as generator:
        assert "no_repeat_ngram_size=2, which has no effect here" in generator.explain()
        for given in (None, other):
            made = generator.complete("The quick brown", max_tokens=30, temperature=0, stop=given)
            assert made.text == whole[: whole.index(stop)] and made.finish_reason == "stop"


def test_a_missing_tensor_is_an_error_and_not_invented(copy: Path) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelError, match=r"no values for 1 parameters, such as model.layers.1.mlp.up_proj.weight"):
        TextGenerator(copy, device="cpu")


@pytest.mark.parametrize("name", ["nowhere", "./nowhere/at-all", "", Path("a/b")])
def test_a_folder_that_is_not_there(name: Any) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        TextGenerator(name, device="cpu")


def test_a_file_is_no_folder(models: dict[str, Path]) -> None:
    with pytest.raises(ModelError, match="this is a file"):
        TextGenerator(models["llama"] / "config.json", device="cpu")


def test_a_device_that_is_not_here_falls_back_and_is_told(models: dict[str, Path], cpu_wheel: None) -> None:
    with pytest.warns(DeviceFallbackWarning), TextGenerator(models["llama"], device="cuda:0") as generator:
        assert generator.device == "cpu"
        assert generator.device_warning and "cuda" in generator.device_warning


def test_options_are_checked(models: dict[str, Path]) -> None:
    for options in ({"dtype": "float8"}, {"quantization": "int5"}, {"at_once": 0}, {"kernel": "on"}):
        with pytest.raises(UsageError):
            TextGenerator(models["llama"], device="cpu", **options)  # type: ignore[arg-type]


def test_a_dtype_is_used_as_asked(models: dict[str, Path]) -> None:
    with TextGenerator(models["llama"], device="cpu", dtype="bfloat16") as generator:
        assert generator.model.lm_head.weight.dtype == torch.bfloat16
        assert generator.complete(TEXT, max_tokens=5, temperature=0).completion_tokens == 5


@pytest.mark.parametrize(
    ("asked", "stored", "fast", "chosen"),
    [
        ("auto", "float32", ("float32",), "float32"),
        ("auto", "bfloat16", ("float32", "bfloat16"), "bfloat16"),
        ("auto", "bfloat16", ("float32",), "float32"),
        ("auto", "float16", ("float32", "bfloat16"), "bfloat16"),
        ("auto", "float16", ("float16", "bfloat16"), "float16"),
        ("float16", "float32", ("float32",), "float16"),
    ],
)
def test_the_dtype_is_one_the_device_is_fast_at(asked: str, stored: str, fast: tuple[str, ...], chosen: str) -> None:
    assert loading.choose_dtype(asked, stored, Caps(fast, fast, None)) == chosen


def test_packed_weights_need_fewer_bytes_and_say_nearly_the_same(models: dict[str, Path]) -> None:
    with TextGenerator(models["llama"], device="cpu") as plain:
        wanted = plain.complete(TEXT, max_tokens=8, temperature=0).text
        whole, parameters = plain.weight_nbytes_per_token, plain.parameters
    with TextGenerator(models["llama"], device="cpu", quantization="int8") as packed:
        assert packed.complete(TEXT, max_tokens=8, temperature=0).text[:4] == wanted[:4]
        assert packed.weight_nbytes_per_token < 0.5 * whole
        assert packed.parameters == parameters
        assert "int8" in packed.explain()


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_a_model_larger_than_its_budget_runs_in_tiers(models: dict[str, Path], quantization: str | None) -> None:
    with TextGenerator(models["llama"], device="cpu") as plain:
        wanted = plain.complete(TEXT, max_tokens=8, temperature=0).text
    with TextGenerator(models["llama"], device="cpu", quantization=quantization, device_budget="110KB") as small:
        assert small.describe()["placed"] == "in tiers"
        assert "do not fit" in small.explain()
        streams = [small.stream(TEXT, max_tokens=8, temperature=0) for _ in range(2)]
        for stream in streams:
            text = stream.completion().text
            assert text == wanted if quantization is None else text[:4] == wanted[:4]


def test_what_transformers_imports_says_nothing_aside(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """This process has torchao imported already, so it is made to speak again."""
    real = loading.from_folder

    def speaking(*given: Any) -> Any:
        logging.getLogger("torchao").warning("Failed to load _C.so: Could not load this library")
        logging.getLogger("torchao").warning("this is news")
        return real(*given)

    monkeypatch.setattr(loading, "from_folder", speaking)
    TextGenerator(models["llama"], device="cpu", kernel="off").close()
    assert [record.getMessage() for record in caplog.records if record.name == "torchao"] == ["this is news"]


def tensor_memory() -> dict[int, int]:
    """Address and bytes of all memory that tensors hold, also of those that only hold each other."""
    # By type: `isinstance` would wake what other packages have put off.
    storages = [one.untyped_storage() for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


@pytest.mark.parametrize(
    "options", [{}, {"kernel": "off"}, {"device_budget": "110KB"}, {"device_budget": "110KB", "quantization": "int8"}]
)
def test_closing_gives_the_memory_back_at_once(models: dict[str, Path], options: dict[str, Any]) -> None:
    gc.collect()
    gc.disable()  # it would hide what is only kept by a circle
    try:
        before = tensor_memory()
        generator = TextGenerator(models["llama"], device="cpu", **options)
        assert generator._loaded.in_tiers == ("device_budget" in options)
        generator.complete(TEXT, max_tokens=3, temperature=0)
        assert sum(nbytes for place, nbytes in tensor_memory().items() if place not in before) > 50_000
        model = weakref.ref(generator.model)
        generator.close()
        generator.close()
        assert model() is None
        # One element stands for all weights that are away, and stays for the next model.
        assert sum(nbytes for place, nbytes in tensor_memory().items() if place not in before) < 100
    finally:
        gc.enable()
    for ask in (generator.describe, generator.explain, lambda: generator.parameters):
        with pytest.raises(UsageError, match="closed"):
            ask()


def test_a_budget_that_cannot_work_names_one_that_does(models: dict[str, Path]) -> None:
    with pytest.raises(BudgetTooSmall) as caught:
        TextGenerator(models["llama"], device="cpu", device_budget=1000)
    assert "smallest" in caught.value.hint


def test_the_bandwidth_is_measured_once_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidth, "NBYTES", 8 << 20)
    device = torch.device("cpu")
    first = bandwidth.bandwidth_of(device)
    assert first is not None and first.source == "measured" and 0.1 < first.gb_per_s < 10_000
    monkeypatch.setattr(bandwidth, "measure_read", lambda device: pytest.fail("measured again"))
    assert bandwidth.bandwidth_of(device) == first


def test_experts_that_a_token_does_not_use_are_not_counted() -> None:
    from types import SimpleNamespace

    assert bandwidth.expert_share(SimpleNamespace(num_experts_per_tok=2, num_local_experts=8)) == 0.25
    assert bandwidth.expert_share(SimpleNamespace()) == 1.0


def test_what_is_packed_is_counted_tensor_by_tensor(models: dict[str, Any]) -> None:
    """Embeddings are never packed, so they are counted whole when the question is what fits."""
    from anytorch.text.checkpoints.checkpoint import Checkpoint
    from anytorch.text.generate.loading import packable_nbytes

    with Checkpoint(models["llama"]) as checkpoint:
        entries = {name: checkpoint.entry(name) for name in checkpoint.names()}
        packable = packable_nbytes(checkpoint)
    layers = sum(e.nbytes for n, e in entries.items() if "proj" in n)
    assert 0 < packable == layers < sum(e.nbytes for e in entries.values())


@pytest.mark.parametrize("name", ["num_hidden_layers", "num_attention_heads", "hidden_size", "max_position_embeddings"])
def test_sizes_that_are_none_are_refused_before_anything_is_built(copy: Path, name: str) -> None:
    config = json.loads((copy / "config.json").read_text())
    for value in (10**9 if name == "num_hidden_layers" else 2**31, -1, 1.5, "x", [], 10**400):
        (copy / "config.json").write_text(json.dumps({**config, name: value}))
        with pytest.raises(ModelError, match=name):
            TextGenerator(copy, device="cpu")


def test_a_panic_over_a_damaged_tokenizer_is_our_error(tmp_path: Path) -> None:
    """The Rust library's panics are no Exceptions; Ctrl-C is none either, and stays what it is."""

    class PanicException(BaseException):
        pass

    def fails(kind: type[BaseException]) -> Any:
        def from_pretrained(*_: Any, **__: Any) -> Any:
            raise kind("range end index 7 out of range")

        return SimpleNamespace(AutoTokenizer=SimpleNamespace(from_pretrained=from_pretrained))

    with pytest.raises(ModelError, match=r"its tokenizer cannot be read: .*range end index 7"):
        loading.read_tokenizer(fails(PanicException), tmp_path)
    with pytest.raises(KeyboardInterrupt):
        loading.read_tokenizer(fails(KeyboardInterrupt), tmp_path)
