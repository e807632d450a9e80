"""The entry point: find the command, run it, and turn an error into one message and an exit status."""

from __future__ import annotations

import errno
import gc
import os
import sys
import time
from typing import TYPE_CHECKING, NoReturn

from anytorch import logs, settings
from anytorch.cli.output import Output, Unwritable
from anytorch.cli.parser import check_command, command_parser, load, own_words, root_parser, split
from anytorch.cli.settings import check_settings
from anytorch.errors import AnytorchError, ConfigError, DeviceUnavailable, OutOfMemory, PackageMissing, UsageError

if TYPE_CHECKING:
    import argparse

UNWRITABLE = 1  # the answer was found and could not be written
# What a machine may do to any command; everything else that the system refuses is for the command itself to foresee.
WHAT_HELPS = {
    errno.ENOSPC: "the disk is full: free some space, or name another folder",
    errno.EDQUOT: "your disk quota is used up: free some space, or name another folder",
    errno.EROFS: "name a folder that can be written",
    errno.EACCES: "name a place that you may use",
    errno.EPERM: "name a place that you may use",
    errno.EIO: "the disk reports an error",
    errno.ENAMETOOLONG: "a name may have at most 255 characters",
    errno.ELOOP: "the links there form a loop: name another place",
}
FIRST_PROCESS_S = 15.0  # for the first of torchrun's processes to fail as well, and for torchrun to notice
INTERNAL_ERROR = 70  # EX_SOFTWARE of sysexits.h: the fault is ours
INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it
BROKEN_PIPE = 141  # 128 + SIGPIPE: the reader (`| head`) went away

# The extra that a command needs, for when one of its packages is missing.
EXTRA_OF = {"embed": "embed", "forecast": "forecast", "finetune": "forecast"}
# Answers whatever the settings file looks like; every other command needs settings it can trust.
SURVIVES_BAD_SETTINGS = frozenset({"info", "reset", "version", "completion"})


def run() -> NoReturn:
    """The console script `anytorch`."""
    # Starting up makes thousands of objects and no garbage: not looking for any saves 8 ms, here and at the exit.
    gc.disable()
    status = main()
    gc.freeze()
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:
        status = BROKEN_PIPE
        _discard_stdout()
    except OSError as exc:
        status = status or _unwritable(Output(), exc.strerror or str(exc))
        _discard_stdout()
    sys.exit(status)


def main(argv: list[str] | None = None) -> int:
    """Run one command line and return its exit status. Only `--help` and `--version` leave by SystemExit inside."""
    arguments = sys.argv[1:] if argv is None else argv
    # Known before parsing, so that a mistake in the arguments is told in the form that was asked for.
    words = own_words(arguments)
    output = Output(json="--json" in words, verbose=bool({"-v", "--verbose"} & set(words)))
    try:
        return _run(arguments, output)
    except BrokenPipeError:
        _discard_stdout()
        return BROKEN_PIPE
    except Unwritable as exc:
        return _unwritable(output, str(exc))


def _run(arguments: list[str], output: Output) -> int:
    try:
        return _dispatch(arguments, output)
    except SystemExit as exc:  # argparse after --help or --version
        return exc.code if isinstance(exc.code, int) else 0
    except AnytorchError as exc:
        return _told(exc, output)
    except KeyboardInterrupt:
        output.note("interrupted")
        return INTERRUPTED
    except (BrokenPipeError, Unwritable):
        raise  # for `main`: telling of an error may end here just as well
    except OSError as exc:
        if exc.errno not in WHAT_HELPS:
            return _bug(exc, output)
        _traceback(output)
        where = exc.filename or "a file"
        output.error(f"{where} cannot be written or read: {exc.strerror}", WHAT_HELPS[exc.errno], kind="OutputError")
        return UNWRITABLE
    except ModuleNotFoundError as exc:
        extra = EXTRA_OF.get(split(arguments)[1] or "")
        missing = None if extra is None else PackageMissing.of(extra, exc)
        return _bug(exc, output) if missing is None else _told(missing, output)
    except Exception as exc:  # noqa: BLE001  (the last line of defence: said, never swallowed)
        from anytorch.devices.oom import is_out_of_memory
        from anytorch.workers import REFUSED, no_thread

        if isinstance(exc, RuntimeError) and str(exc) == REFUSED:  # a thread of a library
            return _told(no_thread("", exc), output)

        if not is_out_of_memory(exc):
            return _bug(exc, output)
        first = (str(exc).splitlines() or [""])[0]
        words = f"out of memory: {first}" if first else "out of memory"
        return _told(
            OutOfMemory(words, hint="process less at once, close other programs, or use another device"), output
        )


def _told(exc: AnytorchError, output: Output) -> int:
    """Print the message of one of our errors and return its exit status."""
    if isinstance(exc, UsageError):
        _leave_it_to_the_first_process()
    _traceback(output)
    reasons = exc.reasons if isinstance(exc, DeviceUnavailable) else ()
    output.error(exc.message, exc.hint, kind=type(exc).__name__, reasons=reasons)
    return exc.exit_code


def _leave_it_to_the_first_process() -> None:
    """Under torchrun, only the first process reports an error that all of them find.

    torchrun ends the others once the first has ended. Whoever is still here after a while has found something that the
    first has not, and tells it.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0":
        time.sleep(FIRST_PROCESS_S)


def _bug(exc: Exception, output: Output) -> int:
    _traceback(output)
    output.error(
        f"anytorch failed: {type(exc).__name__}: {exc}",
        "" if output.verbose else "this is a bug; run with --verbose for the traceback",
        kind=type(exc).__name__,
    )
    return INTERNAL_ERROR


def _dispatch(arguments: list[str], output: Output) -> int:
    head, name, tail = split(arguments)
    if head or name is None:
        root = root_parser()
        root.parse_args(head)  # --help and --version end here
        if name is None:
            from anytorch.cli import welcome

            _check_settings(output, "info", root.parse_args(head))
            with output.kept_clean():
                return welcome.run(output)
    check_command(name)
    parser = command_parser(name)
    options = parser.parse_args(tail)
    _check_settings(output, name, options)
    if name != "info":
        gc.enable()  # these may run for minutes
    with output.kept_clean():
        return load(name).run(options, output)


def _check_settings(output: Output, command: str, options: argparse.Namespace) -> None:
    """Check every setting before a command acts on some of them, then set up logging."""
    # `config path` says where the file is that must be mended.
    survives = command in SURVIVES_BAD_SETTINGS or (command == "config" and options.action == "path")
    try:
        if not survives:
            for setting in settings.SETTINGS:
                settings.lookup(setting)
        logs.configure("DEBUG" if output.verbose else None)
        if not survives:
            check_settings()
    except ConfigError:
        if not survives:
            raise
        logs.configure("WARNING")  # info names the problem in its answer; reset is how one gets rid of it


def _traceback(output: Output) -> None:
    if output.verbose:
        import traceback

        output.note(traceback.format_exc().rstrip())


def _unwritable(output: Output, why: str) -> int:
    _discard_stdout()
    output.note(f"error: cannot write to standard output: {why}")
    return UNWRITABLE


def _discard_stdout() -> None:
    """Discard standard output once its reader is gone, so that the interpreter's last flush does not fail."""
    if sys.stdout is None:
        return
    devnull = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(devnull, sys.stdout.fileno())
    except (OSError, ValueError):  # not a real file: nothing will be flushed to it
        pass
    finally:
        os.close(devnull)
