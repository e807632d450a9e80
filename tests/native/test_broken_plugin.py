"""A device plug-in that cannot load takes `import torch` down: the recorded failure of torch_npu without CANN."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def test_import_torch_fails_because_of_the_plugin(broken_torch_plugin: Path, run_python: Any) -> None:
    done = run_python("import torch", path=[broken_torch_plugin], check=False)
    assert done.returncode == 1
    assert "RuntimeError: Failed to load the backend extension: torch_npu" in done.stderr
    assert "ImportError: libhccl.so: cannot open shared object file: No such file or directory" in done.stderr


def test_torch_imports_without_autoload_and_the_plugin_tells_why(broken_torch_plugin: Path, run_script: Any) -> None:
    answers = run_script(
        """
        import torch
        try:
            import torch_npu
        except ImportError as exc:
            answer(sum=torch.ones(2).sum().item(), error=str(exc))
        """,
        {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"},
        path=[broken_torch_plugin],
    )
    assert answers == {"sum": 2.0, "error": "libhccl.so: cannot open shared object file: No such file or directory"}
