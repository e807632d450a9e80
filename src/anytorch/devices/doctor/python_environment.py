"""This Python: torch itself, conflicting packages, failing plug-ins, and failures of the child process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from shlex import quote

from anytorch.devices.doctor.common import TORCH_BACKENDS, first_line, installed, reports, true_cause
from anytorch.devices.doctor.registry import Finding, diagnosis
from anytorch.devices.types import BackendReport, Facts, Level
from anytorch.devices.wheels import INDEX_ROOT, advise, base_version, local_tag, parse_version


@diagnosis(
    "torch-missing",
    Level.ERROR,
    "torch is not installed",
    symptom="`ModuleNotFoundError: No module named 'torch'`.",
    evidence="No `torch/version.py` on this Python's path.",
    fix="The doctor prints the command for this machine, such as "
    "`pip install torch==2.13.0+cpu --index-url https://download.pytorch.org/whl/cpu`.",
    background=("https://pytorch.org/get-started/locally/",),
)
def torch_missing(facts: Facts) -> Iterator[Finding]:
    hardware = facts.hardware
    if hardware.torch is not None or (facts.torch is not None and facts.torch.version is not None):
        return
    advice = advise(hardware)
    yield Finding(
        f"torch is not installed in {hardware.machine.executable or 'this Python'} ({hardware.machine.python})",
        advice.command or advice.why,
        advice.why,
        TORCH_BACKENDS,
    )


@diagnosis(
    "torch-import-failed",
    Level.ERROR,
    "`import torch` fails",
    needs="child",
    symptom="`ImportError` or `OSError` at `import torch`, even with the device plug-ins switched off.",
    evidence="What `import torch` raised in a child process with `TORCH_DEVICE_BACKEND_AUTOLOAD=0`.",
    fix="Depends on the message: a missing library is installed, a mixed or damaged installation is replaced whole "
    "(`pip uninstall -y torch && pip install torch==…`); on Windows `winget install Microsoft.VCRedist.2015+.x64`.",
    background=("https://pytorch.org/get-started/locally/",),
)
def torch_import_failed(facts: Facts) -> Iterator[Finding]:
    if facts.torch is None or not facts.torch.import_error or facts.hardware.torch is None:
        return
    error = facts.torch.import_error
    if facts.hardware.machine.system == "Windows" and ("DLL load failed" in error or "WinError 126" in error):
        fix = "winget install Microsoft.VCRedist.2015+.x64"
    elif "libgomp.so" in error:
        fix = "sudo apt install libgomp1"
    elif "GLIBC_" in error or "GLIBCXX_" in error:
        fix = "use a newer Linux distribution: torch needs glibc 2.28 or newer"
    else:
        fix = reinstall_torch(facts)
    yield Finding(
        f"torch {facts.hardware.torch.version} cannot be imported: {true_cause(error)}",
        fix,
        error[:1000],
        TORCH_BACKENDS,
    )


def reinstall_torch(facts: Facts) -> str:
    command = advise(facts.hardware).command
    return f"pip uninstall -y torch && {command}" if command else "pip uninstall -y torch"


@diagnosis(
    "pynvml-twice",
    Level.WARNING,
    "pynvml and nvidia-ml-py are both installed",
    symptom="`FutureWarning: The pynvml package is deprecated. Please install nvidia-ml-py instead.`, or attributes "
    "missing from `pynvml` after one of the two was updated.",
    evidence="Both distributions are installed; they write the same module, `pynvml.py`.",
    fix="`pip uninstall -y pynvml nvidia-ml-py && pip install nvidia-ml-py`.",
    background=(
        "https://github.com/lincc-frameworks/hyrax/issues/778",
        "https://github.com/ai-dynamo/dynamo/issues/391",
    ),
)
def pynvml_twice(facts: Facts) -> Iterator[Finding]:
    old, new = installed(facts.hardware, "pynvml"), installed(facts.hardware, "nvidia-ml-py")
    if old and new:
        yield Finding(
            f"pynvml {old} and nvidia-ml-py {new} both provide the module pynvml",
            "pip uninstall -y pynvml nvidia-ml-py && pip install nvidia-ml-py",
            f"pynvml {old}, nvidia-ml-py {new}",
        )


@diagnosis(
    "two-torches",
    Level.WARNING,
    "Two installations of torch are on sys.path",
    symptom="`torch.__version__` is not the version pip lists, or undefined symbols at import.",
    evidence="A second `torch/version.py` later on sys.path: conda beside pip, or `~/.local` beside a virtual "
    "environment.",
    fix="`pip uninstall torch` in the environment that should not have it, or `export PYTHONNOUSERSITE=1`.",
    background=("https://docs.python.org/3/using/cmdline.html#envvar-PYTHONNOUSERSITE",),
)
def two_torches(facts: Facts) -> Iterator[Finding]:
    wheel = facts.hardware.torch
    if wheel is not None and wheel.others:
        user_site = any(".local" in path for path in wheel.others)
        yield Finding(
            f"torch {wheel.version} at {wheel.path} hides another torch at {', '.join(wheel.others)}",
            "export PYTHONNOUSERSITE=1"
            if user_site
            else f"rm -r {quote(wheel.others[0])}  # if you do not need that one",
            f"used: {wheel.path}; hidden: {', '.join(wheel.others)}",
        )


@diagnosis(
    "torchvision-mismatch",
    Level.WARNING,
    "torchvision or torchaudio was built for another torch",
    symptom="`RuntimeError: operator torchvision::nms does not exist`, or undefined symbols at `import torchvision`.",
    evidence="The build tags (`+cu130`, `+cpu`) of torch and of torchvision or torchaudio differ, or torchvision's "
    "version is not the one made for this torch (0.28 for 2.13).",
    fix="`pip install 'torchvision==0.28.*' --index-url https://download.pytorch.org/whl/<tag>`.",
    background=("https://github.com/pytorch/vision#installation",),
)
def torchvision_mismatch(facts: Facts) -> Iterator[Finding]:
    wheel = facts.hardware.torch
    if wheel is None:
        return
    tag, version = local_tag(wheel.version), parse_version(wheel.version)
    index = f" --index-url {INDEX_ROOT}/{tag}" if tag else ""
    for name in ("torchvision", "torchaudio"):
        found = installed(facts.hardware, name)
        if not found:
            continue
        theirs = local_tag(found)
        # torchvision 0.(n+15) belongs to torch 2.n; torchaudio stopped following at 2.11.
        partner = f"0.{version[1] + 15}" if name == "torchvision" and len(version) > 1 and version[0] == 2 else None
        other = partner is not None and parse_version(found)[:2] != parse_version(partner)
        if (tag and theirs and tag != theirs) or other:
            wanted = f"{name}=={partner}.*" if other else f"{name}=={base_version(found)}+{tag}"
            yield Finding(
                f"{name} {found} was not built for torch {wheel.version}",
                f"pip install '{wanted}'{index}",
                f"torch {wheel.version}, {name} {found}",
            )


@diagnosis(
    "plugin-broken",
    Level.ERROR,
    "A back end's plug-in cannot be loaded",
    symptom="A device that a package promised is missing from `anytorch info`.",
    evidence="What loading the entry point of the group `anytorch.backends` raised.",
    fix="Update or reinstall the package that brings it, or leave it out: `export ANYTORCH_PLUGINS=<the ones you "
    "want>`.",
)
def plugin_broken(facts: Facts) -> Iterator[Finding]:
    errors = facts.settings.get("plugin_errors")
    if not isinstance(errors, Mapping):
        return
    owners = {p.name: p.distribution for p in facts.hardware.packages.entry_points if p.group == "anytorch.backends"}
    for name, error in errors.items():
        owner = owners.get(str(name), "")
        yield Finding(
            f"the back end {name!r}{f' of {owner}' if owner else ''} cannot be loaded: {first_line(str(error))}",
            f"pip install --upgrade --force-reinstall {quote(owner)}"
            if owner
            else f"pip uninstall the package that brings {name!r}",
            str(error)[:1000],
            (str(name),),
        )


@diagnosis(
    "backend-crashed",
    Level.ERROR,
    "Trying the back end killed the process",
    needs="child",
    symptom="Python dies without a message (`Segmentation fault`, `0xC0000005`) as soon as the device is used.",
    evidence="The child process that tried the back end died on a signal while it did.",
    fix="Update the driver and torch; until then `export ANYTORCH_BACKEND=cpu`.",
    background=("https://github.com/pytorch/pytorch/issues/157775",),
)
def backend_crashed(facts: Facts) -> Iterator[Finding]:
    for report in reports(facts):
        if report.code == "crashed":
            yield Finding(
                f"trying {report.name} killed the process: {first_line(report.error) or 'no message'}",
                "export ANYTORCH_BACKEND=cpu  # until driver and torch are updated",
                report.error[:1000],
                (report.name,),
            )


@diagnosis(
    "backend-timed-out",
    Level.ERROR,
    "Trying the back end took too long",
    needs="child",
    symptom="The first use of the device hangs.",
    evidence="The child process had not finished with the back end when the time limit (`ANYTORCH_PROBE_TIMEOUT`) "
    "was over.",
    fix="`ANYTORCH_PROBE_TIMEOUT=600 anytorch doctor` gives it longer; a driver that hangs needs a reboot.",
)
def backend_timed_out(facts: Facts) -> Iterator[Finding]:
    for report in reports(facts):
        if report.code == "timed-out":
            yield Finding(
                f"trying {report.name} did not finish in time: {first_line(report.error) or 'the time limit was over'}",
                "ANYTORCH_PROBE_TIMEOUT=600 anytorch doctor",
                report.error[:1000],
                (report.name,),
            )


def whole_message(report: BackendReport) -> str:
    """The child's error in full, and its traceback where it kept one."""
    trace = report.facts.get("traceback")
    return f"{report.error}\n{trace.rstrip()}" if isinstance(trace, str) and trace.strip() else report.error


@diagnosis(
    "backend-failed",
    Level.ERROR,
    "Trying the back end raised an error",
    needs="child",
    symptom="The device is listed, and the first computation on it raises.",
    evidence="The exception of a real allocation, matrix product, backward pass and copy in the child process.",
    fix="`export ANYTORCH_BACKEND=cpu` until its driver and torch are updated together. `anytorch -v doctor` shows the "
    "whole message and the traceback, `anytorch --json doctor` has them under `evidence`.",
)
def backend_failed(facts: Facts) -> Iterator[Finding]:
    for report in reports(facts):
        explained = report.name == "mps" and facts.hardware.machine.system == "Darwin"  # mps-unavailable says more
        if report.code == "failed" and not explained:
            yield Finding(
                f"{report.name} is present but does not compute: {first_line(report.error) or 'no message'}",
                "export ANYTORCH_BACKEND=cpu  # until its driver and torch are updated together"
                if report.name != "cpu"
                else reinstall_torch(facts),
                whole_message(report),
                (report.name,),
            )


@diagnosis(
    "reader-failed",
    Level.NOTE,
    "Part of the machine could not be read",
    symptom="Facts are missing from `anytorch info`.",
    evidence="A reader of the probe failed, for example on a file this user may not open.",
    fix="`anytorch --json info` shows what is missing; run as a user who may read the file.",
)
def reader_failed(facts: Facts) -> Iterator[Finding]:
    for problem in facts.hardware.problems:
        yield Finding(
            f"part of the machine could not be read: {first_line(problem)}", "anytorch --json info", problem[:1000]
        )
