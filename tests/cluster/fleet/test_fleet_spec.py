import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from cluster.errors import SpecError, UserError
from cluster.fleet.fleet_spec import (
    FleetSpec,
    default_fleet,
    demo_fleet,
    drop_unavailable_pools,
    fleet_schema,
    load_fleet,
    parse_fleet,
)
from orchestrator.core.model import Policy


def pool(**fields):
    return {"pools": {"a": {"backend": "cpu"} | fields}}


CPU = {"backend": "cpu"}


def fleet(**scheduler):
    return {"pools": {"a": CPU}, "scheduler": scheduler}


def former(policy):
    return {"pools": {"a": CPU}, "policy": policy}


REFUSED = {
    "an unknown policy": (fleet(policy="finish_tim"), "scheduler.policy", "did you mean 'finish_time'"),
    "an unknown key of the scheduler": (fleet(every=5), "scheduler.every", "did you mean 'every_s'"),
    "a scheduler that is a name": (
        {"pools": {"a": CPU}, "scheduler": "fifo"},
        "scheduler",
        "write {policy: fifo}",
    ),
    "the former key of the policy": (former("fifo"), "policy", "write scheduler: {policy: fifo}"),
    "the former key with settings": (
        former({"name": "cost", "every_s": 5}),
        "policy",
        "write scheduler: {policy: cost, every_s: 5}",
    ),
    "the former key without a value": (former(None), "policy", "write scheduler: {policy: finish_time}"),
    "a policy that never decides": (fleet(every_s=0), "scheduler.every_s", "greater than or equal to 1"),
    "ageing backwards": (fleet(ageing_s=-1), "scheduler.ageing_s", "greater than or equal to 0"),
    "a time that is no number": (fleet(every_s=float("nan")), "scheduler.every_s", ""),
    "no pools": ({}, "pools", "is required"),
    "an empty fleet": ({"pools": {}}, "pools", "must have at least 1 item"),
    "an unknown key": (pool(device=2), "pools.a.device", "did you mean 'devices'"),
    "a pool without backend": ({"pools": {"a": {}}}, "pools.a.backend", "is required"),
    "an unknown backend": (pool(backend="nvidi"), "pools.a.backend", "did you mean 'nvidia'"),
    "a pool name in capitals": ({"pools": {"CPU": {"backend": "cpu"}}}, "pools.CPU", "'CPU' is not a valid name"),
    "a pool name with a dot dot": ({"pools": {"../x": {"backend": "cpu"}}}, "pools.../x", "is not a valid name"),
    "a pool name of 32 letters": (
        {"pools": {"a" * 32: {"backend": "cpu"}}},
        "pools." + "a" * 32,
        "is not a valid name",
    ),
    "no device": (pool(devices=0), "pools.a.devices", "greater than or equal to 1"),
    "devices as text": (pool(devices="2"), "pools.a.devices", "must be a valid integer, got '2'"),
    "devices as a yes": (pool(devices=True), "pools.a.devices", "must be a valid integer, got True"),
    "devices of a GPU": (pool(backend="nvidia", devices=2), "pools.a.devices", "counted on their nodes"),
    "an unknown lock": (pool(environment="xl"), "pools.a.environment", "did you mean 'xla'"),
    "an empty environment": (pool(environment={}), "pools.a.environment", "exactly one of"),
    "two environments": (
        pool(environment={"lock": "xla", "interpreter": "current"}),
        "pools.a.environment",
        "exactly one of",
    ),
    "a relative interpreter": (
        pool(environment={"interpreter": "python"}),
        "pools.a.environment.interpreter",
        "from /",
    ),
    "an option of pip's": (
        pool(environment={"requirements": ["-r x"]}),
        "pools.a.environment.requirements",
        "is not a requirement",
    ),
    "two lines in one": (
        pool(environment={"requirements": ["a\n-r x"]}),
        "pools.a.environment.requirements",
        "is not a requirement",
    ),
    "a variable of Ray's": (
        pool(env={"RAY_AUTH_MODE": "disabled"}),
        "pools.a.env",
        "RAY_AUTH_MODE is set by Polyfleet",
    ),
    "a variable of ours": (pool(env={"POLYFLEET_HOME": "/"}), "pools.a.env", "POLYFLEET_HOME is set by Polyfleet"),
    "a variable with a space": (pool(env={"A B": "1"}), "pools.a.env", "cannot be an environment variable"),
    "a variable that is a yes": (pool(env={"A": True}), "pools.a.env.A", "must be a valid string"),
    "a label of ours": (pool(labels={"polyfleet.io/pool": "x"}), "pools.a.labels", "set by Polyfleet itself"),
    "a label with a comma": (pool(labels={"a": "x,y=z"}), "pools.a.labels", "is not a valid label"),
    "a price that is no number": (pool(price_per_hour=float("nan")), "pools.a.price_per_hour", "finite"),
    "a price below zero": (pool(price_per_hour=-1), "pools.a.price_per_hour", "greater than or equal to 0"),
    "a relative folder": (pool(storage="data"), "pools.a.storage", "is not an absolute path"),
    "a store that is none": (pool(storage="http://host/x"), "pools.a.storage", "not an object store's"),
    "a store with a password": (pool(storage="s3://me:pw@bucket/x"), "pools.a.storage", "belongs in the environment"),
    "a store that climbs": (pool(storage="s3://bucket/../x"), "pools.a.storage", "has an empty part, `.` or `..`"),
    "one folder of hosts in a store": (
        pool(storage="s3://bucket/x", hosts=["h"], shared_storage=True),
        "pools.a.shared_storage",
        "requires one folder on all hosts, and `storage` is s3://bucket/x",
    ),
    "a folder that climbs": (pool(storage="/a/../b"), "pools.a.storage", "is not an absolute path"),
}


@pytest.mark.parametrize("data, field, sentence", REFUSED.values(), ids=REFUSED)
def test_a_wrong_fleet_is_refused_with_its_field(data, field, sentence):
    with pytest.raises(SpecError) as refused:
        parse_fleet(data)
    assert refused.value.field == field
    assert sentence in str(refused.value)


def test_a_whole_pool_is_read_with_aliases_numbers_and_defaults():
    fleet = parse_fleet(
        {"name": "lab", "pools": {"x-1": {"backend": "xla", "environment": "xla", "devices": 2, "price_per_hour": 1,
         "env": {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": 4}, "labels": {"team.org/rack": "b-7"}, "storage": "/data"}}}
    )  # fmt: skip
    x = fleet.pools["x-1"]
    assert (x.backend, x.devices, x.nodes, x.price_per_hour, x.storage) == ("tpu", 2, 1, 1.0, "/data")
    assert x.env == {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "4"}
    assert x.emulated
    assert not x.optional


def test_environment_names_are_fit_for_labels_and_tell_environments_apart():
    specs = [
        "xla",
        {"interpreter": "current"},
        {"interpreter": "/a/python"},
        {"interpreter": "/b/python"},
        {"requirements": ["torch"]},
    ]
    names = [parse_fleet(pool(environment=spec)).pools["a"].environment_name for spec in specs]
    assert names[:2] == ["xla", "current"]
    assert len(set(names)) == len(names)
    assert all(name.replace("-", "").isalnum() and len(name) < 64 for name in names)


def test_plain_data_of_a_fleet_is_the_fleet_again():
    fleet, _ = demo_fleet(["nvidia"])
    assert parse_fleet(fleet.model_dump(mode="json")) == fleet


def test_a_fleet_file_with_a_wrong_field_names_file_and_field(tmp_path):
    file = tmp_path / "fleet.yaml"
    file.write_text("pools:\n  a:\n    backend: cpu\n    nodes: many\n")
    with pytest.raises(SpecError, match=r"^pools\.a\.nodes: must be a valid integer, got 'many' \(in .*fleet\.yaml\)"):
        load_fleet(file)


def test_text_in_a_fleet_file_arrives_as_it_is_written(tmp_path):
    file = tmp_path / "fleet.yaml"
    file.write_text(
        "name: 007\npools:\n  12e4:\n    backend: cpu\n    environment: main\n"
        "    env: {PY: 3.10, ZIP: 02134, FLAG: on, AMP: true, M: 0x1F}\n"
        "    labels: {zone: 1.0, rack: 012, ok: false}\n    hosts: [10, {host: 1.50, address: 10.0.0.2}]\n"
        "    kubernetes: {node_selector: {example.com/gen: 3.0}}\n    slurm: {partition: 0123}\n"
        "head: {address: 10.0.0.1}\n"
    )
    fleet = load_fleet(file)
    pool = fleet.pools["12e4"]
    assert fleet.name == "007"
    assert pool.env == {"PY": "3.10", "ZIP": "02134", "FLAG": "on", "AMP": "true", "M": "0x1F"}
    assert pool.labels == {"zone": "1.0", "rack": "012", "ok": "false"}
    assert [host.host for host in pool.hosts] == ["10", "1.50"]
    assert pool.kubernetes and pool.kubernetes.node_selector == {"example.com/gen": "3.0"}
    assert pool.slurm and pool.slurm.partition == "0123"


def test_a_fleet_file_that_is_no_yaml_names_file_and_line(tmp_path):
    file = tmp_path / "fleet.yaml"
    file.write_text("pools:\n  a: [\n")
    with pytest.raises(SpecError, match=r"fleet\.yaml:3: not YAML"):
        load_fleet(file)


def test_a_fleet_file_that_is_absent_or_a_folder_or_no_text_is_said(tmp_path):
    (tmp_path / "latin.yaml").write_bytes(b"name: \xe9")
    with pytest.raises(UserError, match="No such file"):
        load_fleet(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="directory"):
        load_fleet(tmp_path)
    with pytest.raises(SpecError, match="byte 6 is not UTF-8"):
        load_fleet(tmp_path / "latin.yaml")


def test_without_a_file_each_backend_found_is_a_pool_and_the_cpu_is_one_where_none_is():
    assert list(default_fleet(["cuda", "intel", "nvidia"]).pools) == ["nvidia", "intel"]
    assert list(default_fleet().pools) == ["cpu"]
    assert default_fleet().pools["cpu"].environment_name == "current"


def machine(monkeypatch, system, cpu, free_bytes):
    """The machine as the standard library sees it: the edge."""
    monkeypatch.setattr("platform.system", lambda: system)
    monkeypatch.setattr("platform.machine", lambda: cpu)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=1 << 40, used=0, free=free_bytes))


@pytest.fixture
def empty_cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("POLYFLEET_CACHE", str(tmp_path))
    return tmp_path


def test_the_demo_fleet_has_two_back_ends_three_pools_and_the_accelerators_found(monkeypatch, empty_cache):
    machine(monkeypatch, "Linux", "x86_64", 1 << 40)
    fleet, left_out = demo_fleet(["nvidia", "cpu"])
    assert (list(fleet.pools), left_out) == (["nvidia", "cpu", "xla", "ipex"], [])
    assert fleet.pools["xla"].emulated
    assert fleet.pools["ipex"].env == {"POLYFLEET_CPU_ENGINE": "ipex"}


def test_on_a_mac_the_demo_leaves_two_pools_out_and_says_why(monkeypatch, empty_cache):
    machine(monkeypatch, "Darwin", "arm64", 1 << 40)
    fleet, left_out = demo_fleet()
    assert list(fleet.pools) == ["cpu"]
    why = "its packages exist for Linux on x86_64 only; this is Darwin on arm64"
    assert left_out == [("xla", why), ("ipex", why)]


def test_with_too_little_disk_the_demo_leaves_two_pools_out_and_says_how_much_is_needed(monkeypatch, empty_cache):
    machine(monkeypatch, "Linux", "x86_64", 5 * 10**9)
    fleet, left_out = demo_fleet()
    assert list(fleet.pools) == ["cpu"]
    assert {name for name, _ in left_out} == {"xla", "ipex"}
    assert "GB of disk while it is created" in left_out[0][1]
    assert "has 5.0 GB free" in left_out[0][1]


def test_a_pool_that_is_not_optional_is_never_left_out(monkeypatch, empty_cache):
    machine(monkeypatch, "Darwin", "arm64", 1 << 40)
    must = {"backend": "tpu", "environment": "xla"}
    fleet, left_out = drop_unavailable_pools(parse_fleet({"pools": {"must": must, "may": must | {"optional": True}}}))
    assert list(fleet.pools) == ["must"]
    assert [name for name, _ in left_out] == ["may"]


def test_the_schema_knows_every_field_and_refuses_others():
    definitions = fleet_schema()["$defs"]
    assert set(definitions["PoolSpec"]["properties"]) == set(FleetSpec.model_validate(pool()).pools["a"].model_dump())
    assert definitions["PoolSpec"]["additionalProperties"] is False
    assert definitions["EnvironmentSpec"]["anyOf"][0] == {"enum": ["main", "xla"]}


def test_the_scheduler_has_a_policy_and_settings_which_the_record_names_as_the_core_does():
    assert parse_fleet(fleet(policy="priority")).scheduler.policy == "priority"
    scheduler = parse_fleet(fleet(policy="cost", every_s=5)).scheduler
    assert (scheduler.policy, scheduler.every_s, scheduler.ageing_s) == ("cost", 5, 0)
    assert Policy(**scheduler.settings()) == Policy("cost", every_s=5)
    assert Policy(**parse_fleet(pool()).scheduler.settings()) == Policy()


def test_a_store_is_the_pools_object_store_and_its_folder_is_the_default_one():
    spec = parse_fleet(pool(storage="s3://bucket/runs/")).pools["a"]
    assert (spec.object_store, spec.storage_folder) == ("s3://bucket/runs", "")
    spec = parse_fleet(pool(storage="/data")).pools["a"]
    assert (spec.object_store, spec.storage_folder) == ("", "/data")
