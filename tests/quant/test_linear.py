"""One packed layer: right on every kernel, same bits in every batch, gradients for inputs, safe to copy and move."""

from __future__ import annotations

import copy
import io
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

from anytorch import native
from anytorch.errors import InputError, UsageError
from anytorch.measured import store
from anytorch.measured.verdict import Trial
from anytorch.quant import QuantLinear, QuantTensor, pack, unpack
from anytorch.quant import choose as choose_module
from anytorch.quant.choose import BASELINE, choose, decide, kernels, row_class
from anytorch.quant.kernels import cpp, dense
from anytorch.quant.kernels.base import Kernel

FORMATS = ["int8", "int8-g64", "int4", "int4-g32", "int4-sym", "int2", "int2-g16", "nvfp4", "mxfp4", "nf4", "bnb-fp4"]
CPU = torch.device("cpu")


def reference(packed: QuantTensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    out = x.double() @ unpack(packed, torch.float64).t()
    return out if bias is None else out + bias.double()


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def named(name: str) -> Kernel:
    return next(kernel for kernel in kernels("memory") if kernel.name == name)


@pytest.mark.parametrize("level", native.supported())
@pytest.mark.parametrize("name", FORMATS)
def test_our_kernels_are_right_at_every_simd_level(name: str, level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYTORCH_SIMD", level)
    # Odd sizes: short last groups, rows that fill no vector, batches that fill no tile.
    for rows, columns, m in ((40, 256, 3), (33, 200, 13), (5, 37, 1), (64, 1000, 9)):
        weight, x, bias = torch.randn(rows, columns), torch.randn(m, columns) * 3, torch.randn(rows)
        packed = pack(weight, name)
        wanted = reference(packed, x, bias)
        for kernel in cpp.KERNELS:
            if kernel.kind == cpp.DOT and (level == "baseline" or name == "int2-g16"):
                assert kernel.why_not(packed, x.dtype, m)
                continue
            assert kernel.why_not(packed, x.dtype, m) == ""
            found = kernel.prepare(packed, bias, x.dtype).run(x)
            assert relative(found, wanted) < 4e-4, (kernel.name, rows, columns, m)


@pytest.mark.parametrize("name", FORMATS)
def test_cpp_unpacks_the_same_bits(name: str) -> None:
    packed = pack(torch.randn(37, 300), name)
    parts = [part.clone() for _, part in dense.chunks(packed, torch.float32)]
    assert torch.equal(torch.cat(parts), unpack(packed))


def test_rows_are_unpacked_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "SCRATCH_NBYTES", 16 * 64 * 4)
    packed, x, bias = pack(torch.randn(50, 64), "int4"), torch.randn(3, 64), torch.randn(50)
    assert [first for first, _ in dense.chunks(packed, torch.float32)] == [0, 16, 32, 48]
    assert relative(dense.multiply(packed, x, bias), reference(packed, x, bias)) < 1e-6
    gradient = torch.randn(3, 50)
    assert relative(dense.input_gradient(packed, gradient), gradient.double() @ unpack(packed, torch.float64)) < 1e-6


@pytest.mark.parametrize("name", FORMATS)
def test_a_rows_result_does_not_depend_on_the_batch(name: str) -> None:
    layer = QuantLinear.of(nn.Linear(200, 48), name, prefer="invariant")
    x = torch.randn(70, 200)
    together = layer(x)
    for size in (1, 2, 5, 17, 33):
        for start in (0, 70 - size):
            assert torch.equal(layer(x[start : start + size]), together[start : start + size]), size


@pytest.mark.parametrize("name", ["int8", "int4", "int2", "nvfp4"])
def test_results_do_not_depend_on_the_threads(name: str) -> None:
    """Each thread has its own part of one scratch buffer: one that reached into the next would show here."""
    packed, bias = pack(torch.randn(300, 512), name), torch.randn(300)
    before = torch.get_num_threads()
    for m, kernel in ((1, cpp.KERNELS[0]), (9, cpp.KERNELS[0]), (1, cpp.KERNELS[1]), (70, cpp.KERNELS[1])):
        if kernel.why_not(packed, torch.float32, m):
            continue
        run, x, found = kernel.prepare(packed, bias, torch.float32).run, torch.randn(m, 512), []
        unpacked = []
        try:
            for threads in (1, 2, 5):
                torch.set_num_threads(threads)
                found.append(run(x))
                unpacked.append(torch.cat([part.clone() for _, part in dense.chunks(packed, torch.float32)]))
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(one, found[0]) for one in found), (kernel.name, m)
        assert all(torch.equal(one, unpack(packed)) for one in unpacked)


NO_MEMORY = """
    import resource

    import torch
    from anytorch.errors import OutOfMemory
    from anytorch.quant import pack
    from anytorch.quant.kernels import cpp

    torch.set_num_threads(2)
    packed = pack(torch.ones(32, 2**19), "int8")
    described, out = cpp.describe(packed), torch.empty(32, 2**19)
    few, many = torch.ones(1, 2**19), torch.ones(64, 2**19)
    run = cpp.KERNELS[1].prepare(packed, None, torch.float32).run
    wanted = run(few)  # and the threads are there
    cpp.unpack_rows(packed, 0, 32, out, described)
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    for failing in (lambda: run(many), lambda: run(few), lambda: cpp.unpack_rows(packed, 0, 32, out, described)):
        resource.setrlimit(resource.RLIMIT_AS, (used + 2**20, resource.RLIM_INFINITY))
        try:
            failing()
            print("had enough")
        except OutOfMemory as exc:
            print(exc.message)
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    print(torch.equal(run(few), wanted))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the address space is bounded with Linux's RLIMIT_AS")
def test_without_memory_the_process_lives_on(run_python: Callable[..., Any]) -> None:
    # What is freed goes back to the system at once, instead of serving the next request.
    done = run_python(NO_MEMORY, env={"MALLOC_MMAP_THRESHOLD_": "65536"})
    assert done.stdout.splitlines() == [
        "no memory to multiply 64 × 524288 inputs by 32 packed rows",
        "no memory to multiply 1 × 524288 inputs by 32 packed rows",
        "no memory to unpack 32 × 524288 packed weights",
        "True",
    ]


def test_extreme_inputs() -> None:
    layer = QuantLinear.of(nn.Linear(64, 8, bias=False), "int8", prefer="invariant")
    x = torch.randn(6, 64)
    x[0], x[1] = 0, x[1] * 1e30
    x[2] *= 1e-42  # not even a normal number
    x[3, 5] = torch.nan
    x[4, 5] = torch.inf
    out = layer(x)
    assert torch.equal(out[0], torch.zeros(8))
    assert relative(out[1], reference(layer.packed, x[1:2], None)[0]) < 1e-3
    assert out[2].abs().max() < 1e-38
    assert out[3].isnan().all() and out[4].isnan().all()
    assert relative(out[5], reference(layer.packed, x[5:6], None)[0]) < 1e-3


@pytest.mark.parametrize("prefer", ["memory", "speed", "invariant"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_layer_computes_what_its_weight_says(prefer: str, dtype: torch.dtype) -> None:
    if prefer == "invariant" and dtype == torch.float64:
        with pytest.raises(UsageError, match="no kernel here"):
            QuantLinear.of(nn.Linear(64, 32), "int4", prefer="invariant")(torch.randn(2, 64, dtype=dtype))
        return
    layer = QuantLinear.of(nn.Linear(128, 64), "int4", prefer=prefer)  # type: ignore[arg-type]
    x = torch.randn(2, 3, 128).to(dtype)
    out = layer(x)
    assert out.shape == (2, 3, 64) and out.dtype == dtype
    assert layer.bias is not None
    wanted = reference(layer.packed, x.reshape(-1, 128), layer.bias.detach()).reshape(2, 3, 64)
    assert relative(out.detach(), wanted) < (1e-2 if dtype == torch.bfloat16 else 6e-3)


def test_no_rows_at_all() -> None:
    assert QuantLinear.of(nn.Linear(64, 32), "int8")(torch.empty(0, 64)).shape == (0, 32)


def test_inputs_and_bias_get_gradients() -> None:
    linear = nn.Linear(64, 32)
    layer = QuantLinear.of(linear, "int4")
    x = torch.randn(5, 64, requires_grad=True)
    layer(x).square().sum().backward()
    assert layer.bias is not None and layer.bias.grad is not None and x.grad is not None
    plain = nn.Linear(64, 32).double()
    plain.weight.data, plain.bias.data = unpack(layer.packed, torch.float64), linear.bias.detach().double()
    y = x.detach().double().requires_grad_()
    plain(y).square().sum().backward()
    assert y.grad is not None and plain.bias.grad is not None
    assert relative(x.grad, y.grad) < 1e-3 and relative(layer.bias.grad, plain.bias.grad) < 1e-3


def test_a_trained_bias_is_used_as_it_is_now() -> None:
    layer = QuantLinear.of(nn.Linear(64, 32), "int8")
    x = torch.randn(4, 64)
    before = layer(x).detach()
    assert layer.bias is not None
    with torch.no_grad():
        layer.bias += 1
    assert torch.allclose(layer(x), before + 1, atol=1e-5)


def test_autocast_is_obeyed() -> None:
    layer = QuantLinear.of(nn.Linear(64, 32), "int8")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.randn(2, 64)).dtype == torch.bfloat16


def test_copies_are_independent() -> None:
    layer = QuantLinear.of(nn.Linear(64, 32), "int4")
    x = torch.randn(2, 64)
    before = layer(x)
    twin = copy.deepcopy(layer)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    third = torch.load(buffer, weights_only=False)
    twin.set_packed(pack(torch.zeros(32, 64), "int4"))
    assert torch.equal(layer(x), before) and torch.equal(third(x), before)
    assert layer.bias is not None and torch.equal(twin(x), layer.bias.detach().expand(2, 32))


def test_loading_a_state_dict_replaces_the_weight() -> None:
    layer, other = (QuantLinear.of(nn.Linear(64, 32), "int4") for _ in range(2))
    x = torch.randn(2, 64)
    layer(x)
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(x), other(x))


def test_half_is_about_activations() -> None:
    layer = QuantLinear.of(nn.Linear(64, 32), "int8").half()
    layer.packed.check()
    assert layer.dtype == torch.float16 and layer.weight.dtype == torch.float16
    assert layer(torch.randn(2, 64, dtype=torch.float16)).dtype == torch.float16


def test_while_torch_compile_traces_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = QuantLinear.of(nn.Linear(64, 32), "int4")
    x = torch.randn(2, 64)
    with torch.no_grad():
        wanted = layer(x)
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
        monkeypatch.setattr(QuantLinear, "compute", None)
        assert torch.allclose(layer(x), wanted, atol=1e-3)


# --- choosing ---------------------------------------------------------------------------------------------------------


def measured(name: str, seconds: float | None, extra: int = 0, invariant: bool = False) -> Trial:
    facts = {"extra_nbytes": extra, "batch_invariant": invariant}
    return Trial(name, seconds, error=0.0, refused="" if seconds else "wrong", facts=facts)


def test_the_fastest_allowed_kernel_wins() -> None:
    found = [measured(BASELINE, 1.0, 4000), measured("big", 0.1, 4000), measured("small", 0.5), measured("bad", None)]
    assert decide(found, "speed", CPU).kernel == "big"
    chosen = decide(found, "memory", CPU)
    assert chosen.kernel == "small" and chosen.speedup == 2.0 and "2.00× as fast as float" in chosen.why
    with pytest.raises(UsageError, match="bad: wrong"):
        decide(found, "invariant", CPU)


def test_without_a_baseline_the_leanest_is_taken() -> None:
    """A slow device may have had time for few of them."""
    found = [measured("scales", 0.5, 40), measured("copy", 0.1, 4000), Trial(BASELINE, refused="no time")]
    assert decide(found, "memory", CPU).kernel == "scales"


def test_what_is_slower_than_float_is_said() -> None:
    found = [measured(BASELINE, 1.0, 4000), measured("small", 2.0)]
    assert "2.00× slower than float (1 s)" in decide(found, "memory", CPU).why
    speed = decide(found, "speed", CPU)
    assert speed.kernel == BASELINE and "no packed kernel is faster here (small: 2 s)" in speed.why


def test_a_wrong_answer_is_never_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(torch.randn(32, 64), "int8")
    wrong = named("torch cast int8")
    prepare = type(wrong).prepare

    def broken(self: Kernel, *args: object) -> object:
        good = prepare(self, *args)  # type: ignore[arg-type]
        return type(good)(lambda x: good.run(x) * 1.1)

    monkeypatch.setattr(type(wrong), "prepare", broken)
    choice = choose(packed, None, torch.float32, 1, "memory")
    entry = next(one for one in choice.measured if one.name == wrong.name)
    assert entry.seconds is None and "off by 0.1" in entry.refused


def test_what_will_not_last_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(torch.randn(64, 64), "int8")
    with monkeypatch.context() as patch:
        patch.setattr(cpp, "_trouble", lambda cache, level: "no C++ compiler on this machine")
        assert not choose(packed, None, torch.float32, 1).kernel.startswith("cpp")
    choice = choose(packed, None, torch.float32, 1)  # the same case, and now there is a compiler
    if cpp.available():
        assert any(one.seconds for one in choice.measured if one.name in {kernel.name for kernel in cpp.KERNELS})
        assert len(list(store.verdicts())) == 2

    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    store.clear()
    monkeypatch.setattr(type(dense.KEPT), "prepare", full)
    choose(packed, None, torch.float32, 16)
    assert not list(store.verdicts())


def test_threads_that_ask_at_once_get_one_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each measured for itself before, and where two kernels are about as fast they chose different ones."""
    measured, start = [], threading.Barrier(4)
    measure = choose_module._measure

    def counted(*asked: Any) -> Any:
        measured.append(threading.get_ident())
        return measure(*asked)

    monkeypatch.setattr(choose_module, "_measure", counted)
    layer, x = QuantLinear.of(nn.Linear(64, 32), "int8"), torch.randn(4, 64)
    found: list[torch.Tensor] = []

    def call() -> None:
        start.wait()
        with torch.no_grad():
            found.append(layer(x))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(measured) == 1
    assert len(found) == 4 and all(torch.equal(one, found[0]) for one in found)


def test_a_kernel_that_fails_keeps_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(type(named("torch cast int8")), "prepare", fail)
    choice = choose(pack(torch.randn(32, 64), "int8"), None, torch.float32, 4, "memory")
    entry = next(one for one in choice.measured if one.name == "torch cast int8")
    assert entry.refused == "RuntimeError: no such instruction"


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda run, x: run(x) * torch.nan, "off by nan"),
        (lambda run, x: run(x).double(), "the answer is torch.float64, not torch.float32"),
        (lambda run, x: run(x)[:1], "shape"),
        (lambda run, x: run(x.mul_(1.0001)), "it changed its input 0"),
    ],
)
def test_other_wrong_answers(spoil: Callable[..., Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = named("torch cast int8")
    prepare = type(wrong).prepare

    def broken(self: Kernel, *args: object) -> object:
        good = prepare(self, *args)  # type: ignore[arg-type]
        return type(good)(lambda x: spoil(good.run, x))

    monkeypatch.setattr(type(wrong), "prepare", broken)
    choice = choose(pack(torch.randn(32, 64), "int8"), None, torch.float32, 4)
    entry = next(one for one in choice.measured if one.name == wrong.name)
    assert entry.seconds is None and words in entry.refused and choice.kernel != wrong.name


def test_without_a_compiler_another_path_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp, "_trouble", lambda cache, level: "no C++ compiler on this machine")
    layer = QuantLinear.of(nn.Linear(64, 32), "int4")
    x = torch.randn(3, 64)
    assert layer.bias is not None
    assert relative(layer(x).detach(), reference(layer.packed, x, layer.bias.detach())) < 1e-3
    refused = {one.name: one.refused for one in layer.choice(3).measured}
    assert refused["cpp panel"] == "no C++ compiler on this machine"


def test_row_classes() -> None:
    cpu, other = torch.device("cpu"), torch.device("meta")
    assert [row_class(m, cpu) for m in (1, 2, 4, 5, 64, 65, 100_000)] == [1, 4, 4, 16, 64, 256, 256]
    assert [row_class(m, other) for m in (1, 256, 257, 100_000)] == [1, 256, 4096, 4096]


def test_importance_says_whose_errors_count() -> None:
    """The search for a group's range gives the columns that matter the finer steps, at the price of the others."""
    torch.manual_seed(0)
    weight = torch.randn(32, 64)
    weight[:, ::16] *= 2  # outliers that stretch every group's range
    importance = torch.ones(64)
    importance[::16] = 1e-4
    plain, aware = (unpack(pack(weight, "int4-sym-g16", refine=True, importance=one)) for one in (None, importance))
    matters = importance == 1

    def error(found: torch.Tensor, columns: torch.Tensor) -> float:
        return float((found - weight)[:, columns].norm())

    assert error(aware, matters) < 0.97 * error(plain, matters)
    assert error(aware, ~matters) > error(plain, ~matters)
    torch.testing.assert_close(unpack(pack(weight, "int4-sym-g16", refine=True, importance=torch.ones(64))), plain)
    with pytest.raises(InputError, match="one number for each of 64 columns"):
        pack(weight, "int4", refine=True, importance=torch.ones(32))


def test_what_was_measured_with_other_libraries_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = pack(torch.randn(16, 64), "int8")
    asked = (packed, None, torch.float32, 1)
    before = [choose_module.question(*asked, prefer) for prefer in ("speed", "memory")]
    monkeypatch.setattr(choose_module.libraries, "installed", lambda name: f"{name} 99")
    after = [choose_module.question(*asked, prefer) for prefer in ("speed", "memory")]
    assert after[0].key != before[0].key and "bitsandbytes 99" in after[0].facts["libraries"]
    assert after[1].key == before[1].key, "only speed asks them"


@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_torchao_is_imported_in_silence(run_python: Callable[..., Any]) -> None:
    done = run_python("from anytorch.quant.kernels import libraries; print(libraries._import('torchao.quantization'))")
    assert "<module 'torchao.quantization'" in done.stdout and not done.stderr
