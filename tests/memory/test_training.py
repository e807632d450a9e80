"""Training a fitted model gives plain training's losses and weights, to the bit."""

from __future__ import annotations

import copy
import signal
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anytorch
from anytorch.errors import BudgetTooSmall, UsageError
from anytorch.memory.training import TieredOptimizer

WIDTH = 256  # a layer is about a MiB


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(0.2)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))
        return result


class Model(nn.Module):
    """The output layer's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.head = nn.Linear(WIDTH, 50, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for block in self.blocks:
            x = block(x)
        result: torch.Tensor = self.head(x)
        return result


@pytest.fixture
def model() -> Model:
    torch.manual_seed(0)
    return Model()


BLOCK = sum(p.nbytes for p in Block().parameters())
TWO_LEVELS: dict[str, Any] = {"device_budget": int(6.5 * BLOCK), "reserve": 4 * BLOCK}
THREE_LEVELS: dict[str, Any] = {
    "device_budget": int(2.5 * BLOCK),
    "host_budget": int(5.5 * BLOCK) + 2 * 2**20,
    "host_reserve": 4 * BLOCK,
}
BATCHES = [torch.randint(0, 50, (3, 5), generator=torch.Generator().manual_seed(k)) for k in range(4)]


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())


def train(
    model: nn.Module, optimizer: Any, clip: float | None = None, every: int = 1, scheduler: Any = None
) -> list[float]:
    torch.manual_seed(1)
    losses = []
    for k, ids in enumerate(BATCHES, 1):
        loss = loss_of(model, ids)
        loss.backward()
        losses.append(loss.item())
        if k % every == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if scheduler is not None:
                scheduler.step()
    return losses


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().items(), other.state_dict().items(), strict=True)
    return all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)


@pytest.mark.parametrize("levels", [TWO_LEVELS, THREE_LEVELS], ids=["memory and disk", "device, host and disk"])
@pytest.mark.parametrize(
    ("factory", "options", "clip", "every"),
    [
        (torch.optim.AdamW, {"lr": 1e-2}, None, 1),
        (torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}, 0.5, 2),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 0.5, 1),
    ],
    ids=["adamw", "adam clipped and accumulated", "sgd clipped"],
)
def test_plain_training_to_the_bit(
    model: Model, tmp_path: Path, levels: Any, factory: Any, options: Any, clip: float | None, every: int
) -> None:
    plain = copy.deepcopy(model)
    want = train(plain, factory(plain.parameters(), **options), clip, every)
    anytorch.memory.fit(model, "cpu", disk=tmp_path / "disk", **levels)
    handle = anytorch.memory.fitted(model)
    assert set(handle.plan.homes.values()) >= ({"host", "disk"} if "host_budget" in levels else {"disk"})
    optimizer = TieredOptimizer(model, factory, clip_norm=clip, **options)
    assert train(model, optimizer, None, every) == want
    for level, use in handle.stats()["levels"].items():
        assert use["peak"] <= use["capacity"], level
    assert (optimizer.last_norm is None) == (clip is None)
    optimizer.close()
    anytorch.memory.unfit(model)
    assert same(model, plain)
    assert list((tmp_path / "disk").iterdir()) == []


def test_a_model_four_times_all_memory_trains_from_disk(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block() for _ in range(36)])
    plain = copy.deepcopy(model)
    total = sum(p.nbytes for p in model.parameters())
    budgets: dict[str, Any] = {
        "device_budget": int(2.2 * BLOCK), "host_budget": 4 * BLOCK + 2 * 2**20, "host_reserve": 4 * BLOCK,
    }  # fmt: skip
    assert total > 4 * (budgets["device_budget"] + budgets["host_budget"])
    anytorch.memory.fit(model, "cpu", disk=tmp_path / "disk", **budgets)
    optimizer = TieredOptimizer(model, torch.optim.AdamW, lr=1e-2)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    x = torch.randn(2, WIDTH)
    for _ in range(2):
        losses = []
        for network, updated in ((model, optimizer), (plain, reference)):
            torch.manual_seed(3)
            loss = network(x).square().mean()
            loss.backward()
            updated.step()
            updated.zero_grad()
            losses.append(loss.item())
        assert losses[0] == losses[1]
    assert all(use["peak"] <= use["capacity"] for use in anytorch.memory.fitted(model).stats()["levels"].values())


@pytest.mark.parametrize("way", ["checkpoint", "offload"])
@pytest.mark.parametrize("streamed", [False, True], ids=["resident", "streamed"])
def test_activations_change_no_bit(model: Model, tmp_path: Path, way: str, streamed: bool) -> None:
    plain = copy.deepcopy(model)
    want = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    runs = []
    model.blocks[1].up.register_forward_hook(lambda *_: runs.append(1))
    optimizer: Any
    if streamed:
        anytorch.memory.fit(model, "cpu", disk=tmp_path / "disk", **TWO_LEVELS)
        optimizer = TieredOptimizer(model, torch.optim.AdamW, lr=1e-2)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    assert anytorch.memory.activations(model, way) == 8
    assert train(model, optimizer) == want
    assert len(runs) == len(BATCHES) * (2 if way == "checkpoint" else 1)
    anytorch.memory.activations(model, "keep")
    if streamed:
        optimizer.close()
        anytorch.memory.unfit(model)
    assert same(model, plain) and "forward" not in vars(model.blocks[0])


@pytest.mark.parametrize("streamed", [False, True], ids=["resident", "streamed"])
def test_a_model_of_transformers_checkpoints_without_its_cache(tmp_path: Path, streamed: bool) -> None:
    """Its layers are handed a cache; computed again in backward, they would add to it a second time."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    plain = copy.deepcopy(model)
    ids = BATCHES[0]
    losses: list[list[float]] = []
    for network in (plain, model):
        optimizer: Any = torch.optim.AdamW(network.parameters(), lr=1e-2)
        if network is model:
            if streamed:
                layer = sum(p.nbytes for p in model.model.layers[0].parameters())
                anytorch.memory.fit(
                    model, "cpu", disk=tmp_path / "disk", device_budget=int(6.2 * layer), reserve=4 * layer
                )
                assert "disk" in anytorch.memory.fitted(model).plan.homes.values()
                optimizer = TieredOptimizer(model, torch.optim.AdamW, lr=1e-2)
            assert anytorch.memory.activations(model, "checkpoint") == 4
        losses.append([])
        for _ in range(3):
            loss = network(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]


def test_offloaded_activations_leave_the_device(model: Model, tmp_path: Path) -> None:
    from anytorch.memory.running import OffloadedActivation, Running

    anytorch.memory.fit(model, "cpu", disk=tmp_path / "disk", **TWO_LEVELS)
    anytorch.memory.activations(model, "offload")
    packed: list[Any] = []
    real = Running.pack

    def pack(self: Running, unit: Any, tensor: torch.Tensor) -> Any:
        packed.append(real(self, unit, tensor))
        return packed[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Running, "pack", pack)
        loss_of(model, BATCHES[0])
    moved = [saved for saved in packed if isinstance(saved, OffloadedActivation)]
    assert len(moved) > 8 and not any(isinstance(saved, torch.Tensor) for saved in packed)


def test_an_unknown_way_with_activations(model: Model) -> None:
    with pytest.raises(UsageError, match="way='drop' is unknown; known: keep, checkpoint, offload"):
        anytorch.memory.activations(model, "drop")


def test_groups_schedules_and_state_dict(model: Model, tmp_path: Path) -> None:
    def groups(of: nn.Module) -> list[dict[str, Any]]:
        flat = [p for p in of.parameters() if p.dim() == 1]
        return [{"params": [p for p in of.parameters() if p.dim() > 1]}, {"params": flat, "weight_decay": 0.0}]

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=20)

    plain = copy.deepcopy(model)
    reference = torch.optim.AdamW(groups(plain), lr=1e-3)
    want = train(plain, reference, scheduler=schedule(reference))
    anytorch.memory.fit(model, "cpu", disk=tmp_path / "disk", **TWO_LEVELS)
    optimizer = TieredOptimizer(model, torch.optim.AdamW, groups(model), lr=1e-3)
    assert train(model, optimizer, scheduler=schedule(optimizer)) == want
    state, expected = optimizer.state_dict(), reference.state_dict()
    assert [g["lr"] for g in state["param_groups"]] == [g["lr"] for g in expected["param_groups"]]
    assert state["state"].keys() == expected["state"].keys()
    for index, values in expected["state"].items():
        for key, value in values.items():
            assert torch.equal(torch.as_tensor(state["state"][index][key]), torch.as_tensor(value)), (index, key)
    optimizer.load_state_dict(expected)  # a plain optimizer's
    torch.manual_seed(5)
    assert train(model, optimizer) == train(plain, reference)


def test_adapters_stay_on_the_device_and_the_frozen_base_is_never_written(model: Model, tmp_path: Path) -> None:
    model.requires_grad_(False)
    for block in model.blocks:
        block.low = nn.Linear(WIDTH, 2, bias=False)  # used beside `up`, as LoRA is
        block.up.register_forward_hook(lambda layer, args, out, low=block.low: out + low(args[0]).sum(-1, keepdim=True))
    plain = copy.deepcopy(model)
    for block in plain.blocks:  # deepcopy's hooks name the first model's layers
        block.up._forward_hooks.clear()
        block.up.register_forward_hook(lambda layer, args, out, low=block.low: out + low(args[0]).sum(-1, keepdim=True))
    want = train(plain, torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-2))
    anytorch.memory.fit(model, "cpu", disk=tmp_path / "disk", **TWO_LEVELS)
    handle = anytorch.memory.fitted(model)
    before = {name: image.pieces for name, image in handle.images.items()}
    optimizer = TieredOptimizer(model, torch.optim.AdamW, [p for p in model.parameters() if p.requires_grad], lr=1e-2)
    assert train(model, optimizer) == want
    assert {name: image.pieces for name, image in handle.images.items()} == before
    assert optimizer.states.blocks() == []


HOST: dict[str, Any] = {"device_budget": int(3.5 * BLOCK), "host_budget": 60 * BLOCK, "host_reserve": 4 * BLOCK}


@pytest.mark.parametrize("overlap", ["forward", "backward"])
@pytest.mark.parametrize("way", ["checkpoint", "keep"])
@pytest.mark.parametrize("fused", [None, True], ids=["torch's loop", "fused"])
def test_updates_beside_the_device_change_no_bit(
    model: Model, tmp_path: Path, overlap: Any, way: str, fused: bool | None
) -> None:
    """The schedule changes the rate while updates are still under way; the states are read in between."""
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {"lr": 1e-2, "fused": fused}
    reference = torch.optim.AdamW(plain.parameters(), **options)
    want = train(plain, reference, scheduler=torch.optim.lr_scheduler.StepLR(reference, 1, 0.5))
    anytorch.memory.fit(model, "cpu", disk=tmp_path / "disk", **HOST)
    handle = anytorch.memory.fitted(model)
    anytorch.memory.activations(model, way)
    optimizer = TieredOptimizer(model, torch.optim.AdamW, overlap=overlap, **options)
    early = []
    real = optimizer._after_backward
    handle.running.after_backward = lambda step: (early.append(step), real(step)) if overlap == "backward" else None
    assert train(model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)) == want
    blocks = [name for name, home in handle.plan.homes.items() if home == "host" and name.startswith("blocks")]
    assert blocks and len(early) == (len(blocks) * len(BATCHES) if (overlap, way) == ("backward", "checkpoint") else 0)
    assert same(model, plain)  # waits for what is under way
    expected = reference.state_dict()["state"]
    for index, values in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, expected[index][key]) for key, value in values.items())
    optimizer.close()
    anytorch.memory.unfit(model)
    assert same(model, plain)


def test_accumulating_with_updates_during_backward(model: Model, tmp_path: Path) -> None:
    plain = copy.deepcopy(model)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    anytorch.memory.fit(model, "cpu", disk=tmp_path / "disk", **HOST)
    anytorch.memory.activations(model, "checkpoint")
    optimizer = TieredOptimizer(model, torch.optim.AdamW, overlap="backward", lr=1e-2)
    for network, updated in ((plain, reference), (model, optimizer)):
        torch.manual_seed(1)
        for _ in range(2):
            with optimizer.accumulate():
                loss_of(network, BATCHES[0]).backward()
            loss_of(network, BATCHES[1]).backward()
            updated.step()
            updated.zero_grad()
    assert same(model, plain)
    loss_of(model, BATCHES[0]).backward()
    with pytest.raises(UsageError, match="got another gradient after the optimizer had already updated it"):
        loss_of(model, BATCHES[1]).backward()


def test_a_layer_used_twice_is_updated_after_both(tmp_path: Path) -> None:
    class Twice(Model):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.words(ids)
            for block in (*self.blocks, *self.blocks):
                x = block(x)
            return self.head(x)

    torch.manual_seed(0)
    model = Twice()
    plain = copy.deepcopy(model)
    want = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
    anytorch.memory.fit(model, "cpu", disk=tmp_path / "disk", **HOST)
    anytorch.memory.activations(model, "checkpoint")
    optimizer = TieredOptimizer(model, torch.optim.AdamW, overlap="backward", lr=1e-2)
    assert train(model, optimizer) == want and same(model, plain)


def test_clipping_with_updates_during_the_next_forward(model: Model, tmp_path: Path) -> None:
    plain = copy.deepcopy(model)
    want = train(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2, fused=True), 0.5)
    anytorch.memory.fit(model, "cpu", disk=tmp_path / "disk", **HOST)
    with pytest.raises(UsageError, match="known only after backward") as caught:
        TieredOptimizer(model, torch.optim.AdamW, overlap="backward", clip_norm=0.5)
    assert "overlap='forward'" in caught.value.hint
    with pytest.raises(UsageError, match="overlap is 'both'"):
        TieredOptimizer(model, torch.optim.AdamW, overlap="both")
    optimizer = TieredOptimizer(model, torch.optim.AdamW, overlap="forward", clip_norm=0.5, lr=1e-2, fused=True)
    assert train(model, optimizer) == want and same(model, plain)


def test_an_update_that_fails_is_told_at_the_next_step(model: Model, tmp_path: Path) -> None:
    from anytorch.errors import ModelError

    anytorch.memory.fit(model, "cpu", disk=tmp_path / "disk", **HOST)
    optimizer = TieredOptimizer(model, torch.optim.AdamW, overlap="forward", lr=1e-2)
    train(model, optimizer)
    optimizer.wait()

    def fail(*_: Any) -> None:
        raise MemoryError("no room for a step")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "_step_block", fail)
        loss_of(model, BATCHES[0]).backward()
        optimizer.step()
        loss_of(model, BATCHES[0])  # nobody waits for ever
        with pytest.raises(ModelError, match="some weights are updated and others are not: no room for a step"):
            optimizer.step()


def test_too_little_room_for_a_step_says_how_much_is_needed(model: Model, tmp_path: Path) -> None:
    anytorch.memory.fit(model, "cpu", disk=tmp_path / "disk", device_budget=int(3.5 * BLOCK))
    with pytest.raises(BudgetTooSmall, match="a step of the optimizer needs") as caught:
        TieredOptimizer(model, torch.optim.AdamW)
    reserve = int(caught.value.hint.split("reserve=")[1].split(")")[0])
    anytorch.memory.unfit(model)
    anytorch.memory.fit(model, "cpu", disk=tmp_path / "disk", device_budget=int(3.5 * BLOCK) + reserve, reserve=reserve)
    TieredOptimizer(model, torch.optim.AdamW).close()


def test_a_model_that_is_not_fitted(model: Model) -> None:
    with pytest.raises(UsageError, match="not fitted"):
        TieredOptimizer(model, torch.optim.AdamW)
    with pytest.raises(UsageError, match="clip_norm=0"):
        TieredOptimizer(model, torch.optim.AdamW, clip_norm=0)


PROGRAM = """
    import os, signal, sys, threading
    import torch, anytorch
    sys.path.insert(0, {tests!r})
    import test_training as t
    from anytorch.memory import TieredOptimizer, resume_training, save_training

    torch.set_num_threads(1)
    folder, steps, killed = {folder!r}, 6, {killed!r}
    torch.manual_seed(0)
    model = t.Model()
    anytorch.memory.fit(model, "cpu", disk=folder + "/disk", **t.TWO_LEVELS)
    optimizer = TieredOptimizer(model, torch.optim.AdamW, lr=1e-2)
    state = resume_training(folder + "/run", optimizer)
    first = state["step"] if state else 0
    if not state:
        torch.manual_seed(1)
    if killed:
        import anytorch.memory.resume as r
        whole, written = r.write_shard, []
        def last(path, tensors):
            written.append(path)
            kill = (os.getpid(), signal.SIGKILL)
            if len(written) == 14:  # somewhere in the third checkpoint
                threading.Timer(0.002, os.kill, kill).start()
            if len(written) == 20:  # the timer's thread did not get a turn
                os.kill(*kill)
            return whole(path, tensors)
        r.write_shard = last
    for k in range(first, steps):
        loss = t.loss_of(model, t.BATCHES[k % 4])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        save_training(folder + "/run", optimizer, step=k + 1, extra={{"loss": loss.item()}})
    print("resumed", first, "sum", *[p.double().sum().item().hex() for p in model.state_dict().values()], flush=True)
"""


@pytest.mark.long
def test_killed_while_it_saves_and_resumed(tmp_path: Path, run_python: Callable[..., Any]) -> None:
    def run(folder: str, killed: bool = False) -> list[str]:
        (tmp_path / folder).mkdir(exist_ok=True)
        values = {"tests": str(Path(__file__).parent), "folder": str(tmp_path / folder), "killed": killed}
        done = run_python(textwrap.dedent(PROGRAM).format(**values), warm=True, check=False)
        assert done.returncode == (-signal.SIGKILL if killed else 0), done.stderr
        said: list[str] = done.stdout.split()
        return said

    whole = run("whole")
    assert not run("killed", killed=True)
    resumed = run("killed")
    assert 0 < int(resumed[1]) < 6
    assert resumed[2:] == whole[2:]
    assert not list((tmp_path / "killed" / "run").glob(".step-*"))
    assert sorted(path.name for path in (tmp_path / "killed" / "run").iterdir()) == ["step-00000005", "step-00000006"]
    assert list((tmp_path / "killed" / "disk").iterdir()) == []
