"""Estimate what a pickle would build, before it is loaded: run its opcodes on sizes, not values.

A few bytes of a pickle can take any amount of memory or time: a length that the file does not have, a memo index far
beyond the others, or a tuple that contains another one twice, which contains a third one twice, and so on (hashing or
printing the first visits the last 2^n times). No program writes such pickles.
"""

import pickletools
from typing import Any

MAX_OPCODES = 30_000_000
MAX_GLOBALS = 1_000
"""Maximum number of different classes and functions. A file of torch.save names a dozen."""
MAX_DEPTH = 200
MAX_REPEATED = 1_000_000
"""Maximum number of values reached again through the memo, or the number of opcodes if that is larger."""
_MARK = (0, -1)
_FILLING = {"APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD"}
"""Opcodes that put values into the container below them on the stack."""
_GLOBALS = {"GLOBAL", "INST", "STACK_GLOBAL"}

Value = tuple[int, int]
"""Number of values in it, itself included, and nesting depth."""


class Unsound(ValueError):
    """A pickle is unsafe to load. The message is a sentence without its subject."""


def scan(data: bytes) -> int:
    """Return the number of opcodes. Raises Unsound, and ValueError for data that is not a pickle."""
    stack: list[Value] = []
    memo: dict[int, Value] = {}
    count = repeated = globals_count = 0
    argument: Any
    for opcode, argument, _ in pickletools.genops(data):
        count, name = count + 1, opcode.name
        if name in _CONSTANTS:
            stack.append(_ONE)
            globals_count += name == "GLOBAL"
        elif name in _GET:
            value = memo[argument]
            repeated += value[0]
            stack.append(value)
        elif name in _PUT:
            index = len(memo) if argument is None else argument
            if index > count:
                raise Unsound(f"puts value {index} into its memo after {count} opcodes")
            memo[index] = stack[-1]
        elif name == "DUP":
            repeated += stack[-1][0]
            stack.append(stack[-1])
        else:
            globals_count += name in _GLOBALS
            _run(opcode, stack)
        if repeated > max(MAX_REPEATED, count):
            raise Unsound(f"repeats nested values more than {max(MAX_REPEATED, count)} times")
        if count > MAX_OPCODES or globals_count > 100 * MAX_GLOBALS:
            raise Unsound(f"has more than {MAX_OPCODES} opcodes, or {100 * MAX_GLOBALS} names")
    return count


_ONE = (1, 1)
_CONSTANTS = {
    opcode.name
    for opcode in pickletools.opcodes
    if not opcode.stack_before and opcode.stack_after and opcode.stack_after[0] is not pickletools.markobject
} - {"GET", "BINGET", "LONG_BINGET"}
"""Most opcodes: they take no arguments from the stack."""
_PUT = {"PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"}
_GET = {"GET", "BINGET", "LONG_BINGET"}


def _run(opcode: Any, stack: list[Value]) -> None:
    """Pop the opcode's arguments from the stack, and push one value of their total size."""
    arguments = _pop_arguments(opcode, stack)
    if not opcode.stack_after:
        return
    if opcode.stack_after[0] is pickletools.markobject:
        stack.append(_MARK)
        return
    size, deepest_argument = 1, 0
    for value in arguments:
        size += value[0]
        deepest_argument = max(deepest_argument, value[1])
    depth = (
        max(arguments[0][1], 1 + max([v[1] for v in arguments[1:]], default=0))
        if opcode.name in _FILLING
        else 1 + deepest_argument
    )
    if depth > MAX_DEPTH:
        raise Unsound(f"is nested more than {MAX_DEPTH} times")
    stack.append((size, depth))


def _pop_arguments(opcode: Any, stack: list[Value]) -> list[Value]:
    before = opcode.stack_before
    if pickletools.markobject not in before:
        if opcode.name == "POP" and stack and stack[-1] == _MARK:
            return [stack.pop()]
        if len(before) > len(stack):
            raise ValueError(f"{opcode.name} needs {len(before)} values")
        arguments = stack[len(stack) - len(before) :]
        del stack[len(stack) - len(before) :]
        return arguments
    mark = len(stack) - 1
    while mark >= 0 and stack[mark] != _MARK:
        mark -= 1
    below = before.index(pickletools.markobject)  # the container below the mark, if the opcode needs one
    if mark < below:
        raise ValueError(f"{opcode.name} needs a mark")
    arguments = stack[mark - below : mark] + stack[mark + 1 :]
    del stack[mark - below :]
    return arguments
