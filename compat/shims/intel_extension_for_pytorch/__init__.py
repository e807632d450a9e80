"""`import intel_extension_for_pytorch as ipex` where Intel's extension is not installed: torch's own XPU support.

What the extension brought has been in torch since 2.5 (`torch.xpu`), and Intel has ended the extension. This folder is for
the path (`PYTHONPATH=compat/shims`), and no package installs it: where the real extension is installed, that one must be
found.

`optimize` returns the model as torch computes it, in the dtype that is asked for. Kernels that only the extension had are
not here.
"""

from __future__ import annotations

from typing import Any

import torch

from anytorch._version import __version__ as _own_version

__version__ = f"{torch.__version__.partition('+')[0]}+anytorch{_own_version}"
xpu = torch.xpu


def has_xpu() -> bool:
    """True if torch was built for XPU; `torch.xpu.is_available()` says whether one is there."""
    return bool(torch.xpu._is_compiled())


def optimize(
    model: torch.nn.Module,
    dtype: torch.dtype | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    inplace: bool = False,
    **ignored: Any,
) -> Any:
    """The model in this dtype (a copy unless `inplace`); with an optimizer, both, which then stay in float32 for autocast.

    The extension's own switches (`level`, `conv_bn_folding`, `weights_prepack`, …) are accepted and change nothing.
    """
    import copy

    made = model if inplace or optimizer is not None else copy.deepcopy(model)
    if optimizer is not None:
        return made, optimizer
    return made.to(dtype) if dtype is not None else made


def llm_optimize(model: torch.nn.Module, **options: Any) -> Any:
    """The extension's `ipex.llm.optimize`."""
    return optimize(model, options.pop("dtype", None), **options)


class llm:
    optimize = staticmethod(llm_optimize)
