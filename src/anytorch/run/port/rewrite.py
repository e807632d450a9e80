"""One source text that names CUDA → the same text in device-neutral PyTorch, and what was changed and left, line by line.

Formatting and comments stay as they are (LibCST). The rewritten text asks `torch.accelerator` for the device, once, after
its imports. What is not understood is left alone and listed. A line with `# anytorch: keep` is neither changed nor listed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper

from anytorch.run.port.noted import INNER, Note, by_line, within
from anytorch.run.port.setup import Unused, with_setup
from anytorch.run.port.syntax import Facts, code, comments, dotted, expression, facts, last_name, text_of, used
from anytorch.run.port.texts import (
    AMP,
    ANY,
    CUDA_ALONE,
    GIVES_DEVICE,
    GIVES_GROUP,
    GIVES_TYPE,
    NAME,
    UNKNOWN_COMPARISON,
    VENDORS,
    number_in,
)
from anytorch.run.port.types import Types

# Functions of torch.cuda that torch.accelerator has under these names.
ACCELERATOR = {
    "is_available": "is_available",
    "device_count": "device_count",
    "current_device": "current_device_index",
    "set_device": "set_device_index",
    "synchronize": "synchronize",
    "current_stream": "current_stream",
    "set_stream": "set_stream",
    "empty_cache": "empty_cache",
    "memory_allocated": "memory_allocated",
    "max_memory_allocated": "max_memory_allocated",
    "memory_reserved": "memory_reserved",
    "max_memory_reserved": "max_memory_reserved",
    "memory_stats": "memory_stats",
    "reset_peak_memory_stats": "reset_peak_memory_stats",
    "mem_get_info": "get_memory_info",
}
# torch.accelerator's are errors where there is no accelerator. As a statement of its own it gets a question before it.
STATEMENTS = frozenset({"set_device", "synchronize", "empty_cache", "reset_peak_memory_stats"})
NUMBERS = frozenset({"memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"})  # else 0
SEEDS = frozenset({"manual_seed", "manual_seed_all"})
AUTOCAST = ("enabled", "dtype", "cache_enabled")  # torch.amp.autocast has its arguments in another order
AVAILABLE = frozenset({f"torch.{vendor}.is_available" for vendor in VENDORS} | {"torch.backends.mps.is_available"})
# What is one vendor's alone.
MODULES = ("torch.cuda", "torch.backends.cuda", "torch.backends.cudnn", "torch.backends.mps", "torch.mps", "torch.xpu")
NAMES = frozenset({"torch.version.cuda", "torch.distributed.is_nccl_available", "torch.npu"})
PACKAGES = frozenset(
    {
        *("apex", "bitsandbytes", "causal_conv1d", "cupy", "cupyx", "flash_attn", "flash_attn_2_cuda", "flash_attn_3"),
        *("mamba_ssm", "nvidia", "pycuda", "pynvml", "tensorrt", "torch_npu", "torch_tensorrt", "transformer_engine"),
        *("triton", "xformers"),
    }
)

OR_CPU = "the accelerator, or the CPU where there is none"
GUARDS = "it guards what CUDA alone has"


@dataclass
class Ported:
    """The rewritten text, with a note for each change and for each mention that was left."""

    text: str
    changes: list[Note] = field(default_factory=list)
    left: list[Note] = field(default_factory=list)


def port(source: str) -> Ported:
    """Rewrite one source text. Raises libcst.ParserSyntaxError for what is not Python."""
    mark = "\ufeff" if source.startswith("\ufeff") else ""  # of some editors; LibCST drops it
    wrapper = MetadataWrapper(cst.parse_module(source.removeprefix(mark)))
    known = facts(wrapper.module, source.removeprefix(mark))
    rewriter = Rewriter(known)
    tree = wrapper.visit(rewriter)
    unused = rewriter.answered - used(tree)
    tree = tree.visit(Unused(unused))
    changes = rewriter.noted(rewriter.changes)
    left = [note for note, name in rewriter.imports if name not in unused]
    listed = sorted([*rewriter.noted(rewriter.left), *left], key=by_line)
    if not changes:
        return Ported(source, [], listed)  # LibCST does not give every source back as it was: one of blanks alone
    tree = with_setup(
        tree,
        known,
        needs_device=known.device in used(tree),
        needs_torch=any(f"{known.torch}." in note.after for note in changes),
    )
    return Ported(mark + tree.code, changes, listed)


class Rewriter(Types):
    """Rewrites from the inside out; every change is noted with the line it was made in."""

    def __init__(self, known: Facts) -> None:
        super().__init__(known)
        self.imports: list[tuple[Note, str]] = []  # of torch.cuda's names, which go if nothing needs them any more
        self._neutral_imports: set[str] = set()  # local names that were torch.cuda.amp's and are torch.amp's now

    # --- calls -------------------------------------------------------------------------------------------------------

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        name = self._name(original_node.func)
        if (typed := self._of_types(name, original_node, updated_node)) is not None:
            return typed
        new = (
            self._cuda_call(name, original_node, updated_node)
            if name.startswith("torch.cuda.")
            else self._other_call(name, original_node, updated_node)
        )
        return updated_node if new is None else new

    def _cuda_call(self, name: str, original: cst.Call, updated: cst.Call) -> Any:
        """A call of one of torch.cuda's functions, or of its amp's."""
        function = name.removeprefix("torch.cuda.")
        if function in SEEDS:
            new = updated.with_changes(func=expression(f"{self._torch}.manual_seed"))
            return self._put(original, new, "it seeds every device")
        if function.startswith("amp.") and function[4:] in AMP:
            return self._amp_call(function[4:], original, updated)
        if function not in ACCELERATOR:
            span = self._span(original)  # leave_Attribute has listed it; what it is given stays, too
            self.changes = [entry for entry in self.changes if not within(entry[0], span)]
            return original
        if function == "current_device" and self._use(original) == "device":
            return self._put(original, expression(self._device), GIVES_DEVICE)
        new = updated.with_changes(func=expression(f"{self._torch}.accelerator.{ACCELERATOR[function]}"))
        if function in NUMBERS and not self._guarded(original):
            text = f"{code(new)} if {self._torch}.accelerator.is_available() else 0"
            alone = isinstance(self._parent(original), (cst.Assign, cst.Return, cst.Arg))
            number = expression(text if alone else f"({text})")
            return self._put(original, number, "torch.accelerator's is an error without an accelerator")
        return self._put(original, new, "whatever the vendor")

    def _amp_call(self, what: str, original: cst.Call, updated: cst.Call) -> Any:
        root = dotted(original.func).partition(".")[0]
        kept = root in self._neutral_imports
        func = original.func if kept else expression(f"{self._torch}.amp.{what}")
        args = list(updated.args)
        if what == "autocast":
            args = [
                argument if argument.keyword or argument.star else _with_keyword(argument, AUTOCAST[place])
                for place, argument in enumerate(args[: len(AUTOCAST)])
            ]
        first = cst.Arg(expression(self._type))
        if what.startswith("custom_"):
            first = _with_keyword(first, "device_type")
        return self._put(
            original, updated.with_changes(func=func, args=_before(first, args)), "the form that takes a device"
        )

    def _other_call(self, name: str, original: cst.Call, updated: cst.Call) -> Any:
        func = updated.func
        method = func.attr.value if isinstance(func, cst.Attribute) else ""
        if method == NAME and not name.startswith("torch."):
            return self._moved(original, updated)
        if name == "torch.device":
            return self._torch_device(original, updated)
        if name == "torch.set_default_tensor_type" and len(updated.args) == 1:
            asked = original.args[0].value
            if "torch.cuda.FloatTensor" in (text_of(asked), self._name(asked)):
                new = expression(f"{self._torch}.set_default_device({self._device})")
                return self._put(original, new, "new tensors are made there")
        if not isinstance(func, cst.Attribute) or not updated.args:
            return None
        text = text_of(func.value)
        if method == "format" and text is not None and text.startswith(f"{NAME}:{{"):
            format_ = func.value.with_changes(value=func.value.value.replace(f"{NAME}:", "{}:", 1))  # type: ignore[attr-defined]
            args = _before(cst.Arg(expression(self._type)), updated.args)
            return self._put(
                original, updated.with_changes(func=func.with_changes(value=format_), args=args), GIVES_TYPE
            )
        if method == "startswith" and text_of(updated.args[0].value) == NAME:
            if not self._holds_device(last_name(func.value)):
                self._leave(original, UNKNOWN_COMPARISON)
                return None
            cpu = updated.args[0].with_changes(value=expression(self._quoted("cpu", updated.args[0].value)))
            return self._put(original, _negated(updated.with_changes(args=[cpu]), self._parent(original)), ANY)
        return None

    def _torch_device(self, original: cst.Call, updated: cst.Call) -> Any:
        """`torch.device("cuda")`, `torch.device("cuda", n)`, and what stands in it already rewritten."""
        first = updated.args[0].value if updated.args else None
        if len(updated.args) == 2 and text_of(first) == NAME:
            args = [updated.args[0].with_changes(value=expression(self._type)), updated.args[1]]
            return self._put(original, updated.with_changes(args=args), GIVES_TYPE)
        if len(updated.args) != 1 or first is None:
            return None
        number = number_in(original.args[0].value)
        found = self._device_of(first)
        if number is not None and NAME not in code(number):
            found = expression(f"{self._torch}.device({self._type}, {code(number)})")
        if found is not None:
            return self._put(original, found, GIVES_DEVICE)
        if code(first) in (self._type, self._device):
            return self._put(original, expression(self._device), OR_CPU)
        return None

    def _moved(self, original: cst.Call, updated: cst.Call) -> Any:
        """`x.cuda(…)` → `x.to(accelerator, …)`."""
        if self._facts.own_cuda:
            self._leave(original, "a class of this file has a cuda() of its own, and no to()")
            return None
        where, rest = expression(self._device), list(updated.args)
        named = next(
            (
                argument
                for place, argument in enumerate(updated.args)
                if (argument.keyword is not None and argument.keyword.value == "device")
                or (place == 0 and argument.keyword is None and not argument.star)
            ),
            None,
        )
        if named is not None:
            rest.remove(named)
            where = self._place_of(named.value)
        func = cst.ensure_type(updated.func, cst.Attribute).with_changes(attr=cst.Name("to"))
        return self._put(original, updated.with_changes(func=func, args=_before(cst.Arg(where), rest)), GIVES_DEVICE)

    # --- questions ---------------------------------------------------------------------------------------------------

    def _guarded(self, node: cst.CSTNode) -> bool:
        """True below a question about CUDA: `if torch.cuda.is_available():`, `if args.cuda:`."""
        while not isinstance(node, (cst.Module, cst.FunctionDef, cst.ClassDef)):
            parent = self._parent(node)
            test: cst.CSTNode | None = None
            if (isinstance(parent, cst.If) and node is parent.body) or (
                isinstance(parent, cst.IfExp) and node is parent.body
            ):
                test = parent.test
            elif (
                isinstance(parent, cst.BooleanOperation)
                and node is parent.right
                and isinstance(parent.operator, cst.And)
            ):
                test = parent.left
            asks = test is not None and (NAME in code(test) or any(map(self._asks_for_hardware, _calls(test))))
            if asks and not isinstance(test, cst.UnaryOperation):
                return True
            node = parent
        return False

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        """A call that is an error without an accelerator gets the question first; a second seed of every device goes."""
        (statement, *others) = original_node.body
        if others or not m.matches(statement, m.Expr(m.Call())):
            return updated_node
        call = cst.ensure_type(cst.ensure_type(statement, cst.Expr).value, cst.Call)
        function = self._name(call.func).removeprefix("torch.cuda.")
        if not self._any(self.changes, statement) or self._name(call.func) != f"torch.cuda.{function}":
            return updated_node
        if function in STATEMENTS and not self._guarded(original_node):
            block = cst.IndentedBlock([updated_node.with_changes(leading_lines=[])])
            return cst.If(
                test=expression(f"{self._torch}.accelerator.is_available()"),
                body=block,
                leading_lines=updated_node.leading_lines,
            )
        if function in SEEDS and self._seeded_before(original_node, call) and not comments(updated_node):
            self._forget(self._span(statement))
            self._note(statement, "nothing", "torch.manual_seed before it has seeded every device")
            return cst.RemoveFromParent()
        return updated_node

    def leave_Expr(self, original_node: cst.Expr, updated_node: cst.Expr) -> cst.Expr:
        """The same for a call that shares its line with something else, as in `for …: torch.cuda.synchronize()`."""
        line = self._parent(original_node)
        if (isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1) or not m.matches(
            original_node.value, m.Call()
        ):
            return updated_node
        name = self._name(cst.ensure_type(original_node.value, cst.Call).func)
        lacks_one = name.startswith("torch.cuda.") and name.removeprefix("torch.cuda.") in STATEMENTS
        if not (lacks_one and self._any(self.changes, original_node)) or self._guarded(original_node):
            return updated_node
        asked = f"{self._torch}.accelerator.is_available() and {code(updated_node.value)}"
        return updated_node.with_changes(value=expression(asked))

    def _seeded_before(self, line: cst.SimpleStatementLine, call: cst.Call) -> bool:
        """True where the line before seeds torch with the same: torch.manual_seed has then seeded every device already."""
        block = self._parent(line)
        place = block.body.index(line)
        arguments = [code(argument.value) for argument in call.args]
        for before in reversed(block.body[:place]):
            found = m.extract(before, m.SimpleStatementLine(body=[m.Expr(m.SaveMatchedNode(m.Call(), "call"))]))
            if found is None:
                return False
            earlier = cst.ensure_type(found["call"], cst.Call)
            if self._name(earlier.func) == "torch.manual_seed":
                return [code(argument.value) for argument in earlier.args] == arguments
            if "seed" not in code(earlier.func):
                return False
        return False

    def leave_IfExp(self, original_node: cst.IfExp, updated_node: cst.IfExp) -> cst.BaseExpression:
        """`"cuda" if torch.cuda.is_available() else "cpu"`, which is what `accelerator` is."""
        if (chosen := self._of_choice(original_node, updated_node)) is not None:
            return chosen
        if not self._asks_for_hardware(original_node.test):
            return updated_node  # it asks for something else, such as what the user wants
        body, orelse = code(updated_node.body), updated_node.orelse
        if body == self._group and text_of(orelse) == "gloo":
            return self._put(original_node, updated_node.body, GIVES_GROUP, whole=True) or updated_node
        text = text_of(original_node.body)
        devices = (self._device, f"{self._torch}.device({self._type}, 0)")
        new: str | None = None
        if text is not None and text.removesuffix(":0") in VENDORS:
            new = self._type if text_of(orelse) == "cpu" or code(orelse) == self._type else None
        elif body in devices or self._is_vendors(original_node.body):
            new = self._device if self._is_cpu(orelse) or code(orelse) == self._device else None
        if new is None:
            return updated_node
        return self._put(original_node, expression(new), OR_CPU, whole=True) or updated_node

    def _asks_for_hardware(self, test: cst.BaseExpression) -> bool:
        return isinstance(test, cst.Call) and not test.args and self._name(test.func) in AVAILABLE

    def _is_cpu(self, node: cst.BaseExpression) -> bool:
        return code(node).replace("'", '"') == f'{self._torch}.device("cpu")'

    def _is_vendors(self, node: cst.BaseExpression) -> bool:
        """True for `torch.device("mps")`."""
        return (
            isinstance(node, cst.Call)
            and self._name(node.func) == "torch.device"
            and len(node.args) == 1
            and text_of(node.args[0].value) in VENDORS
        )

    def leave_BooleanOperation(
        self, original_node: cst.BooleanOperation, updated_node: cst.BooleanOperation
    ) -> cst.BaseExpression:
        """`torch.cuda.is_available() and torch.cuda.…`: a question that guards what is left stays, too."""
        if isinstance(updated_node.operator, cst.And) and self._guards(original_node.left, original_node.right):
            self._take_back(original_node.left)
            return updated_node.with_changes(left=original_node.left)
        return updated_node

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> Any:
        """The same for a block that says nothing else; and a chain that picks a device becomes one line."""
        if self._guards(original_node.test, original_node.body):
            self._take_back(original_node.test)
            return updated_node.with_changes(test=original_node.test)
        parent = self._parent(original_node)
        if isinstance(parent, cst.If) and parent.orelse is original_node:
            return updated_node
        return self._picked(original_node) or updated_node

    def leave_IndentedBlock(
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        """`if not torch.cuda.is_available(): return` guards what comes after it in the block."""
        body = list(updated_node.body)
        if len(body) != len(original_node.body):
            return updated_node
        for place, statement in enumerate(original_node.body):
            if isinstance(statement, cst.If) and _leaves(statement) and self._asks_for_none(statement.test):
                rest = original_node.body[place + 1 :]
                alone = [entry for entry in self.left if entry[1].why == CUDA_ALONE]
                if any(self._any(alone, one) for one in rest) and not any(self._any(self.changes, one) for one in rest):
                    self._take_back(statement.test)
                    body[place] = body[place].with_changes(test=statement.test)
        return updated_node.with_changes(body=body)

    def _asks_for_none(self, test: cst.BaseExpression) -> bool:
        nots = m.findall(test, m.UnaryOperation(operator=m.Not(), expression=m.Call()))
        return any(self._name(one.expression.func) == "torch.cuda.is_available" for one in nots)  # type: ignore[attr-defined]

    def _guards(self, test: cst.BaseExpression, guarded: cst.CSTNode) -> bool:
        """True if the test says that there is CUDA, and what it guards has what CUDA alone has, and nothing else of ours."""
        parts = [test]
        while any(isinstance(part, cst.BooleanOperation) for part in parts):
            parts = [
                side
                for part in parts
                for side in ((part.left, part.right) if isinstance(part, cst.BooleanOperation) else (part,))
                if not isinstance(part, cst.BooleanOperation) or isinstance(part.operator, cst.And)
            ]
        asks = any(isinstance(part, cst.Call) and self._name(part.func) == "torch.cuda.is_available" for part in parts)
        alone = [entry for entry in self.left if entry[1].why in (CUDA_ALONE, GUARDS)]
        return asks and self._any(alone, guarded) and not self._any(self.changes, guarded)

    def _take_back(self, node: cst.CSTNode) -> None:
        """Forget the change of the question in a node that stays as it is, and list it."""
        self._forget(self._span(node))
        self._leave(node, GUARDS)

    def _picked(self, node: cst.If) -> Any:
        """`if torch.cuda.is_available(): device = "cuda" else: device = "cpu"` as one assignment; None for other chains."""
        target, kinds = "", set()
        branch: cst.CSTNode | None = node
        while branch is not None:
            if isinstance(branch, cst.If):
                if not self._asks_for_hardware(branch.test):
                    return None
                names = VENDORS
            else:
                names = frozenset({"cpu"})
            found = m.extract(
                branch.body,  # type: ignore[attr-defined]
                m.IndentedBlock(
                    body=[
                        m.SimpleStatementLine(
                            body=[
                                m.Assign(
                                    targets=[m.AssignTarget(m.SaveMatchedNode(m.DoNotCare(), "target"))],
                                    value=m.SaveMatchedNode(m.DoNotCare(), "value"),
                                )
                            ]
                        )
                    ]
                ),
            )
            if found is None or (target and code(found["target"]) != target):  # type: ignore[arg-type]
                return None
            target = code(found["target"])  # type: ignore[arg-type]
            value: Any = found["value"]
            kinds.add(self._device if isinstance(value, cst.Call) else self._type)
            if isinstance(value, cst.Call):
                if self._name(value.func) != "torch.device" or len(value.args) != 1:
                    return None
                value = value.args[0].value
            text = text_of(value)
            if text is None or text.removesuffix(":0") not in names:
                return None
            branch = None if not isinstance(branch, cst.If) else branch.orelse
            if branch is None and names is VENDORS:
                return None  # without an `else`, the target may have another value before
        if len(kinds) != 1:
            return None
        line = cst.ensure_type(cst.parse_statement(f"{target} = {kinds.pop()}\n"), cst.SimpleStatementLine)
        new = self._put(node, line, OR_CPU, whole=True)
        return None if new is None else new.with_changes(leading_lines=node.leading_lines)

    # --- attributes and imports --------------------------------------------------------------------------------------

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        parent = self._parent(original_node)
        if original_node.attr.value == "is_cuda":
            test = f"({code(updated_node.value)}.device.type != {self._quoted('cpu')})"
            return self._put(original_node, expression(test), ANY) or updated_node
        if isinstance(parent, (cst.Attribute, cst.ImportAlias, cst.ImportFrom)):
            return updated_node  # the longer name is seen next, imports as a whole
        return self._named(original_node, parent) or updated_node

    def leave_Name(self, original_node: cst.Name, updated_node: cst.Name) -> cst.BaseExpression:
        """A name that was imported from torch.cuda."""
        parent = self._parent(original_node)
        if isinstance(parent, (cst.Attribute, cst.ImportAlias, cst.ImportFrom, cst.AsName)) or (
            isinstance(parent, cst.Arg) and parent.keyword is original_node
        ):
            return updated_node
        return self._named(original_node, parent) or updated_node

    def _named(self, node: cst.BaseExpression, parent: Any) -> Any:
        name = self._name(node)
        if not name.startswith("torch."):
            return None
        called = isinstance(parent, cst.Call) and parent.func is node
        if name == "torch.cuda.OutOfMemoryError":
            return self._put(node, expression(f"{self._torch}.OutOfMemoryError"), "the error of every device")
        if name in ("torch.nn.Module.cuda", "torch.Tensor.cuda"):
            self._leave(node, CUDA_ALONE)
        if name.startswith("torch.cuda."):
            function = name.removeprefix("torch.cuda.")
            kind = function.removeprefix("amp.")
            if called and (function in ACCELERATOR or function in SEEDS or kind in AMP):
                return None  # leave_Call
            if dotted(node).partition(".")[0] in self._neutral_imports:
                if isinstance(parent, cst.Decorator):
                    return self._put(
                        node, expression(f"{dotted(node)}(device_type={self._type})"), "the form that takes a device"
                    )
                return None
            if isinstance(parent, cst.Decorator) and kind.startswith("custom_") and kind in AMP:
                new = expression(f"{self._torch}.amp.{kind}(device_type={self._type})")
                return self._put(node, new, "the form that takes a device")
            if kind == "GradScaler":  # an annotation, or isinstance
                return self._put(node, expression(f"{self._torch}.amp.GradScaler"), "the class of every device's")
            if function in ACCELERATOR and function not in NUMBERS:
                new = expression(f"{self._torch}.accelerator.{ACCELERATOR[function]}")
                return self._put(node, new, "whatever the vendor")
        if name in MODULES or name in NAMES or name.startswith(tuple(f"{module}." for module in MODULES)):
            if name not in AVAILABLE or name == "torch.cuda.is_available" or not called:
                self._leave(node, CUDA_ALONE if ".cud" in name else "one vendor alone has it")
            else:
                self._leave(parent, "it asks for one vendor's device")
        return None

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        if original_node.name.value == NAME and self._facts.own_cuda:
            self._leave(original_node.name, "a cuda() of its own; give the class a to(), and call that")
        return updated_node

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> cst.Import:
        names = list(updated_node.names)
        for place, alias in enumerate(names):
            module, local = alias.evaluated_name, alias.evaluated_alias or ""
            if module == "torch.cuda.amp" and local not in self._facts.bare:
                names[place] = alias.with_changes(name=expression("torch.amp"))
                self._neutral(original_node, local, code(updated_node.with_changes(names=names)))
            elif module == "torch.cuda" and not local:
                names[place] = alias.with_changes(name=expression("torch"))
                self._note(original_node, "import torch", "torch.cuda comes with it")
            else:
                self._imported(original_node, module, local)
        return updated_node.with_changes(names=names)

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> cst.ImportFrom:
        module = dotted(original_node.module) if original_node.module is not None and not original_node.relative else ""
        if isinstance(original_node.names, cst.ImportStar):
            self._imported(original_node, module, "")
            return updated_node
        aliases = {alias.evaluated_alias or alias.evaluated_name: alias.evaluated_name for alias in original_node.names}
        whole = {local: INNER.sub("torch.cuda.amp.", f"{module}.{name}") for local, name in aliases.items()}
        amp = all(name.startswith("torch.cuda.amp.") and name.rpartition(".")[2] in AMP for name in whole.values())
        # A class that is handed on is called elsewhere, without a device; GradScaler's may be asked for, in isinstance.
        handed_on = any(
            local in self._facts.bare and name.endswith((".autocast", ".amp")) for local, name in whole.items()
        )
        if (amp or set(whole.values()) == {"torch.cuda.amp"}) and not handed_on:
            new = updated_node.with_changes(module=expression("torch.amp" if amp else "torch"))
            for local in whole:
                self._neutral(original_node, local, code(new))
            return new
        for local, name in whole.items():
            self._imported(original_node, name, local)
        return updated_node

    def _neutral(self, node: cst.CSTNode, local: str, after: str) -> None:
        self._neutral_imports.add(local)
        self._note(node, after, "takes a device")

    def _note(self, node: cst.CSTNode, after: str, why: str) -> None:
        note = (self._span(node), Note(self._span(node)[0][0], code(node), after, why))
        if note not in self.changes:
            self.changes.append(note)

    def _imported(self, node: cst.CSTNode, name: str, local: str) -> None:
        """An import of what CUDA alone has. Of torch.cuda's, it is listed in the end only if something still needs it."""
        line = self._span(node)[0][0]
        top = name.partition(".")[0]
        if f"{name}.".startswith("torch.cuda."):
            note = Note(line, code(node), "", CUDA_ALONE)
            if (note, local) not in self.imports:
                self.imports.append((note, local))
        elif f"{name}.".startswith(tuple(f"{module}." for module in MODULES)) or name in NAMES:
            self._leave(node, CUDA_ALONE if ".cud" in name else "one vendor alone has it")
        elif top in PACKAGES or f"{name}.".startswith("numba.cuda."):
            self._leave(node, "a package with kernels for one vendor's devices")


def _calls(node: cst.CSTNode) -> list[cst.Call]:
    return [found for found in m.findall(node, m.Call()) if isinstance(found, cst.Call)]


def _leaves(node: cst.If) -> bool:
    """True if the block ends the function or the turn of a loop."""
    last = node.body.body[-1] if node.body.body and node.orelse is None else None
    small = last.body[-1] if isinstance(last, cst.SimpleStatementLine) else last
    return isinstance(small, (cst.Return, cst.Raise, cst.Continue))


def _with_keyword(argument: cst.Arg, keyword: str) -> cst.Arg:
    plain = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))
    return argument.with_changes(keyword=cst.Name(keyword), equal=plain)


def _before(first: cst.Arg, args: Sequence[cst.Arg]) -> list[cst.Arg]:
    """The arguments with another one before them; their comments and line breaks stay."""
    if not args:
        return [first]
    return [first.with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))), *args]


def _negated(node: cst.BaseExpression, parent: Any) -> cst.BaseExpression:
    """`not node`, in parentheses where something may bind tighter."""
    negated = cst.UnaryOperation(cst.Not(), node)
    if isinstance(parent, (cst.If, cst.While, cst.BooleanOperation, cst.Assign, cst.Return, cst.Assert, cst.Arg)):
        return negated
    return negated.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
