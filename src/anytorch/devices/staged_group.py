"""Collectives for a device that has none of its own: gloo's, on copies in the host's memory."""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

NAME = "staged"  # of the back end, among torch's
OPERATIONS = (dist.ReduceOp, type(dist.ReduceOp.SUM))
_open: weakref.WeakSet[StagedGroup] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    """Close all groups, for programs that never call `destroy_process_group`."""
    for group in list(_open):
        group.shutdown()


def offer(kind: str) -> None:
    """Make this kind of group torch's choice for a kind of device that has none. There is no way to undo it."""
    backend: Any = dist.Backend
    if NAME.upper() not in backend._plugins:
        backend.register_backend(NAME, make, devices=["cpu", kind])


def make(store: Any, rank: int, size: int, timeout: Any) -> StagedGroup:
    """What torch calls to make a group of this kind."""
    return StagedGroup(store, rank, size, timeout)


def _done(result: Any) -> Any:
    """A finished Work: the collective was done before it is returned."""
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


def _on_host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu() if tensor.device.type != "cpu" else tensor


def _listed(tensors: Any) -> list[Any]:
    """The groups' methods take one tensor, too, where most callers give a list."""
    return [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)


def _options(make: Callable[[], Any], given: Any, operation: Any = None) -> Any:
    """The options of a call. Callers that give one tensor give a rank or an operation in their place."""
    if given is not None and not isinstance(given, (int, *OPERATIONS)):
        return given
    options = make()
    if isinstance(given, int):
        options.rootRank = given
    elif given is not None:
        operation = given
    if operation is not None:
        options.reduceOp = operation
    return options


def _back(tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
    for tensor, copied in zip(tensors, copies, strict=True):
        if tensor is not copied:
            tensor.detach().copy_(copied)


class Receiving(dist.Work):
    """What a process gets from another: `wait` copies it to where it belongs."""

    def __init__(self, work: Any, tensors: Sequence[torch.Tensor], copies: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._work, self._tensors, self._copies = work, tensors, copies

    def wait(self, timeout: Any = None) -> bool:
        self._work.wait(*[] if timeout is None else [timeout])
        _back(self._tensors, self._copies)
        self._tensors = self._copies = ()  # copied once: the program may write there afterwards
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    def _source_rank(self) -> int:
        return int(self._work._source_rank())


class StagedGroup(dist.ProcessGroup):
    """A process group whose tensors may be on any device. Every call but `send` and `recv` waits until it is done."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._name = ""
        self._used: Any = dist.ProcessGroupGloo(store, rank, size, timeout)
        _open.add(self)

    @property
    def _gloo(self) -> Any:
        if self._used is None:
            raise RuntimeError("this process group is closed: no collective may follow destroy_process_group()")
        return self._used

    def shutdown(self) -> None:
        """End gloo's threads, by giving up the last reference to it. No collective may follow.

        Such a thread lets go of its tensors shortly after `wait` has returned. When Python is ending by then, it ends that
        thread amid C++ ("terminate called without an active exception"), and the process with it.
        """
        self._used = None

    # torch keeps the name with the group's back ends, and a group in Python has none. Device meshes ask for it.
    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupName(self) -> str:
        return self._name

    def getBackendName(self) -> str:
        return NAME  # for "gloo" torch would look for gloo itself behind it

    def _in_place(self, call: Callable[..., Any], tensors: Any, *options: Any) -> Any:
        tensors = _listed(tensors)
        copies = [_on_host(tensor) for tensor in tensors]
        call(copies, *options).wait()
        _back(tensors, copies)
        return _done(tensors)

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:
        return self._in_place(self._gloo.allreduce, tensors, _options(dist.AllreduceOptions, opts))

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        for tensor in tensors:
            options = dist.AllreduceOptions()
            if opts is not None:
                options.reduceOp = opts.reduceOp
            self.allreduce([tensor], options)
        return _done(list(tensors))

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:
        return self._in_place(self._gloo.broadcast, tensors, _options(dist.BroadcastOptions, opts))

    def reduce(self, tensors: Any, opts: Any = None, op: Any = None) -> Any:
        return self._in_place(self._gloo.reduce, tensors, _options(dist.ReduceOptions, opts, op))

    def barrier(self, opts: Any = None) -> Any:
        self._gloo.barrier().wait()
        return _done(None)

    def allgather(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        if isinstance(inputs, torch.Tensor):
            output_lists, inputs = [output_lists], [inputs]
        copies = [[_on_host(tensor) for tensor in outputs] for outputs in output_lists]
        self._gloo.allgather(copies, [_on_host(tensor) for tensor in inputs]).wait()
        for outputs, copied in zip(output_lists, copies, strict=True):
            _back(outputs, copied)
        return _done(output_lists)

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Any:
        parts = list(output.chunk(self.size()))
        return self.allgather([[part.view(source.shape) for part in parts]], [source], opts)

    all_gather_single = _allgather_base  # its name since torch 2.13

    def allgather_coalesced(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        for place, source in enumerate(inputs):  # a list of each process's tensors
            self.allgather([[outputs[place] for outputs in output_lists]], [source])
        return _done(output_lists)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, source in zip(outputs, inputs, strict=True):
            self._allgather_base(output, source)
        return _done(list(outputs))

    all_gather_single_coalesced = allgather_into_tensor_coalesced  # its name since torch 2.13

    def gather(self, output_lists: Any, inputs: Any, opts: Any = None) -> Any:
        copies = [[_on_host(tensor) for tensor in outputs] for outputs in output_lists]
        options = opts if opts is not None else dist.GatherOptions()
        self._gloo.gather(copies, [_on_host(tensor) for tensor in inputs], options).wait()
        for outputs, copied in zip(output_lists, copies, strict=True):
            _back(outputs, copied)
        return _done(output_lists)

    def scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> Any:
        copies = [_on_host(tensor) for tensor in outputs]
        inputs = [[_on_host(tensor) for tensor in listed] for listed in input_lists]
        self._gloo.scatter(copies, inputs, opts if opts is not None else dist.ScatterOptions()).wait()
        _back(outputs, copies)
        return _done(list(outputs))

    def reduce_scatter(self, outputs: Any, input_lists: Any, opts: Any = None) -> Any:
        """By a sum over everything, of which each process keeps its part: gloo has no more direct way."""
        if isinstance(outputs, torch.Tensor):
            outputs, input_lists = [outputs], [input_lists]
        options = dist.AllreduceOptions()
        if opts is not None:
            options.reduceOp = opts if isinstance(opts, OPERATIONS) else opts.reduceOp
        for output, inputs in zip(outputs, input_lists, strict=True):
            copies = [_on_host(tensor).clone() for tensor in inputs]
            for copied in copies:
                self._gloo.allreduce([copied], options).wait()
            output.detach().copy_(copies[self.rank()].view(output.shape))
        return _done(list(outputs))

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, opts: Any = None) -> Any:
        return self.reduce_scatter([output], [list(source.chunk(self.size()))], opts)

    reduce_scatter_single = _reduce_scatter_base  # its name since torch 2.13

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        for output, source in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, source, opts)
        return _done(list(outputs))

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced  # its name since torch 2.13

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> Any:
        """Tensors of any shapes; gloo has this for two flat ones."""
        copies = [torch.empty(output.shape, dtype=output.dtype, device="cpu") for output in outputs]
        flat = torch.empty(sum(copied.numel() for copied in copies), dtype=copies[0].dtype, device="cpu")
        source = torch.cat([_on_host(tensor).reshape(-1) for tensor in inputs])
        sizes = [copied.numel() for copied in copies]
        self._gloo.alltoall_base(flat, source, sizes, [tensor.numel() for tensor in inputs]).wait()
        _back(outputs, [part.view(copied.shape) for part, copied in zip(flat.split(sizes), copies, strict=True)])
        return _done(list(outputs))

    def alltoall_base(
        self, output: torch.Tensor, source: torch.Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> Any:
        copied = _on_host(output)
        self._gloo.alltoall_base(copied, _on_host(source), output_sizes, input_sizes).wait()
        _back([output], [copied])
        return _done([output])

    all_to_all_single = alltoall_base  # its name since torch 2.13

    # These two return at once, or two processes that send to each other would wait for each other.

    def send(self, tensors: Any, target: int, tag: int = 0) -> Any:
        return self._gloo.send([_on_host(tensor) for tensor in tensors], target, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        copies = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
        return Receiving(self._gloo.recv(copies, source, tag), tensors, copies)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> Any:
        copies = [torch.empty_like(tensor, device="cpu") for tensor in tensors]
        return Receiving(self._gloo.recv_anysource(copies, tag), tensors, copies)
