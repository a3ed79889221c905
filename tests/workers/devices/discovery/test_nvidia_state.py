"""A card's clocks, heat and users, from NVML's answers made by hand: no card was asked."""

import pytest

from workers.devices.discovery.vendors import nvidia_state


class NVMLError(Exception):
    pass


class ReconstructedNvml:
    """Answers as the NVML API reference describes them; power is what this card does not tell."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    class Process:
        pid = 4711

    def nvmlDeviceGetClockInfo(self, card, which):
        return {1: 1980, 2: 3201}[which]

    def nvmlDeviceGetTemperature(self, card, which):
        return 66

    def nvmlDeviceGetPowerUsage(self, card):
        raise NVMLError("Not Supported")

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card):
        return 0x40 | 0x1  # heat, and idle, which is no slowing

    class Utilization:
        gpu, memory = 87, 40

    class Memory:
        total, free, used = 80 << 30, 20 << 30, 60 << 30

    def nvmlDeviceGetUtilizationRates(self, card):
        return self.Utilization

    def nvmlDeviceGetMemoryInfo(self, card):
        return self.Memory

    def nvmlDeviceGetComputeRunningProcesses(self, card):
        return [self.Process]


def test_what_a_card_tells_is_told_and_what_it_does_not_is_none():
    assert nvidia_state.read_card(ReconstructedNvml(), None) == {
        "sm_mhz": 1980, "memory_mhz": 3201, "temperature_c": 66, "power_w": None, "slowed_by": ["heat (hardware)"],
        "pids": [4711],
    }  # fmt: skip


def test_how_busy_a_card_is_is_told_with_what_it_uses():
    assert nvidia_state.read_use(ReconstructedNvml(), None) == {
        "busy_percent": 87.0, "used_memory_bytes": 60 << 30, "power_w": None, "temperature_c": 66,
    }  # fmt: skip


class Slice(ReconstructedNvml):
    """Of MIG, which has no utilization."""

    def nvmlDeviceGetUtilizationRates(self, card):
        raise NVMLError("Not Supported")


def test_a_slice_tells_its_memory_only():
    told = nvidia_state.read_use(Slice(), None)
    assert (told["busy_percent"], told["used_memory_bytes"]) == (None, 60 << 30)


@pytest.mark.gpu
def test_a_real_card_tells_its_state():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    told = nvidia_state.card_state(uuid)
    assert told["sm_mhz"] > 0 and told["temperature_c"] > 0
    use = nvidia_state.card_use(uuid)
    assert 0 <= use["busy_percent"] <= 100 and use["used_memory_bytes"] > 0
    source, joules = nvidia_state.energy_reader(uuid)
    assert source == "NVML total energy" and joules() > 0
