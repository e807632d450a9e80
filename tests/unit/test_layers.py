"""The shape of the package: imports point down, no cycles, and no back end's name above the device layer."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import anytorch
from anytorch.devices.registry import BUILT_IN

ROOT = Path(anytorch.__file__).parent

# Lowest first; names on one line are one layer (DESIGN.md). A layer imports itself and what is below it.
LAYERS = [
    {"_version", "errors", "files", "config", "cache", "logs"},
    {"probe"},
    {"devices"},
    {"lite"},
    {"webgpu"},
    {"memory"},
    {"quant"},
    {"graph"},
    {"persistent"},
    {"models"},
    {"engines"},
    {"train"},
    {"serve"},
    {"comfy"},
    {"cli"},
    {"__init__", "__main__"},
]
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}

# Own modules imported inside a function are a way round a cycle, unless there is another reason. The reasons:
LATE = {
    "anytorch.__init__": "the public names are loaded when they are first used",
    "anytorch.devices": "the package can be called, and importing it imports nothing",
    "anytorch.probe": "importing the package costs nothing until somebody looks at the machine",
}
# …and whole layers in which `anytorch info` (80 ms of CPU time) pays for every module it loads: there a function may
# import a module that only it needs. That a cycle hides behind one is excluded by `test_no_cycles`, which counts them too.
LATE_LAYERS = {
    "probe": "readers are loaded for the systems and vendors they read",
    "devices": "what only the child, the doctor's pages or bad input needs is not on the path of `info`",
    "cli": "a command is loaded when it is the one that was asked for",
}

# Words that are a back end's name and a word of their own: in an option's text "cpu" may be any CPU.
BACKEND_NAMES = set(BUILT_IN)
# Where a back end's name may stand above devices/, and why.
NAMES_ALLOWED = {
    "cli": "in texts for people (help, examples, hints): a literal that is more than the bare name",
}


@dataclass(frozen=True)
class Import:
    importer: str  # "anytorch.devices.choose"
    imported: str  # "anytorch.devices.gather"
    line: int
    late: bool  # inside a function

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = list(path.relative_to(ROOT.parent).with_suffix("").parts)
        found[".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)] = path
    return found


MODULES = modules()


def layer_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def imports_of(module: str, tree: ast.Module) -> Iterator[Import]:
    def targets(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{module}:{node.lineno}: a relative import; we write the whole name"
            for alias in node.names:
                # `from anytorch import config` imports a module, `from anytorch.errors import X` a name of one.
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in MODULES else str(node.module)

    def walk(node: ast.AST, late: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue  # never runs
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                for target in targets(child):
                    if target.split(".")[0] == "anytorch":
                        yield Import(module, target, child.lineno, late)
            inside = late or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from walk(child, inside)

    yield from walk(tree, False)


TREES = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in MODULES.items()}
IMPORTS = [found for module, tree in TREES.items() for found in imports_of(module, tree)]


def test_every_module_is_in_a_layer() -> None:
    assert {layer_of(module) for module in MODULES} <= HEIGHT.keys()
    assert len(IMPORTS) > 100, "the walk found next to nothing: it is broken"


def test_imports_point_down() -> None:
    upwards = [str(i) for i in IMPORTS if HEIGHT[layer_of(i.imported)] > HEIGHT[layer_of(i.importer)]]
    assert not upwards, "\n".join(upwards)


def test_type_checking_imports_point_down_too() -> None:
    """They never run, but they say what a layer knows about."""
    upwards = []
    for module, tree in TREES.items():
        if module == "anytorch.__init__":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("anytorch."):
                if HEIGHT[layer_of(str(node.module))] > HEIGHT[layer_of(module)]:
                    upwards.append(f"{module}:{node.lineno} imports {node.module}")
    assert not upwards, "\n".join(upwards)


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """One cycle, as the modules along it; [] when there is none."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for target in sorted(edges.get(module, ())):
            if found := visit(target, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(edges) if (found := visit(module, []))), [])


def test_no_cycles() -> None:
    """Not even with the late imports counted: those are for speed, never for dodging a cycle."""
    edges: dict[str, set[str]] = {}
    for found in IMPORTS:
        if found.importer in LATE:
            continue  # a package's own door, which stands above what it leads to
        edges.setdefault(found.importer, set()).add(found.imported)
    assert cycle(edges) == []


def test_late_imports_have_a_reason() -> None:
    unexplained = [
        str(i) for i in IMPORTS if i.late and i.importer not in LATE and layer_of(i.importer) not in LATE_LAYERS
    ]
    assert not unexplained, "\n".join(unexplained)


def docstrings(tree: ast.Module) -> set[int]:
    """The ids of the constants that are docstrings."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                found.add(id(first.value))
    return found


def names_in(module: str) -> list[str]:
    """String literals of a module that are a back end's bare name ("cuda", "cuda:0"), which only code can mean."""
    tree = TREES[module]
    skip = docstrings(tree)
    return [
        f"{module}:{node.lineno}: {node.value!r}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in skip
        and node.value.partition(":")[0].lower() in BACKEND_NAMES
        and (":" not in node.value or node.value.partition(":")[2].isdigit())
    ]


ABOVE = [module for module in MODULES if HEIGHT[layer_of(module)] > HEIGHT["devices"]]
# `BackendType` and the like are the device layer's own. The CPU is the one device that is always there, and the reference
# every answer is compared with: asking for it by name asks nothing about the hardware.
REFERENCE = "cpu"


@pytest.mark.parametrize("module", ABOVE)
def test_no_back_end_is_named_above_the_device_layer(module: str) -> None:
    """Code asks what a device can do, never which one it is. Texts for people may name them; a bare name may not stand."""
    named = [line for line in names_in(module) if not line.endswith((f"'{REFERENCE}'", f"'{REFERENCE}:0'"))]
    assert not named, "\n".join(named)


def test_the_name_rule_finds_what_it_looks_for() -> None:
    assert any("'cuda'" in line for line in names_in("anytorch.devices.cuda"))
    assert not names_in("anytorch.devices.child")
