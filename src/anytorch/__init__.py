"""anytorch: write PyTorch once, run it on whatever hardware is there.

Importing this module imports no torch, opens no device and reads no environment variable; every name below is loaded
when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from anytorch._version import __version__ as __version__

if TYPE_CHECKING:  # for type checkers and editors; PUBLIC below is what runs
    from anytorch.devices.bench import benchmark_backends as benchmark_backends
    from anytorch.devices.choose import Resolution as Resolution
    from anytorch.devices.choose import best_device as best_device
    from anytorch.devices.choose import enable as enable
    from anytorch.devices.choose import explain as explain
    from anytorch.devices.choose import resolve as resolve
    from anytorch.devices.doctor import diagnose as diagnose
    from anytorch.devices.documented import BackendType as BackendType
    from anytorch.devices.documented import DeviceBackend as DeviceBackend
    from anytorch.devices.documented import UnifiedDeviceManager as UnifiedDeviceManager
    from anytorch.devices.documented import get_accelerator_type as get_accelerator_type
    from anytorch.devices.documented import get_available_backends as get_available_backends
    from anytorch.devices.documented import get_backend as get_backend
    from anytorch.devices.documented import get_best_device as get_best_device
    from anytorch.devices.documented import get_device as get_device
    from anytorch.devices.documented import get_device_info as get_device_info
    from anytorch.devices.documented import get_device_manager as get_device_manager
    from anytorch.devices.documented import get_memory_info as get_memory_info
    from anytorch.devices.documented import get_unified_backend as get_unified_backend
    from anytorch.devices.documented import is_cuda_available as is_cuda_available
    from anytorch.devices.documented import is_npu_available as is_npu_available
    from anytorch.devices.documented import memory_cleanup as memory_cleanup
    from anytorch.devices.documented import resolve_device as resolve_device
    from anytorch.devices.documented import set_backend as set_backend
    from anytorch.devices.documented import set_seed as set_seed
    from anytorch.devices.memory import cleanup as cleanup
    from anytorch.devices.memory import synchronize as synchronize
    from anytorch.devices.oom import fit_batch as fit_batch
    from anytorch.devices.oom import is_out_of_memory as is_out_of_memory
    from anytorch.devices.precision import autocast as autocast
    from anytorch.devices.seeds import seed as seed
    from anytorch.devices.tune import BackendOptimizer as BackendOptimizer
    from anytorch.devices.tune import auto_configure_backend as auto_configure_backend
    from anytorch.devices.tune import use_tuned as use_tuned
    from anytorch.errors import AnytorchError as AnytorchError
    from anytorch.errors import DeviceFallbackWarning as DeviceFallbackWarning
    from anytorch.forecast.candles.generate import sample_candles as sample_candles
    from anytorch.forecast.candles.read import read_candles as read_candles
    from anytorch.forecast.checkpoints import load_predictor as load_predictor
    from anytorch.forecast.model import Kronos as Kronos
    from anytorch.forecast.model import KronosTokenizer as KronosTokenizer
    from anytorch.forecast.predictor import KronosPredictor as KronosPredictor
    from anytorch.forecast.training.finetune import finetune_predictor as finetune_predictor
    from anytorch.forecast.training.finetune import finetune_tokenizer as finetune_tokenizer
    from anytorch.memory.modes import mode as mode
    from anytorch.settings import use as use
    from anytorch.text.embed import ArrowEngine as ArrowEngine
    from anytorch.text.embed import EngineQueue as EngineQueue
    from anytorch.text.embed import encode_file as encode_file
    from anytorch.text.generate import TextGenerator as TextGenerator

PUBLIC: dict[str, str] = {
    "AnytorchError": "anytorch.errors",
    "ArrowEngine": "anytorch.text.embed",
    "BackendOptimizer": "anytorch.devices.tune",
    "BackendType": "anytorch.devices.documented",
    "DeviceBackend": "anytorch.devices.documented",
    "DeviceFallbackWarning": "anytorch.errors",
    "EngineQueue": "anytorch.text.embed",
    "Kronos": "anytorch.forecast.model",
    "KronosPredictor": "anytorch.forecast.predictor",
    "KronosTokenizer": "anytorch.forecast.model",
    "Resolution": "anytorch.devices.choose",
    "TextGenerator": "anytorch.text.generate",
    "UnifiedDeviceManager": "anytorch.devices.documented",
    "auto_configure_backend": "anytorch.devices.tune",
    "autocast": "anytorch.devices.precision",
    "benchmark_backends": "anytorch.devices.bench",
    "best_device": "anytorch.devices.choose",
    "cleanup": "anytorch.devices.memory",
    "devices": "anytorch.devices",  # the package itself, which can be called
    "diagnose": "anytorch.devices.doctor",
    "enable": "anytorch.devices.choose",
    "encode_file": "anytorch.text.embed",
    "explain": "anytorch.devices.choose",
    "finetune_predictor": "anytorch.forecast.training.finetune",
    "finetune_tokenizer": "anytorch.forecast.training.finetune",
    "fit_batch": "anytorch.devices.oom",
    "get_accelerator_type": "anytorch.devices.documented",
    "get_available_backends": "anytorch.devices.documented",
    "get_backend": "anytorch.devices.documented",
    "get_best_device": "anytorch.devices.documented",
    "get_device": "anytorch.devices.documented",
    "get_device_info": "anytorch.devices.documented",
    "get_device_manager": "anytorch.devices.documented",
    "get_memory_info": "anytorch.devices.documented",
    "get_unified_backend": "anytorch.devices.documented",
    "is_cuda_available": "anytorch.devices.documented",
    "is_npu_available": "anytorch.devices.documented",
    "is_out_of_memory": "anytorch.devices.oom",
    "load_predictor": "anytorch.forecast.checkpoints",
    "memory": "anytorch.memory",  # the package itself, which can be called
    "memory_cleanup": "anytorch.devices.documented",
    "mode": "anytorch.memory.modes",
    "read_candles": "anytorch.forecast.candles.read",
    "resolve": "anytorch.devices.choose",
    "resolve_device": "anytorch.devices.documented",
    "sample_candles": "anytorch.forecast.candles.generate",
    "seed": "anytorch.devices.seeds",
    "set_backend": "anytorch.devices.documented",
    "set_seed": "anytorch.devices.documented",
    "synchronize": "anytorch.devices.memory",
    "use": "anytorch.settings",
    "use_tuned": "anytorch.devices.tune",
}
# What needs the extra "forecast" to be imported.
OF_FORECASTS = "anytorch.forecast"


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return ["__version__", *filter(_loads, PUBLIC)]
    if name not in PUBLIC:
        raise AttributeError(f"module 'anytorch' has no attribute {name!r}")
    from importlib import import_module

    try:
        module = import_module(PUBLIC[name])
    except ModuleNotFoundError as exc:
        if not PUBLIC[name].startswith(OF_FORECASTS):
            raise
        from anytorch.errors import PackageMissing

        if (missing := PackageMissing.of_forecasts(exc)) is None:
            raise
        raise missing from exc
    value = module if PUBLIC[name] == f"anytorch.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def _loads(name: str) -> bool:
    """True if the packages this name needs are installed (for `from anytorch import *`); a broken import raises."""
    from anytorch.errors import PackageMissing, TorchMissing

    try:
        __getattr__(name)
    except (PackageMissing, TorchMissing):
        return False
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] == "anytorch":
            raise
        return False
    return True


def __dir__() -> list[str]:
    return sorted(["__version__", *PUBLIC])
