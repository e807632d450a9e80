"""A vision transformer with the usual trimmings: class token, stochastic depth, mix-up, averaged weights, cosine schedule."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
np.random.seed(0)
torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        y = self.n1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.n2(x))


class ViT(nn.Module):
    def __init__(self, size=16, patch=4, dim=16, depth=2, heads=2, classes=5):
        super().__init__()
        self.patch = nn.Conv2d(3, dim, patch, patch)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos = nn.Parameter(torch.empty(1, (size // patch) ** 2 + 1, dim))
        nn.init.trunc_normal_(self.pos, std=0.02)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.pos
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.training else block(x)
        return self.head(self.norm(x)[:, 0])


model = ViT().to(device, non_blocking=True)
ema = AveragedModel(model, device=device, multi_avg_fn=get_ema_multi_avg_fn(0.9))
params = [{"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.05}, {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(params, lr=1e-3)
scheduler = torch.optim.lr_scheduler.SequentialLR(
    optimizer,
    [torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)],
    milestones=[2],
)
for step in range(3):
    images, labels = torch.randn(6, 3, 16, 16), torch.randint(0, 5, (6,))
    images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
    lam = float(np.random.beta(0.8, 0.8))
    index = torch.randperm(6).to(images.device)
    output = model(lam * images + (1 - lam) * images[index])
    loss = lam * F.cross_entropy(output, labels, label_smoothing=0.1) + (1 - lam) * F.cross_entropy(output, labels[index])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    ema.update_parameters(model)
    scheduler.step()
    print(f"= loss {loss.item():.4f}")
ema.eval()
with torch.no_grad():
    out = ema(images)
    _, pred = out.topk(3, 1, True, True)
    correct = pred.t().eq(labels.view(1, -1).expand_as(pred.t()))
    print(f"= {out.float().logsumexp(1).mean().item():.3f} {correct.reshape(-1).shape[0]}")
