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
    {
        "_version",
        "lazy",
        "values",
        "counts",
        "errors",
        "limits",
        "imports",
        "files",
        "settings",
        "cache",
        "logs",
        "interrupts",
        "large_pages",
        "safetensors_files",
        "child_process",
        "pictures",
        "workers",
        "device_pool",
    },
    {"probe"},
    {"measured"},  # the only tuner: whoever measures brings the device's clock
    {"devices"},
    {"native"},  # C++ compiled once on first use and cached; no torch
    {"gpu"},  # the torch-free GPU runtime that lite and webgpu share
    {"graph"},  # kernel graphs: one form that generated kernels come from
    {"webgpu"},
    {"recorded"},  # what forecasts, embeddings and training replay, and the pinned memory they are fed from
    {"quant"},  # below memory: what rests on a slow tier may rest quantized
    {"memory"},
    {"run"},  # programs written for CUDA on other devices
    {"train"},  # one process or several of torchrun's, for users' own models and for fine-tuning
    {"text", "forecast", "lite"},  # the jobs, which do not know each other
    {"comfy"},  # a job made of the others: nodes over text, forecasts and lite
    {"serve"},
    {"cli"},
    {"__init__", "__main__"},
]
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}
JOBS = {"text", "forecast", "lite"}

# The floors inside a slice, lowest first; "" are the slice's own modules. Folders on one floor do not know each other.
SLICES = {
    "text": [{"checkpoints"}, {"packed"}, {"encoders", "decoders"}, {"persistent"}, {"embed", "generate"}],
    "forecast": [{"candles", "model"}, {"decoding"}, {"kernels"}, {"generation"}, {""}, {"training"}],
}
# Imports that point up, each with its reason. They are literals: nothing above is loaded before it is needed.
UPWARDS = {
    ("anytorch.devices.webgpu", "anytorch.webgpu"): "a back end's file lends torch its device, and this one is ours",
    ("anytorch.run.__main__", "anytorch.cli.main"): "`python -m anytorch.run` is the command `anytorch run`",
    **{
        (
            "anytorch.graph.handwritten",
            f"anytorch.{name}.graph_kernels",
        ): "a table of who registers hand-written kernels"
        for name in ("text.packed", "text.encoders", "forecast.kernels", "quant")
    },
}

# An own module imported inside a function is a way round a cycle, unless there is another reason, which must be here.
# (`test_no_cycles` counts these imports too, so that no cycle hides behind one.)
LATE = {
    "anytorch.__init__": "the public names are loaded when they are first used",
    "anytorch.devices": "the package can be called, and importing it imports nothing",
    "anytorch.memory": "the package can be called, and importing it imports nothing",
    "anytorch.probe": "importing the package costs nothing until somebody looks at the machine",
    "anytorch.probe.collect": "the readers of another operating system are not loaded on this one",
    "anytorch.devices.base": "the trial computation runs in the child alone",
    "anytorch.devices.gather": "json, hashing and processes: `anytorch info` answers from files alone, in 80 ms",
    "anytorch.devices.cpu": "the process's own memory is read only when it is asked for",
    "anytorch.graph.backs": "each back end needs a compiler of its own",
    "anytorch.graph.kernel_graph": "a graph is built without torch; calling and searching it need torch",
    "anytorch.train": "collectives by way of the host are for devices that have none",
    "anytorch.lite.moving": "the GPU path needs wgpu, which only those who use it have",
    "anytorch.webgpu": "importing it registers the device; what that needs is loaded by the function that does it",
    "anytorch.forecast.kernels.*": "Triton's kernels are for machines that have Triton",
    "anytorch.quant.graph_kernels": "Triton's kernels are for machines that have Triton",
    "anytorch.quant.kernels.triton": "Triton's kernels are for machines that have Triton",
    "anytorch.text.encoders.graph_kernels": "Triton's kernels are for machines that have Triton",
    "anytorch.text.encoders.encoder": "quantization is for those who ask for it, our kernels for devices with Triton",
    "anytorch.text.persistent.fused": "Triton's kernels are for machines that have Triton",
    "anytorch.text.embed.encoder_device": "the torch encoder imports torch, our own loads a library: one of the two",
    "anytorch.text.embed.engine": "the queue is for those who use it",
    "anytorch.text.embed.encoder_builder": "the pool is for those who name several devices",
    "anytorch.text.embed.tokens": "the compiled tokenizer is a library of its own, for encoders faster than the Rust one",
    "anytorch.serve.loaders": "forecasts and text need torch: it is loaded in a thread, after the page answers",
    "anytorch.cli.commands.*": "every `--help` builds a command's parser; what its work needs is loaded when it runs",
    "anytorch.cli.main": "what tells a lack of memory from a bug is loaded when something has gone wrong; the overview "
    "of the machine when no command is named",
    "anytorch.cli.demo_jobs": "each job needs packages of its own, and is shown where they are installed",
    "anytorch.cli.settings": "`anytorch --help` loads no device code; a back end is looked up only if one is configured",
    "anytorch.cli.describe": "choosing costs 3 ms that `anytorch info` pays only where a back end is configured",
    "anytorch.cli.output": "JSON and error text are made only by the answers that need them",
    "anytorch.run.child": "programs that never import torch must not wait for what the stand-in needs",
    "anytorch.run.parallel": "a torch built without collectives has nothing that a process group could be made of",
    "anytorch.webgpu.torch_accelerator": "a torch built without collectives has nothing to make a process group of",
    "anytorch.webgpu.module": "graphs are compiled by few, and what compiles them takes a second to import",
}

# What is wrong today and must not spread; an entry that is no longer true fails the test that reads it.
TO_MEND_LATE: dict[str, str] = {}
TO_MEND_CYCLES: dict[tuple[str, str], str] = {}

BACKEND_NAMES = set(BUILT_IN)


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


def docstrings(tree: ast.Module) -> set[int]:
    """The ids of the constants that are docstrings."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                found.add(id(first.value))
    return found


def wrong_way(importer: str, imported: str) -> bool:
    """Does this import point up, or across to what it should not know?"""
    here, there = layer_of(importer), layer_of(imported)
    if here != there:
        return HEIGHT[there] > HEIGHT[here] or {here, there} <= JOBS
    if here not in SLICES or f"anytorch.{here}" in (importer, imported):  # the slice's door
        return False
    below, above = folder_of(imported), folder_of(importer)
    heights = {name: height for height, floor in enumerate(SLICES[here]) for name in floor}
    return below != above and heights[below] >= heights[above]


def folder_of(module: str) -> str:
    """The folder inside a slice: "embed" of anytorch.text.embed.engine, "" of a module that lies in the slice itself."""
    name = module.split(".")[2]
    return name if (ROOT / layer_of(module) / name).is_dir() else ""


def imports_of(module: str, tree: ast.Module) -> Iterator[Import]:
    """What a module imports: by statement, or by a literal that names a module (`import_module`, tables of public names,
    "package.module:name", programs for another process)."""
    prose = docstrings(tree)

    def targets(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: a relative import; we write the whole name"
            for alias in node.names:
                # `from anytorch import settings` imports a module, `from anytorch.errors import X` a name of one.
                whole = f"{node.module}.{alias.name}"
                if whole == "anytorch.__version__":  # the package's own, from its lowest module
                    whole = "anytorch._version"
                yield whole if whole in MODULES else str(node.module)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            named = node.value.partition(":")[0]
            if named in MODULES and not f"{module}.".startswith(f"{named}."):  # (a package may say its own name)
                yield named

    def walk(node: ast.AST, late: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
                continue  # never runs
            for target in targets(child):
                if target.split(".")[0] == "anytorch":
                    yield Import(module, target, getattr(child, "lineno", 0), late)
            inside = late or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            yield from walk(child, inside)

    yield from walk(tree, False)


TREES = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in MODULES.items()}
IMPORTS = [found for module, tree in TREES.items() for found in imports_of(module, tree)]


def test_every_module_is_in_a_layer() -> None:
    assert {layer_of(module) for module in MODULES} <= HEIGHT.keys()
    assert len(IMPORTS) > 100, "the walk found next to nothing: it is broken"


def test_imports_point_down() -> None:
    upwards = {(i.importer, i.imported): str(i) for i in IMPORTS if wrong_way(i.importer, i.imported)}
    assert not upwards.keys() - UPWARDS.keys(), "\n".join(upwards.values())
    assert not UPWARDS.keys() - upwards.keys(), "no longer needed in the list"


def test_every_folder_of_a_slice_has_a_floor() -> None:
    for name, floors in SLICES.items():
        folders = {folder_of(module) for module in MODULES if module.startswith(f"anytorch.{name}.")}
        assert folders == set().union(*floors), name


def test_what_points_the_wrong_way_is_seen() -> None:
    assert wrong_way("anytorch.devices.choose", "anytorch.text.embed.engine"), "up"
    assert wrong_way("anytorch.text.embed.engine", "anytorch.forecast.predictor"), "from job to job"
    assert wrong_way("anytorch.text.packed.encoder", "anytorch.text.embed.engine"), "up inside a slice"
    assert wrong_way("anytorch.text.embed.engine", "anytorch.text.generate.generator"), "across inside a slice"
    assert wrong_way("anytorch.forecast.predictor", "anytorch.forecast.training.loop"), "up from a slice's own modules"
    assert not wrong_way("anytorch.forecast.training.loop", "anytorch.forecast.predictor")
    assert not wrong_way("anytorch.text.embed.queue", "anytorch.text.embed.engine")


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ('import_module("anytorch.serve.app")', ["anytorch.serve.app"]),
        ('PUBLIC = {"x": "anytorch.errors"}', ["anytorch.errors"]),
        ('FACTORY = "anytorch.text.embed.pool_worker:build"', ["anytorch.text.embed.pool_worker"]),
        ('"""anytorch.errors"""', []),
        ('print("anytorch.errors has them all", "anytorch.probe")', []),
    ],
)
def test_literals_that_name_a_module_are_imports(code: str, seen: list[str]) -> None:
    assert [found.imported for found in imports_of("anytorch.probe.cpu", ast.parse(code))] == seen


def test_type_checking_imports_point_down_too() -> None:
    """They never run, but they say what a layer knows about."""
    upwards = []
    for module, tree in TREES.items():
        if module == "anytorch.__init__":
            continue
        for node in ast.walk(tree):
            if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("anytorch."):
                continue
            if wrong_way(module, str(node.module)):
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


# Modules whose late imports lead to what stands above them: they are asked, and never ask back.
DOORS = {
    *("anytorch.__init__", "anytorch.devices", "anytorch.memory", "anytorch.probe", "anytorch.quant", "anytorch.lite"),
    *("anytorch.forecast", "anytorch.text.embed", "anytorch.text.generate"),
}


def test_no_cycles() -> None:
    """Not even with the late imports counted: those are for speed, never for dodging a cycle."""
    edges: dict[str, set[str]] = {}
    for found in IMPORTS:
        edge = (found.importer, found.imported)
        if found.importer not in DOORS and edge not in TO_MEND_CYCLES and edge not in UPWARDS:
            edges.setdefault(found.importer, set()).add(found.imported)
    assert cycle(edges) == []


def test_a_cycle_would_be_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) == ["a", "b", "c", "a"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}}) == []


def test_late_imports_have_a_reason() -> None:
    def listed(module: str) -> str:
        package = f"{module.rpartition('.')[0]}.*"
        return package if package in LATE else module

    late = {listed(found.importer): str(found) for found in IMPORTS if found.late}
    late.setdefault("anytorch.__init__", "it imports by name, with import_module")
    unexplained = late.keys() - LATE.keys() - TO_MEND_LATE.keys()
    assert not unexplained, "\n".join(late[module] for module in unexplained)
    assert not (LATE.keys() | TO_MEND_LATE.keys()) - late.keys(), "no longer needed in the list"


def test_what_is_to_be_mended_is_still_broken() -> None:
    edges = {(found.importer, found.imported) for found in IMPORTS}
    assert TO_MEND_CYCLES.keys() <= edges, "mended: take it off the list"


def names_in(module: str) -> list[tuple[int, str]]:
    """Line and text of a module's string literals that are a back end's bare name: "cuda", "cuda:0"."""
    tree = TREES[module]
    skip = docstrings(tree)
    literals = [
        (node.lineno, node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in skip
    ]
    return [
        (line, text)
        for line, text in literals
        if text.partition(":")[0] in BACKEND_NAMES and (":" not in text or text.partition(":")[2].isdigit())
    ]


ABOVE = [module for module in MODULES if HEIGHT.get(layer_of(module), 0) > HEIGHT["devices"]]
# The CPU is the one device that is always there, and the reference every answer is compared with: asking for it by name
# asks nothing about the hardware.
REFERENCE = "cpu"


@pytest.mark.parametrize("module", ABOVE)
def test_no_back_end_is_named_above_the_device_layer(module: str) -> None:
    """Code asks what a device can do, never which one it is.

    The rule is about whole literals: "cuda" and "cuda:0" are what code compares and asks for, and may not stand there;
    a sentence, a help text or an example that has the word in it may. The webgpu device may say its own name, the
    public names list its package, and the stand-in says the one name that it stands in for.
    """
    allowed = {REFERENCE, layer_of(module)} | ({"webgpu"} if module == "anytorch.__init__" else set())  # the package
    if layer_of(module) == "run":
        allowed.add("cuda")  # its subject: the name that programs say, whatever device does the work
    if module.startswith("anytorch.run.port"):
        allowed |= BACKEND_NAMES  # words that it looks for in the source of others
    named = [f"{module}:{line}: {name!r}" for line, name in names_in(module) if name.partition(":")[0] not in allowed]
    assert not named, "\n".join(named)


def test_the_name_rule_finds_what_it_looks_for() -> None:
    assert "cuda" in [name for _, name in names_in("anytorch.devices.cuda")]
    assert not names_in("anytorch.devices.child")
