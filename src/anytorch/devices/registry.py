"""Which back ends there are: ours, and every plug-in of the entry-point group `anytorch.backends`.

All of them are loaded by the same function from the same kind of text, "module:attribute". Ours are listed here rather
than in our own package metadata so that they are there in a plain source tree too. Plug-ins' metadata is read by
`anytorch.probe` as text: importlib.metadata alone costs more CPU time than `anytorch info` may use.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from functools import lru_cache
from importlib import import_module

from anytorch import config, logs
from anytorch.devices.protocol import Backend
from anytorch.errors import UnknownDevice
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
                hint="mend or uninstall its package; `anytorch doctor` shows the whole message",
            )
        import difflib  # only for bad input

        words = [word for backend in self.backends.values() for word in (backend.name, *backend.aliases)]
        near = difflib.get_close_matches(wanted, [*words, "auto"], n=1)
        raise UnknownDevice(
            f"unknown device {name!r}; known: auto, {', '.join(self.backends)}",
            hint=f"did you mean {near[0]!r}?" if near else "run `anytorch doctor` to see why a device is missing",
        )


def registry() -> Registry:
    """The back ends of this process. Plug-ins are loaded on first use and only if the setting `plugins` admits them."""
    return _load(_plugins(), config.get("plugins"))


@lru_cache(maxsize=1)
def _plugins() -> tuple[EntryPoint, ...]:
    found = read_packages(Tree("/"), sys.path).entry_points
    return tuple(point for point in found if point.group == GROUP and point.distribution != "anytorch")


@lru_cache(maxsize=8)
def _load(plugins: tuple[EntryPoint, ...], allowed: tuple[str, ...] | None) -> Registry:
    targets = [(name, target, "anytorch") for name, target in BUILT_IN.items()]
    targets += [
        (p.name.lower(), p.value, p.distribution) for p in plugins if allowed is None or p.name.lower() in allowed
    ]
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
    ordered = sorted(found.values(), key=lambda backend: -backend.priority)
    return Registry({backend.name: backend for backend in ordered}, errors)


def _problem(backend: object, taken: Mapping[str, Backend]) -> str:
    if not isinstance(backend, Backend):
        wanted = [*Backend.__annotations__, *[word for word in dir(Backend) if not word.startswith("_")]]
        missing = [word for word in wanted if not hasattr(backend, word)]
        return f"it is no back end: it has no {', '.join(missing) or 'back-end attributes'}"
    if not backend.name or backend.name != backend.name.lower():
        return f"its name {backend.name!r} must be a lower-case word"
    words = {backend.name, *backend.aliases}
    for other in taken.values():
        if clash := words & {other.name, *other.aliases}:
            return f"the name {min(clash)!r} is taken by the back end {other.name!r}"
    return ""
