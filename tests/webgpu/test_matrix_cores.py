"""Matrix cores: the kernels' answers under a driver that has them, valid SPIR-V, and going without where they are missing.

`tools/matrix-vulkan.sh` unpacks the driver (a lavapipe of Mesa 26) and spirv-val into .cache/matrix-vulkan; `make test` runs
it.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from anytorch.gpu import layer
from anytorch.gpu.spirv import attention, convolution
from anytorch.gpu.spirv.matmul import Product, Shape, Tile, layout, render
from anytorch.gpu.wgsl.attention_kernel import Attention
from anytorch.webgpu import matrix_products
from anytorch.webgpu.products import Geometry, Operand

ROOT = Path(__file__).resolve().parents[2]
UNPACKED = ROOT / ".cache" / "matrix-vulkan"
CHILD = Path(__file__).parent / "matrix_products_child.py"
QUICK = (
    "whole tiles",
    "ragged",
    "both transposed",
    "odd sizes",
    "split sums",
    "batches",
    "bias",
    "attention",
)
NVIDIA = Shape(16, 16, 16, 32)


@pytest.fixture(scope="module")
def unpacked(missing: Callable[[str, str], NoReturn]) -> Path:
    if not (UNPACKED / "run").exists():
        missing("matrix-vulkan", "run tools/matrix-vulkan.sh")
    return UNPACKED


def run_child(unpacked: Path, tmp_path: Path, *arguments: str, **variables: str) -> dict[str, Any]:
    """What the child found, under the driver that has cooperative matrices."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "compat" / "src")]),
        "ANYTORCH_WEBGPU_MATRIX_CORES": "on",
        "ANYTORCH_WEBGPU_ADAPTER": "llvmpipe",
        "XDG_RUNTIME_DIR": str(tmp_path),
        **variables,
    }
    done = subprocess.run(
        [unpacked / "run", sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def agrees(found: dict[str, Any], names: tuple[str, ...] = ()) -> None:
    assert found.pop("matrix cores") == "used for products in float16, where they are faster (8x8x8)"
    assert found.pop("fallbacks") == {}
    assert not names or tuple(found) == names
    for name, one in found.items():
        assert one["tiles"], f"{name}: no product ran on matrix cores"
        assert one["size"] and one["same_nan"] and one["error"] < 1e-3, (name, one)
    if "split sums" in found:
        assert not found["split sums"]["tiles"][0].endswith(", 1")


@pytest.mark.long
def test_products(unpacked: Path, tmp_path: Path) -> None:
    agrees(run_child(unpacked, tmp_path, str(CHILD), *QUICK), QUICK)


# GPUs keep one tile in workgroup memory, the tile for software adapters is the only one that keeps two.
@pytest.mark.parametrize(
    "tile",
    [
        pytest.param("32x32x32x2x2", marks=pytest.mark.long),
        pytest.param("128x128x32x2x2", marks=pytest.mark.slow),  # a minute and a half, all of it the driver's compiler
    ],
)
def test_products_from_one_buffer(unpacked: Path, tmp_path: Path, tile: str) -> None:
    names = ("ragged", "split sums", "bias") if tile.startswith("32") else ("ragged",)
    found = run_child(unpacked, tmp_path, str(CHILD), tile, *names)
    used = {name.partition(",")[0] for case in names for name in found[case]["tiles"]}
    agrees(found, names)
    assert used == {f"matrix cores {tile.removesuffix('x2x2')} by 2x2 single"}


@pytest.mark.slow
def test_all_products(unpacked: Path, tmp_path: Path) -> None:
    agrees(run_child(unpacked, tmp_path, str(CHILD)))


REASON = """
import json, torch, anytorch.webgpu
a = torch.ones(64, 64, dtype=torch.float16, device="webgpu")
print(json.dumps({"why": torch.webgpu.get_device_properties()["matrix_cores"], "sum": float((a @ a).float().sum())}))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ("off", "not used: the setting webgpu_matrix_cores is off"),
        ("auto", "not used: this adapter computes on the CPU"),
    ],
)
def test_the_setting(unpacked: Path, tmp_path: Path, setting: str, why: str) -> None:
    found = run_child(unpacked, tmp_path, "-c", REASON, ANYTORCH_WEBGPU_MATRIX_CORES=setting)
    assert found == {"why": why, "sum": 64.0**3}


@pytest.mark.long
def test_without_a_compiler_there_are_none(unpacked: Path, tmp_path: Path) -> None:
    """And nobody is told unless he asks."""
    nowhere = {"ANYTORCH_CXX": "no-such-compiler", "ANYTORCH_CACHE_DIR": str(tmp_path / "cache")}
    found = run_child(unpacked, tmp_path, "-c", REASON, **nowhere)
    assert found["why"].startswith("not used: the Vulkan layer cannot be built: ") and found["sum"] == 64.0**3


def test_a_driver_without_them(webgpu: Any) -> None:
    """The software driver of the other tests is too old for them, or is the one that has them."""
    told = webgpu.webgpu.get_device_properties()["matrix_cores"]
    old = "not used: the driver has no cooperative matrices (VK_KHR_cooperative_matrix)"
    assert told in (old, "not used: this adapter computes on the CPU")
    assert "VK_INSTANCE_LAYERS" not in os.environ


# --- what the driver says -------------------------------------------------------------------------------------------


def report(*shapes: tuple[int, ...], state: int = 1, subgroups: tuple[int, int] = (32, 32), required: int = 1) -> Any:
    made = layer._Report(state, *subgroups, required, 1, shape_count=len(shapes))
    for place, shape in zip(made.shapes, shapes, strict=False):
        place[:] = (*shape, 0, 3)
    return made


# m, n, k and the types of A, B, C and the result, as an NVIDIA H200 lists them: float16 is 0, float32 1.
HALF = [
    (16, 16, 16, 0, 0, 1, 1),
    (16, 8, 16, 0, 0, 1, 1),
    (16, 16, 16, 0, 0, 0, 0),
    (16, 16, 16, *[1000141000] * 2, 1, 1),
]


def test_shapes_of_a_driver() -> None:
    found = layer.read_report(report(*HALF))
    assert found.why_not == "" and (found.subgroup, found.required_subgroup) == (32, 0)
    assert found.shape_for("float16") == layer.MatrixShape(16, 16, 16, "float16", "float16", "float32", "subgroup")
    assert found.shape_for("bfloat16") is not None and found.shape_for("int8") is None


def test_a_subgroup_size_is_required_where_sizes_differ() -> None:
    assert layer.read_report(report(*HALF, subgroups=(32, 64))).required_subgroup == 32
    assert layer.read_report(report(*HALF, subgroups=(8, 16))).required_subgroup == 16
    told = layer.read_report(report(*HALF, subgroups=(32, 64), required=0)).why_not
    assert told == "subgroup sizes vary, and the driver does not let a program require one"


@pytest.mark.parametrize("state", [0, -1, -2, -3])
def test_a_device_without_matrices_says_why(state: int) -> None:
    assert layer.read_report(report(*HALF, state=state)).why_not == layer.STATES[state]


def test_sums_in_half_precision_alone_are_not_used() -> None:
    told = layer.read_report(report((16, 16, 16, 0, 0, 0, 0))).why_not
    assert told == "the driver lists no matrices with sums in float32"


def test_other_apis_have_none() -> None:
    assert (
        layer.found("Metal").why_not
        == "matrix cores are used through Vulkan, and this adapter is reached through Metal"
    )


def test_the_report_is_laid_out_as_in_the_layer() -> None:
    """Twelve words and two counts, then 128 shapes of nine words and as many of ten."""
    assert ctypes.sizeof(layer._Report) == 4 * (14 + 128 * 9 + 128 * 10)


# --- SPIR-V ---------------------------------------------------------------------------------------------------------


def kernels() -> list[Product]:
    """One of each kind of thing that a kernel can do, not of each combination."""
    tile, single = Tile(64, 64, 32, 2, 2), Tile(64, 64, 32, 2, 2, buffers=1)
    found = [
        Product(element, stored, tile, NVIDIA, added, a, b, activation)
        for (element, stored), (a, b), (added, activation) in product(
            [("float16", "float16"), ("bfloat16", "bfloat16"), ("float16", "float32")],
            [("k", "n"), ("m", "k")],
            [("", ""), ("float32", "gelu"), ("float16", "relu"), ("bfloat16", "")],
        )
    ]
    found += [
        Product("float16", "float32", single, NVIDIA, split=True, whole_rows=whole, ragged_k=whole)
        for whole in (True, False)
    ]
    return found


def raced() -> list[Product]:
    """Each tile that is tried on a GPU, as an even product and an odd one have it."""
    return [
        Product("float16", "float16", tile, NVIDIA, ragged_k=odd, a_units=not odd, b_units=not odd, whole_rows=not odd)
        for tile, odd in product(matrix_products.TILES, (False, True))
    ]


def attentions() -> list[Attention]:
    return [
        Attention("cores", dtype, 64, causal, mask, 64, 32, sums=causal)
        for dtype, causal, mask in product(("float16", "bfloat16"), (False, True), ("", "bool", "float16"))
    ]


@pytest.mark.parametrize("size", [2048, 4096, 8192])
@pytest.mark.parametrize("shared_kib", [32, 48])
def test_the_tile_that_was_fastest_for_large_products_is_raced_first(size: int, shared_kib: int) -> None:
    """128 x 128 by four subgroups, from one buffer (docs/design/0012), on a card that lists what an H200 does."""
    runtime: Any = SimpleNamespace(
        matrix_cores=layer.read_report(report(*HALF)),
        adapter=SimpleNamespace(software=False),
        features={"shader-f16"},
        limits={
            "max-compute-workgroup-storage-size": shared_kib << 10,
            "max-compute-invocations-per-workgroup": 1024,
        },
    )
    operand = Operand(torch.float16, (0, size, 1), True, True)
    first, *others = matrix_products.offered(runtime, Geometry(1, size, size, size, *[operand] * 3, None, ""))
    assert first.name == "matrix cores 128x128x32 by 2x2 single" and first.splits == 1
    assert len(others) == matrix_products.KEPT - 1
    # A workgroup with more leaves room for fewer of them.
    assert all(layout(first.tile, NVIDIA, a, b).units * 16 <= 20 << 10 for a, b in product("km", "nk"))


def test_kernels_are_valid_spirv(unpacked: Path, tmp_path: Path) -> None:
    rendered = {str(kernel): render(kernel) for kernel in (*kernels(), *raced())}
    rendered |= {str(kernel): attention.render(kernel, NVIDIA) for kernel in attentions()}
    for whole, added in product((True, False), ("", "float16")):
        gathered = convolution.Convolution(
            *("float16", "float16", Tile(64, 64, 32, 2, 2), NVIDIA, added),
            whole_rows=whole,
            kernel=(3, 3),
            stride=(2, 1),
        )
        rendered[str(gathered)] = convolution.render(gathered)
    path = tmp_path / "kernel.spv"
    for kernel, words in rendered.items():
        path.write_bytes(words)
        done = subprocess.run(
            [unpacked / "spirv-val", "--target-env", "vulkan1.3", path], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, (kernel, done.stderr, done.stdout)


def test_a_tile_must_fit_the_driver() -> None:
    tile = Tile(128, 128, 32, 2, 2)
    assert tile.fits(NVIDIA, 48 << 10, 1024)
    assert not tile.fits(NVIDIA, 32 << 10, 1024), "workgroup memory"
    assert not tile.fits(NVIDIA, 48 << 10, 64), "invocations"
    assert not tile.fits(Shape(16, 16, 12, 32), 48 << 10, 1024), "elements are read in eights"
