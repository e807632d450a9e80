"""Runs the tests of one file of PyTorch's, each on the CPU and then on webgpu, in this process; a line of JSON per result.

    python -m tests.webgpu.pytorch_suite.worker FILE SECONDS LOG

A process that dies or hangs in a test is started again by `run` and goes on with the next one: a line says what is begun.
"""

from __future__ import annotations

import collections
import faulthandler
import gc
import json
import os
import random
import re
import signal
import sys
import time
import traceback
import types
import unittest
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

# Of processor time, so that a busy machine does not decide. What is slow on the CPU is far slower on a software GPU.
ON_CPU_S, ON_WEBGPU_S = 8, 30
HANGS_S = 600  # by the clock
INTERRUPTED = 77  # exit status after a test that ran too long: a submission may have been cut in two
DTYPE = re.compile(r"_((?:b?float|complex|u?int)\d+|bool|float8_\w+)$")
LATE_DTYPES = ("float64", "complex128", "complex64", "complex32")
SKIPPED = re.compile(r"64bit_indexing|_large(_|$)")  # gigabytes

# Names that another version of torch.testing had: a stub each, so that the rest of a file can be loaded.
MISSING = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")

Pair = dict[str, tuple[type[unittest.TestCase], str]]


class Late(BaseException):
    """A test has run too long."""


def load(path: Path) -> tuple[types.ModuleType, list[str]]:
    """A test file as a module, its device classes made for the CPU and for webgpu; and the names it had to do without."""
    import_module("anytorch.webgpu")  # first: the next one looks which devices there are
    devices: Any = import_module("torch.testing._internal.common_device_type")
    original = devices.instantiate_device_type_tests

    def instantiate(cls: type, scope: Any, except_for: Any = None, only_for: Any = None, **more: Any) -> Any:
        if only_for is not None and "cpu" in only_for and "cuda" in only_for:  # else a class for one device alone
            only_for = ("cpu", "privateuse1")
        except_for = (except_for,) if isinstance(except_for, str) else except_for
        known = {name: value for name, value in more.items() if name in ("allow_foreach",)}
        return original(cls, scope, except_for=except_for, only_for=only_for, **known)

    devices.instantiate_device_type_tests = instantiate
    every = devices.ops._parametrize_test

    def parametrize(
        self: Any, *args: Any
    ) -> Any:  # a list of a name that is missing here is empty, which torch refuses
        return every(self, *args) if self.op_list else iter(())

    devices.ops._parametrize_test = parametrize
    sys.path[:0] = [str(path.parents[0]), str(path.parents[1] if path.parent.name != "test" else path.parent)]
    sys.argv = [str(path)]
    text = path.read_text("utf-8").replace(
        "super(self.__class__, self)", "super()"
    )  # endless in classes made of classes
    stubs: list[str] = []
    while True:
        module = types.ModuleType(path.stem)
        module.__file__ = str(path)
        sys.modules[path.stem] = module
        try:
            exec(compile(text, str(path), "exec"), module.__dict__)
        except ImportError as error:
            found = MISSING.match(str(error))
            if not found or len(stubs) > 60:
                raise
            setattr(sys.modules[found[2]], found[1], _stub(found[1]))
            stubs.append(found[1])
        else:
            return module, stubs


def _stub(name: str) -> Any:
    if name.endswith(("_tests", "_list", "_db", "_refs", "_ops", "ufuncs")):
        return []
    if name.isupper():
        return False

    def decorator(*args: Any, **named: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) and not named else lambda function: function

    return decorator


def pairs(module: types.ModuleType) -> dict[str, Pair]:
    """Tests that exist for both devices, by a name without the device."""
    found: dict[str, Pair] = collections.defaultdict(dict)
    for name, cls in list(vars(module).items()):
        if not (isinstance(cls, type) and issubclass(cls, unittest.TestCase)):
            continue
        suffix = next((s for s in ("PRIVATEUSE1", "WEBGPU", "CPU") if name.endswith(s)), None)
        if suffix is None:
            continue
        for method in unittest.TestLoader().getTestCaseNames(cls):
            key = name.removesuffix(suffix) + "." + re.sub(r"_(cpu|webgpu|privateuse1)(?=_|$)", "", method)
            found[key]["cpu" if suffix == "CPU" else "webgpu"] = (cls, method)
    return {key: pair for key, pair in found.items() if len(pair) == 2 and not SKIPPED.search(key)}


def ordered(keys: list[str]) -> list[str]:
    """Round robin over functions, then ops, then dtypes (float32 first, what no shader has last): whenever the time is up,
    what has run is a fair sample."""
    shuffled = random.Random(20261115)
    groups: dict[str, list[str]] = collections.defaultdict(list)
    for key in sorted(keys):
        groups[DTYPE.sub("", key)].append(key)

    def rank(key: str) -> tuple[int, float]:
        found = DTYPE.search(key)
        name = found[1] if found else ""
        return (0 if name in ("", "float32") else 2 if name in LATE_DTYPES else 1), shuffled.random()

    functions: dict[str, list[list[str]]] = collections.defaultdict(list)
    lists = [sorted(group, key=rank) for group in groups.values()]
    shuffled.shuffle(lists)
    for one in lists:
        functions["_".join(one[0].split("_")[:4])].append(one)
    queues = [
        collections.deque(one[depth] for depth in range(max(map(len, of))) for one in of if depth < len(one))
        for of in functions.values()
    ]
    shuffled.shuffle(queues)
    result = []
    while queues:
        for queue in queues:
            result.append(queue.popleft())
        queues = [queue for queue in queues if queue]
    return result


class Result(unittest.TestResult):
    """How one test ended, and why."""

    def __init__(self) -> None:
        super().__init__()
        self.status, self.why = "pass", ""

    def worse(self, status: str, why: str) -> None:
        if self.status in ("pass", "skip"):
            self.status, self.why = status, why

    def raised(self, error: Any, otherwise: str) -> None:
        kind, value, trace = error
        text = "".join(traceback.format_tb(trace))[-1500:] + f"\nEXC {kind.__name__}: {str(value)[:700]}"
        self.worse("late" if kind is Late else otherwise, text)

    def addError(self, test: Any, err: Any) -> None:
        self.raised(err, "error")

    def addFailure(self, test: Any, err: Any) -> None:
        self.raised(err, "fail")

    def addSkip(self, test: Any, reason: str) -> None:
        self.worse("skip", str(reason)[:200])

    def addExpectedFailure(self, test: Any, err: Any) -> None:
        self.worse("expected failure", "")

    def addUnexpectedSuccess(self, test: Any) -> None:
        self.worse("unexpected success", "")

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        if err is not None:
            self.raised(err, "fail" if issubclass(err[0], AssertionError) else "error")


def work(path: Path, seconds: float, log_path: Path, only: str = "") -> None:
    import torch

    warnings.simplefilter("ignore")
    faulthandler.enable()
    torch.set_num_threads(1)
    module, stubs = load(path)
    table = pairs(module)
    deadline = time.time() + seconds  # from here: on a busy machine loading a file takes minutes
    done = set()
    with log_path.open("r", encoding="utf-8") as earlier:
        for line in earlier:
            entry = json.loads(line)
            if "key" in entry:
                done.add((entry["key"], entry["device"]))
    log = log_path.open("a", buffering=1, encoding="utf-8")

    def say(**entry: Any) -> None:
        log.write(json.dumps(entry) + "\n")
        if only and "status" in entry:
            print(
                f"== {entry['key']} on {entry['device']}: {entry['status']} {entry['fallbacks']}\n{entry['why']}",
                flush=True,
            )

    say(collected=len(table), without=stubs)

    def late(*_: Any) -> None:
        raise Late("the time for one test")

    signal.signal(signal.SIGPROF, late)
    ready: set[type] = set()
    chosen = [key for key in ordered(list(table)) if not only or re.search(only, key)]
    for number, key in enumerate(chosen):
        if time.time() > deadline:
            break
        status = ""
        for device in ("cpu", "webgpu"):
            if (key, device) in done or status in ("fail", "error", "late"):
                continue
            say(key=key, device=device)
            cls, method = table[key][device]
            before = dict(torch.webgpu.fallback_stats())  # type: ignore[attr-defined]
            limit = ON_CPU_S if device == "cpu" else ON_WEBGPU_S
            result, started = Result(), time.time()
            faulthandler.dump_traceback_later(HANGS_S, exit=True)
            signal.setitimer(signal.ITIMER_PROF, limit, 5)  # again and again: a finaliser may have swallowed it
            try:
                if cls not in ready:
                    cls.setUpClass()
                    ready.add(cls)
                cls(method).run(result)
            except unittest.SkipTest as skip:
                result.worse("skip", str(skip)[:200])
            except (Late, Exception):  # noqa: BLE001  (whatever it is, it is how the test ended)
                result.raised(sys.exc_info(), "error")
            signal.setitimer(signal.ITIMER_PROF, 0)
            faulthandler.cancel_dump_traceback_later()
            cls._stop_test_suite = False  # type: ignore[attr-defined]
            torch.set_default_dtype(torch.float32)
            torch.use_deterministic_algorithms(False)
            after: dict[str, int] = torch.webgpu.fallback_stats()  # type: ignore[attr-defined]
            fallen = sorted(name for name, count in after.items() if count != before.get(name, 0))
            status = result.status
            took = round(time.time() - started, 2)
            say(key=key, device=device, status=status, why=result.why, fallbacks=fallen, seconds=took)
            if status == "late" and device == "webgpu":
                log.close()
                os._exit(INTERRUPTED)
        if number % 100 == 99:
            gc.collect()
    else:
        say(complete=True)
    log.close()
    sys.stdout.flush()
    os._exit(0)  # what a test left behind must not be torn down


if __name__ == "__main__":
    work(Path(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3]), sys.argv[4] if len(sys.argv) > 4 else "")
