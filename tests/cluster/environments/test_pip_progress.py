import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def install(index, *what):
    command = [
        sys.executable,
        "-m",
        "cluster.environments.pip_progress",
        "3",
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-cache-dir",
    ]
    options = ["--index-url", index.url, "--progress-bar=off", *what]
    return subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)


def test_pips_progress_is_told_in_a_few_lines_with_what_is_large(new_index, tmp_path):
    index = new_index("index")
    index.add("small")
    index.add("large", ballast_bytes=25_000_000)
    done = install(index, "--target", str(tmp_path / "there"), "small", "large")
    assert done.returncode == 0
    assert done.stderr.splitlines() == [
        "resolving package 1 of about 3",
        "downloading large-1.0 (25.0 MB)",
        "unpacking 2 packages",
    ]
    assert done.stdout == ""


def test_of_an_installation_that_fails_everything_is_told_with_pips_exit_code(new_index, tmp_path):
    index = new_index("index")
    index.add("small")
    done = install(index, "--target", str(tmp_path / "there"), "small", "absent")
    assert done.returncode == 1
    assert "No matching distribution found for absent" in done.stderr
