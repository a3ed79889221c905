"""Each vendor is read in a child: what hangs or prints garbage there costs one finding that names it."""

import os
import stat

import psutil
import pytest
from patience import sufficient_limit, wait_for

from cluster.types import Finding
from workers.devices.discovery import discover
from workers.devices.discovery.machine import Machine, tool_output
from workers.devices.discovery.vendor_probe import probe

LIMITS_S = range(2, 40, 4)
"""Of a probe. Each step is less than TOOL_TIMEOUT_S, so that one ends while the tool in the child hangs."""


def has_text(file):
    return file.exists() and file.read_text()


def tool(folder, name, text):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def test_a_driver_whose_file_never_answers_costs_its_vendor_only(machine):
    """A pipe nobody writes to: reading it blocks for ever, as files of a hung driver do."""
    here = machine("intel-max-1550")
    hung = here.path("sys/class/drm/card0/device/tile0/physical_vram_size_bytes")
    hung.unlink()
    os.mkfifo(hung)
    assert stat.S_ISFIFO(hung.stat().st_mode)
    limit_s, results = sufficient_limit(lambda s: probe(["intel", "cpu"], here, s), lambda r: r[1][0], LIMITS_S)
    (none, (finding,)), (cpus, said) = results
    assert none == []
    assert finding.subject == "intel"
    assert "looking for Intel GPU devices failed" in finding.message
    assert f"did not finish within {limit_s} s" in finding.message
    assert len(cpus) == 1
    assert said == []


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("printf 'Segmentation \\377 fault'", "neuron-ls printed 'Segmentation \ufffd fault', which is not JSON"),
        ('echo \'{"error": "no driver"}\'', "neuron-ls printed no list of chips"),
    ],
)
def test_a_tool_that_prints_garbage_leaves_what_pci_ids_tell(script, said, machine, tmp_path):
    path = tool(tmp_path / "bin", "neuron-ls", script)
    devices, findings = discover("neuron", Machine(machine("neuron-trn1").root, {"PATH": path}, "Linux"))
    (finding,) = [f for f in findings if f.message.startswith("details of chips come from their PCI ids only: ")]
    assert [(d.kind, d.total_memory_bytes) for d in devices] == [("neuron:trn1", 16 << 30)] * 2
    assert (finding.level, finding.subject) == ("info", "neuron")
    assert finding.message == f"details of chips come from their PCI ids only: {said}"


def test_what_a_child_finds_arrives_whole(machine):
    here = machine("tpu-v5e-vfio", GCE_METADATA_HOST="127.0.0.1:9")
    devices, findings = discover("tpu", here)
    assert [d.kind for d in devices] == ["tpu:v5e"] * 4
    assert all(isinstance(f, Finding) for f in findings)


def test_a_tool_that_hangs_ends_with_the_probe_that_asked_it(machine, tmp_path):
    """It has a session of its own, so that the probe can end it alone; it ignores SIGTERM, and so does its child."""
    script = f"trap '' TERM; echo $$ > {tmp_path}/tool; sh -c 'echo $$ > {tmp_path}/child; exec sleep 600' & wait"
    path = tool(tmp_path / "bin", "neuron-ls", script)
    here = Machine(machine("neuron-trn1").root, {"PATH": path}, "Linux")
    files = [tmp_path / name for name in ("tool", "child")]
    limit_s, ((_, (finding,)),) = sufficient_limit(
        lambda s: probe(["neuron"], here, s), lambda _: all(map(has_text, files)), LIMITS_S
    )
    assert f"did not finish within {limit_s} s" in finding.message
    pids = [int(file.read_text()) for file in files]
    wait_for(lambda: not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"])


def test_what_a_tool_has_left_behind_ends_with_it(tmp_path):
    """It is a child of nobody here: only the session tells that the tool has started it."""
    script = f"(sh -c 'echo $$ > {tmp_path}/left; exec sleep 600' &); sleep 600"
    left = tmp_path / "left"
    limit_s, (_, problem) = sufficient_limit(
        lambda s: tool_output(["sh", "-c", script], dict(os.environ), s), lambda _: has_text(left), LIMITS_S
    )
    assert problem == f"sh did not finish within {limit_s} s"
    pid = int(left.read_text())
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")
