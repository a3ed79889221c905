"""Draw docs/images/*.svg from what real commands print on the demo's fleet, which is brought up for it and taken down.

    python docs/pictures.py [NAME...]

Nothing in a picture is typed by hand: each is what the commands of its list below print on a wide terminal. For the
benchmark's times the machine should have nothing else to do.
"""

import fcntl
import os
import pty
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
IMAGES = ROOT / "docs" / "images"
COLUMNS = 200
PICTURES = {
    "demo": (
        "Train on the CPU, copy the checkpoint, continue under XLA",
        "polyfleet inventory",
        "JOB=$(polyfleet submit examples/sine.yaml --pool cpu)",
        "polyfleet logs -f $JOB",
        "polyfleet checkpoint copy cpu:$JOB xla:moved",
        "polyfleet submit -f examples/sine-resumed.yaml",
    ),
    "explain": ("Why a job runs where it does", "polyfleet submit examples/sine.yaml --dry-run"),
    "benchmark": (
        "One model in every pool",
        "polyfleet benchmark run model.py:make_model --working-dir examples/digits --batch-size 64",
    ),
}
# Fonts of the reader's machine: a picture fetches nothing.
FONT_FACES = re.compile(r"\s*@font-face \{\{.*?\}\}", re.DOTALL)
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, DejaVu Sans Mono, monospace"
ADVANCE = 0.602  # of these fonts, over their height
SVG = FONT_FACES.sub("", CONSOLE_SVG_FORMAT).replace("Fira Code", FONTS)


def main() -> None:
    IMAGES.mkdir(exist_ok=True)
    with fleet() as variables:
        for name in sys.argv[1:] or PICTURES:
            title, *commands = PICTURES[name]
            (IMAGES / f"{name}.svg").write_text(draw(typed(commands, variables), title, name))
            sys.stderr.write(f"docs/images/{name}.svg\n")


@contextmanager
def fleet() -> Iterator[dict[str, str]]:
    """The variables of a shell with the demo's fleet up in a home of its own."""
    home = tempfile.mkdtemp(prefix="polyfleet-pictures-")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = os.environ | {"POLYFLEET_HOME": home, "PATH": path, "TERM": "xterm-256color"}
    try:
        subprocess.run(["polyfleet", "up", "--demo"], env=variables, check=True, stdout=subprocess.DEVNULL)
        yield variables
    finally:
        subprocess.run(["polyfleet", "down"], env=variables, check=False)
        shutil.rmtree(home, ignore_errors=True)


def typed(commands: list[str], variables: dict[str, str]) -> str:
    """What a terminal shows when `commands` are typed into one shell. Raises CalledProcessError when one fails."""
    lines = ["set -e -o pipefail"]
    for command in commands:
        lines += [f"printf '\\e[1;32m$\\e[0m \\e[1m%s\\e[0m\\n' {shlex.quote(command)}", command, "echo"]
    terminal, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 100, COLUMNS, 0, 0))
    shell = ["bash", "--norc", "-c", "\n".join(lines)]
    process = subprocess.Popen(shell, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, stdout=inner, stderr=inner)
    os.close(inner)
    said = b"".join(read(terminal))
    if process.wait():
        raise subprocess.CalledProcessError(process.returncode, commands, said)
    return said.decode()


def read(terminal: int) -> Iterator[bytes]:
    try:
        while piece := os.read(terminal, 1 << 16):
            yield piece
    except OSError:  # how Linux says that nobody writes to the terminal any more
        return


def draw(said: str, title: str, name: str) -> str:
    """`said` as SVG, as wide as its longest line. A line that was written anew, as progress is, counts as it ended."""
    lines = [line.rstrip("\r").rpartition("\r")[2].replace("\x1b[2K", "") for line in said.rstrip().split("\n")]
    text = Text.from_ansi("\n".join(lines))
    width = max(line.cell_len for line in text.split())
    console = Console(record=True, width=width, file=StringIO(), force_terminal=True, color_system="truecolor")
    console.print(text, end="\n\n")  # an empty line: the picture cuts off what is below the base of the last one
    unique = f"polyfleet-{name}"
    return console.export_svg(title=title, code_format=SVG, font_aspect_ratio=ADVANCE, unique_id=unique)


if __name__ == "__main__":
    main()
