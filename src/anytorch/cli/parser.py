"""The commands and the parsers of their arguments. A command's module is imported only to build its parser."""

from __future__ import annotations

import argparse
import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Protocol, cast

from anytorch._version import __version__
from anytorch.cli.output import Output, answer
from anytorch.errors import UsageError, did_you_mean
from anytorch.limits import Limit

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

OVERVIEW = "Write PyTorch once, run it on whatever hardware is there."
EPILOG = """\
examples:
  anytorch info                 this machine's hardware, read from files
  anytorch doctor               what is wrong, and the command that fixes it
  anytorch test                 run real work on every device
  anytorch demo                 a small model on every usable device
  anytorch --json info          the same answer for programs

`anytorch COMMAND --help` explains a command. Exit status: 0 success, 1 a problem or failure, 2 an invalid request or
input file, 70 a bug in anytorch, 130 interrupted.
"""


class Command(NamedTuple):
    summary: str
    examples: str  # one "command   what it does" per line


class Module(Protocol):
    """What a module in `anytorch.cli.commands` has."""

    def arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def run(self, options: argparse.Namespace, output: Output) -> int: ...


COMMANDS: dict[str, Command] = {
    "info": Command(
        "show this machine's hardware, read from files (no device is tried)",
        "anytorch info                 the machine, its devices, and why one is missing\n"
        "anytorch info --probe         also try the devices, in a child process\n"
        "anytorch info --why           also explain why each device would be chosen or not\n"
        "anytorch info --json | jq .devices",
    ),
    "doctor": Command(
        "find what is wrong and show how to fix it",
        "anytorch doctor               run every diagnosis; exit status 1 if something is wrong\n"
        "anytorch doctor --no-probe    read files only: start no process\n"
        "anytorch doctor cpu-only-wheel    explain one diagnosis",
    ),
    "test": Command(
        "allocate, copy, multiply and differentiate on devices, and compare with the CPU",
        "anytorch test                 every device that is here\n"
        "anytorch test cuda            all CUDA devices\n"
        "anytorch test cuda:1          one of them",
    ),
    "benchmark": Command(
        "measure matmul, bandwidth, launches, copies and a transformer block",
        "anytorch benchmark --duration 30\n"
        "anytorch benchmark --backend cpu --output results.json --plot rates.svg\n"
        "anytorch benchmark --batch-sizes 1 4 8 --seq-lengths 128 512 --hidden-sizes 768 --dtype float16",
    ),
    "optimize": Command(
        "measure which settings are faster on this machine",
        "anytorch optimize             measure and print the plan; nothing is changed\n"
        "anytorch optimize --apply     also write it to the settings file\n"
        "anytorch optimize --backend cuda --duration 60",
    ),
    "run": Command(
        "run a program written for CUDA, unmodified, on the device that is there",
        "anytorch run train.py --epochs 3            the best device stands in for CUDA\n"
        "anytorch run --device webgpu --report train.py --epochs 3    and at the end, what was redirected where\n"
        "anytorch run --device cpu -m package.train --lr 0.1\n"
        "anytorch run --json train.py | tail -n 1 | jq .redirected    the report is the last line",
    ),
    "port": Command(
        "rewrite source that names CUDA to PyTorch that names no vendor",
        "anytorch port train.py               print the changes as a diff, and what is left alone\n"
        "anytorch port src --write            change the files\n"
        "anytorch port src --check            exit status 1 if a file names a vendor: for CI",
    ),
    "graph": Command(
        "list, show or forget the kernel graphs that were searched on this machine",
        "anytorch graph list                     every searched graph, what was chosen for it, and the gain\n"
        "anytorch graph show 6459b7              the candidates with times and reasons, and the chosen kernels\n"
        "anytorch graph show 6459b7 --kernels --svg graph.svg    also the generated text, and a picture\n"
        "anytorch graph clear 6459b7             forget one, and what was measured for it; without a key, all",
    ),
    "fit": Command(
        "plan how a model runs within memory budgets, and predict the time of a pass",
        "anytorch fit ./Qwen3-8B --device-budget 8GiB\n"
        "anytorch fit ./Qwen3-8B --device-budget 8GiB --host-budget 16GiB --plot plan.png",
    ),
    "tiers": Command(
        "measure the levels of memory: device, host, disk",
        "anytorch tiers\nanytorch tiers --disk /mnt/nvme --refresh",
    ),
    "set": Command(
        "choose the device used when none is named",
        "anytorch set auto             the best one (the default)\n"
        "anytorch set cuda:1           that card; its UUID is stored, since an index can change\n"
        "anytorch set cpu",
    ),
    "reset": Command(
        "remove settings or cached measurements",
        "anytorch reset                remove the settings file (a .bak copy stays)\n"
        "anytorch reset --cache        remove cached probes and measurements\n"
        "anytorch reset --all          both",
    ),
    "config": Command(
        "show, save or load the settings",
        "anytorch config show          every setting, its value and where it came from\n"
        "anytorch config save mine.toml\n"
        "anytorch config load mine.toml\n"
        "anytorch config path          where the settings file is",
    ),
    "demo": Command(
        "train a small model on every usable device; compare speed and results",
        "anytorch demo\nanytorch demo --backend all --iterations 20\nanytorch demo --backend cpu --skip-persistent",
    ),
    "forecast": Command(
        "forecast candles: as a table, a file and a picture",
        "anytorch forecast --sample --plot out.png      synthetic candles and the tiny model, offline\n"
        "anytorch forecast data.csv --horizon 120 --samples 20 --quantiles 0.1,0.5,0.9 --plot out.png --output out.csv\n"
        "anytorch forecast data.csv --model kronos-small --holdout --plot out.png\n"
        "cat data.csv | anytorch forecast - --json | jq '.series[0].forecast'",
    ),
    "finetune": Command(
        "train the forecasting model on your own candles",
        "anytorch finetune tokenizer --data prices/ --tokenizer kronos-tokenizer-base --output runs/tokenizer\n"
        "anytorch finetune predictor --data prices/ --model kronos-small --tokenizer runs/tokenizer/best_model "
        "--output runs/model\n"
        "anytorch finetune predictor --sample --output runs/try --epochs 1 --device cpu\n"
        "torchrun --nproc_per_node=2 -m anytorch finetune predictor --data prices/ --output runs/model",
    ),
    "embed": Command(
        "turn texts into vectors, or search them by meaning",
        "anytorch embed texts.txt --output texts.parquet    one text per line; can be resumed\n"
        "anytorch embed reviews.csv --column body --output reviews.npy --quantization int8\n"
        "anytorch embed texts.parquet --search refund --k 3    the nearest in meaning, by the stored vectors\n"
        "anytorch embed notes/ --search 'where did I put it'    a folder; its index is kept and updated\n"
        "anytorch embed - --dim 64 > vectors.jsonl    texts from standard input, one JSON list each",
    ),
    "generate": Command(
        "continue a text or answer a message with a language model",
        'anytorch generate "The with statement"    by the small model that comes with anytorch\n'
        'anytorch generate "Once upon a time" --model ./Qwen3-0.6B --max-tokens 100\n'
        'anytorch generate "Why is the sky blue?" --model ./Qwen3-0.6B --chat --temperature 0\n'
        "anytorch generate - --model ./Llama-3.1-8B --quantization int4 --device-budget 4GiB < prompt.txt",
    ),
    "serve": Command(
        "serve embeddings, forecasts and text over HTTP, with a web page",
        "anytorch serve                    the built-in models and a page, on this machine only\n"
        "anytorch serve --model ./bge-small --text-model ./Qwen3-0.6B --model-folder ~/models\n"
        "anytorch serve --new-key keys.txt    make a key, then admit other machines with it:\n"
        "anytorch serve --host 0.0.0.0 --api-key-file keys.txt --workers 4\n"
        "anytorch serve --port 0 --json | jq -r .url    for scripts: any free port, printed once it answers",
    ),
    "completion": Command(
        "print a shell completion script",
        'eval "$(anytorch completion bash)"\n'
        "anytorch completion zsh > ~/.zfunc/_anytorch\n"
        "anytorch completion fish > ~/.config/fish/completions/anytorch.fish",
    ),
    "version": Command("print the version of anytorch", "anytorch version"),
}


class Formatter(argparse.RawDescriptionHelpFormatter):
    """argparse's own, but the terminal's width is asked for without shutil: 2 ms even where no help is shown."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=columns())


def columns() -> int:
    try:
        return int(os.environ.get("COLUMNS") or os.get_terminal_size(1).columns) - 2
    except (ValueError, OSError):  # not a number; no terminal
        return 118


class Parser(argparse.ArgumentParser):
    """An argparse parser that raises our own error, so that one place turns errors into exit statuses."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message}", hint=f"run `{self.prog} --help`")

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; the nearest option there is to one that is misspelt is told."""
        found, unknown = self.parse_known_args(args, namespace)
        if not unknown:
            return found
        options = [option for action in self._actions for option in action.option_strings]
        words = (word.partition("=")[0] for word in unknown if word.startswith("--"))
        near = next(filter(None, (did_you_mean(word, options) for word in words)), "")
        raise UsageError(
            f"{self.prog}: unrecognized arguments: {' '.join(unknown)}",
            hint=f"{near} Otherwise run `{self.prog} --help`" if near else f"run `{self.prog} --help`",
        )

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """As argparse's; a number beyond its limit is told as every other invalid argument here."""
        if isinstance(action.type, number):
            try:
                return action.type(arg_string)
            except ValueError as exc:
                name = action.option_strings[-1] if action.option_strings else action.metavar
                raise UsageError(f"{self.prog}: {name} {exc}", hint=f"run `{self.prog} --help`") from exc
        return super()._get_value(action, arg_string)

    def _print_message(self, message: str, file: SupportsWrite[str] | None = None) -> None:
        """Print help or version, also on a terminal that is not UTF-8, where argparse itself fails."""
        answer(sys.stdout, message.rstrip("\n"))


def root_parser() -> argparse.ArgumentParser:
    """The options before the command, and the overview that `anytorch --help` prints."""
    width = max(map(len, COMMANDS))
    listed = "\n".join(f"  {name.ljust(width)}  {command.summary}" for name, command in COMMANDS.items())
    parser = Parser(
        prog="anytorch",
        usage="anytorch [--json] [--verbose] COMMAND …",
        description=f"{OVERVIEW}\n\ncommands:\n{listed}",
        epilog=EPILOG,
        formatter_class=Formatter,
    )
    parser.add_argument("--version", action="version", version=f"anytorch {__version__}")
    _global_options(parser)
    return parser


def command_parser(name: str) -> argparse.ArgumentParser:
    """The parser of one command. It takes the global options as well: `anytorch info --json` is what people type."""
    command = COMMANDS[name]
    examples = "\n".join(f"  {line}" for line in command.examples.splitlines())
    parser = Parser(
        prog=f"anytorch {name}",
        description=command.summary[0].upper() + command.summary[1:] + ".",
        epilog=f"examples:\n{examples}\n",
        formatter_class=Formatter,
    )
    load(name).arguments(parser)
    _global_options(parser)
    return parser


def load(name: str) -> Module:
    # A module stands for the protocol: its functions have no `self`.
    return cast("Module", import_module(f"anytorch.cli.commands.{name}"))


def split(argv: list[str]) -> tuple[list[str], str | None, list[str]]:
    """The global options, the command, and its own arguments. No global option takes a value, so this is exact."""
    for position, word in enumerate(argv):
        if not word.startswith("-"):
            return argv[:position], word, argv[position + 1 :]
    return argv, None, []


def own_words(argv: list[str]) -> list[str]:
    """The command line without what belongs to a program that it names: `anytorch run SCRIPT --json` is the script's."""
    head, name, tail = split(argv)
    if name != "run":
        return argv
    place = 0
    while place < len(tail) and tail[place].startswith("-") and tail[place] != "-m":
        place += 2 if tail[place] == "--device" else 1
    return [*head, name, *tail[:place]]


def check_command(name: str) -> None:
    if name in COMMANDS:
        return
    import difflib

    near = difflib.get_close_matches(name, COMMANDS, n=1)
    raise UsageError(
        f"unknown command {name!r}; commands: {', '.join(COMMANDS)}",
        hint=f"did you mean `anytorch {near[0]}`?" if near else "run `anytorch --help`",
    )


class number:
    """An argparse type for a number within a limit: `type=number(limits.THREADS)`."""

    def __init__(self, limit: Limit) -> None:
        self.limit = limit

    def __call__(self, text: str) -> int | float:
        return self.limit.parse(text)


def add_options(parser: argparse.ArgumentParser, *rows: str | tuple[Any, ...]) -> None:
    """Add a table of options to a command.

    A row is ("--flag", help) for a switch, ("--name METAVAR", help) for a text, and has between the two a default, a type,
    the Limit of a number, or a dictionary of argparse's own words. A text alone begins a group of that title.
    """
    group: argparse._ActionsContainer = parser
    for row in rows:
        if isinstance(row, str):
            group = parser.add_argument_group(row)
            continue
        words, *between, told = row
        flag, _, metavar = words.partition(" ")
        more: dict[str, Any] = {} if metavar else {"action": "store_true"}
        for given in between:
            if isinstance(given, dict):
                more = given
            elif isinstance(given, Limit):
                more = {**more, "type": number(given)}
            elif isinstance(given, type):
                more = {"type": given}
            else:
                more = {"default": given}
        group.add_argument(flag, help=told, **({"metavar": metavar} if metavar else {}), **more)


def _global_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("global options")
    group.add_argument("--json", action="store_true", help="print the answer as one JSON document on standard output")
    group.add_argument("-v", "--verbose", action="store_true", help="log each step, and show tracebacks")
