"""Random small functions through `torch.compile(backend="anytorch")` beside eager torch: values, strides, gradients."""

from __future__ import annotations

import copy
import itertools
import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from anytorch.graph import compiler, faster

SHAPES = ((3, 8), (8,), (3, 1), (2, 3, 8), (1, 8), (8, 5), (1,))
DTYPES = ("float32",) * 6 + ("bfloat16", "float16", "float64", "int64", "int32", "bool")
# a and b are variables, d is a dimension, f is a as floats.
OF_ONE = """torch.tanh(f)|torch.exp(-f.abs())|torch.sigmoid(f)|a * 2|a + 1|-f|torch.relu(a)|F.silu(f)|F.gelu(f)|f.square()|
torch.sqrt(f.abs() + 1)|torch.log(f.abs() + 1)|a.clamp(-1, 2)|a.to(torch.bfloat16)|a.to(torch.float16)|a.to(torch.int64)|
a.bool()|torch.erf(f)|torch.sin(f)|f.floor()|f**3|1 / (f.abs() + 1)|a.sign()|torch.zeros_like(a)|torch.full_like(a, 3)|
torch.isnan(a)|F.leaky_relu(f)|F.softplus(f)|F.elu(f)|torch.rsqrt(f.abs() + 0.5)"""
REDUCED = """f.sum(d)|f.mean(d, keepdim=True)|a.amax(d)|a.amin(d, keepdim=True)|torch.softmax(f, d)|torch.log_softmax(f, d)|
f.var(d, keepdim=True)|f.cumsum(d)|a.argmax(d)|torch.sort(a, d)[0]|f.sum()|torch.logsumexp(f, d)|F.normalize(f, dim=d)|
torch.any(a, d)|a.sum(d)|a.max(d)[0]|a.max(d)[1]"""
SHAPED = """a.transpose(0, -1)|a.reshape(-1)|a.unsqueeze(0)|a[..., ::2]|a[..., 1:]|a.flip(-1)|
a.unsqueeze(-1).expand(*a.shape, 2)|a.clone()|torch.cat([a, a], -1)|torch.stack([a, a])|a.squeeze()|
torch.roll(a, 1, -1)|F.pad(a, (1, 2))|
a.chunk(2, -1)[0]|a.select(-1, 0)|torch.tril(a)|a.movedim(0, -1)|a.repeat(*[2] + [1] * (a.dim() - 1))"""
OF_TWO = """a + b|f * b|f - b|torch.maximum(f, b.float())|f / (b.float().abs() + 1)|torch.where(a > b, a, b)|f @ b.float()|
a > b|a == b|torch.minimum(a, b)|torch.cat([a.flatten(), b.flatten()])|a.masked_fill(b.bool(), 0)|F.linear(f, b.float())"""
IN_PLACE = "a.mul_(2)|a.add_(1)|a[..., 0].zero_()|a.clamp_(-1, 1)|a.copy_(b)|a[..., :1].fill_(1)|a.add_(b)"
KINDS = [[one.strip() for one in text.split("|")] for text in (OF_ONE, REDUCED, SHAPED, OF_TWO, IN_PLACE)]
WEIGHTS = (5, 2, 3, 3, 0.6)
MOST_ELEMENTS, LARGEST = 4000, 1e4


def program(seed: int) -> tuple[str, Callable[..., Any], list[torch.Tensor]]:
    """The text of a function that eager torch can compute, the function, and its inputs."""
    dice = random.Random(seed)
    torch.manual_seed(seed)
    inputs = []
    for _ in range(dice.randint(1, 3)):
        made, dtype = torch.randn(dice.choice(SHAPES)) * 2, getattr(torch, dice.choice(DTYPES))
        made = made > 0 if dtype == torch.bool else (made if dtype.is_floating_point else made * 3).to(dtype)
        inputs.append(made.mT.contiguous().mT if made.dim() > 1 and dice.random() < 0.3 else made)
    values = {f"x{n}": one for n, one in enumerate(copy.deepcopy(inputs))}
    lines: list[str] = []
    for _ in range(60):
        if len(lines) == 8:
            break
        (kind,) = dice.choices(KINDS, WEIGHTS)
        names = {"a": dice.choice(list(values)), "b": dice.choice(list(values)), "d": str(dice.choice((-1, 0)))}
        line = dice.choice(kind)
        for short, name in (("f", f"{names['a']}.float()"), *names.items()):
            line = re.sub(rf"(?<![\w.]){short}(?!\w)", name, line)  # where the letter stands by itself
        before = copy.deepcopy(values)
        try:
            made = eval(line, {"torch": torch, "F": F, **values})
            assert 0 < made.numel() <= MOST_ELEMENTS and made.dim() <= 4
            assert float(made.float().abs().nan_to_num(0.0).max()) < LARGEST
        except (RuntimeError, IndexError, TypeError, ValueError, AssertionError, UserWarning):
            values = before
            continue
        if kind is KINDS[-1]:
            lines.append(line)
        else:
            values[f"v{len(lines)}"] = made
            lines.append(f"v{len(lines)} = {line}")
    returned = dict.fromkeys([*dice.sample(list(values), min(len(values), 3)), list(values)[-1]])
    head = f"def function({', '.join(f'x{n}' for n in range(len(inputs)))}):\n"
    text = head + "".join(f"    {line}\n" for line in [*lines, f"return ({', '.join(returned)},)"])
    found: dict[str, Any] = {"torch": torch, "F": F}
    exec(text, found)
    return text, found["function"], inputs


def gradients(made: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor | None]:
    roots = [one.double().square().sum() for one in made if one.is_floating_point() and one.requires_grad]
    leaves = [one for one in inputs if one.requires_grad]
    if not roots or not leaves:
        return []
    # An input that does not matter has no gradient, or one of zeros.
    found = torch.autograd.grad(sum(roots), leaves, allow_unused=True)
    return [torch.zeros_like(leaf) if one is None else one for one, leaf in zip(found, leaves, strict=True)]


@pytest.fixture(autouse=True)
def ours(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(faster.Faster, "_measured", lambda self, inputs, changed, device: self._ours)


def _given(inputs: list[torch.Tensor], training: bool) -> list[torch.Tensor]:
    """Copies that lie in memory alike."""
    return [one.requires_grad_(training and one.is_floating_point()) for one in copy.deepcopy(inputs)]


def check(seed: int, training: bool) -> None:
    for one in itertools.count(seed, 1000):
        text, function, inputs = program(one)
        mine, theirs = (_given(inputs, training) for _ in range(2))
        try:
            wanted = function(*theirs)
            wanted_gradients = gradients(wanted, theirs)
            break
        except RuntimeError:  # eager torch refuses it, as where a leaf is written to, or what a gradient needs
            continue
    found = torch.compile(function, backend=compiler.compile_graph)(*mine)
    is_half = "float16" in text or any(one.dtype in (torch.float16, torch.bfloat16) for one in inputs)
    bounds: dict[str, Any] = {"rtol": 4e-2, "atol": 4e-2} if is_half else {"rtol": 1e-3, "atol": 1e-4}
    said = lambda plain: f"{text}{[(tuple(one.shape), one.dtype, one.stride()) for one in inputs]}\n{plain}"  # noqa: E731
    for one, other in zip(found, wanted, strict=True):
        assert one.numel() < 2 or one.stride() == other.stride(), said("")
    torch.testing.assert_close([*found, *mine], [*wanted, *theirs], equal_nan=True, msg=said, **bounds)
    bounds = {name: 10 * bound for name, bound in bounds.items()}
    torch.testing.assert_close(gradients(found, mine), wanted_gradients, equal_nan=True, msg=said, **bounds)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("training", [False, True])
def test_a_random_program_does_the_same(seed: int, training: bool) -> None:
    check(seed, training)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 40))
@pytest.mark.parametrize("training", [False, True])
def test_more_random_programs_do_the_same(seed: int, training: bool) -> None:
    check(seed, training)
