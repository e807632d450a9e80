"""`anytorch doctor`: every diagnosis, worst first, with the command that fixes it."""

from __future__ import annotations

import argparse
from typing import Any

from anytorch.cli.output import TRYING, Output
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
    with output.waiting(TRYING):
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
                "native": native_code(),
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
    output.text(native_words(native_code()))
    return 1 if wrong else 0


def native_code() -> dict[str, Any]:
    """Where our C++ comes from here: `carried` by the wheel, or made by `compiler`; either may be None."""
    from anytorch.errors import CompilerMissing
    from anytorch.native.carried import description
    from anytorch.native.compiler import find_compiler

    found: dict[str, Any] = {"carried": description(), "compiler": None, "package": False, "hint": ""}
    try:
        compiler = find_compiler()
        found.update(compiler=" ".join(compiler.command), package=compiler.is_packaged)
    except CompilerMissing as missing:
        found.update(hint=f"{missing.message}; {missing.hint}")
    return found


def native_words(found: dict[str, Any]) -> str:
    carried, compiler = found["carried"], found["compiler"]
    by = f"{compiler}{' of the package ziglang' if found['package'] else ''}"
    if carried is None:
        return f"C++ kernels: compiled on first use by {by}" if compiler else f"C++ kernels: none; {found['hint']}"
    came = f"C++ kernels: {carried['libraries']} came with the package"
    if compiler:
        return f"{came}; kernel graphs are compiled by {by}"
    return f"{came}; kernel graphs on the CPU need a compiler: pip install 'anytorch[compiler]'"


def shortened(evidence: str) -> str:
    """The first line: a driver's message and its traceback can fill a screen."""
    lines = evidence.strip().splitlines()
    if not lines:
        return ""
    first = lines[0] if len(lines[0]) <= LINE else f"{lines[0][:LINE]}…"
    return f"{first} (--verbose shows all)" if first != evidence.strip() else first
