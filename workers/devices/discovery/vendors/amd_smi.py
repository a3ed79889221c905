"""Details from AMD SMI, if ROCm's Python library for it is installed: names, drivers, faults, heat.

`query` returns them as JSON-like data; `add_details` adds them to the devices from KFD. Not yet run on hardware.
Source: AMD's reference of the AMD SMI Python API.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from cluster.types import Device, Finding
from workers.devices.discovery.card_reply import CardReply
from workers.devices.discovery.machine import sysfs_address

# Fields of amdsmi_get_violation_status that are 1 while the clock is throttled.
THROTTLE_CAUSES = {
    "active_prochot_thrm": "heat (the chip's own alarm)",
    "active_socket_thrm": "heat of its socket",
    "active_vr_thrm": "heat of its voltage regulators",
    "active_hbm_thrm": "heat of its memory",
}


def installed() -> bool:
    return find_spec("amdsmi") is not None


def query() -> dict[str, Any]:
    """Return {"cards": […]}, each with `pci`, `name`, `driver`, `ecc_uncorrected`, `slowed`; or {"error"}."""
    try:
        import amdsmi as smi
    except Exception as e:  # the import loads ROCm's C library, which raises anything if it is from another release
        return {"error": str(e)}
    try:
        smi.amdsmi_init()
        try:
            handles = smi.amdsmi_get_processor_handles()
            return {"cards": [query_card(smi, handle, number) for number, handle in enumerate(handles)]}
        finally:
            smi.amdsmi_shut_down()
    except smi.AmdSmiException as e:
        return {"error": _error_text(e)}


def query_card(smi: Any, handle: Any, number: int = 0) -> dict[str, Any]:
    """Query one card. `failed` maps a failed call to the reason; its values are None.

    A call that the card, driver or virtual machine does not support is not a failure.
    """
    failed: dict[str, str] = {}

    def call(name: str) -> Any:
        if (function := getattr(smi, name, None)) is None:
            return None  # only newer releases of AMD SMI have this function
        try:
            return function(handle)
        except smi.AmdSmiException as e:
            if "NOT_SUPPORTED" not in (error := _error_text(e)):
                failed[name] = error
        return None

    def field(name: str, key: str) -> Any:
        reply = call(name)
        return reply.get(key) if isinstance(reply, dict) else None

    slowed = call("amdsmi_get_violation_status")
    return {
        "number": number,
        "pci": call("amdsmi_get_gpu_device_bdf") or "",
        "name": field("amdsmi_get_gpu_asic_info", "market_name"),
        "driver": field("amdsmi_get_gpu_driver_info", "driver_version"),
        "ecc_uncorrected": field("amdsmi_get_gpu_total_ecc_count", "uncorrectable_count"),
        "slowed": [key for key in THROTTLE_CAUSES if slowed.get(key) in (1, True)] if isinstance(slowed, dict) else [],
        "failed": failed,
    }


def _error_text(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def energy_reader(address: str) -> tuple[str, Callable[[], float] | None]:
    """Return (source, function that reads joules since the driver was loaded) for a card, or (reason, None)."""
    if not installed():
        return "AMD SMI's library is not installed in this environment", None
    try:
        import amdsmi as smi

        smi.amdsmi_init()
    except Exception as e:  # as in `query`
        return f"AMD SMI has no energy counter: {e}", None
    return energy_counter(smi, address)


def energy_counter(smi: Any, address: str) -> tuple[str, Callable[[], float] | None]:
    """As `energy_reader`, by amdsmi_get_energy_count: units of `counter_resolution` microjoules; not in VMs."""
    try:
        handle = smi.amdsmi_get_processor_handle_from_bdf(address)
        smi.amdsmi_get_energy_count(handle)
    except smi.AmdSmiException as e:
        return f"AMD SMI has no energy counter: {e}", None

    def joules() -> float:
        reply = smi.amdsmi_get_energy_count(handle)
        return float(reply["energy_accumulator"] * reply["counter_resolution"]) / 1e6

    return "AMD SMI energy accumulator", joules


def add_details(devices: Sequence[Device], reply: dict[str, Any]) -> tuple[list[Device], list[Finding]]:
    """Add details to the devices, matched by PCI address, and report faults of these cards.

    Partitions of a card share its address, so they keep KFD's values.
    """
    if error := reply.get("error"):
        return list(devices), [
            Finding("info", "amd", f"details of cards come from sysfs only: AMD SMI failed: {error}", "update ROCm")
        ]
    by_address = [(sysfs_address(CardReply("", "AMD SMI", card).text("pci")), card) for card in reply["cards"]]
    cards = dict(by_address)
    at = Counter(d.pci_address for d in devices)
    detailed = [
        _with(d, cards[d.pci_address]) if d.pci_address in cards and at[d.pci_address] == 1 else d for d in devices
    ]
    return detailed, [f for address, card in by_address if address in at or not address for f in _faults(address, card)]


def _with(device: Device, card: dict[str, Any]) -> Device:
    reply = CardReply("", "AMD SMI", card)
    name = reply.text("name", device.name) if device.name.startswith("AMD gfx") else device.name
    return replace(device, name=name, driver_version=device.driver_version or reply.text("driver"))


def _faults(address: str, card: dict[str, Any]) -> list[Finding]:
    label = f"the card at {address}" if address else f"card {card.get('number', '')} of AMD SMI"
    findings = []
    if address and isinstance(errors := card.get("ecc_uncorrected"), int) and errors:
        findings.append(memory_errors(address, errors))
    if causes := " and ".join(THROTTLE_CAUSES[field] for field in card.get("slowed", [])):
        message = f"{label} runs below its clock because of {causes}"
        findings.append(Finding("warning", "amd", message, "check fans, inlet temperature and power"))
    remedy = "run amd-smi by hand; a reset of the card, a reboot or another driver may be needed"
    for name, reason in card.get("failed", {}).items():
        findings.append(Finding("warning", "amd", f"{label}: {name} failed: {reason}", remedy))
    return findings


def memory_errors(address: str, errors: int) -> Finding:
    """Finding about uncorrectable memory errors of a card, the same for each source of the count."""
    return Finding(
        "error",
        "amd",
        f"the card at {address} has had {errors} memory errors that ECC could not correct",
        "reset it or reboot; if they come back, have it replaced",
    )
