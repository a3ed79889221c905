"""Three machines on this one, to try a fleet of several on: `sudo .venv/bin/python tests/machines/three.py up`.

Network namespaces with addresses, processes, homes and sshd of their own (tests/machines/bed.py). They are named m1,
m2 and m3; `machines/fleet.yaml` names them, with a folder that all see as the storage, and `ssh -F machines/ssh-config
m1` enters one. They last until `down`, or until the process that holds them ends; nothing of them is left then but
the folder.
"""

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from bed import NAMES, Bed, missing, refused

CONTROL, LOG = "control", "machines.log"
ACTIONS = ("off", "on", "cut", "heal")
BOOT_S = 60.0
ANSWER_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("machines"), help="where their files lie")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("up", help="make them, and machines/fleet.yaml")
    for verb, told in zip(
        ACTIONS, ("pull its plug", "start it again", "cut its network", "mend all networks"), strict=True
    ):
        words = verbs.add_parser(verb, help=told)
        if verb != "heal":
            words.add_argument("name", choices=NAMES)
    verbs.add_parser("down", help="take them away")
    verbs.add_parser("hold")  # what `up` leaves running
    asked = parser.parse_args()
    folder: Path = asked.folder.absolute()
    if asked.verb == "up":
        return up(folder)
    if asked.verb == "hold":
        return hold(folder)
    return ask(folder, " ".join([asked.verb, getattr(asked, "name", "")]).strip())


def up(folder: Path) -> int:
    if why := missing() or refused():
        return fail(why)
    with suppress(OSError):
        connected(folder).close()
        return fail(f"three machines are up already, with their files in {folder}")
    if folder.exists() and any(folder.iterdir()):
        return fail(f"{folder} is not empty: take another --folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOG).open("w") as log:
        words = [sys.executable, __file__, "--folder", str(folder), "hold"]
        held = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    deadline = time.monotonic() + BOOT_S
    while held.poll() is None and time.monotonic() < deadline:
        with suppress(OSError):
            connected(folder).close()
            print(f"{', '.join(NAMES)} are up; {os.path.relpath(folder / 'fleet.yaml')} names them")
            return 0
        time.sleep(0.1)
    held.kill()
    return fail(f"they did not start: {(folder / LOG).read_text().strip()[-2000:]}")


def hold(folder: Path) -> int:
    """Keeps them, and does what it is asked, one line at a time, until `down`."""
    bed = Bed(folder)
    write_files(bed, folder)
    os.chdir(folder)  # the longest path of a socket has 107 bytes
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(CONTROL)
        door.listen()
        while True:
            line, _ = door.accept()
            with line, line.makefile("rw") as talk:
                words = talk.readline().split()
                if words == ["down"]:
                    bed.close()
                    shutil.rmtree(folder, ignore_errors=True)
                    talk.write("ok")
                    return 0
                if words:
                    talk.write(do(bed, *words))


def do(bed: Bed, verb: str, name: str = "") -> str:
    """ "ok", or why not."""
    machine = bed.machines.get(name)
    try:
        if verb == "heal":
            bed.heal()
        elif machine is None or (verb == "on") == machine.is_up:
            return f"{name} is {'on' if machine and machine.is_up else 'off'} already"
        else:
            {"off": machine.power_off, "on": machine.boot, "cut": lambda: bed.cut(name)}[verb]()
    except Exception as e:
        return f"{verb} {name}: {e}"
    return "ok"


def write_files(bed: Bed, folder: Path) -> None:
    """For the user that `sudo` was called by, where it was."""
    storage = bed.shared / "checkpoints"
    storage.mkdir()
    pool = {
        "backend": "cpu",
        "environment": {"interpreter": str(Path(sys.prefix).resolve() / "bin" / "python")},
        "hosts": [{"host": name, "address": address} for name, address in bed.addresses.items()],
        "storage": str(storage),
    }
    fleet = {
        "name": "three",
        "head": {"address": bed.host},
        "ssh": {"config": str(bed.ssh_config)},
        "pools": {"cpu": pool},
    }
    (folder / "fleet.yaml").write_text(f"{json.dumps(fleet, indent=1)}\n")  # JSON is YAML
    user, group = int(os.environ.get("SUDO_UID", -1)), int(os.environ.get("SUDO_GID", -1))
    for path in (folder, bed.ssh_config, folder / "fleet.yaml", bed.identity.file, storage):
        os.chown(path, user, group)


def connected(folder: Path) -> socket.socket:
    """Raises OSError where none are up."""
    line = socket.socket(socket.AF_UNIX)
    line.settimeout(ANSWER_S)
    before = Path.cwd()
    try:
        os.chdir(folder)
        line.connect(CONTROL)
    except OSError:
        line.close()
        raise
    finally:
        os.chdir(before)
    return line


def ask(folder: Path, words: str) -> int:
    try:
        line = connected(folder)
    except OSError:
        return fail(f"no machines of {folder} are up: start them with `up`")
    with line, line.makefile("rw") as talk:
        talk.write(f"{words}\n")
        talk.flush()
        answer = talk.read()
    return 0 if answer == "ok" else fail(answer or "the process that holds the machines has ended")


def fail(why: str) -> int:
    print(f"error: {why}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
