"""`PersistentKernel`: texts decoded without coming back to Python for every op.

    kernel = anytorch.PersistentKernel.from_model("./Qwen3-0.6B", max_seq_length=1024)
    kernel.generate([1, 15, 7], max_new_tokens=100)

From a model it is the fastest way there is on the device. Written down layer by layer (`attach_input`, `embed_layer`, …,
`compile()`, `kernel()`), as Mirage's documentation does it, it is a recorded step: `explain()` says which it is.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from anytorch import limits, logs
from anytorch.counts import counted
from anytorch.devices.choose import resolve
from anytorch.errors import InputError, NativeUnavailable, UsageError, did_you_mean
from anytorch.recorded.graphs import Recorder
from anytorch.text.decoders.loading import decoder_of, ends_of, load_decoder
from anytorch.text.decoders.model import Decoder
from anytorch.text.decoders.rows import Rows
from anytorch.text.decoders.steps import RecordedSteps
from anytorch.text.packed.encoder import available_cores
from anytorch.text.persistent import cuda, guesses
from anytorch.text.persistent import trace as launch_trace
from anytorch.text.persistent.fused import FusedSteps, steps_for
from anytorch.text.persistent.guesses import Lookup
from anytorch.text.persistent.host import HostKernel
from anytorch.text.persistent.layers import Layers
from anytorch.text.persistent.traces import StepTrace, check_buffer, save_trace

log = logs.logger(__name__)

META = ("step", "tokens", "num_new_tokens")  # of a list, in this order
OTHERS = (  # that Mirage's dictionaries have
    "prompt_lengths", "input_tokens", "output_tokens", "qo_indptr_buffer", "paged_kv_indptr_buffer",
    "paged_kv_indices_buffer", "paged_kv_last_page_len_buffer",
)  # fmt: skip


def _texts(made: Rows) -> str:
    return "one text" if made.rows == 1 else f"up to {made.rows} texts"


class PersistentKernel(Layers):
    """Texts decoded to their end in one call. See `from_model`, or define the layers yourself.

    `meta_tensors`: [step, tokens] (or with num_new_tokens), or a dictionary with at least these: `tokens`, int64
    [rows, max_seq_length], has the prompts; `step`, int32 [rows], is the place of each row's last token. Keys and values of
    the places before it are in the caches, unless `prompt_lengths` (in the dictionary) says that the rest of a prompt is to
    be read. A call writes what follows into `tokens`, up to `eos_token_id` or the end of the row, and moves `step`.

    `num_workers`: threads on a CPU; left out, or more than there are: as many as there are cores. A GPU has one worker on
    each multiprocessor. `num_local_schedulers` and `num_remote_schedulers` are accepted, but have no effect: all work is
    assigned before the first token. `world_size` is 1: a model over several cards is not supported.

    `spec_decode_config`: {"method": "promptlookup", "ngram_size": 3, "spec_length": 5}, or an object with these attributes:
    `generate` guesses that a text goes on as it did before after the same tokens, and reads a guess at once; the tokens are
    the same as without. `profiler_tensor`: uint64 [words] of the CPU; what every worker did when is written there by each
    call, and `save_trace(path)` makes a file for Perfetto of it. Of one launch it is the last token, block by block.
    """

    def __init__(
        self,
        world_size: int = 1,
        mpi_rank: int = 0,
        num_workers: int | None = None,
        num_local_schedulers: int | None = None,
        num_remote_schedulers: int = 0,
        max_seq_length: int = 1024,
        eos_token_id: int | Collection[int] | None = None,
        meta_tensors: Sequence[Tensor] | Mapping[str, Tensor] | None = None,
        profiler_tensor: Tensor | None = None,
        spec_decode_config: Any = None,
        backend: str = "auto",
    ) -> None:
        super().__init__()
        if world_size != 1 or mpi_rank != 0:
            raise UsageError(
                f"world_size={world_size}, mpi_rank={mpi_rank}: one process decodes on one device",
                hint="leave both out; larger models run in tiers (anytorch.memory)",
            )
        self.lookup = Lookup.of(spec_decode_config)
        self.guesses: dict[str, int] = {}  # of the last generation: readings, tokens that were guessed, and right
        self.profiler_tensor = profiler_tensor
        self._trace = None if profiler_tensor is None else check_buffer(profiler_tensor)
        for name, count, limit in (
            ("num_workers", num_workers, limits.COUNT),  # as documents for large cards have it: more than there are
            ("num_local_schedulers", num_local_schedulers, limits.COUNT_OR_NONE),
            ("num_remote_schedulers", num_remote_schedulers, limits.COUNT_OR_NONE),
            ("max_seq_length", max_seq_length, limits.LENGTH),
        ):
            if count is not None:
                limit.check(name, count)
        token_set("eos_token_id", eos_token_id)
        self.device = resolve(None if backend == "auto" else backend).device
        self.num_workers = min(num_workers or available_cores(), available_cores())
        self.max_seq_length, self.eos_token_id = max_seq_length, eos_token_id
        self.meta = _meta(meta_tensors, max_seq_length)
        self._rows: Rows | cuda.CudaKernel | None = None
        self._recorder: Recorder | None = None
        self._stopping = False

    # --- from a model ------------------------------------------------------------------------------------------------

    @classmethod
    def from_model(
        cls,
        model: Decoder | torch.nn.Module | str | Path,
        max_seq_length: int | None = None,
        backend: str = "auto",
        rows: int = 1,
        num_workers: int | None = None,
        eos_token_id: int | Collection[int] | None = None,
        spec_decode_config: Any = None,
        profiler_tensor: Tensor | None = None,
    ) -> PersistentKernel:
        """A kernel for a decoder where it is, for a language model of transformers, whose weights it shares, or for the one
        in a Hugging Face folder on the device of `backend`.

        `rows`: how many texts at once. `max_seq_length`: prompt and new tokens of a text together; left out: as many as the
        model was made for. `eos_token_id`: one or several; left out: those of the folder or of transformers' model.
        """
        limits.KERNEL_ROWS.check("rows", rows)
        if max_seq_length is not None:
            limits.LENGTH.check("max_seq_length", max_seq_length)
        if eos_token_id is None and isinstance(model, (str, Path)):
            eos_token_id = ends_of(Path(model))
        elif eos_token_id is None and isinstance(model, torch.nn.Module):
            eos_token_id = ends_of(model)
        if isinstance(model, (str, Path)):
            model = load_decoder(model, None if backend == "auto" else backend)
        elif not isinstance(model, torch.nn.Module):
            raise UsageError(
                f"model is of type {type(model).__name__}",
                hint="pass a Hugging Face folder, a Decoder, or a language model of transformers",
            )
        elif not isinstance(model, Decoder):
            model = decoder_of(model)
        if backend != "auto" and (wanted := resolve(backend).device).type != model.lm_head.weight.device.type:
            raise UsageError(
                f"the model is on {model.lm_head.weight.device}, and backend={backend!r} is {wanted}",
                hint="move it there first, or leave backend out",
            )
        positions = min(max_seq_length or model.spec.max_positions, model.spec.max_positions)
        made = cls(
            num_workers=num_workers,
            max_seq_length=positions,
            eos_token_id=eos_token_id,
            spec_decode_config=spec_decode_config,
            profiler_tensor=profiler_tensor,
        )
        made.device = model.lm_head.weight.device
        made._rows = _fastest(
            model, rows, positions, made.num_workers, alone=made.lookup is None, profile=made._trace is not None
        )
        if isinstance(made._rows, HostKernel):
            made._rows.trace = made._trace
        elif made._trace is not None and not isinstance(made._rows, cuda.CudaKernel):
            raise UsageError(
                "profiler_tensor works only with the CPU's kernel and with one launch", hint="use torch.profiler"
            )
        return made

    def generate(self, ids: Any, max_new_tokens: int, ends: int | Collection[int] | None = None) -> Any:
        """The most likely tokens after one prompt (a list of ids, or a tensor or array of one dimension), or after each of
        several: at most `max_new_tokens`, and up to the first of `ends` (left out: `eos_token_id`), which is left out.
        Raises InputError."""
        if self._rows is None:
            raise UsageError("this kernel has no model", hint="create it with PersistentKernel.from_model, or call it")
        prompts, several = prompts_of(ids)
        max_new_tokens = min(limits.COUNT_OR_NONE.check("max_new_tokens", max_new_tokens), self.max_seq_length)
        ends = token_set("eos_token_id", self.eos_token_id) if ends is None else token_set("ends", ends)
        if isinstance(self._rows, cuda.CudaKernel):
            if len(prompts) > 1:
                raise InputError(f"{len(prompts)} prompts: there is room for 1", hint="make the kernel with more rows")
            made = [self._rows.generate(prompt, max_new_tokens, ends) for prompt in prompts]
        elif self.lookup is not None and len(prompts) == 1:
            found, self.guesses = guesses.generate(self._rows, prompts[0], max_new_tokens, ends, self.lookup)
            made = [found]
        else:
            made = self._rows.generate(prompts, max_new_tokens, ends)
        return made if several else made[0]

    def stop(self) -> None:
        """End what another thread computes here after the token it is at: its call gives what there is by then."""
        if self._rows is None:
            self._stopping = True
        else:
            self._rows.stop()

    def save_trace(self, path: str | Path) -> int:
        """Write what the last call noted in `profiler_tensor` as a file that Perfetto and Chrome open; gives the number of
        its events."""
        if self._trace is None:
            raise UsageError(
                "this kernel records no trace", hint="pass profiler_tensor=torch.zeros(384_000, dtype=torch.uint64)"
            )
        if isinstance(self._rows, cuda.CudaKernel) and self._rows.marks is not None:
            return launch_trace.write_trace(self._rows.marks, path)
        return save_trace(self._trace, path)

    # --- written down ------------------------------------------------------------------------------------------------

    def compile(self, output_dir: str | Path | None = None) -> PersistentKernel:
        """Check that the program is whole: token ids come in, others go out. (`output_dir` is accepted: nothing is
        written.) The step is recorded when it has run once, where the device records."""
        if self.input is None or self.output is None:
            missing = "embed_layer" if self.input is None else "argmax_layer or sampling_layer"
            raise UsageError(
                f"the program has no {missing}", hint="begin with embed_layer, end with a choice of tokens"
            )
        if "tokens" not in self.meta:
            raise UsageError("meta_tensors has no tokens", hint="pass meta_tensors=[step, tokens]")
        rows = len(self.meta["tokens"])
        if self.input.tensor.numel() != rows:
            raise UsageError(f"embed_layer reads {self.input.tensor.numel()} tokens; meta_tensors has {rows} rows")
        self._recorder = Recorder(self.input.tensor.device)
        return self

    def load(self, output_dir: str | Path | None = None) -> PersistentKernel:
        """The same as `compile`, which writes nothing that could be loaded faster than it is made."""
        return self.compile(output_dir)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """Decode every row of `tokens` to its end; gives `tokens`, where the new ones are."""
        if self._recorder is None or self.input is None or self.output is None:
            raise UsageError("this kernel has no compiled program", hint="call compile() first")
        tokens, step = self.meta["tokens"], self.meta["step"]
        prompts = self.meta.get("prompt_lengths")
        places = [int(one) for one in step.tolist()]
        known = [int(one) for one in prompts.tolist()] if prompts is not None else [place + 1 for place in places]
        end = min(self.max_seq_length, tokens.shape[1])
        for name, given, least, most in (("step", places, 0, end - 1), ("prompt_lengths", known, 1, end)):
            if bad := [one for one in given if not least <= one <= most]:
                raise InputError(f"{name} has {bad[0]}: use {least} to {most}, as tokens has {end} places a row")
        for row, (place, count) in enumerate(zip(places, known, strict=True)):
            asked = tokens[row, place : max(count, place + 1)].tolist()
            if bad := [token for token in asked if not 0 <= token < self.words]:
                raise InputError(f"row {row} of tokens has {bad[0]}: ids go from 0 to {self.words - 1}")
        going = [row for row, place in enumerate(places) if place + 1 < end]
        ends = token_set("eos_token_id", self.eos_token_id)
        trace = None if self._trace is None else StepTrace(self._trace)
        while going and not self._stopping:
            now = tokens.gather(1, step.to(torch.int64).view(-1, 1))
            self.input.tensor.copy_(now.view(self.input.dims))
            if self._places is not None:
                self._places.copy_(step)
            self._recorder.run((), self._step)
            found = [int(one) for one in self.output.tensor.flatten().tolist()]
            still = []
            for row in going:
                place = places[row] = places[row] + 1
                if place >= known[row]:
                    tokens[row, place] = found[row]
                if place + 1 < end and (place < known[row] or found[row] not in ends):
                    still.append(row)
            step.copy_(torch.tensor(places, dtype=step.dtype))
            going = still
            if trace is not None:
                trace.did_step()
        self._stopping = False
        return tokens

    def _step(self) -> Tensor:
        for work in self.work:
            work()
        assert self.output is not None
        return self.output.tensor

    # --- what it is --------------------------------------------------------------------------------------------------

    def explain(self) -> str:
        """How tokens are computed here, and why, in words."""
        if isinstance(self._rows, cuda.CudaKernel):
            return f"one launch for all tokens of a text, {self._rows.blocks} blocks on {self.device}"
        if isinstance(self._rows, HostKernel):
            how = "all tokens" if self.lookup is None else f"up to {1 + self.lookup.spec_length} guessed tokens"
            return f"one call of C++ for {how} of {_texts(self._rows)}, {counted(self._rows.threads, 'worker')}"
        if isinstance(self._rows, RecordedSteps):
            whose = "our own kernels" if isinstance(self._rows, FusedSteps) else "torch's kernels"
            return f"a recorded step of {whose} for each token of {_texts(self._rows)} on {self.device}" + (
                f"; not recorded: {self._rows.recorded}" if self._rows.recorded else ""
            )
        if self._recorder is None:
            return f"a program of {len(self.work)} pieces of work that is not compiled"
        how = f"; not recorded: {self._recorder.failed}" if self._recorder.failed else ""
        how += "" if self.lookup is None else "; no guesses: a program of layers computes one token of a row"
        return f"a recorded step of {len(self.work)} layers for each token, on {self._recorder.device}{how}"


def _fastest(
    decoder: Decoder, rows: int, positions: int, workers: int, *, alone: bool = True, profile: bool = False
) -> Rows | cuda.CudaKernel:
    """One launch, one call of C++, or recorded steps: the first of these that the device and the model allow. `alone`: the
    tokens of a text come one by one, which one launch needs."""
    weight = decoder.lm_head.weight
    if weight.device.type == "cpu":
        try:
            return HostKernel(decoder, rows, positions, workers)
        except NativeUnavailable as exc:
            log.info("recorded steps in place of C++: %s", exc.message)
    elif rows == 1 and alone and not (why := cuda.refusal(decoder.spec, weight.dtype, weight.device)):
        try:
            return cuda.CudaKernel(decoder, positions, profile=profile)
        except NativeUnavailable as exc:
            log.info("recorded steps in place of one launch: %s", exc.message)
    elif rows == 1 and alone:
        log.info("recorded steps in place of one launch: %s", why)
    return steps_for(decoder, rows, positions)[0]


def prompts_of(ids: Any) -> tuple[list[list[int]], bool]:
    """One prompt or several, as lists of ints, and whether they were several. Raises InputError for what is neither."""
    ids = ids.tolist() if hasattr(ids, "tolist") else ids  # torch's, NumPy's
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Sequence):
        raise InputError(
            f"ids are of type {type(ids).__name__}",
            hint="pass token ids: a list or a tensor of them, or several of these",
        )
    parts = [one.tolist() if hasattr(one, "tolist") else one for one in ids]
    several = any(isinstance(one, Sequence) and not isinstance(one, (str, bytes)) for one in parts)
    prompts = parts if several else [parts]
    for number, prompt in enumerate(prompts):
        where = f"prompt {number}" if several else "the prompt"
        if not isinstance(prompt, Sequence) or isinstance(prompt, (str, bytes)):
            raise InputError(
                f"{where} is {prompt!r}, where others are lists of ids", hint="pass a list for each prompt"
            )
        if not prompt:
            raise InputError(f"{where} has 0 tokens: pass at least one")
        for place, token in enumerate(prompt):
            if isinstance(token, bool) or not isinstance(token, int):
                raise InputError(f"{where}: token {place} is {token!r}, not a whole number")
    return [list(prompt) for prompt in prompts], several


def token_set(name: str, given: Any) -> frozenset[int]:
    """The tokens that end a text: none, one or several. Raises UsageError."""
    if given is None:
        return frozenset()
    several = isinstance(given, Collection) and not isinstance(given, (str, bytes))
    return frozenset(limits.COUNT_OR_NONE.check(name, one) for one in (given if several else (given,)))


def _meta(given: Sequence[Tensor] | Mapping[str, Tensor] | None, length: int) -> dict[str, Tensor]:
    """The tensors by their names. Raises UsageError for shapes and types that cannot be meant."""
    if given is None:
        return {}
    if not isinstance(given, (Mapping, Sequence)):
        raise UsageError(
            f"meta_tensors is of type {type(given).__name__}", hint="pass [step, tokens], or a dictionary with both"
        )
    named = dict(given) if isinstance(given, Mapping) else dict(zip(META, given, strict=False))
    for name, tensor in named.items():
        if name not in (*META, *OTHERS):
            known = (*META, *OTHERS)
            raise UsageError(
                f"meta_tensors: {name!r} is unknown; known are {', '.join(known)}", hint=did_you_mean(str(name), known)
            )
        if not isinstance(tensor, Tensor):
            raise UsageError(f"meta_tensors: {name} is of type {type(tensor).__name__}, not a tensor")
    if not isinstance(given, Mapping) and not 2 <= len(given) <= len(META):
        raise UsageError(f"meta_tensors has {len(given)} tensors", hint="pass [step, tokens]")
    for name in ("step", "tokens"):
        if name not in named:
            raise UsageError(f"meta_tensors has no {name!r}", hint="pass [step, tokens], or a dictionary with both")
    step, tokens = named["step"], named["tokens"]
    if tokens.dim() != 2 or tokens.dtype != torch.int64 or tokens.shape[1] < length:
        raise UsageError(
            f"tokens is {tokens.dtype} of {list(tokens.shape)}, not int64 of [rows, {length} or more]",
            hint=f"torch.zeros(rows, {length}, dtype=torch.int64)",
        )
    for name in ("step", "prompt_lengths"):
        if name in named and (
            named[name].shape != tokens.shape[:1] or named[name].dtype not in (torch.int32, torch.int64)
        ):
            raise UsageError(
                f"{name} is {named[name].dtype} of {list(named[name].shape)}, not int32 of [{len(tokens)}]"
            )
    if step.device != tokens.device:
        raise UsageError(f"step is on {step.device}, tokens on {tokens.device}", hint="put both on one device")
    return named
