import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from cluster.environments import code_export

FOUND = """
from importlib.util import find_spec
print(*[find_spec(name).submodule_search_locations[0] for name in ("cluster", "workers", "orchestrator")])
"""
EXPORT = """
import sys
from pathlib import Path
from cluster.environments import code_export
code_export.SOURCE = Path(sys.argv[1])
print(code_export.export())
"""


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("POLYFLEET_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "code"


@pytest.fixture
def source(monkeypatch, tmp_path) -> Path:
    """A small tree of the same shape, which nobody edits meanwhile."""
    for package in code_export.PACKAGES:
        (tmp_path / "source" / package / "inner").mkdir(parents=True)
        (tmp_path / "source" / package / "__init__.py").write_text("")
        (tmp_path / "source" / package / "inner" / "facts.csv").write_text("a,b\n")
    monkeypatch.setattr(code_export, "SOURCE", tmp_path / "source")
    return tmp_path / "source"


def test_a_python_without_polyfleet_finds_all_three_packages_in_the_folder(cache, tmp_path):
    folder = code_export.export()
    environment = {"PYTHONPATH": str(folder), "PATH": os.environ["PATH"]}
    command = [sys.executable, "-S", "-c", FOUND]  # -S keeps the editable install of this environment out
    shown = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert shown.stdout.split() == [str(folder / package) for package in code_export.PACKAGES], shown.stderr


def test_locks_and_fleets_go_along(cache):
    folder = code_export.export()
    for name in (
        "cluster/environments/locks/xla.txt",
        "cluster/fleet/fleets/demo.yaml",
        "workers/protocol/messages.py",
    ):
        assert (folder / name).is_file()


def test_what_python_and_editors_leave_does_not(cache, source):
    (source / "workers" / "__pycache__").mkdir()
    (source / "workers" / "__pycache__" / "a.cpython-311.pyc").write_bytes(b"x")
    (source / "workers" / ".a.py.swp").write_bytes(b"x")
    names = [
        str(p.relative_to(code_export.export() / "workers")) for p in (code_export.export() / "workers").rglob("*")
    ]
    assert sorted(names) == ["__init__.py", "inner", "inner/facts.csv"]


def test_the_same_code_is_the_same_folder_and_nothing_lies_beside_it(cache, source):
    folder = code_export.export()
    assert code_export.export() == folder
    assert list(cache.iterdir()) == [folder]


def test_a_changed_file_is_another_folder_and_the_first_stays_as_it_was(cache, source):
    before = code_export.export()
    (source / "workers" / "__init__.py").write_text("x = 1\n")
    after = code_export.export()
    assert before != after
    assert (before / "workers" / "__init__.py").read_text() == ""


def test_a_folder_that_lost_a_file_is_made_again(cache, source):
    (code_export.export() / "workers" / "__init__.py").unlink()
    assert (code_export.export() / "workers" / "__init__.py").is_file()


def test_what_python_compiles_inside_does_not_spoil_the_folder(cache, source):
    folder = code_export.export()
    (folder / "cluster" / "__pycache__").mkdir()
    assert code_export.export() == folder
    assert (folder / "cluster" / "__pycache__").is_dir()


def test_four_processes_at_once_end_with_one_whole_folder(cache, source):
    command = [sys.executable, "-c", EXPORT, str(source)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    printed = {process.communicate()[0].strip() for process in processes}
    assert printed == {str(code_export.export())}
    assert len(list(cache.iterdir())) == 1


def test_the_archive_holds_what_the_folder_does_and_is_the_same_for_the_same_code(cache, tmp_path):
    packed = code_export.archive()
    assert packed == code_export.archive()
    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        tar.extractall(tmp_path / "unpacked", filter="data")

    def files(folder: Path) -> dict[str, bytes]:
        return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}

    assert files(tmp_path / "unpacked") == files(code_export.export())
