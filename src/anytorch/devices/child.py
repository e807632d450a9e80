"""The child process that tries devices, so that a crash, a hang or a driver's start stays out of the caller's process.

`main([report_file, *backends])` appends one JSON line before and one after each step. The parent (`try_out.py`) starts it
and reads as many lines as there are.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, TextIO

from anytorch.devices.registry import registry
from anytorch.devices.types import BackendReport
from anytorch.probe.facts import as_json


def main(arguments: list[str]) -> int:
    path, *names = arguments
    with open(path, "a", encoding="utf-8") as out:  # noqa: PTH123  (line-buffered by hand below)
        tell(out, "start", facts={"cuinit_code": cuinit_code()})
        try:
            import torch
        except Exception as exc:  # noqa: BLE001  (a plug-in may raise anything from `import torch`)
            tell(out, "import-failed", error=chain(exc))
            return 0
        tell(out, "torch", version=torch.__version__, facts=about_torch())
        backends = registry().backends
        for name in names or backends:
            tell(out, "trying", backend=name)
            try:
                report = backends[name].try_out()
            except Exception as exc:  # noqa: BLE001  (drivers raise anything; the words are kept)
                import traceback

                trace = "".join(traceback.format_exception(exc))
                report = BackendReport(name, code="failed", error=chain(exc), facts={"traceback": trace})
            tell(out, "report", backend=name, report=as_json(report))
        tell(out, "done")
    return 0


def tell(out: TextIO, event: str, **values: Any) -> None:
    out.write(json.dumps({"event": event, **values}) + "\n")
    out.flush()
    os.fsync(out.fileno())  # the next step may take the process down


def chain(exc: BaseException) -> str:
    """The exception and its causes: "RuntimeError: Failed to load … ← ImportError: libhccl.so: …"."""
    words, seen = [], 0
    link: BaseException | None = exc
    while link is not None and seen < 5:
        words.append(f"{type(link).__name__}: {link}")
        link, seen = link.__cause__ or link.__context__, seen + 1
    return " ← ".join(words)


def cuinit_code() -> int | None:
    """The code `cuInit` returns, which torch does not report. None where there is no driver library."""
    import ctypes

    try:
        library = ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
    return int(library.cuInit(0))  # H: CUresult cuInit(unsigned int Flags)


def about_torch() -> dict[str, Any]:
    import torch

    name = torch._C._get_privateuse1_backend_name()
    return {
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
        "mkldnn_bf16": mkldnn_bf16(),
        "privateuse1": None if name == "privateuseone" else name,
        # torch_npu's transfer_to_npu and others replace torch.cuda: available, and yet this torch has no CUDA.
        "cuda_spoofed": torch.version.cuda is None and torch.version.hip is None and torch.cuda.is_available(),
        "mps_built": torch.backends.mps.is_built(),
        "mps_available": torch.backends.mps.is_available(),
        "arch_list": torch.cuda.get_arch_list(),
        "torch_cuda_version": torch.version.cuda,
        "torch_hip_version": torch.version.hip,
    }


def mkldnn_bf16() -> bool | None:
    """True if oneDNN has fast bf16 here; None if this torch cannot tell."""
    import torch

    try:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    except (AttributeError, RuntimeError):
        return None
