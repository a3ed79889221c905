"""A package's build for the CPU is taken where an index has it, without a word where none answers."""

import socket
import subprocess
from pathlib import Path

import pytest

from cluster.environments import environments, recipes
from cluster.environments.recipes import CPUBuild, Recipe
from cluster.errors import UserError

pytestmark = pytest.mark.full

PROBE = Recipe(
    "probe",
    "# A package, and one that only its larger build needs.\npolyfleet-probe==1.0\nheavy-probe==1.0\n",
    ("polyfleet_probe",),
    download_bytes=4_200_000_000,
    cpu_build=CPUBuild("polyfleet-probe", ("heavy-",), download_bytes=500_000_000),
)


@pytest.fixture
def usual(new_index, monkeypatch, tmp_path):
    """The index that pip's settings name: without the build for the CPU."""
    monkeypatch.setenv("POLYFLEET_CACHE", str(tmp_path / "cache"))
    index = new_index("usual")
    index.add("polyfleet-probe")
    index.add("heavy-probe")
    monkeypatch.setenv("PIP_INDEX_URL", index.url)
    return index


@pytest.fixture
def for_cpu(new_index, monkeypatch):
    """The index beside it, as PyTorch's is."""
    index = new_index("for-cpu")
    index.add("polyfleet-probe", "1.0+cpu")
    index.add("heavy-probe")
    monkeypatch.setenv("POLYFLEET_TORCH_INDEX", index.url)
    return index


@pytest.fixture
def closed(monkeypatch):
    """An address where nobody listens."""
    with socket.socket() as once:
        once.bind(("127.0.0.1", 0))
        monkeypatch.setenv("POLYFLEET_TORCH_INDEX", f"http://127.0.0.1:{once.getsockname()[1]}")


def installed(python: Path) -> list[str]:
    code = "from importlib.metadata import distributions as d; print(*sorted(f'{x.name}=={x.version}' for x in d()))"
    return subprocess.run([python, "-I", "-c", code], capture_output=True, text=True, check=True).stdout.split()


def test_the_index_beside_pips_settings_is_asked_for_that_package_alone(usual, for_cpu):
    said: list[str] = []
    python = environments.create(PROBE, said.append)
    assert installed(python) == ["polyfleet-probe==1.0+cpu"]
    assert python.parent.parent.name == PROBE.for_cpu.key != PROBE.key
    assert {path.split("/")[1] for path in for_cpu.asked} == {"polyfleet-probe"}
    assert not [path for path in usual.asked if path.endswith(".whl")]
    assert said[1] == (
        "downloads about 0.5 GB, needs 0.2 GB of free disk while it is created; polyfleet-probe==1.0+cpu from 127.0.0.1"
    )


def test_where_that_index_does_not_answer_the_lock_is_installed_as_it_is(usual, closed, capfd):
    said: list[str] = []
    python = environments.create(PROBE, said.append)
    assert installed(python) == ["heavy-probe==1.0", "polyfleet-probe==1.0"]
    assert python.parent.parent.name == PROBE.key
    assert said[1].startswith("downloads about 4.2 GB, needs 0.2 GB of free disk while it is created; no CPU build of ")
    assert capfd.readouterr() == ("", "")


def test_an_index_that_takes_the_question_and_never_answers_is_given_up(usual, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("POLYFLEET_TORCH_INDEX", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert installed(environments.create(PROBE)) == ["heavy-probe==1.0", "polyfleet-probe==1.0"]


def test_an_index_that_the_users_own_settings_name_is_enough(usual, for_cpu, monkeypatch):
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", for_cpu.url)
    monkeypatch.setenv("POLYFLEET_TORCH_INDEX", "")
    said: list[str] = []
    assert installed(environments.create(PROBE, said.append)) == ["polyfleet-probe==1.0+cpu"]
    assert said[1].endswith("; polyfleet-probe==1.0+cpu")


def test_an_empty_variable_asks_no_other_index(usual, for_cpu, monkeypatch):
    monkeypatch.setenv("POLYFLEET_TORCH_INDEX", "")
    assert "heavy-probe==1.0" in installed(environments.create(PROBE))
    assert for_cpu.asked == []


def test_an_environment_that_is_there_is_used_whichever_build_it_has(usual, for_cpu, monkeypatch):
    monkeypatch.setenv("POLYFLEET_TORCH_INDEX", "")
    large = environments.create(PROBE)
    monkeypatch.setenv("POLYFLEET_TORCH_INDEX", for_cpu.url)
    assert environments.create(PROBE) == environments.path(PROBE) == large
    assert for_cpu.asked == []
    environments.remove("probe")
    small = environments.create(PROBE)
    assert small != large
    monkeypatch.setenv("POLYFLEET_TORCH_INDEX", "")
    assert environments.create(PROBE) == environments.path(PROBE) == small
    assert environments.unsupported_reason(PROBE) == ""


def test_a_build_for_the_cpu_that_does_not_work_is_told_with_the_way_around_it(usual, for_cpu):
    broken = Recipe("probe", PROBE.requirements, ("polyfleet_probe", "heavy_probe"), cpu_build=PROBE.cpu_build)
    with pytest.raises(UserError, match="No module named 'heavy_probe'") as caught:
        environments.create(broken)
    assert caught.value.remedy.startswith("set POLYFLEET_TORCH_INDEX to nothing to use the usual build; ")


def test_a_password_in_the_address_is_neither_told_nor_kept(usual, for_cpu, monkeypatch):
    monkeypatch.setenv("POLYFLEET_TORCH_INDEX", f"http://user:hidden-word@{for_cpu.address}")
    said: list[str] = []
    folder = environments.create(PROBE, said.append).parent.parent
    assert folder.name == PROBE.for_cpu.key
    assert "hidden-word" not in folder.with_name(f"{folder.name}.log").read_text() + "\n".join(said)


def test_less_disk_is_enough_where_the_smaller_build_can_be_had(usual, for_cpu, monkeypatch):
    large = Recipe("probe", PROBE.requirements, building_bytes=10**18, cpu_build=PROBE.cpu_build)
    assert environments.unsupported_reason(large) == ""
    monkeypatch.setenv("POLYFLEET_TORCH_INDEX", "")
    assert "needs 1000000000.0 GB of disk while it is created" in environments.unsupported_reason(large)


def test_the_second_environment_for_the_cpu_differs_by_torchs_build_and_what_that_needs():
    xla = recipes.built_in()["xla"]
    cpu = xla.for_cpu
    gone = {line for line in xla.packages if line not in cpu.packages}
    assert set(cpu.packages) - set(xla.packages) == {"torch==2.8.0+cpu"}
    assert {line.split("==")[0].split("-cu12")[0].split("-")[0] for line in gone} == {"nvidia", "torch", "triton"}
    assert {"torch-xla==2.8.1", "intel-extension-for-pytorch==2.8.0"} < set(cpu.packages)
    assert cpu.key != xla.key
    assert cpu.download_bytes < xla.download_bytes < xla.building_bytes
    assert cpu.variants == (cpu,)
    assert xla.variants == (xla, cpu)
