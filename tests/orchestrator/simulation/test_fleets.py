"""Fleets and failures as people write them in YAML: what is read, and what is refused with its field."""

import re

import pytest

from cluster.errors import UserError
from orchestrator.simulation.fleets import Nodes, Outage, add_failures, read_fleet

FLEET = """
kinds:
  v100: {nodes: 3, devices: 4, mtbf_h: 500, repair_h: 2}
  k80: {nodes: 2, devices: 8}
seed: 7
events:
  - {kind: k80, node: 1, down_h: 12, up_h: 14.5}
"""


@pytest.fixture
def read(tmp_path):
    """`read(text)` of a fleet file, `read(text, faults)` of both."""

    def reading(text, faults=None):
        (tmp_path / "fleet.yaml").write_text(text)
        (tmp_path / "faults.yaml").write_text(faults or "")
        fleet = read_fleet(str(tmp_path / "fleet.yaml") if "\n" in text else text)
        return fleet if faults is None else add_failures(fleet, tmp_path / "faults.yaml")

    return reading


def test_a_file_says_nodes_their_failures_and_outages_that_are_sure(read):
    fleet = read(FLEET)
    assert (fleet.kinds, fleet.devices.tolist()) == (("v100", "k80"), [12, 16])
    assert fleet.failures.nodes == (Nodes(4, 500 * 3600.0, 7200.0), Nodes(8))
    assert fleet.failures.outages == (Outage(1, 1, 12 * 3600.0, 14.5 * 3600.0),)
    assert (fleet.failures.seed, fleet.failures.checkpoint_s) == (7, 600.0)


def test_nodes_that_nobody_says_fail_do_not(read):
    assert read("kinds:\n  v100: {nodes: 3, devices: 4}\n").failures is None
    assert read("v100=4").failures is None


def test_faults_are_said_of_some_kinds_of_any_fleet(read):
    fleet = read("v100=10,k80=3", "nodes: {v100: {size: 4, mtbf_h: 9, repair_h: 1}}\ncheckpoint_every_s: 60\n")
    assert fleet.failures.nodes == (Nodes(4, 9 * 3600.0, 3600.0), Nodes())
    assert [list(fleet.sizes(kind)) for kind in (0, 1)] == [[4, 4, 2], [1, 1, 1]]
    assert fleet.failures.checkpoint_s == 60.0


def test_faults_replace_what_the_fleet_file_says_of_the_kind(read):
    fleet = read(FLEET, "nodes: {k80: {mtbf_h: 9, repair_h: 1}}\nseed: 8\n")
    assert fleet.failures.nodes == (Nodes(4, 500 * 3600.0, 7200.0), Nodes(8, 9 * 3600.0, 3600.0))
    assert (fleet.failures.seed, len(fleet.failures.outages)) == (8, 1)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("nodes: 3", "nodes: 0"), "fleet.yaml, kinds.v100.nodes: 0 is not an integer from 1 to 250000"),
        (("nodes: 3", "nodes: 1.5"), "kinds.v100.nodes: 1.5 is not an integer"),
        (("nodes: 3", "nodes: true"), "kinds.v100.nodes: True is not an integer"),
        (("nodes: 3", "nodes: 9999999"), "is not an integer from 1 to 250000; the nearest valid is 250000"),
        (("nodes: 3, ", ""), "fleet.yaml, kinds.v100.nodes: missing; write `nodes: ...`"),
        (("mtbf_h: 500", "mtbf_h: nan"), "kinds.v100.mtbf_h: 'nan' is not a number from 0.001 to 1e+06"),
        (("mtbf_h: 500", "mtbf_h: .nan"), "fleet.yaml:3: .nan is not a finite number"),
        (("mtbf_h: 500", "mtbf_h: 0"), "mtbf_h: 0 is not a number from 0.001 to 1e+06; the nearest valid is 0.001"),
        ((", repair_h: 2", ""), "kinds.v100.repair_h: missing"),
        (("repair_h: 2", "repairs_h: 2"), "kinds.v100.repairs_h: unknown key; did you mean 'repair_h'?"),
        (("seed: 7", "seeds: 7"), "fleet.yaml, seeds: unknown key; did you mean 'seed'?"),
        (("seed: 7", "seed: -1"), "fleet.yaml, seed: -1 is not an integer from 0"),
        (("seed: 7", "checkpoint_every_s: 0"), "checkpoint_every_s: 0 is not a number from 1 to 1e+07"),
        (("{nodes: 2, devices: 8}", "8"), "fleet.yaml, kinds.k80: 8 is not a mapping"),
        (("kind: k80", "kind: k8"), "fleet.yaml, events[0].kind: the fleet has no kind 'k8'; did you mean 'k80'?"),
        (("node: 1", "node: 2"), "events[0].node: 2 is not an integer from 0 to 1; the nearest valid is 1"),
        (("up_h: 14.5", "up_h: 12"), "events[0].up_h: 12 is not a number from 12.001"),
        (("  - {", "  {"), "fleet.yaml, events: {"),
        ((FLEET, "kinds: {}\n"), "fleet.yaml, kinds: no kind is named"),
        ((FLEET, "a: &a [1]\nkinds: [*a, *a]\n"), "fleet.yaml:1: anchor &a"),
        ((FLEET, "\n"), "fleet.yaml is empty"),
        ((FLEET, "# \n" * 400_000), "fleet.yaml has more than 1 MiB"),
        ((FLEET, "\0\n"), "fleet.yaml is not a YAML file: it has NUL bytes"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_fleet_file_that_is_wrong_is_told_with_its_field(read, change, told):
    assert change[0] in FLEET
    with pytest.raises(UserError, match=re.escape(told)):
        read(FLEET.replace(*change))


@pytest.mark.parametrize(
    ("faults", "told"),
    [
        ("nodes: {v10: {size: 1}}", "faults.yaml, nodes.v10: the fleet has no kind 'v10'; did you mean 'v100'?"),
        ("nodes: {v100: {size: 2}}", "nodes.v100.size: the fleet's nodes of v100 have 4 devices; write 4"),
        ("nodes: {v100: {size: 99}}", "nodes.v100.size: 99 is not an integer from 1 to 12"),
        ("kinds: {v100: {size: 4}}", "faults.yaml, kinds: unknown key"),
    ],
    ids=str,
)
def test_faults_that_do_not_fit_the_fleet_are_told_with_their_field(read, faults, told):
    with pytest.raises(UserError, match=re.escape(told)):
        read(FLEET, faults)


def test_nodes_of_a_fleet_of_counts_need_a_size(read):
    with pytest.raises(UserError, match=re.escape("faults.yaml, nodes.v100.size: missing")):
        read("v100=12", "nodes: {v100: {mtbf_h: 1, repair_h: 1}}")


def test_a_file_that_is_absent_is_told():
    with pytest.raises(UserError, match=r"absent.yaml cannot be read: No such file"):
        read_fleet("absent.yaml")
