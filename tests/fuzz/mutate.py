"""New inputs from old ones, by the form of a target: JSON stays JSON, a safetensors header keeps its length right.

Plain mutation of bytes breaks such inputs at their first brace, and reaches no code behind the parser.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

DEEP = "\0deep"  # stands for a value that is nested deeper than Python's recursion goes
ODD: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 255, 2**31 - 1, 2**31, -(2**31), 2**53, 2**63 - 1, 2**63, 2**64, -(2**63) - 1,
    10**40, 10**320, 0.5, -0.0, 1e-320, 1e30, 1e308, float("inf"), float("-inf"), float("nan"), "", " ", "0", "-1", "1e9",
    "nan", "\x00", "\ud800", "ä日本", "../x", "/", "a" * 300, "[UNK]", [], [[]], [None], [0], [1, 2], ["a"], {}, {"a": 1},
    [0] * 70, DEEP,
)  # fmt: skip
Spot = tuple[Any, Any]  # a list or dictionary, and an index or name in it


def mutated(
    form: str, data: bytes, most: int, seed: int, words: tuple[str, ...], plain: Callable[[bytes, int], bytes]
) -> bytes:
    """A new input of at most `most` bytes. `plain` mutates bytes without regard to their form."""
    rng = random.Random(seed)
    if form in ("json", "folder") and rng.random() < 0.85:
        try:
            return mutated_json(data, rng)[:most]
        except (ValueError, RecursionError):
            pass
    if form == "tensors" and rng.random() < 0.85:
        length = int.from_bytes(data[:8], "little")
        try:
            header = mutated_json(data[8 : 8 + length], rng)
        except (ValueError, RecursionError):
            pass
        else:
            rest = data[8 + length :]
            if rng.random() < 0.2:
                rest = plain(rest, most) if rest else b"\0" * 8
            return (len(header).to_bytes(8, "little") + header + rest)[:most]
    if form == "text" and words and rng.random() < 0.6:
        return mutated_text(data, rng, words)[:most]
    return plain(data, most)


def mutated_text(data: bytes, rng: random.Random, words: tuple[str, ...]) -> bytes:
    """A word put in, or in place of another; a line doubled, moved or removed."""
    for _ in range(rng.randint(1, 3)):
        word = rng.choice(words).encode()
        at = rng.randint(0, len(data))
        lines = data.split(b"\n")
        place = rng.randrange(len(lines))
        kind = rng.randrange(5)
        if kind == 0:
            data = data[:at] + word + data[at:]
        elif kind == 1:
            end = min(len(data), at + rng.randint(1, 8))
            data = data[:at] + word + data[end:]
        elif kind == 2:
            data = b"\n".join([*lines[:place], lines[place], *lines[place:]])
        elif kind == 3:
            data = b"\n".join(lines[:place] + lines[place + 1 :])
        else:
            cells = lines[place].split(b",")
            cells[rng.randrange(len(cells))] = word
            lines[place] = b",".join(cells)
            data = b"\n".join(lines)
    return data


def odd(rng: random.Random) -> Any:
    """One of the odd values, of the caller's own."""
    return copy.deepcopy(rng.choice(ODD))


def mutated_json(data: bytes, rng: random.Random) -> bytes:
    """The same JSON with one to three of its values changed. Raises ValueError or RecursionError for what is not JSON."""
    whole = [json.loads(data)]
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        spots = list(spots_of(whole))
        # JSON in JSON, as safetensors' metadata has it: one place for all that it holds.
        inner = [(one, name) for one, name in spots if isinstance(one[name], str) and one[name][:1] in ("{", "[")]
        container, key = rng.choice(inner if inner and rng.random() < 0.4 else spots)
        value = container[key]
        kind = rng.randrange(10)
        if isinstance(value, str) and value[:1] in ("{", "[") and kind < 8:
            with suppress(ValueError, RecursionError):  # a text that only looks like it stays as it is
                container[key] = mutated_json(value.encode(), rng).decode()
        elif kind < 4:
            container[key] = odd(rng)
        elif kind == 4 and container is not whole:
            del container[key]
        elif kind == 5:
            other, name = rng.choice(spots)
            container[key] = json.loads(json.dumps(other[name]))  # a copy: a tree has no cycles
        elif kind == 6 and isinstance(container, dict):
            names = [name for one, name in spots if isinstance(one, dict)]
            container[rng.choice([*names, "", "a.b", str(rng.choice(ODD))[:40]])] = container.pop(key)
        elif kind == 7:
            container[key] = rng.choice(([value], {"a": value}, str(value)[:300], [value] * rng.choice((2, 9))))
        elif isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**64:
            container[key] = rng.choice((value + 1, value - 1, -value, value * 2, value // 2, float(value)))
        elif isinstance(value, str):
            at = rng.randint(0, len(value))
            container[key] = value[:at] + str(rng.choice(ODD))[:40] + value[at + rng.randint(0, 4) :]
        elif isinstance(value, list):
            value.insert(rng.randint(0, len(value)), odd(rng))
        elif isinstance(value, dict):
            value[str(rng.randrange(100))] = odd(rng)
    text = json.dumps(whole[0], ensure_ascii=rng.random() < 0.5)
    depth = rng.choice((200, 450, 1200))
    text = text.replace(json.dumps(DEEP), rng.choice(("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth)))
    return text.encode("utf-8", "surrogatepass")


def spots_of(whole: list[Any]) -> list[Spot]:
    """Every place in a tree that holds a value."""
    found: list[Spot] = []
    left: list[Any] = [whole]
    while left:
        container = left.pop()
        for key in range(len(container)) if isinstance(container, list) else list(container):
            found.append((container, key))
            if isinstance(container[key], (list, dict)):
                left.append(container[key])
    return found
