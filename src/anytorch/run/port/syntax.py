"""Small questions about LibCST nodes, and the facts about a module that its rewriting depends on."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import libcst as cst
import libcst.matchers as m

KEEP = re.compile(r"#.*\banytorch:\s*keep\b")  # on a line that is to stay as it is
WANTED = "accelerator"  # the device's name in a ported module, where it is free
MODULE = cst.Module(body=[])


def code(node: cst.CSTNode) -> str:
    return MODULE.code_for_node(node)


def expression(text: str) -> cst.BaseExpression:
    return cst.parse_expression(text)


def dotted(node: cst.CSTNode | None) -> str:
    """ "torch.cuda.amp" of such an attribute, "" of anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr.value}" if owner else ""
    return ""


def text_of(node: cst.CSTNode | None) -> str | None:
    """The value of a plain string."""
    if isinstance(node, cst.SimpleString):
        value = node.evaluated_value
        return value if isinstance(value, str) else None
    return None


def comments(node: cst.CSTNode) -> list[str]:
    return [found.value for found in m.findall(node, m.Comment()) if isinstance(found, cst.Comment)]


def last_name(node: cst.CSTNode | None) -> str:
    """`device` of `self.device`, `args.device` and `args["device"]`; of `str(device)`, what is inside."""
    if isinstance(node, cst.Subscript) and len(node.slice) == 1:
        index = node.slice[0].slice
        return (text_of(index.value) or "") if isinstance(index, cst.Index) else ""
    if isinstance(node, cst.Call):
        return last_name(node.args[0].value) if dotted(node.func) == "str" and len(node.args) == 1 else ""
    return dotted(node).rpartition(".")[2] or (node.attr.value if isinstance(node, cst.Attribute) else "")


@dataclass(frozen=True)
class Facts:
    """What the rewriting of one module has to know beforehand."""

    torch: str  # the module's own name for torch
    binds_torch: bool  # whether it has one
    device: str  # a name for the device that is free in the whole module, or the one it has already
    has_setup: bool
    kept: frozenset[int]  # lines with KEEP
    devices: frozenset[str]  # names that hold devices: they are given to torch.device(…), .to(…), device=…
    bare: frozenset[str]  # names that are used otherwise than called, followed by a dot, or as annotations
    own_cuda: bool  # a class of its own has cuda() and no to()


def facts(tree: cst.Module, source: str) -> Facts:
    seen = _Names()
    tree.visit(seen)
    torch = next((name for name in _torch_names(tree)), "torch")
    mine = next((name for statement in tree.body if (name := setup_name(statement))), "")
    return Facts(
        torch=torch,
        binds_torch=any(True for _ in _torch_names(tree)),
        device=mine or _free(seen.names | seen.used),
        has_setup=bool(mine),
        kept=frozenset(_kept(source)),
        devices=frozenset(seen.devices - {""}),
        bare=frozenset(seen.bare),
        own_cuda=seen.own_cuda,
    )


def _free(taken: Collection[str]) -> str:
    if WANTED not in taken:
        return WANTED
    name, number = f"{WANTED}_device", 2
    while name in taken:
        name, number = f"{WANTED}_device_{number}", number + 1
    return name


def _kept(source: str) -> Iterator[int]:
    if "anytorch:" not in source:
        return
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and KEEP.match(token.string):
            yield token.start[0]


def statements(tree: cst.Module) -> Iterator[cst.BaseSmallStatement]:
    """The simple statements that run when the module is imported: also those inside try, if and with."""
    todo: list[cst.CSTNode] = list(reversed(tree.body))
    while todo:
        node = todo.pop()
        if isinstance(node, cst.SimpleStatementLine):
            yield from node.body
        elif isinstance(node, (cst.Try, cst.If, cst.With, cst.IndentedBlock)):
            todo += reversed(node.body.body if not isinstance(node, cst.IndentedBlock) else node.body)


def _torch_names(tree: cst.Module) -> Iterator[str]:
    """The module's names for torch: of `import torch`, `import torch.nn`, `import torch as th`."""
    for statement in statements(tree):
        if isinstance(statement, cst.Import):
            yield from torch_names(statement)


def torch_names(statement: cst.Import) -> Iterator[str]:
    for alias in statement.names:
        if alias.evaluated_name == "torch":
            yield alias.evaluated_alias or "torch"
        elif alias.evaluated_name.startswith("torch.") and alias.asname is None:
            yield "torch"


_SETUP = m.SimpleStatementLine(
    body=[
        m.Assign(
            targets=[m.AssignTarget(m.Name())],
            value=m.BooleanOperation(
                left=m.Call(
                    func=m.Attribute(
                        value=m.Attribute(value=m.Name(), attr=m.Name(WANTED)), attr=m.Name("current_accelerator")
                    )
                ),
                operator=m.Or(),
                right=m.Call(func=m.Attribute(attr=m.Name("device"))),
            ),
        )
    ]
)


def setup_name(statement: cst.CSTNode) -> str:
    """The device's name if the statement is the line that an earlier run has put there, else ""."""
    if isinstance(statement, (cst.Try, cst.If)):
        return next((name for inner in statement.body.body if (name := setup_name(inner))), "")
    if not m.matches(statement, _SETUP):
        return ""
    assign = cst.ensure_type(cst.ensure_type(statement, cst.SimpleStatementLine).body[0], cst.Assign)
    name = cst.ensure_type(assign.targets[0].target, cst.Name).value
    return name if name.startswith(WANTED) else ""


def used(tree: cst.Module) -> set[str]:
    """The names outside of the module's imports."""
    seen = _Names()
    tree.visit(seen)
    return seen.used


@dataclass
class _Names(cst.CSTVisitor):
    """Collects the names of a module."""

    names: set[str] = field(default_factory=set)  # those of its imports
    used: set[str] = field(default_factory=set)  # those outside of its imports
    devices: set[str] = field(default_factory=set)
    bare: set[str] = field(default_factory=set)
    own_cuda: bool = False

    def __post_init__(self) -> None:
        super().__init__()

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        if isinstance(node.value, cst.Name):
            self.used.add(node.value.value)
        else:
            node.value.visit(self)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self.used.add(node.value)
        self.bare.add(node.value)

    def visit_Annotation(self, node: cst.Annotation) -> bool:
        self.used |= {found.value for found in m.findall(node, m.Name()) if isinstance(found, cst.Name)}
        return False

    def visit_Import(self, node: cst.Import) -> bool:
        return self._imported(node.names)

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return self._imported(() if isinstance(node.names, cst.ImportStar) else node.names)

    def _imported(self, aliases: Collection[cst.ImportAlias]) -> bool:
        self.names |= {(alias.evaluated_alias or alias.evaluated_name).partition(".")[0] for alias in aliases}
        return False

    def visit_Call(self, node: cst.Call) -> bool:
        """A called name is not bare, and a keyword is no name of the module."""
        if isinstance(node.func, cst.Name):
            self.used.add(node.func.value)
        else:
            node.func.visit(self)
        method = dotted(node.func).rpartition(".")[2] or last_name(node.func)
        for place, argument in enumerate(node.args):
            keyword = argument.keyword.value if argument.keyword is not None else ""
            if keyword in ("device", "map_location") or (place == 0 and not keyword and method in ("to", "device")):
                self.devices.add(last_name(argument.value))
            argument.value.visit(self)
        return False

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        methods = {inner.name.value for inner in node.body.body if isinstance(inner, cst.FunctionDef)}
        self.own_cuda = self.own_cuda or ("cuda" in methods and "to" not in methods)
