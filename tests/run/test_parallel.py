"""Several devices and processes: DataParallel on one device, and NCCL's place taken by gloo."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_data_parallel_on_one_device(cuda: Any) -> None:
    model = cuda.nn.Linear(3, 2)
    parallel = cuda.nn.DataParallel(model)
    x = cuda.randn(4, 3)
    assert parallel(x).is_cuda and parallel.device_ids == [0]
    assert cuda.allclose(parallel(x), model(x.cuda())) and list(parallel.state_dict()) == [
        "module.weight",
        "module.bias",
    ]
    assert cuda.nn.DataParallel(model, device_ids=[0]).cuda()(input=x).shape == (4, 2)


def test_a_process_group(cuda: Any, device: str, tmp_path: Path) -> None:
    dist = cuda.distributed
    assert dist.is_nccl_available()
    dist.init_process_group(
        "nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1, device_id=cuda.device("cuda:0")
    )
    try:
        assert dist.get_backend() == "gloo"
        group = dist.new_group([0], backend="nccl")
        x = cuda.ones(2, device="cuda")
        dist.barrier(device_ids=[0])
        if device == "cpu":  # gloo moves the host's memory alone
            dist.all_reduce(x, group=group)
            model = cuda.nn.parallel.DistributedDataParallel(cuda.nn.Linear(2, 1).cuda(), device_ids=[0])
            model(x[None]).sum().backward()
            assert model.module.weight.grad.tolist() == [[1.0, 1.0]]
        assert x.tolist() == [1.0, 1.0]
    finally:
        dist.destroy_process_group()
