"""How busy accelerators are, as an AMD driver's files say it; what a driver that hangs costs."""

import os
import threading

import pytest
from patience import LIMIT_S

from cluster.types import Device, DeviceUse
from workers.node.device_use import LiveUse, use_of

FOLDER = "sys/bus/pci/devices/0000:3b:00.0"
CARD = Device("amd", "amd:MI300X", 1, "MI300X", pci_address="0000:3b:00.0")
BUSY = {"busy_percent": 87.0, "used_memory_bytes": 295698432, "power_w": 412.0, "temperature_c": 66.0}


@pytest.fixture
def tree(machine):
    """As the kernel's amdgpu documentation has it; reconstructed."""
    here = machine("amd-mi300x")
    files = {
        "gpu_busy_percent": "87\n",
        "mem_info_vram_used": "295698432\n",
        "hwmon/hwmon3/power1_average": "412000000",
        "hwmon/hwmon3/temp1_input": "66000",
    }
    for name, text in files.items():
        path = here.path(f"{FOLDER}/{name}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return here


def test_an_amd_card_tells_how_busy_it_is_over_sysfs(tree):
    assert use_of(CARD, tree) == DeviceUse("amd", 1, BUSY)
    assert LiveUse(tree).current([CARD]) == (DeviceUse("amd", 1, BUSY),)


def test_what_a_driver_does_not_tell_is_none_and_a_card_without_files_is_left_out(tree):
    tree.path(f"{FOLDER}/gpu_busy_percent").unlink()
    tree.path(f"{FOLDER}/hwmon/hwmon3/power1_average").unlink()
    assert use_of(CARD, tree) == DeviceUse("amd", 1, BUSY | {"busy_percent": None, "power_w": None})
    elsewhere = Device("amd", "amd:MI300X", 0, "MI300X", pci_address="0000:99:00.0")
    assert LiveUse(tree).current([elsewhere, Device("amd", "amd:MI300X", 2, "MI300X")]) == ()


def test_devices_that_tell_nothing_cost_no_thread(tree):
    before = set(threading.enumerate())
    others = [Device("cpu", "cpu", 0, "CPU"), Device("amd", "amd:gfx1036", 0, "APU", unavailable_reason="integrated")]
    assert LiveUse(tree).current(others) == ()
    assert set(threading.enumerate()) <= before  # threads of earlier tests may end meanwhile


def test_a_driver_that_hangs_keeps_one_thread_and_the_facts_go_on(tree):
    path = tree.path(f"{FOLDER}/gpu_busy_percent")
    path.unlink()
    os.mkfifo(path)
    use = LiveUse(tree)
    before = set(threading.enumerate())
    assert use.current([CARD]) == use.current([CARD]) == ()
    reading = use._reading
    assert set(threading.enumerate()) - before == {reading}
    path.write_text("12")
    reading.join(LIMIT_S)
    assert use._newest == (DeviceUse("amd", 1, BUSY | {"busy_percent": 12.0}),)
