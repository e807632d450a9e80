"""A small ComfyUI: it loads packs, checks prompts, runs and caches nodes by the rules ComfyUI 0.7.0 has.

Written from the behaviour that was read and measured there (shared research, docs/guide/comfyui.md), not from its code.
What nodes can notice is the same: module names made of paths, one instance per node id, everything inside
torch.inference_mode and in a thread, values passed along links as lists, links unseen by VALIDATE_INPUTS and IS_CHANGED,
and a cache whose key is a node's class, constants and fingerprint and those of all its ancestors.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

MISSING = object()
CONVERT = {"INT": int, "FLOAT": float, "STRING": str, "BOOLEAN": bool}


def load_pack(folder: Path) -> ModuleType:
    """As ComfyUI loads `custom_nodes/<folder>`: under a module name that is its path."""
    name = str(folder).replace(".", "_x_")
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py" if folder.is_dir() else folder)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


@dataclass
class Outcome:
    """What /history would say of a run: texts and pictures by node, values by node, what ran, and the one error."""

    ui: dict[str, Any] = field(default_factory=dict)
    values: dict[str, list[list[Any]]] = field(default_factory=dict)
    ran: list[str] = field(default_factory=list)
    cached: list[str] = field(default_factory=list)
    refused: dict[str, list[str]] = field(default_factory=dict)  # before anything ran: details by node
    error: dict[str, str] | None = None

    @property
    def succeeded(self) -> bool:
        return not self.refused and self.error is None

    def value(self, node: str, output: int = 0) -> Any:
        return self.values[node][output][0]


class Host:
    def __init__(self, nodes: Mapping[str, type]) -> None:
        self.nodes: dict[str, Any] = dict(nodes)
        self.instances: dict[tuple[str, str], Any] = {}
        self.cache: dict[Any, tuple[Any, Any]] = {}

    def run(self, prompt: Mapping[str, Any]) -> Outcome:
        """Check, then run in a thread of its own, as POST /prompt does."""
        prompt = {key: {**node, "inputs": dict(node["inputs"])} for key, node in prompt.items()}
        outcome = Outcome(refused=self.check(prompt))
        if not outcome.refused:
            worker = threading.Thread(target=self.execute, args=(prompt, outcome), name="prompt_worker")
            worker.start()
            worker.join()
        return outcome

    # --- checking ----------------------------------------------------------------------------------------------------

    def check(self, prompt: Mapping[str, Any]) -> dict[str, list[str]]:
        for key, node in prompt.items():
            if node.get("class_type") not in self.nodes:
                return {key: [f"node {node.get('class_type')} does not exist"]}
        ends = [key for key, node in prompt.items() if getattr(self.nodes[node["class_type"]], "OUTPUT_NODE", False)]
        if not ends:
            return {"": ["Prompt has no outputs"]}
        refused: dict[str, list[str]] = {}
        for key in ordered(prompt, ends):
            try:
                details = list(self.check_node(prompt, key))
            except Exception as exc:  # noqa: BLE001  (told as the reason, as there)
                details = [str(exc)]
            if details:
                refused[key] = details
        return refused

    def check_node(self, prompt: Mapping[str, Any], key: str) -> Iterator[str]:
        node = self.nodes[prompt[key]["class_type"]]
        inputs = prompt[key]["inputs"]
        groups = node.INPUT_TYPES()
        specs = {**groups.get("required", {}), **groups.get("optional", {})}
        own_check = getattr(node, "VALIDATE_INPUTS", None)
        signature = inspect.getfullargspec(own_check) if own_check else None
        named = set(signature.args) if signature else set()
        everything = signature is not None and signature.varkw is not None
        for name, spec in specs.items():
            kind, options = spec[0], spec[1] if len(spec) > 1 else {}
            if name not in inputs:
                if name in groups.get("required", {}):
                    yield f"Required input is missing: {name}"
                continue
            value = inputs[name]
            if is_link(value):
                given = self.nodes[prompt[value[0]]["class_type"]].RETURN_TYPES[value[1]]
                if "input_types" not in named and not types_meet(given, kind):
                    yield f"{name}, received_type({given}) mismatch input_type({kind})"
                continue
            if kind in CONVERT if isinstance(kind, str) else False:
                try:
                    value = inputs[name] = CONVERT[kind](value)
                except (TypeError, ValueError) as exc:
                    yield f"{name}, {value}, {exc}"
                    continue
            if name in named or everything:
                continue  # the node checks these itself
            if "min" in options and value < options["min"]:
                yield f"Value {value} smaller than min of {options['min']}: {name}"
            elif "max" in options and value > options["max"]:
                yield f"Value {value} bigger than max of {options['max']}: {name}"
            elif isinstance(kind, list) and value not in kind:
                yield f"{name}: '{value}' not in {kind}"
        if own_check is not None:
            given = self.constants(node, inputs, key)
            answers = mapped(own_check, {name: v for name, v in given.items() if name in named or everything}, False)
            yield from (str(answer) for answer in answers if answer is not True)

    # --- running -----------------------------------------------------------------------------------------------------

    def execute(self, prompt: Mapping[str, Any], outcome: Outcome) -> None:
        ends = [key for key, node in prompt.items() if getattr(self.nodes[node["class_type"]], "OUTPUT_NODE", False)]
        changed: dict[str, Any] = {}
        keys: dict[str, Any] = {}
        with torch.inference_mode():
            for key in ordered(prompt, ends):
                keys[key] = self.signature(prompt, key, changed)
                if keys[key] in self.cache:
                    outcome.values[key], ui = self.cache[keys[key]]
                    outcome.cached.append(key)
                else:
                    try:
                        outcome.values[key], ui = self.run_node(prompt, key, outcome)
                    except Exception as exc:  # noqa: BLE001  (what the page shows on the node)
                        kind = f"{type(exc).__module__}.{type(exc).__qualname__}"
                        outcome.error = {"node": key, "message": str(exc), "type": kind}
                        break
                    outcome.ran.append(key)
                    self.cache[keys[key]] = (outcome.values[key], ui)
                if ui:
                    outcome.ui[key] = ui
        self.cache = {known: value for known, value in self.cache.items() if known in keys.values()}

    def run_node(self, prompt: Mapping[str, Any], key: str, outcome: Outcome) -> tuple[list[list[Any]], Any]:
        kind = prompt[key]["class_type"]
        node = self.nodes[kind]
        inputs = self.constants(node, prompt[key]["inputs"], key, prompt)
        for name, value in prompt[key]["inputs"].items():
            if is_link(value):
                inputs[name] = outcome.values[value[0]][value[1]]
        instance = self.instances.setdefault((key, kind), node())
        answers = mapped(getattr(instance, node.FUNCTION), inputs, getattr(node, "INPUT_IS_LIST", False))
        shown = [answer["ui"] for answer in answers if isinstance(answer, dict) and "ui" in answer]
        results = [answer.get("result", ()) if isinstance(answer, dict) else answer for answer in answers]
        lists = getattr(node, "OUTPUT_IS_LIST", [False] * len(node.RETURN_TYPES))
        outputs = []
        for i, is_list in enumerate(lists):
            values = [result[i] for result in results]
            outputs.append([one for value in values for one in value] if is_list else values)
        ui = {name: [one for part in shown for one in part[name]] for name in shown[0]} if shown else {}
        return outputs, ui

    def constants(
        self, node: Any, inputs: Mapping[str, Any], key: str, prompt: Mapping[str, Any] | None = None
    ) -> dict[str, list[Any]]:
        """Every input as a list of one; a link is None here: only running resolves it."""
        groups = node.INPUT_TYPES()
        known = {**groups.get("required", {}), **groups.get("optional", {})}
        found = {name: [None if is_link(v) else v] for name, v in inputs.items() if name in known}
        hidden = {"UNIQUE_ID": key, "PROMPT": prompt, "EXTRA_PNGINFO": None}
        found |= {name: [hidden.get(what)] for name, what in groups.get("hidden", {}).items()}
        return found

    # --- the cache's key ---------------------------------------------------------------------------------------------

    def signature(self, prompt: Mapping[str, Any], key: str, changed: dict[str, Any]) -> Any:
        ancestors: list[str] = []

        def visit(node: str) -> None:
            for name in sorted(prompt[node]["inputs"]):
                value = prompt[node]["inputs"][name]
                if is_link(value) and value[0] not in ancestors:
                    ancestors.append(value[0])
                    visit(value[0])

        visit(key)
        return tuple(self.own_signature(prompt, node, ancestors, changed) for node in (key, *ancestors))

    def own_signature(
        self, prompt: Mapping[str, Any], key: str, ancestors: list[str], changed: dict[str, Any]
    ) -> tuple[Any, ...]:
        kind, inputs = prompt[key]["class_type"], prompt[key]["inputs"]
        node = self.nodes[kind]
        if key not in changed:
            changed[key] = False
            if hasattr(node, "IS_CHANGED"):
                try:
                    changed[key] = tuple(mapped(node.IS_CHANGED, self.constants(node, inputs, key), False))
                except Exception:  # noqa: BLE001  (ComfyUI logs it and runs the node)
                    changed[key] = float("nan")
        about = [kind, changed[key]]
        if getattr(node, "NOT_IDEMPOTENT", False) or "UNIQUE_ID" in node.INPUT_TYPES().get("hidden", {}).values():
            about.append(key)
        for name in sorted(inputs):
            value = inputs[name]
            about.append((name, ("link", ancestors.index(value[0]), value[1]) if is_link(value) else value))
        # A NaN is equal to nothing, itself included, unless it is the same object: a new one each time keeps it so.
        return tuple(about)


def is_link(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and isinstance(value[0], str)


def types_meet(given: Any, wanted: Any) -> bool:
    if given == wanted or "*" in (given, wanted):
        return True
    if not isinstance(given, str) or not isinstance(wanted, str):
        return False
    return bool({part.strip() for part in given.split(",")} & {part.strip() for part in wanted.split(",")})


def mapped(function: Any, inputs: Mapping[str, list[Any]], as_lists: bool) -> list[Any]:
    """Once per item of the longest list, the last item of shorter ones repeated; or once with the lists themselves."""
    if as_lists:
        return [function(**inputs)]
    count = max((len(values) for values in inputs.values()), default=1)
    return [
        function(**{name: values[min(i, len(values) - 1)] for name, values in inputs.items()}) for i in range(count)
    ]


def ordered(prompt: Mapping[str, Any], ends: list[str]) -> list[str]:
    """What the ends need, each after what it needs itself."""
    found: list[str] = []

    def visit(key: str, path: tuple[str, ...]) -> None:
        assert key not in path, "a circle of links"
        if key in found:
            return
        for value in prompt[key]["inputs"].values():
            if is_link(value):
                visit(value[0], (*path, key))
        found.append(key)

    for end in ends:
        visit(end, ())
    return found
