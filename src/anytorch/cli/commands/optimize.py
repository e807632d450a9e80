"""`anytorch optimize`: settings that are faster on this machine, found by measurement."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from anytorch import limits
from anytorch.cli.output import Output
from anytorch.cli.parser import number

if TYPE_CHECKING:
    from anytorch.devices.tune import Item, TunePlan


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="auto", metavar="DEVICE", help="the device to tune for (default: auto)")
    parser.add_argument(
        "--duration",
        type=number(limits.SECONDS),
        default=20.0,
        metavar="SECONDS",
        help="seconds to measure (default: 20)",
    )
    parser.add_argument("--apply", action="store_true", help="write the plan to the settings file; later runs use it")
    parser.add_argument(
        "--show",
        action="store_true",
        help="measure nothing; print every choice measured on this machine so far, and why",
    )


def run(options: argparse.Namespace, output: Output) -> int:
    from anytorch.cli.requests import check_cache, usable_device
    from anytorch.devices.tune import apply, tune
    from anytorch.probe.facts import as_json

    if options.show:
        return show_measured(output)
    check_cache()
    device = usable_device(options.backend, "--backend")
    with output.fallbacks_told(), output.progress("optimize") as progress:
        plan = tune(device, duration_s=options.duration, progress=progress)
    path = apply(plan) if options.apply else None
    if output.json:
        document = as_json(plan)
        for item in document["items"]:
            for option in item["options"]:  # as they have always been called in this document
                option.update(value=type(item["default"])(option["name"]), note=option["refused"])
        output.data({"plan": document, "settings": plan.settings, "applied": str(path) if path else None})
        return 0
    show(plan, output)
    if path is not None:
        output.note(f"written to {path}; `anytorch reset` removes it")
    elif any(item.changed for item in plan.items):
        output.note("nothing was changed; `anytorch optimize --apply` stores the plan")
    return 0


def show_measured(output: Output) -> int:
    from anytorch.measured.store import verdicts

    found = list(verdicts())
    lines = [one.explain() for one in found] or ["nothing has been measured on this machine yet"]
    output.answer({"measured": [one.as_json() for one in found]}, *lines)
    return 0


def show(plan: TunePlan, output: Output) -> None:
    rows = [
        (
            item.setting,
            item.default,
            item.chosen,
            milliseconds(item, item.default),
            milliseconds(item, item.chosen),
            gain(item),
            item.why,
        )
        for item in plan.items
    ]
    columns = ("setting", "default", "chosen", "default (ms)", "chosen (ms)", "gain (×)", "why")
    output.table(columns, rows, title=f"{plan.device}: {plan.name}")
    for item in plan.items:
        measured = [
            f"{option.name}: {option.seconds * 1e3:.3g} ms"
            if option.seconds is not None
            else f"{option.name}: {option.refused}"
            for option in item.options
        ]
        output.text(f"  {item.setting}, {item.workload}: {'; '.join(measured)}")
    for note in plan.notes:
        output.text(f"  {note}")


def milliseconds(item: Item, value: str | int) -> str:
    option = item.option(value)
    return "" if option is None or option.seconds is None else f"{option.seconds * 1e3:.3g}"


def gain(item: Item) -> str:
    return f"{item.gain:.2f}" if item.changed else ""
