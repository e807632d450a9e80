"""Small ops launched by C++: the same answers as from Python, and nothing of it used where it may not be."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def launcher(webgpu: Any) -> Any:
    from anytorch.gpu.runtime import open_runtime

    found = open_runtime().launcher
    if found is None:
        pytest.skip("there is no launcher here (ANYTORCH_WEBGPU_NATIVE=0, or no compiler)")
    return found


def calls_of_python(function: Callable[[], Any]) -> int:
    from tests.webgpu.test_fallback import python_calls

    return python_calls(function)


CASES: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda a, b: a + b,
    "rows": lambda a, b: a[1:, 3:] + b[1:, 2:-1],
    "broadcast": lambda a, b: a * b[0],
    "transposed": lambda a, b: a.t() - b.t(),
    "a float": lambda a, b: a * 0.1,
    "an int": lambda a, b: a + 3,
    "too large for float32": lambda a, b: a * 1e300,
    "infinite": lambda a, b: a + float("inf"),
    "not a number": lambda a, b: a * float("nan"),
    "unary": lambda a, b: a.relu(),
    "compare": lambda a, b: a < b,
    "another dtype": lambda a, b: a.to(a.dtype) * (b > 0),
    "in place": lambda a, b: a.clone().mul_(b).add_(a),
    "in place by a number": lambda a, b: a.clone().mul_(3),
    "in place, overlapping": lambda a, b: a.clone().t().add_(1.5),
    "alpha": lambda a, b: a.add(b, alpha=2),
    "scalar tensor": lambda a, b: a * b[0, 0],
    "where": lambda a, b: a.where(a > b, b),
}


@pytest.mark.parametrize("name", CASES)
def test_every_call_answers_as_the_cpu(webgpu: Any, name: str) -> None:
    case = CASES[name]
    a, b = webgpu.randn(16, 16), webgpu.randn(16, 16)
    x, y = a.to("webgpu"), b.to("webgpu")
    for _ in range(3):  # the first makes the plan, the second teaches it, the third uses it
        webgpu.testing.assert_close(case(x, y).cpu(), case(a, b), equal_nan=True)


@pytest.mark.parametrize("dtype", ["int64", "int32", "uint8", "bool", "float16", "bfloat16"])
def test_dtypes(webgpu: Any, dtype: str) -> None:
    a = webgpu.tensor([0, 1, 1, 0, 1]).to(getattr(webgpu, dtype))
    x = a.to("webgpu")
    for _ in range(3):
        assert webgpu.equal((x + x).cpu(), a + a)
        assert webgpu.equal((x * 2).cpu(), a * 2)
        assert webgpu.equal((x * 2.5).cpu(), a * 2.5)
        assert webgpu.equal((x + 2**40).cpu(), a + 2**40)


def test_a_known_op_runs_no_python(webgpu: Any, launcher: Any) -> None:
    a, b = webgpu.ones(8, device="webgpu"), webgpu.ones(8, device="webgpu")
    gc.collect()
    with webgpu.no_grad():
        assert calls_of_python(lambda: a + b) == 0
        assert calls_of_python(lambda: a * 2.0) == 0
        assert calls_of_python(lambda: a.mul_(b)) == 0


def test_a_forgotten_plan_is_made_again(webgpu: Any, fresh_plans: None) -> None:
    from anytorch.gpu.plans import plans

    a = webgpu.ones(8, device="webgpu")
    for _ in range(3):
        for _ in range(3):
            assert (a + a).tolist() == [2.0] * 8
        plans.clear()


def test_a_buffer_comes_back_from_any_thread(webgpu: Any, launcher: Any) -> None:
    from anytorch.gpu.runtime import open_runtime

    a = webgpu.ones(3_333, device="webgpu")
    held = [a + a for _ in range(3)]
    addresses = {one.data_ptr() for one in held}
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    again = [a + a for _ in range(3)]
    assert {one.data_ptr() for one in again} == addresses
    before = open_runtime().pool.statistics.allocated
    del again
    assert open_runtime().pool.statistics.allocated < before


def test_a_buffer_in_use_is_not_handed_out(webgpu: Any, launcher: Any) -> None:
    a = webgpu.arange(3_333.0, device="webgpu")
    first = a + 1.0
    view = first[5:]
    del first
    second = a + 2.0
    assert view.data_ptr() & ~0xFFF != second.data_ptr() & ~0xFFF
    assert view[0].item() == 6.0


def test_a_recorded_buffer_stays_its_own(webgpu: Any, launcher: Any) -> None:
    a = webgpu.ones(3_333, device="webgpu")
    graph = webgpu.webgpu.Graph()
    with graph:
        inner = a + a
        out = inner * 3.0
    del inner  # a replay writes it again
    other = a + 5.0
    graph.replay()
    assert out[0].item() == 6.0 and other[0].item() == 6.0
    a.fill_(2.0)
    graph.replay()
    assert out[0].item() == 12.0 and other[0].item() == 6.0


def test_an_error_of_the_queue_is_raised(webgpu: Any, launcher: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from anytorch.gpu.native import GpuError
    from anytorch.gpu.runtime import MOST_PENDING, open_runtime

    runtime = open_runtime()
    a = webgpu.ones(8, device="webgpu")
    assert (a + a).tolist() == [2.0] * 8

    def refuse() -> None:
        raise GpuError("it was refused")

    with monkeypatch.context() as patched:
        patched.setattr(runtime, "submit", refuse)
        with pytest.raises(GpuError, match="refused"):
            for _ in range(2 * MOST_PENDING):
                a + a
    assert (a + a).tolist() == [2.0] * 8


def test_it_can_be_switched_off() -> None:
    program = (
        "import torch, anytorch.webgpu\n"
        "from anytorch.gpu import launcher\n"
        "assert launcher.load() is None\n"
        "from anytorch.webgpu import tensors\n"
        "assert tensors.sized_tensor is tensors._sized_tensor\n"
        "print('off')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env={**_environment(), "ANYTORCH_WEBGPU_NATIVE": "0"},
        capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip
    assert done.stdout == "off\n", done.stderr


def _environment() -> dict[str, str]:
    import os

    return dict(os.environ)


def test_a_torch_laid_out_otherwise_gets_python(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("wgpu")
    from anytorch.webgpu import accelerator

    accelerator._launcher.cache_clear()
    monkeypatch.setattr(accelerator, "_handle_offset", lambda: None)
    try:
        assert accelerator._launcher() is None

        def plain() -> None: ...

        assert accelerator.tensor_maker(plain, int) is plain
        assert accelerator.kernel(plain, plain, (1, 2), False) is plain
    finally:
        accelerator._launcher.cache_clear()


def test_bind_groups_are_bounded_over_all_layouts(webgpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each layout had a bound of its own: gradcheck of an RNN in float64 had Mesa's driver run out of memory mappings."""
    from anytorch.gpu.runtime import open_runtime

    runtime = open_runtime()
    runtime.empty_cache()
    monkeypatch.setattr("anytorch.gpu.programs.BIND_GROUPS_KEPT", 64)
    tensors = [webgpu.full((8,), float(i), device="webgpu") for i in range(30)]
    results = []
    for i, first in enumerate(tensors):
        for second in tensors[: i + 1]:
            results.append(webgpu.where(first > second, first + second, first * 2).relu())
            assert sum(map(len, runtime.programs._groups.values())) <= 64
    expected = [float(i + j) for i in range(30) for j in range(i + 1)]
    assert [result[3].item() for result in results] == expected
