"""What hostile job code does to its node. A submitted file: `python poison.py NAME` does it, notes its pid, stays."""

import json
import os
import signal
import sys
import time
from pathlib import Path

MINE = Path(os.environ.get("POLYFLEET_ATTEMPT_DIR", "."))
STAY = "import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(300)"
DEEP = "[" * 100_000


def pipe_as_outcome():
    os.mkfifo(MINE / "outcome.json")


def folder_as_outcome():
    (MINE / "outcome.json").mkdir()


def outcome_in_an_unknown_state():
    who = {"job": os.environ["POLYFLEET_JOB"], "epoch": int(os.environ["POLYFLEET_EPOCH"]), "node_rank": 0}
    told = {"state": "weird", "exit_codes": {}, "failure": None, "result": {}, "ended_s": time.time()}
    (MINE / "outcome.json").write_text(json.dumps(who | told))


def pipe_as_events():
    os.mkfifo(MINE / "events.jsonl")


def events_nested_too_deeply():
    _event_line(DEEP)


def checkpoint_at_no_time():
    _checkpoint(float("nan"))


def checkpoint_at_the_end_of_time():
    _checkpoint(float("inf"))


def checkpoint_in_a_number_beyond_floats():
    _checkpoint(10**400)


def result_nested_too_deeply():
    (MINE / "result.json").write_text(DEEP)


def stopped_supervisor():
    os.kill(os.getppid(), signal.SIGSTOP)


def killed_supervisor():
    """Outlive it twice removed, in a session of our own, with an environment that tells nothing."""
    supervisor = os.getppid()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.kill(supervisor, signal.SIGKILL)
            os.execve(sys.executable, [sys.executable, "-S", "-c", STAY], {})
        os._exit(0)
    time.sleep(300)


def _checkpoint(t):
    _event_line(json.dumps({"t": t, "rank": 0, "type": "checkpoint", "path": str(MINE), "step": 1}))


def _event_line(text):
    with (MINE / "events.jsonl").open("a") as f:
        f.write(text + "\n")


POISONS = {name: f for name, f in globals().items() if callable(f) and not name.startswith("_") and name != "Path"}

if __name__ == "__main__":
    POISONS[sys.argv[1]]()
    exec(STAY)
