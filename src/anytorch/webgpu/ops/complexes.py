"""complex64 on the device: no shader has a complex type, but a complex tensor is a real one with two numbers per element.

Every op here is made of kernels for float32 on the real and the imaginary parts. `fallback` asks `computed` before it takes
an op to the CPU, so these serve every form of an op: functional, in place and `out=`. complex128 runs on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from anytorch.webgpu import fallback
from anytorch.webgpu.dtypes import spoken
from anytorch.webgpu.kernels import into
from anytorch.webgpu.tensors import NAME, new_contiguous

Parts = tuple[Any, Any]  # real and imaginary: tensors of float32, or numbers
DTYPE = torch.complex64


def parts(value: Any) -> Parts:
    """The real and the imaginary part of a tensor or number; views of a tensor's, conjugated if it is lazily so."""
    if not isinstance(value, torch.Tensor):
        value = complex(value)
        return value.real, value.imag
    if not value.is_complex():
        return (value if value.is_floating_point() else value.float()), 0.0
    if value.is_conj():
        pair = torch.view_as_real(torch._conj(value))
        return pair[..., 0], -pair[..., 1]
    pair = torch.view_as_real(value)
    return pair[..., 0], pair[..., 1]


def joined(real: Any, imaginary: Any) -> torch.Tensor:
    """The complex tensor of these parts; one of them may be a number."""
    shape = torch.broadcast_shapes(*[v.shape for v in (real, imaginary) if isinstance(v, torch.Tensor)])
    made = new_contiguous(shape, DTYPE)
    if made.numel():
        pair = torch.view_as_real(made)
        for k, value in enumerate((real, imaginary)):
            place = pair.select(-1, k)
            place.copy_(value) if isinstance(value, torch.Tensor) else place.fill_(value)
    return made


def _real(imaginary: Any) -> bool:
    return isinstance(imaginary, float) and imaginary == 0.0


def _met_by_real(value: Parts) -> Parts:
    """What a product with a real number takes of each part. torch and NumPy make the number complex: an infinite or
    undefined part, times its zero, undoes the other."""
    real, imaginary = value
    return torch.add(real, imaginary, alpha=0.0), torch.add(imaginary, real, alpha=0.0)


def multiplied(a: Parts, b: Parts) -> Parts:
    (ar, ai), (br, bi) = a, b
    if _real(ai) and _real(bi):
        return ar * br, 0.0
    if _real(ai):
        br, bi = _met_by_real(b)
        return ar * br, ar * bi
    if _real(bi):
        ar, ai = _met_by_real(a)
        return ar * br, ai * br
    return ar * br - ai * bi, ar * bi + ai * br


def divided(a: Parts, b: Parts) -> Parts:
    """By Smith's way: the quotient of the smaller by the larger part of b overflows for nothing."""
    (ar, ai), (br, bi) = a, b
    if _real(bi):
        first, second = _met_by_real(a)
        if isinstance(br, torch.Tensor):
            first, second = torch.where(br == 0, ar, first), torch.where(br == 0, ai, second)
        elif br == 0:
            first, second = ar, ai
        return first / br, second / br
    br, bi = (v if isinstance(v, torch.Tensor) else torch.tensor(float(v), device=NAME) for v in (br, bi))
    wide = br.abs() >= bi.abs()
    large, small = torch.where(wide, br, bi), torch.where(wide, bi, br)
    ratio = torch.where((br == 0) & (bi == 0), 0.0, small / large)
    scale = large + small * ratio
    first = torch.where(wide, ar + ai * ratio, ar * ratio + ai)
    second = torch.where(wide, ai - ar * ratio, ai * ratio - ar)
    return first / scale, second / scale


def _scaled(value: Parts, number: Any) -> Parts:
    return value if number == 1 else multiplied(value, parts(number))


def _plus(a: Parts, b: Parts) -> Parts:
    return a[0] + b[0], a[1] + b[1]


def _minus(a: Parts, b: Parts) -> Parts:
    return a[0] - b[0], a[1] - b[1]


def add(a: Any, b: Any, *, alpha: Any = 1) -> torch.Tensor:
    return joined(*_plus(parts(a), _scaled(parts(b), alpha)))


def subtract(a: Any, b: Any, *, alpha: Any = 1) -> torch.Tensor:
    return joined(*_minus(parts(a), _scaled(parts(b), alpha)))


def multiply(a: Any, b: Any) -> torch.Tensor:
    return joined(*multiplied(parts(a), parts(b)))


def divide(a: Any, b: Any) -> torch.Tensor:
    return joined(*divided(parts(a), parts(b)))


def conjugate(x: torch.Tensor) -> torch.Tensor:
    real, imaginary = parts(x)
    return joined(real, -imaginary)


def magnitude(x: torch.Tensor) -> torch.Tensor:
    return torch.hypot(*parts(x))


def angle(x: torch.Tensor) -> torch.Tensor:
    real, imaginary = parts(x)
    return torch.atan2(imaginary, real)


def exponential(x: torch.Tensor) -> torch.Tensor:
    """As C has it: what is real stays real, and an infinite length turned by what is no angle is what it was."""
    real, imaginary = parts(x)
    size, root = real.exp(), (real / 2).exp()  # of a length beyond float32, a part need not be
    cosine, sine = (
        torch.where(size.isinf(), root * part * root, size * part) for part in (imaginary.cos(), imaginary.sin())
    )
    endless = real.isinf() & ~imaginary.isfinite()
    nothing = endless & (real < 0)
    return joined(
        torch.where(endless, size, cosine),
        torch.where(imaginary == 0, imaginary, torch.where(nothing, 0.0, sine)),
    )


def logarithm(x: torch.Tensor) -> torch.Tensor:
    return joined(magnitude(x).log(), angle(x))


def sign(x: torch.Tensor) -> torch.Tensor:
    size = magnitude(x)
    real, imaginary = (torch.where(size == 0, 0.0, part / size) for part in parts(x))
    return joined(real, imaginary)


def equal(a: Any, b: Any) -> torch.Tensor:
    (ar, ai), (br, bi) = parts(a), parts(b)
    same: torch.Tensor = (ar == br) & (ai == bi)
    return same


def _folded(name: str) -> Callable[..., torch.Tensor]:
    def fold(x: torch.Tensor, *args: Any, dtype: torch.dtype | None = None, **kwargs: Any) -> Any:
        if dtype not in (None, DTYPE) or x.dtype is not DTYPE:
            return NotImplemented
        real, imaginary = (getattr(torch, name)(part, *args, **kwargs) for part in parts(x))
        return joined(*(_met_by_real((real, imaginary)) if name == "mean" else (real, imaginary)))

    return fold


def where(condition: torch.Tensor, a: Any, b: Any) -> torch.Tensor:
    (ar, ai), (br, bi) = parts(a), parts(b)
    return joined(torch.where(condition, ar, br), torch.where(condition, ai, bi))


def masked_fill(x: torch.Tensor, mask: torch.Tensor, value: Any) -> torch.Tensor:
    number = value.item() if isinstance(value, torch.Tensor) else value
    return where(mask, complex(number), x)


def fill(x: torch.Tensor, value: Any) -> torch.Tensor:
    number = complex(value.item() if isinstance(value, torch.Tensor) else value)
    made = new_contiguous(x.shape, DTYPE)
    pair = torch.view_as_real(made)
    pair.select(-1, 0).fill_(number.real)
    pair.select(-1, 1).fill_(number.imag)
    return made


def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A matrix product, or a batch of them, by four real ones."""
    (ar, ai), (br, bi) = parts(a), parts(b)
    return joined(ar @ br - ai @ bi, ar @ bi + ai @ br)


def vector_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    (ar, ai), (br, bi) = parts(a), parts(b)
    return joined(torch.dot(ar, br) - torch.dot(ai, bi), torch.dot(ar, bi) + torch.dot(ai, br))


def added_product(d: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: Any = 1, alpha: Any = 1) -> torch.Tensor:
    scaled = _scaled(parts(product(a, b)), alpha)
    return joined(*(_plus(scaled, _scaled(parts(d), beta)) if beta != 0 else scaled))


def concatenate(tensors: Sequence[torch.Tensor], dim: int = 0) -> Any:
    if any(t.dtype is not DTYPE for t in tensors):
        return NotImplemented
    real, imaginary = zip(*[parts(t) for t in tensors], strict=True)
    return joined(torch.cat(real, dim), torch.cat(imaginary, dim))


def of_polar(size: torch.Tensor, angles: torch.Tensor) -> Any:
    if size.dtype is not torch.float32 or angles.dtype is not torch.float32:
        return NotImplemented
    return joined(size * angles.cos(), size * angles.sin())


def of_parts(real: torch.Tensor, imaginary: torch.Tensor) -> torch.Tensor:
    return joined(real, imaginary) if real.dtype is imaginary.dtype is torch.float32 else NotImplemented


OPS: dict[str, Callable[..., Any]] = {
    "add": add,
    "sub": subtract,
    "rsub": lambda a, b, alpha=1: subtract(b, a, alpha=alpha),
    "mul": multiply,
    "div": divide,
    "reciprocal": lambda x: divide(1.0, x),
    "neg": lambda x: joined(*(-part for part in parts(x))),
    "conj_physical": conjugate,
    "_conj_physical": conjugate,
    "abs": magnitude,
    "angle": angle,
    "exp": exponential,
    "log": logarithm,
    "sgn": sign,
    "square": lambda x: multiply(x, x),
    "eq": equal,
    "ne": lambda a, b: equal(a, b).logical_not(),
    "sum": _folded("sum"),
    "mean": _folded("mean"),
    "cumsum": _folded("cumsum"),
    "where": where,
    "masked_fill": masked_fill,
    "fill": fill,
    "zero": lambda x: fill(x, 0),
    "mm": product,
    "bmm": product,
    "addmm": added_product,
    "baddbmm": added_product,
    "addmv": added_product,
    "dot": vector_product,
    "vdot": lambda a, b: vector_product(a.conj(), b),
    "cat": concatenate,
}
# Of real arguments, with a complex result.
MAKERS: dict[str, Callable[..., Any]] = {"complex": of_parts, "polar": of_polar}


def _dtypes(values: Sequence[Any]) -> set[torch.dtype]:
    """Of the tensors among the arguments, none of which may be on another device, unless it is a single number."""
    found = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            found.add(value.dtype if value.device.type == NAME or not value.dim() else torch.complex128)
        elif isinstance(value, (list, tuple)):
            found |= _dtypes(value)
    return found


OTHERS = (torch.float32, torch.int64, torch.int32, torch.bool)


def computed(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What `op` returns, computed on the device; NotImplemented where it is not one of ours or an argument is not."""
    if op.namespace != "aten":
        return NotImplemented
    name = op._opname
    in_place = name.endswith("_") and not name.endswith("__")
    name = name.removesuffix("_") if in_place else name
    dtypes = _dtypes((*args, *[value for key, value in kwargs.items() if key != "out"]))
    if name in MAKERS:
        function = MAKERS[name]
    elif DTYPE in dtypes and dtypes <= {DTYPE, *OTHERS} and name in OPS:
        function = OPS[name]
    else:
        return NotImplemented
    named = dict(kwargs)
    out = args[0] if in_place else named.pop("out", None)
    if in_place and not out.is_complex():  # torch refuses to drop the imaginary part
        return NotImplemented
    if name == "div" and named.pop("rounding_mode", None) is not None:
        return NotImplemented
    made = function(*[_number(value) for value in args], **named)
    if made is NotImplemented or out is None:
        return made
    if name in MAKERS and out.dtype is not made.dtype:
        raise RuntimeError(
            f"Expected object of scalar type {spoken(made.dtype)} but got scalar type {spoken(out.dtype)} for argument 'out'"
        )
    return into(out, made)


def _number(value: Any) -> Any:
    """A 0-dim tensor of the CPU's as a number."""
    return value.item() if isinstance(value, torch.Tensor) and value.device.type != NAME else value


def register(library: torch.library.Library) -> None:
    fallback.detours.append(computed)
