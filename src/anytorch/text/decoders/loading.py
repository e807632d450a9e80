"""Load a decoder from a Hugging Face folder: config.json and safetensors files, one or several."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anytorch import large_pages
from anytorch.devices.choose import resolve
from anytorch.devices.oom import telling_out_of_memory
from anytorch.errors import ModelError, UsageError
from anytorch.files import parse_json
from anytorch.memory.buffers import bytes_of
from anytorch.safetensors_files import StoredTensor, check_layers, locate_tensors, read_into, read_tensor, torch_dtype
from anytorch.text.decoders.model import Decoder
from anytorch.text.decoders.spec import DecoderSpec, read_spec

PREFIX, WORDS, HEAD = "model.", "embed_tokens.weight", "lm_head.weight"
LINE = 64  # of a cache, in bytes
COMPUTED = ("rotary_emb.inv_freq",)  # some files hold what follows from config.json
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def load_decoder(
    path: str | Path,
    device: str | torch.device | None = "cpu",
    dtype: str | torch.dtype = "auto",
    *,
    taken: Callable[[str, torch.Tensor], bool] | None = None,
) -> Decoder:
    """The decoder in a folder with config.json and safetensors weights: Llama, Mistral, Qwen2 or Qwen3.

    `dtype`: "auto" (the stored one), "float32", "float16", "bfloat16". Pickled weights are refused, and nothing in the
    folder is run. `taken(name, tensor)` is called for each tensor as it is read; where it is True the decoder does not
    keep it: its parameter stays on the meta device. Raises ModelError for a folder that is damaged, incomplete or of
    another kind of model.
    """
    folder = Path(path)
    if isinstance(dtype, str) and dtype not in ("auto", *DTYPES):
        raise UsageError(f"dtype={dtype!r} is not one of auto, {', '.join(DTYPES)}")
    spec = spec_of(folder)
    stored = locate_tensors(folder)
    check_layers({"num_hidden_layers": spec.layers}, len(stored), str(folder / "config.json"))
    with torch.device("meta"):
        decoder = Decoder(spec)
    wanted = dict(decoder.state_dict())
    if spec.tied:
        del wanted[HEAD]
    named = _named(folder, stored, wanted)
    chosen = _dtype(dtype, named)
    place = resolve(device).device
    state = {}
    room = Room(named.values(), chosen) if place.type == "cpu" and taken is None else None
    for name, entry in named.items():
        if room is not None:
            state[name] = room.read(entry)
            continue
        tensor = read_tensor(entry)
        if taken is None or not taken(name, tensor):
            state[name] = tensor.to(place, chosen)
    decoder.load_state_dict(state, strict=False, assign=True)
    if spec.tied:
        decoder.lm_head.weight = decoder.model.embed_tokens.weight
    return decoder.requires_grad_(False).eval()


def decoder_of(model: nn.Module) -> Decoder:
    """The decoder that a model of transformers is, over the same weights. Raises ModelError for another kind of model."""
    named, config = type(model).__name__, getattr(model, "config", None)
    if config is None or not hasattr(config, "to_dict"):
        raise ModelError(f"{named} has no config that says what it is", hint="pass a Hugging Face folder, or a Decoder")
    spec, stored = read_spec(config.to_dict(), named), model.state_dict()
    words = stored.get(f"{PREFIX}{WORDS}")
    tied = words is not None and HEAD in stored and stored[HEAD].data_ptr() == words.data_ptr()
    with torch.device("meta"):
        decoder = Decoder(replace(spec, tied=tied))
    wanted = decoder.state_dict()
    differ = sorted(wanted.keys() ^ stored.keys())
    differ += [name for name in wanted.keys() & stored.keys() if wanted[name].shape != stored[name].shape]
    if differ:
        raise ModelError(
            f"{named} is not a {spec.family} as its config tells: {', '.join(differ[:3])} should be otherwise",
            hint="it is a body without a head, or changed (adapters, packed layers): use anytorch.TextGenerator",
        )
    kinds = {(str(one.dtype), str(one.device)) for one in stored.values()}
    if len(kinds) > 1:
        raise ModelError(
            f"the weights of {named} are {' and '.join(' on '.join(kind) for kind in sorted(kinds))}",
            hint="put all of them on one device, in one dtype: model.to(device, dtype)",
        )
    decoder.load_state_dict(stored, assign=True)
    if tied:
        decoder.lm_head.weight = decoder.model.embed_tokens.weight
    return decoder.requires_grad_(False).eval()


class Room:
    """One piece of memory for all weights on the CPU, in the order a token reads them, in large pages. Raises OutOfMemory.

    Pieces of a few MB each would lie on small pages for the most part: a large one is 2 MB and begins at a multiple of that.
    """

    def __init__(self, entries: Iterable[StoredTensor], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._nbytes = sum(self._in_lines(entry) for entry in entries)
        with telling_out_of_memory("reading a model's weights", "use a smaller dtype or int8 weights, or free memory"):
            made = torch.empty(self._nbytes + large_pages.NBYTES, dtype=torch.uint8)
        begin = -made.data_ptr() % large_pages.NBYTES
        self._left = made[begin : begin + self._nbytes]
        large_pages.ask(self._left.data_ptr(), self._nbytes)

    def read(self, entry: StoredTensor) -> torch.Tensor:
        """A stored tensor in the next place. Raises ModelError where its file was cut short."""
        mine, self._left = self._left[: self._in_lines(entry)], self._left[self._in_lines(entry) :]
        place = mine[: math.prod(entry.shape) * self._dtype.itemsize].view(self._dtype).view(entry.shape)
        if torch_dtype(entry) == self._dtype:
            read_into(entry.path, entry.offset, bytes_of(place))
            return place
        return place.copy_(read_tensor(entry))

    def _in_lines(self, entry: StoredTensor) -> int:
        return -(-math.prod(entry.shape) * self._dtype.itemsize // LINE) * LINE


def spec_of(folder: Path) -> DecoderSpec:
    """What a folder's config.json says. A stored head that differs from the table of words is the model's own even where
    config.json ties them, as in transformers. Raises ModelError."""
    spec = read_spec(read_config(folder), str(folder / "config.json"))
    return replace(spec, tied=False) if spec.tied and _has_own_head(locate_tensors(folder)) else spec


def ends_of(model: nn.Module | Path) -> Any:
    """The eos_token_id of a folder's files, or of a model of transformers: one, several or None."""
    if isinstance(model, nn.Module):
        told = [getattr(model, name, None) for name in ("generation_config", "config")]
        ends = [getattr(one, "eos_token_id", None) for one in told]
    else:
        files = [model / name for name in ("generation_config.json", "config.json")]
        ends = [read_object(file).get("eos_token_id") for file in files if file.exists()]
    return next((one for one in ends if one is not None), None)


def read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} has no config.json", hint="name the folder that holds config.json")
    return read_object(path)


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError."""
    try:
        found: Any = parse_json(path.read_bytes())
    except (OSError, ValueError) as exc:
        raise ModelError(f"{path}: cannot be read: {exc}", hint="fetch it again") from exc
    if not isinstance(found, dict):
        raise ModelError(f"{path}: not a JSON object", hint="fetch it again")
    return found


def _has_own_head(stored: Mapping[str, StoredTensor]) -> bool:
    head, table = stored.get(HEAD), stored.get(f"{PREFIX}{WORDS}", stored.get(WORDS))
    if head is None or table is None:
        return False
    return head.code != table.code or not torch.equal(read_tensor(head), read_tensor(table))


def _named(folder: Path, stored: dict[str, StoredTensor], wanted: dict[str, torch.Tensor]) -> dict[str, StoredTensor]:
    """The stored tensor of every parameter. A checkpoint of the body alone has its names without "model."."""
    bare = {f"{PREFIX}{name}": entry for name, entry in stored.items() if not name.startswith((PREFIX, "lm_head."))}
    found = {**bare, **stored}
    missing = sorted(name for name in wanted if name not in found)
    if missing:
        raise ModelError(
            f"{folder} has no values for {len(missing)} parameters, such as {', '.join(missing[:3])}",
            hint="config.json and the weights are of different models, or the weights are incomplete",
        )
    for name, parameter in wanted.items():
        if found[name].shape != tuple(parameter.shape):
            raise ModelError(
                f"{found[name].path}: {name} is {list(found[name].shape)}; config.json asks for {list(parameter.shape)}",
                hint="config.json and the weights are of different models",
            )
    known = {*wanted, HEAD}
    extra = [name for name in stored if name not in known and f"{PREFIX}{name}" not in known]
    extra = [name for name in extra if not name.endswith(COMPUTED)]
    if extra:
        raise ModelError(
            f"{folder} holds {', '.join(sorted(extra)[:3])}, which config.json does not mention",
            hint="it is another kind of model (several experts, another norm), or quantized: use anytorch.TextGenerator",
        )
    return {name: found[name] for name in wanted}


def _dtype(asked: str | torch.dtype, named: dict[str, StoredTensor]) -> torch.dtype:
    if isinstance(asked, torch.dtype):
        return asked
    if asked != "auto":
        return DTYPES[asked]
    nbytes: dict[str, int] = {}
    for entry in named.values():
        nbytes[entry.dtype] = nbytes.get(entry.dtype, 0) + entry.nbytes
    return DTYPES.get(max(nbytes, key=lambda name: nbytes[name]), torch.float32)
