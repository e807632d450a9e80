"""flash_attn and xformers, as far as torch has the same. The modules are made here, whether the packages are installed or
not: theirs are CUDA kernels."""

from __future__ import annotations

import dis
import sys
from types import FrameType, ModuleType
from typing import Any

from anytorch.run.flash_attention import FLASH, PADDING
from anytorch.run.refusals import missing_name
from anytorch.run.xformers_ops import MASKS, OPS

VERSION = "0.0.0+anytorch"  # no release: whoever asks for a certain one is told that this is none
# Module → its contents. A package has submodules here, and nothing else below it can be imported.
MODULES: dict[str, dict[str, Any]] = {
    "flash_attn": {"__version__": VERSION, **FLASH},
    "flash_attn.flash_attn_interface": FLASH,
    "flash_attn.bert_padding": PADDING,
    "xformers": {"__version__": VERSION, "_has_cpp_library": False},
    "xformers.ops": OPS,
    "xformers.ops.fmha": OPS,
    "xformers.ops.fmha.attn_bias": MASKS,
    "xformers.version": {"__version__": VERSION},
}


def asked_by_import(frame: FrameType) -> bool:
    """True if the frame is at `from module import name`, which turns an AttributeError into a message of its own."""
    return dis.opname[frame.f_code.co_code[frame.f_lasti]] == "IMPORT_FROM"


def fill(module: ModuleType) -> None:
    """Give a new module of one of these names its contents."""
    vars(module).update(MODULES[module.__name__])

    def lacking(name: str) -> Any:
        if not name.startswith("__") and asked_by_import(sys._getframe(1)):
            raise missing_name(module.__name__, name)
        raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")

    vars(module)["__getattr__"] = lacking
    parent, _, name = module.__name__.rpartition(".")
    if parent:
        setattr(sys.modules[parent], name, module)
