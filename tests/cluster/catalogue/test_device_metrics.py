"""The table of device metrics is enough for a new one, from the driver to `polyfleet top` and the docs."""

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.catalogue.device_metrics import BENCHMARK_METRICS, DEVICE_METRICS, LIVE_METRICS, DeviceMetric

ROOT = Path(__file__).parents[3]

NEW_ROW = """
import sys
sys.path.insert(0, "docs")
from cluster.catalogue import device_metrics as table

table.DEVICE_METRICS += (
    table.DeviceMetric(
        name="fan_rpm", meaning="speed of the fan", unit="rpm", heading="FAN", is_integer=True, in_benchmarks=True,
        nvidia=table.NvmlCall("nvmlDeviceGetFanSpeed", "FAN_ZERO"), amd=table.SysfsFile("hwmon/hwmon*/fan1_input"),
    ),
)
table.LIVE_METRICS += table.DEVICE_METRICS[-1:]
table.BENCHMARK_METRICS += table.DEVICE_METRICS[-1:]

from pathlib import Path
from rich.console import Console
from cluster.serialization import from_plain, to_plain
from cluster.types import Device, NodeFacts
from orchestrator.client.top import StepRates, snapshot
from orchestrator.core.controller.draft import Control
from orchestrator.core.controller.nodes import Node
from orchestrator.services.views import node_view
from orchestrator.show.top import top
from workers.devices.discovery.machine import Machine
from workers.devices.discovery.vendors import nvidia_state
from workers.node.device_use import LiveUse

class Nvml:
    "Answers as NVML does for a card that reports its fan alone."
    NVMLError, FAN_ZERO = ValueError, 0
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_CLOCK_MEM = 0, 1, 2
    def nvmlDeviceGetFanSpeed(self, card, number):
        return 2100

assert nvidia_state.read_use(Nvml(), None)["fan_rpm"] == nvidia_state.read_card(Nvml(), None)["fan_rpm"] == 2100

root = Path(sys.argv[1])
file = root / "sys/bus/pci/devices/0000:3b:00.0/hwmon/hwmon3/fan1_input"
file.parent.mkdir(parents=True)
file.write_text("1800")
card = Device("amd", "amd:MI300X", 0, "MI300X", pci_address="0000:3b:00.0")
(use,) = LiveUse(Machine(root=root)).current([card])
assert use.metrics["fan_rpm"] == 1800

here = ("n", "", "", "", "p", "amd", "p", 8, {}, (card,), 1, 1, 1, 0.0, 1, 1, "/s")
facts = from_plain(NodeFacts, to_plain(NodeFacts(*here, use=(use,))))
view = node_view(Node("n", "r", 0.0, facts), Control(), 0.0, {})
assert view["use"][0]["fan_rpm"] == 1800

shown = snapshot([view], [], StepRates(), "2026-11-20T23:14:20+00:00")
assert shown["nodes"][0]["devices"][0]["fan_rpm"] == 1800
console = Console(width=200)
with console.capture() as capture:
    console.print(top(shown))
assert "FAN" in capture.get() and "1800 rpm" in capture.get(), capture.get()

import generate
assert any(line.startswith("| `fan_rpm` | rpm | speed of the fan | FAN | yes |") for line in generate.metrics())
"""


def test_a_new_row_is_all_that_a_new_metric_needs(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", NEW_ROW, tmp_path], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_metrics_have_names_of_their_own_and_each_has_a_reader():
    names = [metric.name for metric in DEVICE_METRICS]
    assert len(names) == len(set(names)) and not {"backend", "index", "kind", "name", "job"} & set(names)
    assert {*LIVE_METRICS, *BENCHMARK_METRICS} == set(DEVICE_METRICS)
    assert all(metric.nvidia or metric.amd for metric in DEVICE_METRICS)


@pytest.mark.parametrize(
    ("is_integer", "raw", "divisor", "value"), [(True, 7.0, 1, 7), (False, 7, 1, 7.0), (False, 412_300, 1000, 412.3)]
)
def test_a_value_of_a_driver_gets_the_unit_and_the_type_of_its_metric(is_integer, raw, divisor, value):
    converted = DeviceMetric(name="x", meaning="x", unit="x", is_integer=is_integer).convert(raw, divisor)
    assert (converted, type(converted)) == (value, type(value))
