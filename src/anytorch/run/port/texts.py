"""Texts that name a device: what each is used for, and its neutral form; and comparisons with them."""

from __future__ import annotations

import re
from typing import Any

import libcst as cst
import libcst.matchers as m

from anytorch.run.port.noted import Noting
from anytorch.run.port.syntax import Facts, code, dotted, expression, last_name, text_of

NAME = "cuda"
VENDORS = frozenset({NAME, "mps", "xpu", "npu", "hpu"})
AMP = frozenset({"autocast", "GradScaler", "custom_fwd", "custom_bwd"})
# Calls that take a device (True) or its type (False), and the place of it among their arguments.
TAKES = {
    "torch.device": (0, True),
    "torch.Generator": (0, True),
    "torch.load": (1, True),
    "torch.jit.load": (1, True),
    "torch.set_default_device": (0, True),
    "torch.get_device_module": (0, True),
    "torch.autocast": (0, False),
    "torch.amp.autocast": (0, False),
    "torch.amp.GradScaler": (0, False),
    "torch.is_autocast_enabled": (0, False),
    "torch.get_autocast_dtype": (0, False),
    "torch.nn.attention.sdpa_kernel": (-1, False),
}
MOVES = frozenset({"to", "to_empty", "new_tensor", "new_zeros", "new_ones", "new_empty", "new_full"})  # a tensor's own
ENVIRONMENT = re.compile(r"(CUDA|NCCL|CUDNN|CUBLAS|PYTORCH_CUDA)_[A-Z_0-9]+")

GIVES_DEVICE = "the device of whatever vendor"
GIVES_TYPE = "the accelerator's type"
GIVES_GROUP = "the device's own collectives"
ANY = "any accelerator will do"
CUDA_ALONE = "CUDA alone has it; ask whether the program needs it on other devices"
UNKNOWN = "a text whose use is not known"
UNKNOWN_COMPARISON = "a comparison whose meaning is not known"


class Texts(Noting):
    """Rewrites texts and comparisons."""

    def __init__(self, known: Facts) -> None:
        super().__init__(known)
        self._group = f"{known.torch}.distributed.get_default_backend_for_device({known.device})"

    # --- neutral forms -----------------------------------------------------------------------------------------------

    def _device_of(self, node: cst.BaseExpression) -> cst.BaseExpression | None:
        """The neutral form of an expression that names a CUDA device: "cuda", "cuda:1", f"cuda:{n}"; None for others."""
        text = text_of(node)
        if text == NAME:
            return expression(self._device)
        if text is not None and re.fullmatch(rf"{NAME}:\d+", text):
            return expression(f"{self._torch}.device({self._type}, {text[5:]})")
        if isinstance(node, cst.FormattedString) and len(node.parts) == 2:
            start, number = node.parts
            if (
                isinstance(start, cst.FormattedStringText)
                and start.value == f"{NAME}:"
                and isinstance(number, cst.FormattedStringExpression)
                and number.conversion is None
                and number.format_spec is None
            ):
                return expression(f"{self._torch}.device({self._type}, {code(number.expression)})")
        return None

    def _type_of(self, node: cst.SimpleString) -> cst.BaseExpression:
        """The same as a text."""
        text = text_of(node) or ""
        quote = self._quoted("")[0]
        return expression(self._type if text == NAME else f"f{quote}{{{self._type}}}{text[len(NAME) :]}{quote}")

    def _place_of(self, given: cst.BaseExpression) -> cst.BaseExpression:
        """The argument of `.cuda(…)`: a device, a number, or None for the current device."""
        text, name = code(given), last_name(given)
        if text == self._device or text.startswith(f"{self._torch}.device(") or name.endswith("device"):
            return given
        if text == "None":
            return expression(self._device)
        device = f"{self._torch}.device({self._type}, {text})"
        if isinstance(given, cst.Integer) or name.endswith(("rank", "index", "idx")):
            return expression(device)
        return expression(f"{self._device} if {text} is None else {device}")

    # --- texts -------------------------------------------------------------------------------------------------------

    def visit_FormattedString(self, node: cst.FormattedString) -> None:
        self._quotes.append(node.end)

    def leave_SimpleString(self, original_node: cst.SimpleString, updated_node: cst.SimpleString) -> cst.BaseExpression:
        text = text_of(original_node)
        if text is None:
            return updated_node
        if ENVIRONMENT.fullmatch(text):
            self._leave(original_node, "an environment variable of CUDA's")
        elif text == "nccl":
            return self._text_of_group(original_node) or updated_node
        elif text.partition(":")[0] in VENDORS and re.fullmatch(r"[a-z]+(:(\d+|%[ds]|\{\w*\})?)?", text):
            return self._text(original_node) or updated_node
        elif re.fullmatch(r"torch\.cuda\.\w+Tensor", text):
            self._leave(original_node, CUDA_ALONE)
        return updated_node

    def _text(self, node: cst.SimpleString) -> Any:
        """A text that is a device's name."""
        text, parent = text_of(node) or "", self._parent(node)
        if isinstance(parent, (cst.Comparison, cst.ComparisonTarget)):
            return None  # leave_Comparison
        if isinstance(parent, cst.Attribute) and parent.attr.value == "format":
            return None  # leave_Call
        if (
            isinstance(parent, cst.BinaryOperation)
            and parent.left is node
            and isinstance(parent.operator, (cst.Modulo, cst.Add))
        ):
            return None  # leave_BinaryOperation
        if text.partition(":")[0] == NAME and re.fullmatch(rf"{NAME}(:\d+)?", text):
            use = self._use(node)
            if use == "type":
                return self._put(node, self._type_of(node), GIVES_TYPE)
            if use == "device":
                return self._put(node, self._device_of(node), GIVES_DEVICE)
            if use == "later":
                return None
        self._leave(node, UNKNOWN)
        return None

    def _use(self, node: cst.BaseExpression) -> str:
        """What a device's name is used for: "device" where torch takes a device, "type" where its name is wanted, "later"
        where an outer node decides, "" where that is not known."""
        parent = self._parent(node)
        if isinstance(parent, cst.IfExp):
            other = parent.orelse if node is parent.body else parent.body
            return "type" if text_of(other) == "cpu" or self._use(parent) else ""
        if isinstance(parent, cst.BooleanOperation) and isinstance(parent.operator, cst.Or):
            return "type" if self._use(parent) else ""  # `device or "cuda"`
        if isinstance(parent, cst.Arg):
            return self._argument(node, parent, self._parent(parent))
        if isinstance(parent, cst.Assign):
            known = all(self._holds_device(last_name(target.target)) for target in parent.targets)
            return "type" if known else ""
        if isinstance(parent, cst.AnnAssign):
            return "type" if self._holds_device(last_name(parent.target)) else ""
        if isinstance(parent, cst.Param):
            return "type" if self._holds_device(parent.name.value) else ""
        if isinstance(parent, cst.DictElement) and parent.value is node:
            key = text_of(parent.key)
            return "type" if key is not None and (self._holds_device(key) or key == "map_location") else ""
        if isinstance(parent, cst.Element):  # `choices=["cuda", "cpu"]`, `for device in ("cpu", "cuda")`
            among = self._parent(parent)
            return "type" if any(text_of(element.value) == "cpu" for element in among.elements) else ""
        if isinstance(parent, cst.Return):
            while not isinstance(parent, (cst.FunctionDef, cst.Module)):
                parent = self._parent(parent)
            return "type" if isinstance(parent, cst.FunctionDef) and self._holds_device(parent.name.value) else ""
        return ""

    def _argument(self, node: cst.BaseExpression, argument: cst.Arg, call: Any) -> str:
        if not isinstance(call, cst.Call):
            return ""
        name = self._name(call.func)
        method = last_name(call.func) if isinstance(call.func, cst.Attribute) else ""
        keyword = argument.keyword.value if argument.keyword is not None else ""
        place = -1 if keyword else call.args.index(argument)
        if name == "torch.device":
            return "later" if isinstance(node, (cst.SimpleString, cst.FormattedString)) else "type"
        if keyword == "device_type" or (name.rpartition(".")[2] in AMP and place == 0):
            return "type"
        if name in TAKES and place == TAKES[name][0]:
            return "device" if TAKES[name][1] else "type"
        if keyword in ("device", "map_location"):  # torch's functions take a device; others may want a text
            return "device" if name.startswith("torch.") or method in MOVES else "type"
        if method == "to" and place == 0:
            return "device"
        if (
            keyword == "default" or place == 1
        ):  # of an option: `add_argument("--device", default="cuda")`, `get("device", …)`
            options = [
                text for other in call.args if (text := text_of(other.value)) is not None and other is not argument
            ]
            return "type" if any(self._holds_device(option.strip("-")) for option in options) else ""
        return "type" if self._holds_device(keyword) and not keyword.endswith("s") else ""

    def _text_of_group(self, node: cst.SimpleString) -> Any:
        """ "nccl" where a process group's back end is named."""
        use: Any = node
        parent = self._parent(node)
        while isinstance(parent, cst.IfExp) and parent.test is not use:
            use, parent = parent, self._parent(parent)
        named = ""
        if isinstance(parent, cst.Arg):
            call = self._parent(parent)
            options = " ".join(
                text for other in call.args if (text := text_of(other.value)) is not None and other is not parent
            )
            named = parent.keyword.value if parent.keyword is not None else last_name(call.func)
            if named in ("init_process_group", "new_group") or (named == "default" and "backend" in options):
                named = "backend"
        elif isinstance(parent, cst.Assign):
            named = last_name(parent.targets[0].target)
        elif isinstance(parent, cst.AnnAssign):
            named = last_name(parent.target)
        elif isinstance(parent, cst.Param):
            named = parent.name.value
        if "backend" in named:
            return self._put(node, expression(self._group), GIVES_GROUP)
        self._leave(node, "a process group named elsewhere")
        return None

    def leave_FormattedString(
        self, original_node: cst.FormattedString, updated_node: cst.FormattedString
    ) -> cst.BaseExpression:
        self._quotes.pop()
        start = updated_node.parts[0] if updated_node.parts else None
        if not isinstance(start, cst.FormattedStringText) or not start.value.startswith(f"{NAME}:"):
            return updated_node
        whole = len(updated_node.parts) == 2 and start.value == f"{NAME}:"
        use = self._use(original_node) if whole else ""
        if use == "later":
            return updated_node
        if use == "device" and (device := self._device_of(updated_node)) is not None:
            return self._put(original_node, device, GIVES_DEVICE) or updated_node
        if use:
            parts = [
                cst.FormattedStringExpression(expression(self._type)),
                start.with_changes(value=start.value[len(NAME) :]),
                *updated_node.parts[1:],
            ]
            return self._put(original_node, updated_node.with_changes(parts=parts), GIVES_TYPE) or updated_node
        if whole:
            self._leave(original_node, UNKNOWN)
        return updated_node

    def leave_BinaryOperation(
        self, original_node: cst.BinaryOperation, updated_node: cst.BinaryOperation
    ) -> cst.BaseExpression:
        """`"cuda:%d" % n` and `"cuda:" + str(n)`."""
        left, right = updated_node.left, updated_node.right
        text = text_of(left)
        if not isinstance(left, cst.SimpleString) or text is None:
            return updated_node
        if isinstance(updated_node.operator, cst.Modulo) and text in (f"{NAME}:%d", f"{NAME}:%s"):
            elements = [element.value for element in right.elements] if isinstance(right, cst.Tuple) else [right]
            values = ", ".join(code(value) for value in (expression(self._type), *elements))
            format_ = left.with_changes(value=left.value.replace(NAME, "%s", 1))
            new = updated_node.with_changes(left=format_, right=expression(f"({values})"))
            return self._put(original_node, new, GIVES_TYPE) or updated_node
        if isinstance(updated_node.operator, cst.Add) and text == f"{NAME}:":
            quote = self._quoted("")[0]
            new = updated_node.with_changes(left=expression(f"f{quote}{{{self._type}}}:{quote}"))
            return self._put(original_node, new, GIVES_TYPE) or updated_node
        if text.partition(":")[0] == NAME and isinstance(updated_node.operator, (cst.Modulo, cst.Add)):
            self._leave(original_node, UNKNOWN)
        return updated_node

    def leave_Lambda(self, original_node: cst.Lambda, updated_node: cst.Lambda) -> cst.BaseExpression:
        """`map_location=lambda storage, location: storage.cuda(n)`."""
        parent = self._parent(original_node)
        body = original_node.body
        if not (
            isinstance(parent, cst.Arg)
            and len(original_node.params.params) == 2
            and isinstance(body, cst.Call)
            and m.matches(
                body.func, m.Attribute(value=m.Name(original_node.params.params[0].name.value), attr=m.Name(NAME))
            )
            and len(body.args) <= 1
        ):
            return updated_node
        place = self._place_of(body.args[0].value) if body.args else expression(self._device)
        return self._put(original_node, place, "torch.load moves storages there") or updated_node

    # --- comparisons -------------------------------------------------------------------------------------------------

    def leave_Comparison(self, original_node: cst.Comparison, updated_node: cst.Comparison) -> cst.BaseExpression:
        """`x.device.type == "cuda"` and `"cuda" in device` ask for a GPU: `!= "cpu"`, `"cpu" not in device`."""
        left = updated_node.left
        parts = [left, *(target.comparator for target in updated_node.comparisons)]
        named = [text for part in parts if (text := text_of(part)) is not None and text.partition(":")[0] in VENDORS]
        target = updated_node.comparisons[0]
        among = _texts(target.comparator)
        if not named and not (among and set(among) <= VENDORS and NAME in among):
            return updated_node
        new: str | None = None
        if len(parts) == 2:
            operator, right = target.operator, target.comparator
            equal, unequal = isinstance(operator, (cst.Equal, cst.In)), isinstance(operator, (cst.NotEqual, cst.NotIn))
            if isinstance(operator, (cst.In, cst.NotIn)) and text_of(left) == NAME:  # "cuda" in str(device)
                if self._holds_device(last_name(right)) and not last_name(right).endswith("s"):
                    new = f"{self._quoted('cpu', left)} {'not in' if equal else 'in'} {code(right)}"
            elif self._asks_for_type(left) and (text_of(right) == NAME or among) and (equal or unequal):
                like = right if not among else None
                new = f"{code(left)} {'!=' if equal else '=='} {self._quoted('cpu', like)}"
            elif text_of(left) == NAME and self._asks_for_type(right) and (equal or unequal):
                new = f"{self._quoted('cpu', left)} {'!=' if equal else '=='} {code(right)}"
        if new is None:
            self._leave(original_node, UNKNOWN_COMPARISON)
            return updated_node
        return self._put(original_node, expression(new), ANY) or updated_node

    def _asks_for_type(self, node: cst.BaseExpression) -> bool:
        return code(node).endswith(".type") or self._holds_device(last_name(node))


def number_in(node: cst.BaseExpression) -> cst.BaseExpression | None:
    """`n` of `"cuda:{}".format(n)`, `"cuda:%d" % n` and `"cuda:" + str(n)`."""
    if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute) and node.func.attr.value == "format":
        return node.args[0].value if text_of(node.func.value) == f"{NAME}:{{}}" and len(node.args) == 1 else None
    if not isinstance(node, cst.BinaryOperation):
        return None
    if text_of(node.left) in (f"{NAME}:%d", f"{NAME}:%s") and not isinstance(node.right, cst.Tuple):
        return node.right
    if text_of(node.left) == f"{NAME}:" and isinstance(node.right, cst.Call) and dotted(node.right.func) == "str":
        return node.right.args[0].value
    return None


def _texts(node: cst.BaseExpression) -> list[str]:
    """The texts of a tuple, list or set of nothing else."""
    if not isinstance(node, (cst.Tuple, cst.List, cst.Set)):
        return []
    found = [text_of(element.value) for element in node.elements]
    return [] if None in found else [text for text in found if text is not None]
