"""Projects in a fleet file: their quotas in the catalogue's words, and what is refused."""

import pytest

from cluster.errors import SpecError
from cluster.fleet.fleet_spec import parse_fleet

POOLS = {"cpu": {"backend": "cpu"}}


def test_a_quota_is_by_kind_or_back_end_in_the_catalogues_words():
    fleet = parse_fleet({"pools": POOLS, "projects": {"vision": {"quota": {"H100": 8, "cpu": 0}}, "free": {}}})
    assert fleet.projects["vision"].quota == {"nvidia:H100": 8, "cpu": 0}
    assert not fleet.projects["vision"].borrow and fleet.projects["free"].quota == {}
    assert parse_fleet(fleet.model_dump(mode="json", exclude_unset=True)).projects == fleet.projects


@pytest.mark.parametrize(
    ("project", "field", "message"),
    [
        ({"quota": {"cpu": -1}}, "projects.p.quota", "-1 is not a number of cpu devices; write an integer"),
        ({"quota": {"cpu": 1.5}}, "projects.p.quota", "1.5 is not a number"),
        ({"quota": {"cpu": True}}, "projects.p.quota", "True is not a number"),
        ({"quota": {"nvidia:H10O": 1}}, "projects.p.quota", "did you mean 'nvidia:H100'?"),
        ({"quota": {"H100": 1, "nvidia:H100": 2}}, "projects.p.quota", "names one kind twice"),
        ({"quota": [3]}, "projects.p.quota", "must be a mapping of kinds to numbers"),
        ({"borow": True}, "projects.p.borow", "did you mean 'borrow'?"),
        ({"borrow": "yes"}, "projects.p.borrow", "must be true or false"),
    ],
)
def test_a_wrong_project_is_named_with_what_to_write(project, field, message):
    with pytest.raises(SpecError) as raised:
        parse_fleet({"pools": POOLS, "projects": {"p": project}})
    assert raised.value.field == field and message in str(raised.value)
