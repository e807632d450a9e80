"""One worker of a pool: a process with one encoder on one device. Started by `pool`, ended by the end of its input.

Lines of JSON come on standard input and go to what was standard output; token ids and vectors lie in shared blocks
(`pool_blocks`). First line in: what to build. First line out: {"ready": …} or {"failed": …}. Then one line per task:
in {"task", "block", "nbytes", "tokens", "texts"}, out {"task"} or {"task", "error", …}. The line `end` is the last.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import IO, Any

from anytorch import logs
from anytorch.devices.oom import is_out_of_memory
from anytorch.errors import AnytorchError
from anytorch.text.embed.encoder_device import build_encoder, choose_device
from anytorch.text.embed.pool_blocks import Block
from anytorch.text.embed.protocol import Encoder
from anytorch.text.embed.recipe import read_recipe

log = logs.logger(__name__)

END = "end"


def build(*, model: str, device: str, pooling: list[str], **options: Any) -> Encoder:
    """The encoder of this worker. Another function of this shape can be named instead (`factory`)."""
    encoder, why = build_encoder(choose_device(device), read_recipe(Path(model)), tuple(pooling), **options)
    log.debug("%s: %s", device, why)
    return encoder


def main(_: list[str]) -> int:
    # Ctrl-C reaches every process of the terminal: the pool decides what becomes of it, not each worker.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # What a library prints must not end up among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", newline="\n")
    os.dup2(2, 1)
    requests = sys.stdin
    first = requests.readline()
    if not first:
        return 0
    job = json.loads(first)
    if job["cores"] and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, job["cores"])
    try:
        module, _, name = job["factory"].partition(":")
        encoder: Encoder = getattr(importlib.import_module(module), name)(**job["arguments"])
    except BaseException as exc:  # whatever it is, the pool must hear of it
        send(answers, {"failed": described(exc)})
        raise
    facts = {"width": encoder.width, "padded": encoder.padded, "normalize": bool(getattr(encoder, "normalize", False))}
    send(answers, {"ready": {**facts, "about": encoder.describe()}})
    try:
        asked_to_end = serve(encoder, requests, answers)
    except BrokenPipeError:
        asked_to_end = False
    encoder.close()
    if not asked_to_end:  # the pool is no more: nobody else removes its folder
        shutil.rmtree(job["folder"], ignore_errors=True)
    return 0


def serve(encoder: Encoder, requests: IO[str], answers: IO[str]) -> bool:
    """Work off the requests. False when they end without a word: then the pool's process has died."""
    blocks: dict[str, Block] = {}
    for line in requests:
        if line.strip() == END:
            return True
        send(answers, answer(encoder, json.loads(line), blocks))
    return False


def answer(encoder: Encoder, task: dict[str, Any], blocks: dict[str, Block]) -> dict[str, Any]:
    try:
        if task["block"] not in blocks:
            for old in [name for name in blocks if not Path(name).exists()]:
                blocks.pop(old).close()  # the pool has made a larger one
            blocks[task["block"]] = Block(Path(task["block"]), task["nbytes"])
        ids, starts, vectors = blocks[task["block"]].views(task["tokens"], task["texts"], encoder.width)
        vectors[:] = encoder.run(ids, starts)
    except Exception as exc:  # noqa: BLE001  (an error of one task; the pool raises it where the task came from)
        return {"task": task["task"], "error": described(exc)}
    return {"task": task["task"]}


def described(exc: BaseException) -> dict[str, Any]:
    message = exc.message if isinstance(exc, AnytorchError) else str(exc)
    hint = exc.hint if isinstance(exc, AnytorchError) else ""
    return {"type": type(exc).__name__, "message": message, "hint": hint, "memory": is_out_of_memory(exc)}


def send(answers: IO[str], line: dict[str, Any]) -> None:
    answers.write(json.dumps(line) + "\n")
    answers.flush()
