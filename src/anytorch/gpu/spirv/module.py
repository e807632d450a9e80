"""A small assembler of SPIR-V compute modules: types and constants are shared, unsigned arithmetic reads as Python's.

    module = Module(local_size=64)
    data = module.buffer(0, module.u32, writable=True)
    index = module.local_index()
    with module.when(index < 10):
        module.store(module.at(data, index), index * 2)
    words = module.finish()

Numbers of opcodes, capabilities and the like are those of SPIR-V's registry. What a module means is checked by `spirv-val`
(tests/webgpu/test_matrix_cores.py). Nothing here knows of a GPU, of torch or of WebGPU.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

VERSION_1_5 = 0x00010500
UNIFORM_CONSTANT, WORKGROUP, FUNCTION, PUSH_CONSTANT, STORAGE_BUFFER, INPUT = 0, 4, 7, 9, 12, 1
SCOPE_WORKGROUP, SCOPE_SUBGROUP = 2, 3
ROW_MAJOR, COLUMN_MAJOR = 0, 1
USE_A, USE_B, USE_ACCUMULATOR = 0, 1, 2
# Of memory: acquire and release, of workgroup memory, made available and visible.
BARRIER = 0x8 | 0x100 | 0x2000 | 0x4000
VISIBLE, AVAILABLE, NON_PRIVATE = 0x10, 0x8, 0x20


class Value:
    """The result of an instruction. Operators are those of unsigned integers; `known` is a constant's number."""

    __slots__ = ("id", "known", "module", "type")

    def __init__(self, module: Module, number: int, type_: int, known: int | None = None) -> None:
        self.module, self.id, self.type, self.known = module, number, type_, known

    def _with(self, other: Value | int, opcode: int, fold: Any) -> Value:
        right = self.module.constant(other) if isinstance(other, int) else other
        if self.known is not None and right.known is not None:
            return self.module.constant(fold(self.known, right.known))
        return self.module.op(opcode, self.type, self, right)

    def __add__(self, other: Value | int) -> Value:
        if other == 0 or (isinstance(other, Value) and other.known == 0):
            return self
        return other if self.known == 0 and isinstance(other, Value) else self._with(other, 128, lambda a, b: a + b)

    def __sub__(self, other: Value | int) -> Value:
        return self if isinstance(other, int) and other == 0 else self._with(other, 130, lambda a, b: a - b)

    def __mul__(self, other: Value | int) -> Value:
        return self if isinstance(other, int) and other == 1 else self._with(other, 132, lambda a, b: a * b)

    def __floordiv__(self, other: Value | int) -> Value:
        return self if isinstance(other, int) and other == 1 else self._with(other, 134, lambda a, b: a // b)

    def __mod__(self, other: Value | int) -> Value:
        return self._with(other, 137, lambda a, b: a % b)

    def __and__(self, other: Value | int) -> Value:
        return self._with(other, 199, lambda a, b: a & b)

    def __or__(self, other: Value | int) -> Value:
        return self._with(other, 197, lambda a, b: a | b)

    def __rshift__(self, other: int) -> Value:
        return self._with(other, 194, lambda a, b: a >> b)

    def __lshift__(self, other: int) -> Value:
        return self._with(other, 196, lambda a, b: a << b)

    def __lt__(self, other: Value | int) -> Value:
        return self.module.op(176, self.module.boolean, self, self.module.lift(other))

    def __ge__(self, other: Value | int) -> Value:
        return self.module.op(174, self.module.boolean, self, self.module.lift(other))

    def __eq__(self, other: object) -> bool:  # of Python's objects; SPIR-V's is `equals`
        return self is other

    def __hash__(self) -> int:
        return self.id

    def equals(self, other: Value | int) -> Value:
        return self.module.op(170, self.module.boolean, self, self.module.lift(other))

    def minimum(self, other: Value | int) -> Value:
        return self.module.extended(38, self.type, self, self.module.lift(other))


class Module:
    """A compute shader with one entry point, `main`, written from top to bottom."""

    def __init__(self, local_size: int, *, capabilities: Sequence[int] = (), extensions: Sequence[str] = ()) -> None:
        self._next = 1
        self._capabilities = list(dict.fromkeys((1, 5345, *capabilities)))  # Shader, VulkanMemoryModel
        self._extensions = list(dict.fromkeys(extensions))
        self._decorations: list[list[int]] = []
        self._globals: list[list[int]] = []
        self._variables: list[list[int]] = []
        self._body: list[list[int]] = []
        self._interface: list[int] = []
        self._known: dict[tuple[Any, ...], int] = {}
        self._local_size = local_size
        self._extended_set = self._new()
        self._main = self._new()
        self.void = self._type(19)
        self.boolean = self._type(20)
        self.u32 = self._type(21, 32, 0)
        self.f32 = self._type(22, 32)

    # --- numbers ------------------------------------------------------------------------------------------------------

    def _new(self) -> int:
        self._next += 1
        return self._next - 1

    def _global(self, opcode: int, *operands: int, result_type: int | None = None) -> int:
        key = (opcode, result_type, *operands)
        if key not in self._known:
            number = self._known[key] = self._new()
            head = [number] if result_type is None else [result_type, number]
            self._globals.append([opcode, *head, *operands])
        return self._known[key]

    def _type(self, opcode: int, *operands: int) -> int:
        return self._global(opcode, *operands)

    def decorate(self, target: int, *operands: int) -> None:
        self._decorations.append([71, target, *operands])

    def require(self, capability: int, extension: str = "") -> None:
        if capability not in self._capabilities:
            self._capabilities.append(capability)
        if extension and extension not in self._extensions:
            self._extensions.append(extension)

    # --- types and constants ------------------------------------------------------------------------------------------

    def float16(self) -> int:
        self.require(9)
        return self._type(22, 16)

    def bfloat16(self) -> int:
        self.require(5116, "SPV_KHR_bfloat16")
        self.require(5118)
        return self._type(22, 16, 0)

    def vector(self, element: int, count: int) -> int:
        return self._type(23, element, count)

    def pointer(self, storage: int, target: int) -> int:
        return self._type(32, storage, target)

    def array(self, element: int, count: int) -> int:
        return self._type(28, element, self.constant(count).id)

    def matrix(self, element: int, rows: int, columns: int, use: int, scope: int = SCOPE_SUBGROUP) -> int:
        """A cooperative matrix. `use` says in which place of a product it stands."""
        self.require(6022, "SPV_KHR_cooperative_matrix")
        numbers = [self.constant(number).id for number in (scope, rows, columns, use)]
        return self._type(4456, element, *numbers)

    def constant(self, number: int) -> Value:
        number %= 2**32
        return Value(self, self._global(43, number, result_type=self.u32), self.u32, number)

    def real(self, number: float) -> Value:
        (bits,) = struct.unpack("<I", struct.pack("<f", number))
        return Value(self, self._global(43, bits, result_type=self.f32), self.f32)

    def zero(self, type_: int) -> Value:
        """All zeros: OpConstantNull."""
        return Value(self, self._global(46, result_type=type_), type_)

    def lift(self, value: Value | int) -> Value:
        return self.constant(value) if isinstance(value, int) else value

    # --- instructions -------------------------------------------------------------------------------------------------

    def emit(self, opcode: int, *operands: int) -> None:
        self._body.append([opcode, *operands])

    def op(self, opcode: int, type_: int, *operands: Value | int) -> Value:
        """An instruction with a result. Integers among the operands are literals, not constants."""
        number = self._new()
        words = [operand.id if isinstance(operand, Value) else operand for operand in operands]
        self.emit(opcode, type_, number, *words)
        return Value(self, number, type_)

    def extended(self, instruction: int, type_: int, *operands: Value) -> Value:
        """An instruction of GLSL.std.450."""
        return self.op(12, type_, self._extended_set, instruction, *operands)

    def select(self, condition: Value, yes: Value, no: Value) -> Value:
        return self.op(169, yes.type, condition, yes, no)

    def bitcast(self, type_: int, value: Value) -> Value:
        return value if value.type == type_ else self.op(124, type_, value)

    def both(self, one: Value, other: Value) -> Value:
        return self.op(167, self.boolean, one, other)

    def add(self, one: Value, other: Value) -> Value:
        """Of floats, or of matrices of them; so are `times` and `less`."""
        return self.op(129, one.type, one, other)

    def times(self, one: Value, other: Value) -> Value:
        return self.op(133, one.type, one, other)

    def less(self, one: Value, other: Value) -> Value:
        return self.op(184, self.boolean, one, other)

    # --- memory -------------------------------------------------------------------------------------------------------

    def buffer(self, binding: int, element: int, stride: int, *, writable: bool = False) -> Value:
        """A storage buffer of elements that lie `stride` bytes apart."""
        array = self._new()
        self._globals.append([29, array, element])
        self.decorate(array, 6, stride)
        block = self._new()
        self._globals.append([30, block, array])
        self.decorate(block, 2)
        self._decorations.append([72, block, 0, 35, 0])
        variable = self._variable(STORAGE_BUFFER, block)
        self.decorate(variable.id, 34, 0)
        self.decorate(variable.id, 33, binding)
        if not writable:
            self.decorate(variable.id, 24)
        return Value(self, variable.id, element)

    def parameters(self, names: Sequence[str]) -> dict[str, Value]:
        """The push constants, loaded: unsigned words, or floats if they are called alpha, beta or scale."""
        types = [self.f32 if name in ("alpha", "beta", "scale") else self.u32 for name in names]
        block = self._new()
        self._globals.append([30, block, *types])
        self.decorate(block, 2)
        for number in range(len(names)):
            self._decorations.append([72, block, number, 35, 4 * number])
        variable = self._variable(PUSH_CONSTANT, block)
        found = {}
        for number, (name, type_) in enumerate(zip(names, types, strict=True)):
            place = self.op(65, self.pointer(PUSH_CONSTANT, type_), variable, self.constant(number))
            found[name] = self.op(61, type_, place)
        return found

    def shared(self, element: int, count: int) -> Value:
        """Workgroup memory."""
        variable = self._variable(WORKGROUP, self.array(element, count))
        return Value(self, variable.id, element)

    def _variable(self, storage: int, target: int) -> Value:
        number = self._new()
        type_ = self.pointer(storage, target)
        self._globals.append([59, type_, number, storage])
        self._interface.append(number)
        return Value(self, number, type_)

    def local(self, type_: int, initial: Value | None = None) -> Value:
        """A variable of this invocation: `load` and `store` it."""
        number = self._new()
        pointer = self.pointer(FUNCTION, type_)
        self._variables.append([59, pointer, number, FUNCTION])
        variable = Value(self, number, type_)
        if initial is not None:
            self.emit(62, number, initial.id)
        return variable

    def get(self, variable: Value) -> Value:
        return self.op(61, variable.type, variable)

    def put(self, variable: Value, value: Value) -> None:
        self.emit(62, variable.id, value.id)

    def at(self, buffer: Value, index: Value) -> Value:
        """A pointer to an element of a storage buffer."""
        return self.op(65, self.pointer(STORAGE_BUFFER, buffer.type), buffer, self.constant(0), index)

    def read(self, buffer: Value, index: Value) -> Value:
        return self.op(61, buffer.type, self.at(buffer, index))

    def write(self, buffer: Value, index: Value, value: Value) -> None:
        self.emit(62, self.at(buffer, index).id, value.id)

    def shared_at(self, memory: Value, index: Value) -> Value:
        return self.op(65, self.pointer(WORKGROUP, memory.type), memory, index)

    def shared_read(self, memory: Value, index: Value) -> Value:
        scope = self.constant(SCOPE_WORKGROUP)
        return self.op(61, memory.type, self.shared_at(memory, index), VISIBLE | NON_PRIVATE, scope)

    def shared_write(self, memory: Value, index: Value, value: Value) -> None:
        place, scope = self.shared_at(memory, index), self.constant(SCOPE_WORKGROUP)
        self.emit(62, place.id, value.id, AVAILABLE | NON_PRIVATE, scope.id)

    def barrier(self, scope: int = SCOPE_WORKGROUP) -> None:
        """Wait for the workgroup, or for the subgroup; what they wrote to workgroup memory is seen afterwards."""
        self.emit(224, self.constant(scope).id, self.constant(SCOPE_WORKGROUP).id, self.constant(BARRIER).id)

    def from_lane(self, value: Value, other: int) -> Value:
        """The value that the lane with number (this one's XOR `other`) has."""
        self.require(65)
        return self.op(346, value.type, self.constant(SCOPE_SUBGROUP), value, self.constant(other))

    # --- cooperative matrices -----------------------------------------------------------------------------------------

    def load_matrix(self, type_: int, memory: Value, index: Value, layout: int, stride: int) -> Value:
        """A matrix from workgroup memory; index and stride count the memory's elements."""
        place = self.shared_at(memory, index)
        layout_, step, scope = self.constant(layout), self.constant(stride), self.constant(SCOPE_WORKGROUP)
        return self.op(4457, type_, place, layout_, step, VISIBLE | NON_PRIVATE, scope)

    def store_matrix(self, matrix: Value, memory: Value, index: Value, stride: int) -> None:
        place = self.shared_at(memory, index)
        layout, step, scope = self.constant(ROW_MAJOR), self.constant(stride), self.constant(SCOPE_WORKGROUP)
        self.emit(4458, place.id, matrix.id, layout.id, step.id, AVAILABLE | NON_PRIVATE, scope.id)

    def multiply_add(self, a: Value, b: Value, c: Value) -> Value:
        return self.op(4459, c.type, a, b, c)

    # --- where this invocation is -------------------------------------------------------------------------------------

    def builtin(self, number: int, type_: int) -> Value:
        variable = self._new()
        pointer = self.pointer(INPUT, type_)
        self._globals.append([59, pointer, variable, INPUT])
        self._interface.append(variable)
        self.decorate(variable, 11, number)
        return self.op(61, type_, Value(self, variable, type_))

    def local_index(self) -> Value:
        return self.builtin(29, self.u32)

    def workgroup(self) -> tuple[Value, Value]:
        found = self.builtin(26, self.vector(self.u32, 3))
        return self.op(81, self.u32, found, 0), self.op(81, self.u32, found, 1)

    def subgroup(self) -> tuple[Value, Value]:
        """The number of this subgroup in the workgroup, and of this invocation in the subgroup."""
        self.require(61)
        return self.builtin(40, self.u32), self.builtin(41, self.u32)

    # --- flow ---------------------------------------------------------------------------------------------------------

    def _label(self, number: int) -> None:
        self.emit(248, number)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        inside, after = self._new(), self._new()
        self.emit(247, after, 0)
        self.emit(250, condition.id, inside, after)
        self._label(inside)
        yield
        self.emit(249, after)
        self._label(after)

    @contextmanager
    def loop(self, first: Value | int, end: Value, step: int) -> Iterator[Value]:
        """Counts from `first` while below `end`."""
        counter = self.local(self.u32, self.lift(first))
        header, test, body, more, after = (self._new() for _ in range(5))
        self.emit(249, header)
        self._label(header)
        self.emit(246, after, more, 0)
        self.emit(249, test)
        self._label(test)
        index = self.get(counter)
        self.emit(250, (index < end).id, body, after)
        self._label(body)
        yield index
        self.emit(249, more)
        self._label(more)
        self.put(counter, self.get(counter) + step)
        self.emit(249, header)
        self._label(after)

    def leave_if(self, condition: Value) -> None:
        """Return here where the condition holds. It must hold for the whole workgroup, or no barrier may follow."""
        inside, after = self._new(), self._new()
        self.emit(247, after, 0)
        self.emit(250, condition.id, inside, after)
        self._label(inside)
        self.emit(253)
        self._label(after)

    # --- the whole ----------------------------------------------------------------------------------------------------

    def finish(self) -> bytes:
        """The module's words, as little-endian bytes."""
        signature = self._type(33, self.void)
        entry = self._new()
        lines: list[list[int]] = [[17, capability] for capability in self._capabilities]
        lines += [[10, *_text(name)] for name in self._extensions]
        lines.append([11, self._extended_set, *_text("GLSL.std.450")])
        lines.append([14, 0, 3])  # logical addressing, the Vulkan memory model
        lines.append([15, 5, self._main, *_text("main"), *self._interface])
        lines.append([16, self._main, 17, self._local_size, 1, 1])
        lines += self._decorations + self._globals
        lines += [[54, self.void, self._main, 0, signature], [248, entry], *self._variables, *self._body, [253], [56]]
        words = [0x07230203, VERSION_1_5, 0, self._next, 0]
        for opcode, *operands in lines:
            words += [(len(operands) + 1) << 16 | opcode, *operands]
        return struct.pack(f"<{len(words)}I", *words)


def _text(name: str) -> list[int]:
    data = name.encode() + b"\0"
    data += b"\0" * (-len(data) % 4)
    return list(struct.unpack(f"<{len(data) // 4}I", data))
