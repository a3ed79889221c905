"""The walks of docs/architecture.md through the code: their files and functions exist, their numbers are right."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
WALKS = ("One job", "One checkpoint", "One heartbeat")
STEP = re.compile(r"^(?P<number>\d+)\. \[(?P<path>[^]]+)\]\((?P<link>[^)]+)\) `(?P<function>[^`]+)`: .+\.(?:\*\*)?$")
FILES = re.compile(r"^\*\*Files: (\d+)", re.MULTILINE)
FILES_OF_STEPS = re.compile(r"(\d+) of them are in steps (\d+) to (\d+)")


@dataclass(frozen=True)
class Step:
    number: int
    path: str
    link: str
    function: str


def section(walk: str) -> str:
    return PAGE.read_text().partition(f"\n## {walk}\n")[2].partition("\n## ")[0]


def lines(walk: str) -> list[str]:
    """Its numbered lines."""
    return [line for line in section(walk).splitlines() if line[:1].isdigit()]


@cache
def steps(walk: str) -> tuple[Step, ...]:
    """The steps of a walk; a numbered line of another form fails the test that asks."""
    matches = [(line, STEP.match(line)) for line in lines(walk)]
    assert all(match for _, match in matches), [line for line, match in matches if not match]
    return tuple(Step(int(m["number"]), m["path"], m["link"], m["function"]) for _, m in matches if m)


@cache
def functions(path: str) -> frozenset[str]:
    """`function` and `Class.method` of a module."""
    return frozenset(_functions(ast.parse((ROOT / path).read_text()), ""))


def _functions(parent: ast.AST, prefix: str) -> Iterator[str]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{prefix}{node.name}"
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


@pytest.mark.parametrize("walk", WALKS)
def test_the_steps_of_a_walk_are_numbered_in_order(walk):
    numbers = [step.number for step in steps(walk)]
    assert numbers == list(range(1, len(numbers) + 1)) and len(numbers) > 10


@pytest.mark.parametrize("walk", WALKS)
def test_each_step_links_to_the_file_that_it_names(walk):
    wrong = [step for step in steps(walk) if (PAGE.parent / step.link).resolve() != ROOT / step.path]
    missing = [step for step in steps(walk) if not (ROOT / step.path).is_file()]
    assert not (wrong or missing)


@pytest.mark.parametrize("walk", WALKS)
def test_each_function_that_a_step_names_is_in_its_file(walk):
    missing = [f"{s.number}. {s.path} has no {s.function}" for s in steps(walk) if s.function not in functions(s.path)]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize("walk", WALKS)
def test_the_number_of_files_that_a_walk_states_is_that_of_its_links(walk):
    (stated,) = FILES.findall(section(walk))
    assert int(stated) == len({step.path for step in steps(walk)})
    for count, first, last in FILES_OF_STEPS.findall(section(walk)):
        assert int(last) <= len(steps(walk))
        assert int(count) == len({s.path for s in steps(walk) if int(first) <= s.number <= int(last)})


def test_the_page_begins_with_the_three_wings():
    links = re.findall(r"\]\(\.\./(\w+)/README\.md\)", PAGE.read_text().partition("\n## One job\n")[0])
    assert links == ["cluster", "workers", "orchestrator"]
