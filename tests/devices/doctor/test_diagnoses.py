"""Every diagnosis fires where it must, stays silent on the near miss, and says the decisive fact."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anytorch.devices.doctor import DIAGNOSES, Diagnosis, diagnose
from anytorch.devices.types import BackendReport, Facts, Level, Reason

from .build import HEALTHY, change, cpu_box, cuda_box, untried, wheel
from .cases import CASES, MORE

BY_CODE = {known.code: known for known in DIAGNOSES}
# The rows of the research page's table, in its order.
RESEARCHED = (
    *("cpu-only-wheel", "wrong-wheel", "driver-too-old", "card-not-covered", "nvidia-module-not-loaded"),
    *("nvml-mismatch", "driver-library-missing", "container-without-gpu", "uvm-broken", "fabric-manager"),
    *("driver-library-conflict", "cuda-stub-library", "wsl-driver", "mask-hides-devices", "two-amd-masks"),
    *("different-cards-order", "mask-changed", "mig-mask", "no-permission", "amd-two-gpus", "gfx-not-in-wheel"),
    *("level-zero-missing", "ipex-installed", "autoload-failed", "npu-wheel-conflict", "rosetta"),
    *("mps-unavailable", "mps-fallback-unset", "cpu-quota", "memory-limit", "hybrid-cpu", "slow-half-on-cpu"),
)
each = pytest.mark.parametrize("known", DIAGNOSES, ids=[known.code for known in DIAGNOSES])


def found(facts: Facts, code: str) -> list[Reason]:
    """What the whole doctor says under this code: the diagnosis is heard among all the others, not alone."""
    return [reason for reason in diagnose(facts) if reason.code == code]


def test_the_cases_and_the_diagnoses_are_the_same_list() -> None:
    assert sorted(CASES) == sorted(BY_CODE)


def test_all_thirty_two_of_the_research_page_are_there() -> None:
    assert len(RESEARCHED) == 32 and set(RESEARCHED) <= BY_CODE.keys()


@each
def test_fires(known: Diagnosis) -> None:
    case = CASES[known.code]
    reasons = found(case.fires, known.code)
    assert len(reasons) == 1
    (reason,) = reasons
    assert case.text in reason.text
    assert case.fix in reason.fix
    assert reason.evidence
    assert reason.backends == case.backends
    assert reason.level is (case.level or known.level)


@each
def test_stays_silent_on_the_near_miss(known: Diagnosis) -> None:
    case = CASES[known.code]
    assert found(case.silent, known.code) == []
    # A near miss is a machine much like the one that fires, not an empty one.
    assert case.silent.hardware.torch is not None
    assert case.silent.hardware.machine.system == case.fires.hardware.machine.system or known.code == "backend-failed"


@pytest.mark.parametrize(("code", "facts", "text", "level"), MORE, ids=[f"{i}-{row[0]}" for i, row in enumerate(MORE)])
def test_further_branches(code: str, facts: Facts, text: str | None, level: Level | None) -> None:
    reasons = found(facts, code)
    if text is None:
        assert reasons == []
        return
    assert any(text in reason.text for reason in reasons), reasons
    if level is not None:
        assert {reason.level for reason in reasons} == {level}


@pytest.mark.parametrize(
    "known", [known for known in DIAGNOSES if known.needs == "child"], ids=lambda known: known.code
)
def test_child_diagnoses_say_nothing_when_nothing_was_tried(known: Diagnosis) -> None:
    assert found(untried(CASES[known.code].fires), known.code) == []


@pytest.mark.parametrize("name", HEALTHY)
@pytest.mark.parametrize("probe", [True, False], ids=["tried", "untried"])
def test_a_healthy_machine_has_no_reasons(name: str, probe: bool) -> None:
    facts = HEALTHY[name]() if probe else untried(HEALTHY[name]())
    assert diagnose(facts) == ()


@each
def test_only_errors_that_block_name_back_ends(known: Diagnosis) -> None:
    """A reason that names back ends explains why they do not work, so it is an error, or a note about Vulkan."""
    for reason in found(CASES[known.code].fires, known.code):
        if reason.backends and reason.level is not Level.ERROR:
            assert reason.backends == ("webgpu",)


@each
def test_texts_are_one_sentence_on_one_line(known: Diagnosis) -> None:
    (reason,) = found(CASES[known.code].fires, known.code)
    assert "\n" not in reason.text and not reason.text.endswith(".")
    assert "None" not in reason.text and "None" not in reason.fix


def test_errors_come_first() -> None:
    facts = change(
        cuda_box(), env={"CUDA_VISIBLE_DEVICES": "-1"}, packages={"pynvml": "13.0.1"}, hardware={"problems": ("x",)}
    )
    levels = [reason.level for reason in diagnose(facts)]
    assert levels == [Level.ERROR, Level.WARNING, Level.NOTE]


def test_a_code_that_a_back_end_reports_itself_is_heard_once() -> None:
    missing = BackendReport("webgpu", code="wgpu-missing", error="the package wgpu is not installed")
    (reason,) = found(change(cpu_box(), report=missing), "wgpu-missing")
    assert reason.text == "the package wgpu is not installed"
    assert reason.backends == ("webgpu",)
    assert reason.fix == "pip install 'anytorch[webgpu]'"
    both = change(CASES["wgpu-missing"].fires, report=missing)
    assert len(found(both, "wgpu-missing")) == 1


def test_a_code_nobody_knows_is_left_to_the_candidate() -> None:
    odd = BackendReport("cpu", code="something-else", error="?")
    assert diagnose(change(cpu_box(), report=odd)) == ()


def test_a_failed_back_end_keeps_its_whole_message_and_traceback() -> None:
    message = "RuntimeError: " + "no kernel image " * 200 + "\nCompile with TORCH_USE_CUDA_DSA"
    trace = 'Traceback (most recent call last):\n  File "child.py", line 33, in main\nRuntimeError: no kernel image\n'
    failed = BackendReport("cuda", code="failed", error=message, facts={"traceback": trace})
    (reason,) = found(change(cuda_box(), report=failed), "backend-failed")
    assert message in reason.evidence and trace.rstrip() in reason.evidence
    assert "anytorch test" not in reason.fix, "`anytorch test` shows this very reason"
    (plain,) = found(change(cuda_box(), report=replace(failed, facts={"traceback": None})), "backend-failed")
    assert plain.evidence == message


def test_a_cpu_that_fails_is_not_answered_with_use_the_cpu() -> None:
    (reason,) = found(change(cpu_box(), report=BackendReport("cpu", code="failed", error="x")), "backend-failed")
    assert "pip uninstall -y torch && pip install" in reason.fix


def test_one_broken_card_beside_a_good_one_does_not_block_cuda() -> None:
    row = next(row for row in MORE if row[0] == "card-not-covered" and row[3] is Level.WARNING)
    assert all("cuda" not in reason.backends for reason in diagnose(row[1]))


def test_a_torch_that_the_files_missed_but_the_child_found_is_not_missing() -> None:
    assert found(change(cpu_box(), hardware={"torch": None}), "torch-missing") == []


def test_a_machine_without_torch_gets_one_error_not_many() -> None:
    facts = untried(change(cuda_box(), hardware={"torch": None}))
    assert [reason.code for reason in diagnose(facts) if reason.level is Level.ERROR] == ["torch-missing"]


def test_diagnose_does_not_change_its_facts() -> None:
    facts = cuda_box()
    copy = replace(facts)
    diagnose(facts)
    assert facts == copy


def test_words_from_the_machine_are_quoted_and_kept_on_one_line() -> None:
    evil = "/tmp/x; rm -rf ~\n\x1b[31m/torch"
    facts = change(cpu_box(), hardware={"torch": wheel("cpu", others=(evil,))})
    (reason,) = found(facts, "two-torches")
    assert "rm -r '/tmp/x; rm -rf ~ [31m/torch'" in reason.fix
    assert reason.text.isprintable() and reason.fix.isprintable()
