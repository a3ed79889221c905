"""What a shell completes, asked by real shells at a terminal, with `:` and `=` in the words."""

import inspect
import os
import pty
import re
import shutil
import subprocess
import sys
from typing import get_args

import pytest
from patience import wait_for
from typer.models import ParameterInfo

from cluster.catalogue import aliases, models, resolve_name, vendors
from orchestrator.cli.main import app
from orchestrator.cli.terminal import completion_values
from orchestrator.spec.resource_syntax import accelerators
from orchestrator.verbs import fleet, nodes

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore:.*forkpty.*:DeprecationWarning")]
USABLE = [row for row in models().values() if not row.unavailable]
NAMES_A_POOL_OR_KIND = re.compile(r"(?i)\b(accelerators|pools?|kinds?|to|to_kind|on|node|JOB)\b")
NOT_COMPLETED = {"schema kind", "simulate fleet"}
"""A choice, which Typer completes; kinds as a file of throughputs calls them."""


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Without a server."""
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "home"))


@pytest.fixture
def environment(tmp_path):
    """In which the command is on the path."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "polyfleet").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m orchestrator.cli "$@"\n')
    (folder / "polyfleet").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}", "TERM": "dumb", "HOME": str(tmp_path)}


@pytest.fixture
def script(tmp_path, polyfleet):
    """`script(name)`: the file with the completion of that shell."""

    def write(name):
        if shutil.which(name) is None:
            pytest.skip(f"{name} is not installed")
        path = tmp_path / f"script.{name}"
        path.write_text(polyfleet("completion", name).stdout)
        return path

    return write


@pytest.fixture
def shell(tmp_path, script, environment):
    """`shell(name, typed)`: the words that a shell of that name has after `typed`, in which a tab is the key."""

    def run(name, typed):
        command, begin = SHELLS[name]
        keys = f"{begin.format(script=script(name))}\n{typed}\x01printf '<%s>' \necho; exit\n"
        return words(command, keys, os.environ | environment, tmp_path)

    return run


SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "bind 'set enable-bracketed-paste off'; source {script}"),
    "zsh": (["zsh", "-f", "-i"], "autoload -Uz compinit; compinit -D -u; bindkey -e; source {script}"),
}


def words(command, keys, environment, folder):
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(folder)
        os.execvpe(command[0], command, environment)
    os.write(terminal, keys.encode())
    seen = b""
    try:
        while piece := os.read(terminal, 1 << 12):
            seen += piece
    except OSError:  # Linux says so when the shell has ended
        pass
    finally:
        os.close(terminal)
        os.waitpid(child, 0)
    printed = re.findall(r"^<polyfleet>.*>", seen.decode().replace("\r", "\n"), re.MULTILINE)
    assert printed, seen
    return printed[-1][1:-1].split("><")[1:]


@pytest.mark.parametrize("name", ["bash", "zsh"])
@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("submit --accelerators tpu:emul\t", ["submit", "--accelerators", "tpu:emulated"]),
        ("submit --accelerators=tpu:emul\t", ["submit", "--accelerators=tpu:emulated"]),
        ('submit --accelerators "tpu:emul\t', ["submit", "--accelerators", "tpu:emulated"]),
        ("offer --name a:b --accelerators tpu:\te\t", ["offer", "--name", "a:b", "--accelerators", "tpu:emulated"]),
        ("benchmark run --kinds cpu,tpu:emul\t", ["benchmark", "run", "--kinds", "cpu,tpu:emulated"]),
        ("migrate a --to neur\t:trn2\t", ["migrate", "a", "--to", "neuron:trn2"]),
        ("checkpoint plan --t\ttpu:emul\t", ["checkpoint", "plan", "--to", "tpu:emulated"]),
        ("submit read\t", ["submit", "read me.yaml"]),
    ],
)
def test_a_shell_completes_what_has_colons(name, typed, completed, shell, home, tmp_path):
    (tmp_path / "read me.yaml").touch()
    assert shell(name, f"polyfleet {typed}") == completed


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("submit --accelerators tpu:emul", "tpu:emulated"),
        ("submit --accelerators=tpu:emul", "--accelerators=tpu:emulated"),
        ("submit job", "job.yaml"),
    ],
)
def test_fish_completes_what_has_colons(typed, completed, script, environment, home, tmp_path):
    (tmp_path / "job.yaml").touch()
    ask = f"source {script('fish')}; complete -C 'polyfleet {typed}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", ask], env=os.environ | environment, cwd=tmp_path, capture_output=True, check=True
    )
    assert done.stdout.decode().splitlines() == [completed]


def test_every_kind_and_alias_is_completed_from_its_beginning(home):
    """Each is what a job takes."""
    for name in (*vendors(), *aliases()):
        assert name in completion_values.kinds(name[:2])
        assert name in completion_values.accelerators("")
    for row in USABLE:
        for kind in {row.kind, row.family} if ":" in row.kind else ():
            for begun in (kind.partition(":")[0] + ":", kind[:-1], kind):
                assert kind in completion_values.kinds(begun)
                assert kind in completion_values.accelerators(begun)
                assert f"cpu,{kind}" in completion_values.kinds(f"cpu,{begun}")
            assert accelerators(kind)
        for spelling in row.spellings:
            assert f"{row.backend}:{spelling}" in completion_values.accelerators(f"{row.backend}:{spelling[:3]}")
        for alias in (alias for alias, backend in aliases().items() if backend == row.backend and ":" in row.kind):
            assert f"{alias}:{row.model}" in completion_values.accelerators(f"{alias}:")
            assert accelerators(f"{alias}:{row.model}")
        for alone in {row.model, *row.spellings}:
            assert (alone in completion_values.accelerators(alone[:2])) == bool(
                resolve_name(alone)
            ) or alone in vendors()


def test_a_number_of_devices_and_a_list_of_models_are_completed(home):
    assert completion_values.accelerators("nvidia:H100:") == [f"nvidia:H100:{count}" for count in (1, 2, 4, 8)]
    assert completion_values.accelerators("H100:8") == ["H100:8"]
    assert "nvidia:A100,H100" in completion_values.accelerators("nvidia:A100,H1")
    assert "nvidia:A100,A100" not in completion_values.accelerators("nvidia:A100,A1")


def commands(group):
    for info in group.registered_commands:
        yield info.name or info.callback.__name__, info.callback
    for info in group.registered_groups:
        for name, function in commands(info.typer_instance):
            yield f"{info.name} {name}", function


def test_every_option_that_takes_a_pool_a_kind_a_node_or_a_job_is_completed():
    missing = []
    for command, function in commands(app):
        for name, parameter in inspect.signature(function).parameters.items():
            told = next((one for one in get_args(parameter.annotation) if isinstance(one, ParameterInfo)), None)
            takes = NAMES_A_POOL_OR_KIND.search(f"{name} {told.metavar or ''}".replace("[", " ")) if told else None
            if takes and told.autocompletion is None and f"{command} {name}" not in NOT_COMPLETED:
                missing.append(f"{command} {name}")
    assert missing == []


def test_every_argument_that_takes_a_job_is_completed_with_jobs():
    for command, function in commands(app):
        for parameter in inspect.signature(function).parameters.values():
            taken = next((one for one in get_args(parameter.annotation) if isinstance(one, ParameterInfo)), None)
            if taken and re.search(r"\bJOB\b", taken.metavar or ""):
                assert taken.autocompletion in (completion_values.jobs, completion_values.jobs_and_pools), command


def asked(polyfleet, typed, **options):
    """What any of our scripts gets of the command."""
    line = {"_TYPER_COMPLETE_ARGS": f"polyfleet {typed}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = polyfleet(env=line | {"_POLYFLEET_COMPLETE": "complete_fish"}, **options)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


def test_pools_and_nodes_are_those_of_the_running_server(live):
    """On a busy machine it may not answer in time, so each is asked until it does."""
    pools = sorted(pool["pool"] for pool in fleet.show(live.hub)["pools"])
    wait_for(lambda: sorted(completion_values.pool("")) == pools)
    wait_for(lambda: sorted(completion_values.pool_prefixes("")) == [f"{pool}:" for pool in pools])
    wait_for(lambda: set(pools) < set(completion_values.kind_or_pool("")))
    wait_for(lambda: sorted(completion_values.nodes("")) == sorted(node["node"] for node in nodes.list_(live.hub)))


def test_kinds_that_the_catalogue_lacks_are_completed_while_the_fleet_has_them(live):
    """Slices of cards, and cards that are known by their name or PCI id only. The fleet is a recorded one."""
    kinds = (
        "nvidia:H100-80GB-MIG-1g.10gb+me", "nvidia:A100-40GB-MIG-1g.12gb.me", "nvidia:RTX-PRO-6000-MIG-1g.24gb+gfx",
        "nvidia:RTX-9999-24GB", "nvidia:0x2b99", "amd:gfx1151", "amd:0x1234", "intel:0x56ff", "tpu:0x0f00",
        "neuron:0x7f64",
    )  # fmt: skip
    [device] = live.fleet.agent("cpu-0").facts["devices"]
    devices = [device | {"backend": kind.partition(":")[0], "kind": kind, "index": 0} for kind in kinds]
    live.fleet.tell(live.service, "cpu-0", devices=[device, *devices])
    for kind in kinds:
        for begun in (kind.partition(":")[0] + ":", kind[:-3], kind):
            for complete in (completion_values.kinds, completion_values.accelerators, completion_values.kind_or_pool):
                wait_for(lambda begun=begun, kind=kind, complete=complete: kind in complete(begun), (begun, kind))
        assert accelerators(kind)
    assert "cuda:0x2b99" in wait_for(lambda: completion_values.accelerators("cuda:0x"))


def test_without_a_server_nothing_is_said_and_nothing_started(home, polyfleet, tmp_path):
    for typed in ("submit --pool ", "logs ", "node drain ", "checkpoint show "):
        assert asked(polyfleet, typed) == []
    assert not (tmp_path / "home").exists()


def test_a_line_that_makes_no_sense_is_not_complained_of(home, polyfleet):
    for typed in ("no-such-verb ", "submit --accelerators", "submit --nonsense ", "jobs --limit x ", "submit 'open"):
        asked(polyfleet, typed)
