"""`anytorch set`: choose the device used when none is named."""

from __future__ import annotations

import argparse

from anytorch import settings
from anytorch.cli.output import Output
from anytorch.cli.requests import check_cache, named_device
from anytorch.devices.choose import survey, why_not
from anytorch.devices.ranking import DeviceRequest, parse, pick, reasons_for
from anytorch.devices.registry import registry
from anytorch.devices.types import Candidate
from anytorch.errors import UsageError


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "device", metavar="DEVICE", help="auto, cpu, cuda, cuda:1, rocm, npu, xpu, mps, webgpu, a UUID, …"
    )


def run(options: argparse.Namespace, output: Output) -> int:
    stored = settings.read_settings_file()
    request = parse(named_device(options.device, "DEVICE"), registry())
    # The best device and the CPU can always be had; everything else is looked for.
    always = request.automatic or (request.backend == "cpu" and request.index is None)
    backend, uuid, usable = ("cpu" if request.backend else "auto", "", True) if always else look_for(request, output)
    kept = {name: value for name, value in stored.get("settings", {}).items() if name not in ("backend", "device_uuid")}
    chosen = {**kept, "backend": settings.parse_setting("backend", backend), **({"device_uuid": uuid} if uuid else {})}
    path = settings.write_settings_file({**stored, "settings": chosen})
    source = settings.lookup("backend").source
    if source not in ("file", "code"):
        output.warn(f"the environment variable {source} is set and overrides the settings file")
    document = {"backend": backend, "device_uuid": uuid or None, "usable": usable, "settings_file": str(path)}
    output.answer(document, f"backend = {backend}" + (f" (card {uuid})" if uuid else "") + f", stored in {path}")
    return 0


def look_for(request: DeviceRequest, output: Output) -> tuple[str, str, bool]:
    """The back end and UUID to store for a request, and whether the device can be used now.

    Raises DeviceIndexError for an index beyond the usable devices, UsageError for a UUID that no card has.
    """
    check_cache()
    found = survey("needed", wanted=request.backend)
    chosen = pick(request, found.devices)
    usable = chosen is not None
    if not usable:
        why = why_not(request, found.devices, reasons_for(request, found.devices, found.reasons))
        output.warn(
            f"{request.text} cannot be used here now: {why}; until it can, the CPU is used and a warning says so"
        )
        chosen = next((device for device in found.devices if means(request, device)), None)
    if request.uuid is not None:
        if chosen is None:
            raise UsageError(
                f"no card with the UUID {request.uuid} is on this machine", hint="`anytorch info` lists them"
            )
        return chosen.backend, chosen.uuid or request.uuid, usable
    word = request.backend or "auto"  # the back end's own name, whatever it was called
    if request.index is None or request.backend == "cpu":
        return word, "", usable
    if chosen is not None and chosen.uuid:
        return word, chosen.uuid, usable
    output.note(f"{word}:{request.index} has no known UUID, so the index is stored; an index can change")
    return f"{word}:{request.index}", "", usable


def means(request: DeviceRequest, device: Candidate) -> bool:
    if request.uuid is not None:
        return device.uuid is not None and device.uuid.lower().startswith(request.uuid.lower())
    return request.index is not None and (device.backend, device.index) == (request.backend, request.index)
