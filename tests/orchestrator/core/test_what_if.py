import pytest

from cluster.errors import SpecError
from orchestrator.core.explanation.what_if import OtherJob, what_if
from orchestrator.core.model import Running


def asked(w, job, fleet, *texts, jobs=(), running=(), records=()):
    return what_if(job, w.snapshot(fleet, list(jobs), running=tuple(running)), texts, {one.id: one for one in records})


def test_more_devices_of_a_kind_that_is_here_are_a_node_of_its_pool(w):
    fleet = [w.devices("a", 4, free=())]
    job = w.job("big", w.want("nvidia", count=8))
    found = asked(w, job, fleet, "+8 H100")
    assert found.changes == ("8 more nvidia:H100-80GB on one node",)
    assert found.explanation.would_start.allocation == (("new-1/nvidia:H100-80GB", tuple(range(8))),)


def test_more_devices_are_in_the_pool_that_is_named(w):
    fleet = [w.devices("a", 1, free=()), w.devices("b", 1, free=(), pool="other")]
    job = w.job("j", w.want("nvidia", pool="other"))
    assert asked(w, job, fleet, "+1 nvidia").explanation.would_start is None
    found = asked(w, job, fleet, "+1 nvidia pool other")
    assert found.changes == ("1 more nvidia:H100-80GB on one node of pool other",)
    assert found.explanation.would_start is not None


def test_devices_of_a_kind_that_nobody_has_yet_have_the_published_memory(w):
    job = w.job("big", w.want("amd:MI300X", count=4, memory_bytes=150 * 2**30))
    found = asked(w, job, [w.cpu()], "+4 amd:MI300X")
    assert found.explanation.would_start.allocation == (("new-1/amd:MI300X", (0, 1, 2, 3)),)
    more = asked(w, w.job("more", w.want("amd:MI300X", count=4, memory_bytes=300 * 2**30)), [w.cpu()], "+4 amd:MI300X")
    assert "has 178.8 GiB per device, but the job needs 300 GiB" in more.explanation.impossible


def test_for_whom_else_it_would_change_something_is_told(w):
    fleet = [w.devices("a", 1, free=())]
    waits = w.job("waits", w.want("nvidia"), priority=5)
    job = w.job("j", w.want("nvidia"))
    found = asked(w, job, fleet, "+2 nvidia", jobs=[job, waits])
    assert found.explanation.would_start is not None
    assert found.others == (OtherJob("waits", "would start on new-1/nvidia:H100-80GB"),)


def test_a_pool_that_is_down_stops_its_attempts_which_start_again_elsewhere_or_wait(w):
    fleet = [w.devices("a", 1, free=()), w.devices("b", 2, free=(0,), pool="other")]
    first, second = w.job("first", w.want("nvidia"), number=1), w.job("second", w.want("nvidia", pool="h100"), number=2)
    running = [
        Running("first", 0, 1, (("a/nvidia:H100-80GB", (0,)),)),
        Running("second", 0, 2, (("b/nvidia:H100-80GB", (1,)),)),
    ]
    job = w.job("j", w.want("cpu"))
    found = asked(w, job, [*fleet, w.cpu()], "pool h100 down", running=running, records=[first, second])
    assert found.changes == ("pool h100 is down",)
    assert found.others == (OtherJob("first", "would stop, and start again on b/nvidia:H100-80GB"),)
    found = asked(
        w, job, [*fleet, w.cpu()], "pool h100 down", "pool other down", running=running, records=[first, second]
    )
    assert found.others == (OtherJob("first", "would stop, and wait"), OtherJob("second", "would stop, and wait"))


def test_a_node_that_is_up_again_takes_jobs(w):
    fleet = [w.devices("a", 2, schedulable=False, reason="node a is drained")]
    job = w.job("j", w.want("nvidia"))
    assert asked(w, job, fleet).explanation.would_start is None
    assert asked(w, job, fleet, "node a up").explanation.would_start is not None


@pytest.mark.parametrize(
    "text, said",
    [
        ("more", "if: 'more' is not a change of a fleet; write '+4 nvidia:H100-80GB', '+4 cpu pool NAME'"),
        ("", "if: '' is not a change of a fleet"),
        ("+x nvidia", "if: '+x nvidia' has no number from 1 to 10000 after the +"),
        ("+0 nvidia", "if: '+0 nvidia' has no number"),
        ("+" + "9" * 5000 + " nvidia", "has no number from 1 to 10000"),
        ("+4 nvidia:H10", "if: unknown kind 'nvidia:H10'; did you mean"),
        ("+4 amd", "if: amd is not one kind of device"),
        ("pool h10 down", "if: no pool is called 'h10'; did you mean 'h100'? valid: h100"),
        ("+4 cpu pool h10", "if: no pool is called 'h10'"),
        ("node b down", "if: no node is called 'b'"),
        ("pool h100 gone", "if: 'pool h100 gone' is not a change of a fleet"),
    ],
)
def test_what_is_no_change_of_this_fleet_is_named_with_the_nearest(w, text, said):
    with pytest.raises(SpecError) as refused:
        asked(w, w.job("j", w.want("nvidia")), [w.devices("a", 4)], text)
    assert said in str(refused.value)
