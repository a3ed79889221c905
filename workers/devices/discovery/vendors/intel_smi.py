"""Details from Intel's `xpu-smi`, if installed: memory in use, driver, names.

It uses Level Zero's management interface, which opens no device for computing. Not yet run on hardware.
Source: the user guide of Intel's XPU Manager, `xpu-smi discovery`.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cluster.types import Device, Finding
from workers.devices.discovery.card_reply import CardReply
from workers.devices.discovery.card_reply import findings as unread
from workers.devices.discovery.machine import Machine, sysfs_address, tool_output

TOOL = "xpu-smi"
# All calls together must finish before the time-out of the child process that makes them.
CALL_TIMEOUT_S = 4.0


def query(machine: Machine) -> tuple[list[dict[str, Any]], list[str]]:
    """Return (a row per card, problems); ([], []) without the tool.

    The tool's list has only addresses, so details are queried card by card. Numbers are text.
    """
    tool = shutil.which(TOOL, path=machine.environ.get("PATH", ""))
    if tool is None:
        return [], []
    listed, problem = _json([tool, "discovery", "-j"], machine)
    cards = listed.get("device_list") if isinstance(listed, dict) else None
    if not isinstance(cards, list):
        return [], [problem or f"{TOOL} printed no list of cards"]
    rows, problems = [], []
    for position, card in enumerate(cards):
        number = CardReply(f"card {position}", TOOL, card).number("device_id")
        row, problem = _json([tool, "discovery", "-d", str(position if number is None else number), "-j"], machine)
        if isinstance(row, dict):
            rows.append(row)
        else:
            problems.append(f"card {position}: {problem or f'{TOOL} printed no details'}")
            if problem.endswith(f"within {CALL_TIMEOUT_S:g} s"):  # the other cards would exceed the child's time-out
                break
    return rows, problems


def _json(command: list[str], machine: Machine) -> tuple[Any, str]:
    output, problem = tool_output(command, machine.environ, CALL_TIMEOUT_S)
    if problem:
        return None, problem
    try:
        return json.loads(output), ""
    except ValueError:
        return None, f"{TOOL} printed {output.strip()[:40]!r}, which is not JSON"


def add_details(devices: Sequence[Device], machine: Machine) -> tuple[list[Device], list[Finding]]:
    """Add the tool's details to the devices, matched by PCI address."""
    return add(devices, *query(machine))


def add(
    devices: Sequence[Device], rows: list[dict[str, Any]], problems: list[str]
) -> tuple[list[Device], list[Finding]]:
    """Add `rows` and `problems` from `query` to the devices. A tile gets an equal share of its card's memory."""
    replies = [CardReply(f"the card at {row.get('pci_bdf_address')}", TOOL, row) for row in rows]
    cards = {sysfs_address(reply.text("pci_bdf_address")): reply for reply in replies}
    detailed = [_with(d, cards[d.pci_address]) if d.pci_address in cards else d for d in devices]
    remedy = f"run {TOOL} by hand; its service or Level Zero may be missing"
    findings = [
        Finding("info", "intel", f"details of cards come from sysfs only: {problem}", remedy) for problem in problems
    ]
    return detailed, findings + unread("intel", replies, remedy)


def _with(device: Device, reply: CardReply) -> Device:
    tiles = int(device.properties.get("tiles") or 1)
    total, free = (reply.number(f"memory_{which}_size_byte") for which in ("physical", "free"))
    return replace(
        device,
        name=reply.text("device_name", device.name),
        total_memory_bytes=device.total_memory_bytes or (total and total // tiles),
        free_memory_bytes=device.free_memory_bytes if free is None else free // tiles,
        driver_version=device.driver_version or reply.text("driver_version"),
    )
