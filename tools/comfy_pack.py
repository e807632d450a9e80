"""A folder that is all of it: the ComfyUI nodes with anytorch inside, for a ComfyUI nothing can be installed into.

    python tools/comfy_pack.py dist/anytorch_nodes     # then copy that folder into ComfyUI/custom_nodes

It needs what ComfyUI itself needs (torch, numpy, safetensors, tokenizers); the forecast node also pandas and matplotlib.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LEFT_OUT = shutil.ignore_patterns("__pycache__", "*.pyc")


def build(target: Path) -> Path:
    """Copy the pack and the package to `target`: a new folder, or one that this made before."""
    if target.exists():
        if not (target / "vendor" / "anytorch").is_dir():
            sys.exit(f"{target} is there and was not made by this program; remove it, or name another folder")
        shutil.rmtree(target)
    shutil.copytree(ROOT / "comfyui" / "anytorch_nodes", target, ignore=LEFT_OUT)
    shutil.copytree(ROOT / "src" / "anytorch", target / "vendor" / "anytorch", ignore=LEFT_OUT)
    return target


if __name__ == "__main__":
    print(build(Path(sys.argv[1] if len(sys.argv) > 1 else "dist/anytorch_nodes")))
