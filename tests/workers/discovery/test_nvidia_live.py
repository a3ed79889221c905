"""A card's clocks, heat and users, from NVML's answers made by hand: no card was asked."""

import pytest

from workers.discovery import nvidia_live


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

    def nvmlDeviceGetComputeRunningProcesses(self, card):
        return [self.Process]


def test_what_a_card_tells_is_told_and_what_it_does_not_is_none():
    assert nvidia_live.read_card(ReconstructedNvml(), None) == {
        "sm_mhz": 1980, "memory_mhz": 3201, "temperature_c": 66, "power_w": None, "slowed_by": ["heat (hardware)"],
        "pids": [4711],
    }  # fmt: skip


@pytest.mark.gpu
def test_a_real_card_tells_its_state():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU here")
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    told = nvidia_live.card_state(uuid)
    assert told["sm_mhz"] > 0 and told["temperature_c"] > 0
    source, joules = nvidia_live.energy_reader(uuid)
    assert source == "NVML total energy" and joules() > 0
