"""Every event and every command has its points: a new kind of either is in the registry without anybody's doing."""

import ast
from pathlib import Path
from typing import get_args

import orchestrator.core
from orchestrator.core.controller import commands
from orchestrator.core.controller.commands import Command
from orchestrator.runtime import crash_points

CORE = Path(orchestrator.core.__file__).parent


def written_events() -> set[str]:
    """Names of the events that the core writes, read from its source."""
    found = set()
    for path in CORE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
                if name in ("event", "node_event", "Event", "Decision"):
                    found |= {
                        a.value for a in node.args[:2] if isinstance(a, ast.Constant) and isinstance(a.value, str)
                    }
    return {name for name in found if name.isidentifier()}


def test_every_event_that_the_core_writes_has_its_points():
    written = written_events()
    assert {"placed", "submitted", "failed", "overtaken", "undrained"} <= written
    assert written <= set(crash_points.events())


def test_every_command_has_its_points():
    made = {kind.__name__ for kind in vars(commands).values() if isinstance(kind, type) and kind in get_args(Command)}
    defined = {n.name for n in ast.parse(Path(commands.__file__).read_text()).body if isinstance(n, ast.ClassDef)}
    classes = defined - {commands.NumberedCommand.__name__}
    assert made == classes
    for name in classes:
        assert {f"command:{name}:before", f"command:{name}:after"} <= set(crash_points.names())


def test_names_are_unique_and_say_what_and_on_which_side():
    names = crash_points.names()
    assert len(set(names)) == len(names)
    assert {(name.count(":"), name.rpartition(":")[2]) for name in names} == {(2, "before"), (2, "after")}
    assert crash_points.event_point("placed", crash_points.BEFORE) in names
    assert crash_points.command_point(commands.Release("x"), crash_points.AFTER) == "command:Release:after"
