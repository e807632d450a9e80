"""`anytorch info`: this machine's hardware and settings, read from files. It never fails and imports nothing slow."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

from anytorch import settings
from anytorch._version import __version__
from anytorch.cli.describe import device_json, devices_shown, gpu_words, would_use
from anytorch.cli.output import TRYING, Output, gigabytes
from anytorch.cli.settings import tolerated
from anytorch.counts import counted
from anytorch.errors import AnytorchError
from anytorch.probe import snapshot
from anytorch.probe.facts import Hardware, as_json

SUPPORT = {"chips": (), "precisions": (), "quantizations": (), "least_gb": None, "advised_gb": None}  # unless stated

T = TypeVar("T")
Document = dict[str, Any]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--probe", action="store_true", help="also try every device, in a child process with a time limit"
    )
    parser.add_argument("--refresh", action="store_true", help="with --probe: try again, even if results are cached")
    parser.add_argument(
        "--why",
        action="store_true",
        help="also explain why each device would be chosen or not, and what each back end supports",
    )


def run(options: argparse.Namespace, output: Output) -> int:
    probing = options.probe or options.refresh
    if probing:
        from anytorch.cli.requests import check_cache

        check_cache()
    problems: list[str] = []
    with tolerated(problems) as values, output.waiting(TRYING) if probing else nullcontext():
        document = describe(problems, values, probing=probing, refresh=options.refresh, why=options.why)
    if output.json:
        output.data(document)
    else:
        show(document, output, why=options.why)
    return 0


def describe(
    problems: list[str], values: dict[str, settings.Value], *, probing: bool, refresh: bool, why: bool
) -> Document:
    """The answer as a document. Whatever fails is named in `problems` and leaves its part empty."""
    document: Document = {
        "anytorch": __version__,
        "machine": None,
        "cpu": None,
        "memory": None,
        "gpus": [],
        "torch": None,
        "tried": probing,
        "devices": [],
        "backends": [],
        "expected": None,
        "expected_why": "",
        "settings": {name: {"value": as_json(v.value), "source": v.source} for name, v in values.items()},
        "settings_file": attempt("settings file", problems, lambda: str(settings.settings_file())),
        "cache_folder": attempt("cache folder", problems, lambda: str(settings.cache_folder())),
    }
    hardware = attempt("probe", problems, snapshot)
    if hardware is not None:
        problems += hardware.problems
        document.update(attempt("hardware", problems, lambda: hardware_json(hardware)) or {})
        found = attempt("devices", problems, lambda: devices_json(hardware, probing=probing, refresh=refresh))
        document.update(found or {})
    if why:
        from anytorch.devices.choose import explain

        document["why"] = attempt("why", problems, lambda: explain(tried="always" if probing else "never"))
    document["problems"] = problems
    return document


def attempt(part: str, problems: list[str], find: Callable[[], T]) -> T | None:
    """`info` is what people run when something is broken: one broken part must not hide the others."""
    try:
        return find()
    except AnytorchError as exc:
        problems.append(f"{part}: {exc.message}")
    except (Exception, SystemExit) as exc:  # noqa: BLE001  (a plug-in may even exit; it is said in the answer)
        problems.append(f"{part}: {type(exc).__name__}: {exc}")
    return None


def hardware_json(hardware: Hardware) -> Document:
    from anytorch.devices.cpu import simd_level

    cpu, memory, wheel = hardware.cpu, hardware.memory, hardware.torch
    return {
        "machine": as_json(hardware.machine),
        "cpu": {
            **as_json(cpu),
            "usable": cpu.usable,
            "good_threads": cpu.good_threads,
            "hybrid": cpu.hybrid,
            "simd": simd_level(cpu),
        },
        "memory": {
            **as_json(memory),
            "usable_total": memory.usable_total,
            "usable_available": memory.usable_available,
        },
        "gpus": as_json(hardware.gpus),
        "nvidia": as_json(hardware.nvidia),
        "ascend": as_json(hardware.ascend),
        "graphics": as_json(hardware.graphics),
        "torch": None if wheel is None else {**as_json(wheel), "kind": wheel.kind},
        "packages": as_json(hardware.packages.versions),
        "env": as_json(hardware.env),
    }


def devices_json(hardware: Hardware, *, probing: bool, refresh: bool) -> Document:
    from anytorch.devices.gather import survey
    from anytorch.devices.ranking import reasons_absent
    from anytorch.devices.registry import registry
    from anytorch.devices.types import Level, State

    surveyed = survey("always" if probing else "never", refresh=refresh, hardware=hardware)
    facts, reasons, devices, known = surveyed.facts, surveyed.reasons, surveyed.devices, registry()
    backends = []
    for backend in known.backends.values():
        mine = [device for device in devices if device.backend == backend.name]
        named = [r for r in reasons if backend.name in r.backends and r.level is not Level.NOTE]
        about = named if mine else reasons_absent(backend.name, reasons)
        missing = "" if mine else f"no {backend.title} was found here"
        backends.append(
            {
                "name": backend.name,
                "title": backend.title,
                "torch_type": backend.torch_type,
                "aliases": list(backend.aliases),
                "priority": backend.priority,
                "devices": [device.id for device in mine],
                "state": mine[0].state.value if mine else "absent",
                "reason": about[0].text if about else missing,
                "code": about[0].code if about else "",
                "fix": about[0].fix if about else "",
                "support": {name: as_json(getattr(backend, name, default)) for name, default in SUPPORT.items()},
            }
        )
    # What `resolve()` should choose if everything that was seen works.
    likely = [replace(d, state=State.USABLE) if d.state is State.SEEN and not probing else d for d in devices]
    expected, expected_why = would_use(likely, reasons) if hardware.torch is not None else (None, "")
    found: Document = {
        "devices": [device_json(device) for device in devices],
        "backends": backends,
        "plugin_errors": dict(known.errors),
        "reasons": as_json(reasons),
        "expected": expected,
        "expected_why": expected_why,
    }
    if probing:
        found["probe"] = as_json(facts.torch)
    return found


# --- for people ------------------------------------------------------------------------------------------------------


def show(document: Document, output: Output, *, why: bool) -> None:
    output.text(f"anytorch {document['anytorch']}")
    if document["machine"] is not None:
        output.heading("machine")
        output.pairs(machine_rows(document))
    for problem in document["problems"]:
        output.warn(problem)
    if document["devices"]:
        tried = "tried in a child process" if document["tried"] else "seen in files, not tried; --probe tries them"
        output.heading(f"devices ({tried})")
        devices_shown(output, document["devices"])
    absent = [b for b in document["backends"] if b["state"] == "absent"]
    if absent:
        output.heading("not here")
        output.pairs([(b["name"], b["reason"] + (f"\nfix: {b['fix']}" if b["fix"] else "")) for b in absent])
    if why:
        output.heading("why")
        for line in (document["why"] or "").splitlines():
            output.text(f"  {line}")
        output.heading("what each back end supports")
        for backend in document["backends"]:
            support = backend["support"]
            output.text(f"  {backend['name']}: {backend['title']}")
            output.pairs(
                [
                    ("chips", "; ".join(support["chips"])),
                    ("precisions", ", ".join(support["precisions"])),
                    ("quantizations", ", ".join(support["quantizations"])),
                    ("memory", f"{support['least_gb']} GiB at least, {support['advised_gb']} GiB advised"),
                ],
                indent=4,
            )


def machine_rows(document: Document) -> list[tuple[str, object]]:
    machine, cpu, memory, torch = (document[part] for part in ("machine", "cpu", "memory", "torch"))
    where = [machine["container"] or "", "WSL" if machine["wsl"] else "", "Rosetta" if machine["rosetta"] else ""]
    system = f"macOS {machine['macos']}" if machine["macos"] else f"{machine['system']} {machine['release']}"
    cores = [counted(cpu["physical"], "core") if cpu["physical"] else "", counted(cpu["logical"], "thread")]
    if cpu["hybrid"]:
        cores.append(f"hybrid: {cpu['performance_cores']} performance + {cpu['efficiency_cores']} efficiency")
    if cpu["quota"] is not None:
        cores.append(f"quota {cpu['quota']:g}")
    if cpu["usable"] != cpu["logical"]:
        cores.append(f"{cpu['usable']} usable")
    ram = f"{gigabytes(memory['total'])}, {gigabytes(memory['available'])} available"
    if memory["limit"] is not None:
        ram += f"; limited to {gigabytes(memory['limit'])} by the cgroup"
    backend = document["settings"]["backend"]
    why = document["expected_why"] or ("" if document["expected"] else "see `anytorch doctor`")
    would = "; ".join(part for part in (document["expected"] or "nothing", why) if part)
    built = f"{torch['version']} (built for {torch['kind']})" if torch else "not installed"
    return [
        ("system", ", ".join([f"{system} {machine['arch']}", *(word for word in where if word)])),
        ("python", f"{machine['python']} ({machine['executable']})"),
        ("torch", built),
        ("CPU", f"{cpu['model'] or 'unknown model'}: {', '.join(part for part in cores if part)}; {cpu['simd']}"),
        ("memory", ram if memory["total"] is not None else "unknown"),
        ("GPUs", "\n".join(gpu_words(gpu) for gpu in document["gpus"]) or "none seen"),
        ("back end", f"{backend['value']} (from {backend['source']})"),
        ("would use", would),
    ]
