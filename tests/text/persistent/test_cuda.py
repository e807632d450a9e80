"""What can be said of the CUDA kernel without a GPU: which models it takes, and how its argument lies in memory.

What it computes is tested on a GPU: tests/device/test_persistent.py.
"""

from __future__ import annotations

import ctypes
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anytorch.errors import NativeUnavailable, UsageError
from anytorch.text.decoders import Decoder
from anytorch.text.decoders.choosing import NO_NUMBER
from anytorch.text.decoders.spec import read_spec
from anytorch.text.persistent import cuda, nvrtc, trace

QWEN: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    return torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("changes", "dtype", "why"),
    [
        ({}, torch.bfloat16, ""),
        ({}, torch.float16, ""),
        ({}, torch.float32, "bfloat16 and float16"),
        ({"head_dim": 80}, torch.bfloat16, "heads of 64, 128, 256"),
        ({"intermediate_size": 100}, torch.bfloat16, "multiples of 8"),
        ({"num_attention_heads": 18}, torch.bfloat16, "at most 8 query heads"),
        ({"num_attention_heads": 133, "num_key_value_heads": 133}, torch.bfloat16, "multiprocessors"),
    ],
)
def test_which_models_it_takes(hopper: torch.device, changes: dict[str, Any], dtype: torch.dtype, why: str) -> None:
    found = cuda.refusal(read_spec({**QWEN, **changes}, "a config.json"), dtype, hopper)
    assert (why in found) if why else found == ""


def test_which_devices_it_takes(hopper: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(QWEN, "a config.json")
    assert "not on cpu" in cuda.refusal(spec, torch.bfloat16, torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert "this GPU has 8.9" in cuda.refusal(spec, torch.bfloat16, hopper)
    monkeypatch.setattr(torch.version, "cuda", None)  # ROCm
    assert "GPUs of NVIDIA" in cuda.refusal(spec, torch.bfloat16, hopper)
    with pytest.raises(UsageError, match="cannot be decoded in one launch"):
        cuda.CudaKernel(Decoder(spec).to(torch.bfloat16))


def test_how_much_a_block_shares() -> None:
    """Six slots for each of eight warps where they fit beside the vectors; fewer for long rows, and a refusal in the end."""
    spec = read_spec(QWEN, "a config.json")
    build = cuda.build_of(spec, torch.bfloat16, 16, 132, cuda.SHARED)
    sizes = dict(build.sizes)
    assert (sizes["DEPTH"], sizes["MOST_SPLITS"], build.threads, build.blocks) == (6, 64, 256, 132)
    assert build.shared <= cuda.SHARED and build.floats % 4 == 0
    long = replace(spec, inner=40_000)
    assert dict(cuda.build_of(long, torch.float16, 16, 132, cuda.SHARED).sizes)["DEPTH"] == 4
    assert dict(cuda.build_of(long, torch.float16, 4, 132, cuda.SHARED).sizes)["DEPTH"] == 5  # 8 bits and scales
    assert dict(cuda.build_of(spec, torch.bfloat16, 16, 132, cuda.SHARED, constants={"WARPS": 16}).sizes)["DEPTH"] == 3
    with pytest.raises(UsageError, match="does not fit into the"):
        cuda.build_of(replace(spec, inner=100_000), torch.bfloat16, 16, 132, cuda.SHARED)


def members(source: str, structure: str) -> list[str]:
    """The names that a structure of the source has, in their order."""
    body = source.split(f"struct {structure} {{")[1].split("};")[0]
    lines = [line.split("//")[0].strip() for line in body.splitlines()]
    return [name for line in lines for name in re.findall(r"(\w+)(?:\[\w+\])?(?=[,;])", line)]


def test_the_argument_lies_as_the_kernel_reads_it() -> None:
    """Pointers of 8 bytes, then numbers of 8, of 4, and the layers behind them: as C lays the same members out."""
    argument = cuda._run_of(3)
    assert ctypes.sizeof(cuda._Layer) == 15 * 8 + 4 * 4
    assert argument.positions.offset == 12 * 8
    assert (argument.steps.offset, argument.eps.offset, argument.trace.offset) == (104, 120, 128)
    assert argument.layers.offset == 136 and ctypes.sizeof(argument) == 136 + 3 * 136
    source = cuda.SOURCE.read_text()
    assert members(source, "Layer") == [one[0] for one in cuda._Layer._fields_]
    assert members(source, "Run") == [one[0] for one in argument._fields_]
    assert f"CHUNK = {cuda.CHUNK}" in source and f"MARKS = {trace.MARKS}" in source
    assert f"NONE = {cuda.NONE + 2**32:#x}u" in source and f"NO_NUMBER = {NO_NUMBER}" in source


def test_a_machine_without_the_run_time_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "_places", lambda: iter(["/nowhere/libnvrtc.so.13"]))
    nvrtc._nvrtc.cache_clear()
    with pytest.raises(NativeUnavailable, match="NVRTC") as refused:
        nvrtc._nvrtc()
    assert "pip install" in str(refused.value.hint)


class Compiler:
    """Stands for NVRTC: refuses sources that say so."""

    def __init__(self) -> None:
        self.compiled: list[list[bytes]] = []
        self.refuses = False

    def nvrtcVersion(self, major: Any, minor: Any) -> int:
        major._obj.value, minor._obj.value = 13, 0
        return 0

    def nvrtcCreateProgram(self, program: Any, source: bytes, *rest: Any) -> int:
        return 0

    def nvrtcCompileProgram(self, program: Any, count: int, options: Any) -> int:
        self.compiled.append(list(options))
        return 6 if self.refuses else 0

    def nvrtcGetProgramLogSize(self, program: Any, size: Any) -> int:
        size._obj.value = 8
        return 0

    def nvrtcGetProgramLog(self, program: Any, log: Any) -> int:
        log.value = b"line 3"
        return 0

    def nvrtcGetCUBINSize(self, program: Any, size: Any) -> int:
        size._obj.value = 4
        return 0

    def nvrtcGetCUBIN(self, program: Any, code: Any) -> int:
        code.raw = b"\x7fELF"
        return 0

    def nvrtcDestroyProgram(self, program: Any) -> int:
        return 0


def test_a_kernel_is_compiled_once_and_kept_as_it_was_built(monkeypatch: pytest.MonkeyPatch) -> None:
    from anytorch import settings

    compiler = Compiler()
    monkeypatch.setattr(nvrtc, "_nvrtc", lambda: compiler)

    def compiled(**sizes: int) -> bytes:
        nvrtc._compiled.cache_clear()
        return nvrtc._compiled("source", tuple(sizes.items()), "sm_90a")

    assert compiled(WIDTH=8) == compiled(WIDTH=8) == b"\x7fELF"
    assert compiler.compiled == [[b"--gpu-architecture=sm_90a", b"-std=c++17", b"-DWIDTH=8"]]
    (kept,) = settings.cache_folder().glob("cuda*/*.cubin")
    kept.write_bytes(b"damaged")
    assert compiled(WIDTH=8) == b"\x7fELF" and len(compiler.compiled) == 2
    compiler.refuses = True
    with pytest.raises(NativeUnavailable, match="line 3"):
        compiled(WIDTH=16)


def test_a_trace_shows_every_block_and_layer(tmp_path: Path) -> None:
    marks = torch.arange(2 * 3 * trace.MARKS).reshape(2, 3, trace.MARKS) * 500 + 7_000
    count = trace.write_trace(marks, tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert len(found) == count == 2 * (2 * trace.MARKS + 1)  # the head has no phases
    assert found[0] == {
        "name": "qkv", "cat": "work", "ph": "X", "ts": 0.0, "dur": 0.5, "pid": 0, "tid": 0, "args": {"layer": 0},
    }  # fmt: skip
    assert [one["name"] for one in found[: trace.MARKS]] == [*trace.PHASES, trace.BETWEEN]
    assert found[-1]["name"] == "head" and found[-1]["tid"] == 1 and found[-1]["args"] == {"layer": 2}
    assert all(one["dur"] == 0.5 for one in found)
    marks[1, :, 1] += 500  # one block's first phase takes twice as long
    assert trace.table(marks)["qkv"] == (0.75, 1.0) and trace.table(marks)["down"] == (0.5, 0.5)
