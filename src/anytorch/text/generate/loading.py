"""Load a model from a folder: the checks, the dtype, and whether it is plain, packed or in tiers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from anytorch import logs
from anytorch.devices.memory import memory
from anytorch.devices.types import Caps
from anytorch.errors import ModelError, UsageError
from anytorch.memory.fitting import fit, fitted
from anytorch.memory.levels import DEVICE_SHARE, Size
from anytorch.memory.loading import load as load_in_tiers
from anytorch.memory.sizes import parse_nbytes, words
from anytorch.quant.formats import parse as parse_format
from anytorch.quant.model import quantize
from anytorch.safetensors_files import check_layers
from anytorch.text.checkpoints.checkpoint import Checkpoint
from anytorch.text.checkpoints.locate import HUB_NAME, first_line, hub_model, local_model
from anytorch.text.decoders.loading import read_config, read_object
from anytorch.text.decoders.spec import FAMILIES
from anytorch.text.generate.kernel import CHOICES, Opened, host_refusal, open_kernel, open_packed
from anytorch.text.generate.model_steps import open_model
from anytorch.text.persistent.panels import FORMATS as PACKED

log = logs.logger(__name__)

DTYPES = ("auto", "float32", "float16", "bfloat16")
STORED = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
ITEM_NBYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
WHOLE = re.compile(r"embed|wte|wpe|lm_head|position")  # names of tensors that quantizing leaves alone
TINY = "tiny-writer"  # the model that comes with anytorch: prose about Python (examples/train_writer.py)
GENERATION = "generation_config.json"
TINY_FOLDER = Path(__file__).parent / "tiny"
UNKNOWN = 1 << 62  # bytes, where a device does not tell what is free
SIZES = (
    "num_attention_heads", "n_head", "hidden_size", "n_embd", "head_dim", "max_position_embeddings", "n_positions",
    "num_key_value_heads",
)  # fmt: skip
CACHE_SHARE = 0.5  # of the memory that is free beside the weights: the most that a kernel's keys and values take
CONTEXT_KEPT = 4096  # tokens whose keys and values are counted when the question is whether a model fits


@dataclass
class Loaded:
    """A model at its place, and how it got there."""

    model: Any
    tokenizer: Any
    dtype: str
    placed: str  # "on the device", "in tiers"
    config: Any
    generation_config: Any
    notes: list[str] = field(default_factory=list)
    kernel: Opened | None = None  # None: transformers' model computes
    why_none: str = ""
    cache_room: int = UNKNOWN  # bytes for keys and values

    @property
    def context(self) -> int | None:
        return context_of(self.config)

    @property
    def in_tiers(self) -> bool:
        return self.placed == "in tiers"

    def close(self) -> None:
        """Free the model. One in tiers and its movers hold each other: its memory would stay until the garbage
        collector comes by, so it is given back here."""
        model, self.model, self.kernel = self.model, None, None
        if model is not None and self.in_tiers:
            fitted(model).close()


def find_folder(named: str | Path | None) -> Path:
    """The folder of a model: one on this disk, else the Hugging Face Hub's copy or a download. None, or `TINY` where there
    is no such folder: the model that comes with anytorch."""
    if named is None:
        return TINY_FOLDER
    text = str(named)
    if text.strip() and (folder := local_model(text)) is not None:
        return folder
    if named == TINY:
        return TINY_FOLDER
    if isinstance(named, Path) or "/" not in text or not HUB_NAME.fullmatch(text):
        raise ModelError(
            f"{text or 'the empty name'}: there is no such folder",
            hint=f"the working folder is {Path.cwd()}; a model of the Hugging Face Hub is named owner/name",
        )
    return hub_model(text, asked=text)


def load(
    folder: Path,
    device: torch.device,
    caps: Caps,
    *,
    dtype: str,
    quantization: str | None,
    device_budget: Size | None,
    kernel: str,
) -> Loaded:
    """The model on its device. Raises ModelError for a folder that cannot be used, BudgetTooSmall for too little memory."""
    if dtype not in DTYPES:
        raise UsageError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    if kernel not in CHOICES:
        raise UsageError(f"kernel={kernel!r} is not one of {', '.join(CHOICES)}")
    if quantization is not None:
        parse_format(quantization)
    config = read_config(folder)
    if (folder / GENERATION).exists():  # transformers goes on without a damaged one, and texts have no end then
        read_object(folder / GENERATION)
    with Checkpoint(folder) as checkpoint:  # refuses pickles, checks every header
        stored, nbytes = stored_dtype(checkpoint), checkpoint.nbytes()
        packable = packable_nbytes(checkpoint)
        check_layers(config, len(checkpoint.names()), str(folder / "config.json"))
        check_numbers(config, folder / "config.json")
    chosen = choose_dtype(dtype, stored, caps)
    if dtype == "auto" and kernel == "auto" and not host_refusal(device, str(config.get("model_type"))):
        chosen = stored  # it widens short floats in registers: half the bytes are twice the speed
    try:
        import transformers
    except ModuleNotFoundError as exc:
        raise ModelError(
            f"{folder}: generating text needs transformers, which is not installed ({exc.name} is missing)",
            hint="pip install 'anytorch[generate]'",
        ) from exc
    with quiet(transformers):
        tokenizer = read_tokenizer(transformers, folder)
        need = round(nbytes * ITEM_NBYTES[chosen] / ITEM_NBYTES.get(stored, 4))
        kept = cache_nbytes(config, CONTEXT_KEPT, ITEM_NBYTES[chosen])
        budget = parse_nbytes(device_budget, "device_budget") if device_budget is not None else None
        free = memory(device).free
        room = budget if budget is not None else int((UNKNOWN if free is None else free) * DEVICE_SHARE)
        # What packed weights need of the unpacked ones' bytes, scales included.
        share = 1.0 if quantization is None else (parse_format(quantization).bits + 1.0) / (8 * ITEM_NBYTES[chosen])
        packed = round(need * (1 - (1 - share) * packable / max(nbytes, 1)))
        if packed + kept <= room:
            both = quantization is None or packed + need + kept <= room  # floats stay beside packed weights
            opened, why_none = opened_kernel(transformers, folder, device, chosen, config, quantization, kernel, both)
            if opened is not None:
                opened.tokenizer = tokenizer
                beside = need if quantization is not None and device.type != "cpu" else 0  # the floats
                opened.cache_room = cache_room(device, budget, packed + beside)
                return opened
            model = from_folder(transformers, folder, chosen)
            notes = []
            if quantization is not None:
                if need + kept <= room:
                    model.to(device)  # searching the best scales is work for the device, if it has room for the floats
                notes.append(str(quantize(model, quantization)))
            model = model.to(device).eval().requires_grad_(False)
            made = plain(model, tokenizer, chosen, "on the device", notes, why_none)
            if kernel == "auto":
                step_by_step(made, folder)
                made.cache_room = cache_room(device, budget, packed)
            return made
        notes = [
            f"{words(packed)} of weights and {words(kept)} for {CONTEXT_KEPT} tokens do not fit in {words(room)}: "
            "the rest stays in slower memory and is streamed for every token"
        ]
        reserve = min(kept, room // 4)
        options: dict[str, Any] = {"device_budget": room, "reserve": reserve}
        model = None
        if quantization is None and chosen == stored:  # straight from the files, where their names allow it
            try:
                model = load_in_tiers(folder, device, **options)
            except ModelError as exc:  # its tensors have other names than the model's: transformers can convert them
                log.info("%s cannot be opened in place: %s", folder.name, exc.message)
                notes.append("the files cannot be used in place: the model was loaded into host memory first")
        if model is None:
            model = fit(from_folder(transformers, folder, chosen), device, rest_format=quantization, **options)
        if quantization is not None:
            notes.append(f"layers that are not always on the device are stored in {quantization}")
    log.info("%s: %s", folder.name, notes[0])
    return plain(model.eval(), tokenizer, chosen, "in tiers", notes, "the model does not fit on the device")


def plain(model: Any, tokenizer: Any, dtype: str, placed: str, notes: list[str], why_none: str) -> Loaded:
    """A model of transformers, which computes by itself."""
    return Loaded(model, tokenizer, dtype, placed, model.config, model.generation_config, notes, None, why_none)


def step_by_step(made: Loaded, folder: Path) -> None:
    """Have a model of transformers computed in recorded steps, where these give what it gives; else say why not."""
    try:
        opened = open_model(made.model, folder, made.context)
    except ModelError as exc:
        log.info("%s is computed op by op: %s", folder.name, exc.message)
        made.why_none += f"; {exc.message}"
    else:
        made.kernel = replace(opened, says=f"{opened.says}; {made.why_none}")


def cache_room(device: torch.device, budget: int | None, used: int) -> int:
    """Bytes for keys and values: a share of what is free, within what a budget leaves."""
    free = memory(device).free
    spare = UNKNOWN if free is None else int(free * CACHE_SHARE)
    return spare if budget is None else min(spare, budget - used)


def opened_kernel(
    transformers: Any,
    folder: Path,
    device: torch.device,
    dtype: str,
    config: dict[str, Any],
    quantization: str | None,
    kernel: str,
    both: bool,
) -> tuple[Loaded | None, str]:
    """The model as one of our decoders with its kernel, still without a tokenizer; None and the reason where it is none.
    `both`: is there room for packed weights beside the floats?"""
    family = str(config.get("model_type"))[:40]
    if kernel == "off":
        return None, "kernel='off'"
    if family not in FAMILIES:
        return None, f"our decoders do not support the family {family}"
    if quantization is not None and quantization not in PACKED:
        return None, f"the kernels read no weights in {quantization} yet"
    host = quantization is not None and device.type == "cpu"
    if host and (refusal := host_refusal(device, family)):
        return None, refusal
    if not both and not host:
        return None, f"there is no room for weights in {quantization} beside those in {dtype}, which kernels read, too"
    try:
        opened = (
            open_packed(folder, dtype, str(quantization)) if host else open_kernel(folder, device, dtype, quantization)
        )
        settings = read_settings(transformers, folder)
    except ModelError as exc:
        log.info("%s is computed by transformers: %s", folder.name, exc.message)
        return None, exc.message
    return Loaded(opened.model, None, dtype, "on the device", *settings, kernel=opened), ""


def read_settings(transformers: Any, folder: Path) -> tuple[Any, Any]:
    """What config.json and generation_config.json say, as transformers has it. Raises ModelError."""
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        if (folder / GENERATION).is_file():
            return config, transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)
        return config, transformers.GenerationConfig.from_model_config(config)
    except Exception as exc:
        raise ModelError(f"{folder}: its settings cannot be read: {first_line(exc)}", hint="fetch it again") from exc


def check_numbers(config: dict[str, Any], path: Path) -> None:
    """Raise ModelError for a size that is not one: what a model needs is computed from them."""
    for name in SIZES:
        size = config.get(name)
        if size is not None and (type(size) is not int or not 0 <= size < 2**31):
            raise ModelError(
                f"{path}: {name} is {str(size)[:40]}, not a size", hint="the file is damaged: fetch it again"
            )


def stored_dtype(checkpoint: Checkpoint) -> str:
    """Of most of the bytes; "float32" for formats torch does not compute with."""
    nbytes: dict[str, int] = {}
    for name in checkpoint.names():
        entry = checkpoint.entry(name)
        nbytes[entry.code] = nbytes.get(entry.code, 0) + entry.nbytes
    return STORED.get(max(nbytes, key=lambda kind: nbytes[kind]), "float32") if nbytes else "float32"


def packable_nbytes(checkpoint: Checkpoint) -> int:
    """The bytes that are packed for certain: matrices of layers. Embeddings, and a head that shares theirs, are not."""
    entries = {name: checkpoint.entry(name) for name in checkpoint.names()}
    return sum(entry.nbytes for name, entry in entries.items() if len(entry.shape) == 2 and not WHOLE.search(name))


def choose_dtype(asked: str, stored: str, caps: Caps) -> str:
    """The stored one where the device is fast at it, else one that is as short, else float32. Pure."""
    if asked != "auto":
        return asked
    for name in (stored, "bfloat16" if stored == "float16" else stored):
        if name in caps.fast_dtypes:
            return name
    return "float32"


def cache_nbytes(config: dict[str, Any], tokens: int, item_nbytes: int) -> int:
    """Keys and values of so many tokens, as far as the configuration tells."""
    layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 0)
    heads = int(config.get("num_attention_heads") or config.get("n_head") or 1)
    width = int(config.get("hidden_size") or config.get("n_embd") or 0)
    head_width = int(config.get("head_dim") or width // heads)
    most = int(config.get("max_position_embeddings") or config.get("n_positions") or tokens)
    return 2 * layers * int(config.get("num_key_value_heads") or heads) * head_width * item_nbytes * min(tokens, most)


def context_of(config: Any) -> int | None:
    """How many positions the model has; None where nothing limits them."""
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    for name in ("max_position_embeddings", "n_positions", "max_seq_len"):
        value = getattr(text, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def read_tokenizer(transformers: Any, folder: Path) -> Any:
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except BaseException as exc:
        # The Rust library's panics over damaged files are no Exceptions.
        if not isinstance(exc, Exception) and type(exc).__name__ != "PanicException":
            raise
        raise ModelError(
            f"{folder}: its tokenizer cannot be read: {first_line(exc)}",
            hint="it needs tokenizer.json beside config.json",
        ) from exc
    if not tokenizer.encode("One text.", add_special_tokens=False):  # of GPT-2 transformers makes one of nothing
        raise ModelError(
            f"{folder}: its tokenizer has no tokens for a text: its vocabulary is missing",
            hint="it needs tokenizer.json beside config.json",
        )
    return tokenizer


def from_folder(transformers: Any, folder: Path, dtype: str) -> Any:
    """The model in host memory. A tensor that the files do not have is an error: transformers would invent it."""
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as exc:
        if "Unrecognized configuration class" in str(exc):  # a family that has no such model: T5, CLIP
            raise not_causal(folder) from exc
        raise ModelError(
            f"{folder}: cannot be loaded as a language model: {first_line(exc)}",
            hint="it must be a causal language model that transformers knows; code in the folder is never run",
        ) from exc
    missing = sorted(str(name) for name in info.get("missing_keys") or ())
    if missing:
        raise ModelError(
            f"{folder} has no values for {len(missing)} parameters, such as {', '.join(missing[:3])}",
            hint="the checkpoint belongs to another kind of model (an encoder?), or is incomplete",
        )
    if getattr(model.config, "is_decoder", None) is False and sees_later_tokens(model):
        raise not_causal(folder)  # transformers loads BERT's family with a warning, and it writes nonsense
    return model


def not_causal(folder: Path) -> ModelError:
    return ModelError(
        f"{folder}: {read_config(folder).get('model_type')} is not a causal language model: it cannot continue a text",
        hint="use a model such as Llama, Qwen or GPT-2; anytorch.ArrowEngine embeds texts with an encoder",
    )


@torch.no_grad()
def sees_later_tokens(model: Any) -> bool:
    """Whether what comes after a token changes its logits, as in an encoder."""
    first = model(input_ids=torch.tensor([[0, 1], [0, 2]])).logits[:, 0]
    return not torch.allclose(first[0], first[1])


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """A context in which transformers and its imports print no progress bars or messages."""
    logging = transformers.utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with logs.asides_unheard():
            yield
    finally:
        if shown:
            logging.enable_progress_bar()
