"""Writes the example workflows of comfyui/anytorch_nodes: each is described once here, and written in both formats.

    python tools/comfy_workflows.py

api_workflows/*.json are for POST /prompt, example_workflows/*.json for the page and its template browser.

A test compares the files with what this makes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from anytorch.comfy.pack import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS

PACK = Path(__file__).resolve().parents[1] / "comfyui" / "anytorch_nodes"
WIDTH, COLUMN, ROW = 300, 360, 80
WIDGETS = ("INT", "FLOAT", "STRING", "BOOLEAN")

# Of ComfyUI's own nodes, what these workflows use: inputs that can be linked, widgets' values, outputs.
CORE: dict[str, tuple[dict[str, str], list[str], list[tuple[str, str]]]] = {
    "LoadImage": ({}, ["image"], [("IMAGE", "IMAGE"), ("MASK", "MASK")]),
    "PreviewImage": ({"images": "IMAGE"}, [], []),
    "PreviewAny": ({"source": "*"}, [], []),
}


@dataclass(frozen=True)
class Link:
    node: str
    output: int = 0


@dataclass(frozen=True)
class Step:
    """A node of a workflow: its class, the column it stands in, and its inputs (values, or a Link)."""

    kind: str
    column: int
    inputs: dict[str, Any] = field(default_factory=dict)
    row: int = 0


PHOTO = Step("LoadImage", 0, {"image": "example.png"})
CONV = {"in_channels": 3, "out_channels": 3, "kernel_size": 3, "stride": 1, "padding": 1, "use_bias": True}

WORKFLOWS: dict[str, dict[str, Step]] = {
    # Documented: Input Image → Conv2D → Activation (ReLU) → Linear → Activation (Sigmoid) → Output
    "mlp": {
        "1": PHOTO,
        "2": Step("CustomPyTorchConv2D", 1, {"image": Link("1"), **CONV, "out_channels": 8, "weight_seed": 1}),
        "3": Step("CustomPyTorchActivation", 2, {"tensor": Link("2", 1), "activation_type": "relu"}),
        "4": Step(
            "CustomPyTorchLinear",
            3,
            {"tensor": Link("3"), "in_features": 8, "out_features": 3, "use_bias": True, "weight_seed": 2},
        ),
        "5": Step("CustomPyTorchActivation", 4, {"tensor": Link("4"), "activation_type": "sigmoid"}),
        "6": Step(
            "AnytorchTensorToImage",
            5,
            {"tensor": Link("5"), "output_range": "normalize", "layout": "channels last", "channels": "as they are"},
        ),
        "7": Step("PreviewImage", 6, {"images": Link("6")}),
        "8": Step("AnytorchTensorInfo", 5, {"tensor": Link("5")}, row=3),
    },
    # Documented: Model Output → Custom Loss Function → Loss Value
    "loss": {
        "1": PHOTO,
        "2": Step("CustomPyTorchConv2D", 1, {"image": Link("1"), **CONV, "kernel": "blur"}),
        "3": Step("CustomPyTorchLoss", 2, {"prediction": Link("2"), "target": Link("1"), "loss_type": "mse"}),
        "4": Step("PreviewAny", 3, {"source": Link("3")}),
        "5": Step("PreviewImage", 2, {"images": Link("2")}, row=3),
    },
    "tensor_operations": {
        "1": PHOTO,
        "2": Step(
            "CustomPyTorchConv2D", 1, {"image": Link("1"), **CONV, "kernel": "edges", "output_range": "normalize"}
        ),
        "3": Step("CustomPyTorchTensorOps", 2, {"tensor_a": Link("1"), "tensor_b": Link("2"), "operation": "multiply"}),
        "4": Step(
            "AnytorchTensorToImage",
            3,
            {"tensor": Link("3"), "output_range": "clamp", "layout": "channels last", "channels": "as they are"},
        ),
        "5": Step("PreviewImage", 4, {"images": Link("4")}),
    },
    "save_weights": {
        "1": PHOTO,
        "2": Step("CustomPyTorchConv2D", 1, {"image": Link("1"), **CONV, "weight_seed": 7}),
        "3": Step(
            "CustomPyTorchLinear",
            2,
            {"tensor": Link("2", 1), "in_features": 3, "out_features": 3, "use_bias": True, "weight_seed": 8},
        ),
        "4": Step(
            "AnytorchCombineWeights",
            3,
            {"weights_a": Link("2", 2), "name_a": "conv", "weights_b": Link("3", 1), "name_b": "linear"},
        ),
        "5": Step(
            "AnytorchSaveWeights",
            4,
            {"weights": Link("4"), "filename_prefix": "anytorch/two_layers", "overwrite": True},
        ),
    },
    # After save_weights, which writes the file.
    "load_weights": {
        "1": PHOTO,
        "2": Step("AnytorchLoadWeights", 0, {"file": "anytorch/two_layers.safetensors [output]"}, row=5),
        "3": Step(
            "CustomPyTorchConv2D",
            1,
            {"image": Link("1"), **CONV, "output_range": "normalize", "weights": Link("2"), "layer_name": "conv"},
        ),
        "4": Step("PreviewImage", 2, {"images": Link("3")}),
        "5": Step("PreviewAny", 1, {"source": Link("2", 1)}, row=6),
    },
    "devices": {
        "1": PHOTO,
        "2": Step("AnytorchDevice", 0, {"backend": "auto", "index": -1}, row=5),
        "3": Step("CustomPyTorchConv2D", 1, {"image": Link("1"), **CONV, "kernel": "sharpen", "device": Link("2")}),
        "4": Step("AnytorchMemoryCleanup", 2, {"unload_models": False, "unload_engines": True, "anything": Link("3")}),
        "5": Step("PreviewImage", 3, {"images": Link("4")}),
        "6": Step("PreviewAny", 1, {"source": Link("2", 1)}, row=6),
        "7": Step("AnytorchDeviceStatus", 2, {}, row=4),
    },
    "text_embedding": {
        "1": Step(
            "AnytorchTextEmbedding",
            0,
            {
                "text": "a photo of a cat\na kitten asleep on a sofa\nthe stock market fell",
                "model": "",
                "split_lines": True,
            },
        ),
        "2": Step(
            "AnytorchTensorToImage",
            1,
            {"tensor": Link("1", 1), "output_range": "normalize", "layout": "channels last", "channels": "as they are"},
        ),
        "3": Step("PreviewImage", 2, {"images": Link("2")}),
        "4": Step("AnytorchTensorInfo", 1, {"tensor": Link("1")}, row=3),
        "5": Step("PreviewAny", 2, {"source": Link("1", 2)}, row=4),
    },
    "forecast": {
        "1": Step(
            "AnytorchForecast",
            0,
            {"model": "tiny", "horizon": 24, "samples": 20, "draw_seed": 1, "temperature": 1.0, "top_p": 1.0},
        ),
        "2": Step("PreviewImage", 1, {"images": Link("1")}),
        "3": Step("PreviewAny", 1, {"source": Link("1", 3)}, row=5),
    },
}


def api_format(steps: dict[str, Step]) -> dict[str, Any]:
    """What POST /prompt takes."""

    def value(given: Any) -> Any:
        return [given.node, given.output] if isinstance(given, Link) else given

    return {
        key: {
            "class_type": step.kind,
            "inputs": {name: value(given) for name, given in step.inputs.items()},
            "_meta": {"title": NODE_DISPLAY_NAME_MAPPINGS.get(step.kind, step.kind)},
        }
        for key, step in steps.items()
    }


def sockets(kind: str) -> dict[str, str]:
    """The inputs that a link goes into, and their types."""
    if kind in CORE:
        return CORE[kind][0]
    return {name: spec[0] for name, spec in all_inputs(kind).items() if not is_widget(spec)}


def outputs(kind: str) -> list[tuple[str, str]]:
    if kind in CORE:
        return CORE[kind][2]
    node: Any = NODE_CLASS_MAPPINGS[kind]
    return list(zip(node.RETURN_NAMES, node.RETURN_TYPES, strict=True))


def all_inputs(kind: str) -> dict[str, Any]:
    node: Any = NODE_CLASS_MAPPINGS[kind]
    groups = node.INPUT_TYPES()
    return {**groups.get("required", {}), **groups.get("optional", {})}


def is_widget(spec: Any) -> bool:
    return isinstance(spec[0], list) or spec[0] in WIDGETS


def widget_values(step: Step) -> list[Any]:
    """One for each widget, in the order of the node's inputs: what is given, else the default."""
    if step.kind in CORE:
        values = [step.inputs[name] for name in CORE[step.kind][1]]
        return [*values, "image"] if step.kind == "LoadImage" else values  # its upload button has a value as well
    found = []
    for name, spec in all_inputs(step.kind).items():
        if is_widget(spec):
            first = spec[0][0] if isinstance(spec[0], list) and spec[0] else None
            found.append(step.inputs.get(name, spec[1].get("default", first)))
    return found


def ui_format(steps: dict[str, Step]) -> dict[str, Any]:
    """What the page saves and opens."""
    links: list[list[Any]] = []
    into: dict[tuple[str, str], int] = {}
    for key, step in steps.items():
        for name, given in step.inputs.items():
            if isinstance(given, Link):
                number = len(links) + 1
                slot = list(sockets(step.kind)).index(name)
                kind = outputs(steps[given.node].kind)[given.output][1]
                links.append([number, int(given.node), given.output, int(key), slot, kind])
                into[key, name] = number
    nodes = []
    for order, (key, step) in enumerate(steps.items()):
        taken = [link for link in links if link[1] == int(key)]
        height = 90 + 26 * (len(sockets(step.kind)) + len(widget_values(step)))
        nodes.append(
            {
                "id": int(key),
                "type": step.kind,
                "pos": [40 + step.column * COLUMN, 60 + step.row * ROW],
                "size": [WIDTH, max(height, 340) if step.kind in ("LoadImage", "PreviewImage") else height],
                "flags": {},
                "order": order,
                "mode": 0,
                "inputs": [
                    {"name": name, "type": kind, "link": into.get((key, name))}
                    for name, kind in sockets(step.kind).items()
                ],
                "outputs": [
                    {
                        "name": name,
                        "type": kind,
                        "slot_index": slot,
                        "links": [link[0] for link in taken if link[2] == slot],
                    }
                    for slot, (name, kind) in enumerate(outputs(step.kind))
                ],
                "properties": {"Node name for S&R": step.kind},
                "widgets_values": widget_values(step),
            }
        )
    return {
        "last_node_id": max(int(key) for key in steps),
        "last_link_id": len(links),
        "nodes": nodes,
        "links": links,
        "groups": [],
        "config": {},
        "extra": {},
        "version": 0.4,
    }


def files() -> dict[Path, str]:
    """Every file and its text."""
    made = {}
    for name, steps in WORKFLOWS.items():
        for folder, document in (("api_workflows", api_format(steps)), ("example_workflows", ui_format(steps))):
            made[PACK / folder / f"{name}.json"] = json.dumps(document, indent=1, ensure_ascii=False) + "\n"
    return made


if __name__ == "__main__":
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
