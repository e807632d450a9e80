"""DistributedDataParallel under torchrun where each rank uses other parameters, with uneven numbers of batches."""

import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(3, 4)
        self.trunk = nn.Linear(4, 4)
        self.branches = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))  # nobody ever uses the last one

    def forward(self, x, branch):
        return self.branches[branch](torch.relu(self.trunk(x + self.rows(torch.arange(3, device=x.device)))))


def train(rank, device, static, **options):
    torch.manual_seed(0)
    model = DDP(Branches().to(device), find_unused_parameters=not static, static_graph=static, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(10 + rank)
    with model.join(enable=not static):
        for step in range(3 if static else 3 + rank):
            x = torch.randn(3, 4).to(device)
            if step == 0 and not static:
                with model.no_sync():
                    model(x, rank).pow(2).mean().backward()
                continue
            model(x, 0 if static else (rank + step // 2) % 2).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(p.grad is None for p in model.module.branches[2].parameters())
    total = sum(p.detach().cpu().abs().sum() for p in model.parameters())
    if rank == 0:
        print(f"= static {static:d}, {len(options)} options: {total.item():.4f}", flush=True)


def exchange(rank, device):
    received, mine = torch.zeros(1, device=device), torch.full((1,), float(rank), device=device)
    operations = [dist.P2POp(dist.irecv, received, 1 - rank), dist.P2POp(dist.isend, mine, 1 - rank)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    parts = [torch.zeros(2, device=device) for _ in range(2)]
    dist.all_to_all(parts, [torch.full((2,), rank + to / 2, device=device) for to in range(2)])
    if rank == 0:
        print(f"= got {received.item():.1f} and {[part.tolist() for part in parts]}", flush=True)


def main():
    dist.init_process_group(backend="nccl" if torch.cuda.is_available() else "gloo")
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    train(dist.get_rank(), device, static=False)
    train(dist.get_rank(), device, static=False, gradient_as_bucket_view=True)
    train(dist.get_rank(), device, static=True)
    exchange(dist.get_rank(), device)
    time.sleep(1)  # gloo's threads let go of the last tensors: at the end of Python they would abort it, in plain torch
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
