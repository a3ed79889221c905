"""Condense pip's output to a few lines of progress.

    python -m cluster.environments.pip_progress NUMBER COMMAND...

runs a pip command that installs about NUMBER packages and prints its progress on stderr; if pip fails, all of its
output. It needs only the standard library, because it is used before there is an environment.
"""

import re
import subprocess
import sys
from collections.abc import Callable

Progress = Callable[[str], None]

LARGE_MB = 20.0
DOWNLOADING = re.compile(r"\s*Downloading (?:\S*/)?([A-Za-z0-9_.]+-[^-\s]+)\S* \(([0-9.]+) (MB|GB)\)")


class PipProgress:
    """Call `progress` for the few lines of pip's output that show how far it is."""

    def __init__(self, packages: int, progress: Progress):
        self.packages, self.progress, self.resolved = packages, progress, 0

    def __call__(self, line: str) -> None:
        if line.startswith("Collecting "):
            self.resolved += 1
            if self.resolved % 20 == 1:
                self.progress(f"resolving package {self.resolved} of about {max(self.packages, self.resolved)}")
        elif line.startswith("Installing collected packages: "):
            count = line.count(",") + 1
            self.progress(f"unpacking {count} package{'s' if count > 1 else ''}")
        elif large := DOWNLOADING.match(line):
            name, amount, unit = large.groups()
            if float(amount) * (1000 if unit == "GB" else 1) >= LARGE_MB:
                self.progress(f"downloading {name} ({amount} {unit})")


def main() -> int:
    packages, *command = sys.argv[1:]
    on_line, output = PipProgress(int(packages), _print_line), list[str]()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        for line in pip.stdout or ():
            output.append(line)
            on_line(line)
    if pip.returncode:
        sys.stderr.write("".join(output))
    return pip.returncode


def _print_line(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
