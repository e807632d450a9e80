"""What a Triton program has of a kernel's axes: which are tiled or looped over, the text of places and masks."""

from __future__ import annotations

from anytorch.graph.emit.schedule import Schedule
from anytorch.graph.emit.sharing import Scope
from anytorch.graph.emit.triton_functions import Order, spread
from anytorch.graph.indices import Index, Part
from anytorch.graph.loops import Kernel
from anytorch.graph.sizes import Size, SizeLike


class Tiles:
    def __init__(self, kernel: Kernel, schedule: Schedule) -> None:
        self.kernel, self.schedule = kernel, schedule
        self.scopes = [Scope(1)]
        self.count = 0
        # Tiled axes in one order for all: parallel ones first. An axis with a block of 1 is a plain number.
        self.tiled = tuple(axis for axis in kernel.extents if schedule.block(axis) > 1)
        self.looped = frozenset(axis for axis in kernel.extents if axis not in kernel.axes and not self._covered(axis))
        self.guards: tuple[tuple[str, Order], ...] = ()  # what loads are masked with, under a `choose`
        self.wide = any(not isinstance(b.elements, int) or b.elements >= 2**31 for b in kernel.buffers)

    def _covered(self, axis: str) -> bool:
        extent = self.kernel.extents[axis]
        return isinstance(extent, int) and self.schedule.block(axis) >= extent

    def _ragged(self, axis: str) -> bool:
        extent = self.kernel.extents[axis]
        return not isinstance(extent, int) or extent % self.schedule.block(axis) != 0

    def _line(self, text: str, scope: Scope | None = None) -> None:
        scope = scope or self.scopes[-1]
        scope.lines.append("    " * scope.depth + text)

    def _new(self, letter: str = "v") -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def index(self, index: Index, order: Order) -> str:
        def text(atom: str | Part, step: SizeLike) -> str:
            if isinstance(atom, Part):
                base = f"(({self.index(atom.index, order)}) {atom.how} ({atom.by}))"
            else:
                base = spread(atom, (atom,), order) if atom in self.tiled else atom
            return base if step == 1 else f"{base} * ({step})" if isinstance(step, Size) else f"{base} * {step}"

        said = [text(atom, step) for atom, step in index.terms]
        return f"({' + '.join([*said, *([f'({index.start})'] if index.start != 0 or not said else [])])})"

    def mask(self, order: Order, axes: frozenset[str], other: str = "") -> str:
        """The argument `mask=` of a load or store whose place depends on these axes; "" if all of it exists."""
        parts = [
            spread(f"({axis} < {self._extent(axis)})", (axis,), order)
            for axis in order
            if axis in axes and self._ragged(axis)
        ]
        parts += [spread(guard, own, order) for guard, own in self.guards if set(own) <= axes]
        return f", mask={' & '.join(parts)}{other}" if parts else ""

    def _extent(self, axis: str) -> str:
        return str(self.kernel.extents[axis])
