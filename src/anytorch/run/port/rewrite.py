"""One source text that names CUDA → the same text in device-neutral PyTorch, and what was changed and left, line by line.

Formatting and comments stay as they are (LibCST). The rewritten text asks `torch.accelerator` for the device, once, after
its imports. What is not understood is left alone and listed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider

NAME = "cuda"
DEVICE = "accelerator"  # the module's own name for the device
SETUP = f'{DEVICE} = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")\n'
KIND = f"{DEVICE}.type"
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
AMP = ("autocast", "GradScaler")
ASKED = "torch.accelerator.is_available()"
ERROR = "torch.cuda.OutOfMemoryError"  # the same class, under a name of CUDA's
MODULE = cst.Module(body=[])


@dataclass(frozen=True)
class Note:
    """One line: what it said, and what it says now ("" where it was left alone), and why."""

    line: int
    before: str
    after: str
    why: str


@dataclass
class Ported:
    """The rewritten text, with a note for each change and for each mention that was left."""

    text: str
    changes: list[Note] = field(default_factory=list)
    left: list[Note] = field(default_factory=list)


def port(source: str) -> Ported:
    """Rewrite one source text. Raises libcst.ParserSyntaxError for what is not Python."""
    wrapper = MetadataWrapper(cst.parse_module(source))
    rewriter = Rewriter()
    tree = wrapper.visit(rewriter)
    if rewriter.needs_device and not _has_setup(tree):
        tree = _with_setup(tree)
    return Ported(tree.code, sorted(rewriter.changes, key=_line), sorted(rewriter.left, key=_line))


def _line(note: Note) -> int:
    return note.line


def _has_setup(tree: cst.Module) -> bool:
    return any(m.matches(node, _SETUP) for node in tree.body)


_SETUP = m.SimpleStatementLine(body=[m.Assign(targets=[m.AssignTarget(m.Name(DEVICE))])])


def _with_setup(tree: cst.Module) -> cst.Module:
    """Put the line that asks for the device after the last import at the top of the module."""
    last = 0
    for place, node in enumerate(tree.body):
        if m.matches(node, m.SimpleStatementLine(body=[m.OneOf(m.Import(), m.ImportFrom())])):
            last = place + 1
    imports_torch = any(
        m.matches(node, m.SimpleStatementLine(body=[m.Import()])) and "torch" in MODULE.code_for_node(node).split()
        for node in tree.body
    )
    setup = cst.ensure_type(cst.parse_statement(SETUP), cst.SimpleStatementLine)
    lines = [] if imports_torch else [cst.parse_statement("import torch\n")]
    lines.append(setup.with_changes(leading_lines=[cst.EmptyLine()]))
    return tree.with_changes(body=[*tree.body[:last], *lines, *tree.body[last:]])


def _says(node: cst.CSTNode, name: str) -> bool:
    """True if a name or an attribute of that name occurs in the node."""
    return bool(m.findall(node, m.Name(name)))


def _code(node: cst.CSTNode) -> str:
    return MODULE.code_for_node(node)


def _dotted(node: cst.BaseExpression) -> str:
    """ "torch.cuda.amp" of such an attribute, "" of anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        owner = _dotted(node.value)
        return f"{owner}.{node.attr.value}" if owner else ""
    return ""


def _text_of(node: cst.CSTNode | None) -> str | None:
    """The value of a plain string."""
    if isinstance(node, cst.SimpleString):
        value = node.evaluated_value
        return value if isinstance(value, str) else None
    return None


def _device_of(node: cst.BaseExpression) -> str | None:
    """The neutral form of an expression that names a CUDA device: "cuda", "cuda:1", f"cuda:{n}"; None for others."""
    text = _text_of(node)
    if text == NAME:
        return DEVICE
    if text is not None and text.startswith(f"{NAME}:") and text[5:].isdigit():
        return f"torch.device({KIND}, {text[5:]})"
    if isinstance(node, cst.FormattedString) and len(node.parts) == 2:
        start, number = node.parts
        if (
            isinstance(start, cst.FormattedStringText)
            and start.value == f"{NAME}:"
            and isinstance(number, cst.FormattedStringExpression)
        ):
            return f"torch.device({KIND}, {_code(number.expression)})"
    return None


class Rewriter(cst.CSTTransformer):
    """Rewrites from the inside out; every change is noted with the line it was made in."""

    METADATA_DEPENDENCIES = (PositionProvider, ParentNodeProvider)

    def __init__(self) -> None:
        super().__init__()
        self.changes: list[Note] = []
        self.left: list[Note] = []
        self.needs_device = False
        self._amp: set[str] = set()  # autocast and GradScaler, as this module imports them

    # --- notes -------------------------------------------------------------------------------------------------------

    def _at(self, node: cst.CSTNode) -> int:
        position: Any = self.get_metadata(PositionProvider, node)
        return int(position.start.line)

    def _put(self, original: cst.CSTNode, new: str, why: str) -> cst.BaseExpression:
        self.changes.append(Note(self._at(original), _code(original), new, why))
        self.needs_device = self.needs_device or DEVICE in new.replace("torch.accelerator", "")
        return cst.parse_expression(new)

    def _leave(self, node: cst.CSTNode, why: str) -> None:
        self.left.append(Note(self._at(node), _code(node), "", why))

    # --- calls -------------------------------------------------------------------------------------------------------

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.BaseExpression:
        name = _dotted(original_node.func)
        called = self._cuda_call(name, original_node, updated_node)
        if called is not None:
            return called
        if isinstance(updated_node.func, cst.Attribute):
            method = updated_node.func.attr.value
            if method == NAME and not name.startswith("torch."):
                return self._moved(original_node, updated_node)
        if _is_format_of_a_device(original_node):
            text = f'f"{{{KIND}}}:{{{_code(updated_node.args[0].value)}}}"'
            return self._put(original_node, text, "the accelerator's type")
        if name in ("torch.device", "device") and len(updated_node.args) >= 1:
            first = updated_node.args[0].value
            if _text_of(first) == NAME and len(updated_node.args) == 2:
                return self._put(
                    original_node,
                    f"torch.device({KIND}, {_code(updated_node.args[1].value)})",
                    "the accelerator's type",
                )
            found = _device_of(first) if len(updated_node.args) == 1 else None
            if found is not None:
                return self._put(original_node, found, "the device of whatever vendor")
            if len(updated_node.args) == 1 and _code(first) in (KIND, DEVICE):
                return updated_node.with_changes(args=[updated_node.args[0].with_changes(value=cst.Name(DEVICE))])
        return updated_node

    def _cuda_call(self, name: str, original: cst.Call, updated: cst.Call) -> cst.BaseExpression | None:
        """A call of one of torch.cuda's functions, or of autocast and its like."""
        arguments = ", ".join(_code(argument).strip().rstrip(",").rstrip() for argument in updated.args)
        after = f", {arguments}" if arguments else ""
        if name in ("torch.cuda.manual_seed", "torch.cuda.manual_seed_all"):
            return self._put(original, f"torch.manual_seed({arguments})", "it seeds every device")
        if name.startswith("torch.cuda.amp.") and name.rpartition(".")[2] in AMP:
            what = name.rpartition(".")[2]
            return self._put(original, f"torch.amp.{what}({KIND}{after})", "the form that takes a device")
        if name in self._amp:
            return self._put(original, f"{name}({KIND}{after})", "the form that takes a device")
        function = name.removeprefix("torch.cuda.")
        if name.startswith("torch.cuda.") and function in ACCELERATOR:
            return self._put(original, f"torch.accelerator.{ACCELERATOR[function]}({arguments})", "whatever the vendor")
        return None

    def _moved(self, original: cst.Call, updated: cst.Call) -> cst.BaseExpression:
        """`x.cuda(…)` → `x.to(accelerator, …)`."""
        assert isinstance(updated.func, cst.Attribute)
        owner = _code(updated.func.value)
        where, rest = DEVICE, []
        for place, argument in enumerate(updated.args):
            if (place == 0 and argument.keyword is None) or (
                argument.keyword is not None and argument.keyword.value == "device"
            ):
                value = _code(argument.value)
                where = value if _device_like(argument.value) else f"torch.device({KIND}, {value})"
                if not _device_like(argument.value) and not _is_number(argument.value):
                    where = f"{DEVICE} if {value} is None else {where}"  # .cuda(None) is the current device
            else:
                rest.append(_code(argument).strip().rstrip(",").rstrip())
        return self._put(original, f"{owner}.to({', '.join([where, *rest])})", "the device of whatever vendor")

    # --- names, texts and comparisons --------------------------------------------------------------------------------

    def leave_IfExp(self, original_node: cst.IfExp, updated_node: cst.IfExp) -> cst.BaseExpression:
        """`"cuda" if torch.cuda.is_available() else "cpu"`, which is what `accelerator` is."""
        neutral = (KIND, DEVICE)
        if "is_available()" not in _code(original_node.test):
            return updated_node  # it asks for something else, such as what the user wants
        if _code(updated_node.body) in neutral and _text_of(updated_node.orelse) == "cpu":
            return self._put(original_node, _code(updated_node.body), "the accelerator, or the CPU where there is none")
        if _code(updated_node.body) == DEVICE and _code(updated_node.orelse) in (
            'torch.device("cpu")',
            "torch.device('cpu')",
        ):
            return self._put(original_node, DEVICE, "the accelerator, or the CPU where there is none")
        return updated_node

    def leave_BooleanOperation(
        self, original_node: cst.BooleanOperation, updated_node: cst.BooleanOperation
    ) -> cst.BaseExpression:
        """`torch.cuda.is_available() and torch.cuda.…`: a question that guards what is left stays, too."""
        if isinstance(updated_node.operator, cst.And) and self._guards(updated_node.left, updated_node.right):
            self._take_back(original_node.left)
            return updated_node.with_changes(left=original_node.left)
        return updated_node

    def leave_If(self, original_node: cst.If, updated_node: cst.If) -> cst.If:
        """The same for a block in which nothing but such things is said of devices."""
        if self._guards(updated_node.test, updated_node.body) and not _says(updated_node.body, DEVICE):
            self._take_back(original_node.test)
            return updated_node.with_changes(test=original_node.test)
        return updated_node

    def _guards(self, test: cst.CSTNode, guarded: cst.CSTNode) -> bool:
        return ASKED in _code(test) and f"torch.{NAME}." in _code(guarded)

    def _take_back(self, node: cst.CSTNode) -> None:
        """Forget the change of the question in a node that stays as it is, and list it."""
        line = self._at(node)
        self.changes = [note for note in self.changes if not (note.line == line and note.after == ASKED)]
        self._leave(node, "it guards what CUDA alone has")

    def leave_SimpleString(self, original_node: cst.SimpleString, updated_node: cst.SimpleString) -> cst.BaseExpression:
        text = _text_of(original_node)
        if text is None or not (text == NAME or text.startswith(f"{NAME}:") or text == "nccl"):
            return updated_node
        parent: Any = self.get_metadata(ParentNodeProvider, original_node)
        if text == "nccl":
            return self._process_group(original_node, updated_node, parent)
        if isinstance(parent, (cst.Comparison, cst.ComparisonTarget)):
            return updated_node  # leave_Comparison
        if isinstance(parent, cst.Attribute) and parent.attr.value == "format" and text == f"{NAME}:{{}}":
            return updated_node  # leave_Call
        if isinstance(parent, cst.Arg):
            call: Any = self.get_metadata(ParentNodeProvider, parent)
            return self._argument(original_node, updated_node, parent, call)
        if isinstance(parent, (cst.IfExp, cst.Assign, cst.AnnAssign, cst.Param)):
            if text == NAME:
                return self._put(original_node, KIND, "the accelerator's type")
            return self._put(original_node, f'f"{{{KIND}}}{text[4:]}"', "the accelerator's type")
        self._leave(original_node, "a text whose use is not known")
        return updated_node

    def _argument(
        self, original: cst.SimpleString, updated: cst.SimpleString, argument: cst.Arg, call: Any
    ) -> cst.BaseExpression:
        name = _dotted(call.func) if isinstance(call, cst.Call) else ""
        keyword = argument.keyword.value if argument.keyword is not None else ""
        last = name.rpartition(".")[2] or (call.func.attr.value if isinstance(call.func, cst.Attribute) else "")
        if last in ("autocast", "GradScaler", "custom_fwd", "custom_bwd") or keyword == "device_type":
            return self._put(original, KIND, "the accelerator's type")
        if last == "device":
            return updated  # leave_Call
        found = _device_of(original)
        if found is not None and (last == "to" or keyword in ("device", "map_location")):
            return self._put(original, found, "the device of whatever vendor")
        if keyword == "default" and found is not None:  # of an option
            return self._put(
                original,
                KIND if found == DEVICE else f'f"{{{KIND}}}{str(original.evaluated_value)[4:]}"',
                "the default",
            )
        self._leave(original, "an argument whose use is not known")
        return updated

    def _process_group(self, original: cst.SimpleString, updated: cst.SimpleString, parent: Any) -> cst.BaseExpression:
        call: Any = self.get_metadata(ParentNodeProvider, parent) if isinstance(parent, cst.Arg) else None
        if isinstance(call, cst.Call) and _dotted(call.func).rpartition(".")[2] in ("init_process_group", "new_group"):
            return self._put(
                original, f"torch.distributed.get_default_backend_for_device({DEVICE})", "the device's own collectives"
            )
        self._leave(original, "a process group named elsewhere")
        return updated

    def leave_FormattedString(
        self, original_node: cst.FormattedString, updated_node: cst.FormattedString
    ) -> cst.BaseExpression:
        found = _device_of(updated_node)  # with what was rewritten inside of it
        parent: Any = self.get_metadata(ParentNodeProvider, original_node)
        if found is None:
            return updated_node
        if isinstance(parent, cst.Arg):
            call: Any = self.get_metadata(ParentNodeProvider, parent)
            if isinstance(call, cst.Call) and _dotted(call.func).rpartition(".")[2] == "device":
                return updated_node  # leave_Call
            keyword = parent.keyword.value if parent.keyword is not None else ""
            if keyword in ("device", "map_location") or (
                isinstance(call, cst.Call) and isinstance(call.func, cst.Attribute) and call.func.attr.value == "to"
            ):
                return self._put(original_node, found, "the device of whatever vendor")
        if isinstance(parent, (cst.Assign, cst.AnnAssign)):
            number = _code(updated_node.parts[1])
            return self._put(original_node, f'f"{{{KIND}}}:{number}"', "the accelerator's type")
        self._leave(original_node, "a text whose use is not known")
        return updated_node

    def leave_Comparison(self, original_node: cst.Comparison, updated_node: cst.Comparison) -> cst.BaseExpression:
        """`x.device.type == "cuda"` and `"cuda" in device` ask for a GPU: `!= "cpu"`, `"cpu" not in device`."""
        single = updated_node.comparisons[0] if len(updated_node.comparisons) == 1 else None
        if (
            single is not None
            and _text_of(updated_node.left) == NAME
            and isinstance(single.operator, (cst.In, cst.NotIn))
        ):
            within = "not in" if isinstance(single.operator, cst.In) else "in"
            return self._put(original_node, f'"cpu" {within} {_code(single.comparator)}', "any accelerator will do")
        if len(updated_node.comparisons) != 1 or _text_of(updated_node.comparisons[0].comparator) != NAME:
            if any(
                _text_of(part) == NAME
                for part in (updated_node.left, *(c.comparator for c in updated_node.comparisons))
            ):
                self._leave(original_node, "a comparison whose meaning is not known")
            return updated_node
        operator = updated_node.comparisons[0].operator
        left = _code(updated_node.left)
        if not (left.endswith(".type") or "device" in left.lower()):
            self._leave(original_node, "a comparison whose meaning is not known")
            return updated_node
        if isinstance(operator, cst.Equal):
            return self._put(original_node, f'{left} != "cpu"', "any accelerator will do")
        if isinstance(operator, cst.NotEqual):
            return self._put(original_node, f'{left} == "cpu"', "any accelerator will do")
        self._leave(original_node, "a comparison whose meaning is not known")
        return updated_node

    def leave_Attribute(self, original_node: cst.Attribute, updated_node: cst.Attribute) -> cst.BaseExpression:
        if original_node.attr.value == "is_cuda":
            return self._put(
                original_node, f'({_code(updated_node.value)}.device.type != "cpu")', "any accelerator will do"
            )
        name = _dotted(original_node)
        if not name.startswith("torch.cuda."):
            return updated_node
        parent: Any = self.get_metadata(ParentNodeProvider, original_node)
        if isinstance(parent, cst.Attribute):
            return updated_node  # the longer name is seen next
        if name == ERROR:
            return self._put(original_node, "torch.OutOfMemoryError", "the error of every device")
        function = name.removeprefix("torch.cuda.")
        known = function in ACCELERATOR or function in ("manual_seed", "manual_seed_all")
        if isinstance(parent, cst.Call) and (known or name.removeprefix("torch.cuda.amp.") in AMP):
            return updated_node  # leave_Call
        self._leave(original_node, "CUDA alone has it; ask whether the program needs it on other devices")
        return updated_node

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> Any:
        module = _dotted(original_node.module) if original_node.module is not None else ""
        if not f"{module}.".startswith("torch.cuda."):
            return updated_node
        if module != "torch.cuda.amp" or isinstance(original_node.names, cst.ImportStar):
            self._leave(original_node, "CUDA alone has it; ask whether the program needs it on other devices")
            return updated_node
        if any(alias.name.value not in AMP for alias in original_node.names):
            self._leave(original_node, "imports more than torch.amp has")
            return updated_node
        self.changes.append(
            Note(self._at(original_node), _code(original_node), "from torch.amp import …", "takes a device")
        )
        self._amp.update(alias.evaluated_alias or alias.evaluated_name for alias in original_node.names)
        return updated_node.with_changes(module=cst.parse_expression("torch.amp"))


def _is_format_of_a_device(node: cst.Call) -> bool:
    """True for `"cuda:{}".format(n)`."""
    func = node.func
    if not isinstance(func, cst.Attribute) or func.attr.value != "format" or len(node.args) != 1:
        return False
    return _text_of(func.value) == f"{NAME}:{{}}"


def _is_number(node: cst.BaseExpression) -> bool:
    """True for an argument that is a number for certain: a literal, or a name such as `rank` or `local_rank`."""
    return isinstance(node, cst.Integer) or _dotted(node).rpartition(".")[2].endswith(("rank", "index", "idx"))


def _device_like(node: cst.BaseExpression) -> bool:
    """True for an argument of .cuda() that is a device already, by its name or its text."""
    code = _code(node)
    return code == DEVICE or code.startswith("torch.device(") or code.rpartition(".")[2].endswith("device")
