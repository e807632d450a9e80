"""`anytorch port`: what is rewritten, what is left, and that a second run changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("libcst")

from anytorch.cli.main import main
from anytorch.run.port.files import port_file
from anytorch.run.port.rewrite import port
from anytorch.run.port.setup import setup_line

SETUP = setup_line("torch", "accelerator")
ASK = "if torch.accelerator.is_available():\n"
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
        ('d = torch.device("cuda:{}".format(n))', "d = torch.device(accelerator.type, n)"),
        ('d = torch.device("cuda:%d" % n)', "d = torch.device(accelerator.type, n)"),
        ("d = torch.device('cuda:' + str(n))", "d = torch.device(accelerator.type, n)"),
        ('device = "cuda:%d" % n', 'device = "%s:%d" % (accelerator.type, n)'),
        ('device = "cuda:" + str(n)', 'device = f"{accelerator.type}:" + str(n)'),
        ("device = 'cuda:{}'.format(a['n'])", "device = '{}:{}'.format(accelerator.type, a['n'])"),
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
            'device = f"cuda:{rank % torch.cuda.device_count()}"',
            'device = f"{accelerator.type}:{rank % torch.accelerator.device_count()}"',
        ),
        ('d = torch.device("cuda" if torch.cuda.is_available() else "cpu")', "d = accelerator"),
        ('d = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")', "d = accelerator"),
        ('d = "cuda" if torch.cuda.is_available() else "cpu"', "d = accelerator.type"),
        ('t = "cuda" if "cuda" in device else "cpu"', 't = accelerator.type if "cpu" not in device else "cpu"'),
        ('if x.device.type == "cuda": pass', 'if x.device.type != "cpu": pass'),
        ("if x.is_cuda: pass", 'if (x.device.type != "cpu"): pass'),
        ("n = 4 if torch.cuda.is_available() else 1", "n = 4 if torch.accelerator.is_available() else 1"),
        ("n = torch.cuda.device_count()", "n = torch.accelerator.device_count()"),
        ("torch.cuda.synchronize()", f"{ASK}    torch.accelerator.synchronize()"),
        ("torch.cuda.set_device(rank)  # why", f"{ASK}    torch.accelerator.set_device_index(rank)  # why"),
        (
            "for i in x: torch.cuda.synchronize()",
            "for i in x: torch.accelerator.is_available() and torch.accelerator.synchronize()",
        ),
        (
            "torch.cuda.empty_cache(); y = 1",
            "torch.accelerator.is_available() and torch.accelerator.empty_cache(); y = 1",
        ),
        (
            "if torch.cuda.is_available(): torch.cuda.synchronize()",
            "if torch.accelerator.is_available(): torch.accelerator.synchronize()",
        ),
        (
            "if torch.cuda.is_available():\n    torch.cuda.empty_cache()",
            "if torch.accelerator.is_available():\n    torch.accelerator.empty_cache()",
        ),
        (
            "n = torch.cuda.max_memory_allocated() / 2**20",
            "n = (torch.accelerator.max_memory_allocated() if torch.accelerator.is_available() else 0) / 2**20",
        ),
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
        (
            "s = torch.load(f, map_location=lambda storage, loc: storage.cuda(rank))",
            "s = torch.load(f, map_location=torch.device(accelerator.type, rank))",
        ),
        ("s = torch.load(f, map_location=lambda a, b: a.cuda())", "s = torch.load(f, map_location=accelerator)"),
        ('s = torch.load(f, "cuda")', "s = torch.load(f, accelerator)"),
        ('g = torch.Generator("cuda")', "g = torch.Generator(accelerator)"),
        ('torch.set_default_device("cuda")', "torch.set_default_device(accelerator)"),
        ("torch.set_default_tensor_type(torch.cuda.FloatTensor)", "torch.set_default_device(accelerator)"),
        ("x = torch.cuda.IntTensor([0])", "x = torch.IntTensor([0]).to(accelerator)"),
        ("y = x.type(torch.cuda.LongTensor)", "y = x.to(accelerator, torch.int64)"),
        ("y = f(x).type('torch.cuda.HalfTensor')", "y = f(x).to(accelerator, torch.float16)"),
        ('c = {"device": "cuda"}', 'c = {"device": accelerator.type}'),
        ('m = Model(device="cuda")', "m = Model(device=accelerator.type)"),
        (
            'p.add_argument("--device", choices=["cuda", "cpu"])',
            'p.add_argument("--device", choices=[accelerator.type, "cpu"])',
        ),
        (
            'p.add_argument("--dist-backend", default="nccl")',
            'p.add_argument("--dist-backend", default=torch.distributed.get_default_backend_for_device(accelerator))',
        ),
        (
            'backend = "nccl" if torch.cuda.is_available() else "gloo"',
            "backend = torch.distributed.get_default_backend_for_device(accelerator)",
        ),
        ('if device.startswith("cuda"): pass', 'if not device.startswith("cpu"): pass'),
        ("x = a == str(device).startswith('cuda')", "x = a == (not str(device).startswith('cpu'))"),
        ('if device in ("cuda", "mps"): pass', 'if device != "cpu": pass'),
        ("print(f\"{x.device.type == 'cuda'}\")", "print(f\"{x.device.type != 'cpu'}\")"),
        ('print(f"{x.is_cuda}")', "print(f\"{(x.device.type != 'cpu')}\")"),
        ("x = x.to(f\"cuda:{a['n']}\")", "x = x.to(torch.device(accelerator.type, a['n']))"),
        ("device = f\"cuda:{a['n']}\"", "device = f\"{accelerator.type}:{a['n']}\""),
        (
            'd = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")',
            "d = accelerator",
        ),
        (
            'd = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"',
            "d = accelerator.type",
        ),
        (
            "with torch.cuda.amp.autocast(use, torch.bfloat16): pass",
            "with torch.amp.autocast(accelerator.type, enabled=use, dtype=torch.bfloat16): pass",
        ),
        (
            "@torch.cuda.amp.custom_fwd\ndef f(): pass",
            "@torch.amp.custom_fwd(device_type=accelerator.type)\ndef f(): pass",
        ),
        ("torch.manual_seed(s)\ntorch.cuda.manual_seed_all(s)", "torch.manual_seed(s)"),
        ("x = x.to(torch.cuda.current_device())", "x = x.to(accelerator)"),
        (
            "x = x.cuda(\n    non_blocking=True,  # why\n)",
            "x = x.to(\n    accelerator, non_blocking=True,  # why\n)",
        ),
        (
            "if torch.cuda.is_available():\n    d = torch.device('cuda')\nelse:\n    d = torch.device('cpu')",
            "d = accelerator",
        ),
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
        ('name = "cuda"', '"cuda"'),
        ('if mode == "cuda": pass', 'mode == "cuda"'),
        ('if "cuda" in devices: pass', '"cuda" in devices'),
        ('x = {"cuda": 1}', '"cuda"'),
        ("x = device == (  # why\n    'cuda'\n)", "device == (  # why\n    'cuda'\n)"),
        ("torch.backends.cudnn.benchmark = True", "torch.backends.cudnn.benchmark"),
        ("e = torch.cuda.Event(enable_timing=True)", "torch.cuda.Event"),
        ("v = torch.version.cuda", "torch.version.cuda"),
        ("a = torch.backends.mps.is_available()", "torch.backends.mps.is_available()"),
        ('n = os.environ["CUDA_VISIBLE_DEVICES"]', '"CUDA_VISIBLE_DEVICES"'),
        ("import triton.language as tl", "import triton.language as tl"),
        ("from torch.cuda import nvtx", "from torch.cuda import nvtx"),
        ('tune("nccl")', '"nccl"'),
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
        "def f(flash):\n"
        "    if not torch.cuda.is_available() or not flash:\n        return\n"
        "    print(torch.cuda.get_device_properties(torch.device('cuda')))\n",
    ],
)
def test_a_question_that_guards_what_is_left_stays(text: str) -> None:
    """On another accelerator the answer would be yes, and the next call an error."""
    result = port(f"import torch\n{text}")
    assert result.text == f"import torch\n{text}" and not result.changes
    assert {note.why for note in result.left} >= {"it guards what CUDA alone has"}


def test_a_question_whether_there_is_none_is_no_guard() -> None:
    """`torch.cuda.is_available()` would stay False on other accelerators, and the program on the CPU."""
    line = "cpu = not torch.cuda.is_available() and not torch.backends.mps.is_available()\n"
    result = port(f"import torch\n{line}")
    assert "cpu = not torch.accelerator.is_available() and not torch.backends.mps" in result.text
    assert [note.before for note in result.left] == ["torch.backends.mps.is_available()"]


@pytest.mark.parametrize("text", ["", "  \n", "\ufeff# nothing\n", "x = 1", "if x:\n\ty()\n\n\n"])
def test_a_text_without_vendors_is_given_back_as_it_is(text: str) -> None:
    assert port(text).text == text


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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("import torch.cuda.amp as amp\n\nwith amp.autocast(use):\n    pass\n", "import torch.amp as amp\n"),
        ("from torch.cuda import amp\n\ns = amp.GradScaler()\n", "from torch import amp\n"),
        (
            "from torch import cuda\n\nn = cuda.device_count()\n",
            "import torch\n\nn = torch.accelerator.device_count()\n",
        ),
        (
            "import torch\nfrom torch.cuda import device_count as n, is_available\n\nprint(n(), is_available)\n",
            "import torch\n\nprint(torch.accelerator.device_count(), torch.accelerator.is_available)\n",
        ),
        ("import torch as th\n\nx = x.cuda()\n", "import torch as th\n\naccelerator = th.accelerator"),
    ],
)
def test_other_ways_to_import(before: str, after: str) -> None:
    result = port(before)
    assert result.text.startswith(after) and not result.left and "cuda" not in result.text
    assert port(result.text).text == result.text


def test_autocast_that_is_handed_on_stays() -> None:
    """Whoever calls it does so without a device."""
    text = "from torch.cuda.amp import autocast\n\ncontext = autocast if use else nullcontext\n"
    result = port(text)
    assert result.text == text and [note.line for note in result.left] == [1, 3]


@pytest.mark.parametrize(
    "taken",
    [
        "accelerator = Accelerator()",
        "def f(accelerator): return accelerator",
        "from accelerate import x as accelerator",
        "for accelerator in []: pass",
    ],
)
def test_a_name_that_the_program_has_is_not_taken(taken: str) -> None:
    text = port(f"import torch\n{taken}\nx = x.cuda()\n").text
    assert "x = x.to(accelerator_device)" in text and taken in text
    assert port(text).text == text
    options = port("import torch\nt = Trainer(accelerator='gpu')\nx = x.cuda()\n").text
    assert "x.to(accelerator)" in options, "a keyword of another function's is no name of the module's"


@pytest.mark.parametrize(
    ("before", "wanted"),
    [
        (
            '"""Doc."""\nfrom __future__ import annotations\ndevice = "cuda"\nimport os\n',
            f'"""Doc."""\nfrom __future__ import annotations\nimport torch\n\n{SETUP}device = accelerator.type\nimport os\n',
        ),
        (
            'import torch\nos.environ["A"] = "0"\nx = x.cuda()\nimport late\n',
            f'import torch\nos.environ["A"] = "0"\n\n{SETUP}x = x.to(accelerator)\nimport late\n',
        ),
        (
            "try:\n    import torch\nexcept ImportError:\n    torch = None\ndef f(x):\n    return x.cuda()\n",
            f"try:\n    import torch\n    {SETUP}except ImportError:\n    torch = None\n"
            "def f(x):\n    return x.to(accelerator)\n",
        ),
        ("x = x.cuda()\n", f"import torch\n\n{SETUP}x = x.to(accelerator)\n"),
        ("\ufeffx = x.cuda()\n", f"\ufeffimport torch\n\n{SETUP}x = x.to(accelerator)\n"),
    ],
)
def test_where_the_line_goes(before: str, wanted: str) -> None:
    text = port(before).text
    assert text == wanted and port(text).text == text


def test_a_line_is_kept_on_purpose() -> None:
    source = (
        "import torch\n"
        'if torch.cuda.is_available():  # anytorch: keep\n    print("a")\n'
        'x = know("cuda")  # measured there; anytorch: keep\n'
        'y = torch.zeros(\n    3,\n    device="cuda",  # anytorch: keep\n)\n'
    )
    result = port(source)
    assert result.text == source and not result.left and not result.changes
    assert port(source.replace("anytorch: keep", "anytorch keeps")).left


def test_a_cuda_method_of_the_programs_own() -> None:
    source = "class Batch:\n    def cuda(self):\n        self.x = self.x.cuda()\n        return self\n"
    result = port(source)
    assert result.text == source and [note.line for note in result.left] == [2, 3]


def test_names_that_are_not_torchs() -> None:
    """A function of another's that is called device, and a local variable that is called torch."""
    source = 'from mine import device\n\nd = device("cuda")\n\ndef f(torch):\n    return torch.cuda.synchronize()\n'
    result = port(source)
    assert result.text == source and [note.line for note in result.left] == [3]


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
    assert "bad.py" in shown.err and "left unchanged" in shown.err and "other.py" not in shown.out
    assert main(["port", str(good), "--write"]) == 0
    assert b"\r\n" in good.read_bytes() and b"\n" not in good.read_bytes().replace(b"\r\n", b"")
    assert main(["port", str(good), "--check"]) == 0 and bad.read_text() == "def f(:\n"
    assert port_file(good).diff() == ""
    assert main(["port", str(tmp_path / "nothing")]) == 2


def test_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """1 for a file that names a vendor, whether it could be rewritten or not; each mention with its file and line."""
    source = tmp_path / "a.py"
    for text, status in (
        ("import torch\nx = torch.ones(2)\n# cuda\nprint('needs cuda')\n", 0),
        ("import torch\nx = x.cuda()\n", 1),
        ("import torch\ne = torch.cuda.Event()\n", 1),
        ("import torch\nuse(device='cuda')\n", 1),
        ("import torch\ne = torch.cuda.Event()  # anytorch: keep\n", 0),
        ("def f(:\n", 1),
    ):
        source.write_text(text)
        assert main(["port", "--check", str(source)]) == status, text
        assert source.read_text() == text
        shown = capsys.readouterr()
        assert (f"{source}:2: " in shown.out + shown.err) == (status == 1 and text.startswith("import"))


CHOICE = "Tensor = torch.cuda.FloatTensor if cuda else torch.{}\n"


@pytest.mark.parametrize("host", ["FloatTensor", "Tensor"])
@pytest.mark.parametrize("asked", ["torch.cuda.is_available()", "True if torch.cuda.is_available() else False"])
def test_a_name_for_a_tensor_type(asked: str, host: str) -> None:
    """As in many GANs: a name is CUDA's type or the host's. It stays the host's, and what it makes is moved."""
    uses = "z = Variable(Tensor(n, 1).fill_(1.0))\ny = x.type(Tensor)"
    assert ported(f"cuda = {asked}\n{CHOICE.format(host)}{uses}") == (
        f"cuda = {asked.replace('cuda', 'accelerator')}\nTensor = torch.{host}\n"
        "z = Variable(Tensor(n, 1).to(accelerator).fill_(1.0))\ny = x.to(accelerator, torch.float32)"
    )


@pytest.mark.parametrize(
    "source",
    [
        "cuda = args.cuda\n" + CHOICE + "x = Tensor(3)",  # the user's choice
        "cuda = torch.cuda.is_available()\n" + CHOICE + "f(Tensor)",  # nobody knows what is done with it there
        "cuda = torch.cuda.is_available()\ndef f(cuda):\n    " + CHOICE + "    return Tensor(3)",
        "cuda = torch.cuda.is_available()\n" + CHOICE + "def f(Tensor):\n    return Tensor(3)",
    ],
)
def test_a_name_for_a_tensor_type_that_stays(source: str) -> None:
    source = f"import torch\n{source.format('FloatTensor')}\n"
    found = port(source)
    assert [note.before for note in found.left] == ["torch.cuda.FloatTensor"]
    assert found.text.replace("torch.accelerator.is_available", "torch.cuda.is_available") == source
