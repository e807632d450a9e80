"""The back ends: ours, and every plug-in of the entry-point group `anytorch.backends`.

All of them are loaded by the same function from the same kind of text, "module:attribute". Ours are listed here rather
than in our own package metadata so that they are there in a plain source tree too. Plug-ins' metadata is read by
`anytorch.probe` as text: importlib.metadata alone costs more CPU time than `anytorch info` may use.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import import_module

from anytorch import logs, settings
from anytorch.devices.types import Backend
from anytorch.errors import UnknownDevice, did_you_mean
from anytorch.probe.facts import EntryPoint
from anytorch.probe.packages import read_packages
from anytorch.probe.tree import Tree
from anytorch.values import dataclass

GROUP = "anytorch.backends"
BUILT_IN: Mapping[str, str] = {
    "cuda": "anytorch.devices.cuda:CudaBackend",
    "rocm": "anytorch.devices.rocm:RocmBackend",
    "npu": "anytorch.devices.npu:NpuBackend",
    "xpu": "anytorch.devices.xpu:XpuBackend",
    "mps": "anytorch.devices.mps:MpsBackend",
    "webgpu": "anytorch.devices.webgpu:WebgpuBackend",
    "cpu": "anytorch.devices.cpu:CpuBackend",
}
# Words that mean something else elsewhere, where the nearest spelling would mislead ("gpu" is one letter from "cpu").
WORDS_OF_TORCH: Mapping[str, str] = {
    "gpu": "did you mean 'auto' (the best device here) or 'cuda'?",
    "accelerator": "did you mean 'auto' (the best device here)?",
    "meta": "torch's meta device holds shapes without data and cannot compute",
}

log = logs.logger(__name__)


@dataclass(frozen=True)
class Registry:
    """Loaded back ends by name, in order of priority, and why each of the others could not be loaded."""

    backends: Mapping[str, Backend]
    errors: Mapping[str, str]

    def get(self, name: str) -> Backend:
        """The back end of that name or alias. Raises UnknownDevice with the nearest match."""
        wanted = name.strip().lower()
        for backend in self.backends.values():
            if wanted == backend.name or wanted in backend.aliases:
                return backend
        if wanted in self.errors:
            raise UnknownDevice(
                f"the back end {wanted!r} could not be loaded: {self.errors[wanted]}",
                hint="repair or uninstall its package; `anytorch doctor` shows the whole message",
            )
        raise UnknownDevice(
            f"unknown device {name!r}; known: auto, {', '.join(self.backends)}", hint=self._hint(wanted)
        )

    def _hint(self, wanted: str) -> str:
        if wanted in WORDS_OF_TORCH:
            return WORDS_OF_TORCH[wanted]
        aliases = [alias for backend in self.backends.values() for alias in backend.aliases]
        other = did_you_mean(wanted, aliases, "run `anytorch doctor` to see why a device is missing")
        return did_you_mean(wanted, [*self.backends, "auto"], other)  # our own names before others' words for them


def registry() -> Registry:
    """The back ends of this process. Plug-ins are loaded on first use and only if the setting `plugins` admits them."""
    return _load(_plugins(), settings.get("plugins"))


def by_torch_type(torch_type: str) -> Backend:
    """The back end of a torch device type. "cuda" may be ROCm's: the loaded torch tells."""
    known = registry()
    matching = [backend for backend in known.backends.values() if backend.torch_type == torch_type]
    if len(matching) > 1:
        torch = sys.modules.get("torch")
        is_hip = torch is not None and torch.version.hip is not None
        matching = [backend for backend in matching if (backend.name == "rocm") == is_hip] or matching
    return matching[0] if matching else known.get(torch_type)


def current_index(backend: Backend) -> int | None:
    """The card of a back end that torch means by "cuda" without a number; None if there is no choice."""
    ask = getattr(backend, "current_index", None)
    index: int | None = ask() if callable(ask) else None
    return index


@lru_cache(maxsize=1)
def _plugins() -> tuple[EntryPoint, ...]:
    found = read_packages(Tree("/"), sys.path).entry_points
    return tuple(point for point in found if point.group == GROUP and point.distribution != "anytorch")


@lru_cache(maxsize=8)
def _load(plugins: tuple[EntryPoint, ...], allowed: tuple[str, ...] | None) -> Registry:
    targets = [(name, target, "anytorch") for name, target in BUILT_IN.items()]
    for plugin in plugins:
        if allowed is None or plugin.name.lower() in allowed:
            targets.append((plugin.name.lower(), plugin.value, plugin.distribution))
        else:
            log.debug("plug-in %s of %s: left out by the setting plugins", plugin.name, plugin.distribution)
    return load(targets)


def load(targets: Iterable[tuple[str, str, str]]) -> Registry:
    """Load (name, "module:attribute", distribution) triples. A failure becomes a reason, never an exception."""
    found: dict[str, Backend] = {}
    errors: dict[str, str] = {}
    for name, target, distribution in targets:
        try:
            module, _, attribute = target.partition(":")
            backend = getattr(import_module(module.strip()), attribute.strip())()
            problem = _problem(backend, found)
        except (Exception, SystemExit) as exc:  # noqa: BLE001  (a stranger's code may do anything; the words are kept)
            problem = f"{type(exc).__name__}: {exc}"
        if problem:
            errors[name] = f"{problem} (package {distribution}, {target})"
            log.warning("back end %s is left out: %s", name, errors[name])
        else:
            found[backend.name] = backend
            if name not in BUILT_IN:
                log.debug("plug-in %s of %s: loaded from %s", name, distribution, target)
    ordered = sorted(found.values(), key=lambda backend: -backend.priority)
    return Registry({backend.name: backend for backend in ordered}, errors)


def _problem(backend: object, taken: Mapping[str, Backend]) -> str:
    if not isinstance(backend, Backend):
        wanted = [*Backend.__annotations__, *[word for word in dir(Backend) if not word.startswith("_")]]
        missing = [word for word in wanted if not hasattr(backend, word)]
        return f"not a back end; missing attributes: {', '.join(missing) or 'all'}"
    if not backend.name or backend.name != backend.name.lower():
        return f"its name {backend.name!r} must be a lower-case word"
    words = {backend.name, *backend.aliases}
    for other in taken.values():
        if clash := words & {other.name, *other.aliases}:
            return f"the name {min(clash)!r} is taken by the back end {other.name!r}"
    return ""
