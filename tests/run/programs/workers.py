"""DataLoaders with worker processes of every kind, pinned batches, seeds per worker, and a collate function."""

import random

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Data(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        assert get_worker_info() is not None
        return {"x": torch.full((3,), float(i)), "y": i, "name": f"n{i}"}


def seed_worker(worker_id):
    seed = torch.initial_seed() % 2**32
    np.random.seed(seed)
    random.seed(seed)


def collate(batch):
    return {"x": torch.stack([b["x"] for b in batch]), "y": torch.tensor([b["y"] for b in batch])}


if __name__ == "__main__":
    g = torch.Generator()
    g.manual_seed(0)
    for context, options in (("fork", {"persistent_workers": True, "prefetch_factor": 2}), ("spawn", {"collate_fn": collate})):
        loader = DataLoader(Data(), batch_size=4, num_workers=2, pin_memory=True, worker_init_fn=seed_worker, generator=g, multiprocessing_context=context, **options)
        for _ in range(2 if context == "fork" else 1):
            total = 0.0
            for batch in loader:
                x, y = batch["x"].to(device, non_blocking=True), batch["y"].to(device, non_blocking=True)
                total += (x.sum(1) * y).sum().item()
        print(f"= {context} {total}")
