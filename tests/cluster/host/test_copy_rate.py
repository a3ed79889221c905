"""The limit for copies, and processes of one machine that keep to it together. Time is data here."""

import pytest
from passing_time import PassingTime

from cluster.errors import UserError
from cluster.host.copy_rate import PIECE_BYTES, StorePacer, copy_bytes_per_s

MB = 10**6


@pytest.mark.parametrize(("text", "rate"), [("", None), ("50MB", 50 * MB), ("1GiB", 1 << 30)])
def test_the_limit_is_bytes_per_second_or_none(text, rate):
    assert copy_bytes_per_s({"POLYFLEET_COPY_RATE": text}) == rate


@pytest.mark.parametrize(
    ("text", "said"), [("50", "'50' is not a size"), ("10kB", "10kB per second is below the minimum of 1MB")]
)
def test_what_is_no_rate_is_refused_with_the_settings_name(text, said):
    with pytest.raises(UserError, match="POLYFLEET_COPY_RATE") as refused:
        copy_bytes_per_s({"POLYFLEET_COPY_RATE": text})
    assert said in refused.value.message and "50MB" in refused.value.remedy


def test_processes_that_share_a_file_transfer_one_after_the_other(tmp_path):
    time = PassingTime()
    a, b = (StorePacer(MB, tmp_path / "rate", time.now, time.sleep) for _ in range(2))
    for pacer, size, now_s in ((a, 2 * MB, 100.0), (b, 3 * MB, 102.0), (a, MB, 105.0)):
        pacer.wait(size)
        assert time.now_s == pytest.approx(now_s)
    time.now_s += 60.0
    for now_s in (165.0, 166.0):
        b.wait(MB)
        assert time.now_s == pytest.approx(now_s), "unused time is not credited"


def test_a_large_transfer_is_many_pieces_so_that_others_come_between(tmp_path):
    time = PassingTime()
    pacer = StorePacer(PIECE_BYTES, tmp_path / "rate", time.now, time.sleep)
    pacer.wait(10 * PIECE_BYTES)
    assert time.now_s == pytest.approx(109.0), "the last piece does not wait for itself"


@pytest.mark.parametrize("text", ["", "no number\n", f"{10**9:024.6f}\n"])
def test_what_another_boot_or_a_fault_left_in_the_file_stops_nothing(tmp_path, text):
    time = PassingTime()
    (tmp_path / "rate").write_text(text)
    StorePacer(MB, tmp_path / "rate", time.now, time.sleep).wait(MB)
    assert time.now_s == 100.0
