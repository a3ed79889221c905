"""What Intel's `xpu-smi` knows beyond sysfs, where it is installed: memory in use, the driver, names. It asks Level
Zero's management interface, which opens no device for computing. Not run on hardware so far.

Source: the user guide of Intel's XPU Manager, `xpu-smi discovery`.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cluster.types import Device, Finding
from workers.discovery.card_reply import Answer
from workers.discovery.card_reply import findings as unread
from workers.discovery.machine import Machine, sysfs_address, tool_output

TOOL = "xpu-smi"
# All calls together must end before the child that makes them.
CALL_TIMEOUT_S = 4.0


def query(machine: Machine) -> tuple[list[dict[str, Any]], list[str]]:
    """(a row per card, why there are none of some). ([], []) without the tool. The list has addresses only; details are
    asked card by card. Numbers are texts.
    """
    tool = shutil.which(TOOL, path=machine.environ.get("PATH", ""))
    if tool is None:
        return [], []
    listed, problem = _json([tool, "discovery", "-j"], machine)
    cards = listed.get("device_list") if isinstance(listed, dict) else None
    if not isinstance(cards, list):
        return [], [problem or f"{TOOL} printed no list of cards"]
    rows, problems = [], []
    for place, card in enumerate(cards):
        number = Answer(f"card {place}", TOOL, card).number("device_id")
        row, problem = _json([tool, "discovery", "-d", str(place if number is None else number), "-j"], machine)
        if isinstance(row, dict):
            rows.append(row)
        else:
            problems.append(f"card {place}: {problem or f'{TOOL} printed no details'}")
            if problem.endswith(f"within {CALL_TIMEOUT_S:g} s"):  # nor would the others be told in time
                break
    return rows, problems


def _json(command: list[str], machine: Machine) -> tuple[Any, str]:
    said, problem = tool_output(command, machine.environ, CALL_TIMEOUT_S)
    if problem:
        return None, problem
    try:
        return json.loads(said), ""
    except ValueError:
        return None, f"{TOOL} printed {said.strip()[:40]!r}, which is not JSON"


def add_details(devices: Sequence[Device], machine: Machine) -> tuple[list[Device], list[Finding]]:
    """Devices with what the tool says of the card at their address."""
    return add(devices, *query(machine))


def add(
    devices: Sequence[Device], rows: list[dict[str, Any]], problems: list[str]
) -> tuple[list[Device], list[Finding]]:
    """`rows` and `problems` are what `ask` returns. A tile has an equal share of its card's memory."""
    answers = [Answer(f"the card at {row.get('pci_bdf_address')}", TOOL, row) for row in rows]
    cards = {sysfs_address(answer.text("pci_bdf_address")): answer for answer in answers}
    told = [_with(d, cards[d.pci_address]) if d.pci_address in cards else d for d in devices]
    remedy = f"run {TOOL} by hand; its service or Level Zero may be missing"
    findings = [
        Finding("info", "intel", f"details of cards come from sysfs only: {problem}", remedy) for problem in problems
    ]
    return told, findings + unread("intel", answers, remedy)


def _with(device: Device, answer: Answer) -> Device:
    tiles = int(device.properties.get("tiles") or 1)
    total, free = (answer.number(f"memory_{which}_size_byte") for which in ("physical", "free"))
    return replace(
        device,
        name=answer.text("device_name", device.name),
        total_memory_bytes=device.total_memory_bytes or (total and total // tiles),
        free_memory_bytes=device.free_memory_bytes if free is None else free // tiles,
        driver_version=device.driver_version or answer.text("driver_version"),
    )
