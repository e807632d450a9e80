"""`anytorch doctor`: every diagnosis, worst first, with the command that fixes it."""

from __future__ import annotations

import argparse

from anytorch.cli.output import Output
from anytorch.counts import counted

LINE = 300  # characters of evidence that are shown without --verbose


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "code", nargs="?", metavar="CODE", help="explain this diagnosis instead of examining the machine"
    )
    parser.add_argument("--no-probe", action="store_true", help="start no child process: read files only")
    parser.add_argument("--refresh", action="store_true", help="try the devices again, even if results are cached")


def run(options: argparse.Namespace, output: Output) -> int:
    return explain(options.code, output) if options.code else examine(options, output)


def explain(code: str, output: Output) -> int:
    from anytorch.devices.doctor import explain as page_of

    page = page_of(code)
    output.answer({"code": code, "page": page}, page.rstrip())
    return 0


def examine(options: argparse.Namespace, output: Output) -> int:
    from anytorch.cli.requests import check_cache
    from anytorch.devices.choose import survey
    from anytorch.devices.types import Level
    from anytorch.devices.wheels import advise
    from anytorch.probe.facts import as_json

    if not options.no_probe:
        check_cache()
    found = survey("never" if options.no_probe else "always", refresh=options.refresh)
    wrong = [reason for reason in found.reasons if reason.level is not Level.NOTE]
    hardware, report = found.facts.hardware, found.facts.torch
    usable = [device.id for device in found.devices if device.state.value == "usable"]
    if output.json:
        output.data(
            {
                "wrong": bool(wrong),
                "tried": not options.no_probe,
                "findings": as_json(found.reasons),
                "usable": usable,
                "torch": {
                    "installed": hardware.torch.version if hardware.torch else None,
                    "import_error": report.import_error if report else "",
                    "autoload_error": report.autoload_error if report else "",
                    "advice": as_json(advise(hardware)),
                },
                "problems": list(hardware.problems),
            }
        )
        return 1 if wrong else 0
    for problem in hardware.problems:
        output.warn(problem)
    for reason in found.reasons:
        output.heading(f"{reason.level.value}: {reason.text}")
        evidence = reason.evidence if output.verbose else shortened(reason.evidence)
        output.pairs([("fix", reason.fix), ("evidence", evidence), ("more", f"anytorch doctor {reason.code}")])
    if found.reasons:
        output.text()
    if wrong:
        errors = sum(reason.level is Level.ERROR for reason in wrong)
        output.text(f"{counted(errors, 'error')}, {counted(len(wrong) - errors, 'warning')}")
    else:
        output.text("no problem found")
    if usable or not options.no_probe or hardware.torch is None:
        output.text(f"usable devices: {', '.join(usable) or 'none'}")
    else:
        output.note("no device was tried (--no-probe)")
    return 1 if wrong else 0


def shortened(evidence: str) -> str:
    """The first line: a driver's message and its traceback can fill a screen."""
    lines = evidence.strip().splitlines()
    if not lines:
        return ""
    first = lines[0] if len(lines[0]) <= LINE else f"{lines[0][:LINE]}…"
    return f"{first} (--verbose shows all)" if first != evidence.strip() else first
