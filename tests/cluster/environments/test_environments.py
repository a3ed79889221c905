import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from patience import wait_for

from cluster.environments import environments, recipes
from cluster.environments.environment_spec import EnvironmentSpec
from cluster.environments.recipes import Recipe
from cluster.errors import Conflict, FleetError, NotFound, UserError


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    """An empty cache, and a pip that asks no index: what is installed lies in the test's folder."""
    monkeypatch.setenv("POLYFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return tmp_path / "cache" / "environments"


def wheel(folder: Path, code: str = "answer = 42\n") -> str:
    """A requirement for a package `tiny` with this code, as a real wheel in `folder`."""
    path = folder / "tiny-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny.py", code)
        archive.writestr("tiny-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny\nVersion: 1.0\n")
        archive.writestr("tiny-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny-1.0.dist-info/RECORD", "tiny.py,,\n")
    return f"tiny @ {path.as_uri()}\n"


def folders(cache: Path) -> list[str]:
    return sorted(p.name for p in cache.iterdir() if p.is_dir()) if cache.exists() else []


CREATE = """
import json, sys
from cluster.environments import environments
from cluster.environments.recipes import Recipe
recipe = Recipe(**json.loads(sys.argv[1]))
print(environments.create(recipe, lambda line: print(line, flush=True)), flush=True)
"""


def creator(recipe: Recipe) -> "subprocess.Popen[str]":
    """Another process that creates the environment and prints its progress."""
    data = json.dumps({"name": recipe.name, "requirements": recipe.requirements, "modules": recipe.modules})
    root = Path(environments.__file__).parents[2]
    return subprocess.Popen([sys.executable, "-c", CREATE, data], cwd=root, stdout=subprocess.PIPE, text=True)


def read_until(process: "subprocess.Popen[str]", word: str) -> None:
    assert any(word in line for line in process.stdout), f"the process ended without saying {word!r}"


def wait_for_children(pid: int) -> list[psutil.Process]:
    """The processes that `pid` has started, once there are any."""
    return wait_for(psutil.Process(pid).children, f"process {pid} started nothing")


def test_an_environment_is_made_from_its_requirements_and_its_modules_import(cache, tmp_path):
    said: list[str] = []
    python = environments.create(Recipe("tiny", wheel(tmp_path), ("tiny",)), said.append)
    shown = subprocess.run(
        [python, "-c", "import tiny, sys; print(tiny.answer, sys.prefix)"], capture_output=True, text=True
    )
    assert shown.stdout.split() == ["42", str(python.parent.parent)]
    assert python.parent.parent.parent == cache
    assert said[0].startswith("creating environment 'tiny' (1 to install)")
    assert "checking that tiny can be imported" in said
    assert said[-1].startswith("environment 'tiny' is ready")


def test_the_second_call_makes_nothing(cache, tmp_path):
    recipe = Recipe("tiny", wheel(tmp_path), ("tiny",))
    said: list[str] = []
    assert environments.create(recipe) == environments.create(recipe, said.append) == environments.path(recipe)
    assert said == []


def test_another_lock_is_another_environment(cache):
    one, two = Recipe("empty", "# one\n"), Recipe("empty", "# two\n")
    assert environments.create(one) != environments.create(two)
    assert len(folders(cache)) == 2


def test_the_packages_of_the_caller_are_not_seen_inside(cache, monkeypatch, tmp_path):
    (tmp_path / "leak.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(UserError, match="No module named 'leak'"):
        environments.create(Recipe("closed", "", ("leak",)))


def test_packages_that_do_not_install_are_told_with_the_log_and_nothing_else_is_left(cache):
    with pytest.raises(UserError) as failed:
        environments.create(Recipe("bad", "no-such-package-anywhere==1\n"))
    assert "environment 'bad' failed to install:" in failed.value.message
    assert "No matching distribution found for no-such-package-anywhere==1" in failed.value.message
    log = Path(failed.value.remedy.removeprefix("complete log: "))
    assert "no-such-package-anywhere" in log.read_text()
    assert failed.value.exit_code == 2
    assert folders(cache) == []


def test_a_package_that_does_not_import_is_told_and_nothing_is_left(cache, tmp_path):
    recipe = Recipe("tiny", wheel(tmp_path, "raise OSError('libfoo.so.1: cannot open')\n"), ("tiny",))
    with pytest.raises(UserError, match=r"was installed, but does not work:[\s\S]*libfoo\.so\.1: cannot open"):
        environments.create(recipe)
    assert folders(cache) == []
    with pytest.raises(NotFound, match="run `polyfleet env create tiny`"):
        environments.path(recipe)


def test_an_interrupt_leaves_nothing(cache, tmp_path):
    def interrupt(line: str) -> None:
        if line.startswith("checking"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        environments.create(Recipe("tiny", wheel(tmp_path), ("tiny",)), interrupt)
    assert folders(cache) == []


def test_two_creators_at_once_make_it_once(cache, tmp_path):
    recipe = Recipe("tiny", wheel(tmp_path), ("tiny",))
    outputs = [process.communicate()[0] for process in [creator(recipe), creator(recipe)]]
    assert sum(output.count("creating environment") for output in outputs) == 1
    assert {output.splitlines()[-1] for output in outputs} == {str(environments.path(recipe))}


def test_what_a_killed_creator_left_is_seen_and_removed_by_the_next(cache, tmp_path):
    stuck = creator(Recipe("tiny", wheel(tmp_path, "import time\ntime.sleep(600)\n"), ("tiny",)))
    read_until(stuck, "checking that")
    (importing,) = wait_for_children(stuck.pid)
    assert [(e.name, e.state) for e in environments.list_environments()] == [("tiny", "building")]
    with pytest.raises(Conflict, match="is being built"):
        environments.remove("tiny")
    stuck.kill()
    stuck.communicate()
    assert [e.state for e in environments.list_environments()] == ["building"], "what it started still writes there"
    importing.kill()
    importing.wait()
    assert [e.state for e in environments.list_environments()] == ["broken"]
    environments.create(Recipe("empty", ""))
    assert [e.name for e in environments.list_environments()] == ["empty"]


def test_too_little_disk_is_told_before_anything_is_made(cache, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3_200_000_000))
    with pytest.raises(FleetError) as refused:
        environments.create(Recipe("big", "", building_bytes=7_500_000_000))
    assert re.search(r"needs 7\.5 GB of disk while it is created, .* has 3\.2 GB free", refused.value.message)
    assert "POLYFLEET_CACHE" in refused.value.remedy
    assert folders(cache) == []


def test_a_cache_that_cannot_be_written_is_told(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POLYFLEET_CACHE", str(tmp_path / "file"))
    with pytest.raises(
        FleetError, match=r"environment 'empty' cannot be created: Not a directory: .*file.*; .*POLYFLEET_CACHE"
    ):
        environments.create(Recipe("empty", ""))


def test_downloads_of_a_creator_that_was_killed_early_are_removed(cache):
    (cache / "tiny-0123456789ab.tmp").mkdir(parents=True)
    assert [(e.name, e.state) for e in environments.list_environments()] == [("tiny", "broken")]
    environments.create(Recipe("empty", ""))
    assert [e.name for e in environments.list_environments()] == ["empty"]


def test_an_environment_that_is_there_needs_no_disk(cache, monkeypatch):
    recipe = Recipe("empty", "")
    environments.create(recipe)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    assert environments.unsupported_reason(recipe) == ""
    assert "of disk while it is created" in environments.unsupported_reason("xla")


def test_a_machine_without_its_packages_is_told(cache, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(FleetError, match="exist for Linux on x86_64 only"):
        environments.create("xla")


def test_a_python_without_its_packages_is_told(monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 15, 0))
    assert Recipe("x", "", pythons=((3, 11), (3, 12))).unsupported_reason() == (
        "its packages exist for Python 3.11 to 3.12 only; this is 3.15"
    )


def test_an_environment_whose_python_is_gone_is_made_again(cache):
    recipe = Recipe("empty", "")
    python = environments.create(recipe)
    python.unlink()
    python.symlink_to("/nowhere/python")
    assert [e.state for e in environments.list_environments()] == ["broken"]
    with pytest.raises(NotFound):
        environments.path(recipe)
    assert environments.create(recipe).exists()


def test_one_that_is_in_use_is_not_removed(cache):
    python = environments.create(Recipe("empty", ""))
    user = subprocess.Popen(
        [python, "-c", "print('up', flush=True); input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert user.stdout.readline() == b"up\n"
        with pytest.raises(Conflict, match=f"used by process {user.pid}"):
            environments.remove("empty")
    finally:
        user.communicate(b"\n")
    assert environments.remove("empty") == [python.parent.parent]
    assert folders(cache) == []
    with pytest.raises(NotFound, match="no environment 'empty' here"):
        environments.remove("empty")


def test_what_is_ready_is_listed_with_its_size(cache, tmp_path):
    environments.create(Recipe("tiny", wheel(tmp_path), ("tiny",)))
    (ready,) = environments.list_environments()
    assert (ready.name, ready.state, ready.current) == ("tiny", "ready", False)
    assert ready.size_bytes > 1000


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(NotFound, match="did you mean 'xla'"):
        environments.create("xlaa")


def test_an_interpreter_that_exists_is_taken_as_it_is(tmp_path):
    assert environments.create(EnvironmentSpec(interpreter="current")) == Path(sys.executable)
    assert environments.path(EnvironmentSpec(interpreter=sys.executable)) == Path(sys.executable)
    absent = EnvironmentSpec(interpreter=str(tmp_path / "python"))
    assert "no Python interpreter at" in environments.unsupported_reason(absent)
    with pytest.raises(UserError, match="no Python interpreter at"):
        environments.create(absent)


def test_a_list_of_requirements_gets_what_a_node_needs_and_our_ray():
    import importlib.metadata

    packages = recipes.from_requirements(("torch==2.9.0",)).packages
    assert {"torch==2.9.0", f"ray=={importlib.metadata.version('ray')}", *recipes.NODE_PACKAGES} == set(packages)


def test_every_line_of_a_lock_is_pinned_and_names_no_local_version():
    pinned = re.compile(
        r"[a-z0-9-]+==[0-9][0-9a-z.]*(; platform_system == \"Linux\"( and platform_machine == \"x86_64\")?)?"
    )
    for recipe in recipes.built_in().values():
        assert recipe.packages
        assert [line for line in recipe.packages if not pinned.fullmatch(line)] == []
    assert "torch==2.13.0" in recipes.built_in()["main"].packages
    trio = {"torch==2.8.0", "torch-xla==2.8.1", "intel-extension-for-pytorch==2.8.0"}
    assert trio <= set(recipes.built_in()["xla"].packages)


def test_the_main_lock_meets_what_pyproject_asks_for():
    import tomllib

    from packaging.requirements import Requirement

    root = Path(environments.__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    asked = [Requirement(r) for r in project["dependencies"] + project["optional-dependencies"]["cpu"]]
    asked += [Requirement(r) for r in project["optional-dependencies"]["dev"] if not r.startswith("polyfleet")]
    locked = dict(line.split(";")[0].split("==") for line in recipes.built_in()["main"].packages)
    wrong = [str(r) for r in asked if locked.get(r.name.lower()) not in r.specifier]
    assert wrong == [], f"renew cluster/environments/locks/main.txt; this Python is {os.fspath(sys.executable)}"
