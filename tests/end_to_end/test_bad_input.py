"""What a clumsy user types, through the real command on a real fleet: one sentence, a remedy, the documented exit code,
no traceback, and nothing half done.

Most of it is typed in this process: another one would take half a second of a CPU for each line, to import the same.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from orchestrator import Orchestrator, RunJob
from orchestrator.cli.main import main

pytestmark = pytest.mark.full

FILES = {
    "job.yaml": "task: run\ncommand: 'true'\n",
    "unknown.yaml": "task: run\ncommand: 'true'\nprecison: fp32\n",
    "type.yaml": "task: run\ncommand: 'true'\npriority: high\n",
    "launch.yaml": "task: run\ncommand: 'true'\nlaunch: rank\n",
    "launched.yaml": "entry: m.py\nworking_dir: code\nlaunch: ranks\n",
    "tabs.yaml": "task: run\ncommand: 'true'\nresources:\n\taccelerators: cpu\n",
    "twice.yaml": "task: run\ncommand: a\ncommand: b\n",
    "anchor.yaml": "task: run\ncommand: 'true'\nenv: &a {A: b}\n",
    "tag.yaml": "task: run\ncommand: !!python/name:os.system x\n",
    "shell.yaml": "task: run\ncommand: 'true'\nname: '$(reboot)'\n",
    "colour.yaml": 'task: run\ncommand: "true"\nname: "\\e[31mred"\n',
    "nowhere.yaml": "entry: m.py\nworking_dir: nowhere\n",
    "secret.yaml": "task: run\ncommand: 'true'\nsecrets: {HF_TOKEN: hf_abcdef}\n",
    "other.yaml": "name: other\npools: {only: {backend: cpu}}\n",
    "backend.yaml": "pools: {a: {backend: nvidiaa}}\n",
    "absent-python.yaml": "pools: {a: {backend: cpu, environment: {interpreter: /nonexistent/python}}}\n",
    "package.yaml": "pools: {a: {backend: cpu, environment: {requirements: ['no-such-package-xyz==1']}}}\n",
    "code/m.py": "def train(ctx): ...\ndef model(): ...\n",
    "code/broken.py": "def model(:\n",
    "shadow/m.py": "def model(): ...\n",
    "shadow/cluster.py": "x = 1\n",
}
MODEL = ("--entry", "m.py:model", "--working-dir")
CASES: list[tuple[tuple[str, ...], int, str]] = [
    (("submit", "unknown.yaml"), 2, "precison: unknown key 'precison' (in unknown.yaml)\n  did you mean 'precision'?"),
    (("submit", "type.yaml"), 2, "priority: must be a valid integer, got 'high' (in type.yaml)"),
    (("submit", "launch.yaml"), 2, "launch: unknown launch 'rank' (in launch.yaml)\n  did you mean 'ranks'?"),
    (("submit", "launched.yaml"), 2, "launch: applies to run jobs only; this is a train job"),
    (("submit", "tabs.yaml"), 2, "tabs.yaml:4: not YAML"),
    (("submit", "twice.yaml"), 2, "twice.yaml:3: key 'command' appears twice"),
    (("submit", "anchor.yaml"), 2, "anchor.yaml:3: anchor &a\n  write the values out"),
    (("submit", "tag.yaml"), 2, "tag.yaml:2: tag "),
    (("submit", "latin.yaml"), 2, "latin.yaml is not UTF-8 text"),
    (("submit", "shell.yaml"), 2, "name: '$(reboot)' is not a valid name"),
    (("submit", "colour.yaml"), 2, "name: '\\x1b[31mred' is not a valid name"),
    (("submit", "nowhere.yaml"), 2, "working_dir: there is no folder nowhere\n  create it"),
    (("submit", "secret.yaml"), 2, "secrets: HF_TOKEN is not a reference to a secret"),
    (("submit", "absent.yaml"), 2, "absent.yaml: No such file or directory"),
    (("submit", "job.yaml", "--", "true"), 2, "a job file, 'job.yaml', and a command after `--`"),
    (("submit",), 2, "no job file\n  name a job file, or write a command"),
    (("submit", "--accelerators", "tpu:v5p", "--", "true"), 2, "resources: no pool has tpu:v5p; kinds here: cpu\n  "),
    (("submit", "--accelerators", "cpu:64", "--", "true"), 2, "has 1 device in all, but the job needs 64"),
    (("submit", "--accelerators", "frob", "--", "true"), 2, "unknown accelerator 'frob'"),
    (("submit", "--pool", "rigth", "--", "true"), 2, "no pool is called rigth"),
    (("submit", "--env", "A B=1", "--", "true"), 2, "env: 'A B' cannot be an environment variable"),
    (("submit", "--task", "prepare", *MODEL, "absent"), 2, "absent does not exist\n  name a folder"),
    (("submit", "--task", "prepare", *MODEL, "job.yaml"), 2, "job.yaml is not a folder"),
    (("submit", "--task", "prepare", *MODEL, "shadow"), 2, "its top-level 'cluster.py' would hide Polyfleet's own"),
    (
        ("benchmark", "run", "m.py:model", "--working-dir", "shadow"),
        2,
        "its top-level 'cluster.py' would hide Polyfleet's own",
    ),
    (("submit", "--entry", "m.py", "--working-dir", "shadow"), 2, "rename it, e.g. to 'my_cluster.py'"),
    (("submit", "--entry", "m.py"), 2, "working_dir: is required: m.py is a file in it"),
    (("submit", "--entry", "absent.py", "--working-dir", "code"), 2, "entry: there is no file absent.py in "),
    (
        ("submit", "--entry", "m.py:tain", "--working-dir", "code"),
        2,
        "entry: m.py has no function 'tain'\n  did you mean",
    ),
    (
        ("benchmark", "run", "broken.py:model", "--working-dir", "code"),
        2,
        "entry: broken.py:1: not valid Python: invalid",
    ),
    (("benchmark", "run", "m.py:model"), 2, "m.py:model is a file in a folder\n  give the folder with --working-dir"),
    (("benchmark", "run", "mlp", "--pools", "rigth"), 2, "pools: no device of pool 'rigth' is ready\n  did you mean"),
    (("benchmark", "run", "mlp", "--kinds", "tpu:v5e"), 2, "no device of kind 'tpu:v5e' is ready\n  choose from cpu"),
    (("benchmark", "run", "mpl"), 2, "no case or suite 'mpl'\n  did you mean 'mlp'?"),
    (("benchmark", "run", "mlp", "--precision", "fp33"), 2, "precisions"),
    (("benchmark", "run", "mlp", "--rounds", "99"), 2, "rounds (99) is larger than max_rounds (60)\n  raise"),
    (("benchmark", "show", "bench-absent"), 2, "no benchmark run 'bench-absent'"),
    (("submit", "--working-dir", "links", "--", "true"), 2, "is a link to /etc/hostname, outside the folder"),
    (("submit", "--working-dir", "huge", "--", "true"), 2, "the largest so far: data.bin (600 MiB)"),
    (("show", "absent"), 2, "no job 'absent'"),
    (("logs", "../../etc/passwd"), 2, "'../../etc/passwd' is not a valid name"),
    (("cancel", "absent"), 2, "no job 'absent'"),
    (("explain", "\x1b[31mred"), 2, "'\\x1b[31mred' is not a valid name"),
    (("jobs", "--state", "RUNING"), 2, "no state 'RUNING'\n  did you mean 'RUNNING'?"),
    (("checkpoint", "show", "left:../x"), 2, "path '../x' is not inside the pool's storage"),
    (("checkpoint", "show", "x"), 2, "x is not a checkpoint: it has no MANIFEST.json"),
    (("checkpoint", "diff", "left:x", "./y"), 2, "./y is on this machine, and left:x is in a pool"),
    (("checkpoint", "copy", "left:x", "http://y/z"), 2, "has the scheme 'http'"),
    (("checkpoint", "convert", "left:x", "left:y"), 2, "the target of the conversion is missing"),
    (("checkpoint", "copy", "left:absent", "right:x"), 2, "no checkpoint at left:absent"),
    (("checkpoint", "copy", "nopool:x", "right:x"), 2, "source: no pool 'nopool'\n  valid: left, right"),
    (("checkpoint", "list", "--pool", "nopool"), 2, "no pool 'nopool'"),
    (("up", "--file", "other.yaml"), 2, "fleet 'test' is up at 127.0.0.1:"),
    (
        ("up", "--file", "backend.yaml"),
        2,
        "pools.a.backend: unknown backend 'nvidiaa' (in backend.yaml)\n  did you mean",
    ),
    (("up", "--file", "absent.yaml"), 2, "cannot read absent.yaml"),
    (("server", "start", "--port", "1"), 2, "the server is already running, without a TCP port"),
]

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def whole_fleet(shared_fleet: Orchestrator, fleet_file: Path) -> Iterator[Orchestrator]:
    """Whole once for all of these tests: they break nothing."""
    with Orchestrator.up(fleet_file) as o:
        yield o


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder the user works in."""
    folder = tmp_path_factory.mktemp("desk")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    (folder / "latin.yaml").write_bytes("command: caf\xe9".encode("latin-1"))
    for name in ("links", "huge"):
        (folder / name).mkdir()
    (folder / "links" / "out").symlink_to("/etc/hostname")
    with (folder / "huge" / "data.bin").open("wb") as hole:
        hole.truncate(600 << 20)
    return folder


@pytest.fixture
def polyfleet(cli: Cli, desk: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.chdir(desk)
    return cli


@pytest.fixture
def typed(desk: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Cli:
    """The same command in this process; what any library writes to its streams is seen too."""
    monkeypatch.chdir(desk)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["polyfleet", *words])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        return subprocess.CompletedProcess(words, int(ended.value.code or 0), *capfd.readouterr())

    return run


def refused(done: subprocess.CompletedProcess[str], code: int, sentence: str) -> None:
    """One error, with what to do on the line below it where it is not one of the command line itself."""
    assert sentence in done.stderr, done.stderr
    assert (done.returncode, done.stdout) == (code, "")
    assert "Traceback" not in done.stderr and "\x1b" not in done.stderr
    assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == 1


@pytest.mark.parametrize(("words", "code", "sentence"), CASES, ids=[" ".join(words)[:60] for words, _, _ in CASES])
def test_a_mistake_is_told_in_one_sentence_and_leaves_nothing(
    whole_fleet: Orchestrator, home: Path, typed: Cli, words: tuple[str, ...], code: int, sentence: str
):
    before = ([job["id"] for job in whole_fleet.jobs.list()], sorted((home / "packages").iterdir()))
    refused(typed(*words), code, sentence)
    assert ([job["id"] for job in whole_fleet.jobs.list()], sorted((home / "packages").iterdir())) == before


def test_what_only_the_pool_can_tell_fails_the_job_with_the_same_clearness(whole_fleet: Orchestrator, polyfleet: Cli):
    done = polyfleet("benchmark", "run", "absent_module:model", "--working-dir", "code", "--pools", "right")
    assert (done.returncode, "Traceback" in done.stdout + done.stderr) == (1, False)
    assert "cpu: failed: no module 'absent_module' here; check that it is in the submitted folder" in done.stdout


def test_a_run_job_may_have_modules_named_like_ours(whole_fleet: Orchestrator, polyfleet: Cli):
    done = polyfleet(
        "submit", "--working-dir", "shadow", "-f", "--", "python3", "-c", "import cluster; print(cluster.x)"
    )
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


def test_asking_for_what_is_over_is_no_error(whole_fleet: Orchestrator, polyfleet: Cli):
    job = whole_fleet.submit(RunJob(command="true")).wait()
    assert polyfleet("cancel", job.id).stdout == f"{job.id}: SUCCEEDED (it had already ended)\n"
    silent = polyfleet("logs", job.id)
    assert (silent.returncode, silent.stdout) == (0, "")
    assert silent.stderr == f"{job.id} has printed nothing; its state is SUCCEEDED\n"
    assert polyfleet("explain", job.id).stdout.startswith("SUCCEEDED: every rank ended with exit code 0\nit has ended;")


def test_a_job_that_never_ran_says_so(whole_fleet: Orchestrator, polyfleet: Cli):
    holders = [whole_fleet.submit(RunJob(command="sleep 60", resources={"pool": "right"})) for _ in range(2)]
    assert holders[1].cancel().state == "CANCELLED"
    told = polyfleet("logs", "-f", holders[1].id)
    holders[0].cancel()
    assert (told.returncode, told.stderr) == (0, f"{holders[1].id} never ran: CANCELLED, cancelled by the user\n")


@pytest.mark.parametrize(
    ("file", "change", "code", "sentence"),
    [
        (
            "token",
            lambda text: "wrong" * 8,
            2,
            "the server does not know the token of this home\n  run `polyfleet server stop`",
        ),
        ("token", lambda text: "", 2, "/token does not contain a valid token\n  run `polyfleet server stop`, remove"),
        ("token", None, 2, "/token does not exist\n  run `polyfleet server stop`, then this command again"),
        ("server.json", lambda text: text.replace('"version": "', '"version": "9'), 2, "the server has version 9"),
    ],
    ids=["wrong token", "empty token", "no token", "another version"],
)
def test_a_damaged_home_is_told_and_mended_by_hand(
    whole_fleet: Orchestrator, home: Path, typed: Cli, file: str, change: Any, code: int, sentence: str
):
    original = (home / file).read_text()
    try:
        if change is None:
            (home / file).unlink()
        else:
            (home / file).write_text(change(original))
        for words in (("jobs",), ("submit", "--", "true"), ("logs", "-f", "x")):
            refused(typed(*words), code, sentence)
    finally:
        (home / file).write_text(original)
        (home / file).chmod(0o600)
    assert typed("jobs").returncode == 0


def test_a_token_others_may_read_is_not_used(whole_fleet: Orchestrator, home: Path, polyfleet: Cli):
    (home / "token").chmod(0o644)
    try:
        refused(polyfleet("jobs"), 2, "other users can read the token")
    finally:
        (home / "token").chmod(0o600)


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A home where nothing is up; nothing may be, and nothing may run, afterwards either."""
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("POLYFLEET_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    yield tmp_path / "home"
    assert not (tmp_path / "home" / "fleet.json").exists()
    assert not (tmp_path / "home" / "server.json").exists()
    assert not subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, text=True).stdout


def test_an_environment_that_cannot_be_made_is_told_with_its_log_before_anything_starts(own_home: Path, polyfleet: Cli):
    done = polyfleet("up", "--file", "package.yaml")
    assert "No matching distribution found for no-such-package-xyz==1" in done.stderr
    [log] = [line.partition("complete log: ")[2] for line in done.stderr.splitlines() if "complete log: " in line]
    assert "no-such-package-xyz" in Path(log).read_text()
    assert (done.returncode, done.stdout, "starting" in done.stderr) == (2, "", False)
    assert not [path for path in Path(log).parent.iterdir() if path.is_dir()]


def test_an_interpreter_that_is_not_there_is_told_before_anything_starts(own_home: Path, polyfleet: Cli):
    refused(
        polyfleet("up", "--file", "absent-python.yaml"), 2, "no Python interpreter at /nonexistent/python\n  name the"
    )


def test_a_port_in_use_starts_no_server(own_home: Path, polyfleet: Cli):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        refused(
            polyfleet("server", "start", "--port", port), 2, f"port {port} cannot be used: Address already in use\n"
        )


def fill(file: Path, left_bytes: int) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    with suppress(OSError):
        while os.write(descriptor, bytes(1024)):
            pass
    os.ftruncate(descriptor, os.fstat(descriptor).st_size - left_bytes)
    os.close(descriptor)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("mount"), reason="only root can mount a tiny file system")
def test_a_full_disk_is_told_with_the_place_and_starts_nothing(own_home: Path, polyfleet: Cli):
    own_home.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", own_home], capture_output=True)
    if mounted.returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        for left_bytes in (0, 20 * 1024):  # the second is too little for the job store
            shutil.rmtree(own_home / "logs", ignore_errors=True)
            fill(own_home / "filler", left_bytes)
            for words in (("jobs",), ("server", "start")):
                done = polyfleet(*words)
                assert (done.returncode, done.stdout, "Traceback" in done.stderr) == (3, "", False), done.stderr
                assert "free disk space" in done.stderr and str(own_home) in done.stderr
    finally:
        subprocess.run(["umount", own_home], check=True)


def test_twenty_users_at_once_get_twenty_jobs(whole_fleet: Orchestrator):
    with ThreadPoolExecutor(20) as pool:
        jobs = list(pool.map(lambda n: whole_fleet.submit(RunJob(name=f"at-once-{n}", command="true")), range(20)))
    assert len({job.id for job in jobs}) == 20
    assert {job.wait().state for job in jobs} == {"SUCCEEDED"}


@pytest.mark.parametrize(
    "words",
    [
        *(("status",), ("inventory",), ("backends",), ("doctor",), ("jobs",), ("show", "json"), ("explain", "json")),
        *(("cancel", "json"), ("checkpoint", "list"), ("env", "list"), ("server", "status"), ("schema", "job")),
        *(("submit", "--dry-run", "--", "true"), ("submit", "--wait", "--", "true"), ("submit", "--", "true")),
    ],
    ids=" ".join,
)
def test_json_stands_alone_on_stdout(whole_fleet: Orchestrator, typed: Cli, words: tuple[str, ...]):
    if words[-1] == "json" and not [job for job in whole_fleet.jobs.list() if job["name"] == "json"]:
        whole_fleet.submit(RunJob(name="json", command="true"))
    at = words.index("--") if "--" in words else len(words)
    done = typed(*words[:at], "-o", "json", *words[at:])
    shown = json.loads(done.stdout)
    assert shown is not None, done.stderr
    problems = words == ("doctor",) and any(finding["level"] != "info" for finding in shown)
    assert done.returncode == int(problems), shown
