"""A host without a Python of ours, over real SSH: one is installed with its `uv`, or the remedy is told.

The machines have no way to the internet, so `uv` is a recording of its edge: the words and variables that it is called
with, and the folder that it leaves.
"""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from bed import Bed
from bed_machine import HOME
from test_hosts import Fleet
from their_ray import bare_python

pytestmark = pytest.mark.full

UV = """\
#!/bin/sh
[ "$1" = --version ] && exec echo uv 0.13.9
[ "$*" = "python install {version}" ] && [ "$UV_PYTHON_INSTALL_BIN" = 0 ] || {{ echo "error: $*" >&2; exit 2; }}
[ -e {refuses} ] && {{ echo "error: no space left" >&2; exit 1; }}
mkdir -p "$UV_PYTHON_INSTALL_DIR" && ln -s {python} "$UV_PYTHON_INSTALL_DIR/cpython-{version}.1-linux"
"""
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


class Bare(Fleet):
    """m2 has `uv`, which can install the Python in `folder`."""

    def __init__(self, bed: Bed):
        super().__init__(bed)
        self.refuses, self.folder = bed.shared / "refuses", bed.shared / "python"
        bare_python(self.folder, ())
        program = self.folder / "bin" / f"python{VERSION}"
        program.unlink()
        shutil.copy(Path(sys.executable).resolve(), program)  # a link would be hidden with what it leads to
        self.uv = self.m2.disk / ".local" / "bin" / "uv"
        self.uv.parent.mkdir(parents=True)
        self.uv.write_text(UV.format(version=VERSION, python=self.folder, refuses=self.refuses))
        self.uv.chmod(0o755)
        self.pythons = self.m2.disk / ".cache" / "polyfleet" / "pythons"
        self.yaml = self.write(self.host(self.m2), python=str(program))

    def up(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return self.user("up", "--file", self.yaml, *words, check=False)


@pytest.fixture
def bare(bed: Bed) -> Iterator[Bare]:
    fleet = Bare(bed)
    fleet.m2.hide_python()
    yield fleet
    fleet.user("down", check=False)


def test_up_installs_a_python_with_the_host_s_uv_after_the_plan_has_said_so(bare: Bare):
    told = bare.up("--dry-run")
    assert told.returncode == 0, told.stdout + told.stderr
    assert f"install Python {VERSION} with {HOME}/.local/bin/uv" in " ".join(told.stdout.split())
    assert not bare.pythons.exists(), "a plan changes nothing"

    bare.refuses.touch()
    refused = bare.up()
    assert refused.returncode == 3, refused.stdout + refused.stderr
    assert f"could not install Python {VERSION}: error: no space left" in " ".join(refused.stderr.split())
    bare.refuses.unlink()

    told = bare.up()
    assert told.returncode == 0, told.stdout + told.stderr
    assert bare.user.states() == {"near-0": "ready", "far-m2": "ready"}
    assert [p.name for p in bare.pythons.iterdir()] == [f"cpython-{VERSION}.1-linux"]
    assert bare.user.ran("hostname", "--pool", "far") == "m2"

    bare.user("down")
    bare.uv.unlink()
    shutil.rmtree(bare.pythons, ignore_errors=True)
    without = bare.up("--dry-run")
    assert without.returncode == 2 and f"has no Python {VERSION}" in " ".join(without.stdout.split())
