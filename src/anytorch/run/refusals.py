"""What only CUDA has: refused in one message that names the line, what was asked for, and what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from anytorch.errors import CannotStandIn
from anytorch.run.ledger import ledger
from anytorch.run.patches import Patches

CUDA_SOURCES = (".cu", ".cuh")
# Packages that are CUDA and nothing else, and what to do instead; told only where they are not installed.
PACKAGES = {
    "cupy": "use torch's own operations, or NumPy on the CPU",
    "cupyx": "use torch's own operations, or SciPy on the CPU",
    "pycuda": "use torch's own operations",
    "tensorrt": "run the torch model itself, or torch.compile it",
    "torch_tensorrt": "run the torch model itself, or torch.compile it",
    "apex": "use torch.amp, torch.optim and torch.nn.LayerNorm, which have what apex was for",
    "transformer_engine": "use torch.nn modules",
    "bitsandbytes": "use anytorch.quant, which packs weights for every device",
    "flash_attn": "call flash_attn_func and its like, which the stand-in computes with scaled_dot_product_attention",
    "xformers": "call xformers.ops.memory_efficient_attention, which the stand-in has, or torch's own functions",
    "flash_attn_2_cuda": "call flash_attn's functions, which the stand-in computes with scaled_dot_product_attention",
    "flash_attn_3": "call torch.nn.functional.scaled_dot_product_attention",
    "causal_conv1d": "use the model's plain torch path",
    "mamba_ssm": "use the model's plain torch path",
}


def refuse(what: str, do: str) -> CannotStandIn:
    """The error to raise for `what`; it is noted in the report."""
    line = ledger.refuse(what)
    at = f"{line}: " if line else ""
    return CannotStandIn(f"{at}{what} needs CUDA itself, and another device stands in for it here", hint=do)


def refusing(what: str, do: str) -> Callable[..., Any]:
    """A function that refuses whatever it is called with."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        raise refuse(what, do)

    return refused


def missing_package(name: str) -> ModuleNotFoundError:
    """The error for `import cupy` and similar imports, where Python has no such package. Programs may catch it as always."""
    top = name.partition(".")[0]
    line = ledger.refuse(f"import {name}")
    at = f"{line}: " if line else ""
    return ModuleNotFoundError(
        f"{at}No module named {name!r}; it computes only on CUDA, and another device stands in for it here. "
        f"Instead: {PACKAGES[top]}.",
        name=name,
    )


def missing_name(module: str, name: str) -> ImportError:
    """The error for `from flash_attn import name`, where torch has no equivalent of that name."""
    line = ledger.refuse(f"from {module} import {name}")
    at = f"{line}: " if line else ""
    return ImportError(
        f"{at}cannot import name {name!r} from {module!r}; it computes only on CUDA, and another device stands in for it "
        f"here. Instead: {PACKAGES[module.partition('.')[0]]}.",
        name=module,
    )


def install_triton(patches: Patches, module: Any) -> None:
    """Refuse Triton kernels: its compiler has no back end for the stand-in's device. (Interpreted ones are not touched.)"""
    function = getattr(module, "JITFunction", None)
    if function is None:
        return
    do = "use the program's torch path, or set TRITON_INTERPRET=1, which runs kernels slowly on the CPU"

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        named = getattr(getattr(self, "fn", None), "__name__", "a kernel")
        raise refuse(f"the Triton kernel {named}", do)

    patches.set(function, "run", run)


def install_extensions(patches: Patches, module: Any) -> None:
    """Refuse CUDA sources in torch.utils.cpp_extension; C++ ones are built as ever."""
    do = "use the project's torch path, or build the C++ sources without CUDA ones"

    def cuda_in(sources: Any) -> list[str]:
        listed = [sources] if isinstance(sources, str) else list(sources or ())
        return [str(name) for name in listed if str(name).endswith(CUDA_SOURCES)]

    plain_load, plain_inline = module.load, module.load_inline

    def load(name: str, sources: Any, *args: Any, **kwargs: Any) -> Any:
        found = cuda_in(sources)
        if found or kwargs.get("with_cuda"):
            raise refuse(f"cpp_extension.load({name!r}) with {', '.join(found) or 'with_cuda=True'}", do)
        return plain_load(name, sources, *args, **kwargs)

    def load_inline(name: str, cpp_sources: Any, cuda_sources: Any = None, *args: Any, **kwargs: Any) -> Any:
        if cuda_sources or kwargs.get("with_cuda"):
            raise refuse(f"cpp_extension.load_inline({name!r}) with CUDA sources", do)
        return plain_inline(name, cpp_sources, None, *args, **kwargs)

    patches.set(module, "load", load)
    patches.set(module, "load_inline", load_inline)
    patches.set(module, "CUDAExtension", refusing("cpp_extension.CUDAExtension", do))


# Modules that are changed when they are there: at once where they are loaded, else when they are (`hooks`).
LATER: dict[str, Callable[[Patches, Any], None]] = {
    "triton.runtime.jit": install_triton,
    "torch.utils.cpp_extension": install_extensions,
}


def install(patches: Patches) -> None:
    for name, change in LATER.items():
        if (module := sys.modules.get(name)) is not None:
            change(patches, module)
