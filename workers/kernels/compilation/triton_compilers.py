"""Compile configurations of Triton kernels in one process per CPU.

If a compiler crashes its process, only that job fails. Imports neither torch nor Triton.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

EXIT_TIMEOUT_S = 300
Job = dict[str, Any]
"""Input of triton_compile.py: `target`, `dtype` and the fields of a Config."""


def compile_jobs(jobs: Sequence[Job]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each job's number with its `registers`, `spills` and `shared_bytes`, or `error`, as jobs finish."""
    if not jobs:
        return
    waiting: SimpleQueue[int | None] = SimpleQueue()
    done: SimpleQueue[tuple[int, dict[str, Any]] | None] = SimpleQueue()
    count = min(len(os.sched_getaffinity(0)), len(jobs))
    for number in (*range(len(jobs)), *[None] * count):
        waiting.put(number)
    with ThreadPoolExecutor(count) as pool, tempfile.TemporaryDirectory() as cache:
        for _ in range(count):
            pool.submit(_compile_in_a_process, jobs, waiting, done, cache)
        ended = 0
        try:
            while ended < count:
                one = done.get()
                if one is None:
                    ended += 1
                else:
                    yield one
        finally:  # if the caller was interrupted, drop the jobs that have not started
            with suppress(Empty):
                while True:
                    waiting.get_nowait()
            for _ in range(count):
                waiting.put(None)


def _compile_in_a_process(jobs: Sequence[Job], waiting: Any, done: Any, cache: str) -> None:
    process = None
    try:
        while (number := waiting.get()) is not None:
            if process is None or process.poll() is not None:
                process = _start_process(cache)
            done.put((number, _run_job(process, jobs[number])))
    finally:
        if process is not None:
            process.stdin.close()
            process.wait(EXIT_TIMEOUT_S)
            process.stdout.close()
        done.put(None)


def _start_process(cache: str) -> Any:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TRITON_CACHE_DIR": cache}
    command = [sys.executable, "-m", "workers.kernels.compilation.triton_compile"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    return subprocess.Popen(command, text=True, env=environment, **pipes)  # type: ignore[call-overload]


def _run_job(process: Any, job: Job) -> dict[str, Any]:
    try:
        process.stdin.write(json.dumps(job) + "\n")
        process.stdin.flush()
        reply: dict[str, Any] = json.loads(process.stdout.readline())
    except (OSError, ValueError):
        return {"error": f"the compiler's process ended with code {process.wait(EXIT_TIMEOUT_S)}"}
    return reply
