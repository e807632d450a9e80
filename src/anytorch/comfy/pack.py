"""The two dictionaries ComfyUI reads. The keys are stored in people's workflows: they are never renamed."""

from __future__ import annotations

from anytorch.comfy import devices, jobs, nodes, weights
from anytorch.comfy.values import Node

NODE_CLASS_MAPPINGS: dict[str, type[Node]] = {
    name: found
    for module in (nodes, devices, weights, jobs)
    for name, found in vars(module).items()
    if isinstance(found, type) and issubclass(found, Node) and found is not Node
}
NODE_DISPLAY_NAME_MAPPINGS = {name: node.title for name, node in NODE_CLASS_MAPPINGS.items()}
