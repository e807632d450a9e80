"""A fitted model computes what it computed before, keeps its budgets, stays the same object, and can be undone."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anytorch
from anytorch.errors import BudgetTooSmall, UsageError
from anytorch.memory.parked import Parked
from anytorch.memory.units import find_units

MB = 2**20
# The model of these tests has 3.1 MB in six layers of 0.51 MB.
SHAPES = {
    "ram and disk": {"device_budget": 1.2 * MB},
    "three levels": {"device_budget": 1.2 * MB, "host_budget": 3.2 * MB},
    "host only": {"device_budget": 1.2 * MB, "host_budget": 8 * MB},
    "leaf modules": {"device_budget": 0.45 * MB},
    "everything fits": {"device_budget": 8 * MB},
}


@pytest.fixture(params=SHAPES, ids=str)
def budgets(request: pytest.FixtureRequest, given: dict[str, Any]) -> dict[str, Any]:
    return given | SHAPES[request.param]


def within(model: nn.Module) -> None:
    handle = anytorch.memory.fitted(model)
    for level, use in handle.stats()["levels"].items():
        assert use["peak"] <= use["capacity"], level


def test_same_answers_again_and_again(models: Any, budgets: dict[str, Any]) -> None:
    model = models.made()
    expected = model(models.IDS)
    parameters = list(model.parameters())
    assert anytorch.memory.fit(model, "cpu", **budgets) is model
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(models.IDS), expected)
    with torch.inference_mode():
        assert torch.equal(model(models.IDS), expected)
    within(model)
    anytorch.memory.unfit(model)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.head.weight is model.embed.weight
    assert torch.equal(model(models.IDS), expected)
    assert "forward" not in model.layers[0].__dict__ and "_apply" not in model.__dict__


def test_gradients_are_right(models: Any, budgets: dict[str, Any]) -> None:
    """The weights of a layer are overwritten after its forward; backward fetches them again."""
    model = models.made()
    inputs = torch.randn(3, 128, requires_grad=True)

    def gradients() -> list[torch.Tensor]:
        x = inputs
        for layer in model.layers:
            x = layer(x)
        return list(torch.autograd.grad(x.square().sum(), [inputs, *model.layers.parameters()]))

    expected = gradients()
    anytorch.memory.fit(model, "cpu", **budgets)
    for _ in range(2):
        found = gradients()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    model(models.IDS).square().sum().backward()
    assert torch.isfinite(model.embed.weight.grad).all()
    within(model)
    anytorch.memory.unfit(model)


def test_state_dict_save_and_submodules(models: Any, budgets: dict[str, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = models.made()
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    anytorch.memory.fit(model, "cpu", **budgets)
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    layer = model.layers[2].state_dict()
    assert torch.equal(layer["up.weight"], expected["layers.2.up.weight"])
    (file,) = anytorch.memory.fitted(model).save(tmp_path / "saved")
    stored = load_file(file)
    assert "head.weight" not in stored or "embed.weight" not in stored, "tied weights are stored once"
    assert all(torch.equal(stored[name], expected[name]) for name in stored)
    shards = anytorch.memory.fitted(model).save(tmp_path / "shards", shard_nbytes="1MB")
    assert len(shards) > 2 and (tmp_path / "shards" / "model.safetensors.index.json").exists()
    with torch.no_grad():
        model(models.IDS)  # still works
    del found, layer
    anytorch.memory.unfit(model)


def test_a_weight_that_is_elsewhere_cannot_be_used(models: Any, given: dict[str, Any]) -> None:
    model = models.made()
    anytorch.memory.fit(model, "cpu", device_budget=1.2 * MB, **given)
    weight = model.layers[0].up.weight
    assert isinstance(weight, Parked) and isinstance(weight, nn.Parameter)
    assert weight.shape == (512, 128) and weight.dtype == torch.float32 and weight.device.type == "cpu"
    assert sum(p.numel() for p in model.parameters()) > 700_000
    for use in (lambda: weight + 1, lambda: weight.sum(), lambda: torch.relu(weight), lambda: weight.tolist()):
        with pytest.raises(UsageError, match="another memory level"):
            use()
    assert "another memory level" in repr(weight)
    anytorch.memory.unfit(model)


def test_to(models: Any, given: dict[str, Any]) -> None:
    model = models.made()
    anytorch.memory.fit(model, "cpu", device_budget=1.2 * MB, **given)
    assert model.to("cpu") is model and model.float() is model
    with pytest.raises(UsageError, match="stays on cpu"):
        model.half()
    with pytest.raises(UsageError, match="unfit"):
        model.to(torch.bfloat16)
    anytorch.memory.unfit(model)
    assert model.half().head.weight.dtype == torch.float16


def test_an_exception_in_the_middle_changes_nothing(models: Any, given: dict[str, Any]) -> None:
    model = models.made()
    expected = model(models.IDS)
    anytorch.memory.fit(model, "cpu", device_budget=1.2 * MB, **given)
    for raised in (RuntimeError("in a layer"), KeyboardInterrupt()):
        original = model.layers[3].up.forward

        def broken(x: torch.Tensor, raised: BaseException = raised) -> torch.Tensor:
            raise raised

        model.layers[3].up.forward = broken
        with torch.no_grad(), pytest.raises(type(raised)):
            model(models.IDS)
        model.layers[3].up.forward = original
        with torch.no_grad():
            assert torch.equal(model(models.IDS), expected)
    model.fail_after = 2
    with torch.no_grad(), pytest.raises(RuntimeError, match="middle"):
        model(models.IDS)
    model.fail_after = None
    with torch.no_grad():
        assert torch.equal(model(models.IDS), expected)
    within(model)
    anytorch.memory.unfit(model)


def test_the_order_may_change(models: Any, given: dict[str, Any]) -> None:
    model = models.made()
    anytorch.memory.fit(model, "cpu", device_budget=1.2 * MB, **given)
    plain = models.made()
    x = torch.randn(2, 128)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _ in range(10):
            order = torch.randint(0, 6, (4,), generator=generator).tolist()
            a = b = x
            for index in order:
                a, b = model.layers[index](a), plain.layers[index](b)
            assert torch.equal(a, b)
    within(model)
    anytorch.memory.unfit(model)


def test_prefetching_happens(models: Any, given: dict[str, Any]) -> None:
    model = models.made()
    anytorch.memory.fit(model, "cpu", device_budget=1.4 * MB, **given)
    with torch.no_grad():
        for _ in range(4):
            model(models.IDS)
    stats = anytorch.memory.fitted(model).stats()
    assert stats["fetched_ahead"] >= 0.8 * stats["fetched"] > 0
    assert stats["dropped_unused"] == 0
    anytorch.memory.unfit(model)


def test_threads(models: Any, given: dict[str, Any]) -> None:
    model = models.made()
    expected = model(models.IDS)
    anytorch.memory.fit(model, "cpu", device_budget=1.8 * MB, **given)
    wrong: list[Any] = []

    def work() -> None:
        with torch.no_grad():
            for _ in range(3):
                if not torch.equal(model(models.IDS), expected):
                    wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    within(model)
    anytorch.memory.unfit(model)


def test_autocast_and_compile(models: Any, given: dict[str, Any]) -> None:
    model = models.made()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        expected = model(models.IDS)
    plain = model(models.IDS)
    anytorch.memory.fit(model, "cpu", device_budget=1.2 * MB, **given)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        for _ in range(2):
            assert torch.equal(model(models.IDS), expected)
    # "eager" traces and guards as every back end does, without a compiler.
    layer = torch.compile(model.layers[1], backend="eager")
    x = torch.randn(2, 128)
    with torch.no_grad():
        want = models.made().layers[1](x)
        for _ in range(3):
            torch.testing.assert_close(layer(x), want)
            assert torch.equal(model(models.IDS), plain)
    anytorch.memory.unfit(model)


def test_compiled_blocks_can_be_fitted(models: Any, given: dict[str, Any]) -> None:
    model = models.made()
    plain = model(models.IDS)
    for index in range(6):
        model.layers[index] = torch.compile(model.layers[index], backend="eager")
    anytorch.memory.fit(model, "cpu", device_budget=1.2 * MB, **given)
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(model(models.IDS), plain)
    within(model)
    anytorch.memory.unfit(model)


def test_blocks_by_name_and_residents(models: Any, given: dict[str, Any]) -> None:
    model = models.made()
    expected = model(models.IDS)
    anytorch.memory.fit(model, "cpu", device_budget=1.3 * MB, blocks=["layers.*"], resident=["layers.3"], **given)
    handle = anytorch.memory.fitted(model)
    assert "layers.3" not in handle.plan.homes and "layers.2" in handle.plan.homes
    assert not isinstance(model.layers[3].up.weight, Parked)
    with torch.no_grad():
        assert torch.equal(model(models.IDS), expected)
    anytorch.memory.unfit(model)
    with pytest.raises(UsageError, match="no module is called"):
        anytorch.memory.fit(model, "cpu", device_budget=MB, blocks=["nonsense.*"], **given)


def test_the_smallest_budget_that_works(models: Any, given: dict[str, Any]) -> None:
    model = models.made()
    expected = model(models.IDS)
    with pytest.raises(BudgetTooSmall) as caught:
        anytorch.memory.fit(model, "cpu", device_budget=50_000, **given)
    smallest = int(caught.value.hint.partition(" bytes")[0].rpartition(" ")[2])
    with pytest.raises(BudgetTooSmall):
        anytorch.memory.fit(model, "cpu", device_budget=smallest - 1, **given)
    assert torch.equal(model(models.IDS), expected), "a refused model is left as it was"
    anytorch.memory.fit(model, "cpu", device_budget=smallest, **given)
    with torch.no_grad():
        assert torch.equal(model(models.IDS), expected)
    anytorch.memory.unfit(model)


def test_twice_and_not_at_all(models: Any, given: dict[str, Any]) -> None:
    model = models.made()
    with pytest.raises(UsageError, match="not fitted"):
        anytorch.memory.fitted(model)
    anytorch.memory.fit(model, "cpu", device_budget=1.2 * MB, **given)
    with pytest.raises(UsageError, match="already"):
        anytorch.memory.fit(model, "cpu", device_budget=1.2 * MB, **given)
    anytorch.memory.unfit(model)
    with pytest.raises(UsageError, match="no parameters"):
        anytorch.memory.fit(nn.ReLU(), "cpu", device_budget=MB, **given)


def test_a_dropped_model_gives_everything_back(models: Any, given: dict[str, Any], disk: Path) -> None:
    model = models.made()
    anytorch.memory.fit(model, "cpu", device_budget=1.2 * MB, **given)
    assert list(disk.rglob("*.safetensors"))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert not list(disk.iterdir())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("anytorch-reader")]


def test_units_of_other_models() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, batch_first=True), 3)
    assert [unit.name for unit in find_units(encoder).units] == ["layers.0", "layers.1", "layers.2"]
    attention = nn.ModuleDict({"attention": nn.MultiheadAttention(32, 4), "out": nn.Linear(32, 32)})
    assert [unit.name for unit in find_units(attention).units] == ["attention", "out"]
    single = nn.Linear(4, 4)
    assert [unit.name for unit in find_units(single).units] == ["Linear"]
    weighted = nn.Sequential(torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 8))
    assert [unit.name for unit in find_units(weighted).units] == ["0", "1"]
    finest = find_units(encoder, finest=True)
    assert "layers.0" in [unit.name for unit in finest.units], "it reaches into its children, so it moves as one"


def test_other_architectures_compute_the_same(given: dict[str, Any]) -> None:
    torch.manual_seed(0)
    cases: list[tuple[nn.Module, tuple[Any, ...], float]] = [
        (nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 4, batch_first=True), 4), (torch.randn(2, 5, 64),), 1.2),
        (nn.LSTM(64, 64, 3), (torch.randn(5, 2, 64),), 0.5),
        (nn.Sequential(*(nn.Conv2d(16, 16, 3) for _ in range(6))), (torch.randn(1, 16, 20, 20),), 0.03),
        (nn.Linear(128, 128), (torch.randn(2, 128),), 0.08),
    ]
    for model, inputs, budget in cases:
        model.eval()
        with torch.no_grad():
            expected = model(*inputs)
            anytorch.memory.fit(model, "cpu", device_budget=int(budget * MB), **given)
            found = model(*inputs)
        first, second = (found[0], expected[0]) if isinstance(found, tuple) else (found, expected)
        torch.testing.assert_close(first, second)
        anytorch.memory.unfit(model)


def test_a_copy_of_an_unfitted_model_is_plain(models: Any, given: dict[str, Any]) -> None:
    model = models.made()
    anytorch.memory.fit(model, "cpu", device_budget=1.2 * MB, **given)
    anytorch.memory.unfit(model)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(models.IDS), model(models.IDS))


def test_leaves_move_by_themselves_and_more_of_them_stay(models: Any, given: dict[str, Any]) -> None:
    model = models.made()
    want = model(models.IDS)
    layer = sum(p.nbytes for p in model.layers[0].parameters())
    resident = {}
    for blocks in (None, "leaves", "layers.*"):
        anytorch.memory.fit(model, "cpu", device_budget=round(2.4 * layer), blocks=blocks, **given)
        plan = anytorch.memory.fitted(model).plan
        resident[blocks] = plan.nbytes_at("device")
        assert torch.equal(model(models.IDS), want) and torch.equal(model(models.IDS), want)
        assert ("layers.0.up" in plan.blocks) == (blocks == "leaves")
        anytorch.memory.unfit(model)
    assert resident["leaves"] > resident[None]


def test_large_buffers_are_made_of_huge_pages_where_there_are_some() -> None:
    from anytorch import large_pages
    from anytorch.memory import buffers

    buffer = buffers.host_buffer(5 * 2**20)
    assert buffer.numel() == 5 * 2**20 and buffer.data_ptr() % large_pages.NBYTES == 0 and not buffer.any()
    assert buffers.host_buffer(2**20).data_ptr() % 4096 == 0


def test_a_forward_without_its_backward_keeps_nothing_alive(models: Any, given: dict[str, Any]) -> None:
    model = models.made().train()
    anytorch.memory.fit(model, "cpu", device_budget="700KB", **given)
    assert model(models.IDS).requires_grad
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_fitted_model_is_not_copied_and_an_unfitted_one_is(models: Any, given: dict[str, Any]) -> None:
    model = models.made()
    expected = model(models.IDS)
    anytorch.memory.fit(model, "cpu", device_budget=1.2 * MB, **given)
    with pytest.raises(UsageError, match="cannot be copied"):
        copy.deepcopy(model)
    assert torch.equal(copy.deepcopy(anytorch.memory.unfit(model))(models.IDS), expected)


def test_what_is_no_model_is_named(given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"not a str\s+hint: .*memory.load"):
        anytorch.memory.fit("folder", "cpu", **given)  # type: ignore[type-var]
