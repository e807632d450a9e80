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
    with pytest.raises(CannotStandIn, match="return_attn_probs") as told:
        flash_attn_func(q, k, v, return_attn_probs=True)
    assert __file__ in str(told.value)
    with pytest.raises(ModuleNotFoundError, match="flash_attn_func and its like"):
        import flash_attn.layers.rotary  # noqa: F401
    with pytest.raises(ImportError, match="flash_attn_unknown") as told:
        from flash_attn import flash_attn_unknown  # noqa: F401
    assert f"{__file__}:" in str(told.value) and not hasattr(sys.modules["flash_attn"], "flash_attn_unknown")
    assert "flash_attn, as scaled_dot_product_attention" in fresh_ledger.redirected


def written_out(torch: Any, q: Any, k: Any, v: Any, *, cap: float = 0.0, bias: Any = None, causal: bool = False) -> Any:
    """Attention of (batch, sequence, heads, width) tensors by its definition, in float64 on the host."""
    q, k, v = (one.cpu().double().transpose(1, 2) for one in (q, k, v))
    k, v = (one.repeat_interleave(q.shape[1] // one.shape[1], dim=1) for one in (k, v))
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    scores = cap * torch.tanh(scores / cap) if cap else scores
    scores = scores if bias is None else scores + bias.cpu().double()
    if causal:
        rows, columns = scores.shape[-2:]
        scores = scores.masked_fill(torch.ones(rows, columns).tril(columns - rows) == 0, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).float()


def test_soft_caps_and_slopes(cuda: Any) -> None:
    from flash_attn import flash_attn_func

    cuda.manual_seed(0)
    q = cuda.randn(2, 3, 4, 8, device="cuda") * 4
    k, v = (cuda.randn(2, 5, 2, 8, device="cuda") for _ in range(2))
    capped = flash_attn_func(q, k, v, softcap=2.0, causal=True).cpu()
    assert cuda.allclose(capped, written_out(cuda, q, k, v, cap=2.0, causal=True), atol=1e-5)
    assert not cuda.allclose(capped, written_out(cuda, q, k, v, causal=True), atol=1e-2)
    slopes = cuda.tensor([0.5, 0.25, 0.125, 0.0625])
    distance = cuda.tensor([[abs(key - (query + 2)) for key in range(5)] for query in range(3)])
    bias = -slopes[None, :, None, None] * distance
    sloped = flash_attn_func(q, k, v, causal=True, alibi_slopes=slopes.cuda()).cpu()
    assert cuda.allclose(sloped, written_out(cuda, q, k, v, bias=bias, causal=True), atol=1e-5)
    both = flash_attn_func(q, k, v, alibi_slopes=cuda.stack([slopes, 2 * slopes]).cuda(), softcap=2.0).cpu()
    twice = cuda.cat([bias, 2 * bias])
    assert cuda.allclose(both, written_out(cuda, q, k, v, cap=2.0, bias=twice), atol=1e-5)


def test_packed_sequences_of_many_lengths(cuda: Any) -> None:
    from flash_attn import flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func

    cuda.manual_seed(0)
    qkv = cuda.randn(7, 3, 2, 8, device="cuda")
    ends = cuda.tensor([0, 3, 7], dtype=cuda.int32, device="cuda")
    got = flash_attn_varlen_qkvpacked_func(qkv, ends, 4, causal=True).cpu()
    pieces = (qkv[None, :3].unbind(2), qkv[None, 3:].unbind(2))
    wanted = cuda.cat([written_out(cuda, *piece, causal=True)[0] for piece in pieces])
    assert cuda.allclose(got, wanted, atol=1e-5)
    apart = flash_attn_varlen_kvpacked_func(qkv[:, 0], qkv[:, 1:], ends, ends, 4, 4, causal=True).cpu()
    assert cuda.allclose(apart, wanted, atol=1e-5)


@pytest.mark.parametrize("paged", [False, True])
def test_a_cache_of_keys_and_values(cuda: Any, paged: bool) -> None:
    """New keys and values are written behind what each sequence has; rows or pages of the cache may lie anywhere."""
    from flash_attn import flash_attn_with_kvcache

    cuda.manual_seed(0)
    q, k, v = (cuda.randn(2, 2, heads, 8, device="cuda") for heads in (4, 2, 2))
    old = cuda.randn(2, 2, 8, 2, 8, device="cuda")  # k and v; sequences; room for 8
    lengths = cuda.tensor([3, 5], dtype=cuda.int32, device="cuda")
    if paged:  # pages of 2, each sequence's in another order
        table = cuda.tensor([[7, 0, 3, 5], [1, 2, 6, 4]], dtype=cuda.int32, device="cuda")
        caches = [cuda.zeros(8, 2, 2, 8, device="cuda") for _ in range(2)]
        for cache, held in zip(caches, old, strict=True):
            cache[table.long()] = held.view(2, 4, 2, 2, 8)
        got = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, block_table=table, causal=True)
        after = [cache[table.long()].view(2, 8, 2, 8) for cache in caches]
    else:
        caches = [cuda.zeros(3, 8, 2, 8, device="cuda") for _ in range(2)]
        rows = cuda.tensor([2, 0], dtype=cuda.int32, device="cuda")
        for cache, held in zip(caches, old, strict=True):
            cache[rows.long()] = held
        got = flash_attn_with_kvcache(q, *caches, k, v, cache_seqlens=lengths, cache_batch_idx=rows, causal=True)
        after = [cache[rows.long()] for cache in caches]
    for number, length in enumerate(lengths.tolist()):
        keys, values = (
            cuda.cat([held[number, :length], new[number]])[None] for held, new in zip(old, (k, v), strict=True)
        )
        wanted = written_out(cuda, q[number : number + 1], keys, values, causal=True)
        assert cuda.allclose(got[number : number + 1].cpu(), wanted, atol=1e-5)
        assert cuda.equal(after[0][number, : length + 2].cpu(), keys[0].cpu())
    with pytest.raises(CannotStandIn, match="rotary_cos"):
        flash_attn_with_kvcache(q, *caches, rotary_cos=cuda.ones(8, 4))


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
    grouped = xops.memory_efficient_attention(*(one[:, :, None] for one in (q, k, v)))
    assert cuda.allclose(grouped[:, :, 0], xops.memory_efficient_attention(q, k, v), atol=1e-6)
    with pytest.raises(CannotStandIn, match="PagedBlockDiagonalPaddedKeysMask"):
        xops.memory_efficient_attention(q, k, v, attn_bias=type("PagedBlockDiagonalPaddedKeysMask", (), {})())


def test_xformers_masks(cuda: Any) -> None:
    from xformers.ops import LowerTriangularMask, fmha, memory_efficient_attention
    from xformers.ops.fmha.attn_bias import BlockDiagonalMask, LowerTriangularFromBottomRightMask

    cuda.manual_seed(0)
    q, k, v = (cuda.randn(1, tokens, 2, 8, device="cuda") for tokens in (7, 9, 9))
    mask = BlockDiagonalMask.from_seqlens([3, 4], [4, 5])
    pieces = [(q[:, :3], k[:, :4], v[:, :4]), (q[:, 3:], k[:, 4:], v[:, 4:])]
    got = memory_efficient_attention(q, k, v, attn_bias=mask).cpu()
    assert cuda.allclose(got, cuda.cat([written_out(cuda, *piece) for piece in pieces], 1), atol=1e-5)
    assert [part.shape[1] for part in mask.split(got)] == [3, 4]
    last = memory_efficient_attention(q, k, v, attn_bias=mask.make_causal_from_bottomright()).cpu()
    assert cuda.allclose(last, cuda.cat([written_out(cuda, *piece, causal=True) for piece in pieces], 1), atol=1e-5)
    for causal in (mask.make_causal(), LowerTriangularFromBottomRightMask()):
        bias = causal.materialize((1, 2, 7, 9))
        assert bias.shape == (1, 2, 7, 9)
        got = memory_efficient_attention(q, k, v, attn_bias=causal).cpu()
        assert cuda.allclose(got, written_out(cuda, q, k, v, bias=bias), atol=1e-5)
    added = cuda.randn(1, 2, 7, 9)
    got = memory_efficient_attention(q, k, v, attn_bias=LowerTriangularMask().add_bias(added)).cpu()
    seen = LowerTriangularMask().materialize((7, 9))
    assert cuda.allclose(got, written_out(cuda, q, k, v, bias=seen + added), atol=1e-5)
    joined, row = fmha.BlockDiagonalMask.from_tensor_list([q.expand(2, -1, -1, -1), k])
    assert [tuple(part.shape[:2]) for part in joined.split(row)] == [(2, 7), (1, 9)]
    with pytest.raises(ValueError, match="the sequences of the mask have"):
        mask.materialize((3, 3))


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
    try:
        found = importlib.import_module("bitsandbytes")
        assert found.there is False and found.kind(cuda.ones(1, device="cuda"))[1] is False
    finally:  # not by monkeypatch, which would put this one back for the tests that want the real one
        for name in ("bitsandbytes", "bitsandbytes.ops"):
            sys.modules.pop(name, None)


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
