"""Several devices and processes: DataParallel on one device, and NCCL's place taken by gloo."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import until

from anytorch.errors import CannotStandIn


def test_data_parallel_on_one_device(cuda: Any) -> None:
    class Asking(cuda.nn.Module):  # type: ignore[misc,name-defined]
        def forward(self, given: Any) -> bool:
            return bool(given["x"][0].is_cuda)

    model = cuda.nn.Linear(3, 2)
    parallel = cuda.nn.DataParallel(model)
    x = cuda.randn(4, 3)
    assert parallel(x).is_cuda and parallel.device_ids == [0]
    assert cuda.nn.DataParallel(Asking())({"x": [x]}), "what it is given is on the device"
    assert cuda.allclose(parallel(x), model(x.cuda())) and list(parallel.state_dict()) == [
        "module.weight",
        "module.bias",
    ]
    assert cuda.nn.DataParallel(model, device_ids=[0]).cuda()(input=x).shape == (4, 2)


def test_the_parts_of_data_parallel(cuda: Any) -> None:
    parallel, comm = cuda.nn.parallel, cuda.cuda.comm
    model, x = cuda.nn.Linear(3, 2).cuda(), cuda.randn(4, 3)
    (part,) = parallel.scatter(x, [0])
    (replica,) = parallel.replicate(model, [0])
    expected = model(x.cuda())
    assert part.is_cuda and cuda.equal(parallel.gather(parallel.parallel_apply([replica], [(part,)]), 0), expected)
    assert cuda.equal(parallel.data_parallel(model, x, [0]), expected)
    assert parallel.gather([expected.sum()], 0).shape == (1,), "numbers come as a vector"
    assert comm.broadcast(x, [0])[0].is_cuda and comm.scatter(x, [0])[0].shape == x.shape
    assert comm.gather([part, part]).shape == (8, 3) and comm.reduce_add([part, part]).tolist() == (2 * x).tolist()
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        parallel.scatter(x, [0, 1])


def test_a_process_group(cuda: Any, device: str, tmp_path: Path) -> None:
    dist = cuda.distributed
    assert dist.is_nccl_available()
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1, device_id=cuda.device("cuda:0")
    )
    try:
        assert dist.get_backend() == {"cpu": "gloo", "webgpu": "staged"}[device]
        group = dist.new_group([0], backend="nccl")
        x = cuda.ones(2, device="cuda")
        dist.barrier(device_ids=[0])
        dist.all_reduce(x, group=group)
        dist.broadcast(x, 0)
        gathered = [cuda.zeros(2, device="cuda")]
        dist.all_gather(gathered, x)
        assert gathered[0].tolist() == x.tolist() == [1.0, 1.0]
        objects = [None]
        dist.all_gather_object(objects, {"a": 1})
        assert objects == [{"a": 1}]
        model = cuda.nn.parallel.DistributedDataParallel(cuda.nn.Linear(2, 1).cuda(), device_ids=[0])
        model(x[None]).sum().backward()
        assert model.module.weight.grad.tolist() == [[1.0, 1.0]] and model.module.weight.grad.is_cuda
    finally:
        dist.destroy_process_group()


# Not on the CPU: there the group is gloo's own, which hangs now and then when a model outlives it (torch's race).
@pytest.mark.parametrize("device", ["webgpu"], indirect=True)
def test_gradients_are_added_up_in_bfloat16(cuda: Any, tmp_path: Path) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    assert cuda.cuda.nccl.version() >= (2, 10)
    cuda.distributed.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = cuda.nn.parallel.DistributedDataParallel(cuda.nn.Linear(2, 1).cuda(), device_ids=[0])
        model.register_comm_hook(None, bf16_compress_hook)
        model(cuda.full((1, 2), 1.001, device="cuda")).sum().backward()
        assert model.module.weight.grad.tolist() == [[1.0, 1.0]], "rounded on the way"
        with pytest.raises(TypeError, match="hook must be callable"):
            model.register_comm_hook(None, "bf16")
    finally:
        cuda.distributed.destroy_process_group()


@pytest.mark.parametrize("device", ["webgpu"], indirect=True)
@pytest.mark.parametrize("how", ["find_unused_parameters", "static_graph", "late"])
def test_parameters_that_take_no_part(cuda: Any, tmp_path: Path, how: str) -> None:
    """torch notes in C++ which ones did, by way of page-locked memory, which a device written in Python cannot give."""

    class Half(cuda.nn.Module):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.used = cuda.nn.Linear(2, 1), cuda.nn.Linear(2, 1)

        def forward(self, x: Any) -> Any:
            return self.used(x)

    cuda.distributed.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        options = {} if how == "late" else {how: True}
        model = cuda.nn.parallel.DistributedDataParallel(Half().cuda(), device_ids=[0], **options)
        if how == "late":
            model._set_static_graph()
        names = [name for name, _ in model.named_parameters()]
        for step in range(3):
            model(cuda.ones(1, 2, device="cuda")).sum().backward()
            assert model.module.used.weight.grad.tolist() == [[step + 1.0] * 2]
            assert model.module.unused.weight.grad is None
        assert [name for name, _ in model.named_parameters()] == names and len(model.state_dict()) == 4
    finally:
        cuda.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP is switching", "ignore::FutureWarning")
def test_meshes_and_shards(cuda: Any, device: str, tmp_path: Path) -> None:
    dist = cuda.distributed
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        # torch keeps meshes, and with them gloo, for as long as the thread lives. A later test's child of a fork that
        # another thread made would end them there, and crash.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(_shard, cuda, device).result()
    finally:
        dist.destroy_process_group()


def _shard(cuda: Any, device: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    mesh = init_device_mesh("cuda", (1,))
    assert mesh.size() == 1
    model = cuda.nn.Linear(2, 1).cuda()
    if device != "cpu":
        for shard in (FullyShardedDataParallel, fully_shard):
            with pytest.raises(CannotStandIn, match=r"test_parallel\.py:.*needs CUDA itself"):
                shard(model)
        return
    whole = FullyShardedDataParallel(cuda.nn.Linear(2, 1).cuda(), device_id=cuda.cuda.current_device())
    fully_shard(model, mesh=mesh)
    for one in (whole, model):
        one(cuda.ones(3, 2, device="cuda")).sum().backward()
        assert next(one.parameters()).grad is not None


@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_over_processes(
    cuda: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, momentum: float | None
) -> None:
    """Two processes with the same batch, by a sum that doubles: as one process with the batch twice."""
    nn, dist = cuda.nn, cuda.distributed
    x, weight = cuda.randn(4, 3, 5) * 2 + 5, cuda.randn(4, 3, 5)
    expected = nn.BatchNorm1d(3, momentum=momentum)
    twice = cuda.cat([x, x]).requires_grad_()
    whole = expected(twice)
    (whole * cuda.cat([weight, weight])).sum().backward()
    layer = nn.SyncBatchNorm.convert_sync_batchnorm(nn.BatchNorm1d(3, momentum=momentum)).cuda()
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        nn.parallel.DistributedDataParallel(layer, device_ids=[0])  # which refuses such layers on a plain CPU
        monkeypatch.setattr(dist, "get_world_size", lambda group=None: 2)
        monkeypatch.setattr(dist, "all_reduce", lambda tensor, group=None: tensor.mul_(2))
        here = x.cuda().requires_grad_()
        made = layer(here)
        (made * weight.cuda()).sum().backward()
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()
    assert cuda.allclose(made.cpu(), whole[:4], atol=1e-5)
    assert cuda.allclose(here.grad.cpu(), twice.grad[:4], atol=1e-4)
    assert cuda.allclose(2 * layer.weight.grad.cpu(), expected.weight.grad, atol=1e-3)
    assert cuda.allclose(layer.running_mean.cpu(), expected.running_mean, atol=1e-5)
    assert cuda.allclose(layer.running_var.cpu(), expected.running_var, atol=1e-4)


def test_collectives_by_way_of_the_host(cpu_wheel: None, tmp_path: Path) -> None:
    """Two processes, as threads: what each gets from the other is what gloo gives for tensors of the host."""
    import datetime
    import threading

    import torch
    import torch.distributed as dist

    from anytorch.devices.staged_group import make

    store, results, wrong = dist.HashStore(), {}, []

    def work(rank: int) -> None:
        try:
            group = make(store, rank, 2, datetime.timedelta(seconds=60))
            mine = torch.tensor([rank + 1.0, 10.0])
            total, first = mine.clone(), mine.clone()
            group.allreduce([total]).wait()
            group.broadcast([first]).wait()
            everyone = [torch.zeros(2), torch.zeros(2)]
            group.allgather([everyone], [mine]).wait()
            flat, part = torch.zeros(4), torch.zeros(1)
            group._allgather_base(flat, mine).wait()
            group._reduce_scatter_base(part, mine).wait()
            swapped = torch.zeros(2)
            group.alltoall_base(swapped, mine, [], []).wait()
            group.allreduce_coalesced([mine.clone(), total.clone()]).wait()
            group.barrier().wait()
            told = [total, first, torch.stack(everyone).flatten(), flat, part, swapped]
            results[rank] = [one.tolist() for one in told]
            lone[rank] = [one.tolist() for one in _forms(group, rank)]
        except BaseException as exc:  # noqa: BLE001  (told below)
            wrong.append(exc)

    lone: dict[int, list[list[float]]] = {}
    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    for rank in range(2):
        total, first, everyone, flat, part, swapped = results[rank]
        assert total == [3.0, 20.0] and first == [1.0, 10.0] and everyone == flat == [1.0, 10.0, 2.0, 10.0]
        assert part == [[3.0], [20.0]][rank] and swapped == [[1.0, 2.0], [10.0, 10.0]][rank]
        assert lone[rank] == [[2.0, 10.0], [2.0, 10.0], [1.0, 10.0, 2.0, 10.0], *FORMS[rank]]


FORMS = [
    [[0.0, 1.0], [6.0, 7.0], [2.0, 10.0], [2.0, 10.0]],
    [[2.0, 3.0, 4.0, 5.0], [8.0, 9.0, 10.0, 11.0], [1.0, 10.0], [1.0, 10.0]],
]


def _forms(group: Any, rank: int) -> list[Any]:
    """What torch's own code asks for less often: one tensor in place of a list, lists of any shapes, sending both ways."""
    import torch
    import torch.distributed as dist

    mine = torch.tensor([rank + 1.0, 10.0])
    highest, second, everyone, part = mine.clone(), mine.clone(), [torch.zeros(2), torch.zeros(2)], torch.zeros(2)
    group.allreduce(highest, dist.ReduceOp.MAX).wait()
    group.broadcast(second, 1).wait()
    group.allgather(everyone, mine).wait()
    group.reduce_scatter(part, [mine[:1].repeat(2), mine], dist.ReduceOp.MAX).wait()
    assert part.tolist() == [[2.0, 2.0], [2.0, 10.0]][rank]
    group.reduce(total := torch.ones(2) * 10, 0, dist.ReduceOp.SUM).wait()
    assert rank or total.tolist() == [20.0, 20.0]
    group.reduce_scatter_tensor_coalesced([part], [torch.cat([mine, mine])]).wait()
    group.allgather_into_tensor_coalesced([flat := torch.zeros(4)], [mine]).wait()
    group.allgather_coalesced([[torch.zeros(2)], [last := torch.zeros(2)]], [mine]).wait()
    assert part.tolist() == [3.0, 20.0] and flat.tolist() == [1.0, 10.0, 2.0, 10.0] and last.tolist() == [2.0, 10.0]
    sizes, start = [2, 4], 6.0 * rank  # process 0 gets two numbers from each, process 1 four
    inputs = list((torch.arange(6.0) + start).split(sizes))
    swapped = [torch.zeros(sizes[rank]), torch.zeros(1, sizes[rank])]
    group.alltoall(swapped, inputs).wait()
    assert swapped[1].shape == (1, sizes[rank])
    got, sent = torch.zeros(2), group.send([mine], 1 - rank, 0)
    group.recv([got], 1 - rank, 0).wait()
    sent.wait()
    sent = group.send([mine], 1 - rank, 0)
    arriving = group.recv_anysource([unasked := torch.zeros(2)], 0)
    assert arriving.wait() and arriving.is_completed() and arriving._source_rank() == 1 - rank
    sent.wait()
    return [highest, second, torch.stack(everyone).flatten(), *(one.flatten() for one in swapped), got, unasked]


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted in /proc")
def test_a_group_leaves_no_thread_to_be_ended_by_python(cpu_wheel: None) -> None:
    """One that still holds a tensor when Python ends aborts the process; models keep their group until then."""
    import datetime

    import torch
    import torch.distributed as dist

    from anytorch.devices.staged_group import _end_all, make

    def threads() -> set[str]:
        return {path.name for path in Path("/proc/self/task").iterdir()}

    before = threads()
    groups = [make(dist.HashStore(), 0, 1, datetime.timedelta(seconds=60)) for _ in range(2)]
    for group in groups:
        group.allreduce([torch.ones(2)]).wait()
    assert len(threads() - before) >= 2
    groups[0].shutdown()
    assert threads() - before
    with pytest.raises(RuntimeError, match="no collective may follow destroy_process_group"):
        groups[0].allreduce([torch.ones(2)])
    _end_all()
    until(
        lambda: not threads() - before, "the threads to end"
    )  # the system lists one a moment longer than it is waited for
