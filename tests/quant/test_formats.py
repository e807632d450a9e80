"""Sizes, errors and bytes of every format: against the definition, the published errors and the other libraries."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anytorch.errors import InputError, UsageError
from anytorch.quant import pack, parse, unpack
from anytorch.quant.arrays import unpack_arrays
from anytorch.quant.formats import NAMED, e4m3_values, e8m0_values, matrix_shape

FORMATS = ["int8", "int8-g128", "int4", "int4-g32", "int4-sym", "int4-sym-g32", "int2", "int2-g16"]
FORMATS += ["nvfp4", "mxfp4", "nf4", "nf4-g32", "bnb-fp4"]


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def normal(rows: int = 256, columns: int = 1024, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", [*NAMED, "int4-g32", "int8-g64", "nf4-g128"])
def test_a_format_reads_its_own_name(name: str) -> None:
    assert parse(str(parse(name))) == parse(name)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(64, 256), (3, 100), (5, 1), (1, 77)])
def test_sizes_are_exactly_what_the_format_says(name: str, shape: tuple[int, int]) -> None:
    packed = pack(torch.randn(shape), name)
    packed.check()
    assert packed.nbytes == packed.format.nbytes(*shape)
    assert unpack(packed).shape == shape


def test_bits_per_weight() -> None:
    bits = {name: parse(name).bits_per_weight(1024, 1024) for name in FORMATS}
    assert bits["int4"] <= 4.6 and bits["int4-sym"] == pytest.approx(4.25, abs=1e-3)
    assert bits["int8"] / 32 <= 0.30 and bits["int4"] / 32 <= 0.19
    assert bits["nvfp4"] == pytest.approx(4.5, abs=1e-3) and bits["mxfp4"] == 4.25
    assert bits["int2"] == pytest.approx(3.0, abs=1e-3) and bits["nf4"] == 4.5


# Relative errors on N(0,1), from our own measurements of the libraries (shared/research/memory-tiers.md, section 5).
KNOWN = {"int4-g32": 0.078, "int4": 0.090, "int4-sym-g32": 0.097, "nf4": 0.092, "nf4-g32": 0.087, "nvfp4": 0.095}
KNOWN |= {"mxfp4": 0.114, "int2-g16": 0.327, "int8-g128": 0.0065}


@pytest.mark.parametrize("name", KNOWN)
def test_errors_are_the_known_ones(name: str) -> None:
    weight = normal()
    assert relative_error(unpack(pack(weight, name)), weight) == pytest.approx(KNOWN[name], rel=0.02)


@pytest.mark.parametrize("name", FORMATS)
def test_refining_never_adds_error(name: str) -> None:
    weight = normal(64, 256)
    weight[3, 17] = 20.0  # an outlier is what a searched scale is for
    plain, refined = (relative_error(unpack(pack(weight, name, refine=r)), weight) for r in (False, True))
    assert refined <= plain * (1 + 1e-6)
    if name in ("int2", "int4-sym"):
        assert refined < plain * 0.97


@pytest.mark.parametrize("name", FORMATS)
def test_rounding_some_rows_at_a_time_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = normal(50, 200)
    whole = pack(weight, name, refine=True)
    monkeypatch.setattr("anytorch.quant.tensor.CHUNK", 1000)
    pieces = pack(weight, name, refine=True)
    assert all(torch.equal(whole.parts[part], pieces.parts[part]) for part in whole.parts)


@pytest.mark.parametrize("name", FORMATS)
def test_packing_what_was_unpacked_changes_nothing(name: str) -> None:
    """Values that the format can hold are held exactly (up to the last bit of a recomputed scale)."""
    once = unpack(pack(normal(16, 256), name))
    assert relative_error(unpack(pack(once, name)), once) < 2e-3


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [1e-7, 1e5])
def test_the_size_of_the_weights_does_not_matter(name: str, size: float) -> None:
    weight = normal(32, 256)
    plain = relative_error(unpack(pack(weight, name)), weight)
    scaled = relative_error(unpack(pack(weight * size, name)), weight * size)
    assert scaled == pytest.approx(plain, rel=0.1)


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zero_and_constants_stay_close(name: str) -> None:
    assert torch.equal(unpack(pack(torch.zeros(4, 128), name)), torch.zeros(4, 128))
    mixed = torch.zeros(4, 256)
    mixed[1] = 0.5
    assert relative_error(unpack(pack(mixed, name)), mixed) < 0.09


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(1, 9), st.integers(1, 200), st.integers(0, 10))
def test_numpy_reads_the_same_values(name: str, rows: int, columns: int, seed: int) -> None:
    weight = normal(rows, columns, seed)
    packed = pack(weight, name)
    arrays: dict[str, Any] = {part: value.numpy() for part, value in packed.parts.items()}
    np.testing.assert_array_equal(unpack_arrays(name, packed.shape, arrays), unpack(packed).numpy())


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(1, 6), st.integers(1, 150), st.integers(0, 10))
def test_no_weight_is_further_off_than_half_its_widest_step(name: str, rows: int, columns: int, seed: int) -> None:
    weight = normal(rows, columns, seed)
    packed = pack(weight, name)
    format = packed.format
    if format.table is None:
        widest = 1.0 / (2**format.bits - 1) * (2 if not format.symmetric else 2.4)
    else:
        gaps = sorted(format.table)
        widest = max(b - a for a, b in itertools.pairwise(gaps)) / max(gaps)
        widest *= (
            1.5 if format.scale_type == "e8m0" else 1.1
        )  # MXFP4 clips to 6 steps what lies below 8: a quarter of it
    error = (unpack(packed) - weight).abs().amax(1)
    assert (error <= weight.abs().amax(1) * widest / 2 * 1.01 + 1e-6).all()


@pytest.mark.parametrize(("shape", "matrix"), [((8,), (1, 8)), ((4, 64), (4, 64)), ((2, 3, 64), (6, 64))])
def test_matrix_shapes(shape: tuple[int, ...], matrix: tuple[int, int]) -> None:
    assert matrix_shape(shape) == matrix


def test_a_convolution_is_cut_by_output_channel() -> None:
    assert matrix_shape((16, 8, 3, 3)) == (16, 72)
    weight = torch.randn(16, 8, 3, 3)
    assert relative_error(unpack(pack(weight, "int8")), weight) < 0.02


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_dtype_comes_back(dtype: torch.dtype) -> None:
    packed = pack(normal(8, 64).to(dtype), "int8")
    assert unpack(packed).dtype == dtype and unpack(packed, torch.float32).dtype == torch.float32


def test_scale_tables_are_torchs_own() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    for table, dtype in ((e4m3_values(), torch.float8_e4m3fn), (e8m0_values(), torch.float8_e8m0fnu)):
        theirs = every.view(dtype).float().tolist()
        assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(table, theirs, strict=True))


# --- other libraries --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "theirs"), [("nf4", "nf4"), ("bnb-fp4", "fp4")])
@pytest.mark.filterwarnings("ignore")  # the library's own, at import
def test_bitsandbytes_makes_the_same_bytes(name: str, theirs: str) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = normal(64, 512)
    packed = pack(weight, name)
    codes, state = functional.quantize_4bit(weight, blocksize=64, quant_type=theirs, compress_statistics=False)
    swapped = (codes << 4) | (codes >> 4)  # they put the first of two in the high bits
    assert torch.equal(swapped.reshape(64, 256), packed.parts["codes"])
    assert torch.equal(state.absmax.reshape(64, 8), packed.parts["scale"])
    assert torch.equal(functional.dequantize_4bit(codes, state), unpack(packed))


@pytest.mark.filterwarnings("ignore")
def test_torchao_makes_the_same_mxfp4() -> None:
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    weight = normal(64, 512)
    weight[0, :32] = 0
    weight[1, :8] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 4.0])  # every half: even codes
    packed = pack(weight, "mxfp4")
    scale, codes = mx.to_mx(weight, torch.float4_e2m1fn_x2, 32)
    assert torch.equal(codes, packed.parts["codes"])
    assert torch.equal(scale.view(torch.uint8), packed.parts["scale"])


@pytest.mark.filterwarnings("ignore")
def test_torchao_makes_the_same_nvfp4() -> None:
    nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    weight = normal(64, 512)
    packed = pack(weight, "nvfp4")
    unit = nv.per_tensor_amax_to_scale(weight.abs().max())
    scale, codes = nv.nvfp4_quantize(weight, 16, unit)
    assert packed.parts["tensor_scale"] == unit
    assert torch.equal(scale.view(torch.uint8), packed.parts["scale"])
    assert torch.equal(codes, packed.parts["codes"])


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_what_is_refused() -> None:
    with pytest.raises(UsageError, match="did you mean 'int4'"):
        parse("int44")
    with pytest.raises(UsageError, match="groups of 16"):
        parse("nvfp4", 32)
    with pytest.raises(UsageError, match="sizes are"):
        parse("int4", 48)
    with pytest.raises(UsageError, match="sizes are"):
        parse("int4", 0)
    with pytest.raises(InputError, match="2 of 8 weights are not finite"):
        pack(torch.tensor([[1.0, math.nan, 2.0, 3.0], [math.inf, 1.0, 1.0, 1.0]]), "int8")
    with pytest.raises(InputError, match="floating-point"):
        pack(torch.ones(2, 2, dtype=torch.int64), "int8")
    with pytest.raises(UsageError, match="no weights"):
        pack(torch.empty(0, 4), "int8")


def test_a_part_of_the_wrong_size_is_named() -> None:
    packed = pack(normal(8, 64), "int4")
    broken = type(packed)(packed.format, packed.shape, packed.dtype, {**packed.parts, "scale": torch.ones(3)})
    with pytest.raises(InputError, match="scale of a int4-asym-g64 weight"):
        broken.check()
