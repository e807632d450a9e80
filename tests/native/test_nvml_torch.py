"""torch's own NVML code against the mock library, and our mask rules against torch's: equal counts for every mask."""

from __future__ import annotations

from typing import Any

import pytest

COUNT = """
import warnings
import torch
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    count = torch.cuda._device_count_nvml()
answer(count=count, warnings=[str(w.message) for w in caught])
"""

# Counts that torch 2.13 gives for two cards (research, section 3, level 2). {0} and {1} are the cards' UUIDs.
MASKS: dict[str | None, int] = {
    None: 2,
    "1": 1,
    "0,1": 2,
    "1,0": 2,
    "-1": 0,
    "": 0,
    "0,0": 0,
    "7": 0,
    "0,7": 1,
    "1gpu2": 1,
    "0,-1,1": 1,
    "gpu": 0,
    "{0}": 1,
    "{1},{0}": 2,
    "{1:.12}": 1,  # a prefix of the UUID is enough
    "{0},{0}": 0,
    "{0},{0:.12}": 0,  # the same card by two names
    "{0},1": 1,
    "GPU-": 0,  # fits both
    "GPU-ffff": 0,
    "MIG": -1,
}


def written(mask: str | None, stub: Any) -> str | None:
    if mask == "MIG":
        return str(stub.mig_slice)
    return mask if mask is None else mask.format(stub.h200.uuid, stub.second_h200.uuid)


def test_counts_with_every_mask(nvml_stub: Any, run_script: Any) -> None:
    """One process for all masks: torch reads the variable at each call. Both sides are asked in it."""
    masks = [written(mask, nvml_stub) for mask in MASKS]
    answers = run_script(
        f"""
        import os, torch
        from anytorch.probe.masks import visible
        masks = {masks!r}
        uuids = torch.cuda._raw_device_uuid_nvml()
        torchs, ours = [], []
        for mask in masks:
            os.environ.pop("CUDA_VISIBLE_DEVICES", None)
            if mask is not None:
                os.environ["CUDA_VISIBLE_DEVICES"] = mask
            torchs.append(torch.cuda._device_count_nvml())
            found = visible(mask, len(uuids), uuids)
            ours.append(-1 if found.visible is None else len(found.visible))
        answer(uuids=uuids, torchs=torchs, ours=ours)
        """,
        nvml_stub.env(),
    )
    assert answers["uuids"] == [nvml_stub.h200.uuid, nvml_stub.second_h200.uuid]
    assert dict(zip(MASKS, answers["torchs"], strict=True)) == MASKS
    assert dict(zip(MASKS, answers["ours"], strict=True)) == MASKS


def test_mask_rules_agree_with_torch_on_many_masks(nvml_stub: Any, run_script: Any) -> None:
    """Every list of one to three of these items, for no, one and two cards: 7137 masks."""
    answers = run_script(
        """
        import itertools, os, torch
        from anytorch.probe.masks import visible
        uuids = torch.cuda._raw_device_uuid_nvml()
        items = ["0", "1", " 1", "2", "-1", "+1", "x", "0x1", uuids[0], uuids[1][:9], "GPU-", "MIG-1", ""]
        differ, tried = [], 0
        for cards in range(len(uuids) + 1):
            torch.cuda._raw_device_count_nvml = lambda: cards
            torch.cuda._raw_device_uuid_nvml = lambda: uuids[:cards]
            for length in (1, 2, 3):
                for parts in itertools.product(items, repeat=length):
                    mask = ",".join(parts)
                    os.environ["CUDA_VISIBLE_DEVICES"] = mask
                    theirs = torch.cuda._device_count_nvml()
                    found = visible(mask, cards, uuids[:cards])
                    ours = -1 if found.visible is None else len(found.visible)
                    tried += 1
                    if ours != theirs:
                        differ.append([mask, cards, theirs, ours])
        answer(tried=tried, differ=differ)
        """,
        nvml_stub.env(),
    )
    assert answers["tried"] == 3 * (13 + 13**2 + 13**3)
    assert answers["differ"] == []


@pytest.mark.parametrize("code", [9, 18])
def test_torch_cannot_count_when_nvml_does_not_start(nvml_stub: Any, run_script: Any, code: int) -> None:
    answers = run_script(COUNT, nvml_stub.env(init=code))
    assert answers == {"count": -1, "warnings": ["Can't initialize NVML"]}


def test_nvidia_ml_py_reads_the_recorded_facts(nvml_stub: Any, run_script: Any) -> None:
    answers = run_script(
        """
        import pynvml
        pynvml.nvmlInit()
        card = pynvml.nvmlDeviceGetHandleByIndex(1)
        memory = pynvml.nvmlDeviceGetMemoryInfo(card)
        answer(
            driver=pynvml.nvmlSystemGetDriverVersion(),
            cuda=pynvml.nvmlSystemGetCudaDriverVersion_v2(),
            name=pynvml.nvmlDeviceGetName(card),
            total=memory.total,
            free=memory.free,
            total_2=pynvml.nvmlDeviceGetMemoryInfo(card, version=pynvml.nvmlMemory_v2).total,
            pci=pynvml.nvmlDeviceGetPciInfo(card).busId,
            pci_id=pynvml.nvmlDeviceGetPciInfo(card).pciDeviceId,
            capability=pynvml.nvmlDeviceGetCudaComputeCapability(card),
            minor=pynvml.nvmlDeviceGetMinorNumber(card),
        )
        """,
        nvml_stub.env(),
    )
    assert answers == {
        "driver": "580.159.04",
        "cuda": 13000,
        "name": "NVIDIA H200",
        "total": 143771 << 20,
        "free": 143771 << 20,
        "total_2": 143771 << 20,
        "pci": "00000000:B3:00.0",
        "pci_id": 0x233510DE,
        "capability": [9, 0],
        "minor": 1,
    }


def test_nvidia_ml_py_raises_what_the_driver_would(nvml_stub: Any, run_script: Any) -> None:
    """18 is the mismatch after a driver update; a unified-memory card has no memory of its own to report."""
    script = """
        import pynvml
        def error(call):
            try:
                call()
            except pynvml.NVMLError as exc:
                return [type(exc).__name__, str(exc)]
        def memory():
            pynvml.nvmlInit()
            pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0))
        answer(before=error(pynvml.nvmlDeviceGetCount), memory=error(memory), words=pynvml.nvmlErrorString(18))
    """
    mismatch = run_script(script, nvml_stub.env(init=18))
    assert mismatch["memory"] == ["NVMLError_LibRmVersionMismatch", "RM has detected an NVML/RM version mismatch."]
    assert mismatch["words"] == "Driver/library version mismatch"
    unified = run_script(script, nvml_stub.env([nvml_stub.gb10]))
    assert unified["before"] == ["NVMLError_Uninitialized", "Uninitialized"]
    assert unified["memory"] == ["NVMLError_NotSupported", "Not Supported"]


OUR_PROBE = """
from anytorch.probe import snapshot
from anytorch.probe.facts import as_json
found = snapshot()
answer(nvidia=as_json(found.nvidia), gpus=[as_json(gpu) for gpu in found.gpus if gpu.vendor == "nvidia"],
       problems=found.problems)
"""


def test_our_probe_reads_the_same_library(nvml_stub: Any, run_script: Any) -> None:
    answers = run_script(OUR_PROBE, nvml_stub.env())
    nvidia, cards = answers["nvidia"], answers["gpus"]
    assert (nvidia["nvml_found"], nvidia["nvml_code"], nvidia["driver"]) == (True, 0, "580.159.04")
    assert nvidia["cuda"] == [13, 0]
    for index, (card, recorded) in enumerate(zip(cards, (nvml_stub.h200, nvml_stub.second_h200), strict=True)):
        assert (card["name"], card["uuid"], card["index"]) == (recorded.name, recorded.uuid, index)
        assert card["pci"].lower() == recorded.pci
        assert (card["total"], card["free"]) == (recorded.total, recorded.total)
        assert card["capability"] == [9, 0]
        assert not card["unified"]
    assert answers["problems"] == []


def test_our_probe_does_not_invent_the_memory_of_a_unified_machine(nvml_stub: Any, run_script: Any) -> None:
    (card,) = run_script(OUR_PROBE, nvml_stub.env([nvml_stub.gb10]))["gpus"]
    assert card["name"] == "NVIDIA GB10"
    assert card["capability"] == [12, 1]
    assert card["unified"] is True
    assert 0 not in (card["total"], card["free"])


@pytest.mark.parametrize(("code", "words"), [(9, "Driver Not Loaded"), (18, "Driver/library version mismatch")])
def test_our_probe_keeps_what_nvml_said(nvml_stub: Any, run_script: Any, code: int, words: str) -> None:
    answers = run_script(OUR_PROBE, nvml_stub.env(init=code))
    assert answers["nvidia"]["nvml_code"] == code
    assert words in answers["nvidia"]["nvml_error"]
    assert answers["gpus"] == []
