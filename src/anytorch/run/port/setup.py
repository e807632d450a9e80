"""The line that asks torch for the device, in its place among a module's imports; imports that nobody needs any more."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import libcst as cst
import libcst.matchers as m

from anytorch.run.port.syntax import Facts, code, statements, torch_names


def setup_line(torch: str, device: str) -> str:
    return f'{device} = {torch}.accelerator.current_accelerator(check_available=True) or {torch}.device("cpu")\n'


def with_setup(tree: cst.Module, facts: Facts, *, needs_device: bool, needs_torch: bool) -> cst.Module:
    """The module with the line that asks for the device, and `import torch` if it has none at its top."""
    bound = any(isinstance(one, cst.Import) and any(True for _ in torch_names(one)) for one in statements(tree))
    wants_import = (needs_device or needs_torch) and not bound
    wants_setup = needs_device and not facts.has_setup
    if not (wants_import or wants_setup):
        return tree
    lines: list[cst.BaseStatement] = [cst.parse_statement("import torch\n")] if wants_import else []
    if wants_setup:
        setup = cst.ensure_type(cst.parse_statement(setup_line(facts.torch, facts.device)), cst.SimpleStatementLine)
        lines.append(setup.with_changes(leading_lines=[cst.EmptyLine(indent=False)]))
    body = list(tree.body)
    guard = None if wants_import else _guarded_import(body)
    if guard is not None:
        place, block = guard
        return tree.with_changes(body=[*body[:place], _with_lines(block, lines), *body[place + 1 :]])
    place = _place(body, facts.device)
    if place == 0 and not body:
        return tree.with_changes(body=lines)
    return tree.with_changes(body=[*body[:place], *lines, *body[place:]])


def _imports(node: cst.CSTNode) -> bool:
    return m.matches(node, m.SimpleStatementLine(body=[m.AtLeastN(m.OneOf(m.Import(), m.ImportFrom()), n=1)]))


def _imports_torch(node: cst.CSTNode) -> bool:
    return isinstance(node, cst.SimpleStatementLine) and any(
        isinstance(one, cst.Import) and any(True for _ in torch_names(one)) for one in node.body
    )


def _guarded_import(body: Sequence[cst.CSTNode]) -> tuple[int, Any] | None:
    """The block whose own body imports torch, if nothing else at the module's top does: the line belongs there."""
    if any(_imports_torch(node) for node in body):
        return None
    for place, node in enumerate(body):
        if isinstance(node, (cst.Try, cst.If)) and any(_imports_torch(inner) for inner in node.body.body):
            return place, node
    return None


def _with_lines(block: Any, lines: Sequence[Any]) -> Any:
    """The block with the lines after its last import; without blank lines, which belong between a module's parts."""
    inner = list(block.body.body)
    place = max(number for number, node in enumerate(inner) if _imports_torch(node)) + 1
    plain = [line.with_changes(leading_lines=[]) for line in lines]
    return block.with_changes(body=block.body.with_changes(body=[*inner[:place], *plain, *inner[place:]]))


def _place(body: Sequence[cst.CSTNode], device: str) -> int:
    """After the module's imports, and after what sets environment variables: the devices are counted here. Before the first
    statement that says the name."""
    used = next((place for place, node in enumerate(body) if m.findall(node, m.Name(device))), len(body))
    place = 0
    if body and m.matches(
        body[0], m.SimpleStatementLine(body=[m.Expr(m.OneOf(m.SimpleString(), m.ConcatenatedString()))])
    ):
        place = 1  # after the docstring
    for number, node in enumerate(body[:used]):
        if (
            _imports(node)
            or "environ" in code(node)
            or (isinstance(node, (cst.Try, cst.If)) and any(map(_imports, node.body.body)))
        ):
            place = number + 1
    return place


class Unused(cst.CSTTransformer):
    """Takes names of torch.cuda out of imports whose every use was rewritten."""

    def __init__(self, gone: Collection[str]) -> None:
        super().__init__()
        self._gone = gone

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> Any:
        names = [alias for alias in updated_node.names if not self._drop(alias, "")]
        return self._with(updated_node, names)

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> Any:
        if isinstance(updated_node.names, cst.ImportStar) or updated_node.module is None:
            return updated_node
        module = f"{code(updated_node.module)}."
        names = [alias for alias in updated_node.names if not self._drop(alias, module)]
        return self._with(updated_node, names)

    def _drop(self, alias: cst.ImportAlias, module: str) -> bool:
        whole = f"{module}{alias.evaluated_name}"
        local = alias.evaluated_alias or (alias.evaluated_name if module else "")
        return f"{whole}.".startswith("torch.cuda.") and local in self._gone

    def _with(self, node: Any, names: list[cst.ImportAlias]) -> Any:
        if len(names) == len(node.names):
            return node
        if not names:
            return cst.RemoveFromParent()
        return node.with_changes(names=[*names[:-1], names[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)])
