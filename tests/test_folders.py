"""True of the folders of the product: their size, their README, and that imports between them form no circle."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WINGS = ("cluster", "workers", "orchestrator")
FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for wing in WINGS
    for path in sorted((ROOT / wing).rglob("*.py"))
}
FOLDERS = sorted({path.parent for path in FILES.values()})
MAX_MODULES, MIN_MODULES = 15, 5
UNUSUAL = {
    "orchestrator/runtime": "its root; all else is in its folders",
    "orchestrator/store": "its root; all else is in its folders",
    "orchestrator/store/database/migrations": "read by Alembic",
    "orchestrator/store/database/migrations/versions": "read by Alembic",
    "workers": "its root; all else is in its folders",
    "workers/checkpoint": "its root; all else is in its folders",
    "workers/discovery": "former names, removed in version 0.2.0",
    "workers/devices": "its root; all else is in its folders",
    "workers/models": "its root; all else is in its folders",
    "workers/native": "one compiler of C++ sources",
}
NO_README = {"workers/kernels/sources", "orchestrator/store/database/migrations/versions"}


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def modules(folder: Path) -> set[str]:
    return {
        path.name for path in folder.glob("*.py") if path.name != "__init__.py" and not path.name.startswith("test_")
    }


def folder_of(module: str) -> str:
    """The folder of a module; a module at the root of a wing stands for itself."""
    parent = module.rpartition(".")[0]
    return module if FILES[module].name == "__init__.py" or parent in WINGS else parent


@cache
def imported(module: str) -> frozenset[str]:
    """Modules of ours that a module imports, also in functions, but not for types alone."""
    nodes = list(ast.walk(ast.parse(FILES[module].read_text())))
    for_types = {
        id(child)
        for node in nodes
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for child in ast.walk(node)
    }
    return frozenset(
        target for node in nodes if id(node) not in for_types for target in _targets(node) if target != module
    )


def _targets(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom) and node.module:
        names = [f"{node.module}.{alias.name}" for alias in node.names]
    else:
        return
    for imported_name in names:
        if imported_name in FILES:
            yield imported_name
        elif imported_name.rpartition(".")[0] in FILES:
            yield imported_name.rpartition(".")[0]


def test_no_folders_import_each_other_in_a_circle():
    graph: dict[str, set[str]] = {}
    for module in FILES:
        own = folder_of(module)
        graph.setdefault(own, set()).update({folder_of(target) for target in imported(module)} - {own})
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as e:
        circle = e.args[1]
        edges = [
            f"{module} imports {target}"
            for importer, importee in zip(circle[1:], circle, strict=False)
            for module in FILES
            if folder_of(module) == importer
            for target in imported(module)
            if folder_of(target) == importee
        ]
        pytest.fail(f"{' <- '.join(circle)}:\n" + "\n".join(edges))


def test_a_folder_has_as_many_modules_as_one_can_survey():
    sizes = {name(folder): len(modules(folder)) for folder in FOLDERS}
    usual = {folder for folder, size in sizes.items() if MIN_MODULES <= size <= MAX_MODULES}
    assert not {folder: sizes[folder] for folder in sizes.keys() - usual - UNUSUAL.keys()}
    assert not UNUSUAL.keys() & usual, "these have a usual size now"


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if name(folder) not in NO_README], ids=name)
def test_a_folder_says_what_it_is_for_and_lists_its_modules(folder):
    text = (folder / "README.md").read_text()
    assert text.count("\n") <= 30
    assert text.startswith(f"# {name(folder)}\n")
    assert set(re.findall(r"^- `(\w+\.py)`", text, re.MULTILINE)) == modules(folder)
