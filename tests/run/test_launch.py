"""`anytorch run`: the program runs as under `python SCRIPT`, its children too, and the report tells what was done."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anytorch.devices.choose import resolve
from anytorch.errors import UsageError
from anytorch.run import launch
from anytorch.run.child import DEVICE, MAIN, REPORT, is_main

REPOSITORY = Path(__file__).resolve().parents[2]


def run(
    *arguments: str, env: dict[str, str] | None = None, cwd: Path | None = None, told: str | None = None
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(REPOSITORY / "src"), (env or {}).pop("PYTHONPATH", "")]).rstrip(os.pathsep)
    return subprocess.run(
        [sys.executable, "-m", "anytorch", "run", *arguments],
        env={**os.environ, **(env or {}), "PYTHONPATH": path},
        cwd=cwd,
        input=told,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


PROGRAM = """
import json, sys
import torch
if __name__ == "__main__":
    x = torch.ones(2, device="cuda")
    print(json.dumps({
        "argv": sys.argv, "file": __file__, "path": sys.path[0], "name": __name__,
        "available": torch.cuda.is_available(), "device": str((x + 1).device),
        "folder": [p for p in sys.path if p.endswith("run/site")],
    }))
    sys.exit(7)
"""


def test_as_under_python(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    done = run("--device", "cpu", str(script), "--device", "x", "-m", "--json", cwd=tmp_path)
    assert done.returncode == 7, done.stderr
    told = json.loads(done.stdout)
    assert told["argv"] == [str(script), "--device", "x", "-m", "--json"] and told["file"] == str(script)
    assert told["path"] == str(tmp_path) and told["name"] == "__main__" and told["folder"] == []
    assert told["available"] is True and told["device"] == "cuda:0"
    assert done.stderr.count("stands in for cuda") == 1 and done.stderr.startswith("anytorch: cpu (")


def test_breakpoint(tmp_path: Path) -> None:
    """The debugger reads standard input, in the program's own frame."""
    script = tmp_path / "program.py"
    script.write_text("import torch\nx = torch.ones(2, device='cuda')\nbreakpoint()\nprint('after it')\n")
    done = run("--device", "cpu", str(script), told="p x.is_cuda, __name__\nc\n")
    assert done.returncode == 0, done.stderr
    assert "(True, '__main__')" in done.stdout and "after it" in done.stdout and f"> {script}(" in done.stdout


def test_as_a_module(tmp_path: Path) -> None:
    """`python -m anytorch.run` is `anytorch run`."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    path = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    line = [sys.executable, "-m", "anytorch.run", "--device", "cpu", str(script), "x"]
    done = subprocess.run(line, env=path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 7 and json.loads(done.stdout)["argv"] == [str(script), "x"], done.stderr


def test_a_module_and_the_json_report(tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "train.py").write_text(
        "import sys, torch\n"
        "for _ in range(3):\n"
        "    torch.ones(2).cuda()\n"
        "torch.cuda.nvtx.mark('here')\n"
        "print('argument', sys.argv[1])\n"
    )
    done = run("--json", "--device", "cpu", "-m", "package.train", "five", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    first, last = done.stdout.splitlines()
    report = json.loads(last)
    assert first == "argument five" and report["device"] == "cpu" and report["peak_memory"] > 0
    (moved,) = [entry for entry in report["redirected"] if entry["what"] == ".cuda()"]
    assert moved["count"] == 3 and moved["first"] == f"{tmp_path / 'package' / 'train.py'}:3"
    assert [entry["what"] for entry in report["ignored"]] == ["torch.cuda.nvtx.mark()"] and report["refused"] == []
    assert report["on_cpu"] == {} and report["seconds"] > 0
    assert report["device_seconds"] >= report["cpu_seconds"] - 0.1 > 0, "the CPU is the device"


def test_a_traceback_and_the_report_after_it(tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import torch\nx = torch.ones(2).cuda()\nraise ValueError('of the program')\n")
    done = run("--device", "cpu", "--report", str(script))
    assert done.returncode == 1
    assert f'File "{script}", line 3, in <module>' in done.stderr and "ValueError: of the program" in done.stderr
    assert "anytorch/run" not in done.stderr.partition("Traceback")[2].partition("anytorch: cpu")[0]
    assert "redirected:" in done.stderr and f"{script}:2" in done.stderr


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_signals_arrive(tmp_path: Path) -> None:
    script = tmp_path / "waits.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGTERM)\n")
    assert run("--device", "cpu", str(script)).returncode == -signal.SIGTERM


CHILDREN = """
import os, subprocess, sys
import torch
import torch.multiprocessing as mp


def work(rank, queue):
    queue.put((torch.cuda.is_available(), str(torch.ones(2).cuda().device)))


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        assert torch.cuda.is_available()
        return torch.full((2,), float(index)).cuda().cpu()


if __name__ == "__main__":
    for context in ("spawn", "fork"):
        loader = torch.utils.data.DataLoader(Data(), num_workers=1, pin_memory=True, multiprocessing_context=context)
        assert [batch.cuda().sum().item() for batch in loader] == [0.0, 2.0], context
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, (queue,), nprocs=1)
    assert queue.get() == (True, "cuda:0")
    told = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.cuda.is_available())"], capture_output=True, text=True
    )
    assert told.stdout.strip() == "True", told
    print("all of them")
"""


@pytest.mark.long
def test_child_processes(tmp_path: Path) -> None:
    script = tmp_path / "children.py"
    script.write_text(CHILDREN)
    done = run("--json", "--device", "cpu", str(script))
    assert done.returncode == 0 and done.stdout.startswith("all of them\n{"), done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    (moved,) = [entry for entry in report["redirected"] if entry["what"] == ".cuda()"]
    assert moved["count"] == 9, "two in each loader's worker, four batches, one in a spawned process"
    assert report["processes"] >= 4, "the program, a forked and a spawned worker, a spawned process"


DISTRIBUTED = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("nccl")
rank = int(os.environ["LOCAL_RANK"])
x = torch.ones(2, device=0) * (rank + 1)
dist.all_reduce(x)
sys.stdout.write(f"sum {x.tolist()}\\n")
dist.destroy_process_group()
"""


@pytest.mark.long
def test_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "distributed.py"
    script.write_text(DISTRIBUTED)
    done = run("--device", "cpu", "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script))
    assert done.returncode == 0 and done.stdout.count("sum [3.0, 3.0]") == 2, done.stderr


def test_reports_together() -> None:
    from anytorch.run.report import together, words

    def one(count: int, peak: int | None) -> dict[str, Any]:
        entry = {"what": ".cuda()", "count": count, "first": f"a.py:{count}"}
        lists = {"redirected": [entry], "ignored": [], "refused": [], "on_cpu": {"svd": count}}
        return {
            "device": "cpu",
            "name": "x",
            "processes": 1,
            "peak_memory": peak,
            "seconds": 2,
            "cpu_seconds": 1.5,
            "device_seconds": None if peak is None else 0.25,
            **lists,
        }

    merged = together([one(2, None), one(3, 2**20), one(4, 2**30)])
    assert merged["redirected"] == [{"what": ".cuda()", "count": 9, "first": "a.py:2"}] and merged["on_cpu"] == {
        "svd": 9
    }
    assert (merged["processes"], merged["peak_memory"], merged["cpu_seconds"]) == (3, 2**30, 4.5)
    assert merged["device_seconds"] == 0.5 and "the CPU, which is the device, worked 0.5 s" in words(merged)
    other = {**merged, "device": "webgpu:0", "device_seconds": None}
    assert "the device has no clock that anytorch reads, the CPU 4.5 s" in words(other)
    assert "in 3 processes" in words(merged) and "peak memory 1,024 MiB" in words(merged) and "9  svd" in words(merged)


def test_another_sitecustomize_is_still_read(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.of_the_site = 5\n")
    script = tmp_path / "program.py"
    script.write_text(
        "import torch, sitecustomize\nprint(of_the_site, torch.cuda.is_available(), sitecustomize.__file__)"
    )
    done = run("--device", "cpu", str(script), env={"PYTHONPATH": str(tmp_path)})
    assert done.stdout.split() == ["5", "True", str(tmp_path / "sitecustomize.py")], done.stderr


def test_a_program_without_torch_pays_nothing(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("import sys\nprint('torch' in sys.modules, 'anytorch.devices' in sys.modules)")
    done = run("--device", "cpu", "--report", str(script))
    assert done.stdout.split() == ["False", "False"], done.stderr


def test_flash_attention_before_torch(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text("from flash_attn import flash_attn_func\nimport torch\nprint(flash_attn_func.__module__)")
    assert run("--device", "cpu", str(script)).stdout.strip() == "anytorch.run.flash_attention"


def test_mistakes(tmp_path: Path) -> None:
    missing = run("--device", "cpu", str(tmp_path / "nothing.py"))
    assert missing.returncode == 2 and "there is no file" in missing.stderr
    with pytest.raises(UsageError, match="no program was named"):
        launch.check([], module=False)
    unknown = run("--device", "gpux", str(tmp_path))
    assert unknown.returncode == 2 and "unknown device" in unknown.stderr


def test_the_programs_own_options_are_not_ours() -> None:
    from anytorch.cli.parser import own_words

    assert own_words(["run", "--device", "cpu", "a.py", "--json"]) == ["run", "--device", "cpu"]
    assert own_words(["--json", "run", "--report", "-m", "a", "-v"]) == ["--json", "run", "--report"]
    assert own_words(["info", "--json"]) == ["info", "--json"]


def test_cuda_itself_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found = resolve("cpu")
    real = replace(found, chosen=replace(found.chosen, torch_type="cuda", backend="cuda", name="H200"))
    before = {"PATH": "/bin", "PYTHONPATH": "x", DEVICE: "webgpu:0", MAIN: "1", REPORT: "text"}
    assert launch.environment(real, "text", before) == {"PATH": "/bin", "PYTHONPATH": "x"}
    assert "runs as it is" in launch.words(real)


def test_the_main_process() -> None:
    assert is_main(str(os.getpid())) and is_main(f"of {os.getppid()}")
    assert not is_main("") and not is_main(str(os.getppid())) and not is_main("of 1x")


@pytest.mark.long
def test_on_webgpu(tmp_path: Path, device: str) -> None:
    if device != "webgpu":
        return
    script = tmp_path / "program.py"
    script.write_text(
        "import torch\n"
        "model = torch.nn.Linear(3, 2).cuda()\n"
        "print(model(torch.ones(1, 3, device='cuda')).shape, torch.linalg.svd(torch.eye(2).cuda())[1].device)\n"
    )
    done = run("--device", "webgpu", "--json", str(script))
    assert done.returncode == 0, done.stderr
    report: Any = json.loads(done.stdout.splitlines()[-1])
    assert report["device"].startswith("webgpu") and any("svd" in name for name in report["on_cpu"])
    assert 0 < report["device_seconds"] < report["seconds"], "by the GPU's own clock"


PROCESSES = """
import torch
import torch.multiprocessing as mp


class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.full((2,), float(index))


def work(rank, queue):
    x = torch.ones(2, device="cuda") * (rank + 2)
    queue.put((str(x.device), x.sum().item()))


if __name__ == "__main__":
    scale = torch.full((2,), 2.0).cuda()
    for context in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(Data(), 2, num_workers=1, pin_memory=True, multiprocessing_context=context)
        assert [(batch.cuda() * scale).sum().item() for batch in loader] == [4.0, 20.0], context
    queue = mp.get_context("spawn").SimpleQueue()
    mp.spawn(work, (queue,), nprocs=2)
    assert sorted([queue.get(), queue.get()]) == [("cuda:0", 4.0), ("cuda:0", 6.0)]
    print("all of them")
"""


@pytest.mark.slow
def test_processes_on_webgpu(tmp_path: Path, device: str) -> None:
    """Workers that leave the device to their parent, and processes that open it themselves."""
    if device != "webgpu":
        return
    script = tmp_path / "processes.py"
    script.write_text(PROCESSES)
    done = run("--device", "webgpu", str(script))
    assert done.returncode == 0 and done.stdout.startswith("all of them"), done.stderr
