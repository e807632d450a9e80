"""`anytorch completion`: a script that makes the shell complete commands, options and back ends."""

from __future__ import annotations

import argparse

from anytorch.cli.output import Output
from anytorch.cli.settings import tolerated
from anytorch.cli.shells import SCRIPTS, words_of


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=tuple(SCRIPTS), help="the shell the script is for")


def run(options: argparse.Namespace, output: Output) -> int:
    with tolerated([]):  # a shell's start-up file must not fail over a damaged settings file
        script = script_for(options.shell)
    if output.json:
        output.data({"shell": options.shell, "script": script})
    else:
        output.text(script.rstrip("\n"))
    return 0


def script_for(shell: str) -> str:
    from anytorch.cli.parser import COMMANDS, command_parser
    from anytorch.devices.doctor import DIAGNOSES
    from anytorch.devices.registry import registry

    devices = ("auto", "all", *registry().backends)
    codes = tuple(known.code for known in DIAGNOSES)
    commands = {name: words_of(command_parser(name), c.summary, devices, codes) for name, c in COMMANDS.items()}
    return SCRIPTS[shell](commands, devices)
