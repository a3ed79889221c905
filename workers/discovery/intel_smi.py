"""What Intel's `xpu-smi` knows beyond sysfs, where it is installed: memory in use, the driver, names. It asks Level
Zero's management interface, which opens no device for computing. Not run on hardware so far.

Source: the user guide of Intel's XPU Manager, `xpu-smi discovery`.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from cluster.vocabulary import Device, Finding
from workers.discovery.machine import Machine, sysfs_address, tool_output

TOOL = "xpu-smi"
# All calls together must end before the child that makes them.
CALL_TIMEOUT_S = 4.0


def ask(machine: Machine) -> tuple[list[dict[str, Any]], str]:
    """(a row per card, why there are none). ([], "") without the tool. The list has addresses only; details are asked
    card by card. Numbers are texts.
    """
    tool = shutil.which(TOOL, path=machine.environ.get("PATH", ""))
    if tool is None:
        return [], ""
    listed, problem = _json([tool, "discovery", "-j"], machine)
    rows = []
    for number in [] if problem else [card["device_id"] for card in listed["device_list"]]:
        row, problem = _json([tool, "discovery", "-d", str(number), "-j"], machine)
        if problem:
            break
        rows.append(row)
    return rows, problem


def _json(command: list[str], machine: Machine) -> tuple[Any, str]:
    said, problem = tool_output(command, machine.environ, CALL_TIMEOUT_S)
    if problem:
        return None, problem
    try:
        return json.loads(said), ""
    except ValueError:
        return None, f"{TOOL} printed {said.strip()[:40]!r}, which is no JSON"


def tell(devices: Sequence[Device], machine: Machine) -> tuple[list[Device], list[Finding]]:
    """Devices with what the tool says of the card at their address; a tile has an equal share of its memory."""
    rows, problem = ask(machine)
    cards = {sysfs_address(str(row.get("pci_bdf_address", ""))): row for row in rows if isinstance(row, dict)}
    told = [_with(d, cards[d.pci_address]) if d.pci_address in cards else d for d in devices]
    remedy = f"run {TOOL} by hand; its service or Level Zero may be missing"
    return told, [Finding("info", "intel", f"told by sysfs only: {problem}", remedy)] if problem else []


def _with(device: Device, card: dict[str, Any]) -> Device:
    tiles = int(device.properties.get("tiles") or 1)
    total, free = (_number(card.get(f"memory_{which}_size_byte")) for which in ("physical", "free"))
    return replace(
        device,
        name=str(card.get("device_name") or device.name),
        total_memory_bytes=device.total_memory_bytes or (total and total // tiles),
        free_memory_bytes=free and free // tiles,
        driver_version=device.driver_version or str(card.get("driver_version") or ""),
    )


def _number(text: Any) -> int | None:
    return int(text) if str(text).isdigit() else None
