"""Generated C++ on the CPU: compiled once into the cache, run by our own pool of threads."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextvars import copy_context
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from anytorch import logs, native, settings
from anytorch.errors import CompilerMissing
from anytorch.files import replace_file
from anytorch.graph.back import saving
from anytorch.graph.back.compiling import patient_pool
from anytorch.graph.emit import cpp, cpp_schedules
from anytorch.graph.emit.cpp_schedules import Machine
from anytorch.graph.emit.flat import flattened
from anytorch.graph.emit.schedule import Schedule
from anytorch.graph.emit.sharing import sizes_of
from anytorch.graph.loops import Kernel
from anytorch.native.compiler import find_compiler

log = logs.logger(__name__)

CODE = Path(cpp.__file__).parent / "code"
Launch = Callable[[Sequence[torch.Tensor], Mapping[str, int]], None]


def machine() -> Machine:
    return Machine(torch.get_num_threads(), native.level().width // 4)


def candidates(kernel: Kernel, known: Mapping[str, int], most: int | None = None) -> list[Schedule]:
    return cpp_schedules.schedules(flattened(kernel), known, machine(), most)


def considered(kernel: Kernel, known: Mapping[str, int]) -> list[Schedule]:
    """The candidates and others, sooner: whether one can be written shows when it is prepared."""
    return cpp_schedules.considered(flattened(kernel), known, machine())


def render(kernel: Kernel, schedule: Schedule) -> str:
    """The C++ text of a kernel, for a schedule that `candidates` offers."""
    return cpp.render(flattened(kernel), schedule)


def prepare(kernel: Kernel, schedule: Schedule) -> Launch:
    """Compile a kernel. What comes back takes the tensors of its buffers and the named sizes. Raises NativeUnavailable."""
    kernel = flattened(kernel)
    text = cpp.render(kernel, schedule)
    saving.save(text, schedule.name, suffix=".cpp", comment="//")
    library = _library(text, settings.cache_folder(), settings.get("simd"))
    run, address = _pool(settings.cache_folder(), settings.get("simd")), ctypes.cast(library.kernel, ctypes.c_void_p)
    names = sizes_of(kernel)
    pointers, numbers = ctypes.c_void_p * len(kernel.buffers), ctypes.c_int64 * max(1, len(names))
    width = native.level().width // 4
    static = None if names else cpp.items(kernel, schedule, {}, width)
    no_sizes = numbers()

    def launch(tensors: Sequence[torch.Tensor], known: Mapping[str, int]) -> None:
        addresses = pointers(*[tensor.data_ptr() for tensor in tensors])
        sizes = numbers(*[known[name] for name in names]) if names else no_sizes
        count = cpp.items(kernel, schedule, known, width) if static is None else static
        run(address, addresses, sizes, count, torch.get_num_threads())

    return launch


def launcher(function: Any, sizes: Sequence[int], items: int) -> Callable[[Sequence[int | None]], None]:
    """How a kernel of a library is launched, given its buffers' addresses: several threads call `function` with them, the
    sizes, and the first and last of some of its `items` of work."""
    run, address = _pool(settings.cache_folder(), settings.get("simd")), ctypes.cast(function, ctypes.c_void_p)
    numbers = (ctypes.c_int64 * max(1, len(sizes)))(*sizes)

    def launch(addresses: Sequence[int | None]) -> None:
        run(address, (ctypes.c_void_p * len(addresses))(*addresses), numbers, items, torch.get_num_threads())

    return launch


def compile_ahead(
    kernel: Kernel, schedules: Sequence[Schedule], tensors: Sequence[torch.Tensor], known: Mapping[str, int]
) -> None:
    """Compile the kernel with all of these schedules, as many at once as torch may use threads. What cannot be compiled says
    so when it is prepared."""
    del tensors, known  # the text holds for all
    with patient_pool(torch.get_num_threads()) as pool:
        for schedule, done in [(one, pool.submit(copy_context().run, prepare, kernel, one)) for one in schedules]:
            if (failed := done.exception()) is not None:
                log.info("a kernel with %s does not compile: %s", schedule.name, failed)


@lru_cache(maxsize=4096)
def _library(text: str, cache: Path, level: str | None) -> Any:
    digest = hashlib.sha256(text.encode()).hexdigest()[:24]
    source = cache / "graph" / "cpp" / digest / "kernel.cpp"
    content = f"// {digest}\n{text}".encode()
    if not source.exists() or source.read_bytes() != content:  # a damaged file must not be compiled, let alone run
        source.parent.mkdir(parents=True, exist_ok=True)
        replace_file(source, content)
    # The compiler must not join a product with the next sum: then x * 3 in one loop would differ from x * 3 in another.
    return native.load("graph", [source], level=level, flags=("-ffp-contract=off",), header="lanes.h")


@lru_cache(maxsize=4)
def _pool(cache: Path, level: str | None) -> Any:
    library = native.load("graph-pool", [CODE / "pool.cpp"], level="baseline")
    function = library.run_kernel
    function.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
    function.restype = None
    return function


def ready() -> None:
    """Raise NativeUnavailable unless C++ can be compiled here, or was before."""
    cache = settings.cache_folder()
    _pool(cache, settings.get("simd"))
    try:
        find_compiler()
    except CompilerMissing:
        # The pool may have come with the package. What an earlier compiler has made still runs.
        if not any(cache.glob(f"native*/graph-{native.level().name}-*")):
            raise
