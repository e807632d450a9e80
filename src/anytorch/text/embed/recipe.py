"""How a model folder turns text into a vector, as plain data. Reads JSON files only.

Two kinds of folder: sentence-transformers (modules.json lists the steps, each with a folder of its own) and plain Hugging
Face (config.json and weights; the vector is then the mean of the tokens, as sentence-transformers has it, unless the
caller says otherwise).
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from anytorch import logs
from anytorch.devices.choose import callers_level
from anytorch.errors import ModelError, UsageError
from anytorch.files import parse_json
from anytorch.text.checkpoints.spec import EncoderSpec, read_spec
from anytorch.text.embed.protocol import POOLINGS
from anytorch.values import dataclass

log = logs.logger(__name__)

# sentence-transformers saved one flag per kind of pooling; several may be on, joined in this order.
POOLING_FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Words people use for them.
POOLING_ALIASES = {
    "mean_sqrt_len": "mean_sqrt_len_tokens",
    "last": "lasttoken",
    "last_token": "lasttoken",
    "last-token": "lasttoken",
    "weighted": "weightedmean",
    "weighted_mean": "weightedmean",
}
LENGTH_FILES = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
# What a model's prompts are called for the two sides of a search.
PROMPT_NAMES = {"query": ("query",), "passage": ("passage", "document", "corpus")}
PROMPT_NAMES["document"] = PROMPT_NAMES["passage"]
MOST_TOLD = 32  # odd prompts that are warned about; clients of a service may send any number of them
SIMILARITIES = ("cosine", "dot", "euclidean", "manhattan")


@dataclass(frozen=True)
class Step:
    """One step after pooling: "dense", "layer_norm" or "normalize", and the folder with its weights."""

    kind: str
    folder: Path | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recipe:
    folder: Path  # what was named
    encoder: Path  # the folder of the transformer: config.json, weights, tokenizer
    spec: EncoderSpec
    pooling: tuple[str, ...]
    steps: tuple[Step, ...]
    max_length: int  # tokens, special ones included
    lower_case: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None  # a name in `prompts`
    pool_prompt: bool = True  # False: the prompt's own tokens are left out of the pooling
    similarity: str = "cosine"


def read_recipe(folder: Path) -> Recipe:
    """Read a model folder. Raises ModelError that names the missing or invalid file."""
    try:
        return _recipe(folder)
    except (TypeError, AttributeError, LookupError, ValueError, ArithmeticError, OSError) as exc:
        # A file of valid JSON in which something is of another kind, or longer, than anybody would write.
        raise ModelError(
            f"{folder}: a file of its description is invalid: {str(exc)[:200]}",
            hint="the model folder is damaged: fetch it again",
        ) from exc


def _recipe(folder: Path) -> Recipe:
    if (folder / "modules.json").is_file():
        return _sentence_transformers(folder)
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder}: not a model folder: it has neither modules.json nor config.json",
            hint="name the folder that holds config.json, tokenizer.json and model.safetensors",
        )
    config = read_json(folder / "config.json")
    spec = read_spec(config, where=str(folder / "config.json"))
    # As sentence-transformers does: a language model's last token is the only one that has seen the whole text.
    named = (config.get("architectures") or [""])[0]
    pooling = ("lasttoken",) if spec.causal and not named.endswith("Model") else ("mean",)
    log.info("%s has no modules.json: %s pooling, not normalised", folder, pooling[0])
    return Recipe(folder, folder, spec, pooling, (), _max_length(folder, spec, {}), **_prompts(folder))


def _sentence_transformers(folder: Path) -> Recipe:
    path = folder / "modules.json"
    modules = read_json(path)
    if not isinstance(modules, list) or not modules or not all(isinstance(m, dict) and "type" in m for m in modules):
        raise ModelError(f"{path}: does not list the model's modules", hint="fetch it again")
    encoder: Path | None = None
    pooling: tuple[str, ...] | None = None
    pool_prompt = True
    steps: list[Step] = []
    for module in modules:
        kind = str(module["type"]).rpartition(".")[2]
        place = folder / str(module.get("path", ""))
        if folder.resolve() not in (place.resolve(), *place.resolve().parents):
            raise ModelError(f"{path}: names a folder outside the model: {module.get('path')!r}")
        config = read_json(place / "config.json") if kind != "Transformer" and (place / "config.json").is_file() else {}
        if kind == "Transformer":
            encoder = place
        elif kind == "Pooling":
            pooling = read_pooling(config, place / "config.json")
            pool_prompt = bool(config.get("include_prompt", True))
        elif kind in ("Dense", "LayerNorm"):
            steps.append(Step({"Dense": "dense", "LayerNorm": "layer_norm"}[kind], place, config))
        elif kind == "Normalize":
            steps.append(Step("normalize"))
        elif kind != "Dropout":  # which does nothing once training is over
            raise ModelError(
                f"{path}: the module {module['type']!r} is not supported; supported: Transformer, Pooling, Dense, "
                "LayerNorm, Normalize",
                hint="models with other modules (word vectors, CNN, LSTM, routers, images) are not supported",
            )
    if encoder is None:
        raise ModelError(f"{path}: lists no Transformer", hint="static word-vector models are not supported")
    if pooling is None:
        raise ModelError(f"{path}: lists no Pooling, which makes one vector per text")
    config_file = encoder / "config.json"
    spec = read_spec(read_json(config_file), where=str(config_file))
    lengths: dict[str, Any] = {}
    for name in LENGTH_FILES:
        if (encoder / f"sentence_{name}_config.json").is_file():
            lengths = read_json(encoder / f"sentence_{name}_config.json")
            break
    return Recipe(
        folder,
        encoder,
        spec,
        pooling,
        tuple(steps),
        _max_length(encoder, spec, lengths),
        bool(lengths.get("do_lower_case", False)),
        pool_prompt=pool_prompt,
        **_prompts(folder),
    )


def read_pooling(config: Mapping[str, Any], where: Path) -> tuple[str, ...]:
    named = config.get("pooling_mode")
    if named is None:
        found = tuple(mode for flag, mode in POOLING_FLAGS.items() if config.get(flag)) or ("mean",)
    else:
        found = (named,) if isinstance(named, str) else tuple(named)
    if unknown := [mode for mode in found if mode not in POOLINGS]:
        raise ModelError(f"{where}: pooling {unknown[0]!r} is not one of {', '.join(POOLINGS)}")
    return found


def chosen_pooling(asked: str) -> tuple[str, ...]:
    """Parse the caller's pooling; several are joined by "+". Raises UsageError for an unknown one."""
    found = tuple(POOLING_ALIASES.get(part.strip(), part.strip()) for part in asked.split("+"))
    if unknown := [mode for mode in found if mode not in POOLINGS]:
        raise UsageError(f"pooling={asked!r}: {unknown[0]!r} is not one of {', '.join(POOLINGS)}")
    return found


def _max_length(folder: Path, spec: EncoderSpec, lengths: Mapping[str, Any]) -> int:
    """As sentence-transformers has it: its own file's, else the tokenizer's; never more than there are positions."""
    named = lengths.get("max_seq_length")
    if not isinstance(named, int) and (folder / "tokenizer_config.json").is_file():
        named = read_json(folder / "tokenizer_config.json").get("model_max_length")  # 1e30 where nobody knew
    if isinstance(named, (int, float)) and not isinstance(named, bool) and named >= 1:
        return int(min(named, spec.max_positions))
    return spec.max_positions


def _prompts(folder: Path) -> dict[str, Any]:
    path = folder / "config_sentence_transformers.json"
    if not path.is_file():
        return {}
    config = read_json(path)
    prompts = {str(name): text for name, text in (config.get("prompts") or {}).items() if isinstance(text, str)}
    default = config.get("default_prompt_name")
    if default is not None and default not in prompts:
        raise ModelError(f"{path}: default_prompt_name {default!r} is not one of its prompts: {', '.join(prompts)}")
    similarity = config.get("similarity_fn_name") or "cosine"
    if similarity not in SIMILARITIES:
        raise ModelError(f"{path}: similarity_fn_name {similarity!r} is not one of {', '.join(SIMILARITIES)}")
    return {"prompts": prompts, "default_prompt": default, "similarity": similarity}


def read_json(path: Path) -> Any:
    try:
        return parse_json(path.read_bytes())
    except FileNotFoundError as exc:
        raise ModelError(
            f"{path}: there is no such file", hint="the model folder is incomplete: fetch it again"
        ) from exc
    except OSError as exc:
        raise ModelError(f"{path}: cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise ModelError(f"{path}: not valid JSON: {exc}", hint="the file is damaged: fetch it again") from exc


class Prompts:
    """The prompts of a recipe. Thread-safe."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self._lock = threading.Lock()
        self._told: set[str] = set()  # odd prompts that were warned about

    def text(self, prompt: str | None) -> str:
        """The prompt for a name of one of the model's prompts, for None its default, else `prompt` itself."""
        if prompt is not None and not isinstance(prompt, str):
            raise UsageError(f"prompt={prompt!r}: use the name of one of the model's prompts, or a text")
        prompts = self._recipe.prompts
        text = prompts.get(self._recipe.default_prompt or "", "") if prompt is None else prompt
        if prompt is not None:
            known = [name for name in (prompt, *PROMPT_NAMES.get(prompt, ())) if name in prompts]
            if known:
                text = prompts[known[0]]
            elif prompt in PROMPT_NAMES:
                text = ""  # a model without prompts treats both sides alike
            elif looks_like_a_name(prompt):
                self._warn(prompt)
        if text and not self._recipe.pool_prompt:
            raise UsageError(
                "this model leaves its prompt's tokens out of the pooling, which is not supported",
                hint='encode without a prompt: prompt=""',
            )
        return text

    def _warn(self, prompt: str) -> None:
        """Warn once about each single word, which is more often a mistyped name than a prompt.

        Python keeps each text that was warned about, too: after MOST_TOLD of them no more is said or kept.
        """
        with self._lock:
            if prompt in self._told or len(self._told) >= MOST_TOLD:
                return
            self._told.add(prompt)
        known = ", ".join(self._recipe.prompts) or "none"
        warnings.warn(
            f"unknown prompt name {prompt!r}; known: {known}. It is put before every text as it is: if that is intended, "
            "end it with a space or a colon",
            stacklevel=callers_level(),
        )


def looks_like_a_name(prompt: str) -> bool:
    """One word of letters, digits, hyphens and underscores: "query", not "query: ".

    >>> looks_like_a_name("qurey"), looks_like_a_name("query: "), looks_like_a_name("")
    (True, False, False)
    """
    return prompt.replace("-", "_").isidentifier()
