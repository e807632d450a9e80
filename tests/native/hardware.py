"""Hardware for tests on machines that have none: a mock NVML library, a compiled PrivateUse1 device, a broken plug-in.

The rule (research, section 3): a fake carries recorded facts only, each with its source. What is compiled is kept in
`.cache/` of the repository under a hash of its source, so that only the first run pays for the compiler.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
BUILDS = REPOSITORY / ".cache" / "native"


class CompilerMissing(Exception):
    """No C or C++ compiler on this machine."""


def _beside(name: str) -> Any:
    """A module of this folder, which is on nobody's path."""
    spec = importlib.util.spec_from_file_location(f"anytorch_tests_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


WARM = _beside("warm").Warm()


def run_python(
    code: str,
    *,
    env: Mapping[str, str | None] | None = None,
    path: Sequence[Path] = (),
    timeout_s: float = 600,
    check: bool = True,
    warm: bool = False,
) -> subprocess.CompletedProcess[str]:
    """Run `code` in a Python of its own, with our sources on its path. A variable set to None in `env` is removed.

    `check` fails the test with the whole of standard error when the process does not exit with 0. `warm`: torch may be
    imported when the code begins, where the environment allows that (warm.py); not for tests of importing.
    """
    __tracebackhide__ = True
    variables: dict[str, str | None] = {**os.environ, **(env or {})}
    folders = [str(folder) for folder in path] + [str(REPOSITORY / "src"), str(REPOSITORY / "compat" / "src")]
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, [*folders, variables.get("PYTHONPATH")]))
    environment = {name: value for name, value in variables.items() if value is not None}
    if warm and WARM.fits(environment):
        done = WARM.run(textwrap.dedent(code), environment, timeout_s)
    else:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
    if check:
        assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def run_script(
    code: str,
    env: Mapping[str, str | None] | None = None,
    *,
    path: Sequence[Path] = (),
    timeout_s: float = 600,
    warm: bool = False,
) -> dict[str, Any]:
    """Like `run_python`, for code that ends with `answer(name=value, …)`: returns those values, by way of JSON."""
    prelude = "import json\ndef answer(**values): print('\\nANSWER ' + json.dumps(values), flush=True)\n"
    done = run_python(prelude + textwrap.dedent(code), env=env, path=path, timeout_s=timeout_s, warm=warm)
    answers = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert len(answers) == 1, f"the script answered {len(answers)} times\n{done.stdout}\n{done.stderr}"
    values: dict[str, Any] = json.loads(answers[0].removeprefix("ANSWER "))
    return values


# --- compiling -----------------------------------------------------------------------------------------------------


def build(source: Path, name: str, command: Sequence[str], salt: str = "") -> Path:
    """Compile `source` into `.cache/native/<hash>/<name>` unless it is there; safe when many processes ask at once."""
    import fcntl

    if shutil.which(command[0]) is None:
        raise CompilerMissing(f"{command[0]} is not installed; it builds tests/native/{source.name}")
    key = hashlib.sha256(source.read_bytes() + repr((list(command), salt)).encode()).hexdigest()[:16]
    folder = BUILDS / f"{source.stem}-{key}"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / name
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.exists():
            unfinished = folder / f".{name}"  # a build that is cut short must not look finished
            done = subprocess.run(
                [*command, str(source), "-o", str(unfinished)], capture_output=True, text=True, check=False
            )
            assert done.returncode == 0, f"{source.name} does not compile:\n{done.stderr}"
            unfinished.rename(target)
    return target


# --- NVML ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Card:
    """What NVML says of one card; None is NVML_ERROR_NOT_SUPPORTED."""

    name: str
    uuid: str
    pci: str  # an address, chosen by the test
    pci_device_id: int | None = None  # device id << 16 | vendor id, as NVML writes it
    capability: str | None = None
    total: int | None = None
    used: int | None = 0
    bus_bits: int | None = None
    memory_mhz: int | None = None

    def line(self, minor: int) -> str:
        fields = (
            self.name,
            self.uuid,
            self.pci,
            self.pci_device_id,
            self.capability,
            minor,
            self.total,
            self.used,
            self.bus_bits,
            self.memory_mhz,
        )
        return "|".join("" if value is None else str(value) for value in fields)


# Name and 143771 MiB: nvidia-smi on the H200 this project measures on, 2026-10-27; driver 580.159.04: on the same kind,
# research page vulkan-on-headless-nvidia; capability 9.0 and CUDA 13.0 (driver branch 580): NVIDIA's tables. The UUIDs
# are of two real H200s, published in MIG guides with the output of `nvidia-smi -L`, as is MIG_SLICE, a slice of the
# second card. Device id: pci.ids. Bus width and clocks are not recorded, so NVML answers NotSupported for them.
H200 = Card(
    "NVIDIA H200",
    "GPU-b2acda36-db78-a209-f9ef-d07b4336c449",
    "0000:65:00.0",
    0x233510DE,
    "9.0",
    143771 << 20,
)
SECOND_H200 = Card(
    "NVIDIA H200",
    "GPU-31f70a1b-dee6-617e-13c5-5c2a2fbe0013",
    "0000:b3:00.0",
    0x233510DE,
    "9.0",
    143771 << 20,
)
MIG_SLICE = "MIG-e26b1e11-8424-5ef0-97a8-d87e519f7824"
# GB10: unified memory, for which NVML answers NotSupported (kubernetes-sigs/dra-driver-nvidia-gpu#1073). The UUID is
# nobody's.
GB10 = Card("NVIDIA GB10", "GPU-00000000-0000-0000-0000-000000000010", "000f:01:00.0", None, "12.1", None, None)
DRIVER = "580.159.04"
CUDA = 13000


@dataclass(frozen=True)
class NvmlStub:
    """The compiled mock. `env(...)` is what a subprocess needs to find it and what it is to say."""

    path: Path
    h200: Card = H200
    second_h200: Card = SECOND_H200
    gb10: Card = GB10
    mig_slice: str = MIG_SLICE
    driver: str = DRIVER

    @property
    def folder(self) -> Path:
        return self.path.parent

    def env(
        self,
        cards: Sequence[Card] = (H200, SECOND_H200),
        *,
        init: int = 0,
        driver: str | None = DRIVER,
        cuda: int | None = CUDA,
        mask: str | None = None,
    ) -> dict[str, str | None]:
        """Variables for `run_python`. `init` is nvmlInit's return code; `mask` is CUDA_VISIBLE_DEVICES, None unset."""
        return {
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(self.folder), os.environ.get("LD_LIBRARY_PATH")])),
            "NVML_STUB_INIT": str(init),
            "NVML_STUB_DRIVER": driver,
            "NVML_STUB_CUDA": None if cuda is None else str(cuda),
            "NVML_STUB_CARDS": "\n".join(card.line(minor) for minor, card in enumerate(cards)),
            "CUDA_VISIBLE_DEVICES": mask,
            "PYTORCH_NVML_BASED_CUDA_CHECK": None,
            # This machine has no Vulkan driver: trying a software one takes three seconds of a core in every test.
            "VK_ICD_FILENAMES": str(self.folder / "no-vulkan-driver.json"),
        }


def build_nvml_stub() -> NvmlStub:
    command = ("gcc", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")
    return NvmlStub(build(HERE / "nvml_stub.c", "libnvidia-ml.so.1", command))


@dataclass(frozen=True)
class LibcudaStub:
    """A libcuda.so.1 that records which processes call cuInit, and answers it with the code it is told."""

    path: Path

    def env(
        self, record: Path, *, code: int = 100, beside: Mapping[str, str | None] | None = None
    ) -> dict[str, str | None]:
        """Variables for `run_python`, added to those of another stub given as `beside`."""
        others = dict(beside or {})
        folders = [str(self.path.parent), others.get("LD_LIBRARY_PATH") or os.environ.get("LD_LIBRARY_PATH")]
        return {
            **others,
            "LD_LIBRARY_PATH": os.pathsep.join(filter(None, folders)),
            "LIBCUDA_STUB_RECORD": str(record),
            "LIBCUDA_STUB_CODE": str(code),
        }

    @staticmethod
    def callers(record: Path) -> list[int]:
        """The processes that called cuInit, in order."""
        return [int(line) for line in record.read_text().split()] if record.exists() else []


def build_libcuda_stub() -> LibcudaStub:
    command = ("gcc", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")
    return LibcudaStub(build(HERE / "libcuda_stub.c", "libcuda.so.1", command))


# --- the PrivateUse1 device ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NpuExtension:
    """The compiled device. One PrivateUse1 device fits into a process, so each test runs a script of its own."""

    library: Path
    folder: Path = field(default=HERE)  # of npu_module.py

    def loader(self, **arguments: Any) -> str:
        """The lines that register the device: `loader(name="npu", count=2, capacity=1 << 30)`."""
        more = "".join(f", {name}={value!r}" for name, value in arguments.items())
        return (
            f"import sys; sys.path.insert(0, {str(self.folder)!r})\n"
            f"import torch, npu_module\n"
            f"npu = npu_module.load({str(self.library)!r}{more})\n"
        )

    def run(self, code: str, env: Mapping[str, str | None] | None = None, **arguments: Any) -> dict[str, Any]:
        """Run a script in which `torch` and `npu` (the module `torch.npu`) are there; see `run_script`."""
        return run_script(self.loader(**arguments) + textwrap.dedent(code), env, warm=True)

    def plugin(self, folder: Path, **arguments: Any) -> Path:
        """A distribution that makes every `import torch` load the device, as torch_npu does; put it on PYTHONPATH."""
        return write_plugin(
            folder,
            "anytorch_test_npu",
            f"def _autoload():\n{textwrap.indent(self.loader(**arguments), '    ')}",
        )


def build_npu_extension() -> NpuExtension:
    import torch

    root = Path(torch.__file__).parent
    command = (
        *("g++", "-std=c++20", "-O0", "-fPIC", "-shared", "-w"),  # -w: the warnings are torch's own
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *(f"-I{root / 'include' / part}" for part in (".", "torch/csrc/api/include")),
        *(f"-L{root / 'lib'}", "-Wl,--no-undefined,--no-as-needed", "-ltorch_cpu", "-ltorch", "-lc10"),
    )
    return NpuExtension(build(HERE / "npu_device.cpp", "npu_device.so", command, salt=torch.__version__))


# --- plug-ins of torch ---------------------------------------------------------------------------------------------


def write_plugin(folder: Path, name: str, code: str, version: str = "2.13.0") -> Path:
    """An installed distribution, as pip would lay it out, with the entry point `torch.backends: <name>:_autoload`."""
    information = folder / f"{name}-{version}.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (information / "entry_points.txt").write_text(f"[torch.backends]\n{name} = {name}:_autoload\n")
    (folder / f"{name}.py").write_text(code)
    return folder


# What `import torch_npu` 2.13.0 says beside torch 2.13.0+cpu on a machine without CANN (research, section 0, point 2).
HCCL_MISSING = "libhccl.so: cannot open shared object file: No such file or directory"


def write_broken_plugin(folder: Path) -> Path:
    return write_plugin(folder, "torch_npu", f"raise ImportError({HCCL_MISSING!r})\n")
