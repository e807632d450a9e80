"""Packages of CUDA's world: what torch has, too, is given, what it has not is told with the line that asked."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from anytorch.errors import CannotStandIn
from anytorch.run.refusals import LATER, install_extensions, install_triton


def test_flash_attention(cuda: Any, fresh_ledger: Any) -> None:
    from flash_attn import flash_attn_func, flash_attn_qkvpacked_func
    from flash_attn.flash_attn_interface import flash_attn_varlen_func

    cuda.manual_seed(0)
    q = cuda.randn(2, 5, 4, 8, device="cuda")
    k, v = (cuda.randn(2, 5, 2, 8, device="cuda") for _ in range(2))
    wide_k, wide_v = (one.repeat_interleave(2, dim=2) for one in (k, v))
    scores = cuda.einsum("bqhd,bkhd->bhqk", q, wide_k) / 8**0.5
    mask = cuda.ones(5, 5, dtype=cuda.bool).tril().cuda()
    wanted = cuda.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~mask, -cuda.inf).softmax(-1), wide_v)
    got = flash_attn_func(q, k, v, causal=True)
    assert cuda.allclose(got, wanted, atol=1e-5)
    packed = cuda.stack([q, wide_k, wide_v], dim=2)
    assert cuda.allclose(flash_attn_qkvpacked_func(packed, causal=True), wanted, atol=1e-5)
    ends = cuda.tensor([0, 5, 10], dtype=cuda.int32, device="cuda")
    flat = flash_attn_varlen_func(*(one.reshape(10, -1, 8) for one in (q, k, v)), ends, ends, 5, 5, causal=True)
    assert cuda.allclose(flat.reshape(2, 5, 4, 8), wanted, atol=1e-5)
    near = mask & cuda.ones(5, 5, dtype=cuda.bool).triu(-2).cuda()
    wanted = cuda.einsum("bhqk,bkhd->bqhd", scores.masked_fill(~near, -cuda.inf).softmax(-1), wide_v)
    assert cuda.allclose(flash_attn_func(q, k, v, causal=True, window_size=(2, 0)), wanted, atol=1e-5)
    # The last query is aligned with the last key.
    assert cuda.allclose(flash_attn_func(q[:, -1:], k, v, causal=True), got[:, -1:], atol=1e-5)
    with pytest.raises(CannotStandIn, match="alibi_slopes") as told:
        flash_attn_func(q, k, v, alibi_slopes=cuda.ones(4))
    assert __file__ in str(told.value)
    with pytest.raises(ModuleNotFoundError, match="flash_attn_func and its like"):
        import flash_attn.layers.rotary  # noqa: F401
    with pytest.raises(ImportError, match="flash_attn_with_kvcache") as told:
        from flash_attn import flash_attn_with_kvcache  # noqa: F401
    assert f"{__file__}:" in str(told.value) and not hasattr(sys.modules["flash_attn"], "flash_attn_with_kvcache")
    assert "flash_attn, as scaled_dot_product_attention" in fresh_ledger.redirected


def test_padding(cuda: Any) -> None:
    from flash_attn.bert_padding import pad_input, unpad_input

    states = cuda.arange(24.0, device="cuda").view(2, 4, 3)
    mask = cuda.tensor([[1, 1, 0, 0], [1, 1, 1, 1]], device="cuda")
    rows, indices, ends, longest, used = unpad_input(states, mask)
    assert indices.tolist() == [0, 1, 4, 5, 6, 7] and ends.tolist() == [0, 2, 6] and longest == 4
    assert used.tolist() == [2, 4] and ends.dtype == cuda.int32
    assert cuda.equal(pad_input(rows, indices, 2, 4), states * mask[..., None])


def test_xformers(cuda: Any) -> None:
    import xformers.ops as xops

    q, k, v = (cuda.randn(2, 6, 3, 8, device="cuda") for _ in range(3))
    from flash_attn import flash_attn_func

    assert cuda.allclose(xops.memory_efficient_attention(q, k, v), flash_attn_func(q, k, v), atol=1e-5)
    causal = xops.memory_efficient_attention(q, k, v, attn_bias=xops.LowerTriangularMask())
    assert cuda.allclose(causal, flash_attn_func(q, k, v, causal=True), atol=1e-5)
    one = xops.memory_efficient_attention(q[:, :, 0], k[:, :, 0], v[:, :, 0])
    assert cuda.allclose(one, flash_attn_func(q, k, v)[:, :, 0], atol=1e-5)
    with pytest.raises(CannotStandIn, match="BlockDiagonalMask"):
        xops.memory_efficient_attention(q, k, v, attn_bias=type("BlockDiagonalMask", (), {})())


def test_they_go_with_the_stand_in(cpu_wheel: None) -> None:
    import anytorch

    with anytorch.stand_in("cpu"):
        importlib.import_module("flash_attn")
    assert "flash_attn" not in sys.modules and "xformers.ops" not in sys.modules


def test_a_package_that_is_not_there(cuda: Any, fresh_ledger: Any) -> None:
    name = "cupyx"
    with pytest.raises(ModuleNotFoundError) as told:
        import cupyx  # noqa: F401
    assert told.value.name == name and f"{__file__}:" in str(told.value) and "SciPy" in str(told.value)
    assert importlib.util.find_spec(name) is None, "whoever only asks gets the plain answer"
    assert list(fresh_ledger.refused) == ["import cupyx"]


def test_packages_that_choose_kernels_see_the_real_device(
    cuda: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """bitsandbytes asks when it is imported, and looks for NVIDIA's functions in torch where the answer is yes."""
    package = tmp_path / "bitsandbytes"
    package.mkdir()
    (package / "__init__.py").write_text("import torch\nfrom .ops import kind\nthere = torch.cuda.is_available()\n")
    (package / "ops.py").write_text("def kind(x):\n    return x.device.type, x.is_cuda\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "bitsandbytes"]:
        monkeypatch.delitem(sys.modules, name)
    found = importlib.import_module("bitsandbytes")
    assert found.there is False and found.kind(cuda.ones(1, device="cuda"))[1] is False
    for name in ("bitsandbytes", "bitsandbytes.ops"):
        monkeypatch.delitem(sys.modules, name)


def test_packages_that_are_there_are_left_alone(cuda: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    (tmp_path / "cupy.py").write_text("there = True")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        assert importlib.import_module("cupy").there is True
    finally:
        sys.modules.pop("cupy", None)


def test_triton_kernels(cpu_wheel: None) -> None:
    from anytorch.run.patches import Patches

    patches, function = Patches(), type("JITFunction", (), {"run": lambda self: "ran"})
    install_triton(patches, SimpleNamespace(JITFunction=function))
    kernel: Any = function()
    kernel.fn = test_triton_kernels
    with pytest.raises(CannotStandIn, match="the Triton kernel test_triton_kernels") as told:
        kernel.run()
    assert f"{__file__}:" in str(told.value) and "TRITON_INTERPRET=1" in str(told.value)
    patches.undo()
    assert kernel.run() == "ran"


def test_extensions(cpu_wheel: None) -> None:
    from anytorch.run.patches import Patches

    module: Any = ModuleType("cpp_extension")
    module.load = lambda name, sources, **k: (name, sources)
    module.load_inline = lambda name, cpp, cuda=None, **k: (name, cpp)
    module.CUDAExtension = object
    patches = Patches()
    install_extensions(patches, module)
    assert module.load("mine", ["a.cpp"]) == ("mine", ["a.cpp"]) and module.load_inline("mine", "int x;")[0] == "mine"
    for refused in (
        lambda: module.load("mine", ["a.cpp", "b.cu"]),
        lambda: module.load_inline("mine", "", cuda_sources="kernel"),
        lambda: module.CUDAExtension("mine", []),
    ):
        with pytest.raises(CannotStandIn, match="needs CUDA itself"):
            refused()
    patches.undo()
    assert module.CUDAExtension is object
    assert set(LATER) == {"triton.runtime.jit", "torch.utils.cpp_extension"}
