"""Document 4's node file: re-exports of anytorch's. `cp pytorch_custom_nodes.py /path/to/ComfyUI/custom_nodes/`."""

from anytorch.comfy.pack import NODE_CLASS_MAPPINGS as NODE_CLASS_MAPPINGS
from anytorch.comfy.pack import NODE_DISPLAY_NAME_MAPPINGS as NODE_DISPLAY_NAME_MAPPINGS

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
