"""The TextGenerator: a model folder, a device, and prompts in, text out."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from anytorch import limits, logs
from anytorch.counts import counted
from anytorch.devices.choose import resolve
from anytorch.devices.locate import require
from anytorch.devices.precision import capabilities
from anytorch.errors import InputError, ModelError, UsageError
from anytorch.memory.levels import Size
from anytorch.memory.sizes import words
from anytorch.text.generate.bandwidth import bandwidth_of, weight_nbytes_per_token
from anytorch.text.generate.batched import Batched
from anytorch.text.generate.kernel import KernelRows
from anytorch.text.generate.loading import GENERATION, cache_nbytes, find_folder, load
from anytorch.text.generate.prompts import chat_ids, check_messages, check_stop, is_chat, prompt_ids
from anytorch.text.generate.requests import TextRequest, Way
from anytorch.text.generate.sampling import Sampling, defaults_of, unheeded
from anytorch.text.generate.scheduler import GenerationStats, Scheduler
from anytorch.text.generate.stream import Completion, Stream
from anytorch.text.persistent.kernel import token_set

log = logs.logger(__name__)

Message = Mapping[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


class TextGenerator(AbstractContextManager["TextGenerator"]):
    """Writes text with a Hugging Face causal language model (Llama, Qwen, GPT-2, Mistral, Gemma, …).

    `path`: a folder with config.json, tokenizer.json and safetensors weights, or the name of a model on the Hugging Face
    Hub ("owner/name"); left out: "tiny-writer", which comes with anytorch and writes sentences about Python. Pickled
    weights and code in the folder are refused. `device`: "auto", "cpu", "cuda:1", …; one that cannot be used falls back to
    the CPU with a DeviceFallbackWarning. `dtype`: "auto" (the stored one where the device is fast at it), "float32",
    "float16", "bfloat16". `quantization`: None, "int8", "int4", "int2", "fp4".

    `kernel`: "auto" computes the tokens of Llama, Mistral, Qwen2 and Qwen3 by our own decoders (on the CPU one call of C++
    for some tokens of all requests, also with weights in int8 and int4; elsewhere, in floats, recorded steps), and
    everything else by transformers' own model in steps that are recorded where the device can; "off" computes all of it by
    transformers, op by op. `explain()` says which it is, and why.

    `device_budget` ("8GiB"): use no more of the device; left out: what is free. A model that needs more runs in tiers:
    what does not fit rests in host memory or in its files and is brought up for every token (`anytorch.memory`).

    Thread-safe. Concurrent requests are computed together, token by token (`at_once` of them; `waiting` more may wait,
    then QueueFull). Needs torch and transformers (`pip install 'anytorch[generate]'`).

        with anytorch.TextGenerator("./Qwen3-0.6B") as generator:
            for piece in generator.stream("The capital of France is", max_tokens=20):
                print(piece, end="", flush=True)
    """

    def __init__(
        self,
        path: str | Path | None = None,
        device: str | torch.device | None = "auto",
        dtype: str = "auto",
        quantization: str | None = None,
        device_budget: Size | None = None,
        *,
        at_once: int = 16,
        waiting: int = 256,
        kernel: str = "auto",
    ) -> None:
        limits.BATCH.check("at_once", at_once)
        limits.COUNT.check("waiting", waiting)
        self.folder = find_folder(path)
        resolution = resolve(device)
        self._torch_device = resolution.device
        self._device_why = resolution.warning or f"you asked for {resolution.requested!r}"
        self.device_warning: str | None = resolution.warning or None
        self.device = resolution.chosen.id
        backend, index = require(self._torch_device)
        self._loaded = load(
            self.folder,
            self._torch_device,
            capabilities(backend.name, index),
            dtype=dtype,
            quantization=quantization,
            device_budget=device_budget,
            kernel=kernel,
        )
        self.model: Any = self._loaded.model
        self.tokenizer: Any = self._loaded.tokenizer
        self.dtype, self.quantization = self._loaded.dtype, quantization
        opened, loaded = self._loaded.kernel, self._loaded
        self._vocabulary = (
            opened.needs.vocabulary if opened is not None else int(self.model.get_input_embeddings().weight.shape[0])
        )
        self._tokenizer_lock = threading.Lock()  # its settings change while it encodes
        try:
            self.defaults: Sampling = defaults_of(loaded.generation_config)
            self._ends = end_tokens(loaded.generation_config, self.tokenizer)
            self._stops = check_stop(getattr(loaded.generation_config, "stop_strings", None))
        except UsageError as exc:
            raise ModelError(
                f"{self.folder / GENERATION}: {exc.message}", hint="mend the file, or fetch it again"
            ) from exc
        if left_out := unheeded(loaded.generation_config):
            loaded.notes.append(f"{GENERATION} asks for {', '.join(left_out)}, which has no effect here")
            log.warning("%s: %s", self.folder.name, loaded.notes[-1])
        self.max_length: int | None = loaded.context if opened is None else opened.needs.most_positions
        told = None if opened is None else opened.weight_nbytes
        self.weight_nbytes_per_token = weight_nbytes_per_token(self.model) if told is None else told
        self.bandwidth = bandwidth_of(self._torch_device)
        way: Way = (
            Batched(self.model, self.folder, self._torch_device)
            if opened is None
            else KernelRows(opened, loaded.cache_room)
        )
        # A mover's tensors, and a kernel's, are used again by others: they must not be marked as inference's own.
        guard: Any = torch.no_grad if loaded.in_tiers or opened is not None else torch.inference_mode
        self._scheduler = Scheduler(way, most_at_once=at_once, most_waiting=waiting, guard=guard)

    # --- text ------------------------------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Prompt,
        max_tokens: int = 256,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        stop: str | Sequence[str] | None = None,
        seed: int | None = None,
        *,
        repetition_penalty: float | None = None,
        timeout_s: float | None = None,
    ) -> Stream:
        """Stream the generated text in pieces. `prompt`: a text to continue, token ids, or messages of a chat
        (`[{"role": "user", "content": "…"}]`, put together by the model's own template).

        What is left out comes from the model's generation_config.json; `temperature=0` takes the most likely token. The
        text ends before the first of the `stop` strings, at the model's own end, or after `max_tokens`. The same `seed`
        gives the same text. Close the stream (or its `with` block) to stop early; works with `async for`, too. After
        `timeout_s` seconds it raises TimeoutError.

        Raises InputError for a prompt that cannot be used, QueueFull if too many wait.
        """
        limits.NEW_TOKENS.check("max_tokens", max_tokens)
        if timeout_s is not None:
            limits.SECONDS.check("timeout_s", timeout_s)
        given: dict[str, Any] = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "seed": seed}
        given["repetition_penalty"] = repetition_penalty
        sampling = replace(self.defaults, **{name: value for name, value in given.items() if value is not None})
        strings = [*check_stop(stop), *self._stops]
        ids = self.tokenize(prompt)
        room = max_tokens if self.max_length is None else self.max_length - len(ids)
        if room < 1:
            raise InputError(
                f"the prompt has {len(ids)} tokens and the model {self.max_length} positions: no room is left for an answer",
                hint="shorten the prompt",
            )
        random = torch.Generator()
        if sampling.seed is None:
            random.seed()
        else:
            random.manual_seed(sampling.seed)
        request = TextRequest(
            ids,
            sampling,
            min(max_tokens, room),
            self._ends["chat" if is_chat(prompt) else "text"],
            random,
            None if timeout_s is None else time.perf_counter() + timeout_s,
        )
        # What one token per second is of the device's bandwidth.
        share = self.weight_nbytes_per_token / (self.bandwidth.gb_per_s * 1e9) if self.bandwidth else None
        stream = Stream(request, self.decode, strings, share)
        self._scheduler.submit(request)
        return stream

    def complete(self, prompt: Prompt, **options: Any) -> Completion:
        """Like `stream`, but returns the whole text with tokens, seconds and tokens per second. Takes its options."""
        with self.stream(prompt, **options) as stream:
            return stream.completion()

    async def acomplete(self, prompt: Prompt, **options: Any) -> Completion:
        """As `complete`, for asyncio. Cancelling the task stops the computation."""
        with self.stream(prompt, **options) as stream:
            pieces = [piece async for piece in stream]
            return replace(stream.completion(), text="".join(pieces))

    # --- tokens ----------------------------------------------------------------------------------------------------

    def tokenize(self, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, as the model gets them. Raises InputError, which names what is wrong."""
        with self._tokenizer_lock:
            if is_chat(prompt):
                return chat_ids(self.tokenizer, check_messages(prompt), self.folder.name)
            return prompt_ids(self.tokenizer, prompt, self._vocabulary)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; the model's special tokens are left out."""
        text = self.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return str(text)

    # --- facts -----------------------------------------------------------------------------------------------------

    @property
    def parameters(self) -> int:
        """How many weights the model has; packed ones count as what they stand for."""
        model = self._open_model()
        packed: int = sum(m.in_features * m.out_features for m in model.modules() if hasattr(m, "packed"))
        return packed + sum(int(p.numel()) for p in model.parameters())

    @property
    def has_chat_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    @property
    def stats(self) -> GenerationStats:
        return self._scheduler.stats

    def describe(self) -> dict[str, Any]:
        """The facts of `explain` as plain data. Raises UsageError after `close`."""
        self._open_model()
        config, stats, kernel = self._loaded.config, self.stats, self._loaded.kernel
        item_nbytes = getattr(torch, self.dtype).itemsize
        return {
            "model": str(self.folder),
            "family": config.model_type,
            "parameters": self.parameters,
            "layers": getattr(config, "num_hidden_layers", None),
            "max_length": self.max_length,
            "chat": self.has_chat_template,
            "device": self.device,
            "device_why": self._device_why,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "decoding": "transformers" if kernel is None else kernel.kind,
            "decoding_why": f"op by op: {self._loaded.why_none}" if kernel is None else kernel.says,
            "placed": self._loaded.placed,
            "notes": list(self._loaded.notes),
            "weight_nbytes_per_token": self.weight_nbytes_per_token,
            "cache_nbytes_per_token": cache_nbytes(config.to_dict(), 1, item_nbytes)
            if kernel is None
            else kernel.needs.nbytes(2) - kernel.needs.nbytes(1),
            "bandwidth_gb_per_s": self.bandwidth.gb_per_s if self.bandwidth else None,
            "bandwidth_source": self.bandwidth.source if self.bandwidth else None,
            "sampling": {n: getattr(self.defaults, n) for n in ("temperature", "top_p", "top_k", "repetition_penalty")},
            "stats": {name: getattr(stats, name) for name in ("requests", "prompt_tokens", "tokens", "steps")},
        }

    def explain(self) -> str:
        """Describe in words the model, the device, how its weights are stored, and what limits its speed."""
        return explained(self.describe())

    def warmup(self) -> TextGenerator:
        """Write two tokens, so that the first real request finds everything ready."""
        self.complete([0], max_tokens=2, temperature=0.0)
        return self

    # --- the rest of its life --------------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop running requests and free the memory. May be called twice."""
        self._scheduler.close()
        self._loaded.close()
        self.model = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TextGenerator({self.folder.name!r}, device={self.device!r}, quantization={self.quantization!r})"

    # --- inside ----------------------------------------------------------------------------------------------------

    def _open_model(self) -> Any:
        if self.model is None:
            raise UsageError("the text generator is closed", hint="ask for its facts before close()")
        return self.model


def end_tokens(generation_config: Any, tokenizer: Any) -> dict[str, frozenset[int]]:
    """The tokens that end a text: the model's own; in a chat also the one that ends a message."""
    given = generation_config.eos_token_id
    own = token_set("eos_token_id", given)
    marker = frozenset([tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else [])
    return {"text": own or marker, "chat": own | marker}


def explained(facts: dict[str, Any]) -> str:
    """The facts of `describe` in words. Pure."""
    lines = [
        f"{facts['model']}: {facts['family']}, {facts['parameters'] / 1e6:,.0f} million parameters, "
        f"{counted(facts['layers'], 'layer')}, up to {facts['max_length'] or 'any number of'} tokens; "
        + ("answers chat messages" if facts["chat"] else "continues a text; it has no chat template"),
        f"computes on {facts['device']} ({facts['device_why']}) in {facts['dtype']}"
        + (f", weights in {facts['quantization']}" if facts["quantization"] else ""),
        f"tokens by {facts['decoding']}: {facts['decoding_why']}",
        f"weights: {facts['placed']}",
        *(f"  {line}" for note in facts["notes"] for line in note.splitlines()),
        f"every token reads {words(facts['weight_nbytes_per_token'])} of weights; "
        f"{words(facts['cache_nbytes_per_token'])} of keys and values are kept per token",
    ]
    rate = facts["bandwidth_gb_per_s"]
    if rate:
        most = rate * 1e9 / max(1, facts["weight_nbytes_per_token"])
        lines.append(
            f"the device reads {rate:,.0f} GB/s ({facts['bandwidth_source']}): at most {most:,.0f} tokens/s for one request"
        )
    return "\n".join(lines)
