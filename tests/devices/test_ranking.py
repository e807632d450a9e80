"""The order of devices and the meaning of a request, as tables."""

from __future__ import annotations

from typing import Any

import pytest
from tests.devices.machines import GIB, candidate

from anytorch.devices.ranking import DeviceRequest, choice_words, gigabytes, parse, pick, rank, why_before
from anytorch.devices.registry import registry
from anytorch.devices.types import Level, Reason, State
from anytorch.errors import DeviceIndexError, UnknownDevice

WARNING = Reason("uncovered", Level.WARNING, "the wheel has no kernels for it", backends=("cuda",))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", DeviceRequest("auto")),
        ("", DeviceRequest("")),
        ("CUDA", DeviceRequest("CUDA", "cuda")),
        (" cuda:1 ", DeviceRequest(" cuda:1 ", "cuda", 1)),
        ("vulkan", DeviceRequest("vulkan", "webgpu", alias="vulkan")),
        ("Vulkan:0", DeviceRequest("Vulkan:0", "webgpu", 0, alias="vulkan")),
        ("hip", DeviceRequest("hip", "rocm", alias="hip")),
        ("ascend:3", DeviceRequest("ascend:3", "npu", 3, alias="ascend")),
        ("GPU-1a2b", DeviceRequest("GPU-1a2b", uuid="GPU-1a2b")),
    ],
)
def test_requests_are_understood(text: str, expected: DeviceRequest) -> None:
    assert parse(text, registry()) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("cdua", "did you mean 'cuda'"),
        ("webgup", "did you mean 'webgpu'"),
        ("quantum", "anytorch doctor"),
        ("cuda:-1", "must be a number"),
        ("cuda:", "must be a number"),
        ("cuda:1:2", "must be a number"),
        ("cuda:one", "write cuda:0"),
        ("cuda:99999999999", "must be a number"),
        ("meta", "unknown device"),
        ("meta", "holds shapes without data"),
        ("gpu", "did you mean 'auto' .* or 'cuda'"),
        ("GPU:0", "did you mean 'auto' .* or 'cuda'"),
        ("hips", "did you mean 'hip'"),
        ("wgpu2", "did you mean 'webgpu'"),  # our own name before the alias that is nearer
    ],
)
def test_what_nobody_knows_is_an_error_with_a_hint(text: str, words: str) -> None:
    with pytest.raises(UnknownDevice, match=words):
        parse(text, registry())


def test_the_order_of_back_ends() -> None:
    names = ["cpu", "webgpu:0", "mps:0", "xpu:0", "npu:0", "cuda:0"]
    ranked = rank([candidate(name) for name in names])
    assert [c.backend for c in ranked] == ["cuda", "npu", "xpu", "mps", "webgpu", "cpu"]


def test_prefer_npu_moves_it_first() -> None:
    assert rank([candidate("cuda:0"), candidate("npu:0")], prefer="npu")[0].backend == "npu"


# (better, worse, why): each pair differs in one criterion only
PAIRS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"state": State.UNUSABLE}, "it is unusable"),
    ({}, {"state": State.SEEN}, "it is seen, not tried"),
    # an integrated GPU reports system RAM as its own: unsloth#7670
    ({"integrated": False, "free": 8 * GIB}, {"integrated": True, "free": 60 * GIB}, "it is integrated"),
    ({}, {"reasons": (WARNING,)}, "it has warnings"),
    ({"free": 40 * GIB}, {"free": 10 * GIB}, "less free memory"),
    ({"in_use": True, "free": 10 * GIB}, {"free": 40 * GIB}, "this process already uses the other one"),
    ({}, {"display": True}, "it drives the display"),
]


@pytest.mark.parametrize(("better", "worse", "why"), PAIRS, ids=[why for *_, why in PAIRS])
def test_the_better_card_of_a_kind(better: dict[str, Any], worse: dict[str, Any], why: str) -> None:
    good, bad = candidate("cuda:1", **better), candidate("cuda:0", **worse)
    assert rank([bad, good]) == [good, bad]
    assert why in why_before(good, bad)


def test_a_small_difference_in_free_memory_does_not_decide() -> None:
    first = candidate("cuda:0", free=40 * GIB)
    second = candidate("cuda:1", free=43 * GIB)
    assert rank([second, first])[0] is first
    assert why_before(first, second) == "its index is higher"


def test_memory_has_one_unit() -> None:
    assert gigabytes(3 * GIB) == "3.0 GiB"
    assert gigabytes(None) == "unknown"


def test_the_log_says_why() -> None:
    best, worse, cpu = candidate("cuda:0", free=40 * GIB), candidate("cuda:1", free=10 * GIB), candidate("cpu")
    told = choice_words(DeviceRequest("auto"), best, [best, worse, cpu])
    assert told.startswith(
        "cuda:0 (cuda:0); not cuda:1: it has less free memory (10.0 GiB against 40.0 GiB); not cpu: "
    )
    assert "cpu" not in choice_words(DeviceRequest("cuda", "cuda"), best, [best, worse, cpu])
    assert choice_words(DeviceRequest("cuda:0", "cuda", 0), best, [best, worse, cpu]) == "cuda:0 (cuda:0)"


def test_auto_never_takes_a_software_adapter() -> None:
    software = candidate("webgpu:0", software=True, priority=50)
    assert pick(DeviceRequest("auto"), [software]) is None
    assert pick(parse("vulkan", registry()), [software]) is software
    assert rank([software, candidate("cpu")])[0].backend == "cpu"


def test_a_request_for_cuda_is_met_by_rocm_but_not_the_other_way_round() -> None:
    amd = candidate("rocm:0")
    assert pick(parse("cuda", registry()), [amd]) is amd
    assert pick(parse("rocm", registry()), [candidate("cuda:0")]) is None
    assert pick(parse("nvidia", registry()), [amd]) is None  # who says nvidia means nvidia


def test_a_card_is_found_by_the_start_of_its_uuid() -> None:
    card = candidate("cuda:1", uuid="GPU-aaaa-bbbb")
    assert pick(parse("gpu-AAAA", registry()), [candidate("cuda:0", uuid="GPU-cccc"), card]) is card


def test_an_index_that_does_not_exist_is_an_error_only_where_the_back_end_works() -> None:
    request = parse("cuda:7", registry())
    with pytest.raises(DeviceIndexError, match=r"available: cuda:0 \(H200\)"):
        pick(request, [candidate("cuda:0", title="H200")])
    assert pick(request, [candidate("cuda:0", State.UNUSABLE)]) is None
