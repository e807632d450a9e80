"""The one context: every setting, where it came from, and the one file that stores them.

A setting's value is taken from the first of: a `with use(...)` block, an environment variable, the settings file, the
default. The variables that are settings are read here and nowhere else, on first use; `SETTINGS` lists every one of them.
Variables that are facts about the surroundings are read where the fact is used: device masks and the stand-in libraries
of tests in `probe` and `devices`, the terminal's (NO_COLOR, TERM, COLUMNS) in `cli`.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any

from anytorch.errors import ConfigError, did_you_mean
from anytorch.files import replace_file
from anytorch.limits import THREADS
from anytorch.values import dataclass

LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in ("1", "true", "yes", "on"):
        return True
    if text in ("0", "false", "no", "off", ""):
        return False
    raise ValueError("use 1 or 0")


def _checks(value: Any) -> str:
    """Return on, off or now; 1 and 0, true and false are on and off."""
    if str(value).strip().lower() == "now":
        return "now"
    try:
        return "on" if _boolean(value) else "off"
    except ValueError:
        raise ValueError("use on, off or now") from None


MOST_THREADS = int(THREADS.most)  # of a CPU: more hold a machine up long before they could help


def _positive_int(value: Any) -> int:
    text = str(value).strip()
    if isinstance(value, bool) or not (text.isascii() and text.isdigit()) or not 0 < int(text) < 2**31:
        raise ValueError("use a whole number above 0")
    return int(text)


def _threads(value: Any) -> int:
    if (count := _positive_int(value)) > MOST_THREADS:
        raise ValueError(f"use a whole number from 1 to {MOST_THREADS}")
    return count


def _seconds(value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = 0.0
    if isinstance(value, bool) or not 0 < number < 86400:  # also catches NaN
        raise ValueError("use a number of seconds above 0 and below a day")
    return number


def parse_nbytes(value: Any) -> int:
    """ "6GiB", "512 MB", 1073741824 → bytes. GB and GiB both mean 2**30, as GPU vendors use it."""
    text = str(value).strip().lower().removesuffix("b").removesuffix("i")
    scale = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}.get(text[-1:], 1)
    try:
        number = float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        number = 0.0
    if not 0 < number < 2**60:
        raise ValueError("use a size such as 6GiB")
    return int(number)


def _one_of(*allowed: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        text = str(value).strip()
        for name in allowed:
            if text.lower() == name.lower():
                return name
        raise ValueError(f"use one of {', '.join(allowed)}")

    return parse


def _device(value: Any) -> str:
    """Return a non-empty text; `backend = 3` in a file is a mistake. `devices` checks that the back end exists."""
    if not isinstance(value, str):
        raise ValueError('use text such as "cuda" or "cuda:1"')
    text = str(value).strip().lower()
    if not text:
        raise ValueError("it is empty")
    return text


def _text(value: Any) -> str:
    return str(value).strip()


def _names(value: Any) -> tuple[str, ...]:
    parts = value if isinstance(value, (list, tuple)) else str(value).split(",")
    return tuple(str(part).strip().lower() for part in parts if str(part).strip())


@dataclass(frozen=True)
class Setting:
    name: str
    default: Any
    parse: Callable[[Any], Any]
    env: tuple[str, ...]  # the first one set wins; the later ones are the names the source projects documented
    help: str
    in_file: bool = True  # False: only from the environment or a `with` block


_TABLE = (
    Setting("backend", "auto", _device, ("ANYTORCH_BACKEND", "YIRAGE_BACKEND", "KRONOS_DEVICE"),
        "the device used when none is named: auto, cpu, cuda, cuda:1, rocm, npu, xpu, mps, webgpu, …"),
    Setting("device_uuid", "", _text, (),
        "the card that `anytorch set cuda:N` chose; an index can change, a UUID cannot"),
    Setting("strict", False, _boolean, ("ANYTORCH_STRICT",), "raise instead of falling back to another device"),
    Setting("log_level", "WARNING", _one_of(*LOG_LEVELS), ("ANYTORCH_LOG_LEVEL", "YIRAGE_LOG_LEVEL"),
        "DEBUG, INFO, WARNING or ERROR, on standard error"),
    Setting("plugins", None, _names, ("ANYTORCH_PLUGINS",),
        "names of the third-party back ends that may load, separated by commas; all of them when unset, none when empty"),
    Setting("probe_timeout_s", 120.0, _seconds, ("ANYTORCH_PROBE_TIMEOUT",),
        "how long the child process may take to try the devices, in seconds"),
    Setting("threads", None, _threads, ("ANYTORCH_THREADS",), "CPU threads torch uses"),
    Setting("cpu_dtype", None, _one_of("float32", "bfloat16", "float16"), ("ANYTORCH_CPU_DTYPE",),
        "the dtype autocast uses on the CPU; float32 turns autocast off there"),
    Setting("matmul_precision", None, _one_of("highest", "high", "medium"), ("ANYTORCH_MATMUL_PRECISION",),
        "torch.set_float32_matmul_precision"),
    Setting("webgpu_adapter", "", _text, ("ANYTORCH_WEBGPU_ADAPTER",),
        "which GPU the webgpu device uses: a number, a part of its name, or an API; the best when unset"),
    Setting("webgpu_memory", None, parse_nbytes, ("ANYTORCH_WEBGPU_MEMORY",),
        "the most memory the webgpu device may use, such as 6GiB; no limit when unset"),
    Setting("webgpu_fallback", "warn", _one_of("warn", "silent", "error"), ("ANYTORCH_WEBGPU_FALLBACK",),
        "an op without a kernel on the webgpu device: run it on the CPU and warn once, run it there silently, or raise"),
    Setting("webgpu_matrix_cores", "auto", _one_of("auto", "on", "off"), ("ANYTORCH_WEBGPU_MATRIX_CORES",),
        "use the GPU's matrix cores in half-precision products: auto (where measured to be faster), on (wherever the "
        "driver has them), or off; read when the device is opened"),
    Setting("webgpu_checks", "on", _checks, ("ANYTORCH_WEBGPU_CHECKS",),
        "an index out of range on the webgpu device: on raises IndexError at the next wait for the device, "
        "off reads zero in silence, now waits for every op with indices and raises there (slow, for debugging)"),
    Setting("webgpu_native", True, _boolean, ("ANYTORCH_WEBGPU_NATIVE",),
        "on: small ops of the webgpu device are launched by our C++, where it is in the package or can be compiled; "
        "off: by Python, which computes the same and takes longer"),
    Setting("mode", "balanced", _one_of("speed", "balanced", "memory", "full"), ("ANYTORCH_MODE", "VB_MODE"),
        "the mode that `virtual_blackwell` turns on: speed, balanced, memory or full"),
    Setting("virtual_blackwell", False, _boolean, ("ENABLE_VIRTUAL_BLACKWELL",),
        "turn the mode on when apt_model.optimization.vb_global is imported"),
    Setting("compiler", "", _text, ("ANYTORCH_CXX", "CXX"),
        "the C++ compiler that builds our native code on first use; when unset the first of g++, clang++ and c++, "
        "else the package ziglang's"),
    Setting("carried_kernels", True, _boolean, ("ANYTORCH_CARRIED_KERNELS",),
        "on: use the compiled C++ that came with the package; off: compile it on this machine, to compare the two"),
    Setting("simd", None, _one_of("baseline", "avx2", "avx2vnni", "avx512", "avx512vnni", "dotprod", "i8mm"),
        ("ANYTORCH_SIMD",), "the instructions our native code uses; the best this processor has when unset"),
    Setting("trust_cache", False, _boolean, ("ANYTORCH_TRUST_CACHE",),
        "load native code from the cache even if other users may write there: for mounts with fixed owners and modes"),
    Setting("measure_kernels", True, _boolean, ("ANYTORCH_MEASURE_KERNELS",),
        "on: time the forecast kernels on the GPU once and use the fastest; off: use the built-in choice"),
    Setting("measure_s", 3.0, _seconds, ("ANYTORCH_MEASURE_S",),
        "time limit, in seconds, for measuring what is fastest, each time something is chosen by measuring"),
    Setting("save_kernels", "", _text, ("ANYTORCH_SAVE_KERNELS",),
        "a folder to which the text of every generated kernel is written, for people to read; none when unset"),
    Setting("api_key_file", "", _text, ("ANYTORCH_API_KEY_FILE",),
        "the file with the API keys `anytorch serve` accepts; no key is required when unset"),
    Setting("config_file", None, _text, ("ANYTORCH_CONFIG",),
        "the settings file; the user's configuration folder when unset", in_file=False),
    Setting("cache_dir", None, _text, ("ANYTORCH_CACHE_DIR",),
        "where probe results and tuning measurements are kept; the user's cache folder when unset", in_file=False),
)  # fmt: skip
SETTINGS: dict[str, Setting] = {setting.name: setting for setting in _TABLE}

_overrides: ContextVar[Mapping[str, Any]] = ContextVar("anytorch_overrides", default={})  # noqa: B039  (never mutated)
_for_process: dict[str, Any] = {}  # what `override` set: seen by every thread, weaker than a `with use(...)` block


@dataclass(frozen=True)
class Value:
    """One setting's value and where it came from: `default`, `file`, an environment variable's name, or `code`."""

    value: Any
    source: str


def lookup(name: str, *, env: Mapping[str, str] | None = None) -> Value:
    """The value of a setting and its source. Raises ConfigError if the stored value is invalid."""
    setting = SETTINGS[name]
    override = _overrides.get()
    if name in override:
        return Value(override[name], "code")
    if name in _for_process:
        return Value(_for_process[name], "code")
    env = os.environ if env is None else env
    for variable in setting.env:
        # An empty variable means "unset", as it does for most tools; for a list it means "none of them".
        if variable in env and (env[variable].strip() or setting.parse is _names):
            return Value(_parsed(setting, env[variable], f"environment variable {variable}"), variable)
    if setting.in_file:
        in_file = stored("settings")
        if name in in_file:
            return Value(_parsed(setting, in_file[name]), "file")
    return Value(setting.default, "default")


def get(name: str) -> Any:
    return lookup(name).value


@contextmanager
def use(**changes: Any) -> Iterator[None]:
    """Settings for one block of code: `with anytorch.use(backend="cpu", strict=True): ...`.

    None stands for a setting's default. Scoped to the current thread or asyncio task; a plain thread does not inherit it
    (hand it `contextvars.copy_context()`).
    """
    parsed = {}
    for name, value in changes.items():
        if name not in SETTINGS:
            raise unknown_setting(name)
        # None is "nothing chosen": the setting's default, whatever the environment and the file say.
        parsed[name] = SETTINGS[name].default if value is None else _parsed(SETTINGS[name], value, f"use({name}=...)")
    token = _overrides.set({**_overrides.get(), **parsed})
    try:
        yield
    finally:
        _overrides.reset(token)


def override(name: str, value: Any) -> None:
    """Set a setting for the rest of this process, in every thread (`set_backend`); prefer `use`.

    Inside a `with use(...)` block that names the same setting it also replaces the block's value, for the block: a call
    that had no effect where it stands would be a trap.
    """
    parsed = _parsed(SETTINGS[name], value, name)
    _for_process[name] = parsed
    if name in _overrides.get():
        _overrides.set({**_overrides.get(), name: parsed})


def parse_setting(name: str, value: Any) -> Any:
    """`value` as the named setting stores it; raises ConfigError for an unknown name or an invalid value."""
    if name not in SETTINGS:
        raise unknown_setting(name)
    return _parsed(SETTINGS[name], value, f"setting {name}")


def unknown_setting(name: str, where: str = "") -> ConfigError:
    return ConfigError(
        f"{where}unknown setting {name!r}; settings: {', '.join(SETTINGS)}",
        hint=did_you_mean(name, SETTINGS, "run `anytorch config show` to see them all"),
    )


def _parsed(setting: Setting, value: Any, where: str = "") -> Any:
    """What the setting stores for a value; `where` names its origin in the error, the settings file when empty."""
    try:
        return setting.parse(value)
    except (ValueError, TypeError) as exc:
        where = where or f"{settings_file()}, setting {setting.name!r}"
        raise ConfigError(f"{where}: {value!r} is invalid for {setting.name!r}: {exc}", hint=setting.help) from exc


# --- folders -----------------------------------------------------------------------------------------------------
# Written out rather than taken from platformdirs: importing that costs 34 ms of the 80 ms `anytorch info` may use.


FOLDER_VARIABLES = ("HOME", "XDG_CONFIG_HOME") if os.name == "posix" else ("HOME", "USERPROFILE", "LOCALAPPDATA")


def user_folder(kind: str, env: Mapping[str, str] | None = None, platform: str = sys.platform) -> Path:
    """The user's `config` or `cache` folder for anytorch on this operating system."""
    env = os.environ if env is None else env
    home = Path(env.get("HOME") or env.get("USERPROFILE") or Path.home())
    if platform == "darwin":
        return home / "Library" / ("Caches" if kind == "cache" else "Application Support") / "anytorch"
    if platform == "win32":
        return Path(env.get("LOCALAPPDATA") or home / "AppData" / "Local") / "anytorch" / kind
    xdg = env.get("XDG_CACHE_HOME" if kind == "cache" else "XDG_CONFIG_HOME")
    return Path(xdg or home / (".cache" if kind == "cache" else ".config")) / "anytorch"


def settings_file() -> Path:
    named = get("config_file")
    return Path(named) if named else _standard_file(*map(os.environ.get, FOLDER_VARIABLES))


@lru_cache(maxsize=8)
def _standard_file(*variables: str | None) -> Path:
    """The settings file where no other is named; kept per value of the variables, since every setting asks for it."""
    return user_folder("config") / "config.toml"


def cache_folder() -> Path:
    named = get("cache_dir")
    return Path(named) if named else user_folder("cache")


# --- the settings file -------------------------------------------------------------------------------------------
# [settings]           what `anytorch set` and `optimize --apply` chose
# [tuned."<device>"]   what `optimize` measured on that device, with the key of the machine it was measured on
TABLES = ("settings", "tuned")


def read_settings_file(path: Path | None = None) -> dict[str, Any]:
    """The settings file, or the one at `path`, as a dictionary of the caller's own; {} when there is none.

    Raises ConfigError, and never touches the file.
    """
    if path is None:
        return copy.deepcopy(_current_file())
    raw = _raw(path)
    return {} if raw is None else _tables_of(raw, path)


def stored(table: str) -> Mapping[str, Any]:
    """The table "settings" or "tuned" of the settings file, {} when there is none. Shared: do not change it."""
    found: Mapping[str, Any] = _current_file().get(table, {})
    return found


@dataclass(frozen=True)
class _Read:
    """The settings file as it was read last. `stamp` is None when it was so young that a change may have left it equal."""

    path: Path
    stamp: tuple[int, ...] | None
    raw: bytes
    data: dict[str, Any]


_read: _Read | None = None  # replaced whole: a thread sees the old one or the new one

# Clocks of file systems are coarse (FAT: two seconds): of a younger file the time stamp alone does not tell a change.
SETTLED_NS = 3 * 10**9


def _current_file() -> dict[str, Any]:
    """The settings file, parsed when it has changed since it was asked for last."""
    global _read
    path = settings_file()
    try:
        found = path.stat()
    except FileNotFoundError:
        return {}
    except OSError:
        stamp = None  # reading it says why
    else:
        stamp = (found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev)
    last = _read
    if last is not None and last.path != path:
        last = None
    if last is not None and stamp is not None and stamp == last.stamp:
        return last.data
    raw = _raw(path)
    if raw is None:
        return {}
    data = last.data if last is not None and last.raw == raw else _tables_of(raw, path)
    settled = stamp is not None and time.time_ns() - max(stamp[:2]) > SETTLED_NS
    _read = _Read(path, stamp if settled else None, raw, data)
    return data


def _raw(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise ConfigError(
            f"cannot read the settings file {path}: {exc.strerror}",
            hint="check its permissions, or name another with ANYTORCH_CONFIG",
        ) from exc


def _tables_of(raw: bytes, path: Path) -> dict[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib  # 42 ms: only when there is a file to read
    else:
        import tomli as tomllib
    try:
        data: dict[str, Any] = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as exc:  # TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise ConfigError(
            f"the settings file {path} is not valid TOML: {exc}",
            hint="correct it by hand, or start over with `anytorch reset` (which keeps a copy)",
        ) from exc
    for table in TABLES:
        if not isinstance(data.get(table, {}), dict):
            raise ConfigError(
                f"the settings file {path}: {table!r} must be a table",
                hint=f"write it as [{table}] with lines below it",
            )
    return data


def write_settings_file(data: Mapping[str, Any], path: Path | None = None) -> Path:
    """Replace the settings file atomically: a reader sees the old file or the new one, never a mixture."""
    import tomli_w

    path = settings_file() if path is None else path
    try:
        replace_file(path, tomli_w.dumps(dict(data)).encode(), through_links=True)
    except OSError as exc:
        raise ConfigError(
            f"cannot write the settings file {path}: {exc.strerror}", hint="name another with ANYTORCH_CONFIG"
        ) from exc
    return path
