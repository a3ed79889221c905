"""What `up` would do on a host, from what was found there."""

from dataclasses import replace

from cluster.environments.recipes import CPUBuild, Recipe
from cluster.errors import UserError
from cluster.hosts.plan import GB, HostRequest, make_plan, parse_facts, plan_with_python
from cluster.hosts.ssh import Remote
from cluster.hosts.survey import HostState, check_distinct

TOLD = {
    "system": "Linux", "machine": "x86_64", "release": "6.1", "hostname": "a", "boot": "b", "python": "/usr/bin/python",
    "implementation": "CPython", "python_version": "3.11.7", "platform": "linux-x86_64", "has_venv": True, "user": 0,
    "cores": 8, "time_s": 1000.0, "home": "/h", "cache": "/c", "home_free_bytes": 9 * GB, "cache_free_bytes": 9 * GB,
    "home_writable": True, "environments": [], "has_code": False, "has_address": True, "has_port": True, "record": "",
    "drivers": {}, "absent": [],
}  # fmt: skip
RECIPE = Recipe("main", "torch==2.13.0\n", building_bytes=3 * GB, cpu_build=CPUBuild("torch"))
WANTED = HostRequest("a", "a.lab", "10.0.0.8", ("gpu",), {"gpu": RECIPE})
FOUND = parse_facts(TOLD, 999.0, 1001.0)


def with_environment(recipe):
    return replace(FOUND, environments=(recipe.key_on("CPython", "3.11.7", "linux-x86_64"),), has_code=True)


def test_a_host_with_nothing_gets_code_environment_and_node():
    made = make_plan(WANTED, FOUND, ())
    assert made.steps == ("send the code", "create environment main", "start node gpu-a")
    assert (made.warnings, made.problems) == ((), ())


def test_a_host_without_python_gets_one_first_from_its_uv():
    made = plan_with_python(WANTED, "3.11", "/home/a/.local/bin/uv")
    first, *others = made.steps
    assert first == "install Python 3.11 with /home/a/.local/bin/uv, then check the host"
    assert others == ["send the code", "create environment main", "start node gpu-a"]
    assert (made.host, made.pools, made.problems) == ("a.lab", ("gpu",), ())


def test_the_driver_that_a_pool_needs_is_named_and_one_that_is_missing_is_told():
    wanted = replace(WANTED, backends={"gpu": "nvidia", "other": "toy"})
    with_driver = make_plan(wanted, replace(FOUND, drivers={"nvidia": "570.86", "intel": "loaded"}), ())
    assert (with_driver.machine, with_driver.warnings) == ("Linux x86_64, 8 cores, nvidia driver 570.86", ())
    [warning] = make_plan(wanted, replace(FOUND, drivers={"intel": "loaded"}), ()).warnings
    assert warning.startswith("no nvidia driver is loaded, and pool gpu needs one")


def test_an_environment_counts_in_either_build():
    for recipe in (RECIPE, RECIPE.for_cpu):
        assert make_plan(WANTED, with_environment(recipe), ()).steps == ("start node gpu-a",)


def test_a_host_that_runs_all_of_it_gets_nothing():
    assert make_plan(WANTED, with_environment(RECIPE), ("gpu-a",)).steps == ("nothing to do: its nodes are running",)


def test_a_port_of_the_head_that_is_taken_is_told_unless_it_is_our_own():
    found, wanted = replace(FOUND, has_port=False), replace(WANTED, leads=True, port=6379)
    [(message, remedy)] = make_plan(wanted, found, ()).problems
    assert message.startswith("port 6379 of 10.0.0.8 is in use by another program") and "`head.port`" in remedy
    assert make_plan(wanted, found, ("head",)).problems == ()


def test_each_obstacle_is_told_with_its_remedy():
    found = replace(
        FOUND,
        has_address=False,
        home_writable=False,
        has_venv=False,
        cache_free_bytes=GB,
        home_free_bytes=1,
        absent=("/p",),
    )
    said = make_plan(WANTED, found, ()).problems
    assert [message for message, _ in said] == [
        "10.0.0.8 is not an address of this host",
        "/h cannot be written",
        "there is no Python interpreter at /p",
        "its Python has no venv module",
        "its environments need 3.0 GB in /c, 1.0 GB are free",
        "/h needs 0.5 GB, 0.0 GB are free",
    ]
    assert all(remedy for _, remedy in said)


def test_disk_and_venv_are_not_asked_where_nothing_is_made():
    found = replace(with_environment(RECIPE), has_venv=False, cache_free_bytes=0)
    assert make_plan(WANTED, found, ()).problems == ()


def test_a_clock_is_compared_with_the_middle_of_the_question():
    assert parse_facts(TOLD, 999.0, 1001.0).skew_s == 0.0
    ahead = make_plan(WANTED, parse_facts(TOLD, 989.0, 991.0), ())
    assert ahead.warnings == ("its clock is 10 s ahead of this machine's: times in its logs are off by that",)
    assert "behind" in make_plan(WANTED, parse_facts(TOLD, 1009.0, 1011.0), ()).warnings[0]


def host(name: str, **facts: str) -> HostState:
    return HostState(replace(WANTED, name=name, host=name), Remote(name), (), replace(FOUND, **facts))


def errors(*hosts: HostState) -> list[str]:
    return [str(one.error or "") for one in check_distinct(list(hosts))]


def test_a_machine_with_two_names_is_told_by_both():
    [first, second] = check_distinct([host("gpu-a", hostname="a"), host("10.0.0.8", hostname="a")])
    assert first.error is None
    assert isinstance(second.error, UserError) and second.error.message == (
        "hosts gpu-a and 10.0.0.8 are the same machine, a"
    )


def test_machines_with_one_host_name_and_containers_of_one_machine_are_not_the_same():
    assert errors(host("x", boot="1"), host("y", boot="2")) == ["", ""]
    assert errors(host("x", hostname="x"), host("y", hostname="y")) == ["", ""]


def test_machines_of_which_no_boot_is_known_count_as_different():
    assert errors(host("x", boot=""), host("y", boot="")) == ["", ""]


def test_a_host_that_could_not_be_looked_at_keeps_its_own_error():
    lost = replace(host("y"), facts=None, error=UserError("host y cannot be reached", ""))
    assert errors(host("x"), lost) == ["", "host y cannot be reached"]
