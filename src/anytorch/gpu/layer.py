"""Our Vulkan layer: what it asks the driver for, which matrix shapes the driver has, and kernels in SPIR-V handed to it.

wgpu lists cooperative matrices and cannot switch them on. A layer of ours between wgpu and the driver
(code/vulkan_layer.cpp) can. `asked_for` lets the Vulkan loader find it while wgpu makes its instance, `armed` lets it add
the extensions to the device that is made inside; `standing_in` replaces one marked module by SPIR-V. Where anything is
missing, everything works as before, without matrix cores, and `why_not` says why (docs/design/0012-matrix-cores.md).
"""

from __future__ import annotations

import ctypes
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from anytorch import logs, native, settings
from anytorch.errors import NativeUnavailable
from anytorch.files import replace_file

log = logs.logger(__name__)

NAME = "VK_LAYER_ANYTORCH_matrix_cores"
SOURCE = Path(__file__).parent / "code" / "vulkan_layer.cpp"
MAGIC = 0xA17C0DE5  # the layer's: in every marked module
MOST_SHAPES = 128
ADDS_PATHS = (1, 3, 220)  # the oldest loader that surely knows VK_ADD_LAYER_PATH
TYPES = {0: "float16", 1: "float32", 3: "int8", 5: "int32", 7: "uint8", 9: "uint32", 1000141000: "bfloat16"}
SCOPES = {2: "workgroup", 3: "subgroup"}
STATES = {
    0: "the device was not made through the layer",
    -1: "the driver has no cooperative matrices (VK_KHR_cooperative_matrix)",
    -2: "the driver's cooperative matrices cannot be used: it lacks a feature",
    -3: "the driver lists cooperative matrices, but cannot open a device with them",
}


class _Report(ctypes.Structure):
    _fields_ = (
        ("state", ctypes.c_int32),
        ("subgroup_smallest", ctypes.c_uint32),
        ("subgroup_largest", ctypes.c_uint32),
        ("subgroup_can_be_required", ctypes.c_uint32),
        ("bfloat16", ctypes.c_uint32),
        ("second", ctypes.c_uint32 * 7),
        ("shape_count", ctypes.c_uint32),
        ("flexible_count", ctypes.c_uint32),
        ("shapes", ctypes.c_uint32 * 9 * MOST_SHAPES),
        ("flexible", ctypes.c_uint32 * 10 * MOST_SHAPES),
    )


@dataclass(frozen=True)
class MatrixShape:
    """A product that the driver offers: A of m x k times B of k x n, with sums of type c."""

    m: int
    n: int
    k: int
    a: str
    b: str
    c: str
    scope: str  # which invocations share a matrix
    invocations: int = 0  # of a workgroup, where that shares it; then m, n and k are granularities


@dataclass(frozen=True)
class MatrixCores:
    """What a device can do with cooperative matrices; `why_not` is "" where it can."""

    why_not: str = ""
    shapes: tuple[MatrixShape, ...] = ()
    flexible: tuple[MatrixShape, ...] = ()  # of NVIDIA's second extension
    subgroup: int = 0  # the size that kernels are written for
    required_subgroup: int = 0  # the same where the driver must be told; 0 where all are alike
    second: tuple[str, ...] = ()  # features of the second extension

    def shape_for(self, element: str) -> MatrixShape | None:
        """The shape with float32 sums for products of `element`; of several, the squarest, which needs the fewest loads."""
        found = [
            shape
            for shape in self.shapes
            if (shape.a, shape.b, shape.c, shape.scope) == (element, element, "float32", "subgroup")
            and shape.m % 8 == shape.n % 8 == shape.k % 8 == 0
        ]
        return max(
            found, key=lambda shape: (min(shape.m, shape.n, 16), min(shape.k, 16), -shape.m * shape.n), default=None
        )


SECOND = (
    *("workgroup scope", "flexible sizes", "reductions", "conversions"),
    *("per element", "tensor addressing", "block loads"),
)
_library: ctypes.CDLL | None = None
_why_not = "wgpu was in use before anytorch asked for its layer"


@contextmanager
def asked_for() -> Iterator[None]:
    """Within it the Vulkan loader finds our layer: for the call that makes wgpu's instance."""
    global _library, _why_not
    path = _built()
    folder = _with_manifest(path) if path is not None else None
    if path is None or folder is None:
        log.info("matrix cores are not used: %s", _why_not)
        yield
        return
    before = {name: os.environ.get(name) for name in ("VK_INSTANCE_LAYERS", "VK_ADD_LAYER_PATH", "VK_LAYER_PATH")}
    try:
        _add("VK_INSTANCE_LAYERS", NAME)
        # VK_LAYER_PATH replaces the loader's own folders, VK_ADD_LAYER_PATH adds to them: unless it is set itself.
        replaces = before["VK_LAYER_PATH"] is not None or not _adds_paths()
        _add("VK_LAYER_PATH" if replaces else "VK_ADD_LAYER_PATH", folder)
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)
    try:
        library = ctypes.CDLL(str(path))  # the very one that the loader has opened
    except OSError as exc:
        _why_not = f"the Vulkan layer cannot be loaded: {exc}"
        return
    if library.layer_arm(0):
        _library, _why_not = _typed(library), ""
    else:
        _why_not = "the Vulkan loader did not take our layer"


def _with_manifest(path: Path) -> str | None:
    """A new folder with the file that tells the Vulkan loader of the layer; None where none can be made."""
    global _why_not
    layer = {
        "name": NAME,
        "type": "GLOBAL",
        "library_path": str(path),
        "api_version": "1.4.0",
        "implementation_version": "1",
        "description": "lets anytorch use matrix cores through WebGPU",
    }
    try:
        folder = tempfile.mkdtemp(prefix="anytorch-layer-")
        document = {"file_format_version": "1.2.0", "layer": layer}
        replace_file(Path(folder) / "anytorch.json", json.dumps(document).encode())
    except OSError as exc:
        _why_not = f"no temporary file can be written: {exc.strerror}"
        return None
    return folder


def _built() -> Path | None:
    """The layer's file; None, and a reason, where there is none."""
    global _why_not
    if settings.get("webgpu_matrix_cores") == "off":
        _why_not = "the setting webgpu_matrix_cores is off"
    elif sys.platform not in ("linux", "win32"):
        _why_not = f"matrix cores are used through Vulkan, which anytorch does not use on {sys.platform}"
    else:
        try:
            return native.build("vulkan-layer", [SOURCE], level="baseline")
        except (NativeUnavailable, OSError) as exc:
            _why_not = f"the Vulkan layer cannot be built: {str(exc).splitlines()[0]}"
    return None


def _add(name: str, value: str) -> None:
    there = os.environ.get(name)
    os.environ[name] = f"{value}{os.pathsep}{there}" if there else value


def _adds_paths() -> bool:
    """Whether the Vulkan loader knows VK_ADD_LAYER_PATH. Told by its version."""
    number = ctypes.c_uint32(0)
    try:
        loader = ctypes.CDLL("vulkan-1.dll" if sys.platform == "win32" else "libvulkan.so.1")
        loader.vkEnumerateInstanceVersion(ctypes.byref(number))
    except (OSError, AttributeError) as exc:
        log.debug("the Vulkan loader's version is unknown: %s", exc)
        return True
    found = number.value
    return (found >> 22 & 0x7F, found >> 12 & 0x3FF, found & 0xFFF) >= ADDS_PATHS


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    library.layer_arm.argtypes, library.layer_arm.restype = (ctypes.c_int32,), ctypes.c_int32
    library.layer_report.argtypes, library.layer_report.restype = (), ctypes.POINTER(_Report)
    library.layer_register.argtypes = (
        *(ctypes.c_uint32, ctypes.c_uint32, ctypes.c_void_p),
        *(ctypes.c_size_t, ctypes.c_uint32),
    )
    library.layer_register.restype = ctypes.c_int32
    library.layer_forget.argtypes, library.layer_forget.restype = (ctypes.c_void_p,), ctypes.c_uint32
    return library


@contextmanager
def armed() -> Iterator[None]:
    """A device that is made within gets the driver's cooperative matrices; `found` says afterwards what they are."""
    if _library is None:
        yield
        return
    _library.layer_arm(1)
    try:
        yield
    finally:
        _library.layer_arm(0)


def found(api: str) -> MatrixCores:
    """What the device that was made last within `armed` can do."""
    if api != "Vulkan":
        return MatrixCores(f"matrix cores are used through Vulkan, and this adapter is reached through {api}")
    if _library is None:
        return MatrixCores(_why_not)
    return read_report(_library.layer_report().contents)


def read_report(report: _Report) -> MatrixCores:
    if report.state != 1:
        return MatrixCores(STATES.get(report.state, "unknown"))
    shapes = tuple(_shape(report.shapes[i]) for i in range(report.shape_count))
    flexible = tuple(_shape(report.flexible[i]) for i in range(report.flexible_count))
    second = tuple(name for name, on in zip(SECOND, report.second, strict=True) if on)
    if not report.bfloat16:
        shapes = tuple(shape for shape in shapes if "bfloat16" not in (shape.a, shape.b, shape.c))
    size, required = report.subgroup_smallest, 0
    if report.subgroup_smallest != report.subgroup_largest:
        if not report.subgroup_can_be_required:
            return MatrixCores("subgroup sizes vary, and the driver does not let a program require one")
        size = required = min(32, report.subgroup_largest)
    if not any(shape.c == "float32" and shape.scope == "subgroup" for shape in shapes):
        return MatrixCores("the driver lists no matrices with sums in float32", shapes)
    return MatrixCores("", shapes, flexible, size, required, second)


def _shape(words: ctypes.Array[ctypes.c_uint32]) -> MatrixShape:
    m, n, k, a, b, c, _, _, scope = words[:9]
    types = [TYPES.get(kind, str(kind)) for kind in (a, b, c)]
    invocations = words[9] if len(words) > 9 else 0
    return MatrixShape(m, n, k, types[0], types[1], types[2], SCOPES.get(scope, str(scope)), invocations)


@dataclass(frozen=True)
class Spirv:
    """A kernel in SPIR-V, for the layer to put in a marked module's place."""

    words: bytes
    required_subgroup: int = 0

    @property
    def mark(self) -> tuple[int, int]:
        digest = sha256(self.words).digest()
        return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")

    @property
    def stand_in(self) -> str:
        """WGSL that does nothing, and holds the mark as constants."""
        first, second = self.mark
        return (
            "@compute @workgroup_size(1) fn main() {\n"
            f"  var mark = {MAGIC}u;\n  mark = {first}u;\n  mark = {second}u;\n}}\n"
        )


@contextmanager
def standing_in(kernel: Spirv) -> Iterator[None]:
    """Within it the module that `kernel.stand_in` is compiled to becomes the kernel. RuntimeError where it did not."""
    if _library is None:
        raise RuntimeError(f"kernels for matrix cores need the Vulkan layer, which is not loaded: {_why_not}")
    words = ctypes.create_string_buffer(kernel.words, len(kernel.words))
    place = ctypes.addressof(words)
    before = _library.layer_forget(0)
    if not _library.layer_register(*kernel.mark, place, len(kernel.words), kernel.required_subgroup):
        raise RuntimeError("too many kernels are being compiled at once")
    try:
        yield
    finally:
        after = _library.layer_forget(place)
    if after == before:
        raise RuntimeError("the layer did not see the kernel's module")
