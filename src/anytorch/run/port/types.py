"""Tensor types from before there were devices: `torch.cuda.FloatTensor(…)`, `x.type(Tensor)`, and names that choose one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
import libcst.matchers as m

from anytorch.run.port.syntax import Facts, code, dotted, expression, text_of
from anytorch.run.port.texts import GIVES_DEVICE, Texts

DTYPES = {
    "FloatTensor": "float32",
    "DoubleTensor": "float64",
    "HalfTensor": "float16",
    "BFloat16Tensor": "bfloat16",
    "ByteTensor": "uint8",
    "CharTensor": "int8",
    "ShortTensor": "int16",
    "IntTensor": "int32",
    "LongTensor": "int64",
    "BoolTensor": "bool",
}


class Types(Texts):
    """Rewrites what makes and converts tensors by their types."""

    def __init__(self, known: Facts) -> None:
        super().__init__(known)
        self._chosen: dict[str, str] = {}  # the module's name for a type → "FloatTensor"

    def visit_Module(self, node: cst.Module) -> None:
        self._chosen = chosen_types(node, self._torch)

    def _of_types(self, name: str, original: cst.Call, updated: cst.Call) -> Any:
        """`torch.cuda.FloatTensor(…)`, `Tensor(…)`, `x.type(Tensor)`; None for other calls."""
        func, kind = original.func, name.removeprefix("torch.cuda.")
        if name.startswith("torch.cuda.") and kind in DTYPES:
            made: cst.BaseExpression = updated.with_changes(func=expression(f"{self._torch}.{kind}"))
        elif isinstance(func, cst.Name) and func.value in self._chosen:
            made = updated
        elif isinstance(func, cst.Attribute) and func.attr.value == "type" and len(original.args) == 1:
            dtype = DTYPES.get(self._kind_of(original.args[0].value))
            if dtype is None:
                return None
            to = cst.ensure_type(updated.func, cst.Attribute).with_changes(attr=cst.Name("to"))
            args = [cst.Arg(expression(self._device)), cst.Arg(expression(f"{self._torch}.{dtype}"))]
            return self._put(original, updated.with_changes(func=to, args=args), GIVES_DEVICE)
        else:
            return None
        moved = cst.Call(cst.Attribute(made, cst.Name("to")), [cst.Arg(expression(self._device))])
        return self._put(original, moved, GIVES_DEVICE)

    def _kind_of(self, node: cst.BaseExpression) -> str:
        """ "FloatTensor" of CUDA's type of that name: by its text, itself, or a name that chooses it; "" of others."""
        if isinstance(node, cst.Name) and node.value in self._chosen:
            return self._chosen[node.value]
        named = text_of(node) or self._name(node)
        return named.removeprefix("torch.cuda.") if named.startswith("torch.cuda.") else ""

    def _of_choice(self, original: cst.IfExp, updated: cst.IfExp) -> Any:
        """`Tensor = torch.cuda.FloatTensor if cuda else torch.FloatTensor`: the host's; what it makes is moved."""
        parent = self._parent(original)
        target = parent.targets[0].target if isinstance(parent, cst.Assign) else None
        if not isinstance(target, cst.Name) or target.value not in self._chosen:
            return None
        return self._put(original, updated.orelse, "what it makes is moved where it is called")


def chosen_types(tree: cst.Module, torch: str) -> dict[str, str]:
    """Names that are CUDA's type where there is CUDA and the host's elsewhere, and are only called or given to `.type`."""
    seen = _Uses(torch)
    tree.visit(seen)
    asks = {name for name, values in seen.bound.items() if all(_asks(value, torch) for value in values)}
    chosen: dict[str, str] = {}
    for name, values in seen.bound.items():
        kinds = {_choice(value, torch, asks) for value in values}
        if len(kinds) == 1 and "" not in kinds and name not in seen.otherwise:
            chosen[name] = kinds.pop()
    return chosen


def _asks(node: cst.BaseExpression | None, torch: str) -> bool:
    """True for `torch.cuda.is_available()`, also as `True if … else False`."""
    if isinstance(node, cst.IfExp):
        return _asks(node.test, torch) and code(node.body) == "True" and code(node.orelse) == "False"
    return node is not None and code(node) == f"{torch}.cuda.is_available()"


def _choice(node: cst.BaseExpression | None, torch: str, asks: set[str]) -> str:
    """ "FloatTensor" of `torch.cuda.FloatTensor if … else torch.FloatTensor`, where the question is about the hardware."""
    if not isinstance(node, cst.IfExp) or not (_asks(node.test, torch) or dotted(node.test) in asks):
        return ""
    kind = dotted(node.body).removeprefix(f"{torch}.cuda.")
    hosts = (f"{torch}.{kind}", f"{torch}.Tensor") if kind == "FloatTensor" else (f"{torch}.{kind}",)
    return kind if kind in DTYPES and dotted(node.orelse) in hosts else ""


@dataclass
class _Uses(cst.CSTVisitor):
    """What a module's names are bound to, and which are used otherwise than called or given to `.type(…)`."""

    torch: str
    bound: dict[str, list[cst.BaseExpression | None]] = field(default_factory=dict)
    otherwise: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def visit_Assign(self, node: cst.Assign) -> bool:
        for target in node.targets:
            for name in _names(target.target):
                alone = isinstance(target.target, cst.Name)
                self.bound.setdefault(name, []).append(node.value if alone else None)
            if not isinstance(target.target, (cst.Name, cst.Tuple, cst.List)):
                target.target.visit(self)
        node.value.visit(self)
        return False

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        self._elsewhere(node.target)

    def visit_Param(self, node: cst.Param) -> None:
        self._elsewhere(node.name)

    def visit_For(self, node: cst.For) -> None:
        self._elsewhere(node.target)

    def _elsewhere(self, target: cst.BaseExpression) -> None:
        """Bound to something that is not looked at."""
        for name in _names(target):
            self.bound.setdefault(name, []).append(None)

    def visit_Call(self, node: cst.Call) -> bool:
        if not isinstance(node.func, cst.Name):
            node.func.visit(self)
        typed = isinstance(node.func, cst.Attribute) and node.func.attr.value == "type" and len(node.args) == 1
        for argument in node.args:
            if not (typed and isinstance(argument.value, cst.Name)):
                argument.value.visit(self)
        return False

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        node.value.visit(self)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self.otherwise.add(node.value)

    def visit_AssignTarget(self, node: cst.AssignTarget) -> bool:
        return False

    def visit_ImportAlias(self, node: cst.ImportAlias) -> bool:
        self.otherwise.add((node.evaluated_alias or node.evaluated_name).partition(".")[0])
        return False


def _names(node: cst.BaseExpression) -> Iterator[str]:
    for found in m.findall(node, m.Name()) if isinstance(node, (cst.Tuple, cst.List)) else [node]:
        if isinstance(found, cst.Name):
            yield found.value
