"""Quantizing a whole model in place, layer by layer, undoing it, and explaining what it became."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import nn

from anytorch import logs
from anytorch.counts import counted
from anytorch.errors import InputError, ModelError, UsageError
from anytorch.quant.calibrate import InputStatistics, gptq, input_scaling
from anytorch.quant.choose import Prefer
from anytorch.quant.conv1d import QuantConv1D, as_linear, is_packable, kind_for, matrix_of, ordinary
from anytorch.quant.formats import Format, parse
from anytorch.quant.linear import QuantLinear
from anytorch.quant.tensor import pack, unpack
from anytorch.safetensors_files import locate_tensors, stored_tensor

log = logs.logger(__name__)

Skip = str | Callable[[str, nn.Module], bool]
Method = Literal["auto", "nearest", "gptq", "awq", "awq+gptq"]
STATISTICS_NBYTES = 1 << 30  # of covariances held at a time; more layers than that are calibrated in several passes


@dataclass(frozen=True)
class Report:
    """What `quantize` did."""

    format: str
    method: str
    quantized: tuple[str, ...]
    skipped: Mapping[str, str]  # name → why
    nbytes_before: int  # of the quantized layers' weights
    nbytes_after: int
    scaled_inputs: tuple[str, ...] = field(default=())

    def __str__(self) -> str:
        ratio = self.nbytes_after / self.nbytes_before if self.nbytes_before else 0.0
        lines = [
            f"{counted(len(self.quantized), 'layer')} in {self.format} ({self.method}): "
            f"{self.nbytes_before / 1e6:.1f} MB → {self.nbytes_after / 1e6:.1f} MB ({ratio:.3f}×)"
        ]
        lines += [f"  left as it is: {name} ({why})" for name, why in self.skipped.items()]
        return "\n".join(lines)


def quantize(
    model: nn.Module,
    format: str | Format,
    *,
    skip: Skip | Iterable[Skip] = (),
    group_size: int | None = None,
    calibration: Iterable[Any] | None = None,
    method: Method = "auto",
    refine: bool = True,
    prefer: Prefer = "memory",
    weights: str | Path | None = None,
) -> Report:
    """Replace the model's `nn.Linear` layers, and GPT-2's `Conv1D`, by packed ones, in place, one at a time.

    skip         names or patterns ("lm_head", "*.pooler.*") or functions of (name, module) that keep a layer as it is
    calibration  examples (each one is what `model` takes: a tensor, a tuple or a dict); with them `method` may be "gptq"
                 (the default then), "awq" or "awq+gptq"
    refine       search each group's scale for the least error
    weights      a safetensors file or folder to read the weights from, layer by layer: the model may then be on the meta
                 device, and no more than one layer's unpacked weight is in memory

    At no time are there two whole copies: a layer's float weight is dropped before the next is touched.
    """
    chosen = parse(format, group_size)
    if method not in get_args(Method):
        raise UsageError(f"method={method!r}: use one of {', '.join(get_args(Method))}")
    if calibration is None and method in ("gptq", "awq", "awq+gptq"):
        raise UsageError(f"method={method!r} needs calibration examples", hint="give calibration=[batch, …]")
    how = ("nearest" if calibration is None else "gptq") if method == "auto" else method
    if weights is not None and calibration is not None and any(p.is_meta for p in model.parameters()):
        raise UsageError(
            "calibration runs the model, and this one's weights are on the meta device",
            hint="load the model first, or quantize without examples",
        )
    layers, skipped = packable_layers(model, skip)
    source = None if weights is None else Checkpoint(Path(weights))
    if source is not None:
        source.match(model)
    before = after = 0
    scaled: list[str] = []
    for names in _passes(layers, how):
        statistics = {} if how == "nearest" else _observe(model, {name: layers[name] for name in names}, calibration)
        for name in names:
            own = layers.pop(name)
            if source is not None:
                source.fill(own, name)
            weight = matrix_of(own)
            if weight.is_meta:
                raise UsageError(
                    f"the layer {name} has no weight to quantize: it is on the meta device",
                    hint="say where the weights are with weights=<safetensors file or folder>",
                )
            before += weight.nbytes
            layer = _packed_layer(own, chosen, how, statistics.pop(name, None), name, refine, prefer)
            if layer.input_scale is not None:
                scaled.append(name)
            after += layer.nbytes
            replace_module(model, name, layer)
            del own, weight
    if source is not None:
        source.fill_rest(model)
    quantized = tuple(name for name, module in model.named_modules() if isinstance(module, QuantLinear))
    if not quantized:
        log.warning("no layer was quantized: %s", "; ".join(f"{n}: {w}" for n, w in skipped.items()) or "no nn.Linear")
    return Report(str(chosen), how, quantized, skipped, before, after, tuple(scaled))


def _packed_layer(
    own: nn.Module,
    format: Format,
    method: str,
    statistics: InputStatistics | None,
    name: str,
    refine: bool,
    prefer: Prefer,
) -> QuantLinear:
    kind, linear = kind_for(own), as_linear(own)
    if statistics is None:
        packed = pack(linear.weight, format, refine=refine)
        return kind.of(linear, format, prefer=prefer, packed=packed)
    statistics.check(name)
    weight, hessian = linear.weight.detach(), statistics.hessian
    factors = input_scaling(weight, format, statistics, refine=refine) if method.startswith("awq") else None
    if factors is not None:
        weight = (weight.float() / factors).to(weight.dtype)
        hessian = hessian * torch.outer(factors, factors)
    if method.endswith("gptq"):
        packed = gptq(weight, format, hessian, refine=refine)
    else:
        packed = pack(weight, format, refine=refine)
    return kind.of(linear, format, prefer=prefer, packed=packed, input_scale=factors)


def linear_targets(model: nn.Module, skip: Skip | Iterable[Skip] = ()) -> tuple[dict[str, nn.Linear], dict[str, str]]:
    """The `nn.Linear` layers among those of `packable_layers`."""
    layers, skipped = packable_layers(model, skip)
    return {name: layer for name, layer in layers.items() if isinstance(layer, nn.Linear)}, skipped


def packable_layers(model: nn.Module, skip: Skip | Iterable[Skip] = ()) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The layers of a model that can be packed, by name, and why others cannot. Raises UsageError for a bare nn.Linear."""
    rules = rules_of(skip)
    shared: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        shared.setdefault(id(parameter), []).append(name)
    layers: dict[str, nn.Module] = {}
    skipped: dict[str, str] = {}
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            skipped[name] = "packed already"
        # Exactly these classes: subclasses have a meaning of their own, and attention reads its out_proj's weight itself.
        elif is_packable(module):
            owners = shared.get(id(module.weight), [])
            if not owners:
                skipped[name] = "its weight is computed (pruning, weight norm)"
            elif any(_matches(rule, name, module) for rule in rules):
                skipped[name] = "asked for"
            elif len(owners) > 1:
                skipped[name] = f"shares its weight with {', '.join(o for o in owners if o != f'{name}.weight')}"
            else:
                layers[name] = module
    if "" in layers:
        raise UsageError(
            "the model itself is a linear layer, which cannot be replaced in place",
            hint="use QuantLinear.of(linear, format)",
        )
    return layers, skipped


def rules_of(rules: Skip | Iterable[Skip]) -> list[Skip]:
    return [rules] if isinstance(rules, str) or callable(rules) else list(rules)


def _matches(rule: Skip, name: str, module: nn.Module) -> bool:
    if callable(rule):
        return bool(rule(name, module))
    return fnmatchcase(name, rule) or name == rule or name.startswith(f"{rule}.") or name.endswith(f".{rule}")


def _passes(layers: Mapping[str, nn.Module], method: str) -> Iterator[list[str]]:
    """The layers' names in portions whose covariances fit in memory together, in the model's order."""
    if method == "nearest":
        yield list(layers)
        return
    portion: list[str] = []
    nbytes = 0
    for name, layer in list(layers.items()):
        need = matrix_of(layer).shape[1] ** 2 * 4
        if portion and nbytes + need > STATISTICS_NBYTES:
            yield portion
            portion, nbytes = [], 0
        portion.append(name)
        nbytes += need
    if portion:
        yield portion


def _observe(
    model: nn.Module, layers: Mapping[str, nn.Module], examples: Iterable[Any] | None
) -> dict[str, InputStatistics]:
    """Run the examples through the model and add up what reaches each layer."""
    assert examples is not None
    if isinstance(examples, Iterator):
        raise UsageError(
            "calibration examples are read once for each portion of the layers, but an iterator can be read only once",
            hint="give a list",
        )
    matrices = {name: matrix_of(layer) for name, layer in layers.items()}
    found = {name: InputStatistics(matrix.shape[1], matrix.device) for name, matrix in matrices.items()}

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda _module, inputs: found[name].add(inputs[0])

    hooks = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    was_training = model.training
    model.eval()
    seen = 0
    try:
        with torch.no_grad():
            for example in examples:
                call_with(model, example)
                seen += 1
    finally:
        model.train(was_training)
        for hook in hooks:
            hook.remove()
    if not seen:
        raise InputError("calibration holds no examples")
    return found


def call_with(model: nn.Module, example: Any) -> Any:
    """`model(**example)` for a mapping, `model(*example)` for a tuple or list, else `model(example)`."""
    if isinstance(example, Mapping):
        return model(**example)
    return model(*example) if isinstance(example, (tuple, list)) else model(example)


# --- plain safetensors checkpoints, one file or a folder of them, read one tensor at a time ----------------------------


class Checkpoint:
    """The tensors of a checkpoint by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tensors = locate_tensors(path)
        self.prefix = ""

    def match(self, model: nn.Module) -> None:
        """Find the word that the checkpoint puts before all of the model's names, if any ("bert.", "model.")."""
        wanted = list(model.state_dict(keep_vars=True))
        if not wanted:
            return
        starts = {""} | {key.removesuffix(wanted[0]) for key in self.tensors if key.endswith(f".{wanted[0]}")}
        self.prefix = max(
            sorted(starts, key=len), key=lambda start: sum(start + name in self.tensors for name in wanted)
        )

    def get(self, name: str) -> torch.Tensor:
        found = self.prefix + name
        if found not in self.tensors:
            raise ModelError(f"{self.path} has no tensor {found!r}")
        return stored_tensor(self.tensors[found])

    def fill(self, module: nn.Module, name: str) -> None:
        """Give a module's own parameters and buffers the checkpoint's values."""
        for own, parameter in module.named_parameters(recurse=False):
            self._assign(module, own, parameter, f"{name}.{own}" if name else own)
        for own, buffer in module.named_buffers(recurse=False):
            full = f"{name}.{own}" if name else own
            if own not in module._non_persistent_buffers_set:
                self._assign(module, own, buffer, full)
            elif buffer.is_meta:
                raise ModelError(
                    f"the buffer {full} is made by the model's own code and not stored; on the meta device it is lost",
                    hint="build the model on a real device (its Linear layers alone may be on meta)",
                )

    def _assign(self, module: nn.Module, own: str, old: torch.Tensor, full: str) -> None:
        value = self.get(full)
        if value.shape != old.shape:
            raise ModelError(f"{self.path}: {full} is {tuple(value.shape)}; the model has {tuple(old.shape)}")
        set_tensor(module, own, value)

    def fill_rest(self, model: nn.Module) -> None:
        for name, module in model.named_modules():
            if not isinstance(module, QuantLinear):
                self.fill(module, name)


def set_tensor(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Give a module's parameter or buffer these values: in place, or in memory of its own if it is on the meta device."""
    old = getattr(module, name)
    if not old.is_meta:
        with torch.no_grad():
            old.copy_(value)
    elif isinstance(old, nn.Parameter):
        setattr(module, name, nn.Parameter(value.clone(), requires_grad=old.requires_grad))
    else:
        setattr(module, name, value.clone())


def replace_module(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)


def dequantize(model: nn.Module) -> int:
    """Turn packed layers back into what they were (with the rounded weights), in place; returns how many there were."""
    found = [(name, module) for name, module in model.named_modules() if isinstance(module, QuantLinear)]
    for name, layer in found:
        if not name:
            raise ModelError("the model itself is a packed layer, which cannot be replaced in place")
        replace_module(model, name, ordinary(layer))
    return len(found)


def weight_errors(model: nn.Module, original: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """The relative error of each packed layer's weight against the original state dict's."""
    errors = {}
    for name, layer in model.named_modules():
        if isinstance(layer, QuantLinear):
            wanted = original[f"{name}.weight"].float()
            wanted = wanted.T if isinstance(layer, QuantConv1D) else wanted
            found = layer.matrix.float() if layer.input_scale is not None else unpack(layer.packed, torch.float32)
            errors[name] = float((found - wanted).norm() / wanted.norm())
    return errors


# --- what a quantized model is made of, and which kernel computes each layer and why: a table --------------------------


@dataclass(frozen=True)
class Row:
    layer: str
    format: str
    bits: float  # per weight, scales included
    m: int  # input rows
    kernel: str
    why: str
    speedup: float | None  # against the ordinary float multiplication
    like_it: int = 1  # layers of the same shape, for which the same was measured


@dataclass(frozen=True)
class Explanation:
    rows: tuple[Row, ...]
    nbytes: int  # of all packed weights
    nbytes_float: int  # of the same weights unpacked

    @property
    def slower(self) -> tuple[Row, ...]:
        """The cases in which the packed layer is slower than the ordinary one would be."""
        return tuple(row for row in self.rows if row.speedup is not None and row.speedup < 1.0)

    def __str__(self) -> str:
        head = ("layer", "format", "bits", "rows", "kernel", "why")
        body = [
            (
                row.layer + (f" (and {row.like_it - 1} like it)" if row.like_it > 1 else ""),
                row.format,
                f"{row.bits:.2f}",
                str(row.m),
                row.kernel,
                row.why,
            )
            for row in self.rows
        ]
        widths = [max(len(line[i]) for line in [head, *body]) for i in range(len(head))]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in [head, *body]
        ]
        ratio = self.nbytes / self.nbytes_float if self.nbytes_float else 0.0
        lines.append(f"packed weights: {self.nbytes / 1e6:.1f} MB, {ratio:.3f}× of {self.nbytes_float / 1e6:.1f} MB")
        if self.slower:
            lines.append(
                f"slower than float here: {len(self.slower)} of {len(self.rows)} cases; "
                "prefer='speed' keeps those layers' float weights beside the packed ones"
            )
        return "\n".join(lines)


def explain(model: nn.Module, m: Sequence[int] = (1, 64), dtype: torch.dtype | None = None) -> Explanation:
    """One line per kind of packed layer and number of input rows. What was not measured yet is measured now."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, QuantLinear)]
    kinds: dict[tuple[object, ...], list[tuple[str, QuantLinear]]] = {}
    for name, layer in layers:
        kind = (layer.out_features, layer.in_features, layer.format, layer.prefer, layer.codes.device)
        kinds.setdefault(kind, []).append((name, layer))
    rows = []
    for alike in kinds.values():
        name, layer = alike[0]
        for size in m:
            choice = layer.choice(size, dtype)
            bits = layer.packed.bits_per_weight
            rows.append(
                Row(name, str(layer.format), bits, size, choice.kernel, choice.why, choice.speedup, like_it=len(alike))
            )
    nbytes = sum(layer.nbytes for _, layer in layers)
    full = sum(layer.in_features * layer.out_features * layer.dtype.itemsize for _, layer in layers)
    return Explanation(tuple(rows), nbytes, full)
