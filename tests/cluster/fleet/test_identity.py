"""Whose a fleet's agents and reservations are, kept with its home."""

import threading
from pathlib import Path

import pytest

from cluster.errors import UserError
from cluster.fleet.identity import (
    FILE,
    FORM,
    STORAGE_FILE,
    fleet_identity,
    namespace,
    reservation_prefix,
    storage_identity,
)


def test_a_home_has_one_identity_and_no_two_homes_the_same(tmp_path: Path):
    first = fleet_identity(tmp_path / "a")
    assert FORM.fullmatch(first) and fleet_identity(tmp_path / "a") == first
    assert fleet_identity(tmp_path / "b") != first
    assert (tmp_path / "a" / FILE).stat().st_mode & 0o777 == 0o600


def test_makers_at_once_agree(tmp_path: Path):
    made: list[str] = []
    makers = [threading.Thread(target=lambda: made.append(fleet_identity(tmp_path / "h"))) for _ in range(8)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert len(made) == 8 and len(set(made)) == 1


def test_a_damaged_identity_is_told_and_never_replaced(tmp_path: Path):
    fleet_identity(tmp_path)
    (tmp_path / FILE).write_text("lost\n")
    with pytest.raises(UserError, match="does not contain the fleet's identity"):
        fleet_identity(tmp_path)
    assert (tmp_path / FILE).read_text() == "lost\n"


def test_names_in_a_shared_cluster_carry_it():
    assert namespace("0123456789abcdef") == "polyfleet-0123456789abcdef"
    assert reservation_prefix("0123456789abcdef") == "polyfleet-0123456789abcdef-attempt-"


def test_a_checkpoint_folder_has_one_identity_for_all_who_see_it(tmp_path: Path):
    made: list[str] = []
    makers = [threading.Thread(target=lambda: made.append(storage_identity(tmp_path))) for _ in range(8)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert len(made) == 8 and len(set(made)) == 1 and FORM.fullmatch(made[0])
    assert [p.name for p in tmp_path.iterdir()] == [STORAGE_FILE]
    other = tmp_path / "other"
    other.mkdir()
    assert storage_identity(other) not in ("", made[0])


def test_a_folder_that_cannot_tell_has_no_identity(tmp_path: Path):
    assert storage_identity(tmp_path / "absent") == ""
    (tmp_path / STORAGE_FILE).write_text("something else")
    assert storage_identity(tmp_path) == ""
