"""The base of the rewriter: what it changed and left, line by line, and what names mean in the module."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst
from libcst.metadata import ParentNodeProvider, PositionProvider, QualifiedNameProvider, QualifiedNameSource

from anytorch.run.port.syntax import Facts, code, comments, dotted

INNER = re.compile(r"^torch\.cuda\.(amp\.autocast_mode|amp\.grad_scaler|amp\.common|memory|random|streams)\.")

Span = tuple[tuple[int, int], tuple[int, int]]  # (line, column) of the start and of the end


@dataclass(frozen=True)
class Note:
    """One line: what it said, and what it says now ("" where it was left alone), and why."""

    line: int
    before: str
    after: str
    why: str


class Noting(cst.CSTTransformer):
    """Notes what is changed and what is left; a line that is kept on purpose is not visited."""

    METADATA_DEPENDENCIES = (PositionProvider, ParentNodeProvider, QualifiedNameProvider)

    def __init__(self, known: Facts) -> None:
        super().__init__()
        self.changes: list[tuple[Span, Note]] = []
        self.left: list[tuple[Span, Note]] = []
        self.answered: set[str] = set()  # local names of torch.cuda's things, of which a use was rewritten
        self._facts = known
        self._torch = known.torch
        self._device = known.device
        self._type = f"{known.device}.type"
        self._quotes: list[str] = []  # of the f-strings around a node

    # --- notes -------------------------------------------------------------------------------------------------------

    def noted(self, entries: Sequence[tuple[Span, Note]]) -> list[Note]:
        return sorted((note for _, note in entries), key=by_line)

    def _span(self, node: cst.CSTNode) -> Span:
        position: Any = self.get_metadata(PositionProvider, node)
        return (position.start.line, position.start.column), (position.end.line, position.end.column)

    def _put(self, original: cst.CSTNode, new: Any, why: str, *, whole: bool = False) -> Any:
        """The new node, noted; or None where a comment would be lost. Then it is listed as left, but for the `whole` of
        something whose parts were changed already."""
        span = self._span(original)
        text = code(new).strip()
        if any(comment not in text for comment in comments(original)):
            if not whole:
                self._leave(original, "the comment inside would be lost")
            return None
        lpar, rpar = getattr(original, "lpar", ()), getattr(original, "rpar", ())
        if lpar and not getattr(new, "lpar", ()):
            new = new.with_changes(lpar=lpar, rpar=rpar)
        self._forget(span)
        self.changes.append((span, Note(span[0][0], code(original).strip(), text, why)))
        root = dotted(_root(original)).partition(".")[0]
        if root:
            self.answered.add(root)
        return new

    def _leave(self, node: cst.CSTNode, why: str) -> None:
        span = self._span(node)
        self.left = [entry for entry in self.left if not within(entry[0], span)]
        self.left.append((span, Note(span[0][0], code(node), "", why)))

    def _forget(self, span: Span) -> None:
        """What was noted inside of a node that is replaced as a whole."""
        self.changes = [entry for entry in self.changes if not within(entry[0], span)]
        self.left = [entry for entry in self.left if not within(entry[0], span)]

    def _any(self, entries: Sequence[tuple[Span, Note]], node: cst.CSTNode) -> bool:
        span = self._span(node)
        return any(within(entry[0], span) for entry in entries)

    # --- names and texts ---------------------------------------------------------------------------------------------

    def _name(self, node: cst.CSTNode) -> str:
        """The full name of what an expression names, by the module's imports: "torch.cuda.synchronize"; "" if it is the
        module's own."""
        if not dotted(node):
            return ""  # a method of what a call gave, say
        found = self.get_metadata(QualifiedNameProvider, node, set()) or set()
        imported = sorted(one.name for one in found if one.source is QualifiedNameSource.IMPORT)
        if imported:
            return INNER.sub(lambda hit: "torch.cuda.amp." if ".amp." in hit[0] else "torch.cuda.", imported[0])
        return "" if found else dotted(node)  # after `from x import *`, nothing is known of it

    def _parent(self, node: cst.CSTNode) -> Any:
        return self.get_metadata(ParentNodeProvider, node)

    def _holds_device(self, name: str) -> bool:
        return "dev" in name.lower() or name in self._facts.devices

    def _quoted(self, text: str, like: cst.BaseExpression | None = None) -> str:
        """The text as a string: in the quotes of the one it replaces, else in those that an f-string around leaves free."""
        quote = like.quote if isinstance(like, cst.SimpleString) else ""
        if not quote:
            quote = "'" if '"' in self._quotes or '"""' in self._quotes else '"'
        return f"{quote}{text}{quote}"

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        if self._facts.kept and self._is_kept(original_node):
            return updated_node
        return super().on_leave(original_node, updated_node)

    def _is_kept(self, node: cst.CSTNode) -> bool:
        if not isinstance(
            node, (cst.BaseExpression, cst.BaseSmallStatement, cst.SimpleStatementLine, cst.If, cst.FunctionDef)
        ):
            return False
        (first, _), (last, _) = self._span(node)
        if isinstance(node, (cst.If, cst.FunctionDef)):
            last = first
        return any(first <= line <= last for line in self._facts.kept)


def by_line(note: Note) -> int:
    return note.line


def within(inner: Span, outer: Span) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def _root(node: cst.CSTNode) -> cst.CSTNode:
    return node.func if isinstance(node, cst.Call) else node
