"""Run by test_crash.py in a process of its own: saves step 2 over step 1 once per file operation, and dies at that one.

crash_driver.py ROOT before|half     ROOT/template has step 1; ROOT/<n> is what operation n left behind
"""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

from workers.checkpoint import load, save
from workers.checkpoint.disk.files import Files


class Dying(Files):
    """Ends the process at operation `last` as a crash would: no clean-up, no flush. `half`: amid a write."""

    def __init__(self, last: int, half: bool):
        self.left = last
        self.half = half

    def __getattribute__(self, name: str) -> Any:
        operation = super().__getattribute__(name)
        if name not in vars(Files):
            return operation

        def counted(*arguments: Any) -> Any:
            self.left -= 1
            if self.left < 0:
                if self.half and name == "write":
                    file, data, size_bytes, offset = arguments
                    operation(file, data, size_bytes // 2, offset)
                os._exit(9)
            return operation(*arguments)

        return counted


def state(step: int) -> dict[str, Any]:
    a, b = torch.full((2_500_000,), float(step)), torch.full((3,), step)  # two chunks, from two threads
    return {"t": {"a": a, "b": b}, "extra": {"step": step}}


def main(root: Path, half: bool) -> None:
    save(root / "template", 1, state(1))
    for last in range(1000):
        here = root / f"{last:03d}"
        shutil.copytree(root / "template", here)
        child = os.fork()
        if child == 0:
            save(here, 2, state(2), keep=1, files=Dying(last, half))
            os._exit(0)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0:
            print(last, load(here).step)
            return


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), sys.argv[2] == "half")
