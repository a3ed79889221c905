"""What AMD SMI knows beyond sysfs, where its Python library (of ROCm) is installed: names, drivers, faults, heat.

`ask` is what it says as JSON-like data; `tell` adds that to the devices KFD told of. Not run on hardware so far.
Source: AMD's reference of the AMD SMI Python API.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from cluster.types import Device, Finding
from workers.discovery.card_reply import Answer
from workers.discovery.machine import sysfs_address

# Fields of amdsmi_get_violation_status that are 1 while something slows the clock.
SLOWED = {
    "active_prochot_thrm": "heat (the chip's own alarm)",
    "active_socket_thrm": "heat of its socket",
    "active_vr_thrm": "heat of its voltage regulators",
    "active_hbm_thrm": "heat of its memory",
}


def installed() -> bool:
    return find_spec("amdsmi") is not None


def query() -> dict[str, Any]:
    """{"cards": […]}, a card with `pci`, `name`, `driver`, `ecc_uncorrected`, `slowed`; or {"error"}."""
    try:
        import amdsmi as smi
    except Exception as e:  # it loads ROCm's C library at import, and raises what comes when that is of another release
        return {"error": str(e)}
    try:
        smi.amdsmi_init()
        try:
            handles = smi.amdsmi_get_processor_handles()
            return {"cards": [ask_card(smi, handle, number) for number, handle in enumerate(handles)]}
        finally:
            smi.amdsmi_shut_down()
    except smi.AmdSmiException as e:
        return {"error": _words(e)}


def ask_card(smi: Any, handle: Any, number: int = 0) -> dict[str, Any]:
    """`failed`: call -> why it did not answer; what it would have told is None. Not every card, driver or virtual
    machine supports everything, which is no failure.
    """
    failed: dict[str, str] = {}

    def call(name: str) -> Any:
        if (function := getattr(smi, name, None)) is None:
            return None  # of a newer AMD SMI
        try:
            return function(handle)
        except smi.AmdSmiException as e:
            if "NOT_SUPPORTED" not in (words := _words(e)):
                failed[name] = words
        return None

    def field(name: str, key: str) -> Any:
        told = call(name)
        return told.get(key) if isinstance(told, dict) else None

    slowed = call("amdsmi_get_violation_status")
    return {
        "number": number,
        "pci": call("amdsmi_get_gpu_device_bdf") or "",
        "name": field("amdsmi_get_gpu_asic_info", "market_name"),
        "driver": field("amdsmi_get_gpu_driver_info", "driver_version"),
        "ecc_uncorrected": field("amdsmi_get_gpu_total_ecc_count", "uncorrectable_count"),
        "slowed": [key for key in SLOWED if slowed.get(key) in (1, True)] if isinstance(slowed, dict) else [],
        "failed": failed,
    }


def _words(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def energy_reader(address: str) -> tuple[str, Callable[[], float] | None]:
    """(where joules are read, a function of joules since the driver was loaded) of the card at a PCI address, or ("why
    not", None).
    """
    if not installed():
        return "AMD SMI's library is not in this environment", None
    try:
        import amdsmi as smi

        smi.amdsmi_init()
    except Exception as e:  # as in `ask`
        return f"AMD SMI reports no energy: {e}", None
    return energy_counter(smi, address)


def energy_counter(smi: Any, address: str) -> tuple[str, Callable[[], float] | None]:
    """amdsmi_get_energy_count: an accumulator in units of `counter_resolution` microjoules; none in a virtual guest."""
    try:
        handle = smi.amdsmi_get_processor_handle_from_bdf(address)
        smi.amdsmi_get_energy_count(handle)
    except smi.AmdSmiException as e:
        return f"AMD SMI reports no energy: {e}", None

    def joules() -> float:
        told = smi.amdsmi_get_energy_count(handle)
        return float(told["energy_accumulator"] * told["counter_resolution"]) / 1e6

    return "AMD SMI energy accumulator", joules


def add_details(devices: Sequence[Device], said: dict[str, Any]) -> tuple[list[Device], list[Finding]]:
    """Devices with what was said of the card at their address, and faults of cards of ours. Partitions of one card
    keep what KFD told: they share an address.
    """
    if error := said.get("error"):
        return list(devices), [
            Finding("info", "amd", f"details of cards come from sysfs only: AMD SMI failed: {error}", "update ROCm")
        ]
    placed = [(sysfs_address(Answer("", "AMD SMI", card).text("pci")), card) for card in said["cards"]]
    cards = dict(placed)
    at = Counter(d.pci_address for d in devices)
    told = [_with(d, cards[d.pci_address]) if d.pci_address in cards and at[d.pci_address] == 1 else d for d in devices]
    return told, [f for address, card in placed if address in at or not address for f in _faults(address, card)]


def _with(device: Device, card: dict[str, Any]) -> Device:
    answer = Answer("", "AMD SMI", card)
    name = answer.text("name", device.name) if device.name.startswith("AMD gfx") else device.name
    return replace(device, name=name, driver_version=device.driver_version or answer.text("driver"))


def _faults(address: str, card: dict[str, Any]) -> list[Finding]:
    who = f"the card at {address}" if address else f"card {card.get('number', '')} of AMD SMI"
    found = []
    if address and isinstance(errors := card.get("ecc_uncorrected"), int) and errors:
        found.append(memory_errors(address, errors))
    if causes := " and ".join(SLOWED[field] for field in card.get("slowed", [])):
        message = f"{who} runs below its clock because of {causes}"
        found.append(Finding("warning", "amd", message, "check fans, inlet temperature and power"))
    remedy = "run amd-smi by hand; a reset of the card, a reboot or another driver may be needed"
    for name, why in card.get("failed", {}).items():
        found.append(Finding("warning", "amd", f"{who}: {name} failed: {why}", remedy))
    return found


def memory_errors(address: str, errors: int) -> Finding:
    """The one finding of a card whose memory failed, whoever counted."""
    return Finding(
        "error",
        "amd",
        f"the card at {address} has had {errors} memory errors that ECC could not correct",
        "reset it or reboot; if they come back, have it replaced",
    )
