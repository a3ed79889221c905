"""What the gate runs of this folder: three machines over real SSH, a gang across two, and one of them switched off.

The other files here have every fault that is named in docs/reliability.md; they take longer.
"""

import pytest
from bed import Bed
from test_hosts import Fleet
from their_ray import wait

pytestmark = pytest.mark.timeout(600)


def test_a_gang_spans_two_hosts_and_a_job_leaves_the_one_that_loses_its_power(bed: Bed):
    fleet = Fleet(bed)
    fleet.user("up", "--file", fleet.write(fleet.host(fleet.m2), fleet.host(fleet.m3)))
    assert fleet.user.states() == {"near-0": "ready", "far-m2": "ready", "far-m3": "ready"}

    gang = fleet.user.ended(fleet.waiting("hostname", pool="far", nodes=2))
    assert gang["state"] == "SUCCEEDED"
    assert set(fleet.user("logs", gang["id"]).stdout.split()) >= {"m2", "m3"}

    end = bed.shared / "end"
    job = fleet.submitted(f"hostname; while [ ! -e {end} ]; do sleep 0.2; done", pool="far")
    lost = wait(lambda: fleet.user("logs", job).stdout.strip())
    bed.machines[lost].power_off()
    (other,) = {"m2", "m3"} - {lost}
    wait(lambda: other in fleet.user("logs", job, check=False).stdout)
    end.touch()
    ended = fleet.user.ended(job)
    assert (ended["state"], ended["interruptions"]) == ("SUCCEEDED", 1)
