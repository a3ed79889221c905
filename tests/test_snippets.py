"""What the README and the guides show is true: commands and code run on a real fleet, files parse, messages exist.

Console blocks of a page run in one shell, its Python blocks in one process, in the order they stand. A comment before a
block, `<!-- not run: why -->`, has it parsed only; `# exit code N or M` after a command says what it ends with.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import pytest
import typer.main

from cluster import environments, yaml
from cluster.errors import NotFound
from cluster.spec import parse_fleet
from orchestrator.cli.main import app
from orchestrator.simulate.fleets import read_fleet, with_faults
from orchestrator.spec import load_job, parse_job

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs" / "README.md", *sorted((ROOT / "docs").glob("[bg]*s/*.md"))]
BLOCK = re.compile(
    r"^(?P<mark><!-- not run: .+ -->\n)?```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"\]\((?!https?://)(?P<path>[^)#\s]*)(#(?P<anchor>[^)\s]+))?\)")
EXIT_CODES = re.compile(r"\s+# exit code (\d+(?: or \d+)*)$")
FIELD = re.compile(r"""\{[^{}]*\}|"\s+f?"|\bf"|,\s+f?\"""")
PATIENCE_S = 600
MEASURES = "polyfleet benchmark run"
COMPARES = f"{MEASURES} model.py:make_model --working-dir examples/digits --batch-size 64"
# The pages' fleet is ours for all of them: it comes up before the first and is taken down after the last. What the
# README compares the guide to benchmarks compares too, in fewer rounds.
INSTEAD = {"polyfleet up --demo": 'polyfleet up -f "$FLEET"', "polyfleet down": "true", COMPARES: "true"}
FEW = "--rounds 3 --max-rounds 3 --case-seconds 0.1"
"""Of a benchmark run here: that it works is asked, not what it finds. The last of two equal options counts."""


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    run: bool

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("text")) + 1
        yield Block(page, line, match["language"], match["text"], match["mark"] is None)


def of(language: str, page: Path | None = None) -> list[Block]:
    return [b for p in PAGES for b in blocks(p) if b.language == language and page in (None, p)]


def commands(block: Block) -> list[str]:
    """The lines after a prompt; others would be output."""
    return [line.removeprefix("$ ") for line in block.text.splitlines() if line.startswith("$ ")]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Variables of a shell with a fleet up: pools `cpu` and `xla`, the latter emulated or, without that environment, a
    second CPU pool of that name."""
    folder = tmp_path_factory.mktemp("snippets")
    try:
        environments.path("xla")
        xla = "{backend: tpu, environment: xla, env: {PJRT_DEVICE: CPU}}"
    except NotFound:
        xla = "{backend: cpu}"
    fleet = folder / "fleet.yaml"
    fleet.write_text(f"name: pages\npools:\n  cpu: {{backend: cpu}}\n  xla: {xla}\n")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = os.environ | {"POLYFLEET_HOME": str(folder / "home"), "FLEET": str(fleet), "PATH": path}
    run_shell('polyfleet up -f "$FLEET"', variables)
    yield variables
    run_shell("polyfleet down", variables)


def run_shell(script: str, variables: dict[str, str]) -> None:
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="the pages use curl")
@pytest.mark.parametrize("page", [p for p in PAGES if any(b.run for b in of("console", p))], ids=lambda p: p.stem)
def test_the_commands_of_a_page_end_as_it_says(page: Path, shell: dict[str, str]):
    lines = ["set -o pipefail"]
    for block in of("console", page):
        for command in commands(block) if block.run else ():
            told = EXIT_CODES.search(command)
            wanted = told[1].replace(" or ", "|") if told else "0"
            lines += [f"echo {shlex.quote(f'{block}: {command}')}", run_instead(command)]
            lines += [f"case $? in {wanted}) ;; *) echo not the exit code that was told; exit 1 ;; esac"]
    run_shell("\n".join(lines), shell)


def run_instead(command: str) -> str:
    if command in INSTEAD:
        return INSTEAD[command]
    return f"{command} {FEW}" if command.startswith(MEASURES) else command


def test_what_is_not_measured_for_one_page_is_for_another():
    guide = ROOT / "docs" / "guides" / "benchmark.md"
    assert [c for block in of("console", guide) if block.run for c in commands(block) if c.startswith(f"{COMPARES} ")]


@pytest.mark.slow
@pytest.mark.parametrize("page", [p for p in PAGES if any(b.run for b in of("python", p))], ids=lambda p: p.stem)
def test_the_code_of_a_page_runs(page: Path, shell: dict[str, str], tmp_path: Path):
    script = tmp_path / "page.py"
    script.write_text("\n\n".join(f"# {block}\n{block.text}" for block in of("python", page) if block.run))
    run_shell(f"python {shlex.quote(str(script))}", shell)


@pytest.mark.parametrize("block", of("yaml"), ids=str)
def test_a_file_is_taken_by_its_parser(block: Block, tmp_path: Path):
    """Without entry and command it is a part of a job file; `kinds` and `nodes` are of fleets that are simulated."""
    data = yaml.load(block.text, str(block))
    (file := tmp_path / "shown.yaml").write_text(block.text)
    if "pools" in data:
        parse_fleet(data)
    elif "kinds" in data:
        assert read_fleet(str(file)).failures
    elif "nodes" in data and block.page.stem == "simulate":
        assert with_faults(read_fleet("v100=4,t4=4"), file).failures
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
        words = shlex.split(line)
        if words.pop(0) == "polyfleet":
            command = typer.main.get_command(app)
            while hasattr(command, "commands"):
                command = command.commands[words.pop(0)]
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
