"""A Ray cluster of others with another Ray or Python is told before it is joined."""

import pytest

from cluster.errors import SpecError
from cluster.nodes.cluster_versions import Versions, check_versions, own_versions, read

OWN = Versions("2.60.0", "3.11.9")


@pytest.mark.parametrize("theirs", [None, OWN, Versions("2.60.0", "3.11.2"), own_versions()])
def test_the_same_ray_and_minor_python_may_be_joined_and_what_is_not_known_is_left_to_ray(theirs):
    check_versions("h:1", theirs, own_versions() if theirs == own_versions() else OWN)


@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        (
            Versions("2.60.1", "3.11.9"),
            "address: the cluster at h:1 runs Ray 2.60.1 and Python 3.11.9, and this Polyfleet Ray 2.60.0 and Python "
            "3.11.9; run Polyfleet from a Python 3.11 that has ray==2.60.1, or start the cluster with ray==2.60.0 "
            "under Python 3.11",
        ),
        (
            Versions("2.60.0", "3.12.1"),
            "address: the cluster at h:1 runs Ray 2.60.0 and Python 3.12.1, and this Polyfleet Ray 2.60.0 and Python "
            "3.11.9; run Polyfleet from a Python 3.12 that has ray==2.60.0, or start the cluster with ray==2.60.0 "
            "under Python 3.11",
        ),
        (
            Versions("2.44.0", "3.11.9"),
            "address: the cluster at h:1 runs Ray 2.44.0 and Python 3.11.9, and this Polyfleet Ray 2.60.0 and Python "
            "3.11.9; start the cluster with ray==2.60.0 under Python 3.11",
        ),
    ],
)
def test_another_ray_or_minor_python_is_refused_with_both_versions_and_what_to_do(theirs, told):
    with pytest.raises(SpecError) as refused:
        check_versions("h:1", theirs, OWN)
    assert (str(refused.value), refused.value.exit_code) == (told, 2)


def test_where_no_ray_answers_nothing_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr("cluster.nodes.cluster_versions.REPLY_TIMEOUT_S", 0.01)
    token = tmp_path / "token"
    token.write_text("0" * 32)
    assert read("127.0.0.1:1", token) is None
