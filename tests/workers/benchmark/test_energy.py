"""Counters of joules, from files and answers made by hand: no counter of hardware was read."""

from workers.benchmark import energy
from workers.devices.discovery.vendors import amd_smi


class ReconstructedSmi:
    """As AMD's reference of the Python API describes it: resolution in microjoules, nothing in a virtual guest."""

    class AmdSmiException(Exception):
        pass

    def __init__(self, guest=False):
        self.guest, self.count = guest, 1_000_000

    def amdsmi_get_processor_handle_from_bdf(self, address):
        return address

    def amdsmi_get_energy_count(self, handle):
        if self.guest:
            raise self.AmdSmiException("AMDSMI_STATUS_NOT_SUPPORTED")
        self.count += 200_000
        return {"energy_accumulator": self.count, "counter_resolution": 15.26, "timestamp": 1}


def test_an_amd_card_counts_in_units_of_its_resolution():
    source, joules = amd_smi.energy_counter(ReconstructedSmi(), "0000:c1:00.0")
    assert source == "AMD SMI energy accumulator"
    first = joules()
    assert abs(joules() - first - 200_000 * 15.26 / 1e6) < 1e-9


def test_a_virtual_guest_has_no_counter_and_says_why():
    assert amd_smi.energy_counter(ReconstructedSmi(guest=True), "0000:c1:00.0") == (
        "AMD SMI has no energy counter: AMDSMI_STATUS_NOT_SUPPORTED", None,
    )  # fmt: skip


def test_packages_are_summed_without_their_parts_and_over_the_end_of_their_range(tmp_path):
    def counter(name, energy_uj):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "energy_uj").write_text(f"{energy_uj}\n")
        (tmp_path / name / "max_energy_range_uj").write_text("1000000\n")

    for name in ("intel-rapl:0", "intel-rapl:1", "intel-rapl:0:0"):
        counter(name, 900_000)
    source, joules = energy._rapl(tmp_path)
    assert source == "RAPL, all packages"
    before = joules()
    counter("intel-rapl:0", 100_000)
    counter("intel-rapl:1", 950_000)
    counter("intel-rapl:0:0", 999_999)
    assert abs(joules() - before - 0.25) < 1e-9


def test_a_machine_without_counters_has_no_number(tmp_path):
    assert energy._rapl(tmp_path) == ("this machine has no powercap counters", None)
