"""`anytorch run`: a program written for CUDA, unmodified, on the device that is there."""

from __future__ import annotations

import argparse
import os

from anytorch.cli.output import Output


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device", default=None, metavar="DEVICE", help="auto, webgpu, xpu, npu, mps, rocm, cpu, cuda, cuda:1, …"
    )
    parser.add_argument(
        "--report", action="store_true", help="at the end, say on standard error what was redirected and what ran where"
    )
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE ARGS", help="run a module, as python -m does"
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="SCRIPT ARGS", help="the script and its arguments")


def run(options: argparse.Namespace, output: Output) -> int:
    from anytorch.devices.choose import resolve
    from anytorch.run import launch

    module = options.module is not None
    line = options.module if module else options.program
    launch.check(line, module=module)
    with output.fallbacks_told():
        chosen = resolve(options.device)
    output.note(launch.words(chosen))
    report = "json" if options.json else "text" if options.report else None
    launch.become(launch.command(line, module=module), launch.environment(chosen, report, os.environ))
