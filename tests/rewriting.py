"""In a new checkout, each file of tests is rewritten by one process of tests, and read by the others.

pytest rewrites the assertions of a file when it first imports it, and stores the result. Processes that begin at once
import the same files in the same order, and each would rewrite all of them, which takes longer than importing them. So
each rewrites its share of the files before it imports any.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiers
from _pytest.assertion import rewrite


class Rewriting:
    """In the processes of pytest-xdist that run the tests."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        given = session.config.workerinput  # type: ignore[attr-defined]
        for path in share(list(files(session.config)), given["workerid"], given["workercount"]):
            rewrite_file(path, session.config)


def files(config: pytest.Config) -> Iterator[Path]:
    """Those below the folders of this run, in the same order in all processes."""
    tier = config.option.tier
    for folder in (config.invocation_params.dir / word for word in config.args):
        for path in sorted(folder.rglob("test_*.py")) if folder.is_dir() else ():
            if tier in (tiers.ANY, tiers.tier_of(path)):
                yield path


def share(paths: list[Path], process: str, processes: int) -> list[Path]:
    """Of the process with this name, gw0 and so on."""
    return paths[int(process.removeprefix("gw")) :: processes]


def rewrite_file(path: Path, config: pytest.Config) -> None:
    """As pytest does when it imports the file; nothing if that was done already, or nothing can be stored."""
    stored = stored_at(path)
    if (
        sys.dont_write_bytecode
        or rewrite._read_pyc(path, stored) is not None
        or not rewrite.try_makedirs(stored.parent)
    ):
        return
    source_hash, code = rewrite._rewrite_test(path, config)
    rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, stored)


def stored_at(path: Path) -> Path:
    return rewrite.get_cache_dir(path) / (path.stem + rewrite.PYC_TAIL)
