"""The reference is written from the code, and is what the code says today."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
GENERATE = ROOT / "docs" / "generate.py"


def generate(*words):
    return subprocess.run([sys.executable, GENERATE, *words], capture_output=True, text=True)


def test_the_pages_name_every_verb_route_state_and_key(tmp_path):
    assert generate("--into", tmp_path).returncode == 0
    pages = {path.name: path.read_text() for path in tmp_path.iterdir()}
    names = ["actions", "cli", "config", "failures", "metrics", "python", "rest", "spec", "states"]
    assert sorted(pages) == [f"{name}.md" for name in names]
    assert "| `nodes.drain` | POST | `/v1/nodes/{node}/drain` | `admin` | yes |" in pages["actions.md"]
    assert "## `polyfleet checkpoint copy POOL:PATH|JOB|PATH|URI POOL:FOLDER|FOLDER|URI`" in pages["cli.md"]
    assert "| 130 | interrupted with Ctrl-C; jobs keep running |" in pages["cli.md"]
    assert "| `allow_tf32` |  | use TF32 units for float32 products and convolutions |" in pages["config.md"]
    assert "| `rename` | `o.jobs.rename(ref, name, key='')` | `POST /v1/jobs/{ref}/rename` |" in pages["python.md"]
    assert "## `GET /v1/jobs/{ref}/logs/stream`" in pages["rest.md"]
    assert "| `spec` | body | mapping |" in pages["rest.md"]
    assert "| `RECOVERING` | `STARTING` |" in pages["states.md"]
    assert "| `start` | a rank's command could not be started | restart | the next one |" in pages["failures.md"]
    assert "| `power_w` | W | power that the card draws | POWER | yes |" in pages["metrics.md"]
    assert "| `accelerators` | text or list or mapping |" in pages["spec.md"]


def test_checking_finds_a_page_that_is_stale_or_absent_and_writes_nothing(tmp_path):
    generate("--into", tmp_path)
    assert generate("--check", "--into", tmp_path).returncode == 0
    (tmp_path / "cli.md").write_text("old")
    (tmp_path / "rest.md").unlink()
    done = generate("--check", "--into", tmp_path)
    assert (done.returncode, done.stderr) == (1, "cli.md, rest.md: stale; run python docs/generate.py\n")
    assert (tmp_path / "cli.md").read_text() == "old"
    assert not (tmp_path / "rest.md").exists()


def test_the_reference_in_the_repository_is_fresh():
    done = generate("--check")
    assert done.returncode == 0, done.stderr
