"""Reading and writing the published layout: a folder with config.json and model.safetensors."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from anytorch.errors import ModelError, UsageError
from anytorch.files import replace_file
from anytorch.models.kronos.folder import CONFIG, WEIGHTS, find_folder
from anytorch.models.kronos.layers import Rotary, inverse_frequencies

P = TypeVar("P", bound="Pretrained")
SHOWN = 6  # of a list of keys in a message

# Fixed by the configuration, so a checkpoint need not have them and its values do not count.
COMPUTED = (".rotary.inv_freq", "tokenizer.bsq.basis", "tokenizer.bsq.group_basis")


class Pretrained(nn.Module):
    """A module that is its constructor's arguments (`config`) and its weights."""

    kind: ClassVar[str] = ""  # "model" or "tokenizer": what a wrong folder is told to be
    config: dict[str, Any]

    @classmethod
    def from_pretrained(
        cls: type[P],
        source: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        token: str | bool | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> P:
        """Load a folder, or a Hugging Face repository ("NeoQuasar/Kronos-small"), in eval mode on the CPU.

        Raises ModelError that names the file, and the keys that are missing, unknown or of another shape.
        """
        folder = find_folder(
            source, revision=revision, cache_dir=cache_dir, local_files_only=local_files_only, token=token
        )
        config = read_config(folder / CONFIG, cls)
        with torch.device("meta"):  # no memory and no random numbers for weights that are about to be replaced
            module = cls(**config)
        state = read_weights(folder / WEIGHTS, module, dtype)
        module.load_state_dict(state, strict=True, assign=True)
        return module.eval()

    def save_pretrained(self, folder: str | Path) -> Path:
        """Write config.json and model.safetensors (float32, as published) and return the folder."""
        from safetensors.torch import save

        target = Path(folder)
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
        state = {name: value.clone() if shares_storage(value) else value for name, value in state.items()}
        replace_file(target / WEIGHTS, save(state))
        replace_file(target / CONFIG, json.dumps(self.config, indent=2, sort_keys=True).encode())
        return target


def shares_storage(value: Tensor) -> bool:
    return value.untyped_storage().nbytes() != value.numel() * value.element_size()


def check_shape(d_model: int, heads: int, s1_bits: int, s2_bits: int) -> None:
    """Refuse what could not be computed, before torch does in its own words."""
    if min(d_model, heads, s1_bits, s2_bits) < 1 or s1_bits + s2_bits > 62:
        raise UsageError(f"d_model {d_model}, heads {heads}, bits {s1_bits}+{s2_bits}: out of range")
    if d_model % (2 * heads):
        raise UsageError(f"d_model {d_model} must be a multiple of 2 × {heads} heads (rotary positions turn pairs)")


def read_json(path: Path) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ModelError(f"{path} cannot be read: {exc.strerror}") from exc
    except (json.JSONDecodeError, UnicodeDecodeError) as exc:
        raise ModelError(f"{path} is not JSON: {exc}") from exc
    if not isinstance(read, dict):
        raise ModelError(f"{path} holds a {type(read).__name__}, not names with their values")
    return read


def kind_of(config: dict[str, Any]) -> str | None:
    return "tokenizer" if "n_enc_layers" in config else "model" if "n_layers" in config else None


def read_config(path: Path, cls: type[Pretrained]) -> dict[str, Any]:
    """The constructor's arguments, checked against the constructor."""
    config = read_json(path)
    wanted = [name for name in inspect.signature(cls.__init__).parameters if name != "self"]
    missing = [name for name in wanted if name not in config]
    if missing:
        other = kind_of(config)
        hint = (
            f"this is the folder of a Kronos {other}; a {cls.kind} was asked for ({cls.__name__})"
            if other not in (None, cls.kind)
            else "the file must hold exactly the constructor's arguments"
        )
        raise ModelError(f"{path} lacks {', '.join(missing)}", hint=hint)
    return {name: config[name] for name in wanted}  # anything more says nothing about the network


def read_weights(path: Path, module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The state dict of `module` from a file, complete and of the right shapes, floating-point values as `dtype`."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        read = load_file(path)
    except (OSError, SafetensorError) as exc:
        raise ModelError(f"{path} cannot be read as safetensors: {exc}") from exc
    wanted = module.state_dict()
    computed = {name: value for name, value in wanted.items() if name.endswith(COMPUTED)}
    missing = [name for name in wanted if name not in read and name not in computed]
    unknown = [name for name in read if name not in wanted and not name.endswith(COMPUTED)]
    wrong = [
        f"{name} is {list(read[name].shape)} and should be {list(value.shape)}"
        for name, value in wanted.items()
        if name in read and name not in computed and read[name].shape != value.shape
    ]
    if missing or unknown or wrong:
        found = [
            *([f"missing {listed(missing)}"] if missing else []),
            *([f"unknown {listed(unknown)}"] if unknown else []),
            *([listed(wrong)] if wrong else []),
        ]
        raise ModelError(f"{path} does not fit its {CONFIG}: {'; '.join(found)}", hint="were both saved together?")
    state = {name: read[name].to(dtype) for name in wanted if name not in computed}
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
