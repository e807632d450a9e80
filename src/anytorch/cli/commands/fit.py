"""`anytorch fit MODEL_DIR`: where a model's blocks would be stored, and how long a pass would take. Reads headers only."""

from __future__ import annotations

import argparse

from anytorch import limits
from anytorch.cli.output import Output
from anytorch.cli.parser import number


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL_DIR", help="a Hugging Face model folder with safetensors files")
    parser.add_argument(
        "--device", default="auto", metavar="DEVICE", help="where it should run (default: the best device)"
    )
    parser.add_argument("--device-budget", metavar="SIZE", help="device memory the weights may use, such as 8GiB")
    parser.add_argument("--host-budget", metavar="SIZE", help="host memory the weights may use")
    parser.add_argument(
        "--compute",
        type=number(limits.SECONDS_OR_NONE),
        default=0.0,
        metavar="SECONDS",
        help="compute time of one pass, if known",
    )
    parser.add_argument("--plot", metavar="FILE", help="also draw the plan to this .png or .svg file")


def run(options: argparse.Namespace, output: Output) -> int:
    from pathlib import Path

    from anytorch.cli.requests import named_device, new_file
    from anytorch.devices.choose import resolve
    from anytorch.memory.levels import create_tiers
    from anytorch.memory.loading import preview

    if options.plot:
        new_file(options.plot, "--plot")
    with output.fallbacks_told():
        device = resolve(named_device(options.device, "--device")).device
    folder = Path(options.model)
    tiers = create_tiers(
        device,
        device_budget=options.device_budget,
        host_budget=options.host_budget,
        disk=folder if folder.is_dir() else None,
    )
    plan = preview(folder, tiers, compute_s=options.compute)
    if options.plot:
        output.note(f"picture written to {plan.picture(options.plot)}")
    if output.json:
        output.data(
            {
                "device": str(device),
                "total_nbytes": plan.total_nbytes,
                "homes": dict(plan.homes),
                "resident_nbytes": plan.nbytes_at("device"),
                "ring_nbytes": plan.ring_nbytes,
                "host_nbytes": plan.host_nbytes,
                "disk_nbytes": plan.nbytes_at("disk"),
                "predicted_pass_s": plan.prediction.pass_s,
                "limit": plan.prediction.limit,
            }
        )
        return 0
    output.text(plan.explain())
    budgets = [f'device_budget="{options.device_budget}"'] if options.device_budget else []
    budgets += [f'host_budget="{options.host_budget}"'] if options.host_budget else []
    output.text()
    output.text(f"model = anytorch.memory.load({str(folder)!r}, {', '.join([repr(str(device)), *budgets])})")
    return 0
