"""The doctor never raises: not on odd facts, not when one of its own diagnoses is broken."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anytorch.devices import doctor
from anytorch.devices.doctor import DIAGNOSES, DIAGNOSIS_FAILED, Finding, diagnose, explain
from anytorch.devices.types import BackendReport, DeviceReport, Facts, Level, Reason, TorchReport
from anytorch.errors import UsageError
from anytorch.probe.collect import NAMES
from anytorch.probe.facts import (
    Cpu,
    EntryPoint,
    Gpu,
    Graphics,
    Hardware,
    Icd,
    Machine,
    Memory,
    Node,
    Nvidia,
    Packages,
    TorchWheel,
)

from .build import cpu_box, cuda_box
from .cases import CASES

# Words that the diagnoses look for, beside arbitrary text.
WORDS = st.sampled_from(
    [
        "Linux",
        "Darwin",
        "Windows",
        "x86_64",
        "aarch64",
        "arm64",
        "nvidia",
        "amd",
        "intel",
        "huawei",
        "apple",
        "nouveau",
        "vfio-pci",
        "docker",
        "gfx1100",
        "gfx90a:xnack-",
        "13.0",
        "12.6",
        "11.8",
        "580.159.04",
        "525",
        "2.13.0+cu130",
        "2.13.0+cpu",
        "2.9.1",
        "nonsense",
        "/dev/kfd",
        "/dev/nvidiactl",
        "/dev/dri/renderD128",
        "/dev/nvidia0",
        "-1",
        "0",
        "0,0",
        "MIG-1",
        "GPU-a",
        "torch",
        "torch-npu",
        "wgpu",
        "pynvml",
        "nvidia-ml-py",
        "torchvision",
        "cuda",
        "rocm",
        "xpu",
        "npu",
        "mps",
        "webgpu",
        "cpu",
        "crashed",
        "timed-out",
        "failed",
        "no-device",
        "bfloat16",
        "auto",
        "vulkan",
        "14.5",
        "1",
        "torch.backends",
        "anytorch.backends",
    ]
)
TEXT = st.one_of(WORDS, st.just(""), st.text(max_size=8))
MAYBE_TEXT = st.none() | TEXT
SIZE = st.none() | st.integers(0, 2**45)
SMALL = st.none() | st.integers(-2, 1000)
FLAG = st.none() | st.booleans()
JUNK = st.none() | st.booleans() | st.integers(-1, 1000) | TEXT | st.lists(TEXT, max_size=3)

machines = st.builds(
    Machine, TEXT, TEXT, TEXT, TEXT, TEXT, MAYBE_TEXT, st.booleans(), MAYBE_TEXT, MAYBE_TEXT, st.booleans(), FLAG
)
cpus = st.builds(
    Cpu,
    MAYBE_TEXT,
    MAYBE_TEXT,
    st.integers(1, 512),
    SMALL,
    SMALL,
    st.none() | st.floats(0.01, 64),
    SMALL,
    SMALL,
    st.frozensets(TEXT, max_size=3),
)
memories = st.builds(Memory, SIZE, SIZE, SIZE, SIZE, SIZE)
gpus = st.builds(
    Gpu,
    TEXT,
    MAYBE_TEXT,
    MAYBE_TEXT,
    st.none() | st.integers(0, 0xFFFF),
    MAYBE_TEXT,
    MAYBE_TEXT,
    SMALL,
    st.none() | st.tuples(st.integers(0, 20), st.integers(0, 9)),
    MAYBE_TEXT,
    FLAG,
    FLAG,
    SIZE,
    SIZE,
    FLAG,
)
nvidias = st.builds(Nvidia, MAYBE_TEXT, st.booleans(), SMALL, MAYBE_TEXT, MAYBE_TEXT, st.none(), MAYBE_TEXT, FLAG)
nodes = st.lists(st.builds(Node, TEXT, st.booleans(), st.booleans(), MAYBE_TEXT, SMALL), max_size=3).map(tuple)
icds = st.lists(st.builds(Icd, TEXT, MAYBE_TEXT, FLAG), max_size=2).map(tuple)
graphics = st.builds(Graphics, MAYBE_TEXT, icds, MAYBE_TEXT, icds, MAYBE_TEXT, MAYBE_TEXT, SMALL, SMALL)
wheels = st.none() | st.builds(
    TorchWheel, TEXT, TEXT, MAYBE_TEXT, MAYBE_TEXT, MAYBE_TEXT, st.lists(TEXT, max_size=2).map(tuple)
)
packages = st.builds(
    Packages,
    st.dictionaries(TEXT, TEXT, max_size=4),
    st.lists(st.builds(EntryPoint, TEXT, TEXT, TEXT, TEXT), max_size=2).map(tuple),
)
hardwares = st.builds(
    Hardware,
    machines,
    cpus,
    memories,
    gpus=st.lists(gpus, max_size=3).map(tuple),
    nvidia=nvidias,
    nodes=nodes,
    graphics=graphics,
    torch=wheels,
    packages=packages,
    env=st.dictionaries(st.sampled_from(NAMES), TEXT, max_size=4),
    problems=st.lists(TEXT, max_size=1).map(tuple),
)
CHILD_KEYS = st.sampled_from(
    [
        "cuinit_code",
        "arch_list",
        "threads",
        "mkldnn_bf16",
        "privateuse1",
        "cuda_spoofed",
        "mps_built",
        "mps_available",
        "mask_at_import",
        "mask_now",
        "cuda_initialized_before",
        "start_method",
    ]
)
reports = st.builds(
    BackendReport,
    TEXT,
    st.lists(st.builds(DeviceReport, st.integers(0, 3), TEXT, total=SIZE), max_size=1).map(tuple),
    TEXT,
    TEXT,
    st.dictionaries(
        st.just("adapters"), JUNK | st.lists(st.dictionaries(TEXT, JUNK, max_size=2), max_size=2), max_size=1
    ),
)
torches = st.none() | st.builds(
    TorchReport,
    MAYBE_TEXT,
    TEXT,
    TEXT,
    st.lists(reports, max_size=3).map(lambda found: {report.name: report for report in found}),
    st.dictionaries(CHILD_KEYS, JUNK, max_size=5),
)
SETTINGS = st.dictionaries(
    st.sampled_from(["backend", "cpu_dtype", "threads", "dtype", "plugin_errors"]),
    JUNK | st.dictionaries(TEXT, TEXT, max_size=2),
    max_size=4,
)


@given(hardwares, torches, SETTINGS)
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
def test_no_facts_break_a_diagnosis(hardware: Hardware, torch: TorchReport | None, chosen: dict[str, Any]) -> None:
    reasons = diagnose(Facts(hardware, torch, chosen))
    broken = [reason.text for reason in reasons if reason.code == DIAGNOSIS_FAILED.code]
    assert broken == []
    for reason in reasons:
        assert isinstance(reason.text, str) and isinstance(reason.fix, str) and reason.text.isprintable()


@given(st.sampled_from(sorted(CASES)), st.data())
@settings(max_examples=60, deadline=None)
def test_a_known_machine_with_one_fact_unknown_breaks_nothing(code: str, data: st.DataObject) -> None:
    """Real machines lose one fact at a time: a file that cannot be read is None."""
    facts = CASES[code].fires
    part = data.draw(st.sampled_from(["nvidia", "graphics", "memory", "hardware"]))
    holder = facts.hardware if part == "hardware" else getattr(facts.hardware, part)
    assert is_dataclass(holder)
    optional = [field.name for field in fields(holder) if "None" in str(field.type)]
    changed = replace(holder, **{data.draw(st.sampled_from(optional)): None})
    hardware = changed if isinstance(changed, Hardware) else replace(facts.hardware, **{part: changed})
    assert all(reason.code != DIAGNOSIS_FAILED.code for reason in diagnose(replace(facts, hardware=hardware)))


def explode(facts: Facts) -> Iterator[Finding]:
    yield Finding("said before it broke")
    raise ZeroDivisionError("one over zero")


def test_a_diagnosis_that_raises_is_contained(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = CASES["mask-hides-devices"].fires
    whole = diagnose(facts)
    broken = tuple(replace(known, check=explode) if known.code == "cpu-quota" else known for known in DIAGNOSES)
    monkeypatch.setattr(doctor, "DIAGNOSES", broken)
    reasons = diagnose(facts)
    (failed,) = [reason for reason in reasons if reason not in whole]
    assert failed.code == "diagnosis-failed" and failed.level is Level.WARNING
    assert "cpu-quota" in failed.text and "ZeroDivisionError: one over zero" in failed.text
    assert [reason for reason in reasons if reason is not failed] == list(whole)


def test_only_makes_the_named_diagnoses() -> None:
    facts = CASES["mask-hides-devices"].fires
    assert {reason.code for reason in diagnose(facts, ["mask-hides-devices"])} == {"mask-hides-devices"}
    assert diagnose(facts, ["cpu-quota"]) == ()
    assert diagnose(facts, []) == ()


def test_an_unknown_code_is_bad_input_with_a_near_match() -> None:
    with pytest.raises(UsageError, match="did you mean 'cpu-only-wheel'"):
        diagnose(cuda_box(), ["cpu-only-whel"])
    with pytest.raises(UsageError, match="no diagnosis 'zzz'"):
        explain("zzz")


def test_every_code_is_a_file_name_and_every_reason_is_a_value() -> None:
    for known in DIAGNOSES:
        assert known.code.replace("-", "").isalnum() and known.code.islower()
    assert diagnose(cpu_box()) == ()
    assert all(isinstance(reason, Reason) for reason in diagnose(CASES["cpu-only-wheel"].fires))
