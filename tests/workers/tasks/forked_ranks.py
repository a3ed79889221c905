"""Ranks for tests, forked from a process that has imported torch: that takes longer than most of them run.

    forked_ranks.py      reads {"variables", "folder", "output"} from each line of stdin, and prints the process id

A rank's output is in OUTPUT.out and OUTPUT.err, its exit code in OUTPUT.code as soon as it has ended. `RankForks` and
`ForkedRank` are the other side.
"""

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

IMPORTED = ("torch", "torch._dynamo", "torch.distributed.checkpoint")
"""The second as optimizers do, the third as checkpoints do."""


class ForkedRank:
    """As much of subprocess.Popen as tests need."""

    def __init__(self, pid: int, output: Path):
        self.pid, self._output = pid, output
        self.returncode: int | None = None

    def poll(self) -> int | None:
        code = self._output.with_suffix(".code")
        if self.returncode is None and code.exists():
            self.returncode = int(code.read_text())
        return self.returncode

    def communicate(self) -> tuple[str, str]:
        from patience import wait_for

        wait_for(lambda: self.poll() is not None, lambda: f"rank {self.pid} runs:\n{self._texts()}")
        return self._texts()

    def send_signal(self, number: int) -> None:
        """Nothing once it has ended: its process id may be another's then."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _texts(self) -> tuple[str, str]:
        return self._output.with_suffix(".out").read_text(), self._output.with_suffix(".err").read_text()


class RankForks:
    """The process that forks ranks. Threads of torch are as many as its OMP_NUM_THREADS when it is imported."""

    def __init__(self, root: Path):
        variables = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._process = subprocess.Popen([sys.executable, __file__], env=variables, **pipes)

    def start(self, variables: dict[str, str], folder: Path, output: Path) -> ForkedRank:
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"variables": variables, "folder": str(folder), "output": str(output)}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return ForkedRank(int(self._process.stdout.readline()), output)

    def close(self) -> None:
        self._process.communicate()


def main() -> None:
    for name in IMPORTED:
        importlib.import_module(name)
    gc.freeze()  # ranks need not look through it when they end
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that wait for ranks
    for line in sys.stdin:
        request = json.loads(line)
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            if rank := os.fork():
                wait_for_rank(rank, Path(request["output"]))
            be_rank(**request)


def wait_for_rank(rank: int, output: Path) -> NoReturn:
    os.write(1, f"{rank}\n".encode())
    _, status = os.waitpid(rank, 0)
    unfinished = output.with_suffix(".ended")
    unfinished.write_text(str(os.waitstatus_to_exitcode(status)))
    unfinished.rename(output.with_suffix(".code"))
    os._exit(0)


def be_rank(variables: dict[str, str], folder: str, output: str) -> NoReturn:
    """To its end, which is that of an interpreter."""
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.path[0] = ""
    for descriptor, suffix in ((1, ".out"), (2, ".err")):
        os.dup2(os.open(Path(output).with_suffix(suffix), os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    run_task()


def run_task() -> NoReturn:
    from workers.tasks.context import Context
    from workers.tasks.rank_main import exit_process

    folder = Path(os.environ["POLYFLEET_ATTEMPT_DIR"])
    order = json.loads((folder / "order.json").read_text())
    context = Context.from_attempt(folder, int(os.environ["RANK"]), order)
    try:
        result = importlib.import_module("workers.tasks." + order["task"]).main(context)
        (folder / f"result-{context.rank}.json").write_text(json.dumps(result, allow_nan=False))
    except Exception:
        traceback.print_exc()
        exit_process(1)
    exit_process(0)
    raise AssertionError("it has ended")


if __name__ == "__main__":
    main()
