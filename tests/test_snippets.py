"""What the README and the guides show exists: files parse, options and messages are there, links lead somewhere. Their
commands and code are run by test_pages.py.
"""

import ast
import re
import shlex
from itertools import takewhile
from pathlib import Path

import pytest
import typer.main
from snippets import PAGES, ROOT, Block, commands, of

from cluster.fleet.fleet_spec import parse_fleet
from cluster.input import strict_yaml
from orchestrator.cli.main import app
from orchestrator.simulation.fleets import add_failures, read_fleet
from orchestrator.spec.job_spec import load_job, parse_job

LINK = re.compile(r"\]\((?!https?://)(?P<path>[^)#\s]*)(#(?P<anchor>[^)\s]+))?\)")
INLINE = re.compile(r"`(polyfleet [^`]+)`")
FIELD = re.compile(r"""\{[^{}]*\}|"\s+f?"|\bf"|,\s+f?\"""")


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_a_file_is_taken_by_its_parser(block: Block, tmp_path: Path):
    """Without entry and command it is a part of a job file; `kinds` and `nodes` are of fleets that are simulated."""
    data = strict_yaml.load(block.text, str(block))
    (file := tmp_path / "shown.yaml").write_text(block.text)
    if "pools" in data:
        parse_fleet(data)
    elif "kinds" in data:
        assert read_fleet(str(file)).failures
    elif "nodes" in data and block.page.stem == "simulate":
        assert add_failures(read_fleet("v100=4,t4=4"), file).failures
    else:
        parse_job(data if data.keys() & {"entry", "command"} else data | {"entry": "train.py"})


def test_the_guide_shows_the_fleet_and_the_faults_of_the_examples():
    shown = [block.text for block in of("yaml", ROOT / "docs" / "guides" / "simulate.md")]
    assert shown == [(ROOT / "examples" / "simulate" / f"{name}.yaml").read_text() for name in ("fleet", "faults")]


@pytest.mark.parametrize("file", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda f: f.stem)
def test_an_example_is_taken_by_its_parser(file: Path):
    load_job(file)


@pytest.mark.parametrize("block", [b for b in of("console") if not b.run], ids=str)
def test_a_command_that_is_not_run_exists_with_its_options(block: Block):
    for line in commands(block):
        check_command(line)


@pytest.mark.parametrize("line", INLINE.findall((ROOT / "docs" / "guides" / "coming-from.md").read_text()))
def test_a_command_in_a_table_exists_with_its_options(line: str):
    check_command(line)


def check_command(line: str) -> None:
    words = shlex.split(line)
    if words.pop(0) == "polyfleet":
        command = typer.main.get_command(app)
        while words and hasattr(command, "commands"):
            command = command.commands[words.pop(0)]
        if words:
            command.make_context(line, words)


@pytest.mark.parametrize("block", of("python"), ids=str)
def test_code_compiles(block: Block):
    compile(block.text, str(block), "exec")


def test_the_guide_shows_the_training_function_as_it_is_in_the_example():
    shown = of("python", ROOT / "docs" / "guides" / "training.md")[0].text
    assert shown in (ROOT / "examples" / "sine" / "train.py").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_into_a_page_find_their_heading(page: Path):
    for link in LINK.finditer(page.read_text()):
        if link["anchor"]:
            target = page.parent / link["path"] if link["path"] else page
            assert link["anchor"] in anchors(target), f"{page.relative_to(ROOT)}: {link[0]}"


def anchors(page: Path) -> set[str]:
    """As the hosts of repositories make them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_and_every_picture_is_reached_from_the_readme():
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        reached.add(page)
        links = {(page.parent / link["path"]).resolve() for link in LINK.finditer(page.read_text()) if link["path"]}
        todo += [path for path in links - reached if path.suffix == ".md" and path not in todo]
        reached |= {path for path in links if path.suffix in {".svg", ".png"}}
    assert {*PAGES, *(ROOT / "docs" / "images").iterdir()} <= reached


def test_troubleshooting_speaks_of_messages_that_exist():
    """What stands in a heading between `…` is in the source, whatever quotes, fields and line ends are in between."""
    files = [file for top in ("cluster", "workers", "orchestrator") for file in (ROOT / top).rglob("*.py")]
    source = words((ROOT / "Makefile").read_text()) + "".join(words(FIELD.sub(" ", f.read_text())) for f in files)
    page = ROOT / "docs" / "guides" / "troubleshooting.md"
    for heading in re.findall(r"^### (.+)$", page.read_text(), re.MULTILINE):
        for message in re.findall(r"`([^`]+)`", heading):
            for piece in filter(None, map(words, re.split("…|NODE", message))):
                assert piece in source, f"{heading}: no message says {piece!r}"


def words(text: str) -> str:
    return " ".join(re.findall(r"[A-Za-z0-9.]+", text))


def test_the_guide_to_the_demo_names_every_key_of_its_summary():
    tree = ast.parse((ROOT / "examples" / "demo.py").read_text())
    written = {
        target.slice.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Subscript) and ast.unparse(target.value) == "summary"
    } | {"seconds"}
    guide = (ROOT / "docs" / "guides" / "demo.md").read_text().partition("## summary.json")[2]
    rows = takewhile(lambda line: not line.startswith("`"), guide.splitlines())
    documented = {key for row in rows if row.startswith("| `") for key in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert written <= documented
