"""Libraries that came with the package: taken when they are what is asked for, left alone when they are not."""

from __future__ import annotations

import ast
import hashlib
import importlib
import json
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from anytorch import native, settings
from anytorch.errors import CompilerMissing
from anytorch.native import carried, library, simd

ADD = 'extern "C" __attribute__((visibility("default"))) int add(int a, int b) { return a + b; }\n'
OTHER = ADD.replace("a + b", "a * b")
GENERATED = "graph"  # kernels that are written while anytorch runs


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    path = tmp_path / "code" / "add.cpp"
    path.write_text(ADD)
    return path


@pytest.fixture
def carry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared_libraries: Path) -> Iterator[Any]:
    """`carry(source, text)` puts a library, compiled from `text`, where a wheel would have the one of `source`."""
    folder = tmp_path / "built" / carried.folder_of(sys.platform, platform.machine())
    folder.mkdir(parents=True)
    monkeypatch.setattr(carried, "BUILT", tmp_path / "built")
    monkeypatch.setattr(carried, "_whole", set())
    monkeypatch.setattr(carried, "_unusable", set())
    carried._manifest.cache_clear()

    def put(source: Path, text: str) -> Path:
        (tmp_path / "elsewhere").mkdir()
        other = tmp_path / "elsewhere" / "other.cpp"
        other.write_text(text)
        level = simd.level()
        path = folder / f"add-{level.name}-{carried.digest([source], level.flags)}{library.SUFFIX}"
        shutil.copy(native.build("other", [other]), path)
        write_manifest(path)
        return path

    yield put
    carried._manifest.cache_clear()


def write_manifest(path: Path) -> None:
    hashes = {path.name: hashlib.sha256(path.read_bytes()).hexdigest()}
    (path.parent / carried.MANIFEST).write_text(json.dumps({"sha256": hashes}))
    carried._manifest.cache_clear()  # a process reads it once


LOADERS = ("native.load", "native.build", "load")


def loads() -> Iterator[tuple[str, ast.Call]]:
    """Every call of `native.load` or `native.build` in the package, and the module it is in."""
    for path in sorted(carried.PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in LOADERS and len(node.args) == 2:
                parts = path.relative_to(carried.PACKAGE.parent).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), node


def test_the_table_is_what_the_callers_ask_for() -> None:
    """A library that is not in the table, or is loaded with other flags, would be compiled by every user of a wheel."""
    asked = set()
    for module, call in loads():
        name = ast.literal_eval(call.args[0])
        if name == GENERATED:
            continue
        known = vars(importlib.import_module(module))
        given = {one.arg: one.value for one in call.keywords}
        sources, flags = (
            eval(compile(ast.Expression(node), module, "eval"), known)
            for node in (call.args[1], given.get("flags", ast.parse("()", mode="eval").body))
        )
        level = given.get("level")
        fixed = level.value if isinstance(level, ast.Constant) else None
        paths = tuple(Path(one).relative_to(carried.PACKAGE).as_posix() for one in sources)
        asked.add(carried.Fixed(name, paths, tuple(flags), (fixed,) if fixed else None))
    assert asked == set(carried.LIBRARIES)
    assert all(path.is_file() for one in carried.LIBRARIES for path in one.paths())


def test_a_carried_library_needs_no_compiler_and_no_cache(
    source: Path, carry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = carry(source, OTHER)  # the wheel's computes something else, so that it is seen which one answers
    monkeypatch.setenv("ANYTORCH_CXX", "/no/such/compiler")
    monkeypatch.setenv("ANYTORCH_CACHE_DIR", "/dev/null/none")
    assert native.load("add", [source]).add(3, 4) == 12
    assert native.build("add", [source]) == built


def test_an_edited_source_is_compiled(source: Path, carry: Any) -> None:
    carry(source, OTHER)
    source.write_text(ADD + "// edited\n")
    assert native.load("add", [source]).add(3, 4) == 7


def test_the_setting_turns_carried_libraries_off(source: Path, carry: Any) -> None:
    carry(source, OTHER)
    with settings.use(carried_kernels=False):
        assert native.load("add", [source]).add(3, 4) == 7
    assert native.load("add", [source]).add(3, 4) == 12


def test_a_damaged_one_is_not_loaded(source: Path, carry: Any, caplog: pytest.LogCaptureFixture) -> None:
    built = carry(source, OTHER)
    content = bytearray(built.read_bytes())
    content[len(content) // 2] ^= 1
    built.write_bytes(content)
    assert native.load("add", [source]).add(3, 4) == 7
    assert native.load("add", [source]).add(4, 4) == 8
    told = [record.message for record in caplog.records if "came with anytorch" in record.message]
    assert len(told) == 1 and "changed after it was built" in told[0], told


def test_one_that_this_system_cannot_load_is_compiled_and_kept(
    source: Path, carry: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The wheel is as it was built, and for another system: a copied environment, an emulated processor."""
    built = carry(source, OTHER)
    built.write_bytes(b"MZ: no library of this system")
    write_manifest(built)
    assert native.load("add", [source]).add(3, 4) == 7
    assert "came with anytorch" in caplog.text and built.exists()


def test_without_it_and_without_a_compiler_the_error_names_the_extra(
    source: Path, carry: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built = carry(source, OTHER)
    built.unlink()
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("ANYTORCH_CACHE_DIR", str(tmp_path / "never used"))
    monkeypatch.setattr("anytorch.native.compiler.packaged_zig", lambda: None)
    with pytest.raises(CompilerMissing, match="no C\\+\\+ compiler") as raised:
        native.load("add", [source])
    assert "anytorch[compiler]" in raised.value.hint


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"sha256": 3}', "\xff"])
def test_a_broken_manifest_is_told_and_not_used(source: Path, carry: Any, text: str, caplog: Any) -> None:
    built = carry(source, OTHER)
    (built.parent / carried.MANIFEST).write_text(text, encoding="latin-1")
    carried._manifest.cache_clear()
    assert native.load("add", [source]).add(3, 4) == 7
    assert "cannot be read" in caplog.text


def test_a_clone_carries_nothing() -> None:
    assert not carried.BUILT.exists() and carried.description() is None


def test_the_description(source: Path, carry: Any) -> None:
    built = carry(source, OTHER)
    assert carried.description() == {"folder": str(built.parent), "libraries": 1, "levels": [simd.level().name]}


def test_a_digest_is_of_one_platform(source: Path) -> None:
    here = carried.digest([source], ())
    assert here == carried.digest([source], (), system=sys.platform, machine=platform.machine())
    assert here != carried.digest([source], (), system="win32", machine="AMD64")
