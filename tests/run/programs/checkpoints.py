"""Checkpoints as scripts write and read them: every kind of map_location, optimizer, random states, and a whole module."""

import os
import random
import tempfile

import torch

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
use_cuda = torch.cuda.is_available()
torch.manual_seed(11)
folder = tempfile.mkdtemp()
path = os.path.join(folder, "checkpoint.pth.tar")
model = torch.nn.Linear(4, 2).to(device)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)


def step(m, o):
    loss = m(torch.ones(3, 4, device=device)).pow(2).mean()
    o.zero_grad()
    loss.backward()
    o.step()
    return loss.item()


print(f"= {step(model, optimizer):.4f} {step(model, optimizer):.4f}")
torch.save(
    {
        "epoch": 3,
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "rng": torch.get_rng_state(),
        "cuda_rng": torch.cuda.get_rng_state_all() if use_cuda else None,
        "python": random.getstate(),
    },
    path,
)
following = step(model, optimizer)
locations = [None, "cpu", torch.device("cpu"), lambda storage, loc: storage]
if use_cuda:
    locations += ["cuda", "cuda:0", torch.device("cuda"), lambda storage, loc: storage.cuda(0), {"cuda:0": "cuda:0"}, {"cuda:0": "cpu"}]
    locations += [f"cuda:{torch.cuda.current_device()}"]
for location in locations:
    loaded = torch.load(path, map_location=location, weights_only=False)
    other = torch.nn.Linear(4, 2).to(device)
    other.load_state_dict(loaded["state_dict"])
    opt = torch.optim.Adam(other.parameters(), lr=0.1)
    opt.load_state_dict(loaded["optimizer"])
    where = loaded["state_dict"]["weight"].device.type
    if location is None or (isinstance(location, str) and location.startswith("cuda")):
        assert where == device.type, (location, where)
    elif location == "cpu" or location == torch.device("cpu") or location == {"cuda:0": "cpu"}:
        assert where == "cpu", (location, where)
    assert abs(step(other, opt) - following) < 1e-5, location
torch.set_rng_state(loaded["rng"].cpu())
if use_cuda:
    torch.cuda.set_rng_state_all([s.cpu() for s in loaded["cuda_rng"]])
torch.save(model, os.path.join(folder, "model.pt"))
whole = torch.load(os.path.join(folder, "model.pt"), map_location=device, weights_only=False)
assert whole.weight.device == model.weight.device and type(whole.weight) is torch.nn.Parameter
print(f"= {whole(torch.ones(1, 4, device=device)).sum().item():.4f}")
best = {k: v.cpu() for k, v in model.state_dict().items()}
step(model, optimizer)
assert not use_cuda or not torch.equal(best["weight"], model.weight.detach().cpu()), "a snapshot stays what it was"
