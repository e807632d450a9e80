"""Every script that writes a results file, run to its end with the measuring left out: `python writers.py FOLDER SCRIPT …`.

Prints for each script what went wrong, as JSON. What is replaced is what takes time or another machine, never the step from
what was measured to the file.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

ROOT = Path(__file__).resolve().parents[2]
Prepare = Callable[[Any, Path], list[str]]
WRITERS: dict[str, Prepare] = {}
ON_WEBGPU = ("bench/lite_gpu.py", "bench/webgpu_gpu.py", "bench/webgpu_tiles.py", "bench/webgpu_training.py")
TIMES = {"wall_us": 1.0, "cpu_us": 1.0}


def writer(path: str) -> Callable[[Prepare], Prepare]:
    def kept(prepare: Prepare) -> Prepare:
        WRITERS[path] = prepare
        return prepare

    return kept


def gives(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


@writer("bench/backends.py")
def backends(m: Any, folder: Path) -> list[str]:
    return ["--duration", "0.05", "--devices", "cpu", "--output", f"{folder}/r.json"]


@writer("bench/comfyui.py")
def comfyui(m: Any, folder: Path) -> list[str]:
    import numpy as np
    from PIL import Image

    Image.fromarray(np.zeros((2, 2, 3), np.uint8)).save(folder / "p.png")
    m.subprocess = MagicMock()
    m.Server = gives(SimpleNamespace(picture=gives((folder / "p.png", 1.0)), stop=gives("Device: cpu")))
    return [str(folder), "--ways", "cpu", "--output", f"{folder}/r.json"]


@writer("bench/compile.py")
def compiled(m: Any, folder: Path) -> list[str]:
    one = {"ms": {"eager": 1.0}, "error": {"eager": 0.0}, "first_call_s": {}, "over_eager": 1.0}
    m.measure = gives(one)
    return ["--only", "BERT", "--output", f"{folder}/r.json"]


@writer("bench/decode.py")
def decode(m: Any, folder: Path) -> list[str]:
    answers = {"one launch": [{"same": 1, "of": 1, "largest_gap": 0.0, "rounding": 1.0}]}
    row = {"ms": {"one launch": 1.0}, "share": {"one launch": 0.5}, "floor_ms": 0.1, "answers": answers}
    m.read_rate, m.compile_all, m.model, m.measure = gives(4e12), gives(None), gives(None), gives(row)
    return ["--rows", "1", "--only", "8B", "--output", f"{folder}/r.json"]


@writer("bench/decode_cpu.py")
def decode_cpu(m: Any, folder: Path) -> list[str]:
    m.made, m.compare = gives(None), gives({"precision": "int8", "contenders": {}})
    return ["--precisions", "int8", "--output", f"{folder}/r.json"]


@writer("bench/decode_families.py")
def decode_families(m: Any, folder: Path) -> list[str]:
    row = {
        "answers": [{"largest_gap": 0.0, "rounding": 1.0}],
        "ms": {"ours": 1.0},
        "without": {"static": "no compiler"},
    }
    m.model, m.measure = gives(None), gives(row)
    return ["--small", "--only", "Mamba", "--rows", "1", "--output", f"{folder}/r.json"]


@writer("bench/decode_job.py")
def decode_job(m: Any, folder: Path) -> list[str]:
    m.compare = gives({})
    return ["--shapes", "tiny", "--output", f"{folder}/r.json"]


@writer("bench/decode_serving.py")
def decode_serving(m: Any, folder: Path) -> list[str]:
    m.model = gives(SimpleNamespace(spec=SimpleNamespace(vocabulary=8)))
    m.chats, m.ours, m.theirs = gives([([1],)] * 99), gives(({}, defaultdict(list))), gives({})
    m.distance = gives({"largest_gap": 0.0, "rounding": 1.0, "logits_std": 1.0})
    return ["--only", "8B", "--chats", "1", "--output", f"{folder}/r.json"]


@writer("bench/embed_cpu.py")
def embed_cpu(m: Any, folder: Path) -> list[str]:
    m.WORK = folder / "work"
    m.prepare, m.compile_ours, m.measure = gives(None), gives({}), gives(None)
    return ["--quick", "--peers", f"{folder}/peers", "--output", f"{folder}/r.json"]


@writer("bench/embed_gpu.py")
def embed_gpu(m: Any, folder: Path) -> list[str]:
    m.compare, m.table = gives(None), gives("")
    return ["--only", "minilm", "--short", "4", "--long", "2", "--output", f"{folder}/r.json"]


@writer("bench/embed_pool.py")
def embed_pool(m: Any, folder: Path) -> list[str]:
    import numpy as np

    vectors = np.array([[1, 0], [1, 0]], np.float32)
    engine = MagicMock()
    engine.encode = gives(vectors)
    engine._runner.encoder.describe = gives({"kernels": {}, "workers": []})
    engine.__enter__ = gives(engine)
    m.texts_for, m.ArrowEngine, m.pool_engine = gives(["a", "b"]), gives(engine), gives(engine)
    m.with_a_kill = gives((vectors, {}))
    return ["--output", f"{folder}/r.json"]


@writer("bench/finetune.py")
def finetune(m: Any, folder: Path) -> list[str]:
    m.checks = gives({"ids": "equal"})
    return ["--device", "cpu", "--only", "checks", "--output", f"{folder}/r.json"]


@writer("bench/finetune_example.py")
def finetune_example(m: Any, folder: Path) -> list[str]:
    m.example.run = gives({"before": {}, "fine-tuned": {}})
    return ["--output", f"{folder}/model", "--results", f"{folder}/r.json"]


@writer("bench/forecast.py")
def forecast(m: Any, folder: Path) -> list[str]:
    m.compare, m.words = gives({"identical": True}), gives("")
    return ["--quick", "--output", f"{folder}/r.json"]


@writer("bench/graphs.py")
def graphs(m: Any, folder: Path) -> list[str]:
    m.limits, m.show = gives((1e9, 1e12)), gives("")
    m.measure = gives({"over_eager": 1.0, "over_compile": 1.0, "search_s": 1.0, "recall_s": 1.0})
    return ["--small", "--only", "LoRA", "--batches", "1", "--output", f"{folder}/r.json"]


@writer("bench/info_startup.py")
def info_startup(m: Any, folder: Path) -> list[str]:
    m.cpu_ms, m.check_answers = gives(1.0), gives({"torch": "2", "cpu": "a CPU", "python": "3"})
    return ["--repeats", "1", "--output", f"{folder}/r.json"]


@writer("bench/webgpu_first_answer.py")
def webgpu_first_answer(m: Any, folder: Path) -> list[str]:
    import numpy as np

    vectors = np.eye(2)
    run = {"wall_s": 1.0, "cpu_s": 1.0, "device": "webgpu:0", "adapter": "an adapter"}
    m.vectors_of_the_cpu, m.answered = gives(vectors), lambda cache: {**run, "vectors": vectors.tolist()}
    return ["--output", f"{folder}/r.json"]


@writer("bench/lite.py")
def lite(m: Any, folder: Path) -> list[str]:
    for name in ("operators", "other_ops", "convolutions", "peers", "epochs", "scalars"):
        setattr(m, name, gives({name: 1.0}))
    return ["--out", f"{folder}/r.json"]


@writer("bench/lite_gpu.py")
def lite_gpu(m: Any, folder: Path) -> list[str]:
    m.forward = m.training = m.recurrent = gives({"add": 1.0})
    return ["--out", f"{folder}/r.json"]


@writer("bench/modes.py")
def modes(m: Any, folder: Path) -> list[str]:
    one = {"median_s": 0.1, "peak_nbytes": 2**20, "held_nbytes": 2**20, "resident_nbytes": 2**20, "dtype": "float32"}
    losses = [2.0 - 0.1 * step for step in range(9)]
    m.run = lambda _, name, part: {
        **one, "contender": name, "losses": losses * (part == "training"), "least_cosine": 1.0
    }  # fmt: skip
    return ["--device", "cpu", "--layers", "1", "--rounds", "1", "--output", f"{folder}/r.json"]


@writer("bench/packed_encoder.py")
def packed_encoder(m: Any, folder: Path) -> list[str]:
    m.inside = gives({"peak_gflop_per_s": {}, "formats": {}})
    return ["--levels", "--sentences", "2", "--passages", "1", "--output", f"{folder}/r.json"]


@writer("bench/quant.py")
def quant(m: Any, folder: Path) -> list[str]:
    m.memory_use = gives([])
    return ["--memory", "--output", f"{folder}/r.json"]


@writer("bench/serve.py")
def serve(m: Any, folder: Path) -> list[str]:
    m.contenders, m.client_program, m.check_answers, m.measure = gives({}), gives(None), gives({}), gives({})
    (folder / "bin").mkdir()
    (folder / "bin" / "pip").write_text("#!/bin/sh\necho '[]'\n")
    (folder / "bin" / "pip").chmod(0o755)
    return ["--peers", str(folder), "--output", f"{folder}/r.json"]


@writer("bench/serve_load.py")
def serve_load(m: Any, folder: Path) -> list[str]:
    m.Server = gives(SimpleNamespace(path="/", start=gives(None), stop=gives(None)))
    m.client_program = m.show = gives(None)
    m.overload = m.attack = gives({"sent": 1})
    return ["--output", f"{folder}/r.json"]


@writer("bench/soak.py")
def soak(m: Any, folder: Path) -> list[str]:
    sample = dict.fromkeys(("memory_nbytes", "survivor_nbytes", "threads", "descriptors", "load_average"), 1)
    m.Server = gives(SimpleNamespace(start=gives(None), stop=gives(None), start_s=1.0, log=None))
    m.Soak = gives(SimpleNamespace(run=gives(None), kills=0, tallies={}, samples=[sample]))
    m.make_text_model, m.growth, m.settle, m.stop = gives("model"), gives(0.0), gives({}), gives({})
    m.broken, m.show = gives([]), gives(None)
    return ["--minutes", "0", "--output", f"{folder}/r.json"]


@writer("bench/stand_in.py")
def stand_in(m: Any, folder: Path) -> list[str]:
    m.STEPS, m.WARM = 2, 1
    return ["--rounds", "2", "--output", f"{folder}/r.json"]


@writer("bench/stand_in_cuda.py")
def stand_in_cuda(m: Any, folder: Path) -> list[str]:
    m.environment, m.speed = gives({}), gives({})
    m.start = gives((SimpleNamespace(poll=gives(0)), folder / "output"))
    m.compare = gives({"programs": {}, "webgpu_report": "nothing"})
    return ["--seconds", "0", "--output", f"{folder}/r.json"]


@writer("bench/tiers.py")
def tiers(m: Any, folder: Path) -> list[str]:
    m.run_cpu = gives({"tokens": {}})
    return ["cpu", "--output", f"{folder}/r.json"]


@writer("bench/tiers_training.py")
def tiers_training(m: Any, folder: Path) -> list[str]:
    m.measure = gives({"losses_equal": True, "step_s": 1.0, "ratio_to_bound": 1.0, "bound_s": 1.0, "plan": ""})
    return ["--output", f"{folder}/r.json"]


@writer("bench/trees.py")
def trees(m: Any, folder: Path) -> list[str]:
    m.run = gives({"digest": "same", "times": {"x": 1.0}})
    m.subprocess = SimpleNamespace(run=gives(SimpleNamespace(stdout="abc\n")))
    return [str(ROOT), "--rounds", "1", "--output", f"{folder}/r.json"]


@writer("bench/webgpu_gpu.py")
def webgpu_gpu(m: Any, folder: Path) -> list[str]:
    m.SECTIONS = {"none": gives([])}
    return ["--small", "--output", f"{folder}/r.json"]


@writer("bench/webgpu_peers.py")
def webgpu_peers(m: Any, folder: Path) -> list[str]:
    m.run = gives({"add": dict(TIMES)})
    return ["--rounds", "1", "--output", f"{folder}/r.json"]


@writer("bench/webgpu_tiles.py")
def webgpu_tiles(m: Any, folder: Path) -> list[str]:
    limits = {"max-compute-workgroup-storage-size": 1 << 16, "max-compute-invocations-per-workgroup": 1024}
    m.open_runtime = gives(SimpleNamespace(matrix_cores=SimpleNamespace(why_not=""), limits=limits))
    m.matrix_products = MagicMock(shape_of=gives(m.spirv.Shape(8, 8, 8, 8)))
    m.contenders = gives([m.Contender("as it is", m.SMALL_TILES[0])])
    m.check, m.launched, m.interleaved = gives(0.0), gives(None), gives(dict.fromkeys(("torch", "direct"), (1.0, 0.0)))
    return ["--small", "--sizes", "32", "--output", f"{folder}/r.json"]


@writer("bench/webgpu_training.py")
def webgpu_training(m: Any, folder: Path) -> list[str]:
    m.digits_cnn = m.letters_transformer = gives((None, None))
    m.train = gives([1.0, 0.5])
    return ["--output", f"{folder}/r.json"]


@writer("bench/wheel.py")
def wheel(m: Any, folder: Path) -> list[str]:
    (folder / "x.whl").write_bytes(b"wheel")
    m.environment, m.first_vector = gives(folder), gives(0.5)
    m.run = gives({"seconds": {"a": 1.0}, "answers": {"a": [1.0]}})
    return ["--wheel", f"{folder}/x.whl", "--repeats", "1", "--output", f"{folder}/r.json"]


@writer("tools/run_seed_samples.py")
def run_seed_samples(m: Any, folder: Path) -> list[str]:
    m.run_all, m.machine = gives([m.Result("1", "python", "1_00", "ran", 0.1)]), gives("a CPU")
    return ["--json", f"{folder}/r.json"]


@writer("tools/cuda_programs.py")
def cuda_programs(m: Any, folder: Path) -> list[str]:
    m.try_out = gives({"cuda_lines": 1, "draws": False, "cpu_draws": "", "why": {}, "plain": {}})
    return [str(folder), "--only", m.PROGRAMS[0].name, "--output", f"{folder}/r.json"]


@writer("tests/device/run.py")
def device_tests(m: Any, folder: Path) -> list[str]:
    m.GROUPS, m.AFTERWARDS = {"one": []}, {}
    m.stand_in, m.run_group = gives(False), gives({"passed": 1, "failed": [], "skipped": [], "seconds": 0.1})
    m.described = gives({"device": "a card", "torch": "2", "python": "3"})
    m.os.environ["OUTPUT"] = f"{folder}/r.json"
    return []


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"writer_{path.stem}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def run(name: str, folder: Path) -> str:
    """What is wrong with the file that this script writes; empty where nothing is."""
    import torch
    from provenance import lacking

    folder.mkdir()
    path = ROOT / name
    with ExitStack() as stack:
        stack.enter_context(patch.object(sys, "path", [str(path.parent), *sys.path]))
        stack.enter_context(patch.object(sys, "argv", [str(path)]))
        stack.enter_context(patch.object(torch.cuda, "get_device_name", gives("a card")))
        module: Any = loaded(path)
        sys.argv += WRITERS[name](module, folder)
        try:
            ended = module.main()
        except SystemExit as exc:
            ended = exc.code
    if ended not in (None, 0, 1):  # 1: a target was missed by numbers that were made up
        return f"it ended with {ended}"
    if not (folder / "r.json").exists():
        return "it wrote no file"
    found = json.loads((folder / "r.json").read_text("utf-8"))
    if wrong := lacking(found):
        return f"wrong or missing: {wrong}"
    return "" if found["script"] == name else f"its script is {found['script']}"


def main() -> None:
    sys.path.insert(0, str(ROOT / "bench"))
    told = {}
    for number, name in enumerate(sys.argv[2:]):
        try:
            told[name] = run(name, Path(sys.argv[1]) / str(number))
        except Exception as exc:  # noqa: BLE001  (the test says which script it was)
            told[name] = "".join(traceback.format_exception(exc))[-1500:]
    print("ANSWER " + json.dumps(told))


if __name__ == "__main__":
    main()
