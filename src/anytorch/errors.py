"""Every error and warning anytorch raises, drawn as one tree.

AnytorchError                what was asked, what was found, then a `hint:` line
├── UsageError               the request itself is wrong; the command line exits with 2
│   ├── UnknownDevice        no back end of that name
│   ├── DeviceIndexError     the back end is there, that index is not
│   ├── ConfigError          the settings file or an environment variable cannot be understood
│   ├── CacheError           a cache file cannot be read
│   ├── QueueClosed          a queue was closed before the request came
│   ├── GraphError           a kernel graph cannot be built or called like this; names the op or the input
│   ├── InputError           the data given to a job cannot be used; names the item, row or column
│   └── ModelError           a model folder or checkpoint cannot be used; names the file
├── TorchMissing             the job needs torch and this Python has none (or one that does not import)
├── PackageMissing           the job needs a package that is not installed; the hint names the extra that has it
├── NativeUnavailable        our C++ code cannot be built or loaded here; callers take another path and say so
│   ├── CompilerMissing      no C++ compiler was found, and no earlier build is in the cache
│   └── CompilerFailed       the compiler was run and did not give a library that loads; carries what it said
├── QueueFull                too many requests are waiting; the same one may be welcome later
├── NoThread                 the system starts no thread for the work; nothing was begun
├── DeviceError              the device said no; the command line exits with 1
│   ├── DeviceUnavailable    asked for strictly, not usable here; carries the reasons
│   ├── DeviceLost           the driver or the card went away
│   ├── CannotStandIn        a program asked for what only CUDA has; names its file and line
│   └── OutOfMemory          the device has not enough memory
│       └── BudgetTooSmall   a memory budget cannot hold what must be there at once; says the smallest that works
├── OutputError              the answer could not be written; says what is kept
└── WrongAnswer              a computation disagreed with its reference; never timed, never used

DeviceFallbackWarning        an explicit request could not be met and something else was chosen
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

EXTRAS = {  # what needs an extra, and the packages that the extra brings
    "embed": ("embeddings", frozenset({"numpy", "tokenizers", "safetensors", "huggingface_hub", "pyarrow"})),
    "forecast": (
        "forecasts",
        frozenset({"torch", "numpy", "pandas", "safetensors", "huggingface_hub", "pyarrow", "matplotlib"}),
    ),
    "generate": ("texts", frozenset({"torch", "numpy", "transformers", "tokenizers", "safetensors"})),
}


def did_you_mean(word: str, known: Iterable[str], otherwise: str = "") -> str:
    """The hint for an unknown word: the nearest known one, or `otherwise`."""
    import difflib  # only for bad input

    near = difflib.get_close_matches(word, list(known), n=1)
    return f"did you mean {near[0]!r}?" if near else otherwise


class AnytorchError(Exception):
    """Base of all our errors. `hint` says what to do next and is shown on a line of its own."""

    exit_code = 1

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class UsageError(AnytorchError):
    exit_code = 2


class UnknownDevice(UsageError): ...


class DeviceIndexError(UsageError): ...


class ConfigError(UsageError): ...


class CacheError(UsageError): ...


class GraphError(UsageError, ValueError): ...


class InputError(UsageError, ValueError): ...


class ModelError(UsageError): ...


class QueueClosed(UsageError): ...


class TorchMissing(AnytorchError): ...


class PackageMissing(AnytorchError):
    """`of` makes one from the import that failed."""

    @staticmethod
    def of(extra: str, exc: ModuleNotFoundError) -> PackageMissing | None:
        """The error for a missing package of the forecast extra; None if the failed import is not one of them."""
        what, packages = EXTRAS[extra]
        package = (exc.name or "").partition(".")[0]
        if package not in packages:
            return None
        advice = "; `anytorch doctor` names the torch for this machine" if "torch" in packages else ""
        return PackageMissing(
            f"{what} need {package}, which is not installed",
            hint=f"in a clone of anytorch, pip install '.[{extra}]', anywhere else, pip install 'anytorch[{extra}]'{advice}",
        )


class NativeUnavailable(AnytorchError): ...


class CompilerMissing(NativeUnavailable): ...


class CompilerFailed(NativeUnavailable):
    """`output` is what the compiler or the loader said."""

    def __init__(self, message: str, *, hint: str = "", output: str = "") -> None:
        super().__init__(message, hint=hint)
        self.output = output


class QueueFull(AnytorchError): ...


class NoThread(AnytorchError): ...


class DeviceError(AnytorchError): ...


class DeviceUnavailable(DeviceError):
    """`reasons` are the codes of the diagnoses that explain it, the same ones `anytorch doctor` prints."""

    def __init__(self, message: str, *, hint: str = "", reasons: Sequence[str] = ()) -> None:
        super().__init__(message, hint=hint)
        self.reasons = tuple(reasons)


class CannotStandIn(DeviceError, RuntimeError): ...


class DeviceLost(DeviceError): ...


class OutOfMemory(DeviceError): ...


class BudgetTooSmall(OutOfMemory): ...


class OutputError(AnytorchError): ...


class WrongAnswer(AnytorchError): ...


class DeviceFallbackWarning(UserWarning):
    """Issued once per request that could not be met; `reasons` are the diagnosis codes behind it."""

    def __init__(self, message: str, reasons: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.reasons = tuple(reasons)
