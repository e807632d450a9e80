"""Packed layers on other devices: our Triton kernels in Triton's interpreter (or on a GPU), and the webgpu device."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from anytorch.devices.locate import locate
from anytorch.devices.precision import capabilities
from anytorch.quant import QuantLinear, pack, unpack
from anytorch.quant.kernels.triton import KERNELS, FewRows, arguments

FORMATS = ["int8", "int8-g64", "int4", "int4-sym-g32", "int2", "nvfp4", "mxfp4", "nf4"]

TRITON = """
import torch
from anytorch.quant import pack, unpack
from anytorch.quant.kernels.triton import FewRows, ManyRows, UnpackFirst
torch.set_num_threads(1)
torch.manual_seed(0)
tried = 0
for name in {formats!r}:
    # Short groups, tiles that are not full, several full ones and a rest, more of them than are unrolled.
    for rows, columns, m in ((24, 200, 3), (24, 128, 5), (8, 704, 1)):
        packed, bias, x = pack(torch.randn(rows, columns), name), torch.randn(rows), torch.randn(m, columns)
        wanted = x.double() @ unpack(packed, torch.float64).t() + bias.double()
        for kernel in (FewRows(8, 64, 2), FewRows(16, 16, 4), ManyRows(16, 32, 32, 4), UnpackFirst()):
            error = float((kernel.prepare(packed, bias, x.dtype).run(x) - wanted).norm() / wanted.norm())
            assert error < 1e-5, (name, kernel.name, error)
            tried += 1
answer(tried=tried)
"""


def test_triton_kernels_are_right(run_script: Callable[..., Any], missing: Callable[[str, str], NoReturn]) -> None:
    if find_spec("triton") is None:
        missing("triton", "it is not installed")
    found = run_script(TRITON.format(formats=FORMATS), {"TRITON_INTERPRET": "1"}, warm=True)
    assert found["tried"] == len(FORMATS) * 3 * 4


@pytest.mark.parametrize("name", FORMATS)
def test_what_triton_is_told_about_a_weight(name: str) -> None:
    packed = pack(torch.randn(16, 128), name)
    tensors, constants = arguments(packed, None)
    assert constants["BITS"] == packed.format.bits and constants["OFFSET"] == ("offset" in packed.parts)
    assert constants["SHIFT"] == (8.0 if name == "int4-sym-g32" else 0.0)
    assert constants["ROW_BYTES"] == packed.parts["codes"].shape[1]
    assert len(tensors) == 7 and all(isinstance(one, torch.Tensor) for one in tensors)
    for kernel in KERNELS:
        refused = kernel.why_not(packed, torch.float32, 4 if kernel.name != "triton unpack, then multiply" else 64)
        assert "no Triton" in refused, refused
        assert ("up to 4" in kernel.why_not(packed, torch.float32, 8)) == isinstance(kernel, FewRows)


def test_what_the_kernel_for_few_rows_is_told() -> None:
    kernel = FewRows(8, 64, 2)
    _, told, programs, _ = kernel.launch(pack(torch.randn(24, 200), "int4"), None)
    assert (programs, told["GROUPS"], told["ROW_WORDS"], told["BLOCK_G"]) == (3, 4, 32, 4)
    assert not told["EVEN"], "a row's last group has codes beyond its columns"
    tensors, told, _, _ = kernel.launch(pack(torch.randn(24, 1024), "int8"), None)
    assert tensors[0].dtype == torch.int32 and told["WHOLE"] and told["EVEN"] and told["GROUPS"] == 1024 // 64
    _, told, _, _ = kernel.launch(pack(torch.randn(20, 8192), "nvfp4"), None)
    assert told["E2M1"] and not told["EVEN"] and not told["UNROLL"]
    refused = kernel.why_not(pack(torch.randn(8, 6), "int8"), torch.float32, 1)
    assert "words" in refused


WEBGPU = """
import sys
import torch, anytorch
from anytorch.gpu.adapters import list_adapters
if not list_adapters():
    sys.exit(3)
from torch import nn
from anytorch.quant import QuantLinear, unpack
device = anytorch.enable("webgpu")
torch.manual_seed(0)
linear, x = nn.Linear(128, 64).requires_grad_(False), torch.randn(5, 128)
for name in {formats!r}:
    layer = QuantLinear.of(linear, name).to(device)
    found = layer(x.to(device)).cpu().double()
    wanted = x.double() @ unpack(layer.packed.to("cpu"), torch.float64).t() + linear.bias.double()
    assert float((found - wanted).norm() / wanted.norm()) < 1e-3, name
    usable = {{one.name for one in layer.choice(5).measured if one.seconds is not None}}
    if name == "int8":
        assert "device int8" in usable, usable
    if name in ("int4", "int4-sym"):
        assert "device int4" in usable, usable  # our codes are its words: nothing is copied
"""


@pytest.mark.long
def test_packed_layers_on_webgpu(run_python: Callable[..., Any], missing: Callable[[str, str], NoReturn]) -> None:
    if find_spec("wgpu") is None:
        missing("webgpu-adapter", "wgpu is not installed")
    done = run_python(WEBGPU.format(formats=["int8", "int4", "nvfp4"]), check=False, timeout_s=300)
    if done.returncode == 3:
        missing("webgpu-adapter", "no adapter on this machine")
    assert done.returncode == 0, done.stderr


@pytest.mark.device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*FORMATS, "int8-dynamic"])
def test_packed_layers_on_the_accelerator(name: str, dtype: torch.dtype, accelerator: torch.device) -> None:
    """Every kernel that the accelerator can run is right, for one row and for many."""
    device = accelerator
    backend, index = locate(device)
    linear = nn.Linear(256, 192).requires_grad_(False).to(device, dtype)
    layer = QuantLinear.of(linear, name, prefer="speed")
    for m in (1, 40):
        x = torch.randn(m, 256).to(device, dtype)
        wanted = x.cpu().double() @ unpack(layer.packed.to("cpu"), torch.float64).t() + linear.bias.cpu().double()
        error = float((layer(x).cpu().double() - wanted).norm() / wanted.norm())
        assert error < (2e-2 if name == "int8-dynamic" else 1e-2), (m, layer.choice(m, dtype).kernel)
        usable = {one.name for one in layer.choice(m, dtype).measured if one.seconds is not None}
        if capabilities(backend.name, index).triton:
            refused = {one.name: one.refused for one in layer.choice(m, dtype).measured if one.refused}
            assert any(one.startswith("triton") for one in usable), refused
