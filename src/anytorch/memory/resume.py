"""Checkpoints of a training run that survive a kill: written beside, renamed when complete, read back to the bit.

    save_training("run", optimizer, step=100, extra={"epoch": 2})
    state = resume_training("run", optimizer)      # None if there is nothing to resume

A checkpoint is a folder `step-00000100` with the model and the optimizer's states as safetensors, `training.json` with the
options, the random states and what the caller wants to know again, and `sums.json` with the checksum of every file. Blocks
are written one after another. Nothing is removed before the new checkpoint is on the disk; and no model is touched before a
checkpoint was verified: where one is damaged, the one before it is used.
"""

from __future__ import annotations

import base64
import json
import os
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from anytorch import limits, logs
from anytorch.child_process import is_alive
from anytorch.errors import ModelError
from anytorch.files import NOT_THERE, parse_json, replace_file, sync_folder
from anytorch.memory.block_updates import OF
from anytorch.memory.manifest import MANIFEST, Sum, problem_of, write_manifest
from anytorch.memory.reader import Reader
from anytorch.memory.saving import write_shard
from anytorch.memory.training import TieredOptimizer
from anytorch.safetensors_files import SINGLE, file_in, locate_tensors, read_header

log = logs.logger(__name__)
FORMAT = 2
WITHOUT_SUMS = 1  # what earlier versions wrote
PREFIX, DAMAGED = "step-", "damaged-"
MOST_DAMAGED = 1000  # that are put aside under one name
RESIDENT = "resident.safetensors"
META = "training.json"
READ = (
    f"model/{SINGLE}",
    f"optimizer/{RESIDENT}",
)  # opened wherever they are there; all others are named by files with sums
KEYS = {
    "step": int, "param_groups": list, "blocks": dict, "numbers": dict, "resident_numbers": dict, "random": dict,
}  # fmt: skip


def save_training(
    folder: str | Path, optimizer: TieredOptimizer, *, step: int, extra: Any = None, keep: int = 2
) -> Path:
    """Write a complete checkpoint and remove all but it and the newest `keep - 1`. `extra` must be JSON.

    Call it between steps. With `keep=1` there is none to go back to if the disk damages it.
    """
    limits.COUNT.check("keep", keep), limits.COUNT_OR_NONE.check("step", step)
    optimizer.wait()  # raises if a step that ran beside the device failed: half of one is not worth keeping
    optimizer.check_whole()
    root = Path(folder)
    partial = root / f".{PREFIX}{step:08d}.{os.getpid()}.partial"
    try:
        root.mkdir(parents=True, exist_ok=True)
        remove_unfinished(root)
        partial.mkdir()
        sums: dict[Path, Sum] = {}
        optimizer.fitted.save(partial / "model", sums=sums)
        states = partial / "optimizer"
        states.mkdir()
        blocks = {name: f"{number:06d}.safetensors" for number, name in enumerate(optimizer.states.blocks())}
        for name, file in blocks.items():
            sums[states / file] = write_shard(states / file, optimizer.states.take(name))
        tensors, numbers = _resident_states(optimizer)
        if tensors:
            sums[states / RESIDENT] = write_shard(states / RESIDENT, tensors)
        meta = {
            "format": FORMAT,
            "step": step,
            "param_groups": optimizer.state_dict_groups(),
            "blocks": blocks,
            "numbers": optimizer.states.numbers,
            "resident_numbers": numbers,
            "random": _random_state(),
            "extra": extra,
        }
        replace_file(partial / META, json.dumps(meta, indent=1).encode())
        write_manifest(partial, sums)
        for written in (partial / "model", states, partial):
            sync_folder(written)
        target = free_name(root, step)
        partial.rename(target)
        sync_folder(root)
    except OSError as exc:
        shutil.rmtree(partial, ignore_errors=True)
        raise ModelError(
            f"the checkpoint of step {step} cannot be written to {root}: {exc.strerror or exc}",
            hint="those before it are kept: free space there, or name another folder",
        ) from exc
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    found = checkpoints(root)
    if found and found[-1] != target:
        log.warning(
            "%s holds %s, of a later step than the one just saved: resuming would start from that one. "
            "Name another folder for another run, or remove it",
            root, found[-1].name,
        )  # fmt: skip
    others = [checkpoint for checkpoint in found if checkpoint != target]
    for old in others[: max(0, len(others) - (keep - 1))]:
        remove_whole(old)
    return target


def remove_whole(checkpoint: Path) -> None:
    """Take a checkpoint's name from it first, on the disk too: half of one must not look like one."""
    gone = checkpoint.with_name(f".{checkpoint.name}.{os.getpid()}.partial")
    try:
        checkpoint.rename(gone)
        sync_folder(gone.parent)  # else a power loss may leave the name, and not the files
    except OSError as exc:  # it stays, whole
        log.warning("the old checkpoint %s cannot be removed: %s", checkpoint, exc.strerror)
        return
    shutil.rmtree(gone, ignore_errors=True)


def resume_training(folder: str | Path, optimizer: TieredOptimizer) -> dict[str, Any] | None:
    """Put weights, states, options and random numbers back as the newest checkpoint has them: {"step": …, "extra": …}.

    Every file is compared with its checksum first. A damaged checkpoint is put aside as `damaged-step-…`, with a warning,
    and the one before it is used; where all are damaged, ModelError says so and nothing was changed. A step that is still
    under way, or failed, is discarded with all gradients.
    """
    found = checkpoints(Path(folder))
    if not found:
        return None
    newest, meta = newest_whole(found)
    check_belongs(newest, meta, optimizer)
    with optimizer.replacing(), closing(Reader()) as reader:
        _load_weights(optimizer, newest / "model", reader)
        _give_streamed(optimizer, newest / "optimizer", meta, reader)
        resident = newest / "optimizer" / RESIDENT
        tensors = reader.read_tensors(read_header(resident)[0].values()) if resident.exists() else {}
        _give_resident(optimizer, tensors, meta["resident_numbers"])
    for group, options in zip(optimizer.param_groups, meta["param_groups"], strict=True):  # as many: `check_belongs`
        group.update(
            {key: tuple(value) if isinstance(group.get(key), tuple) else value for key, value in options.items()}
        )
    _set_random_state(meta["random"])
    return {"step": meta["step"], "extra": meta["extra"]}


def newest_whole(found: Sequence[Path]) -> tuple[Path, dict[str, Any]]:
    """The newest undamaged checkpoint and what its training.json says. Raises ModelError if there is none."""
    wrong: dict[Path, str] = {}
    for checkpoint in reversed(found):
        meta, why = read_verified(checkpoint)
        if meta is not None:
            for damaged, reason in wrong.items():
                log.warning(
                    "the checkpoint %s is damaged (%s): put aside as %s, going back to %s",
                    damaged, reason, _put_aside(damaged).name, checkpoint.name,
                )  # fmt: skip
            return checkpoint, meta
        wrong[checkpoint] = why
    told = "; ".join(f"{checkpoint}: {why}" for checkpoint, why in wrong.items())
    raise ModelError(
        f"no checkpoint can be resumed from: {told}",
        hint="nothing was changed; restore a copy of it, or remove it to start over",
    )


def read_verified(checkpoint: Path) -> tuple[dict[str, Any] | None, str]:
    """What training.json says once all files were compared with their checksums; or None, and what is wrong.

    Raises ModelError where a file cannot be read now (a network that is away, rights): it may be whole all the same.
    """
    try:
        return _verified(checkpoint)
    except OSError as exc:
        raise ModelError(
            f"the checkpoint {checkpoint} cannot be read: {exc.strerror or exc}",
            hint="nothing was changed: try again when its disk answers; to go back to the one before, rename this folder",
        ) from exc


def _verified(checkpoint: Path) -> tuple[dict[str, Any] | None, str]:
    try:
        meta = parse_json((checkpoint / META).read_bytes())
        version = meta["format"]
    except NOT_THERE as exc:
        return None, f"{META} cannot be read: {exc.strerror}"
    except (ValueError, KeyError, TypeError) as exc:
        return None, f"{META} is damaged ({exc!r})"
    if version == WITHOUT_SUMS and not (checkpoint / MANIFEST).exists():
        log.info("the checkpoint %s was written by an earlier version, without checksums", checkpoint)
    elif why := problem_of(checkpoint, READ):
        return None, why
    elif version != FORMAT:
        raise ModelError(f"the checkpoint {checkpoint} has format {version!r}, not {FORMAT}: a later version wrote it")
    absent = [name for name, kind in KEYS.items() if not isinstance(meta.get(name), kind)]
    return (None, f"{META} has no valid {absent[0]!r}") if absent else (meta, "")


def check_belongs(checkpoint: Path, meta: Mapping[str, Any], optimizer: TieredOptimizer) -> None:
    """Raise ModelError, before anything is changed, for the checkpoint of another model or optimizer."""
    if len(meta["param_groups"]) != len(optimizer.param_groups):
        raise ModelError(
            f"{checkpoint} has {len(meta['param_groups'])} groups of parameters, the optimizer {len(optimizer.param_groups)}"
        )
    located = locate_tensors(checkpoint / "model")
    for group in optimizer.fitted.found.groups.values():
        for path, tensor in group.tensors().items():
            if path not in located:
                raise ModelError(f"{checkpoint} has no tensor {path!r}: it is another model's checkpoint")
            if located[path].shape != tuple(tensor.shape):
                raise ModelError(
                    f"{checkpoint}: {path!r} has the shape {list(located[path].shape)}, the model's has {list(tensor.shape)}"
                )


def _put_aside(checkpoint: Path) -> Path:
    """Its new name, by which it does not count any more; or its own, where nothing can be renamed."""
    name = DAMAGED + checkpoint.name
    names = (name, *(f"{name}-{again}" for again in range(1, MOST_DAMAGED)))
    try:
        target = next((checkpoint.with_name(one) for one in names if not checkpoint.with_name(one).exists()), None)
        return checkpoint if target is None else checkpoint.rename(target)
    except OSError as exc:
        log.info("%s cannot be renamed: %s", checkpoint, exc.strerror)
        return checkpoint


def free_name(root: Path, step: int) -> Path:
    """step-00000006, or step-00000006.3 where that step has up to .2: the newest of a step has the highest number."""
    orders = map(_order, checkpoints(root))
    taken = [order[1] if len(order) > 1 else 0 for order in orders if order[0] == step]
    name = f"{PREFIX}{step:08d}"
    return root / (f"{name}.{max(taken) + 1}" if taken else name)


def checkpoints(root: Path) -> list[Path]:
    """Return the complete checkpoints, oldest first: only those have their name."""
    return sorted(filter(_order, root.glob(f"{PREFIX}*")), key=_order) if root.is_dir() else []


def _order(checkpoint: Path) -> tuple[int, ...]:
    """Step and number of a checkpoint's name, to sort by (as text, .10 would come before .2); () for another name."""
    parts = checkpoint.name.removeprefix(PREFIX).split(".")
    return tuple(map(int, parts)) if all(part.isdecimal() for part in parts) else ()


def remove_unfinished(root: Path) -> None:
    """Remove what killed processes left half-written; what a process is still writing stays."""
    for folder in root.glob(f".{PREFIX}*.partial"):
        number = folder.name.split(".")[-2]
        owner = int(number) if number.isdecimal() else os.getpid()
        if owner == os.getpid() or not is_alive(owner):
            shutil.rmtree(folder, ignore_errors=True)


def _load_weights(optimizer: TieredOptimizer, folder: Path, reader: Reader) -> None:
    located = locate_tensors(folder)
    fit = optimizer.fitted
    homes = fit.plan.homes
    for name, group in fit.found.groups.items():
        missing = [path for path in group.paths if path not in located]
        if missing:
            raise ModelError(f"{folder} has no tensor {missing[0]!r}: it is another model's checkpoint")
        values = reader.read_tensors(located[path] for path in group.paths)
        if homes[name] == "device":
            for path, parameter in group.tensors().items():
                parameter.data.copy_(values[path])
        else:
            fit.write_back(name, values)
    staying = {fit.found.slots[id(parameter)][0].path: parameter.data for parameter in fit.found.staying}
    buffers = {path: buffer for path, buffer in fit.model.named_buffers() if path in located}
    for path, target in (staying | buffers).items():
        target.copy_(reader.read_tensors([located[path]])[path])
    fit.mover.forget_all()


def _resident_states(optimizer: TieredOptimizer) -> tuple[dict[str, torch.Tensor], dict[str, dict[str, Any]]]:
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, dict[str, Any]] = {}
    for index, parameter in enumerate(optimizer.in_order()):
        for key, value in optimizer.state_of(parameter).items() if optimizer.is_resident(parameter) else ():
            if isinstance(value, torch.Tensor):
                tensors[f"{index}{OF}{key}"] = value
            else:
                numbers.setdefault(str(index), {})[key] = value
    return tensors, numbers


def _give_resident(
    optimizer: TieredOptimizer, tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Mapping[str, Any]]
) -> None:
    order, states = optimizer.in_order(), _by_owner(tensors, numbers)
    if any(int(index) >= len(order) for index in states):
        raise ModelError("the checkpoint has states of more parameters than this optimizer: it is another model's")
    optimizer.give_states((order[int(index)], state) for index, state in states.items())


def _give_streamed(optimizer: TieredOptimizer, folder: Path, meta: Mapping[str, Any], reader: Reader) -> None:
    """Give streamed parameters their states, by path: with another budget than when they were saved, blocks differ."""
    found = optimizer.fitted.found
    parameters = {
        path: parameter
        for group in found.groups.values()
        for path, parameter in group.tensors().items()
        if isinstance(parameter, torch.nn.Parameter)
    }
    optimizer.states.clear()
    for name in {**meta["blocks"], **meta["numbers"]}:
        file = meta["blocks"].get(name)
        stored = read_header(file_in(folder, file, folder.parent / META))[0] if file else {}
        tensors = reader.read_tensors(stored.values())
        states = _by_owner(tensors, meta["numbers"].get(name, {}))
        unknown = [path for path in states if path not in parameters]
        if unknown:
            raise ModelError(f"{folder} has a state of {unknown[0]!r}: it is another model's checkpoint")
        optimizer.give_states((parameters[path], state) for path, state in states.items())


def _by_owner(
    tensors: Mapping[str, torch.Tensor], numbers: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    states: dict[str, dict[str, Any]] = {owner: dict(values) for owner, values in numbers.items()}
    for name, tensor in tensors.items():
        owner, key = name.split(OF)
        states.setdefault(owner, {})[key] = tensor.clone() if not tensor.dim() else tensor
    return states


def _random_state() -> dict[str, Any]:
    """Return torch's random state on the CPU and the accelerator, Python's, and NumPy's if it is in use, as JSON."""
    states: dict[str, Any] = {"torch": _text(torch.get_rng_state()), "python": random.getstate()}
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = [kind, [int(key) for key in keys], *rest]
    accelerator = _accelerator()
    if accelerator is not None:
        states["accelerator"] = _text(accelerator.get_rng_state())
    return states


def _accelerator() -> Any:
    """torch's module of the accelerator there is, or None."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if found is None else getattr(torch, found.type)


def _set_random_state(states: Mapping[str, Any]) -> None:
    torch.set_rng_state(_bytes(states["torch"]))
    version, numbers, gauss = states["python"]
    random.setstate((version, tuple(numbers), gauss))
    if "numpy" in states:
        import numpy

        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))
    accelerator = _accelerator()
    if "accelerator" in states and accelerator is not None:
        accelerator.set_rng_state(_bytes(states["accelerator"]))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.cpu().tolist())).decode()


def _bytes(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
