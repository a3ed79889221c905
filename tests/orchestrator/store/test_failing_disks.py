"""Disks that are slow, full or fail: what was acknowledged is there, what was refused is not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from store_writers import FILLER, SUBMITTER

from orchestrator.store.events.event_store import EventStore

pytestmark = pytest.mark.full


@pytest.fixture
def injecting(absent):
    """`injecting(call, what)`: the words before a command whose system call is to be slow or to fail."""

    def words(call: str, what: str) -> list[str]:
        before = ["strace", "-f", "-q", "-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:{what}"]
        try:
            subprocess.run([*before, "true"], capture_output=True, check=True)
        except (FileNotFoundError, subprocess.CalledProcessError) as e:
            absent("strace", f"strace cannot act here: {e}")
        return before

    return words


def test_a_slow_disk_makes_acknowledgements_late_but_none_of_them_untrue(tmp_path, injecting):
    """Each sync takes 0.3 s more; the process is killed by itself in the middle of one."""
    url = f"sqlite:///{tmp_path / 'polyfleet.db'}"
    dies = "acked_ = 0\n" + SUBMITTER.replace(
        'os.write(1, f"acked {key}\\n".encode())',
        'os.write(1, f"acked {key}\\n".encode()); globals().__setitem__("acked_", acked_ + 1); '
        "acked_ < 60 or os.kill(os.getpid(), 9)",
    )
    slow = injecting("fdatasync", "delay_enter=300000")
    ran = subprocess.run([*slow, sys.executable, "-c", dies, url, "0"], capture_output=True, text=True, check=False)
    words = [line.split() for line in ran.stdout.splitlines() if len(line.split()) == 2]
    acked, asked = ({key for word, key in words if word == wanted} for wanted in ("acked", "asked"))
    assert len(acked) >= 60, ran.stderr
    store = EventStore(url)
    stored = [e.job for e in store.read(0) if e.event == "submitted"]
    store.close()
    assert acked <= set(stored) <= asked and len(set(stored)) == len(stored)


@pytest.mark.parametrize(
    ("call", "error"),
    [("pwrite64", "ENOSPC"), ("pwrite64", "EIO"), ("pwrite64", "EDQUOT"), ("fdatasync", "ENOSPC"), ("fsync", "EIO")],
)
@pytest.mark.parametrize("first", [160, 190, 230])
def test_a_disk_that_fails_for_a_while_refuses_with_words_and_then_goes_on(tmp_path, injecting, call, error, first):
    url = f"sqlite:///{tmp_path / 'polyfleet.db'}"
    first -= 80 if call == "fdatasync" else 0  # one a commit, while pages are several
    failing = injecting(call, f"error={error}:when={first}..{first + 6}")
    command = [*failing, sys.executable, "-c", FILLER.replace("2000", "200"), url, "0", "", "keys"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout)
    assert len(told["acked"]) > told["full"]  # some that were refused first
    assert told["stored"] == [[f"j{n}", name] for n in told["acked"] for name in ("submitted", "cancelled")]
    assert told["seqs"] == list(range(1, len(told["seqs"]) + 1))
    assert all("the job store" in why and url[10:] in why for _, why in told["refused"])
    assert told["refused"] or call == "fsync"
    store = EventStore(url)
    assert [[e.job, e.event] for e in store.read(0)] == told["stored"]
    store.close()


def check_filled(told: dict) -> None:
    """Everything acknowledged is stored, both its events, in order; what was refused is stored when asked again."""
    refused = [number for number, _ in told["refused"]]
    assert told["full"] > 0
    assert len(refused) == 5
    assert told["acked"][told["full"] :] == [*refused, *range(5000, 5005)]
    assert told["stored"] == [[f"j{n}", name] for n in told["acked"] for name in ("submitted", "cancelled")]
    assert told["seqs"] == list(range(1, len(told["seqs"]) + 1))
    assert told["differences"] == []
    for _, message in told["refused"]:
        assert "cannot be written" in message
        assert "MiB are free on its disk" in message
        assert "free disk space there: acknowledged jobs are safe" in message


def test_a_file_that_may_not_grow_refuses_loses_nothing_and_goes_on_afterwards(tmp_path):
    url = f"sqlite:///{tmp_path / 'polyfleet.db'}"
    ran = subprocess.run(
        [sys.executable, "-c", FILLER, url, str(600_000), "", "keys"], capture_output=True, text=True, check=True
    )
    check_filled(json.loads(ran.stdout))


def in_a_small_disk(folder: Path, command: list[str], size: str) -> subprocess.CompletedProcess:
    script = (
        f'mount -t tmpfs -o size={size} none "$1" && head -c 1000000 /dev/zero > "$1/ballast" && shift && exec "$@"'
    )
    return subprocess.run(
        ["unshare", "-m", "sh", "-c", script, "sh", str(folder), *command], capture_output=True, text=True, check=False
    )


def can_mount(folder: Path) -> str:
    try:
        ran = in_a_small_disk(folder, ["true"], "1m")
    except FileNotFoundError:
        return "unshare is not here"
    return "" if ran.returncode == 0 else f"cannot mount a small disk: {ran.stderr.strip()}"


def test_a_full_disk_refuses_loses_nothing_and_goes_on_when_there_is_room(tmp_path):
    if why := can_mount(tmp_path):
        pytest.skip(why)
    url, ballast = f"sqlite:///{tmp_path / 'polyfleet.db'}", str(tmp_path / "ballast")
    ran = in_a_small_disk(tmp_path, [sys.executable, "-c", FILLER, url, "0", ballast, "keys"], "3m")
    assert ran.returncode == 0, ran.stderr
    check_filled(json.loads(ran.stdout))


@pytest.mark.parametrize("keys", [(), ("keys",)])
def test_a_disk_that_fails_to_sync_is_not_believed(tmp_path, injecting, keys):
    """The write went through, its sync did not: told as an error, and taken out again before anything else goes in."""
    url = f"sqlite:///{tmp_path / 'polyfleet.db'}"
    failing = injecting("fdatasync", "error=EIO:when=40..44")
    command = [*failing, sys.executable, "-c", FILLER.replace("2000", "60"), url, "0", "", *keys]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    told = json.loads(ran.stdout)
    refused = [number for number, _ in told["refused"]]
    assert 1 <= len(refused) <= 5
    assert told["differences"] == []
    assert told["stored"] == [[f"j{n}", name] for n in told["acked"] for name in ("submitted", "cancelled")]
    assert told["acked"][told["full"] :] == [*refused, *range(5000, 5005)]
