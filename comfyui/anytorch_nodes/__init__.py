"""anytorch's nodes for ComfyUI. Copy this folder into ComfyUI/custom_nodes; the nodes themselves are `anytorch.comfy`.

ComfyUI loads this file under a name made of its path, and reads the two dictionaries and WEB_DIRECTORY.
"""

import importlib.util
import sys
from pathlib import Path

# `tools/comfy_pack.py` puts anytorch itself into this folder, for where nothing can be installed.
_vendor = Path(__file__).parent / "vendor"
if importlib.util.find_spec("anytorch") is None:
    if not _vendor.is_dir():
        raise ImportError(
            f"the anytorch nodes need anytorch in ComfyUI's Python: {sys.executable} -m pip install /path/to/anytorch "
            "(a clone of it; or tools/comfy_pack.py there makes a folder with everything inside)"
        )
    sys.path.append(str(_vendor))

from anytorch.comfy.pack import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS  # noqa: E402

WEB_DIRECTORY = "./web/js"
__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS", "WEB_DIRECTORY"]
