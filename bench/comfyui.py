"""ComfyUI, unmodified, on CUDA's stand-in: a random checkpoint of Stable Diffusion's shape, the picture, seconds per step.

python bench/comfyui.py COMFYUI [--size tiny|full] [--ways cpu,webgpu] [--pixels 64] [--python PYTHON] [--output FILE]

COMFYUI is a checkout of ComfyUI 0.7, whose packages PYTHON has. `tiny` has a U-Net of two levels with one block each (and
the text encoder and the decoder of SD 1.5, which ComfyUI makes whole), `full` has that of SD 1.5. Ways: `cpu` is `python
main.py --cpu`, `cuda` is `python main.py`; the others are `anytorch run --device WAY main.py`. Every way gets the same
workflow, the same noise (which ComfyUI draws on the CPU) and float32, or float16 with --half. The picture of every way is
compared with the first one's, in steps of 1/255; then two pictures of different numbers of steps are timed, and the
difference gives the seconds per step.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from provenance import provenance, write_results

ROOT = Path(__file__).resolve().parents[1]
FLOAT32 = ["--force-fp32", "--fp32-vae", "--fp32-text-enc"]
FLOAT16 = ["--force-fp16", "--fp16-vae", "--fp16-text-enc"]
FEW, MORE = 2, 12  # steps of the two timed pictures
LIMIT_S = 900

MAKE = """
import json, math, sys
sys.argv = sys.argv[:1] + ["--cpu"]
import torch
import comfy.options
comfy.options.enable_args_parsing()
import comfy.clip_model, comfy.ops
from comfy.ldm.models.autoencoder import AutoencoderKL
from comfy.ldm.modules.diffusionmodules.openaimodel import UNetModel
from safetensors.torch import save_file

path, size, half = {path!r}, {size!r}, {half!r}
dtype = torch.float16
shape = {{
    "tiny": dict(
        num_res_blocks=[1, 1], channel_mult=[1, 1], transformer_depth=[1, 0], transformer_depth_output=[1, 1, 0, 0],
    ),
    "full": dict(
        num_res_blocks=[2, 2, 2, 2], channel_mult=[1, 2, 4, 4], transformer_depth=[1, 1, 1, 1, 1, 1, 0, 0],
        transformer_depth_output=[1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0],
    ),
}}[size]
unet = UNetModel(
    image_size=32, in_channels=4, out_channels=4, model_channels=320, use_spatial_transformer=True, context_dim=768,
    num_heads=8, transformer_depth_middle=1, use_linear_in_transformer=False, legacy=False, dtype=torch.float32,
    operations=comfy.ops.disable_weight_init, **shape,
)
dd = dict(
    double_z=True, z_channels=4, resolution=256, in_channels=3, out_ch=3, ch=128, ch_mult=[1, 2, 4, 4],
    num_res_blocks=2, attn_resolutions=[], dropout=0.0,
)
vae = AutoencoderKL(ddconfig=dd, embed_dim=4)
config = json.load(open("comfy/sd1_clip_config.json"))
clip = comfy.clip_model.CLIPTextModel(config, torch.float32, "cpu", comfy.ops.disable_weight_init)
torch.manual_seed(0)
state = {{}}
parts = {{"model.diffusion_model.": unet, "first_stage_model.": vae, "cond_stage_model.transformer.": clip}}
for prefix, module in parts.items():
    for name, value in module.state_dict().items():
        if name.endswith("position_ids") or not value.is_floating_point():
            continue
        if value.ndim == 1:
            made = torch.ones_like(value) if name.endswith("weight") else torch.zeros_like(value)
        else:
            fan = value[0].numel()
            made = torch.randn(value.shape) / math.sqrt(fan)
        state[prefix + name] = made.to(dtype).contiguous()
save_file(state, path)
print(sum(value.numel() for value in state.values()), "weights")
"""


def workflow(steps: int, pixels: int, seed: int, half: bool) -> dict[str, Any]:
    """Text to picture, in the form of POST /prompt."""
    return {
        "1": {"class_type": "CheckpointLoaderSimple", "inputs": {"ckpt_name": "random.safetensors"}},
        "2": {"class_type": "CLIPTextEncode", "inputs": {"text": "a house by the sea", "clip": ["1", 1]}},
        "3": {"class_type": "CLIPTextEncode", "inputs": {"text": "blurry", "clip": ["1", 1]}},
        "4": {"class_type": "EmptyLatentImage", "inputs": {"width": pixels, "height": pixels, "batch_size": 1}},
        "5": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["1", 0],
                "positive": ["2", 0],
                "negative": ["3", 0],
                "latent_image": ["4", 0],
                "seed": seed,
                "steps": steps,
                "cfg": 4.0,
                "sampler_name": "euler",
                "scheduler": "normal",
                "denoise": 1.0,
            },
        },
        "6": {"class_type": "VAEDecode", "inputs": {"samples": ["5", 0], "vae": ["1", 2]}},
        "7": {"class_type": "SaveImage", "inputs": {"images": ["6", 0], "filename_prefix": f"steps-{steps}"}},
    }


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


class Server:
    """ComfyUI in a process of its own; `picture` makes one."""

    def __init__(self, comfyui: Path, python: str, way: str, base: Path, half: bool) -> None:
        self.base, self.port = base, free_port()
        page = base / "page"
        page.mkdir(exist_ok=True)
        (page / "index.html").write_text("<p>no page</p>")
        start = (
            [python, "-m", "anytorch", "run", "--device", way, "--report"] if way not in ("cpu", "cuda") else [python]
        )
        options = [*(FLOAT16 if half else FLOAT32), *(["--cpu"] if way == "cpu" else [])]
        self.log = base / f"{way}.log"
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(
                [str(ROOT / "src"), str(ROOT / "compat" / "src"), os.environ.get("PYTHONPATH", "")]
            ).rstrip(os.pathsep),
        }
        self._out = self.log.open("w")
        self.process = subprocess.Popen(
            [
                *(*start, "main.py", "--listen", "127.0.0.1", "--port", str(self.port), "--base-directory", str(base)),
                *("--front-end-root", str(page), "--database-url", f"sqlite:///{base}/{way}.db", "--disable-api-nodes"),
                *("--disable-all-custom-nodes", "--output-directory", str(base / f"output-{way}"), *options),
            ],
            cwd=comfyui,
            env=env,
            stdout=self._out,
            stderr=subprocess.STDOUT,
        )
        self.ask("/system_stats")

    def ask(self, path: str, data: Any = None) -> Any:
        """One request, while the server comes up, too."""
        body = None if data is None else json.dumps(data).encode()
        until = time.monotonic() + LIMIT_S
        while True:
            try:
                request = urllib.request.Request(
                    f"http://127.0.0.1:{self.port}{path}", body, {"Content-Type": "application/json"}
                )
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.loads(answer.read())
            except urllib.error.HTTPError as exc:
                raise RuntimeError(f"{path}: {exc.read().decode()[:2000]}") from exc
            except (urllib.error.URLError, ConnectionError, TimeoutError) as exc:
                if self.process.poll() is not None or time.monotonic() > until:
                    raise RuntimeError(f"the server is not there: {self.log.read_text()[-3000:]}") from exc
                time.sleep(0.5)

    def picture(self, steps: int, pixels: int, seed: int, half: bool) -> tuple[Path, float]:
        """The file of a picture, and the seconds it took."""
        ident = self.ask("/prompt", {"prompt": workflow(steps, pixels, seed, half)})["prompt_id"]
        until = time.monotonic() + LIMIT_S
        while time.monotonic() < until:
            told = self.ask(f"/history/{ident}").get(ident)
            if told is not None:
                break
            time.sleep(0.1)
        else:
            raise RuntimeError(f"no picture: {self.log.read_text()[-3000:]}")
        if told["status"]["status_str"] != "success":
            raise RuntimeError(f"{json.dumps(told['status'])[-3000:]}\n{self.log.read_text()[-2000:]}")
        stamps = {name: entry["timestamp"] for name, entry in told["status"]["messages"] if "timestamp" in entry}
        file = told["outputs"]["7"]["images"][0]
        path = self.base / f"output-{self.log.stem}" / file["subfolder"] / file["filename"]
        return path, (stamps["execution_success"] - stamps["execution_start"]) / 1e3

    def stop(self) -> str:
        """End it as Ctrl-C does; returns its log."""
        self.process.send_signal(2)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._out.close()
        return self.log.read_text()


def main() -> None:
    import numpy as np
    from PIL import Image

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("comfyui", type=Path)
    parser.add_argument("--size", choices=("tiny", "full"), default="tiny")
    parser.add_argument("--ways", default="cpu,webgpu")
    parser.add_argument("--pixels", type=int, default=64)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--half", action="store_true")
    parser.add_argument("--no-times", action="store_true", help="compare the pictures alone")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    comfyui = options.comfyui.resolve()
    answer: dict[str, Any] = {"size": options.size, "pixels": options.pixels, "half": options.half, "ways": {}}
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        (base / "models" / "checkpoints").mkdir(parents=True)
        path = str(base / "models" / "checkpoints" / "random.safetensors")
        made = MAKE.format(path=path, size=options.size, half=options.half)
        subprocess.run([options.python, "-c", made], cwd=comfyui, check=True)
        first: Any = None
        for way in options.ways.split(","):
            began = time.monotonic()
            server = Server(comfyui, options.python, way, base, options.half)
            try:
                started = time.monotonic() - began
                file, seconds = server.picture(FEW, options.pixels, 1, options.half)
                picture = np.asarray(Image.open(file)).astype(int)
                told: dict[str, Any] = {"start_s": round(started, 1), "first_picture_s": round(seconds, 1)}
                if first is None:
                    first = picture
                    told["spread"] = float(picture.std())
                told["most_apart"] = int(np.abs(picture - first).max())
                told["mean_apart"] = float(np.abs(picture - first).mean())
                if not options.no_times:
                    times = {
                        n: min(server.picture(n, options.pixels, seed, options.half)[1] for seed in (2, 3))
                        for n in (FEW, MORE)
                    }
                    told["s_per_step"] = (times[MORE] - times[FEW]) / (MORE - FEW)
            finally:
                log = server.stop()
            told["device"] = next((line for line in log.splitlines() if line.startswith("Device:")), "")
            if "stood in for cuda" in log:
                told["report"] = log.rpartition("stood in for cuda")[2].strip().splitlines()
            answer["ways"][way] = told
            print(json.dumps({way: told}), flush=True)
    print(json.dumps(answer, indent=1))
    if options.output:
        write_results(options.output, {**provenance(), **answer})


if __name__ == "__main__":
    main()
