"""What a pickle would build, estimated before it is loaded: its instructions are run on sizes instead of on values.

A few bytes of a pickle can take any amount of memory or time: a length that the file does not hold, a place in the
memo far beyond the others, or a tuple that holds another one twice, which holds a third one twice, and so on (hashing
or printing the first visits the last 2^n times). None of that is in a pickle that a program writes.
"""

import pickletools
from typing import Any

MOST_OPCODES = 30_000_000
MOST_GLOBALS = 1_000
"""Different classes and functions. A file of torch.save names a dozen."""
DEEPEST = 200
SHARED = 1_000_000
"""Values that are reached again through the memo; a pickle of many instructions may have as many as these."""
_MARK = (0, -1)
_INTO = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
"""These put values into the container below them."""
_GLOBALS = {"GLOBAL", "INST", "STACK_GLOBAL"}

Value = tuple[int, int]
"""How many values it holds, itself included, and how deep they are nested."""


class Unsound(ValueError):
    """A sentence about the pickle, without its subject."""


def scan(data: bytes) -> int:
    """The number of instructions. Raises Unsound, and ValueError for what is no pickle."""
    stack: list[Value] = []
    memo: dict[int, Value] = {}
    count = again = named = 0
    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        count, name = count + 1, opcode.name
        if name in _CONSTANTS:
            stack.append(_ONE)
            named += name == "GLOBAL"
        elif name in _GET:
            value = memo[argument]
            again += value[0]
            stack.append(value)
        elif name in _PUT:
            at = len(memo) if argument is None else argument
            if at > count:
                raise Unsound(f"puts value {at} into its memo after {count} instructions")
            memo[at] = stack[-1]
        elif name == "DUP":
            again += stack[-1][0]
            stack.append(stack[-1])
        else:
            named += name in _GLOBALS
            _run(opcode, stack)
        if again > max(SHARED, count):
            raise Unsound(f"holds values within values more than {max(SHARED, count)} times over")
        if count > MOST_OPCODES or named > 100 * MOST_GLOBALS:
            raise Unsound(f"has more than {MOST_OPCODES} instructions, or {100 * MOST_GLOBALS} names")
    return count


_ONE = (1, 1)
_CONSTANTS = {
    opcode.name
    for opcode in pickletools.opcodes
    if not opcode.stack_before and opcode.stack_after and opcode.stack_after[0] is not pickletools.markobject
} - {"GET", "BINGET", "LONG_BINGET"}
"""Most instructions: they take nothing."""
_PUT = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_GET = {"GET", "BINGET", "LONG_BINGET"}


def _run(opcode: Any, stack: list[Value]) -> None:
    """Take from the stack what the instruction takes, and push one value of the size of all."""
    taken = _taken(opcode, stack)
    if not opcode.stack_after:
        return
    if opcode.stack_after[0] is pickletools.markobject:
        stack.append(_MARK)
        return
    size, inner = 1, 0
    for value in taken:
        size += value[0]
        inner = max(inner, value[1])
    depth = max(taken[0][1], 1 + max([v[1] for v in taken[1:]], default=0)) if opcode.name in _INTO else 1 + inner
    if depth > DEEPEST:
        raise Unsound(f"is nested more than {DEEPEST} times")
    stack.append((size, depth))


def _taken(opcode: Any, stack: list[Value]) -> list[Value]:
    before = opcode.stack_before
    if pickletools.markobject not in before:
        if opcode.name == "POP" and stack and stack[-1] == _MARK:
            return [stack.pop()]
        if len(before) > len(stack):
            raise ValueError(f"{opcode.name} finds no {len(before)} values")
        taken = stack[len(stack) - len(before) :]
        del stack[len(stack) - len(before) :]
        return taken
    at = len(stack) - 1
    while at >= 0 and stack[at] != _MARK:
        at -= 1
    below = before.index(pickletools.markobject)  # an object below the mark, which a slice is put into
    if at < below:
        raise ValueError(f"{opcode.name} finds no mark")
    taken = stack[at - below : at] + stack[at + 1 :]
    del stack[at - below :]
    return taken
