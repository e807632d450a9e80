"""DistributedDataParallel under torchrun: nccl, a device for each rank, a sampler, a checkpoint that rank 0 writes."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
rank, world, local_rank = dist.get_rank(), dist.get_world_size(), int(os.environ["LOCAL_RANK"])
if torch.cuda.is_available():
    device = f"cuda:{local_rank % torch.cuda.device_count()}"
    torch.cuda.set_device(device)
else:
    device = "cpu"
torch.manual_seed(5)
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if os.environ.get("SYNC") else model
model = model.to(device)
model = DDP(model, device_ids=[torch.cuda.current_device()] if torch.cuda.is_available() else None)
data = TensorDataset(torch.randn(16, 6), torch.randn(16, 1))
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=4, sampler=sampler, pin_memory=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        loss = nn.functional.mse_loss(model(x), y)
        optimizer.zero_grad(set_to_none=True)
        with model.no_sync() if epoch == 99 else torch.enable_grad():
            loss.backward()
        optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    if rank == 0:
        print(f"= epoch {epoch} loss {total.item() / world:.4f}", flush=True)
gathered = [torch.zeros(1, device=device) for _ in range(world)]
dist.all_gather(gathered, torch.full((1,), float(rank), device=device))
assert [g.item() for g in gathered] == [float(r) for r in range(world)]
folder = tempfile.gettempdir() if rank else tempfile.mkdtemp()
named = [folder]
dist.broadcast_object_list(named, src=0)
path = os.path.join(named[0], "model.pt")
if rank == 0:
    torch.save(model.module.state_dict(), path)
dist.barrier()
loaded = torch.load(path, map_location={"cuda:0": device}, weights_only=True)
assert torch.equal(loaded["0.weight"], model.module[0].weight.detach()) and str(loaded["0.weight"].device) == str(
    model.module[0].weight.device
)
dist.barrier()
dist.destroy_process_group()
