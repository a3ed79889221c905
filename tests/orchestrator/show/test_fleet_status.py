from orchestrator.show.fleet import status

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
    assert lines(health={"findings": wrong})[-1] == "and 2 more: `polyfleet doctor`"
    assert len(lines(health={"findings": wrong})) == 7
