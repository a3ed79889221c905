"""A child process that measures when it is asked: it imports Ray once, from whatever environment it is given."""

import json
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

HERE = Path(__file__).parent
MARK = "answer "
PATIENCE_S = 150.0


class Helper:
    """One line with a name goes in, one line of JSON comes back. Ends with its `with` block."""

    def __init__(self, interpreter: Path, script: str, *arguments: str, env: Mapping[str, str]):
        self._name = script
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed with the child
        self._child = subprocess.Popen(
            [interpreter, HERE / script, *arguments], env=dict(env), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said,
        )  # fmt: skip

    def __enter__(self) -> "Helper":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._child.stdin.close()
        self._child.stdout.close()
        try:
            self._child.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._said.close()

    def ask(self, what: str) -> Any:
        """What the function of that name returned there. Lines that Ray prints are passed over."""
        self._child.stdin.write(f"{what}\n")
        self._child.stdin.flush()
        alarm = threading.Timer(PATIENCE_S, self._child.kill)
        alarm.start()
        try:
            for line in self._child.stdout:
                if line.startswith(MARK):
                    return json.loads(line.removeprefix(MARK))
        finally:
            alarm.cancel()
        self._said.seek(0)
        raise SystemExit(f"{self._name} ended at {what!r}:\n{self._said.read()[-2000:]}")


def answer(functions: Mapping[str, Callable[[], Any]], lines: Any) -> None:
    """The child's side: until its standard input ends."""
    for line in lines:
        print(MARK + json.dumps(functions[line.strip()]()), flush=True)
