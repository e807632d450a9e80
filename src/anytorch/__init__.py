"""anytorch: write PyTorch once, run it on whatever hardware is there.

Importing this module imports no torch, opens no device and reads no environment variable; every name below is loaded
when it is first used.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from anytorch._version import __version__ as __version__
from anytorch.lazy import lazy_names

if TYPE_CHECKING:  # for type checkers and editors; PUBLIC below is what runs
    from anytorch import graph as graph
    from anytorch import lite as lite
    from anytorch import quant as quant
    from anytorch import train as train
    from anytorch import webgpu as webgpu
    from anytorch.devices.choose import Resolution as Resolution
    from anytorch.devices.choose import best_device as best_device
    from anytorch.devices.choose import devices as devices
    from anytorch.devices.choose import enable as enable
    from anytorch.devices.choose import explain as explain
    from anytorch.devices.choose import resolve as resolve
    from anytorch.devices.doctor import diagnose as diagnose
    from anytorch.devices.memory import cleanup as cleanup
    from anytorch.devices.memory import synchronize as synchronize
    from anytorch.devices.oom import fit_batch as fit_batch
    from anytorch.devices.oom import is_out_of_memory as is_out_of_memory
    from anytorch.devices.precision import autocast as autocast
    from anytorch.devices.seeds import seed as seed
    from anytorch.devices.tune import use_tuned as use_tuned
    from anytorch.errors import AnytorchError as AnytorchError
    from anytorch.errors import DeviceFallbackWarning as DeviceFallbackWarning
    from anytorch.forecast.candles.generate import sample_candles as sample_candles
    from anytorch.forecast.candles.read import read_candles as read_candles
    from anytorch.forecast.checkpoints import load_predictor as load_predictor
    from anytorch.forecast.model import Kronos as Kronos
    from anytorch.forecast.model import KronosTokenizer as KronosTokenizer
    from anytorch.forecast.pool import PredictorPool as PredictorPool
    from anytorch.forecast.predictor import KronosPredictor as KronosPredictor
    from anytorch.forecast.training.finetune import finetune_predictor as finetune_predictor
    from anytorch.forecast.training.finetune import finetune_tokenizer as finetune_tokenizer
    from anytorch.graph.kernel_graph import new_kernel_graph as new_kernel_graph
    from anytorch.memory.modes import mode as mode
    from anytorch.run.stand_in import stand_in as stand_in
    from anytorch.settings import use as use
    from anytorch.text.decoders import load_decoder as load_decoder
    from anytorch.text.embed import ArrowEngine as ArrowEngine
    from anytorch.text.embed import EngineQueue as EngineQueue
    from anytorch.text.embed import encode_file as encode_file
    from anytorch.text.generate import TextGenerator as TextGenerator
    from anytorch.text.generate import TextPool as TextPool
    from anytorch.text.persistent.kernel import PersistentKernel as PersistentKernel

# Module by module, the public names it gives; `devices`, `graph`, `memory`, `quant`, `webgpu` and `lite` are packages
# themselves.
PUBLIC: dict[str, str] = {
    "devices": "devices",
    "devices.choose": "Resolution best_device enable explain resolve",
    "devices.doctor": "diagnose",
    "devices.memory": "cleanup synchronize",
    "devices.oom": "fit_batch is_out_of_memory",
    "devices.precision": "autocast",
    "devices.seeds": "seed",
    "devices.tune": "use_tuned",
    "errors": "AnytorchError DeviceFallbackWarning",
    "forecast.candles.generate": "sample_candles",
    "forecast.candles.read": "read_candles",
    "forecast.checkpoints": "load_predictor",
    "forecast.model": "Kronos KronosTokenizer",
    "forecast.pool": "PredictorPool",
    "forecast.predictor": "KronosPredictor",
    "forecast.training.finetune": "finetune_predictor finetune_tokenizer",
    "graph": "graph",
    "graph.kernel_graph": "new_kernel_graph",
    "lite": "lite",
    "memory": "memory",
    "memory.modes": "mode",
    "quant": "quant",
    "run.stand_in": "stand_in",
    "settings": "use",
    "text.decoders": "load_decoder",
    "text.embed": "ArrowEngine EngineQueue encode_file",
    "text.generate": "TextGenerator TextPool",
    "text.persistent.kernel": "PersistentKernel",
    "train": "train",
    "webgpu": "webgpu",
}
# Names of the projects that anytorch grew out of, by the documented path that has them with anytorch-compat.
MOVED: dict[str, str] = {
    "ai_os_diffusion.inference": "get_best_device",
    "apt_model.core.system": "get_device get_device_info memory_cleanup set_seed",
    "apt_model.optimization.npu_backend": (
        "DeviceBackend UnifiedDeviceManager get_accelerator_type get_device_manager get_unified_backend "
        "is_cuda_available is_npu_available"
    ),
    "model": "resolve_device",
    "yirage": (
        "BackendOptimizer BackendType auto_configure_backend benchmark_backends get_available_backends get_backend "
        "get_memory_info set_backend"
    ),
}
# What needs the extra "forecast" to be imported.
OF_FORECASTS = "forecast."


_load, __dir__, _names = lazy_names(__name__, PUBLIC, MOVED)
_names.insert(0, "__version__")


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return [name for name in _names if name != "webgpu" and _loads(name)]  # importing that one changes torch
    try:
        return _load(name)
    except ModuleNotFoundError as exc:
        if not any(name in names.split() for module, names in PUBLIC.items() if module.startswith(OF_FORECASTS)):
            raise
        from anytorch.errors import PackageMissing

        if (missing := PackageMissing.of("forecast", exc)) is None:
            raise
        raise missing from exc


def _loads(name: str) -> bool:
    """True if the packages this name needs are installed (for `from anytorch import *`); a broken import raises."""
    from anytorch.errors import PackageMissing, TorchMissing

    try:
        getattr(sys.modules[__name__], name)
    except (PackageMissing, TorchMissing):
        return False
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] == "anytorch":
            raise
        return False
    return True
