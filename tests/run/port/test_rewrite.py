"""`anytorch port`: what is rewritten, what is left, and that a second run changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("libcst")

from anytorch.cli.main import main
from anytorch.run.port.files import port_file
from anytorch.run.port.rewrite import SETUP, port

HEAD = f"import torch\n\n{SETUP}"


def ported(line: str) -> str:
    """A line as it is after the import of torch and, if need be, the line that asks for the device."""
    text = port(f"import torch\n{line}\n").text
    again = port(text)
    assert again.text == text and not again.changes, "a second run changes nothing"
    return text.removeprefix(HEAD).removeprefix("import torch\n").rstrip("\n")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = x.cuda()", "x = x.to(accelerator)"),
        ("x = f(a)[0].cuda(non_blocking=True)  # why", "x = f(a)[0].to(accelerator, non_blocking=True)  # why"),
        ("x = x.cuda(rank)", "x = x.to(torch.device(accelerator.type, rank))"),
        (
            "x = x.cuda(args.gpu, non_blocking=True)",
            "x = x.to(accelerator if args.gpu is None else torch.device(accelerator.type, args.gpu), non_blocking=True)",
        ),
        ('d = torch.device("cuda:{}".format(n))', 'd = torch.device(f"{accelerator.type}:{n}")'),
        ("x = x.cuda(self.device)", "x = x.to(self.device)"),
        ('x = x.to("cuda")', "x = x.to(accelerator)"),
        ("x = x.to('cuda:1', non_blocking=True)", "x = x.to(torch.device(accelerator.type, 1), non_blocking=True)"),
        ('x = torch.zeros(3, device="cuda")', "x = torch.zeros(3, device=accelerator)"),
        (
            's = torch.load(f, map_location="cuda:0")',
            "s = torch.load(f, map_location=torch.device(accelerator.type, 0))",
        ),
        ('d = torch.device("cuda")', "d = accelerator"),
        ('d = torch.device("cuda", rank)', "d = torch.device(accelerator.type, rank)"),
        ('d = torch.device(f"cuda:{rank}")', "d = torch.device(accelerator.type, rank)"),
        (
            'd = f"cuda:{rank % torch.cuda.device_count()}"',
            'd = f"{accelerator.type}:{rank % torch.accelerator.device_count()}"',
        ),
        ('d = torch.device("cuda" if torch.cuda.is_available() else "cpu")', "d = torch.device(accelerator)"),
        ('d = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")', "d = accelerator"),
        ('d = "cuda" if torch.cuda.is_available() else "cpu"', "d = accelerator.type"),
        ('t = "cuda" if "cuda" in device else "cpu"', 't = accelerator.type if "cpu" not in device else "cpu"'),
        ('if x.device.type == "cuda": pass', 'if x.device.type != "cpu": pass'),
        ("if x.is_cuda: pass", 'if (x.device.type != "cpu"): pass'),
        ("n = torch.cuda.device_count()", "n = torch.accelerator.device_count()"),
        ("torch.cuda.synchronize()", "torch.accelerator.synchronize()"),
        ("torch.cuda.set_device(rank)", "torch.accelerator.set_device_index(rank)"),
        ("torch.cuda.manual_seed_all(seed)", "torch.manual_seed(seed)"),
        (
            "with torch.cuda.amp.autocast(enabled=use): pass",
            "with torch.amp.autocast(accelerator.type, enabled=use): pass",
        ),
        ('with torch.autocast("cuda", dtype=d): pass', "with torch.autocast(accelerator.type, dtype=d): pass"),
        ("s = torch.cuda.amp.GradScaler()", "s = torch.amp.GradScaler(accelerator.type)"),
        (
            'dist.init_process_group(backend="nccl")',
            "dist.init_process_group(backend=torch.distributed.get_default_backend_for_device(accelerator))",
        ),
        ('p.add_argument("--device", default="cuda")', 'p.add_argument("--device", default=accelerator.type)'),
        ('device = "cuda"', "device = accelerator.type"),
        ("except_ = torch.cuda.OutOfMemoryError", "except_ = torch.OutOfMemoryError"),
        ('print("cuda is a word in this sentence")', 'print("cuda is a word in this sentence")'),
    ],
)
def test_lines(before: str, after: str) -> None:
    assert ported(before) == after


@pytest.mark.parametrize(
    ("line", "mention"),
    [
        ("p = torch.cuda.get_device_properties(0)", "torch.cuda.get_device_properties"),
        ("g = torch.cuda.CUDAGraph()", "torch.cuda.CUDAGraph"),
        ('know(x, "cuda")', '"cuda"'),
        ("from torch.cuda import nvtx", "from torch.cuda import nvtx"),
        ('backend = "nccl"', '"nccl"'),
    ],
)
def test_what_is_not_understood_is_left_and_listed(line: str, mention: str) -> None:
    result = port(f"import torch\n{line}\n")
    assert result.text == f"import torch\n{line}\n" and not result.changes
    (note,) = result.left
    assert (note.line, note.before) == (2, mention) and note.why


@pytest.mark.parametrize(
    "text",
    [
        "half = torch.cuda.is_available() and torch.cuda.is_bf16_supported()\n",
        "if torch.cuda.is_available():\n    print(torch.cuda.get_device_name(0))\n",
    ],
)
def test_a_question_that_guards_what_is_left_stays(text: str) -> None:
    """On another accelerator the answer would be yes, and the next call an error."""
    result = port(f"import torch\n{text}")
    assert result.text == f"import torch\n{text}" and not result.changes
    assert {note.why for note in result.left} >= {"it guards what CUDA alone has"}


def test_a_block_that_also_computes_is_changed() -> None:
    text = port("import torch\nif torch.cuda.is_available():\n    x = x.cuda()\n    torch.cuda.ipc_collect()\n").text
    assert "if torch.accelerator.is_available():\n    x = x.to(accelerator)\n" in text


def test_imported_names() -> None:
    source = (
        "from torch.cuda.amp import autocast, GradScaler as Scaler\n\nwith autocast():\n    s = Scaler(enabled=True)\n"
    )
    text = port(source).text
    assert "from torch.amp import autocast, GradScaler as Scaler\n" in text and "import torch\n" in text
    assert "with autocast(accelerator.type):" in text and "s = Scaler(accelerator.type, enabled=True)" in text
    assert port(text).text == text


PROGRAM = '''"""A program."""

import torch

torch.cuda.manual_seed(0)


def main():
    model = torch.nn.Linear(4, 1).cuda()   # on the card
    x = torch.ones(2, 4, device="cuda")
    with torch.cuda.amp.autocast(dtype=torch.bfloat16):
        loss = model(x).float().sum()
    loss.backward()
    return loss.item(), x.is_cuda


result = main()
'''


def test_a_ported_program_runs_on_the_cpu(cpu_wheel: None, run_script: Callable[..., Any]) -> None:
    """In a process of its own: in this one webgpu may be registered, and is the accelerator then."""
    text = port(PROGRAM).text
    assert "cuda" not in text and text.startswith('"""A program."""\n') and "# on the card" in text
    found = run_script(text + "\nanswer(result=result[1], kind=accelerator.type)\n", {})
    assert found == {"result": False, "kind": "cpu"}


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, clean = tmp_path / "good.py", tmp_path / "bad.py", tmp_path / "clean.py"
    good.write_bytes(PROGRAM.replace("\n", "\r\n").encode())
    bad.write_text("def f(:\n")
    clean.write_text("import torch\nx = torch.ones(2)\n")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "other.py").write_text("x.cuda()")
    assert main(["port", str(clean), "--check"]) == 0
    assert main(["port", str(good), "--check"]) == 1 and good.read_bytes() == PROGRAM.replace("\n", "\r\n").encode()
    capsys.readouterr()
    assert main(["port", str(tmp_path)]) == 1, "a file that is not Python"
    shown = capsys.readouterr()
    assert "+    model = torch.nn.Linear(4, 1).to(accelerator)   # on the card" in shown.out
    assert "bad.py" in shown.err and "left as it is" in shown.err and "other.py" not in shown.out
    assert main(["port", str(good), "--write"]) == 0
    assert b"\r\n" in good.read_bytes() and b"\n" not in good.read_bytes().replace(b"\r\n", b"")
    assert main(["port", str(good), "--check"]) == 0 and bad.read_text() == "def f(:\n"
    assert port_file(good).diff() == ""
    assert main(["port", str(tmp_path / "nothing")]) == 2
