"""Each vendor is read in a child: what hangs or prints garbage there costs one finding that names it."""

import os
import stat

import psutil
import pytest
from patience import wait_for

from cluster.types import Finding
from workers.devices.discovery import discover
from workers.devices.discovery.machine import Machine, tool_output
from workers.devices.discovery.vendor_probe import probe


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
    (none, (finding,)), (cpus, said) = probe(["intel", "cpu"], here, timeout_s=3)
    assert none == []
    assert finding.subject == "intel"
    assert "looking for Intel GPU devices failed" in finding.message
    assert "did not finish within 3 s" in finding.message
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
    ((_, (finding,)),) = probe(["neuron"], here, timeout_s=4)
    assert "did not finish within 4 s" in finding.message
    pids = [int((tmp_path / name).read_text()) for name in ("tool", "child")]
    wait_for(lambda: not [pid for pid in pids if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"])


def test_what_a_tool_has_left_behind_ends_with_it(tmp_path):
    """It is a child of nobody here: only the session tells that the tool has started it."""
    script = f"(sh -c 'echo $$ > {tmp_path}/left; exec sleep 600' &); sleep 600"
    assert tool_output(["sh", "-c", script], dict(os.environ), timeout_s=2)[1] == "sh did not finish within 2 s"
    pid = int((tmp_path / "left").read_text())
    wait_for(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie")
