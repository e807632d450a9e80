"""`torch.compile` through kernel graphs: the same results, forward and backward; what has no form stays with ATen."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from anytorch import settings
from anytorch.graph import compiler


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Decoder(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.norm, self.after = Norm(width), Norm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 64, bias=False), nn.Linear(width, 64, bias=False)
        self.down = nn.Linear(64, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, n, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, n, width))
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Encoder(nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 64), nn.Linear(64, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(x + self.down(F.gelu(self.up(self.first(x)))))


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.norm(self.conv(x)) + x)
        x = torch.cumsum(x, 2)  # no form here: it stays with ATen
        return self.head(x.mean((2, 3)))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "decoder": (Decoder, (2, 6, 32)),
    "encoder": (Encoder, (2, 6, 32)),
    "convolutions": (Convolutions, (2, 4, 6, 6)),
}


@pytest.mark.parametrize(
    "name", ["encoder", *(pytest.param(n, marks=pytest.mark.slow) for n in MODELS if n != "encoder")]
)
def test_a_model_gives_and_learns_the_same(few: None, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    made, shape = MODELS[name]
    model, x = made(), torch.randn(shape)
    regions: list[compiler.Region] = []
    plain_region = compiler.Region.__init__

    def noted(self: compiler.Region, *args: object) -> None:
        plain_region(self, *args)  # type: ignore[arg-type]
        regions.append(self)

    monkeypatch.setattr(compiler.Region, "__init__", noted)
    compiled = torch.compile(model, backend=compiler.compile_graph)
    grads = []
    for one in (model, compiled):
        model.zero_grad()
        loss = one(x).square().mean()
        loss.backward()
        grads.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    for wanted, found in zip(*grads, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    assert any(found.program is not None for region in regions for found in region._chosen.values())


def test_a_copy_of_an_input_that_changes_afterwards_stays_what_it_was(few: None) -> None:
    def step(state: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = state.clone()
        made = torch.sigmoid(x * 2) + before
        state.mul_(0.5).add_(made)
        return before, made

    compiled = torch.compile(step, backend=compiler.compile_graph)
    state, x = torch.ones(4, 32), torch.randn(4, 32)
    wanted = step(state.clone(), x)
    found = compiled(state, x)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_sizes_of_one_magnitude_share_a_search(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []
    plain = compiler.Region._search
    monkeypatch.setattr(compiler.Region, "_search", lambda self, inputs: searched.append(1) or plain(self, inputs))
    compiled = torch.compile(
        lambda x: F.silu(x * 2) + x.sum(-1, keepdim=True), backend=compiler.compile_graph, dynamic=True
    )
    for rows in (20, 21, 22, 30):
        x = torch.randn(rows, 32)
        torch.testing.assert_close(compiled(x), F.silu(x * 2) + x.sum(-1, keepdim=True), rtol=1e-4, atol=1e-5)
    assert len(searched) == 1


@pytest.mark.long
def test_compiling_leaves_torch_the_accelerator_it_has() -> None:
    """Once a device has PrivateUse1, torch computes no gradients on CUDA (pytorch issue 161129): only who asks for webgpu
    may have that."""
    script = (
        "import torch, anytorch\n"
        "x = torch.ones(3, requires_grad=True)\n"
        "torch.compile(lambda x: (x * 2 + 1).sum(), backend='anytorch')(x).backward()\n"
        "print(x.grad.tolist(), torch._C._get_privateuse1_backend_name())\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "[2.0, 2.0, 2.0] privateuseone"


def test_a_model_has_so_much_time_for_searching(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions that come too late run as they were, and nothing about them is remembered."""
    monkeypatch.setattr(compiler, "WHOLE", 0)
    regions: list[compiler.Region] = []
    plain = compiler.Region._search

    def noted(self: compiler.Region, inputs: list[torch.Tensor]) -> object:
        regions.append(self)
        return plain(self, inputs)

    monkeypatch.setattr(compiler.Region, "_search", noted)
    known = dict(compiler._found)
    x = torch.randn(7, 48)
    compiled = torch.compile(lambda x: torch.tanh(x * 3) - x.sum(-1, keepdim=True), backend=compiler.compile_graph)
    torch.testing.assert_close(compiled(x), torch.tanh(x * 3) - x.sum(-1, keepdim=True))
    assert regions and compiler._found == known
    assert all("used up" in found.why for region in regions for found in region._chosen.values())


def test_searches_take_from_one_patience() -> None:
    with settings.use(measure_s=1.0):
        patience = compiler.Patience()
        assert patience.region_s == compiler.SEARCH
        patience._left_s = 2.5
        assert patience.region_s == 2.5
        with patience.spent():
            time.sleep(0.05)
        assert patience.region_s <= 2.45
        patience._left_s = 0.1
        assert patience.region_s == 0
