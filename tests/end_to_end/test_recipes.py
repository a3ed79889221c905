"""The recipes of docs/guides/recipes.md, word for word, with code that is not ours: it is taken where it is found."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import Orchestrator

pytestmark = pytest.mark.full

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "recipes.md"
SCRIPTS = "POLYFLEET_TESTS_SCRIPTS"
FILE = re.compile(r"^```\w+\n# (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.+)$", re.MULTILINE)
CLONE = re.compile(r"git clone \S+/(\S+)$")
FLEET = "name: recipes\npools:\n  cpu: {backend: cpu, devices: 2}\n"
CHAPTERS = dict(part.split("\n", 1) for part in PAGE.read_text().split("\n## ")[1:])


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Of a shell with a fleet up."""
    home = tmp_path_factory.mktemp("recipes")
    (home / "fleet.yaml").write_text(FLEET)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYFLEET_HOME", str(home))
        o = Orchestrator.up(home / "fleet.yaml")
        yield os.environ | {"PATH": path}
        o.down()


def found(command: str) -> str:
    """The command; a clone is a copy of what is here already, at the commit that its owner chose."""
    if match := CLONE.fullmatch(command):
        return f"cp -r '{os.environ[SCRIPTS]}/{match[1]}' ."
    return "true" if " checkout " in command else command


@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_recipe_ends_as_its_page_says(chapter: str, tmp_path: Path, request: pytest.FixtureRequest):
    commands = COMMAND.findall(CHAPTERS[chapter])
    [needed] = {match[1] for command in commands if (match := CLONE.fullmatch(command))}
    if not (Path(os.environ.get(SCRIPTS, "/nowhere")) / needed).is_dir():
        pytest.skip(f"{SCRIPTS} names no folder with a clone of {needed}: git clone, as {PAGE.name} says")
    for name, text in FILE.findall(CHAPTERS[chapter]):
        (tmp_path / name).write_text(text)
    script = "\n".join(["set -eo pipefail", *map(found, commands)])
    given = {"cwd": tmp_path, "env": request.getfixturevalue("environment")}
    done = subprocess.run(["bash", "-xc", script], capture_output=True, text=True, **given)
    assert done.returncode == 0, done.stdout + done.stderr
    print(done.stdout)
