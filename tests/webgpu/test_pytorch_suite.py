"""The run of PyTorch's own tests (`make test-webgpu-pytorch`): what it counts, and how; none of those tests is run here."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.webgpu.pytorch_suite import sources, verdicts, worker


def log(path: Path, *entries: dict[str, Any]) -> verdicts.Summary:
    path.write_text("".join(json.dumps(entry) + "\n" for entry in entries), "utf-8")
    return verdicts.read(path)


def pair(key: str, status: str, why: str = "", fallbacks: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    ended = {"why": why, "fallbacks": list(fallbacks), "seconds": 0.1}
    return [
        {"key": key, "device": "cpu"},
        {"key": key, "device": "cpu", "status": "pass", "why": "", "fallbacks": [], "seconds": 0.1},
        {"key": key, "device": "webgpu"},
        {"key": key, "device": "webgpu", "status": status, **ended},
    ]


def test_every_ending_is_counted_once(tmp_path: Path) -> None:
    found = log(
        tmp_path / "nn+test_x.jsonl",
        {"collected": 9, "without": []},
        *pair("A.a", "pass"),
        *pair("A.b", "pass", fallbacks=("aten.svd",)),
        *pair("A.c", "fail", "trace\nEXC AssertionError: Tensor-likes are not close!\nmismatched"),
        *pair("A.d", "error", "trace\nEXC TypeError: no"),
        *pair("A.e", "error", "EXC NotImplementedError: x: the webgpu device has no sparse tensors. Use"),
        *pair("A.f", "skip", "not for this device"),
        *pair("A.g", "late"),
        {"key": "A.h", "device": "cpu", "status": "fail", "why": "", "fallbacks": [], "seconds": 0.1},
        *pair("A.i", "pass")[:3],
        {"died": -11},
    )
    assert found.file == "nn/test_x"
    assert (found.run, found.cpu, found.both, found.without_cpu) == (9, 8, 2, 1)
    assert (found.failed, found.wrong, found.aborted, found.by_design) == (2, 1, 1, 1)
    assert (found.skipped, found.late, found.counted) == (1, 1, 5)
    assert [trouble["kind"] for trouble in found.troubles] == ["wrong", "error", "abort"]
    assert verdicts.totals([found, found])["both"] == 4
    assert list(json.loads(json.dumps(asdict(found)))["reasons"].values()) == [1]


def test_a_reason_excuses_no_more_than_it_says() -> None:
    said = "trace\nEXC AssertionError: False is not true"
    excused = (
        "TestModule.test_to_nn_Conv2d_swap_False_set_grad_True_float32",
        "TestNN.test_upsamplingBiMode2d_nonsupported_dtypes_antialias_True_num_channels_3_mode_bilinear_uint8_uint8",
        "TestBinaryUfuncs.test_fmod_remainder_by_zero_integral_int16",
    )
    counted = (
        "TestModule.test_to_empty_nn_Conv2d_swap_False_set_grad_True_float32",
        "TestModule.test_to_nn_Conv2d_swap_True_set_grad_True_float32",
        "TestNN.test_upsamplingBiMode2d_nonsupported_dtypes_antialias_True_num_channels_3_mode_bilinear_int32_int32",
        "TestBinaryUfuncs.test_fmod_remainder_by_zero_float_float32",
    )
    assert all(verdicts.reason_of(key, said) for key in excused)
    assert not any(verdicts.reason_of(key, said) for key in counted)
    refused = 'AssertionError: "same device" does not match "Expected all tensors to be on the same device"'
    assert not verdicts.reason_of("TestLinalg.test_dot_invalid_args", f"trace\nEXC {refused}")
    assert verdicts.reason_of(
        "TestLinalg.test_mixed", "trace\nEXC RuntimeError: Expected all tensors to be on the same device"
    )


def test_a_sample_is_fair_and_loses_nothing() -> None:
    keys = [
        f"T.test_of_f{i}_x_op{j}_{dtype}"
        for i in range(3)
        for j in range(4)
        for dtype in ("float32", "int8", "float64")
    ]
    order = worker.ordered(keys)
    assert sorted(order) == sorted(keys)
    functions = [key.split("_")[2] for key in order[:6]]
    assert functions.count("f0") == functions.count("f1") == functions.count("f2") == 2
    assert all("float32" in key for key in order[:12])
    assert all("float64" in key for key in order[-12:])


def test_the_nearest_version_is_preferred() -> None:
    found = sorted(("2.6.0", "2.14.1", "3.0", "odd"), key=lambda version: sources._distance(version, "2.13.0+cpu"))
    assert found == ["2.14.1", "2.6.0", "3.0", "odd"]
