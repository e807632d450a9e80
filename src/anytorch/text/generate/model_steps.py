"""Models of transformers token by token with nothing but replays: for every family that we have no decoder of.

transformers' own step makes new tensors for every token, and launches each operation from Python. Here the model's own
forward reads and writes a cache of fixed tensors in which every row goes on by itself, so that a step of all rows can be
recorded once and replayed. What the cache keeps is in `kept.py`. The model's masks follow from one that says how many places
of a row have a token: in a sliding window, too, as the order of places is nothing to attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from anytorch.devices.locate import locate
from anytorch.devices.oom import is_out_of_memory
from anytorch.errors import ModelError, UsageError
from anytorch.recorded.graphs import graph_class
from anytorch.text.checkpoints.locate import first_line
from anytorch.text.decoders.room import room_for
from anytorch.text.decoders.rows import Rows
from anytorch.text.decoders.steps import LEAST_PLACES, PlacedSteps
from anytorch.text.generate.cache import GrowingLayer, new_cache
from anytorch.text.generate.forward import CHANGING, Forward, rope_types
from anytorch.text.generate.kept import States, fixed, kept_of
from anytorch.text.generate.kernel import Needs, Opened
from anytorch.text.persistent.ahead import AHEAD, Ahead
from anytorch.text.persistent.fused import SAME

SAME_FLOAT32 = 1e-3  # of the logits' size; shorter floats: `SAME`
TRIED = (3, 6)  # tokens of the two prompts that a model is tried out with
TRIED_STEPS = 3  # the second is recorded, the third replayed


class Stepped:
    """A model of transformers that can be computed in steps over fixed tensors. Raises ModelError where it cannot."""

    def __init__(self, model: Any, folder: Path) -> None:
        self.forward = Forward(model, folder)
        self.config = model.config
        self.gathers = False  # the experts of a step: more to read, and the host need not know which they are
        words = model.get_input_embeddings().weight
        self.device: torch.device = words.device
        self.dtype: torch.dtype = words.dtype  # of what is computed; logits may be wider (Mamba's are float32)
        text = self.config.get_text_config(decoder=True) if hasattr(self.config, "get_text_config") else self.config
        if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
            raise ModelError("it attends within chunks of the text, which is not supported")
        if "local" in (getattr(text, "attention_layers", None) or ()):  # GPT-Neo
            raise ModelError(
                "its layers count a window's places by themselves, so texts of several lengths cannot share a step"
            )
        if changing := CHANGING & rope_types(text):
            raise ModelError(
                f"its rotary angles ({', '.join(sorted(changing))}) follow the longest text of a step, "
                "so texts of several lengths cannot share one"
            )
        cache = new_cache(self.config)
        logits = self.read([0, 0], cache)
        self.layers = [kept_of(layer) for layer in cache.layers]
        self.vocabulary = min(len(logits), len(words))
        self.attends = any(layer.attends for layer in self.layers)
        # A window of keys or a state is only ever filled in one go: that is what every model supports.
        self.in_portions = all(layer.kind is GrowingLayer for layer in self.layers)
        self.states = [(number, state) for number, layer in enumerate(self.layers) for state in layer.states]
        if self.attends and "attention_mask" not in self.forward.parameters:
            raise ModelError("it takes no attention_mask, so texts of several lengths cannot share a step")

    def read(self, ids: Sequence[int], cache: Any, begin: int = 0) -> Tensor:
        """Logits of the last of some tokens of one text, [vocabulary]; `cache` keeps them."""
        given = torch.tensor([list(ids)], device=self.device)
        return self.forward(given, cache, torch.arange(begin, begin + len(ids), device=self.device)[None], None)[0]

    def needs(self, most_positions: int | None) -> Needs:
        full = sum(layer.token_nbytes for layer in self.layers if layer.window is None)
        windows = tuple((layer.window, layer.token_nbytes) for layer in self.layers if layer.window is not None)
        states = 2 * sum(state.nbytes for _, state in self.states)  # before and after a step
        return Needs(self.vocabulary, most_positions, full, windows, states)

    @property
    def mixes(self) -> bool:
        """Whether there are experts that can be computed in another way than the model's own."""
        return bool(getattr(self.forward.model, "_can_set_experts_implementation", bool)())

    @contextmanager
    def own_experts(self) -> Iterator[None]:
        """A context in which a mixture's experts are gathered for each token where `gathers` says so."""
        if not self.gathers:
            yield
            return
        model = self.forward.model
        before = model.get_experts_implementation()
        model.set_experts_implementation("batched_mm")
        try:
            yield
        finally:
            model.set_experts_implementation(before)


class ModelSteps(PlacedSteps):
    """`rows` texts of up to `positions` tokens each by a model of transformers, one replay for each token of all of them."""

    def __init__(self, stepped: Stepped, rows: int = 1, positions: int = LEAST_PLACES) -> None:
        device = stepped.device
        super().__init__(rows, positions, device)
        self.stepped, self.whole_prompts = stepped, not stepped.in_portions
        places = positions if stepped.attends else 0
        self._every_row = torch.arange(rows, device=device)
        self._every_place = torch.arange(places, device=device)
        self._kept: list[tuple[Tensor, ...]] = []  # keys and values of each layer, [rows, heads, places, width]
        needs = stepped.needs(None)
        with room_for(rows * needs.nbytes(places), rows, positions, device, needs.fitting):
            for layer in stepped.layers:
                own = min(layer.window or places, places)
                shapes = [(rows, heads, own, width) for heads, width in (layer.keys, layer.values)]
                # Zeros, not whatever is there: a hidden place counts for 0, and 0 times NaN is NaN.
                self._kept.append(tuple(torch.zeros(shape, dtype=layer.dtype, device=device) for shape in shapes))
            self._states = States(stepped.states, rows, device)
        self._followed: set[int] = set()  # rows that the next step is for
        self._sees_all = False  # one row, and every place of the step has a token of it

    @property
    def vocabulary(self) -> int:
        return self.stepped.vocabulary

    # --- texts -----------------------------------------------------------------------------------------------------

    def _read(self, row: int, ids: Sequence[int], begin: int, every: bool) -> Tensor:
        if every:
            raise UsageError("these steps give logits of a prompt's last token only", hint="use one of our decoders")
        if begin and self.whole_prompts:
            raise UsageError("this model cannot continue a prompt: it reads one as a whole", hint="start the row again")
        cache = new_cache(self.stepped.config) if self.whole_prompts else self._cache_of_row(row, begin)
        logits = self.stepped.read(ids, cache, begin)
        if self.whole_prompts:
            for layer, kept, of in zip(cache.layers, self._kept, self.stepped.layers, strict=True):
                if of.attends:
                    for mine, new in zip(kept, (layer.keys, layer.values), strict=True):
                        put_last(mine[row], new[0], len(ids))
            self._states.read(row, cache.layers, len(ids))
        return logits

    def _cache_of_row(self, row: int, length: int) -> Any:
        """A cache for a prompt, whose keys and values are kept where steps find them."""
        cache = DynamicCache()
        cache.layers = []
        for keys, values in self._kept:
            layer = GrowingLayer()
            layer.hold(keys[row : row + 1], values[row : row + 1], length)
            cache.layers.append(layer)
        return cache

    def follow(self, row: int, token: int) -> None:
        super().follow(row, token)
        self._followed.add(row)

    def _wait(self, row: int) -> None:
        super()._wait(row)
        self._followed.discard(row)

    def cut(self, row: int, length: int = 0) -> None:
        self._states.cut(row, length)
        super().cut(row, length)

    @torch.no_grad()
    def take(self, row: int, other: Rows, source: int) -> None:
        assert isinstance(other, ModelSteps)
        self._check(row)
        length = other.lengths[source]
        for mine, theirs in zip(self._kept, other._kept, strict=True):
            for to, of in zip(mine, theirs, strict=True):
                # A window that is not as long in both has not come round in either: places are those of the text.
                count = min(length, to.shape[2], of.shape[2])
                to[row, :, :count] = of[source, :, :count]
        self._states.take(row, other._states, source)
        self.lengths[row] = length
        self._wait(row)

    # --- a step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self) -> Tensor:
        self._states.accept()
        logits = super().step()
        self._states.under_way(self._followed)
        for row in tuple(self._followed):  # computed once more beside others, from its next state, its key would change
            self._wait(row)
        return logits

    def _extent(self, ahead: int = 0) -> tuple[int, int]:
        rows, places = super()._extent(ahead)
        if self.recorded:  # nothing is: every step may have a shape of its own
            rows = max((row + 1 for row in range(self.rows) if self.lengths[row]), default=1)
            places = max(1, max(self.lengths) + ahead)
        self._sees_all = bool(self.recorded) and rows == 1
        return rows, places if self.stepped.attends else 0

    @torch.no_grad()
    def _computed(self, rows: int, places: int) -> Tensor:
        own, masked = self._places[:rows], not self._sees_all
        mask = (self._every_place[:places] <= own[:, None]).long() if masked and places else None
        places_in = {kept[0].shape[2]: own % kept[0].shape[2] for kept in self._kept if kept[0].numel()}
        cache = DynamicCache()
        cache.layers = []
        for number, (kept, of) in enumerate(zip(self._kept, self.stepped.layers, strict=True)):
            layer = fixed(of, self._states.of_layer(number, rows))
            if of.attends:
                mine, at = (one[:rows] for one in kept), places_in[kept[0].shape[2]]
                layer.hold(*mine, places, self._every_row[:rows], at, sliding=of.window is not None, masked=masked)
            cache.layers.append(layer)
        self._states.begin(rows)
        with self.stepped.own_experts():
            return self.stepped.forward(self._ids[:rows, None], cache, own[:, None], mask)


class AheadModelSteps(Ahead, ModelSteps):
    """`ModelSteps` that choose their tokens on the device, and are ahead of the host where a token can be taken back."""

    def __init__(self, stepped: Stepped, rows: int = 1, positions: int = LEAST_PLACES) -> None:
        super().__init__(stepped, rows, positions)
        self.ahead = 1 if self.whole_prompts else AHEAD  # a window, too, forgets a token for one that comes

    def _launch(self, rows: Sequence[int], *given: Any) -> None:
        self._states.accept()
        super()._launch(rows, *given)
        self._states.under_way(rows)


def put_last(mine: Tensor, new: Tensor, length: int) -> None:
    """Put the last of `length` tokens, which `new` ends with, where steps look for them: [heads, places, width] each."""
    places = mine.shape[1]
    count = min(new.shape[1], places, length)
    where = torch.arange(length - count, length, device=mine.device) % places
    mine[:, where] = new[:, new.shape[1] - count :]


# --- opening -----------------------------------------------------------------------------------------------------------


def open_model(model: Any, folder: Path, most_positions: int | None) -> Opened:
    """A model of transformers at its place, in recorded steps. Raises ModelError where they do not give what it gives."""
    try:
        with torch.no_grad():
            stepped = Stepped(model, folder)
            backend, index = locate(stepped.device)
            kind = AheadModelSteps if backend.caps(index).triton else ModelSteps
            recorded = tried_out(stepped, kind, most_positions)
            if recorded and stepped.mixes and graph_class(torch.get_device_module(stepped.device)) is not None:
                stepped.gathers = True
                recorded = tried_out(stepped, kind, most_positions)
    except ModelError:
        raise
    except Exception as exc:
        if is_out_of_memory(exc):
            raise
        raise ModelError(f"its step over fixed tensors fails: {first_line(exc)}") from exc
    says = "one recorded step of transformers' own model computes a token of all requests"
    if recorded:
        says = (
            "a step of transformers' own model, over fixed tensors, computes a token of all requests; "
            f"it is not recorded: {recorded}"
        )
    make: Callable[[int, int], ModelSteps] = lambda rows, positions: kind(stepped, rows, positions)  # noqa: E731
    return Opened(model, make, ModelSteps.__name__, says, None, stepped.needs(most_positions))


def tried_out(stepped: Stepped, kind: type[ModelSteps], most_positions: int | None) -> str:
    """Compute some tokens of two texts in steps, and read the same texts in one go. Gives why steps are not recorded, or "".
    Raises ModelError where the logits differ."""
    most = max(2, LEAST_PLACES if most_positions is None else min(LEAST_PLACES, most_positions))
    steps = kind(stepped, 2, most)
    texts = [[(7 * place + row) % stepped.vocabulary for place in range(count)] for row, count in enumerate(TRIED)]
    texts = [text[: max(1, most - TRIED_STEPS)] for text in texts]
    for row, text in enumerate(texts):
        steps.read(row, text)
    for number in range(min(TRIED_STEPS, most - 1)):
        for row, text in enumerate(texts):
            text.append((11 * number + row) % stepped.vocabulary)
            steps.follow(row, text[-1])
        logits = steps.step()
    for row, text in enumerate(texts):
        wanted = stepped.read(text, new_cache(stepped.config)).float()
        by = float((logits[row].float() - wanted).norm() / wanted.norm().clamp(min=1e-30))
        if not by <= (SAME_FLOAT32 if stepped.dtype == torch.float32 else SAME):
            raise ModelError(f"its step over fixed tensors gives other logits: they differ by {by:.2g} of their size")
    return steps.recorded
