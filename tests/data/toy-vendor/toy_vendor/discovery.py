from cluster import catalogue
from cluster.types import Device
from workers.devices.discovery.machine import Machine


def present(machine: Machine) -> bool:
    return "TOY_DEVICES" in machine.environ


def find(machine: Machine):
    card = catalogue.match_device("toy", name="Toy T1 Mini", memory_bytes=8 << 30)
    return [
        Device("toy", card.kind, index, "Toy T1 Mini", total_memory_bytes=8 << 30, architecture=card.architecture)
        for index in range(int(machine.environ["TOY_DEVICES"]))
    ], []
