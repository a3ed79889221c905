"""The Python of a host that has none of our code yet: find one, or install one with the host's own `uv`.

All nodes of a fleet need the head's minor version: Ray refuses any other, or its actors would crash.
"""

import shlex
import sys

from cluster.errors import FleetError
from cluster.hosts.ssh import Remote
from cluster.hosts.ssh_errors import HostRefused

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
INSTALL_S = 900.0
_NO_PYTHON = "no-python"
_INSTALLED = '"${POLYFLEET_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/polyfleet}"/pythons'

_PATHS = (
    f"python{VERSION} /usr/bin/python{VERSION} /usr/local/bin/python{VERSION} /opt/python{VERSION}/bin/python{VERSION} "
    f'"$HOME"/.local/bin/python{VERSION} "$HOME"/.local/share/uv/python/cpython-{VERSION}*/bin/python{VERSION} '
    f'"$HOME"/.pyenv/versions/{VERSION}*/bin/python{VERSION} '
    f"{_INSTALLED}/cpython-{VERSION}*/bin/python{VERSION} python3"
)
_UV_PATHS = 'uv "$HOME"/.local/bin/uv "$HOME"/.cargo/bin/uv /usr/local/bin/uv /opt/homebrew/bin/uv'
_CHECK = f"import sys; sys.exit(sys.version_info[:2] != ({VERSION.replace('.', ', ')}))"
FIND = (
    f"for p in {_PATHS}; do "
    f'"$p" -I -c {shlex.quote(_CHECK)} </dev/null >/dev/null 2>&1 && exec "$p" -I -; done; '
    f'for u in {_UV_PATHS} ""; do [ -n "$u" ] && "$u" --version </dev/null >/dev/null 2>&1 && break; done; '
    f'printf "{_NO_PYTHON}\\t%s\\t%s\\n" "$u" "$(python3 -V 2>&1)"'
)
"""Runs the program in stdin with the host's Python. Without one, prints the host's `uv`, and its other Python."""
# Variables, not options: versions of uv that do not know one ignore it. It links nothing into ~/.local/bin.
_INSTALL = f'exec env UV_PYTHON_INSTALL_DIR={_INSTALLED} UV_PYTHON_INSTALL_BIN=0 "$1" python install {VERSION}'


class PythonMissing(HostRefused):
    """The host has no Python of the head's version. `uv` is the program that can install one, or ""."""

    uv = ""


def check_present(remote: Remote, line: str) -> None:
    """Raise PythonMissing if this last line of `FIND` says that there is none."""
    if not line.startswith(_NO_PYTHON):
        return
    _, uv, other = f"{line}\t\t".split("\t")[:3]
    present = f" (it has {other})" if other.startswith("Python ") else ""
    error = PythonMissing(
        f"host {remote.host} has no Python {VERSION}{present}",
        f"install it there, for example with `uv python install {VERSION}`: all nodes of a fleet need one Python",
    )
    error.uv = uv
    raise error


def install(remote: Remote, uv: str) -> None:
    """Install a Python into Polyfleet's cache folder on the host. Raises FleetError if `uv` cannot."""
    completed = remote.run(["sh", "-c", _INSTALL, "sh", uv], timeout_s=INSTALL_S)
    if completed.code:
        lines = [line.strip() for line in completed.stderr.splitlines() if line.strip()] or ["it gave no reason"]
        raise FleetError(
            f"host {remote.host}: {uv} could not install Python {VERSION}: {lines[-1][:300]}",
            f"install Python {VERSION} there by other means, then run the command again",
        )
