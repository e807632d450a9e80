"""accelerate: prepare, accumulate, clip, gather, save and load."""

import tempfile

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed

set_seed(1)
accelerator = Accelerator(gradient_accumulation_steps=2)
model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
data = torch.utils.data.TensorDataset(torch.randn(32, 6), torch.randn(32, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=False)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
assert (accelerator.device.type == "cuda") == torch.cuda.is_available()
for x, y in loader:
    assert x.is_cuda == torch.cuda.is_available()
    with accelerator.accumulate(model):
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    accelerator.print(f"= loss {loss.item():.4f}")
gathered = accelerator.gather_for_metrics(model(x))
with tempfile.TemporaryDirectory() as folder:
    accelerator.save_state(folder)
    before = accelerator.unwrap_model(model)[0].weight.detach().clone()
    with torch.no_grad():
        accelerator.unwrap_model(model)[0].weight.zero_()
    accelerator.load_state(folder)
assert torch.equal(before, accelerator.unwrap_model(model)[0].weight)
print(f"= {gathered.mean().item():.4f}")
