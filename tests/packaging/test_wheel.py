"""The wheel on a machine with no compiler and no network: everything works, by the kernels that it carries."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("torch")

from tests.packaging.conftest import ROOT, Installed
from tests.serve.starting import start_line
from tests.text.generate.conftest import make_model, make_tokenizer

from anytorch.native import carried

TEXTS = ["A cat sleeps on the sofa.", "Interest rates rose again in March.", "The kitten lies on a cushion."]
LOADED = """
import json, sys
from anytorch.cli.main import main
from anytorch.native import carried, library
for line in json.loads(sys.argv[1]):
    status = main(line)
    assert status == 0, (line, status)
used = sorted({name for name, _ in library._loaded})
for one in carried.LIBRARIES:
    for level in one.levels or [None]:
        library.load(one.name, one.paths(), level=level, flags=one.flags)
print("USED " + json.dumps(used))
print("LOADED " + json.dumps(sorted(f"{name} {path}" for name, path in library._loaded)))
"""


def test_the_wheel_has_what_it_needs_and_no_more(wheel: Path) -> None:
    assert re.fullmatch(r"anytorch-[\w.]+-py3-none-manylinux_2_17_x86_64\.manylinux2014_x86_64\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        manifest = json.loads(archive.read("anytorch/native/built/linux-x86_64/manifest.json"))
        built = {name.rpartition("/")[2] for name in names if name.startswith("anytorch/native/built/linux-x86_64/")}
        compiled = sum(archive.getinfo(name).compress_size for name in names if name.endswith(".so"))
        modes = {archive.getinfo(name).external_attr >> 16 & 0o777 for name in names if name.endswith(".so")}
    assert built == {"manifest.json", *manifest["sha256"]} and len(built) == len(carried.LIBRARIES) + 1
    assert modes == {0o755}
    assert {name.rpartition("/")[2] for name in names if "/licenses/" in name} == {
        "LICENSE", "third-party.txt", "llvm.txt", "zig.txt", "mingw-w64.txt", "python.txt",
    }  # fmt: skip
    assert not [name for name in names if not name.startswith("anytorch")], "nothing beside the package"
    assert wheel.stat().st_size + 4 * compiled < 15e6, "this has one level; the published one has five"


def test_auditwheel_agrees_with_the_tag(wheel: Path) -> None:
    pytest.importorskip("auditwheel")
    done = subprocess.run([sys.executable, "-m", "auditwheel", "show", str(wheel)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert '"manylinux_2_17_x86_64"' in " ".join(done.stdout.split()), done.stdout


def test_without_ANYTORCH_WHEEL_nothing_is_compiled_into_it(tmp_path: Path) -> None:
    """`pip install .` in a clone must not ask for zig."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (made,) = tmp_path.iterdir()
    assert made.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(made) as archive:
        assert not [name for name in archive.namelist() if "/built/" in name]


def test_info_and_a_search_by_meaning(installed: Installed, tmp_path: Path) -> None:
    assert json.loads(installed.run("info", "--json").stdout)["cpu"]["usable"] >= 1
    texts = tmp_path / "texts.txt"
    texts.write_text("\n".join(TEXTS))
    found = json.loads(installed.run("embed", str(texts), "--search", "a young cat", "--k", "2", "--json").stdout)
    assert {hit["text"] for hit in found["hits"]} == {TEXTS[0], TEXTS[2]}
    assert found["engine"]["device"] == "cpu" and installed.compiled() == []


def test_vectors_are_those_of_the_clone(
    installed: Installed, minilm: Path, tmp_path: Path, shared_libraries: Path
) -> None:
    """One compiler is GCC and the other clang: the same sums, but for the order of a few instructions."""
    import numpy as np

    from anytorch.text.embed import ArrowEngine

    code = "import sys, numpy, json; from anytorch.text.embed import ArrowEngine\n"
    code += (
        "with ArrowEngine(device='cpu') as engine: numpy.save(sys.argv[1], engine.encode(json.loads(sys.argv[2])))\n"
    )
    code += "assert 'torch' not in sys.modules"
    installed.call(installed.python, "-c", code, str(tmp_path / "vectors.npy"), json.dumps(TEXTS))
    with ArrowEngine(device="cpu") as engine:
        here = engine.encode(TEXTS)
    np.testing.assert_allclose(np.load(tmp_path / "vectors.npy"), here, atol=2e-6)
    assert installed.compiled() == []


@pytest.mark.long
def test_forecast_and_generate(installed: Installed, tmp_path: Path) -> None:
    make_model(tmp_path / "llama", "llama")
    make_tokenizer(tmp_path / "llama")
    lines = [
        ["forecast", "--sample", "--horizon", "3", "--samples", "2", "--seed", "1", "--device", "cpu"],
        ["generate", "The quick brown", "--model", str(tmp_path / "llama"), "--max-tokens", "4", "--device", "cpu"],
    ]
    told = installed.call(installed.python, "-c", LOADED, json.dumps(lines)).stdout
    loaded = json.loads(told.rpartition("LOADED ")[2])
    assert "decode" in json.loads(told.rpartition("USED ")[2].partition("\n")[0]), (
        "tokens by our C++, not by transformers"
    )
    assert len(loaded) == len(carried.LIBRARIES) and all(
        "site-packages/anytorch/native/built/linux-x86_64/" in one for one in loaded
    ), loaded
    assert installed.compiled() == []


def test_the_service_answers(installed: Installed) -> None:
    import httpx

    anytorch = str(installed.folder / "bin" / "anytorch")
    command = [anytorch, "serve", "--port", "0", "--json", "--threads", "1", "--no-forecast"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=installed.environment
    )
    too_long = threading.Timer(120, process.kill)  # else a service that never answers would hold up all tests
    too_long.start()
    try:
        url = start_line(process)["url"]
        answer = httpx.post(f"{url}/v1/embeddings", json={"input": TEXTS}, timeout=60)
        assert answer.status_code == 200 and len(answer.json()["data"]) == 3
    finally:
        process.terminate()
        process.communicate(timeout=60)
        too_long.cancel()
    assert process.returncode == 0 and installed.compiled() == []


def test_without_a_compiler_kernel_graphs_say_what_brings_one(installed: Installed) -> None:
    code = "from anytorch.graph.back import cpp\ntry: cpp.ready()\n"
    code += "except Exception as exc: print(type(exc).__name__, exc.hint)"
    told = installed.call(installed.python, "-c", code).stdout
    assert told.startswith("CompilerMissing") and "anytorch[compiler]" in told
