"""The host itself: it must refuse and cache as ComfyUI does, or the other tests prove nothing."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

Host = sys.modules["anytorch_tests_comfy_host"].Host


class Number:
    RETURN_TYPES, FUNCTION = ("INT",), "run"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("INT", {"min": 0, "max": 9})}}

    def run(self, value: int) -> tuple[int]:
        return (value,)


class Several:
    RETURN_TYPES, OUTPUT_IS_LIST, FUNCTION = ("INT",), (True,), "run"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("INT", {})}}

    def run(self, value: int) -> tuple[list[int]]:
        return ([value, value + 1, value + 2],)


class Show:
    RETURN_TYPES, FUNCTION, OUTPUT_NODE = (), "run", True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("INT,FLOAT", {})}, "hidden": {"me": "UNIQUE_ID"}}

    def run(self, value: Any, me: str) -> dict[str, Any]:
        assert torch.is_inference_mode_enabled()
        return {"ui": {"text": (f"{me}: {value}",)}}


class Whole(Show):
    INPUT_IS_LIST = True

    def run(self, value: Any, me: Any) -> dict[str, Any]:
        return {"ui": {"text": (f"{me}: {value}",)}}


class Restless(Number):
    @classmethod
    def IS_CHANGED(cls, value: int) -> float:
        return float("nan")


class Choosy(Number):
    @classmethod
    def VALIDATE_INPUTS(cls, value: int | None) -> bool | str:
        return True if value is None or value % 2 == 0 else f"{value} is odd"


NODES = {kind.__name__: kind for kind in (Number, Several, Show, Whole, Restless, Choosy)}


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": kind, "inputs": inputs}


def test_links_lists_and_hidden_inputs() -> None:
    made = Host(NODES).run(
        {"1": node("Several", value=4), "2": node("Show", value=["1", 0]), "3": node("Whole", value=["1", 0])}
    )
    assert made.succeeded
    assert made.ui == {"2": {"text": ["2: 4", "2: 5", "2: 6"]}, "3": {"text": ["['3']: [4, 5, 6]"]}}


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"1": node("Nobody")}, "does not exist"),
        ({"1": node("Number", value=1)}, "no outputs"),
        ({"1": node("Number"), "2": node("Show", value=["1", 0])}, "missing: value"),
        ({"1": node("Number", value=10), "2": node("Show", value=["1", 0])}, "bigger than max"),
        ({"1": node("Number", value="x"), "2": node("Show", value=["1", 0])}, "invalid literal"),
        ({"1": node("Choosy", value=3), "2": node("Show", value=["1", 0])}, "3 is odd"),
        ({"1": node("Show", value=1), "2": node("Number", value=["1", 0]), "3": node("Show", value=["2", 0])}, "range"),
    ],
)
def test_refused_before_running(prompt: dict[str, Any], words: str) -> None:
    try:
        refused = Host(NODES).run(prompt).refused
    except IndexError as exc:  # a link to an output that is not there fails there in the same way
        refused = {"": [str(exc)]}
    assert words in str(refused)


def test_the_nodes_own_check_replaces_the_hosts_and_sees_no_links() -> None:
    host = Host(NODES)
    assert host.run({"1": node("Choosy", value=20), "2": node("Show", value=["1", 0])}).succeeded  # above its max
    linked = {"1": node("Number", value=3), "2": node("Choosy", value=["1", 0]), "3": node("Show", value=["2", 0])}
    assert host.run(linked).succeeded


def test_cache() -> None:
    host = Host(NODES)
    prompt = {"1": node("Number", value=3), "2": node("Show", value=["1", 0])}
    assert host.run(prompt).ran == ["1", "2"]
    assert host.run(prompt).cached == ["1", "2"]
    prompt["1"] = node("Number", value=4)
    assert host.run(prompt).ran == ["1", "2"]
    prompt["1"] = node("Restless", value=4)
    assert [host.run(prompt).ran for _ in range(2)] == [["1", "2"], ["1", "2"]]
