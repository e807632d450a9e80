"""Several processes and several devices: NCCL's place is taken by the device's own collectives, or by gloo's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.cuda.comm  # so that it is changed, too, and put back

from anytorch.run.ledger import Ledger
from anytorch.run.patches import Patches
from anytorch.run.place import NAME, Place
from anytorch.run.refusals import refusing

NCCL, GLOO = "nccl", "gloo"
GLOO_AS_NCCL = (2, 10, 0)  # the first NCCL that takes bfloat16 and averages, as gloo does
WHOLE_MODELS = "use DistributedDataParallel, or --device cpu"


def install(patches: Patches, place: Place, ledger: Ledger) -> None:
    if torch.distributed.is_available():
        _install_groups(patches, place, ledger)
        for name, change in LATER.items():
            if (module := sys.modules.get(name)) is not None:
                change(patches, place, module)
    _install_data_parallel(patches, place)


def _install_groups(patches: Patches, place: Place, ledger: Ledger) -> None:
    from anytorch.devices import staged_group

    group: Any = torch.distributed.distributed_c10d
    known = {} if place.host else group.Backend.default_device_backend_map
    instead = str(known.get(place.kind, GLOO if place.host else staged_group.NAME))
    waits_on_host = instead in (GLOO, staged_group.NAME)
    if instead == staged_group.NAME:
        staged_group.offer(place.kind)

    def translated(backend: Any) -> Any:
        if not isinstance(backend, str):
            return backend
        if backend.lower() == NCCL or f"{NAME}:{NCCL}" in backend.lower():
            ledger.redirect(f"the process group nccl, as {instead}")
            return instead
        return backend

    plain_init, plain_new = group.init_process_group, group.new_group

    def init_process_group(backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pg_options", None)
        if "device_id" in kwargs:  # it makes NCCL connect at once; others have nothing to connect
            real = place.of(kwargs.pop("device_id"))
            if real is not None and not waits_on_host:
                kwargs["device_id"] = real
        return plain_init(instead if backend is None else translated(backend), *args, **kwargs)

    def new_group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any) -> Any:
        return plain_new(ranks, timeout, translated(backend), *args, **kwargs)

    plain_barrier = group.barrier

    def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Any:
        return plain_barrier(group, async_op, None if waits_on_host else device_ids)

    for owner in (torch.distributed, group):
        patches.set(owner, "barrier", barrier)
        patches.set(owner, "init_process_group", init_process_group)
        patches.set(owner, "new_group", new_group)
        patches.set(owner, "is_nccl_available", lambda: True)
    parallel: Any = torch.nn.parallel.DistributedDataParallel
    plain_make = parallel.__init__

    def make(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **kwargs: Any
    ) -> None:
        if place.host:  # torch allows no device numbers for a module on the CPU
            device_ids = output_device = None
        plain_make(self, module, device_ids, output_device, *args, **kwargs)

    plain_check = parallel._check_comm_hook

    def check(self: Any, hook: Any) -> None:
        """torch lets CUDA alone reduce bfloat16 (`bf16_compress_hook`); gloo's collectives can as well."""
        try:
            plain_check(self, hook)
        except TypeError as exc:
            if not str(exc).startswith("BF16"):
                raise

    patches.set(parallel, "__init__", make)
    if instead == staged_group.NAME:  # gloo alone would run the hook in its threads: they hang when the group ends
        patches.set(parallel, "_check_comm_hook", check)
    if waits_on_host:
        patches.set(torch.cuda.nccl, "version", lambda: GLOO_AS_NCCL)


def _install_meshes(patches: Patches, place: Place, module: Any) -> None:
    """`init_device_mesh("cuda", …)` is a mesh of the stand-in's devices."""

    def translated(device_type: Any) -> Any:
        return place.kind if device_type == NAME else device_type

    mesh: Any = module.DeviceMesh
    plain_make, plain_init = mesh.__init__, module.init_device_mesh

    def make(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        plain_make(self, translated(device_type), *args, **kwargs)

    def init_device_mesh(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return plain_init(translated(device_type), *args, **kwargs)

    patches.set(mesh, "__init__", make)
    for owner in (module, torch.distributed):
        if getattr(owner, "init_device_mesh", None) is plain_init:
            patches.set(owner, "init_device_mesh", init_device_mesh)


def _install_shards(patches: Patches, place: Place, module: Any) -> None:
    """FullyShardedDataParallel takes the CPU only where it is told to; other devices need streams for it."""
    sharded: Any = module.FullyShardedDataParallel
    plain_make = sharded.__init__

    def make(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get("device_id") is None or place.of(kwargs["device_id"]) is not None:
            kwargs["device_id"] = place.real()
        plain_make(self, module, *args, **kwargs)

    if place.host:
        patches.set(sharded, "__init__", make)
    elif not place.has("Stream"):
        patches.set(sharded, "__init__", refusing("FullyShardedDataParallel", WHOLE_MODELS))


def _install_fully_shard(patches: Patches, place: Place, module: Any) -> None:
    if not place.host and not place.has("Stream"):
        patches.set(module, "fully_shard", refusing("fully_shard", WHOLE_MODELS))


# Modules of torch that are changed when they are there: at once where they are loaded, else when they are (`hooks`).
LATER: dict[str, Callable[[Patches, Place, Any], None]] = {
    "torch.distributed.device_mesh": _install_meshes,
    "torch.distributed.fsdp": _install_fully_shard,
    "torch.distributed.fsdp.fully_sharded_data_parallel": _install_shards,
}


def _install_data_parallel(patches: Patches, place: Place) -> None:
    """nn.DataParallel on one device is its module, with the inputs moved there."""
    parallel: Any = torch.nn.DataParallel
    if len(place.reals) > 1:
        return

    def make(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, dim: int = 0) -> None:
        torch.nn.Module.__init__(self)
        self.device_ids = [place.index_of(one) for one in (device_ids or [0])]
        self.output_device, self.dim = place.index_of(output_device), dim
        self.module = module.to(place.real())
        self.src_device_obj = place.real()

    def moved(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.cuda()  # of the stand-in
        if isinstance(value, (list, tuple)):
            items = [moved(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        return {key: moved(item) for key, item in value.items()} if isinstance(value, dict) else value

    def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*moved(inputs), **moved(kwargs))

    patches.set(parallel, "__init__", make)
    patches.set(parallel, "forward", forward)
    _install_parts(patches, place, moved)


def _install_parts(patches: Patches, place: Place, moved: Callable[[Any], Any]) -> None:
    """What DataParallel is made of, for programs that put it together themselves. On one device, a part is the whole."""

    def one(devices: Any) -> None:
        for device in [] if devices is None else devices:
            place.index_of(device)  # raises, as CUDA does, for one that is not there

    def replicate(network: Any, devices: Any, detach: bool = False) -> list[Any]:
        one(devices)
        return [network]

    def scatter(inputs: Any, target_gpus: Any, dim: int = 0) -> Any:
        one(target_gpus)
        return [moved(inputs)]

    def scatter_kwargs(inputs: Any, kwargs: Any, target_gpus: Any, dim: int = 0) -> Any:
        one(target_gpus)
        return (moved(inputs),), (moved(kwargs or {}),)

    def gather(outputs: Any, target_device: Any, dim: int = 0) -> Any:
        (output,) = outputs
        return output.view(1) if isinstance(output, torch.Tensor) and output.dim() == 0 else moved(output)

    def data_parallel(
        module: Any,
        inputs: Any,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        module_kwargs: Any = None,
    ) -> Any:
        one(device_ids)
        return module(*moved(inputs if isinstance(inputs, tuple) else (inputs,)), **moved(module_kwargs or {}))

    def share(tensor: Any, devices: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        one(devices)
        return (moved(tensor),)

    parts = (replicate, scatter, scatter_kwargs, gather, data_parallel)
    ours: dict[Any, Any] = {getattr(torch.nn.parallel.scatter_gather, part.__name__, None): part for part in parts}
    ours |= {getattr(torch.nn.parallel, part.__name__, None): part for part in parts}
    communication: Any = torch.nn.parallel.comm
    ours |= {
        communication.broadcast: share,
        communication.broadcast_coalesced: share,
        communication.scatter: share,
        communication.gather: lambda tensors, dim=0, destination=None, *, out=None: torch.cat(list(tensors), dim),
        communication.reduce_add: lambda inputs, destination=None: moved(sum(inputs[1:], inputs[0])),
        communication.reduce_add_coalesced: lambda inputs, destination=None, buffer_size=0: [
            moved(sum(each[1:], each[0])) for each in zip(*inputs, strict=True)
        ],
    }
    ours.pop(None)
    for name, module in list(sys.modules.items()):
        if name == "torch.cuda.comm" or f"{name}.".startswith("torch.nn.parallel."):
            for attribute, value in list(vars(module).items()):
                if (
                    callable(value)
                    and getattr(value, "__module__", "").startswith("torch.nn.parallel")
                    and value in ours
                ):
                    patches.set(module, attribute, ours[value])
