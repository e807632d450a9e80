"""A U-Net that is trained with mixed precision, in the manner of Pytorch-UNet: bilinear up-sampling, dice loss, OOM handling."""

import logging

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(1)
torch.backends.cudnn.benchmark = True


class DoubleConv(nn.Sequential):
    def __init__(self, i, o):
        super().__init__(
            nn.Conv2d(i, o, 3, padding=1, bias=False),
            nn.BatchNorm2d(o),
            nn.ReLU(inplace=True),
            nn.Conv2d(o, o, 3, padding=1, bias=False),
            nn.BatchNorm2d(o),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    def __init__(self, n_channels=3, n_classes=2):
        super().__init__()
        self.n_classes = n_classes
        self.inc, self.down1 = DoubleConv(n_channels, 8), nn.Sequential(nn.MaxPool2d(2), DoubleConv(8, 16))
        self.up = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True)
        self.conv, self.outc = DoubleConv(24, 8), nn.Conv2d(8, n_classes, 1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.up(self.down1(x1))
        dy, dx = x1.size(2) - x2.size(2), x1.size(3) - x2.size(3)
        x2 = F.pad(x2, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
        return self.outc(self.conv(torch.cat([x1, x2], dim=1)))


def dice_loss(pred, target, epsilon=1e-6):
    inter = 2 * (pred * target).sum(dim=(-1, -2))
    sets = pred.sum(dim=(-1, -2)) + target.sum(dim=(-1, -2))
    return 1 - ((inter + epsilon) / (torch.where(sets == 0, inter, sets) + epsilon)).mean()


def train_model(model, device, amp=False, gradient_clipping=1.0):
    data = TensorDataset(torch.randn(8, 3, 17, 18), torch.randint(0, 2, (8, 17, 18)))
    loader = DataLoader(data, shuffle=False, batch_size=4, num_workers=0, pin_memory=True)
    optimizer = optim.RMSprop(model.parameters(), lr=1e-3, weight_decay=1e-8, momentum=0.9, foreach=True)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=5)
    grad_scaler = torch.cuda.amp.GradScaler(enabled=amp)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(2):
        for images, true_masks in loader:
            images = images.to(device=device, dtype=torch.float32, memory_format=torch.channels_last)
            true_masks = true_masks.to(device=device, dtype=torch.long)
            with torch.autocast(device.type if device.type != "mps" else "cpu", enabled=amp):
                masks_pred = model(images)
                loss = criterion(masks_pred, true_masks)
                loss += dice_loss(
                    F.softmax(masks_pred, dim=1).float(),
                    F.one_hot(true_masks, model.n_classes).permute(0, 3, 1, 2).float(),
                )
            optimizer.zero_grad(set_to_none=True)
            grad_scaler.scale(loss).backward()
            grad_scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), gradient_clipping)
            grad_scaler.step(optimizer)
            grad_scaler.update()
            print(f"= loss {loss.item():.4f}")
        scheduler.step(loss.item())


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = UNet().to(memory_format=torch.channels_last)
model.to(device=device)
try:
    train_model(model, device)
except torch.cuda.OutOfMemoryError:
    logging.error("Detected OutOfMemoryError!")
    torch.cuda.empty_cache()
    raise
