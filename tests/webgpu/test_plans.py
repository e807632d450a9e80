"""What the device remembers: one bounded cache for every family of kernels, emptied with the device."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

import anytorch

SOURCES = [path for part in ("webgpu", "gpu") for path in (Path(anytorch.__file__).parent / part).rglob("*.py")]

# Dictionaries that are filled once, when the device is registered, or that something else bounds.
FILLED_ONCE = {
    "kernels.py:RULES",  # a rule per op
}


def test_only_the_last_used_are_kept() -> None:
    from anytorch.gpu.plans import Recent

    recent = Recent(8)
    for n in range(100):
        recent[n] = f"plan {n}"
        assert recent[0] == "plan 0", "what is asked for stays"
        assert len(recent) <= 8
    assert recent[99] == "plan 99" and recent[50] is None
    recent.clear()
    assert len(recent) == 0 and recent[99] is None


def empty_dictionaries(path: Path) -> list[str]:
    """Names bound to an empty dictionary that outlives a call: a module's own, or one that a closure keeps."""
    tree = ast.parse(path.read_text("utf-8"))
    found = assigned(tree.body)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            inner = [node for node in function.body if isinstance(node, ast.FunctionDef)]
            kept = {name.id for node in inner for name in ast.walk(node) if isinstance(name, ast.Name)}
            found += [name for name in assigned(function.body) if name in kept]
    return found


def assigned(statements: list[ast.stmt]) -> list[str]:
    names = []
    for node in statements:
        value = ast.unparse(node.value) if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value else ""
        if value in ("{}", "dict()", "OrderedDict()", "defaultdict(list)"):
            names.append(ast.unparse(node).split("=")[0].split(":")[0].strip())
    return names


def test_no_cache_grows_without_bound() -> None:
    wrong = []
    for path in SOURCES:
        wrong += [
            f"{path.name}:{name}" for name in empty_dictionaries(path) if f"{path.name}:{name}" not in FILLED_ONCE
        ]
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            text = ast.unparse(node) if isinstance(node, (ast.Call, ast.Name)) else ""
            if text == "cache" or (text.startswith("lru_cache(") and "maxsize=None" in text):
                wrong.append(f"{path.name}:{text}")
    assert not wrong, f"keep these in gpu.plans.plans, or bound them: {wrong}"


def test_every_family_keeps_its_plans_in_the_one_cache(fresh_plans: None, webgpu: Any) -> None:
    from anytorch.gpu.plans import plans

    torch = webgpu
    x = torch.randn(4, 4, 8, 8, device="webgpu")
    index = torch.tensor([1, 2]).to("webgpu")
    functional = torch.nn.functional
    families = {
        "elementwise": lambda: x + x,
        "fold": lambda: x.sum(0),
        "rows": lambda: x.softmax(-1),
        "norm": lambda: functional.layer_norm(x, (8,)),
        "product": lambda: x @ x,
        "linear": lambda: functional.linear(x, x[0, 0]),
        "convolution": lambda: functional.conv2d(x, x[..., :3, :3]),
        "attention": lambda: functional.scaled_dot_product_attention(x, x, x),
        "pooling": lambda: functional.max_pool2d(x, 2),
        "resampling": lambda: functional.interpolate(x, scale_factor=2),
        "indexing": lambda: x.index_select(0, index),
        "scattering": lambda: x.index_add(0, index, x[:2]),
        "cat": lambda: torch.cat((x, x)),
        "sorting": lambda: x.sort(),
        "scan": lambda: x.cumsum(0),
        "random": lambda: x.normal_(),
    }
    for name, work in families.items():
        plans.clear()
        work()
        assert len(plans), f"{name} keeps no plan in the cache"


def test_a_cache_that_is_too_small_only_costs_time(
    fresh_plans: None, webgpu: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from anytorch.gpu.plans import plans

    torch = webgpu
    monkeypatch.setattr(plans, "most", 4)
    for n in range(1, 12):
        x = torch.randn(n, n)
        there = x.to("webgpu")
        torch.testing.assert_close(((there @ there).softmax(-1) + there).sum(0).cpu(), ((x @ x).softmax(-1) + x).sum(0))
        assert len(plans) <= 4


def test_the_cache_is_emptied_with_the_device(webgpu: Any) -> None:
    from anytorch.gpu.plans import plans

    torch = webgpu
    x = torch.ones(3, device="webgpu")
    assert float((x + x).sum()) == 6 and len(plans)
    anytorch.webgpu.reset()
    assert len(plans) == 0
    x = torch.ones(3, device="webgpu")
    assert float((x + x).sum()) == 6
