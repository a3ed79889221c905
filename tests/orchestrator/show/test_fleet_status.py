from orchestrator.show.fleet import devices, fleet, projects, status

WELL = {"server": {"running": True, "pid": 7}, "fleet": None, "fleet_note": "no fleet is up", "jobs": {}}


def lines(**given):
    return [part for part in status(WELL | given).parts if isinstance(part, str)]


def finding(message, level="error", subject="controller"):
    return {"node": "", "level": level, "subject": subject, "message": message, "remedy": ""}


def test_nothing_is_said_when_all_is_well():
    well = {"findings": [finding("node b was started again", "info")]}
    assert lines(health=well) == lines(health=None) == ["", "no fleet is up"]


def test_what_is_wrong_has_a_line_each_and_many_are_cut():
    wrong = [finding(f"last turn {n} s ago") for n in range(5)]
    assert lines(health={"findings": wrong[:1]})[2:] == ["", "controller: last turn 0 s ago"]
    assert lines(health={"findings": wrong})[-1] == "and 2 more; run `polyfleet doctor` to see them"
    assert len(lines(health={"findings": wrong})) == 7


FLEET = {
    "name": "f",
    "address": "127.0.0.1:1",
    "state": "up",
    "pools": [],
    "policy": {"name": "finish_time", "every_s": 60.0, "ageing_s": 0.0, "explore_device_s": 3600.0},
    "projects": [],
}


def test_the_policy_is_told_in_a_line_and_what_it_does_not_do_is_left_out():
    def line(**policy):
        return fleet(FLEET | {"policy": FLEET["policy"] | policy}).parts[2]

    assert line() == "policy finish_time; jobs of equal priority may be stopped or moved every 60 s"
    assert line(name="fifo", ageing_s=7200.0) == "policy fifo; a waiting job gains 1 priority every 7200 s"


def test_projects_have_a_line_for_each_kind_of_their_quota():
    rows = [
        {"project": "free", "kind": "", "quota": None, "held": None, "borrowed": 0, "borrow": False},
        {"project": "vision", "kind": "nvidia:H100", "quota": 2, "held": 3, "borrowed": 1, "borrow": True},
    ]
    assert projects(rows).rows == (
        ("free", "", "", "", "", "no"),
        ("vision", "nvidia:H100", "2", "3", "1", "yes"),
    )
    assert fleet(FLEET | {"projects": rows}).parts[-1] == projects(rows)
    assert fleet(FLEET).parts[-1] == fleet(FLEET).parts[2]


def test_a_device_has_the_state_of_its_node_or_its_own():
    def state(node=None, device=None):
        facts = {"kind": "cpu", "index": 0, "name": "x86", "total_memory_bytes": 1, "free_memory_bytes": 1}
        one = facts | {"unavailable_reason": "", "allocated_to": None} | (device or {})
        common = {"node": "a", "pool": "p", "state": "ready", "reason": "", "note": "", "versions": {}}
        return devices([common | {"devices": [one]} | (node or {})]).rows[0][-1]

    assert state() == "ready"
    assert state({"state": "lost", "reason": "no answer"}) == "lost: no answer"
    assert state({"state": "drained"}) == "drained"
    assert state({"state": "starting", "devices": []}) == "starting"
    assert state(device={"unavailable_reason": "GPU is lost"}) == "unavailable: GPU is lost"
    assert state(device={"allocated_to": "job-1"}) == "allocated to job-1"
    assert state({"note": "another program uses it"}) == "ready; another program uses it"
