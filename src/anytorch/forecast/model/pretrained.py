"""The published layout, a folder with config.json and model.safetensors: found by path or name, read and written.

A checkpoint is named by a path, a short name, "tiny" (which comes with anytorch), or a Hugging Face repository. Of those
known by name, configurations and context lengths are here: config.json does not say the latter.

"tiny" is half a million weights, trained on synthetic candles only. It makes `anytorch forecast --sample` work at once and
offline, and is a start for experiments. It has never seen a real price. `examples/train_tiny.py` makes it again.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from anytorch import logs
from anytorch.errors import ModelError, PackageMissing, UsageError, did_you_mean
from anytorch.files import parse_json, replace_file
from anytorch.forecast.model.layers import Rotary, inverse_frequencies
from anytorch.safetensors_files import check_layers, read_header, read_tensor

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


# The constructors' arguments, in their order.
MODEL_ARGUMENTS = (
    *("s1_bits", "s2_bits", "n_layers", "d_model", "n_heads", "ff_dim"),
    *("ffn_dropout_p", "attn_dropout_p", "resid_dropout_p", "token_dropout_p", "learn_te"),
)
TOKENIZER_ARGUMENTS = (
    *("d_in", "d_model", "n_heads", "ff_dim", "n_enc_layers", "n_dec_layers"),
    *("ffn_dropout_p", "attn_dropout_p", "resid_dropout_p", "s1_bits", "s2_bits"),
    *("beta", "gamma0", "gamma", "zeta", "group_size"),
)
TOKENIZER_VALUES = (6, 256, 4, 512, 4, 4, 0.0, 0.0, 0.0, 10, 10, 0.05, 1.0, 1.1, 0.05)  # all but group_size


@dataclass(frozen=True)
class Checkpoint:
    """A published model with the tokenizer it was trained with."""

    name: str
    model: str  # Hugging Face repository
    tokenizer: str
    max_context: int
    config: dict[str, Any]
    tokenizer_config: dict[str, Any]


def _checkpoint(size: str, tokenizer: str, max_context: int, model: tuple[Any, ...], group_size: int) -> Checkpoint:
    names = (f"kronos-{size}", f"NeoQuasar/Kronos-{size}", f"NeoQuasar/Kronos-Tokenizer-{tokenizer}")
    config = dict(zip(MODEL_ARGUMENTS, model, strict=True))
    return Checkpoint(
        *names, max_context, config, dict(zip(TOKENIZER_ARGUMENTS, (*TOKENIZER_VALUES, group_size), strict=True))
    )


PUBLISHED = {
    found.name: found
    for found in (
        _checkpoint("mini", "2k", 2048, (10, 10, 4, 256, 4, 512, 0.2, 0.0, 0.2, 0.0, True), 5),
        _checkpoint("small", "base", 512, (10, 10, 8, 512, 8, 1024, 0.25, 0.1, 0.25, 0.1, True), 4),
        _checkpoint("base", "base", 512, (10, 10, 12, 832, 16, 2048, 0.2, 0.0, 0.2, 0.0, True), 4),
    )
}

TINY = "tiny"  # the name to ask for it by
MAX_CONTEXT = 128  # rows: the windows it was trained on
UNSAID_CONTEXT = 512  # of a model whose folder does not say: config.json has no such key

# Short names for repositories.
HUB = {
    **{name: checkpoint.model for name, checkpoint in PUBLISHED.items()},
    "kronos-tokenizer-base": "NeoQuasar/Kronos-Tokenizer-base",
    "kronos-tokenizer-2k": "NeoQuasar/Kronos-Tokenizer-2k",
}


def find_folder(source: str | Path, kind: str = "model", **options: Any) -> Path:
    """The folder with both files of a "model" or a "tokenizer", downloaded if it must be (`options`: see `download`).

    Raises ModelError that says what is not there.
    """
    check_name(source, kind)
    folder = Path(source).expanduser()
    if folder.is_dir() and str(source).strip():  # an empty name would be the folder one is in
        for name in (CONFIG, WEIGHTS):
            if not (folder / name).is_file():
                there = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
                raise ModelError(
                    f"{folder} has no {name}; it holds {there}",
                    hint="a Kronos folder is config.json and model.safetensors, as save_pretrained writes them",
                )
        return folder
    if str(source) == TINY and not folder.exists():
        return tiny_folder(kind)
    short = str(source).lower()
    # The short name of a model, asked for its tokenizer: that of the pair, as with "tiny".
    name = PUBLISHED[short].tokenizer if kind == "tokenizer" and short in PUBLISHED else HUB.get(short, str(source))
    if folder.exists() or not REPOSITORY.fullmatch(name):
        raise no_such(source, kind)
    return download(name, **options)


def tiny_folder(kind: str) -> Path:
    """The folder of the tiny "model" or "tokenizer" that come with anytorch."""
    return Path(__file__).parent / "tiny" / kind


def check_name(source: Any, kind: str) -> None:
    """Raise ModelError for what cannot name a "model" or a "tokenizer"."""
    if not isinstance(source, (str, Path)):
        raise ModelError(
            f"the name of a {kind} must be a path or a str, not a {type(source).__name__}",
            hint="give a folder, or a name such as NeoQuasar/Kronos-small",
        )


def no_such(source: str | Path, kind: str) -> ModelError:
    """The error for a name that is neither a folder nor a possible repository."""
    name, folder = str(source), Path(source).expanduser()
    known = [TINY, *(HUB if kind == "tokenizer" else PUBLISHED)]
    if kind == "tokenizer":
        known = [one for one in known if one not in PUBLISHED]
    if name.strip() and folder.exists():
        return ModelError(f"{name} is a file, and a {kind} is a folder", hint=f"name the folder of its {CONFIG}")
    near = did_you_mean(name.lower(), known)
    return ModelError(
        f"unknown {kind} {name!r}: not a folder here, and not one of {', '.join(known)}",
        hint=(f"{near} Or " if near else "")
        + "name a folder, or a Hugging Face repository such as NeoQuasar/Kronos-small",
    )


def by_hand(name: str) -> str:
    """The commands that bring a repository, and what goes with it, to a machine that has no network."""
    pair = next((found for found in PUBLISHED.values() if found.model == name), None)
    names = [name] if pair is None else [pair.model, pair.tokenizer]
    folders = [one.rpartition("/")[2] for one in names]
    commands = " && ".join(f"hf download {one} --local-dir {there}" for one, there in zip(names, folders, strict=True))
    if pair is None:
        return f"{commands}; copy the folder {folders[0]} here, and name it instead of {name}"
    context = f" --context {pair.max_context}" if pair.max_context != UNSAID_CONTEXT else ""
    use = f"--model {folders[0]} --tokenizer {folders[1]}{context}"
    return f"{commands}; copy both folders here, and use {use} (in Python the first two arguments of load_predictor)"


def download(name: str, **options: Any) -> Path:
    """`options` are those of huggingface_hub's snapshot_download."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
    except ModuleNotFoundError as exc:
        raise ModelError(
            f"{name!r} is not a folder here, and downloading it from Hugging Face needs {exc.name}",
            hint="pip install 'anytorch[forecast]', or give a folder",
        ) from exc
    try:
        folder = snapshot_download(name, allow_patterns=[CONFIG, WEIGHTS], **options)
    except LocalEntryNotFoundError as exc:
        raise ModelError(
            f"{name!r} is not a folder, was not downloaded before, and Hugging Face cannot be reached",
            hint=f"on a machine with a network: {by_hand(name)}",
        ) from exc
    except (HFValidationError, OSError) as exc:  # every refusal of the hub is an OSError: no such name, no access, …
        raise ModelError(f"{name!r} cannot be read from Hugging Face: {str(exc).splitlines()[0]}") from exc
    for file in (CONFIG, WEIGHTS):
        if not (Path(folder) / file).is_file():
            raise ModelError(f"the repository {name!r} has no {file}", hint="is it a Kronos checkpoint?")
    return Path(folder)


P = TypeVar("P", bound="Pretrained")
log = logs.logger(__name__)
SHOWN = 6  # of a list of keys in a message

MOST_LAYERS, LARGEST = 2**12, 2**20
# The least and the greatest value of every whole number of a config.json. The weights bound them further.
RANGES: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("d_in", "d_model", "n_heads", "ff_dim"), (1, LARGEST)),
    **dict.fromkeys(("n_layers", "n_enc_layers", "n_dec_layers"), (1, MOST_LAYERS)),
    **dict.fromkeys(("s1_bits", "s2_bits", "group_size"), (1, 61)),
}
# What a constructor's annotation means for a value of config.json, and the words for it.
VALUES: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
}
# Fixed by the configuration, so a checkpoint need not have them and its values do not count.
COMPUTED = (".rotary.inv_freq", "tokenizer.bsq.basis", "tokenizer.bsq.group_basis")


class Pretrained(nn.Module):
    """A module that is its constructor's arguments (`config`) and its weights."""

    kind: ClassVar[str] = ""  # "model" or "tokenizer": what a wrong folder is told to be
    config: dict[str, Any]

    @classmethod
    def from_pretrained(
        cls: type[P],
        pretrained_model_name_or_path: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        token: str | bool | None = None,
        force_download: bool = False,
        map_location: str | torch.device = "cpu",
        strict: bool = True,
        dtype: torch.dtype = torch.float32,
        **changes: Any,
    ) -> P:
        """Load a folder, a Hugging Face repository ("NeoQuasar/Kronos-small"; "kronos-small" for short), or "tiny".

        In eval mode, on the CPU or on the torch device `map_location`. `changes` are constructor arguments that count
        more than those of config.json (attn_dropout_p=0.1). With `strict=False` weights that the file lacks are drawn
        anew and those that are unknown are left out, with a warning; weights of another shape never fit.
        Raises ModelError that names the file, and the keys that are missing, unknown or of another shape.
        """
        folder = find_folder(
            pretrained_model_name_or_path,
            cls.kind,
            revision=revision,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            token=token,
            force_download=force_download,
        )
        config = read_config(folder / CONFIG, cls, changes)
        check_layers(config, len(read_header(folder / WEIGHTS)[0]), str(folder / CONFIG))
        with torch.device("meta"):  # no memory and no random numbers for weights that are about to be replaced
            module = cls(**config)
        state = read_weights(folder / WEIGHTS, module, dtype, strict)
        if len(state) < len(module.state_dict()):
            module = cls(**config).to(dtype)  # with values for what is missing
        module.load_state_dict(state, strict=strict, assign=True)
        return module.to(map_location).eval()

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        repo_id: str | None = None,
        push_to_hub: bool = False,
        **push_to_hub_kwargs: Any,
    ) -> Path:
        """Write config.json and model.safetensors (float32, as published) and return the folder.

        With `push_to_hub` it is also uploaded, as `repo_id` or as the folder's name; see the method of that name.
        """
        from safetensors.torch import save

        if push_to_hub_kwargs and not push_to_hub:
            raise UsageError(f"save_pretrained has no argument {next(iter(push_to_hub_kwargs))!r}")
        target = Path(save_directory)
        target.mkdir(parents=True, exist_ok=True)
        found = target / CONFIG
        if found.exists() and (other := kind_of(read_json(found))) not in (None, self.kind):
            raise ModelError(
                f"{target} holds a Kronos {other}; saving a {self.kind} there would overwrite it",
                hint="tokenizer and model use the same two file names: give each a folder of its own",
            )
        # A fused projection's parts share storage, which safetensors refuses: each is written for itself.
        state = {
            name: value.detach().to("cpu", torch.float32 if value.is_floating_point() else value.dtype).contiguous()
            for name, value in self.state_dict().items()
        }
        shared = [k for k, v in state.items() if v.untyped_storage().nbytes() != v.numel() * v.element_size()]
        state |= {name: state[name].clone() for name in shared}
        replace_file(target / WEIGHTS, save(state))
        replace_file(target / CONFIG, json.dumps(self.config, indent=2, sort_keys=True).encode())
        if push_to_hub:
            upload(target, repo_id or target.name, **push_to_hub_kwargs)
        return target

    def push_to_hub(self, repo_id: str, **options: Any) -> Any:
        """Upload both files to a Hugging Face repository, which is made if it is not there.

        `options`: private and token, and those of huggingface_hub's upload_folder (commit_message, revision, …).
        """
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            return upload(self.save_pretrained(folder), repo_id, **options)


def upload(folder: Path, repo_id: str, *, private: bool | None = None, token: str | None = None, **options: Any) -> Any:
    try:
        from huggingface_hub import HfApi
    except ModuleNotFoundError as exc:
        raise PackageMissing(
            f"uploading to Hugging Face needs {exc.name}", hint="pip install 'anytorch[forecast]'"
        ) from exc
    api = HfApi(token=token)
    made = api.create_repo(repo_id, private=private, exist_ok=True)
    options.setdefault("commit_message", "Upload with anytorch")
    return api.upload_folder(repo_id=made.repo_id, folder_path=folder, allow_patterns=[CONFIG, WEIGHTS], **options)


def check_shape(d_model: int, heads: int, s1_bits: int, s2_bits: int) -> None:
    """Raise for shapes that cannot be computed, before torch does."""
    if min(d_model, heads, s1_bits, s2_bits) < 1 or s1_bits + s2_bits > 62:
        raise UsageError(f"d_model {d_model}, heads {heads}, bits {s1_bits}+{s2_bits}: out of range")
    if d_model % (2 * heads):
        raise UsageError(f"d_model {d_model} must be a multiple of 2 × {heads} heads (rotary positions turn pairs)")


def read_json(path: Path) -> dict[str, Any]:
    try:
        read = parse_json(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ModelError(f"{path} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise ModelError(f"{path} is not JSON: {exc}") from exc
    if not isinstance(read, dict):
        raise ModelError(f"{path} holds a {type(read).__name__}, not names with their values")
    return read


def kind_of(config: Mapping[str, Any]) -> str | None:
    return "tokenizer" if "n_enc_layers" in config else "model" if "n_layers" in config else None


def read_config(path: Path, cls: type[Pretrained], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The constructor's arguments from a file, with changes, checked against the constructor."""
    known = arguments_of(cls)
    for name in changes:
        if name not in known:
            hint = did_you_mean(name, known, f"arguments of {cls.__name__}: {', '.join(known)}")
            raise UsageError(f"from_pretrained has no argument {name!r}", hint=hint)
    config = {**read_json(path), **changes}
    check_config(cls, config, str(path))
    return {name: config[name] for name in known}  # anything more says nothing about the network


def arguments_of(cls: type[Pretrained]) -> dict[str, str]:
    """The constructor's arguments and their types, by name ("int", "float", "bool")."""
    parameters = inspect.signature(cls.__init__).parameters
    return {name: str(found.annotation) for name, found in parameters.items() if name != "self"}


def check_config(cls: type[Pretrained], config: Mapping[str, Any], where: str) -> None:
    """Check a configuration against the constructor; raises ModelError with the missing arguments or the invalid value."""
    known = arguments_of(cls)
    missing = [name for name in known if name not in config]
    if missing:
        other = kind_of(config)
        hint = (
            f"this is the configuration of a Kronos {other}, not of a {cls.kind} ({cls.__name__})"
            if other not in (None, cls.kind)
            else f"all arguments of {cls.__name__} must be there: {', '.join(known)}"
        )
        raise ModelError(f"{where} lacks {', '.join(missing)}", hint=hint)
    for name, kind in known.items():
        fits, words = VALUES[kind]
        value = config[name]
        if not isinstance(value, fits) or (kind != "bool" and isinstance(value, bool)):
            raise ModelError(f"{where}: {name} is {value!r}, not {words}")
        least, most = RANGES.get(name, (-LARGEST, LARGEST))
        if kind != "bool" and not least <= config[name] <= most:  # nan is not, either
            told = value if abs(config[name]) < 2**63 else "too large"
            raise ModelError(f"{where}: {name} is {told}; use a number from {least} to {most}")
        if name.endswith("dropout_p") and not 0 <= float(config[name]) <= 1:
            raise ModelError(f"{where}: {name} is {value!r}; use a number from 0 to 1")


def read_weights(path: Path, module: nn.Module, dtype: torch.dtype, strict: bool) -> dict[str, Tensor]:
    """The state dict of `module` from a file, of the right shapes and floating-point values as `dtype`.

    Complete if `strict`; else what the file has of it.
    """
    # Read, not mapped: a file that somebody cuts short later must not end the process.
    read = {name: read_tensor(stored) for name, stored in read_header(path)[0].items()}
    wanted = module.state_dict()
    computed = {name: value for name, value in wanted.items() if name.endswith(COMPUTED)}
    missing = [name for name in wanted if name not in read and name not in computed]
    unknown = [name for name in read if name not in wanted and not name.endswith(COMPUTED)]
    wrong = [
        f"{name} is {list(read[name].shape)} and should be {list(value.shape)}"
        for name, value in wanted.items()
        if name in read and name not in computed and read[name].shape != value.shape
    ]
    if not strict and (missing or unknown):
        log.warning(
            "%s: drawn anew: %s; left out: %s", path, listed(missing) or "nothing", listed(unknown) or "nothing"
        )
        missing, unknown = [], []
    if missing or unknown or wrong:
        found = [
            *([f"missing {listed(missing)}"] if missing else []),
            *([f"unknown {listed(unknown)}"] if unknown else []),
            *([listed(wrong)] if wrong else []),
        ]
        raise ModelError(f"{path} does not fit its {CONFIG}: {'; '.join(found)}", hint="were both saved together?")
    state = {name: read[name].to(dtype) for name in wanted if name in read and name not in computed}
    return state | recompute(module, computed)


def recompute(module: nn.Module, computed: dict[str, Tensor]) -> dict[str, Tensor]:
    """The buffers that the configuration fixes (`module` may be on the meta device, where they have no values)."""
    values: dict[str, Tensor] = {}
    for name, buffer in computed.items():
        if name.endswith(".inv_freq"):
            rotary = module.get_submodule(name.rpartition(".")[0])
            assert isinstance(rotary, Rotary)
            values[name] = inverse_frequencies(2 * buffer.shape[0])
        else:
            values[name] = 2 ** torch.arange(buffer.shape[0] - 1, -1, -1)
    return values


def listed(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
