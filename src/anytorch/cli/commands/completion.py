"""`anytorch completion`: a script that makes the shell complete commands, options and back ends."""

from __future__ import annotations

import argparse

from anytorch.cli.output import Output
from anytorch.cli.settings import tolerated


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell the script is for")


def run(options: argparse.Namespace, output: Output) -> int:
    with tolerated([]):  # a shell's start-up file must not fail over a damaged settings file
        script = script_for(options.shell)
    output.answer({"shell": options.shell, "script": script}, script.rstrip("\n"))
    return 0


def script_for(shell: str) -> str:
    """The script of shtab for all commands. DEVICE is completed to a device's name, CODE to a diagnosis, FILE to a file."""
    import shtab

    from anytorch.cli.parser import COMMANDS, command_parser, root_parser
    from anytorch.devices.doctor import DIAGNOSES
    from anytorch.devices.registry import registry

    devices = ("auto", "all", *registry().backends)
    whole = root_parser()
    commands = whole.add_subparsers()
    for name, command in COMMANDS.items():
        parser = commands.add_parser(name, help=command.summary, parents=[command_parser(name)], add_help=False)
        for action in parser._actions:
            if action.metavar == "DEVICE":
                action.choices = [device for device in devices if device != "all" or action.default == "all"]
            elif action.metavar == "CODE":
                action.choices = [known.code for known in DIAGNOSES]
            elif action.metavar == "FILE":
                action.complete = shtab.FILE  # type: ignore[attr-defined]  # shtab's own mark
    return str(shtab.complete(whole, shell))
