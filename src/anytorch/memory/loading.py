"""Opening a checkpoint that does not fit: the model is built without its weights, which stay in their files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from anytorch import logs
from anytorch.devices.oom import telling_out_of_memory
from anytorch.errors import ModelError, UsageError
from anytorch.files import parse_json
from anytorch.memory.fitted_model import Fitted
from anytorch.memory.fitting import Wishes, plan_for
from anytorch.memory.images import Image, from_files
from anytorch.memory.levels import Size, create_tiers
from anytorch.memory.parked import placeholder
from anytorch.memory.sizes import parse_nbytes
from anytorch.memory.types import Speeds, TierPlan, Tiers, WeightBlock
from anytorch.memory.units import Found, all_slots
from anytorch.safetensors_files import StoredTensor, check_layers, locate_tensors, stored_tensor, torch_dtype

log = logs.logger(__name__)


@telling_out_of_memory("loading the model", "nothing is left of it: free memory, or lower the budgets")
def load(
    source: str | Path | Callable[[], nn.Module],
    device: str | torch.device | None = "auto",
    *,
    weights: str | Path | None = None,
    device_budget: Size | None = None,
    host_budget: Size | None = None,
    disk: str | Path | bool | None = None,
    blocks: Sequence[str] | str | None = None,
    resident: Sequence[str] = (),
    reserve: Size = 0,
    speeds: Speeds | None = None,
    compute_s: float = 0.0,
    rest_format: str | None = None,
) -> nn.Module:
    """A model straight from its safetensors files, within budgets; never as a whole in memory unless it fits.

    `source` is a Hugging Face model folder (needs transformers), or a class or function that makes the module, with
    `weights` naming its checkpoint. Blocks that fit no memory budget are read from those files in every pass; nothing is
    written, unless `rest_format` asks for fewer bits: then the checkpoint is read once, a block at a time, and what
    rests on disk is written to `disk` (by default in the cache) until the model is gone. The other arguments are those
    of `fit`. Raises ModelError, which names the file or the tensor that is missing.
    """
    model, checkpoint = build(source, weights)
    level = disk if disk or rest_format is not None else _folder(checkpoint)
    tiers = create_tiers(device, device_budget=device_budget, host_budget=host_budget, disk=level, speeds=speeds)
    wishes = Wishes(blocks, resident, parse_nbytes(reserve, "reserve"), 0, compute_s, rest_format)
    handle = prepare(model, checkpoint, tiers, wishes)
    handle.place(handle.images, from_files=True)
    return model


def preview(
    source: str | Path | Callable[[], nn.Module],
    tiers: Tiers,
    *,
    weights: str | Path | None = None,
    compute_s: float = 0.0,
) -> TierPlan:
    """The plan `load` would follow. Reads headers alone."""
    model, checkpoint = build(source, weights)
    return prepare(model, checkpoint, tiers, Wishes(compute_s=compute_s)).plan


def build(source: str | Path | Callable[[], nn.Module], weights: str | Path | None) -> tuple[nn.Module, Path]:
    """The module without weights, and where they are."""
    with parameters_on_meta():
        if callable(source):
            if weights is None:
                raise UsageError("weights= is missing: a module made by a function or class needs its checkpoint")
            model, checkpoint = source(), Path(weights)
        else:
            checkpoint = Path(weights or source)
            model = from_folder(Path(source), checkpoint)
    return model.eval(), checkpoint


def prepare(model: nn.Module, checkpoint: Path, tiers: Tiers, wishes: Wishes) -> Fitted:
    """The handle of a model whose weights are in a checkpoint, with its plan; nothing is placed yet."""
    located = locate_tensors(checkpoint)
    where = match(model, located, checkpoint)
    replace_parameters(model, where)
    load_buffers(model, located)
    by_id = {key: where[slots[0].path] for key, slots in all_slots(model).items()}

    def images(found: Found) -> dict[str, Image]:
        made = {}
        for name, group in found.groups.items():
            renamed = [replace(by_id[id(parameter)], name=path) for path, parameter in group.tensors().items()]
            made[name] = from_files(name, renamed, in_place=tiers.shared)
        return made

    def sizes(found: Found) -> dict[str, WeightBlock]:
        return {name: WeightBlock(name, image.nbytes) for name, image in images(found).items()}

    found, plan = plan_for(model, tiers, wishes, on_disk=wishes.rest_format is None, sizes=sizes, codes=False)
    for parameter in found.staying:
        parameter.data = stored_tensor(by_id[id(parameter)]).to(tiers.device.place, copy=True)
    handle = Fitted(model, tiers, found, plan, rest_format=wishes.rest_format)
    handle.images = images(found)
    return handle


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """A context in which a new module's parameters take no memory and no time to initialise; its buffers are real."""
    original = nn.Module.register_parameter

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(self, name, param)
        if param is not None and param.device.type != "meta":
            self._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def from_folder(folder: Path, checkpoint: Path) -> nn.Module:
    """The model class that a Hugging Face folder's config names, made without weights, which bound its layers."""
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json", hint="name a model folder, or give a class and weights=…")
    try:
        told = parse_json((folder / "config.json").read_bytes())
    except (OSError, ValueError) as exc:
        raise ModelError(f"{folder}/config.json cannot be read: {exc}", hint="fetch it again") from exc
    if not isinstance(told, dict):
        raise ModelError(f"{folder}/config.json is not a JSON object", hint="fetch it again")
    try:
        import transformers
    except ModuleNotFoundError as exc:
        raise ModelError(
            f"opening {folder} needs transformers, which is not installed", hint="pip install transformers"
        ) from exc
    with logs.asides_unheard():
        try:
            names = told.get("architectures") or []
            made: Any = getattr(transformers, names[0], None) if names else None
            if made is None:
                raise ModelError(
                    f"{folder}/config.json names the architecture {names}, which transformers does not have"
                )
            check_layers(told, len(locate_tensors(checkpoint)), f"{folder}/config.json")
            model: Any = made(transformers.AutoConfig.from_pretrained(folder))
        except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError) as exc:
            why = (str(exc).splitlines() or [repr(exc)])[0]
            raise ModelError(f"{folder}/config.json describes no model: {why}", hint="fetch it again") from exc
    model.tie_weights()
    if (folder / "generation_config.json").is_file() and hasattr(model, "generation_config"):
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model  # type: ignore[no-any-return]


def match(model: nn.Module, located: Mapping[str, StoredTensor], checkpoint: Path) -> dict[str, StoredTensor]:
    """Where every parameter's values are, by the first of its paths. Raises ModelError for what is missing or misshapen."""
    found: dict[str, StoredTensor] = {}
    missing: list[str] = []
    shapes = {path: tuple(p.shape) for path, p in model.named_parameters(remove_duplicate=False)}
    for slots in all_slots(model).values():
        place = _look_up(model, located, *(slot.path for slot in slots))
        path = slots[0].path
        if place is None:
            missing.append(path)
        elif place.shape != shapes[path]:
            raise ModelError(
                f"{place.path}: {place.name!r} has the shape {list(place.shape)}, the model needs {list(shapes[path])}",
                hint="the checkpoint belongs to another configuration",
            )
        else:
            found[path] = place
    if missing:
        raise ModelError(
            f"{checkpoint} has no values for {len(missing)} parameters, such as {', '.join(missing[:3])}",
            hint="the checkpoint belongs to another model, or its index is incomplete",
        )
    return found


def _look_up(model: nn.Module, located: Mapping[str, StoredTensor], *paths: str) -> StoredTensor | None:
    """The first of these there is. A checkpoint may hold the base model alone, or the model with its base's prefix."""
    prefix = f"{getattr(model, 'base_model_prefix', '') or ''}."
    names = (name for path in paths for name in (path, prefix + path, path.removeprefix(prefix)))
    return next((located[name] for name in names if name in located), None)


def replace_parameters(model: nn.Module, where: Mapping[str, StoredTensor]) -> None:
    """Meta parameters cannot be pointed at memory: put ones in their place that can, with the checkpoint's dtype."""
    for slots in all_slots(model).values():
        at = where[slots[0].path]
        fresh = nn.Parameter(placeholder(at.shape, torch_dtype(at), torch.device("cpu")), requires_grad=False)
        for slot in slots:
            slot.owner._parameters[slot.name] = fresh


def load_buffers(model: nn.Module, located: Mapping[str, StoredTensor]) -> None:
    for path, buffer in list(model.named_buffers()):
        at = _look_up(model, located, path)
        if at is not None:
            owner, _, own = path.rpartition(".")
            model.get_submodule(owner)._buffers[own] = stored_tensor(at).to(buffer.dtype, copy=True)


def _folder(checkpoint: Path) -> str:
    """Blocks are read where they are: the disk level is the checkpoint's own."""
    return str(checkpoint if checkpoint.is_dir() else checkpoint.parent)
