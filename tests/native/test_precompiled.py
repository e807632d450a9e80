"""The header of generated kernels is parsed once per machine; without that, kernels compile as before."""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from anytorch import native, settings
from anytorch.errors import CompilerFailed
from anytorch.native import compiler as compilers
from anytorch.native import precompiled

gcc = pytest.mark.skipif(sys.platform != "linux" or not shutil.which("g++"), reason="precompiled headers are GCC's")
KERNEL = '#include "lanes.h"\nEXPORT float twice(float x) { return x + x; }\n'


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompiled, "_without", set())


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every command that is run from here on."""
    run: list[str] = []
    real = compilers._run_all

    def watched(wanted: list[list[str]], environment: dict[str, str] | None) -> None:
        run.extend(" ".join(command) for command in wanted)
        real(wanted, environment)

    monkeypatch.setattr(compilers, "_run_all", watched)
    return run


def source(tmp_path: Path, text: str = KERNEL) -> Path:
    folder = tmp_path / "code"
    folder.mkdir(exist_ok=True)
    path = folder / f"kernel{len(list(folder.iterdir()))}.cpp"
    path.write_text(text)
    return path


def load(path: Path) -> object:
    function = native.load("kernel", [path], header="lanes.h").twice
    function.argtypes, function.restype = [ctypes.c_float], ctypes.c_float
    return function(3.0)


def kept() -> list[Path]:
    return sorted((settings.cache_folder() / "native").glob("lanes-*/lanes.h.gch"))


@gcc
def test_it_is_made_once_and_read_by_every_kernel(tmp_path: Path, commands: list[str]) -> None:
    assert load(source(tmp_path)) == 6.0 and load(source(tmp_path)) == 6.0
    (made,) = kept()
    assert sum("c++-header" in one for one in commands) == 1
    compiled = [one for one in commands if " -c " in one]
    assert len(compiled) == 2 and all(f"-I{made.parent} " in one for one in compiled)
    command = [*compiled[0].split(" -o ")[0].split(), "-H", "-o", os.devnull]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert f"! {made}" in listed  # GCC marks one that it read with !, one that does not fit with x


@gcc
def test_a_damaged_one_is_made_again_and_an_older_one_goes(tmp_path: Path, commands: list[str]) -> None:
    load(source(tmp_path))
    (made,) = kept()
    older = made.parent.with_name(f"lanes-{native.level().name}-older-compiler")
    older.mkdir()
    made.write_bytes(made.read_bytes()[:100_000])
    load(source(tmp_path))
    assert sum("c++-header" in one for one in commands) == 2
    assert kept() == [made] and made.stat().st_size > 1_000_000 and not older.exists()


def test_a_compiler_of_other_headers_or_none_compiles_without(
    tmp_path: Path, commands: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    real = " ".join(compilers.find_compiler().command)
    other = tmp_path / "other-cxx"
    other.write_text(
        f'#!/bin/sh\ncase "$*" in *c++-header*) for last; do :; done; echo CPCH > "$last";; *) exec {real} "$@";; esac\n'
    )
    other.chmod(0o755)
    with settings.use(compiler=str(other)), caplog.at_level(logging.INFO, "anytorch"):
        assert load(source(tmp_path)) == 6.0 and load(source(tmp_path)) == 6.0
    assert not kept() and caplog.text.count("are not GCC's") == 1
    assert sum("c++-header" in one for one in commands) == 1


@gcc
def test_one_that_stops_the_compiler_is_not_used_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """GCC stops where it cannot map the file ("had to relocate PCH")."""
    real = " ".join(compilers.find_compiler().command)
    strict = tmp_path / "strict-cxx"
    strict.write_text(f'#!/bin/sh\ncase "$*" in *lanes-*" -c "*) echo relocate; exit 1;; *) exec {real} "$@";; esac\n')
    strict.chmod(0o755)
    with settings.use(compiler=str(strict)), caplog.at_level(logging.INFO, "anytorch"):
        assert load(source(tmp_path)) == 6.0 and load(source(tmp_path)) == 6.0
        with pytest.raises(CompilerFailed, match="nothing"):
            load(source(tmp_path, '#include "lanes.h"\nnothing;\n'))
    assert caplog.text.count("relocate") == 1
