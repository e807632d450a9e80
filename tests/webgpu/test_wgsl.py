"""The shader text our generators write, against stored files: a change of the generators shows as a diff.

UPDATE_GOLDEN=1 pytest tests/webgpu/test_wgsl.py    writes the files anew
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anytorch.gpu.wgsl import elementwise
from anytorch.gpu.wgsl.elementwise import Elementwise, collapse, render
from anytorch.gpu.wgsl.indexing import (
    Compact,
    Gather,
    Scatter,
    Walk,
    render_compact,
    render_gather,
    render_scatter,
    widest,
)
from anytorch.gpu.wgsl.types import KINDS, convert, supported

GOLDEN = Path(__file__).parent / "golden"

KERNELS = {
    "add-float32-vector": lambda: render(Elementwise("x0 + x1", ("float32", "float32"), "float32", vector=True)),
    "add-float32-strided": lambda: render(Elementwise("x0 + x1", ("float32", "float32"), "float32", rank=2)),
    "scale-bfloat16": lambda: render(Elementwise("x0 * s0()", ("bfloat16",), "bfloat16", ("f32",))),
    "less-bool": lambda: render(Elementwise("select(0, 1, x0 < x1)", ("int64", "int64"), "bool")),
    "fill-int8-atomic": lambda: render(Elementwise("s0()", (), "int8", ("i32",), rank=1, atomic=True)),
    "negate-high-rank": lambda: render(
        Elementwise("-x0", ("float16",), "float16", rank=3, shape=(2, 3, 4), strides=((1, 2, 6), (12, 4, 1)))
    ),
    "gather-int64-indices": lambda: render_gather(Gather(4, Walk(1, ("int64",), 2))),
    "index-bytes-baked": lambda: render_gather(
        Gather(
            1,
            Walk(
                1,
                ("int64", "int32"),
                2,
                wrap=True,
                shape=(3, 5),
                strides=((0, -7), (1, 0), (1, 0)),
                extents=((4, 35), (5, 7)),
            ),
        )
    ),
    "index-reporting": lambda: render_gather(Gather(4, Walk(1, ("int64", "int32"), 2, wrap=True, reports=True))),
    "scatter-bytes": lambda: render_scatter(Scatter(1, Walk(2, ("int32",), 1))),
    "scatter-add-float32": lambda: render_scatter(Scatter(4, Walk(2, ("int64",), 2), "sum", "float32")),
    "scatter-add-float32-atomic": lambda: render_scatter(Scatter(4, Walk(2, ("int64",), 1), "sum", "float32", True)),
    "scatter-add-int64": lambda: render_scatter(Scatter(8, Walk(2, ("int64",), 1), "sum", "int64")),
    "scatter-amax-float32": lambda: render_scatter(Scatter(4, Walk(2, ("int32",), 1), "amax", "float32")),
    "positions": lambda: render_compact(Compact(2)),
}


@pytest.mark.parametrize("name", KERNELS)
def test_generated_text_is_what_is_stored(name: str) -> None:
    path = GOLDEN / f"{name}.wgsl"
    text = KERNELS[name]()
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text, "utf-8")
    assert path.exists(), "no stored text; UPDATE_GOLDEN=1 writes it"
    assert text == path.read_text("utf-8"), "the generator changed; look at the diff, then UPDATE_GOLDEN=1"


def test_no_stored_text_is_forgotten() -> None:
    assert {path.stem for path in GOLDEN.glob("*.wgsl")} == set(KERNELS)


def test_a_shape_keeps_only_the_dimensions_that_matter() -> None:
    assert collapse((2, 3, 4), ((12, 4, 1), (12, 4, 1))) == ([24], [[1], [1]])
    assert collapse((2, 1, 4), ((4, 99, 1),)) == ([8], [[1]])
    assert collapse((2, 3, 4), ((12, 4, 1), (0, 0, 0))) == ([24], [[1], [0]])
    assert collapse((2, 3), ((1, 2), (3, 1))) == ([2, 3], [[1, 2], [3, 1]])
    assert collapse((), ((), ())) == ([], [[], []])
    assert collapse((1, 1), ((5, 7),)) == ([], [[]])


def test_parameters_fit_what_every_adapter_has() -> None:
    kernel = Elementwise("x0 + x1", ("float32", "float32"), "float32", rank=6)
    assert kernel.words <= elementwise.MOST_WORDS, "two inputs of rank six need no shader of their own"


def test_a_dtype_needs_its_feature() -> None:
    assert supported("float32", ()) and supported("bfloat16", ()) and supported("bool", ())
    assert not supported("float16", ()) and supported("float16", {"shader-f16"})
    assert not supported("int64", ()) and not supported("complex64", {"shader-f64"})


@pytest.mark.parametrize("target", sorted(KINDS))
@pytest.mark.parametrize("source", sorted(KINDS))
def test_every_conversion_has_the_targets_type(source: str, target: str) -> None:
    text = convert("x", source, target)
    if target == "bool" and source != "bool":
        assert text.startswith("select(0, 1,")
    elif KINDS[source].compute != KINDS[target].compute:
        assert KINDS[target].compute in text or "i32(" in text, text


@pytest.mark.parametrize(
    ("nbytes", "length", "numbers", "wide"),
    [
        (4, 8, (0, 64, 16), 16),  # float32 rows of eight: four at a time
        (4, 8, (2, 64), 8),  # begins at the third element
        (4, 7, (0, 7), 4),
        (2, 6, (0, 6), 4),  # half precision, two at a time
        (1, 3, (0, 3), 1),
        (8, 4, (0, 4), 16),
        (16, 4, (0, 4), 16),
    ],
)
def test_neighbours_travel_together(nbytes: int, length: int, numbers: tuple[int, ...], wide: int) -> None:
    assert widest(nbytes, length, numbers) == wide


def test_an_index_walk_of_high_rank_is_written_into_the_shader() -> None:
    walk = Walk(2, ("int64", "int64"), 6)
    assert walk.words > elementwise.MOST_WORDS
    baked = Walk(2, ("int64",) * 2, 6, shape=(2,) * 6, strides=((1,) * 6,) * 4, extents=((3, 1), (4, 1)))
    assert baked.words <= elementwise.MOST_WORDS
