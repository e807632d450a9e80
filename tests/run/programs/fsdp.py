"""Sharded parameters under torchrun: a mesh of "cuda" devices, fully_shard, and the FSDP of before."""

import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard

local_rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(local_rank % torch.cuda.device_count())
dist.init_process_group("cpu:gloo,cuda:nccl")
mesh = init_device_mesh("cuda", (dist.get_world_size(),))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).cuda()
x = torch.randn(4, 8, device="cpu").cuda()
expected = model(x).pow(2).mean()
for layer in model:
    if isinstance(layer, nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for step in range(2):
    loss = model(x).pow(2).mean()
    assert step or abs(loss.item() - expected.item()) < 1e-4
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0:
    print(f"= loss {loss.item():.4f}", flush=True)
torch.manual_seed(0)
older = FSDP(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).cuda(), device_id=torch.cuda.current_device())
optimizer = torch.optim.SGD(older.parameters(), lr=0.1)
older(x).pow(2).mean().backward()
optimizer.step()
if dist.get_rank() == 0:
    print(f"= loss {older(x).pow(2).mean().item():.4f}", flush=True)
else:
    older(x)
dist.barrier()
dist.destroy_process_group()
