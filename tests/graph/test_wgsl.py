"""WGSL of kernel graphs as text: what it says, what is written for which device, and what is declined. No adapter."""

from __future__ import annotations

import re

import pytest

from anytorch.graph.emit import wgsl
from anytorch.graph.emit.schedule import Schedule
from anytorch.graph.emit.wgsl_functions import literal, size_text
from anytorch.graph.emit.wgsl_schedules import FEW_ON_SOFTWARE, schedules
from anytorch.graph.ir import Builder, Graph
from anytorch.graph.loops import Kernel, kernel_of
from anytorch.graph.lower import lowered
from anytorch.graph.partition import partition
from anytorch.graph.rewrite import rewritten
from anytorch.graph.sizes import Size
from tests.graph.cases import CASES


def _kernels(graph: Graph, known: dict[str, int]) -> list[Kernel]:
    cut = partition(rewritten(lowered(graph)), known)
    return [cut.kernel(group) for group in cut.groups]


@pytest.mark.parametrize("name", CASES)
def test_every_case_can_be_written_for_both_manners_of_adapter(name: str) -> None:
    graph, known = CASES[name]()
    for kernel in _kernels(graph, known):
        hardware, software = (schedules(kernel, known, software=way) for way in (False, True))
        assert len({one.name for one in hardware}) == len(hardware) and len(software) <= FEW_ON_SOFTWARE
        assert software[0].lanes == 1  # no barriers
        for one in (*hardware, *software):
            text = wgsl.render(kernel, one)
            assert text == wgsl.render(kernel, one) and text.count("{") == text.count("}")
            assert ("workgroupBarrier" in text) <= (one.lanes > 1)
            assert wgsl.workers(kernel, one, known) >= 1


def _column(dtype: str, op: str) -> Graph:
    b = Builder()
    return b.graph([b.add(op, b.input((8, 6), dtype), b.input((6,), dtype))])


def test_what_a_device_lacks_is_declined() -> None:
    (halves,) = _kernels(_column("float16", "add"), {})
    (longs,) = _kernels(_column("int64", "mul"), {})
    (doubles,) = _kernels(_column("float64", "add"), {})
    assert "enable f16;" in wgsl.render(halves, Schedule(lanes=1)) and "array<i64>" in wgsl.render(
        longs, Schedule(lanes=1)
    )
    for kernel, dtype in ((halves, "float16"), (longs, "int64"), (doubles, "float64")):
        with pytest.raises(NotImplementedError, match=f"{dtype} is not in this device's shaders"):
            schedules(kernel, {}, features=())


def test_positions_need_no_long_numbers() -> None:
    """The mask of attention compares int64 positions; no tensor holds them, and they fit into 32 bits."""
    graph, known = CASES["attention with order"]()
    (kernel,) = _kernels(graph, known)
    (first, *_) = schedules(kernel, known, features=())
    text = wgsl.render(kernel, first, ())
    assert "i64" not in text and "at_most_i32(" in text
    counted, known = CASES["attention with lengths"]()
    with pytest.raises(NotImplementedError, match="int64"):
        schedules(_kernels(counted, known)[0], known, features=())


def test_what_has_no_form_is_declined() -> None:
    b = Builder()
    x = b.input((4, 4), "bool")
    (kernel,) = _kernels(b.graph([b.add("reduce", x, how="max", dims=(1,))]), {})
    with pytest.raises(NotImplementedError, match="max of bools"):
        schedules(kernel, {})
    graph, known = CASES["gated mlp"]()
    (product,) = _kernels(graph, known)
    with pytest.raises(NotImplementedError, match="one column for each lane"):
        wgsl.render(product, Schedule({"i1": 32}, spread="i1", lanes=64))
    b = Builder()
    many = [b.input((4,), "float32") for _ in range(40)]
    total = many[0]
    for one in many[1:]:
        total = b.add("add", total, one)
    kernel = kernel_of(b.graph([total]), [total], dict.fromkeys(many, (1,)))
    with pytest.raises(NotImplementedError, match="41 parameters are more than 32"):
        wgsl.render(kernel, Schedule(lanes=1))


def test_threads_own_words_of_narrow_results_or_change_them_atomically() -> None:
    b = Builder()
    x = b.input((5, 7), "bfloat16")
    (kernel,) = _kernels(b.graph([b.add("gt", b.add("exp", x), x)]), {})
    text = wgsl.render(kernel, Schedule(lanes=1))
    assert "let first = worker * 4u;" in text and "atomic" not in text
    assert wgsl.workers(kernel, Schedule(lanes=1), {}) == 9  # 35 elements, four in a word
    graph, known = CASES["the same in bfloat16"]()
    (product,) = _kernels(graph, known)
    tile = next(one for one in schedules(product, known) if one.blocks)
    assert "atomicOr(" in wgsl.render(product, tile)


def test_a_strip_of_rows_shares_what_is_read_of_a_column() -> None:
    graph, known = CASES["rms norm and product"]()
    (kernel,) = _kernels(graph, known)
    *strips, tile, single = schedules(kernel, known)
    assert [one.name for one in (*strips, tile, single)] == [
        "lanes=256 along=i1 i0=8 i1=32 slices=8",
        "lanes=64 along=i1 i0=8 i1=64",
        "lanes=256 along=i1 i0=8 i1=64 slices=4",
        "lanes=256 along=i1 i0=8 i1=16 slices=16",
        "lanes=64 along=i1 i1=64",
        "lanes=1",
    ]
    strip = strips[1]
    text = wgsl.render(kernel, strip)
    terms = text.partition("for (var t = ")[2].partition("workgroupBarrier")[0]
    assert terms.index("= b2[") < terms.index("for (var j = ")  # the weight is read once, then used for every row
    assert "own_row < (p.size_b)" in text  # the last strip may have rows that do not exist
    assert [wgsl.workers(kernel, one, {"b": 9}) for one in (strip, tile, single)] == [2, 9, 9 * 45]
    with pytest.raises(NotImplementedError, match="only plain sums"):
        softmax, sizes = CASES["attention"]()
        wgsl.render(_kernels(softmax, sizes)[0], Schedule({"i3": 4, "i4": 64}, spread="i4", lanes=64))


def test_slices_share_the_terms_of_a_block_and_one_of_them_stores() -> None:
    b = Builder()
    (kernel,) = _kernels(b.graph([b.add("matmul", b.input((1, 512), "float32"), b.input((512, 96), "float32"))]), {})
    sliced = schedules(kernel, {})[0]
    assert (sliced.lanes, sliced.slices) == (256, 8) and wgsl.workers(kernel, sliced, {}) == 3
    text = wgsl.render(kernel, sliced)
    assert "for (var u = 0u; u < 32u; u++)" in text and "let t = (lane / 32u) * 32u + u;" in text  # even: unrolled
    assert text.count("across_slices(") == 2 and "own < 96u && lane < 32u" in text
    with pytest.raises(NotImplementedError, match="slices share the terms of a block"):
        wgsl.render(kernel, Schedule(lanes=64, slices=2))
    with pytest.raises(NotImplementedError, match="one column for each lane of a slice"):
        wgsl.render(kernel, Schedule({"i1": 64}, spread="i1", lanes=64, slices=2))


def test_slices_do_not_share_sums_of_whole_numbers() -> None:
    b = Builder()
    (kernel,) = _kernels(b.graph([b.add("reduce", b.input((512, 96), "int32"), how="sum", dims=(0,))]), {})
    assert all(one.slices == 1 for one in schedules(kernel, {}))


def test_how_weights_lie_in_memory_decides_who_takes_a_column() -> None:
    """A residual that is read along the columns does not change that the weights are read along what is summed."""
    b = Builder()
    x, w, residual = b.input((1, 512), "float32"), b.input((96, 512), "float32"), b.input((1, 96), "float32")
    graph = b.graph([b.add("add", residual, b.add("matmul", x, b.add("permute", w, dims=(1, 0))))])
    (kernel,) = _kernels(graph, {})
    assert [one.name for one in schedules(kernel, {})] == ["lanes=64", "lanes=1"]


def test_lanes_fold_what_they_found_within_subgroups_where_there_are_some() -> None:
    graph, known = CASES["softmax"]()
    (kernel,) = _kernels(graph, known)
    one = next(one for one in schedules(kernel, known) if one.lanes > 1)
    without, within = (wgsl.render(kernel, one, wgsl.EVERY | more) for more in (set(), {"subgroup"}))
    assert "subgroup" not in without and "subgroupShuffleXor(" in within
    assert within.count("workgroupBarrier();") < without.count("workgroupBarrier();")
    assert "sub_size" not in wgsl.render(kernel, schedules(kernel, known)[-1], wgsl.EVERY | {"subgroup"})  # one thread


def test_rows_share_their_loop_and_lanes_meet_at_barriers() -> None:
    graph, known = CASES["attention"]()
    (kernel,) = _kernels(graph, known)
    group, single = schedules(kernel, known)[:2]
    assert (group.lanes, single.lanes) == (64, 1)
    text = wgsl.render(kernel, group)
    assert len(re.findall(r"for \(var base = ", text)) == 1  # scores, maximum, sum and result in one pass
    assert "var<workgroup> stage" in text and text.index("[lane] = v") < text.index("workgroupBarrier();\n    for")


def test_numbers() -> None:
    assert literal(float("nan"), "f32") == "quiet_nan()" and literal(-1e300, "f32") == "(-infinity())"
    assert literal(1, "bool") == "true" and literal(-3.0, "i32") == "i32(-3)"
    with pytest.raises(NotImplementedError, match="does not fit"):
        literal(2**40, "i64")
    b = Size.named("b2")
    assert size_text(4 * b + 1) == "(4u*p.size_b2 + 1u)" and size_text(-1) == "4294967295u"
    assert size_text(-b) == "(4294967295u*p.size_b2)"  # sums of it wrap round to what is meant
