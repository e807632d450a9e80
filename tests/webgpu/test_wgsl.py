"""The shader text our generators write, against stored files: a change of the generators shows as a diff.

UPDATE_GOLDEN=1 pytest tests/webgpu/test_wgsl.py    writes the files anew
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from anytorch.gpu.wgsl import elementwise, indexing
from anytorch.gpu.wgsl.elementwise import Elementwise, collapse, render
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
    "gather-float32": lambda: indexing.render_gather(indexing.Gather("float32", "int64", 2)),
    "scatter-add-float32": lambda: indexing.render_scatter(indexing.Scatter("float32", "int64", 2, "sum")),
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
