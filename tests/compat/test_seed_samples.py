"""Every Python sample of the five documents that concerns devices runs as written, on a machine with only a CPU.

`samples/` holds the samples word for word. Those that show an NPU also run, as written, on the compiled test device.
What needs work that has not been done yet is listed in LATER, so that none is forgotten.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SAMPLES = Path(__file__).parent / "samples"
SEEDS = REPOSITORY.parent / "shared" / "seeds"
DOCUMENTS = {
    "1": "1-ai-os-diffusion.md",
    "2": "2-yirage.md",
    "3": "3-kronos.md",
    "4": "4-custom-backend.md",
    "5": "5-virtual-blackwell.md",
}

YIRAGE = "import yirage as yr\n"
# The published repositories as huggingface_hub keeps them, with the tiny weights inside: tests have no network.
KRONOS_HUB = """
import os, pathlib, shutil
from anytorch.forecast.model.pretrained import tiny_folder
os.environ.update(HF_HOME=os.path.abspath("hub"), HF_HUB_OFFLINE="1")
for name, kind in (("Kronos-Tokenizer-base", "tokenizer"), ("Kronos-small", "model")):
    repository = pathlib.Path("hub", "hub", f"models--NeoQuasar--{name}")
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(tiny_folder(kind), repository / "snapshots" / ("0" * 40))
"""
FALLBACK = "DeviceFallbackWarning: device 'cuda' cannot be used"
# The folder the document names.
MINILM = """import os
from anytorch.text.checkpoints.locate import find_model
os.makedirs("models"); os.symlink(find_model(None), "models/minilm")
"""
ENGINE = MINILM + "from ai_os_diffusion.inference import ArrowEngine\n"


@dataclass(frozen=True)
class Sample:
    """What a sample must print, and what the document had brought into play before it (`given`)."""

    prints: tuple[str, ...] = ()  # patterns for standard output
    says: tuple[str, ...] = ()  # texts on standard error
    given: str = ""
    then: str = ""  # checks on what the sample left behind
    npu: tuple[str, ...] = ()  # patterns for standard output on a machine with two NPUs


# fmt: off
RUN: dict[str, Sample] = {
    "1_00_detect_cuda": Sample(),
    "1_01_detect_rocm": Sample(),
    "1_02_detect_xpu": Sample(
        then="assert ipex.xpu is torch.xpu and ipex.optimize(torch.nn.ReLU()) is not None",
    ),
    "1_03_detect_mps": Sample(),
    "1_04_detect_vulkan": Sample(),
    "1_05_best_device": Sample(then="assert device == 'cpu'"),
    "1_06_encode": Sample(
        ("Using device: cpu",), given=MINILM,
        then="assert embeddings.shape == (1, 384) and abs((embeddings ** 2).sum() - 1) < 1e-5",
    ),
    "1_07_forced_device": Sample(
        says=(FALLBACK,), given=ENGINE, then="assert engine.encode('x').shape == (384,) and engine.device == 'cpu'"
    ),
    "1_08_several_gpus": Sample(),
    "1_09_autocast": Sample(
        given=ENGINE + "import torch\ndevice = 'cpu'\nengine = ArrowEngine('./models/minilm', device)\ntexts = ['a', 'b']\n",
        then="assert embeddings.shape == (2, 384) and embeddings.dtype == 'float32'",
    ),
    "1_10_quantization": Sample(
        says=(FALLBACK,), given=ENGINE,
        then="assert engine.quantization == 'int8'\n"
        "exact = ArrowEngine('./models/minilm', 'cpu').encode('a few words')\n"
        "assert 0.99 < (engine.encode('a few words') * exact).sum() < 1.0001",
    ),
    "1_11_mps_fallback": Sample(then="assert os.environ['PYTORCH_ENABLE_MPS_FALLBACK'] == '1'"),
    "2_00_basic_use": Sample((r"Available backends: \['cpu'\]", "Current backend: cpu"), (FALLBACK,)),
    "2_01_graphs": Sample(
        says=(FALLBACK, "DeviceFallbackWarning: device 'mps' cannot be used"), given=YIRAGE,
        then="import torch\n"
        "for graph in (cuda_graph, cpu_graph, mps_graph):\n"
        "    x, w = graph.new_input((4, 16), dtype=yr.float32), graph.new_input((16, 8), dtype=yr.float32)\n"
        "    graph.mark_output(graph.silu(graph.matmul(x, w)))\n"
        "    given = [torch.randn(4, 16), torch.randn(16, 8)]\n"
        "    (y,) = graph(inputs=given)\n"
        "    torch.testing.assert_close(y, torch.nn.functional.silu(given[0] @ given[1]))",
    ),
    "2_02_persistent_kernel": Sample(
        says=("DeviceFallbackWarning: device 'mps' cannot be used",),
        given=YIRAGE + "import torch\n"
        "step, tokens = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 1024, dtype=torch.int64)\n",
        then="words = mpk.attach_input(torch.eye(8), name='words')\n"
        "ids = mpk.attach_input(torch.zeros(1, 1, dtype=torch.int64), name='ids')\n"
        "x = mpk.new_tensor((1, 8), dtype='float32', name='x')\n"
        "mpk.embed_layer(ids, words, x)\n"
        "y = mpk.new_tensor((1, 8), dtype='float32', name='y')\n"
        "mpk.linear_layer(x, mpk.attach_input(torch.eye(8).roll(1, 0), name='next'), y)\n"
        "mpk.argmax_layer(y, mpk.new_tensor((1, 1), dtype='int64', name='chosen'))\n"
        "mpk.compile()()\n"
        "assert tokens[0, :4].tolist() == [0, 1, 2, 0] and step.tolist() == [2]",  # 2 is its eos_token_id
    ),
    "2_03_auto_configure": Sample((r"Optimal config: \{.*'backend': 'cpu'",), given=YIRAGE),
    "2_04_performance": Sample(
        (r"Memory usage: \{.*'available': False", r"Performance results: \{.*'cpu'"), given=YIRAGE,
    ),
    "2_05_configuration": Sample(
        says=(FALLBACK,), given=YIRAGE, then="import json; json.load(open('optimal_config.json')); assert config"
    ),
    "2_06_tune_cuda": Sample(
        says=(FALLBACK,), given=YIRAGE, then="assert yr.get_backend().value == 'cpu' and mpk.device.type == 'cpu'"
    ),
    "2_07_tune_cpu": Sample(
        given=YIRAGE, then="assert yr.get_backend().value == 'cpu' and 1 <= mpk.num_workers <= os.cpu_count()"
    ),
    "2_08_tune_mps": Sample(
        says=("DeviceFallbackWarning: device 'mps' cannot be used",), given=YIRAGE, then="assert mpk.device.type == 'cpu'"
    ),
    "2_09_backend_missing": Sample((r"Available: \['cpu'\]",), given=YIRAGE),
    "2_10_memory_short": Sample((r"Memory status: \{.*'total_gb': \d+\.\d+",), given=YIRAGE),
    "2_11_debug": Sample(
        then="from anytorch import settings; assert settings.get('log_level') == 'DEBUG'\n"
        "import yirage; yirage.get_backend()"
    ),
    "2_12_simple_llm": Sample(
        ("Using backend: cpu", r"Output shape: torch.Size\(\[1, 128, 768\]\)", "Backend used: cpu")
    ),
    "2_13_compare_backends": Sample((r"^cpu: \d+\.\d\d ms$", r"Best backend: cpu \(\d+\.\d\d ms\)")),
    "5_00_balanced": Sample(
        ("虚拟Blackwell已全局启用", r"加速设备: +cpu", "FP4量化: .*❌", r"Flash Attention: ✅ 启用 \(\w+\)"),
        then="assert vb.is_enabled(); vb.disable(); assert not vb.is_enabled()", npu=(r"加速设备: +npu:0 \(NPU\)",),
    ),
    "3_00_predictor": Sample(("^使用设备: cpu$",), given=KRONOS_HUB, then="assert str(predictor_cpu.device) == 'cpu'"),
    "4_00_custom_device": Sample(then="assert CustomDevice().device_type == 'custom'"),
    "4_01_custom_tensor": Sample(
        given="import numpy as np\nfrom pytorch_custom_backend import CustomDevice\n",
        then="from pytorch_custom_backend import CustomTensor as Ours\n"
        "theirs, ours = CustomTensor([1, 2]), Ours([1, 2])\n"
        "assert (theirs.dtype, theirs.shape) == (ours.dtype, ours.shape) and (theirs.data == ours.data).all()",
    ),
    "4_02_basic_use": Sample(
        ("^Using device: custom_gpu:0$", r"^Addition result: .*\[ 6\., +8\., 10\., 12\.\]",
         r"^Multiplication result: .*\[ 5\., 12\., 21\., 32\.\]",
         r"^Matrix multiplication: \(3, 4\) @ \(4, 2\) = \(3, 2\)$", r"^Neural network: \(2, 10\) -> \(2, 5\)$"),
        given="import numpy as np\n",
    ),
    "4_03_training": Sample((r"^Epoch 1, Loss: \d+\.\d{4}$", r"^Epoch 10, Loss: \d+\.\d{4}$")),
    "4_04_accelerated_backend": Sample(then="assert GPUAcceleratedBackend().use_opencl"),
    "4_05_autograd_tensor": Sample(
        given="from pytorch_custom_backend import CustomTensor\n",
        then="x = AutogradTensor([1, 2], requires_grad=True)\n"
        "y = (x * x).sum(); y.backward(); assert x.grad.tolist() == [2, 4]",
    ),
    "4_06_custom_adam": Sample(then="assert CustomAdam([]).lr == 0.001"),
    "4_07_debug_logging": Sample(
        says=("DEBUG:__main__:Tensor shape: (2, 3)",),
        given="from pytorch_custom_backend import CustomTensor\ntensor = CustomTensor([[1, 2, 3], [4, 5, 6]])\n",
    ),
    "4_08_profiling": Sample((r"^my_computation took \d+\.\d{4} seconds$",), then="my_computation()"),
    "5_01_name_npu": Sample((r"^cpu\ncpu$",), npu=("^npu:0\ncpu$",)),
    "5_02_unified_interface": Sample(("^cpu$",), npu=("^npu\nNPU.*\nnpu$",)),
    "5_03_device_manager": Sample(
        ("^cpu$", r"'total_devices': 1, 'cuda_devices': 0, 'npu_devices': 0"),
        then="assert [d.type for d in devices] == [best_device.type] == ['cpu']",
        npu=(r"^npu:0$", r"'total_devices': 3, 'cuda_devices': 0, 'npu_devices': 2", "'npu:0': {'device_name': '"),
    ),
    "5_04_device_info": Sample(
        ("'cuda_available': False, 'npu_available': False, 'device_count': 1, .*'device_type': 'cpu'",),
        npu=("'cuda_available': False, 'npu_available': True, 'device_count': 2, .*'device_type': 'npu'",),
    ),
    "5_05_memory": Sample(
        (r"^\{'ram': \{'total_gb': .*, 'vram': \{\}, 'npu_memory': \{\}\}$",),
        npu=(r"'vram': \{\}, 'npu_memory': \{'npu_0': \{'allocated_gb': 0.0, 'reserved_gb': 0.0, 'max_all",),
    ),
    "5_06_vgpu_stack": Sample(
        then="import torch; stack.register('a', torch.arange(4.0)); assert stack.access('a').tolist() == [0, 1, 2, 3]"
    ),
    "5_07_seed": Sample(
        then="import torch; first = torch.rand(3); set_seed(42); assert torch.equal(first, torch.rand(3))"
    ),
    "5_08_training": Sample(("虚拟Blackwell已全局启用", r": cpu \(CPU\)$", r"Epoch 1: Loss = \d", r"Epoch 10: Loss = \d")),
    "5_09_several_npus": Sample(
        (r"NPU",), given="from torch import nn\nmodel = nn.Linear(2, 2)\n",
        then="assert npu_devices == [] and isinstance(model, nn.Linear)",
        # torch's DataParallel itself refuses devices other than CUDA's, so there the sample stops at its own limit.
    ),
    "5_13_manager_methods": Sample(
        given="from apt_model.optimization.npu_backend import get_device_manager\ndevice = 'cpu'\n"
    ),
    "5_15_memory_mode": Sample(
        ("模式: +memory", "权重格式: +int4", "梯度检查点: +✅"),
        given="import apt_model.optimization.vb_global as vb\n",
    ),
    "5_16_cleanup": Sample(),
}
# fmt: on

# Written for an NPU that is there: `torch.device("npu:0")` is torch's own call, and torch knows the type only once a
# plug-in has registered it.
NEEDS_NPU: dict[str, Sample] = {
    "5_12_device_backend": Sample(
        given="import torch\nfrom apt_model.optimization.npu_backend import DeviceBackend\ntensor = torch.ones(4)\n",
        then="assert backend.is_available() and backend.device_count() == 2\n"
        "assert backend.to_device(tensor).device == torch.device('npu:0')\n"
        "assert backend.max_memory_allocated(index=0) > 0",
    ),
    "5_14_wrong_device": Sample(
        given="import torch\nmodel = torch.nn.Linear(2, 2)\n",
        then="assert next(model.parameters()).device == torch.device('npu:0') and device.type == 'npu'",
    ),
}

# The shapes of two dictionaries, not programs; test_system.py holds the answers to them.
SHAPES = ("5_10_device_info_keys", "5_11_memory_info_keys")

# (document, block): what it waits for. `test_no_sample_is_forgotten` keeps this complete.
LATER: dict[tuple[str, int], str] = {}

# Lines left out of a copy, and why; every other line of a block is there.
LEFT_OUT: dict[str, tuple[str, ...]] = {}


def text_of(name: str) -> str:
    """The sample itself: all but the first line, which says where it is from."""
    return (SAMPLES / f"{name}.py").read_text(encoding="utf-8").partition("\n")[2]


def run_sample(
    name: str, sample: Sample, folder: Path, run_python: Callable[..., Any], cache: Path, extra: Path | None = None
) -> Any:
    program = folder / f"{name}.py"
    program.write_text(f"{sample.given}{text_of(name)}\n{sample.then}\n", encoding="utf-8")
    path = [REPOSITORY / "compat" / "gitSource", REPOSITORY / "compat" / "shims", *([extra] if extra else [])]
    # In a process that has torch already: what the end of its `import torch` does is done again, where there is a plug-in.
    code = (
        f"import os, runpy, sys, torch; os.chdir({str(folder)!r}); sys.argv = [{str(program)!r}]\n"
        + ("torch._import_device_backends()\n" if extra else "")
        + f"runpy.run_path({str(program)!r}, run_name='__main__')"
    )
    environment = {"PYTHONWARNINGS": None, "ANYTORCH_CACHE_DIR": str(cache)}
    done = run_python(code, env=environment, path=path, timeout_s=300, check=False, warm=True)
    assert done.returncode == 0, f"{name}: exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def check_prints(patterns: tuple[str, ...], output: str) -> None:
    for pattern in patterns:
        assert re.search(pattern, output, re.MULTILINE), f"{pattern!r} not in\n{output}"


@pytest.mark.long
@pytest.mark.parametrize("name", RUN)
def test_runs_on_a_cpu(
    name: str, tmp_path: Path, run_python: Callable[..., Any], shared_cache: Callable[[str], Path]
) -> None:
    sample = RUN[name]
    done = run_sample(name, sample, tmp_path, run_python, shared_cache("seeds"))
    check_prints(sample.prints, done.stdout)
    for text in sample.says:
        assert text in done.stderr, f"{text!r} not in\n{done.stderr}"
    if not sample.says:
        assert "Warning" not in done.stderr, done.stderr


@pytest.fixture(scope="module")
def npu_machine(npu_extension: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PYTHONPATH: every process with it has a torch with two (compiled, CPU-backed) NPUs."""
    plugin: Path = npu_extension.plugin(tmp_path_factory.mktemp("npu"))
    return plugin


@pytest.mark.parametrize("name", [*(name for name, sample in RUN.items() if sample.npu), *NEEDS_NPU])
def test_runs_on_an_npu(
    name: str, tmp_path: Path, npu_machine: Path, run_python: Callable[..., Any], shared_cache: Callable[[str], Path]
) -> None:
    sample = RUN.get(name) or NEEDS_NPU[name]
    if name in RUN:  # its checks are those of a machine without an NPU
        sample = Sample(sample.npu, given=sample.given)
    done = run_sample(name, sample, tmp_path, run_python, shared_cache("seeds-npu"), extra=npu_machine)
    check_prints(sample.prints, done.stdout)


# --- the copies are the documents' own text --------------------------------------------------------------------------


def python_blocks(document: Path) -> list[str]:
    """The ```python blocks of a Markdown file, without the indentation of the list item they may stand in."""
    found: list[str] = []
    inside: list[str] | None = None
    fence = ""
    for line in document.read_text(encoding="utf-8").splitlines():
        opened = re.match(r"^(\s*)```(\w*)\s*$", line)
        if inside is None and opened:
            inside, fence, indent = [], opened[2], opened[1]
        elif inside is not None and opened and not opened[2]:
            if fence == "python":
                found.append("\n".join(inside))
            inside = None
        elif inside is not None:
            inside.append(line[len(indent) :] if line.startswith(indent) else line.strip())
    return found


def needs_seeds() -> None:
    if not SEEDS.is_dir():
        pytest.skip(f"the documents are not at {SEEDS}; the copies in samples/ are what the other tests run")


def names() -> list[str]:
    return sorted(path.stem for path in SAMPLES.glob("*.py"))


@pytest.mark.parametrize("name", names())
def test_copy_is_the_documents_text(name: str) -> None:
    needs_seeds()
    document, block = name.split("_")[0], int(name.split("_")[1])
    lines = python_blocks(SEEDS / DOCUMENTS[document])[block].splitlines()
    assert all(line in lines for line in LEFT_OUT.get(name, ()))
    lines = [line for line in lines if line not in LEFT_OUT.get(name, ())]
    assert text_of(name).splitlines() == lines


def test_no_sample_is_forgotten() -> None:
    needs_seeds()
    copied = {(name.split("_")[0], int(name.split("_")[1])) for name in names()}
    every = {(key, n) for key, document in DOCUMENTS.items() for n in range(len(python_blocks(SEEDS / document)))}
    assert every - copied - LATER.keys() == set(), "neither copied nor listed in LATER"
    assert LATER.keys() <= every


def test_every_copy_is_used() -> None:
    assert set(names()) == {*RUN, *NEEDS_NPU, *SHAPES}
