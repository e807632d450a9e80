"""What our host promises to do as ComfyUI does: a pack of small nodes, and prompts with what must come of them.

`test_host.py` runs them on the host, `test_real_server.py` on the real ComfyUI.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


class Number:
    RETURN_TYPES, FUNCTION, CATEGORY = ("INT",), "run", "contract"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("INT", {"min": 0, "max": 9})}}

    def run(self, value: int) -> tuple[int]:
        return (value,)


class Several:
    RETURN_TYPES, OUTPUT_IS_LIST, FUNCTION, CATEGORY = ("INT",), (True,), "run", "contract"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"value": ("INT", {})}}

    def run(self, value: int) -> tuple[list[int]]:
        return ([value, value + 1, value + 2],)


class Text:
    RETURN_TYPES, FUNCTION, CATEGORY = ("STRING",), "run", "contract"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"text": ("STRING", {}), "choice": (["one", "two"], {})}}

    def run(self, text: str, choice: str) -> tuple[str]:
        return (text + choice,)


class Show:
    RETURN_TYPES, FUNCTION, OUTPUT_NODE, CATEGORY = (), "run", True, "contract"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        more = ("FLOAT", {"default": 1.0})
        return {"required": {"value": ("INT,FLOAT", {})}, "optional": {"more": more}, "hidden": {"me": "UNIQUE_ID"}}

    def run(self, value: Any, me: str, more: float = 0.5) -> dict[str, Any]:
        mode = "" if torch.is_inference_mode_enabled() else ", not in inference mode"
        return {"ui": {"text": (f"{me}: {value} {more}{mode}",)}}


class Whole(Show):
    INPUT_IS_LIST = True

    def run(self, value: Any, me: Any, more: Any = None) -> dict[str, Any]:
        return {"ui": {"text": (f"{me}: {value}",)}}


class Counting(Show):
    """Its instance lives as long as the server: the count goes on."""

    def __init__(self) -> None:
        self.count = 0

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:
        return float("nan")

    def run(self, value: Any, me: str, more: float = 0.5) -> dict[str, Any]:
        self.count += 1
        return {"ui": {"text": (f"{me}: run {self.count}",)}}


class Restless(Number):
    @classmethod
    def IS_CHANGED(cls, value: int) -> float:
        return float("nan")


class Settled(Number):
    @classmethod
    def IS_CHANGED(cls, value: int) -> str:
        return "the same"


class Forgetful(Text):
    """IS_CHANGED is given every input; one that does not take them all fails, and the node always runs."""

    RETURN_TYPES = ("INT",)

    @classmethod
    def IS_CHANGED(cls, text: str) -> str:
        return "the same"

    def run(self, text: str, choice: str) -> tuple[int]:  # type: ignore[override]
        return (len(text + choice),)


class Choosy(Number):
    @classmethod
    def VALIDATE_INPUTS(cls, value: int | None) -> bool | str:
        return True if value is None or value % 2 == 0 else f"{value} is odd"


class Broken(Number):
    def run(self, value: int) -> tuple[int]:
        raise ValueError(f"{value} cannot be used\nhint: use another")


KINDS = (Number, Several, Text, Show, Whole, Counting, Restless, Settled, Forgetful, Choosy, Broken)
NODE_CLASS_MAPPINGS = {f"Contract{kind.__name__}": kind for kind in KINDS}


def node(kind: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": f"Contract{kind}", "inputs": inputs}


@dataclass(frozen=True)
class Run:
    """One prompt and what must come of it; None where it does not matter."""

    prompt: dict[str, Any]
    ui: dict[str, list[str]] | None = None
    cached: list[str] | None = None
    refused: str = ""  # words of the answer
    error: tuple[str, str] | None = None  # node and words


def shown(first: dict[str, Any]) -> dict[str, Any]:
    return {"1": first, "2": node("Show", value=["1", 0])}


COUNT = {"7": node("Number", value=1), "8": node("Counting", value=["7", 0])}
LINKED = {"1": node("Number", value=3), "2": node("Choosy", value=["1", 0]), "3": node("Show", value=["2", 0])}

CASES: dict[str, list[Run]] = {
    "lists and hidden inputs": [
        Run(
            {"1": node("Several", value=4), "2": node("Show", value=["1", 0]), "3": node("Whole", value=["1", 0])},
            ui={"2": ["2: 4 0.5", "2: 5 0.5", "2: 6 0.5"], "3": ["['3']: [4, 5, 6]"]},
        )
    ],
    "an optional input": [
        Run({"1": node("Number", value=4), "2": node("Show", value=["1", 0], more=2)}, ui={"2": ["2: 4 2.0"]})
    ],
    "the node's own check replaces the server's": [Run(shown(node("Choosy", value=20)), ui={"2": ["2: 20 0.5"]})],
    "and sees no links": [Run(LINKED, ui={"3": ["3: 3 0.5"]})],
    "unknown node": [Run({"1": {"class_type": "Nobody", "inputs": {}}}, refused="does not exist")],
    "no output": [Run({"1": node("Number", value=1)}, refused="no outputs")],
    "missing input": [Run(shown(node("Number")), refused="Required input is missing")],
    "too large": [Run(shown(node("Number", value=10)), refused="bigger than max of 9")],
    "too small": [Run(shown(node("Number", value=-1)), refused="smaller than min of 0")],
    "not a number": [Run(shown(node("Number", value="x")), refused="invalid literal")],
    "refused by the node": [Run(shown(node("Choosy", value=3)), refused="3 is odd")],
    "wrong type": [Run(shown(node("Text", text="a", choice="one")), refused="mismatch input_type(INT,FLOAT)")],
    "not in the list": [Run(shown(node("Forgetful", text="a", choice="three")), refused="'three' not in")],
    "an error": [Run(shown(node("Broken", value=3)), error=("1", "3 cannot be used\nhint: use another"))],
    "cache": [
        Run(shown(node("Number", value=3)), ui={"2": ["2: 3 0.5"]}),
        Run(shown(node("Number", value=3)), cached=["1", "2"]),
        Run(shown(node("Number", value=4)), cached=[]),
    ],
    "a fingerprint that stays": [
        Run(shown(node("Settled", value=5))),
        Run(shown(node("Settled", value=5)), cached=["1", "2"]),
    ],
    "a fingerprint that is not one": [
        Run(shown(node("Restless", value=5))),
        Run(shown(node("Restless", value=5)), cached=[]),
    ],
    "a fingerprint that fails": [
        Run(shown(node("Forgetful", text="ab", choice="one")), ui={"2": ["2: 5 0.5"]}),
        Run(shown(node("Forgetful", text="ab", choice="one")), cached=[]),
    ],
    "one instance per node": [
        Run(COUNT, ui={"8": ["8: run 1"]}),
        Run(COUNT, ui={"8": ["8: run 2"]}, cached=["7"]),
    ],
}
