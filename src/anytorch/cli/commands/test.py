"""`anytorch test`: real work on devices, in a child process, compared with the CPU."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anytorch import limits
from anytorch.cli.describe import reason_shown
from anytorch.cli.output import Output
from anytorch.cli.parser import number
from anytorch.cli.requests import check_cache, named_device
from anytorch.devices.choose import why_not
from anytorch.devices.gather import gather, survey_of
from anytorch.devices.ranking import DeviceRequest, parse, pick, reasons_for
from anytorch.devices.registry import Registry, registry
from anytorch.devices.try_out import run_children, try_out
from anytorch.devices.types import Candidate, Reason, State, TorchReport
from anytorch.devices.wheels import advise
from anytorch.errors import TorchMissing
from anytorch.probe import snapshot
from anytorch.probe.facts import as_json

FAILURES = frozenset({"failed", "crashed", "timed-out"})  # it was there, was tried, and did not work
PASSED, FAILED, ABSENT = "passed", "failed", "not here"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "device",
        nargs="?",
        default="all",
        metavar="DEVICE",
        help="a back end (cuda), a device (cuda:1), auto, or all (the default)",
    )
    parser.add_argument(
        "--timeout", type=number(limits.SECONDS), metavar="SECONDS", help="how long the child process may take"
    )


def run(options: argparse.Namespace, output: Output) -> int:
    known = registry()
    everything = named_device(options.device, "DEVICE").strip().lower() == "all"
    request = DeviceRequest(options.device) if everything else parse(options.device, known)  # unknown names end here
    check_cache()
    hardware = snapshot()
    if hardware.torch is None:
        raise TorchMissing(f"torch is not installed in {hardware.machine.executable}", hint=advise(hardware).command)
    names = concerned(request, known)
    with output.waiting("testing the devices, each in a process of its own"):
        if names or options.timeout is not None:
            report = run_children(names, timeout_s=options.timeout)
        else:
            report = try_out(hardware, refresh=True)  # everything: then it is worth remembering
    found = survey_of(replace(gather("never", hardware=hardware), torch=report))
    reasons, devices = found.reasons, found.devices
    asked: Sequence[Candidate]
    if everything:
        asked = devices
    elif request.index is not None or request.uuid is not None or request.automatic:
        chosen = pick(request, devices)  # an index beyond the usable ones ends here
        asked = (
            [chosen] if chosen else [d for d in devices if d.backend == request.backend and d.index == request.index]
        )
    else:
        asked = [device for device in devices if device.backend in names]
    documents = [result(device, report) for device in asked]
    why = [] if everything else reasons_for(request, devices, reasons)
    # Who named a device wants to hear of that one: that "cuda" may be met by ROCm is no news where neither is here.
    looked_for = list(known.backends) if everything else [request.backend] if request.backend else []
    missing = [] if documents and not everything else absent(known, looked_for, devices, reasons, report)
    passed = any(d["result"] == PASSED for d in documents) and not any(
        d["result"] == FAILED or (d["result"] == ABSENT and not everything) for d in documents
    )
    if output.json:
        output.data(
            {
                "requested": options.device,
                "passed": passed,
                "seconds": report.seconds,
                "torch": report.version,
                "import_error": report.import_error,
                "devices": documents,
                "absent": missing,
                "reasons": as_json(why),
            }
        )
    else:
        told = show(output, documents, report)
        for backend in missing:
            output.text(f"  {backend['name']}: not here; {backend['reason']}")
        for reason in () if passed else why:
            if missing and reason.fix:
                output.text(f"    fix: {reason.fix} [{reason.code}]")  # its text has just been said
            elif not missing and reason.text not in told:
                reason_shown(output, as_json(reason), options.device)
    if not passed:
        what = "no device passed" if everything and not documents else f"{options.device} did not pass"
        output.note(f"{what}; `anytorch doctor` says more")
    return 0 if passed else 1


def concerned(request: DeviceRequest, known: Registry) -> list[str]:
    """The back ends to try: "cuda" may mean ROCm's device, which bears that name in torch. Empty: all of them."""
    if request.backend is None:
        return []
    same = [b.name for b in known.backends.values() if b.torch_type == request.backend and request.alias is None]
    return [request.backend, *(name for name in same if name != request.backend)]


def result(device: Candidate, report: TorchReport) -> dict[str, Any]:
    told = report.backends.get(device.backend)
    broken = (told.facts.get("broken") or {}) if told else {}
    if device.state is State.USABLE:
        outcome = PASSED
    elif (told is not None and told.code in FAILURES) or str(device.index) in broken or report.import_error:
        outcome = FAILED
    else:
        outcome = ABSENT
    error = str(broken.get(str(device.index)) or (told.error if told else "") or report.import_error)
    traceback = str((told.facts.get("traceback") if told else "") or "")
    return {
        "id": device.id,
        "name": device.name,
        "result": outcome,
        "checks": list(device.facts.get("checks", ())),
        "error": "" if outcome == PASSED else error,
        "traceback": "" if outcome == PASSED else traceback,
        "reasons": as_json(device.reasons),
    }


def absent(
    known: Registry,
    looked_for: Sequence[str],
    devices: Sequence[Candidate],
    reasons: Sequence[Reason],
    report: TorchReport,
) -> list[dict[str, str]]:
    """The back ends without a device here, each with `resolve`'s reason and the child process's own."""
    listed = {device.backend for device in devices}
    found = []
    for backend in known.backends.values():
        if backend.name in looked_for and backend.name not in listed:
            request = DeviceRequest(backend.name, backend.name)
            why = why_not(request, devices, reasons_for(request, devices, reasons))
            told = report.backends.get(backend.name)
            found.append({"name": backend.name, "reason": why, "error": told.error if told else ""})
    return found


def show(output: Output, documents: Sequence[dict[str, Any]], report: TorchReport) -> set[str]:
    """Show the table and why each failing device failed. Returns the texts of the reasons shown."""
    told: set[str] = set()
    rows: list[tuple[object, ...]] = []
    for device in documents:
        for check in device["checks"]:
            rows.append((device["id"], check["name"], PASSED, f"{check['seconds'] * 1e3:.2f}", f"{check['error']:.1e}"))
        if not device["checks"]:
            rows.append((device["id"], "", device["result"], "", ""))
    if rows:
        output.table(("device", "check", "result", "time (ms)", "difference from the CPU (relative)"), rows)
    for device in documents:
        if device["result"] != PASSED:
            for reason in device["reasons"][:1]:
                if reason["text"] not in told:
                    reason_shown(output, reason, device["id"])
                told.add(reason["text"])
            if device["error"] and not device["reasons"]:
                output.text(f"  {device['id']}: {device['error'].splitlines()[0]}")
            if output.verbose and (device["traceback"] or device["error"]):
                output.note(f"{device['id']}: {device['traceback'].rstrip() or device['error']}")
    output.note(f"torch {report.version or 'did not import'}, {report.seconds:.1f} s in the child process")
    return told
