"""Back ends by name or by worth, in this process; test_other_environment.py runs it beside torch-xla too."""

import logging
import os
import pickle
import re
import subprocess
import sys

import pytest

import workers
from cluster.errors import UserError
from workers import (
    BackendFactory,
    BackendType,
    BackendUnavailable,
    CPUBackend,
    PolyfleetConfig,
    detect_best_backend,
    get_backend,
    get_backend_info,
    is_backend_available,
    list_available_backends,
)
from workers.devices import backends
from workers.devices.selection.memory_check import create_with_memory_check
from workers.devices.selection.summary import backend_rows
from workers.errors import NotEnoughMemory

ABSENT = next(name for name in backends.names() if backends.unavailable_reason(name))


def test_a_name_an_alias_in_any_case_or_a_member_gives_its_back_end():
    for word in ("cpu", "CPU", BackendType.CPU):
        assert BackendFactory.create(word).BACKEND_NAME == "cpu"
    assert BackendType.from_string("ROCm") is BackendType.AMD
    assert BackendType.from_string("auto") is BackendType.AUTO
    with pytest.raises(UserError, match=r"unknown backend 'cudda'; did you mean 'cuda'\?"):
        BackendType.from_string("cudda")


def test_auto_takes_the_best_real_device_and_an_emulated_one_never():
    chosen = get_backend()
    assert detect_best_backend() == chosen.BACKEND_NAME
    assert not chosen.emulated
    assert chosen.fallback_from == ""


def test_what_is_asked_for_by_name_and_absent_is_refused_with_reason_and_alternatives():
    with pytest.raises(BackendUnavailable) as caught:
        get_backend(ABSENT)
    assert f"backend {ABSENT!r} is not available here: {backends.unavailable_reason(ABSENT)}" in str(caught.value)
    assert "cpu" in caught.value.remedy


def test_a_fallback_is_taken_in_order_logged_and_visible(caplog):
    with caplog.at_level(logging.WARNING, logger="polyfleet"):
        backend = BackendFactory.create(ABSENT, fallback_backends=[ABSENT, "cpu"])
    assert backend.BACKEND_NAME == "cpu"
    assert backend.fallback_from == ABSENT
    assert backend.fallback_reason == backends.unavailable_reason(ABSENT)
    assert f"cpu is used instead of {ABSENT}" in caplog.text


def test_fallbacks_that_are_absent_too_are_all_named():
    with pytest.raises(BackendUnavailable, match="none of its fallbacks is available"):
        BackendFactory.create(ABSENT, fallback_backends=[ABSENT])


def test_an_unknown_name_is_a_mistake_that_no_fallback_covers():
    with pytest.raises(UserError, match="did you mean 'nvidia'"):
        BackendFactory.create("nvidea", fallback_backends=["cpu"])


def test_arguments_reach_the_back_end():
    assert get_backend("cpu", optimization_level="O2").optimization_level == "O2"
    with pytest.raises(UserError, match="has no device 5"):
        get_backend("cpu", device_id=5)


def test_a_back_end_that_the_configuration_leaves_out_is_neither_chosen_nor_given():
    config = PolyfleetConfig(backends=[ABSENT])
    with pytest.raises(BackendUnavailable, match="the configuration does not enable it"):
        get_backend("cpu", config)
    with pytest.raises(BackendUnavailable, match="cpu: the configuration does not enable it"):
        get_backend(config=config)


def test_an_error_lists_what_can_be_used_here_and_what_the_configuration_leaves_out():
    here = ", ".join(backends.available())
    for raising in (lambda: backends.load(ABSENT)(), lambda: get_backend(ABSENT), lambda: backends.create(ABSENT)):
        with pytest.raises(BackendUnavailable) as caught:
            raising()
        assert str(caught.value).endswith(f"; available here: {here}")
        assert caught.value.available == backends.available()
    config = PolyfleetConfig(backends=[ABSENT])
    for raising in (lambda: get_backend("cpu", config), lambda: backends.load(ABSENT)(config)):
        with pytest.raises(BackendUnavailable) as caught:
            raising()
        assert str(caught.value).endswith(f"; available here: none; disabled by the configuration: {here}")


LOADED = """
import sys
from workers import BackendFactory, BackendUnavailable, get_backend

BackendFactory.create("neuron", fallback_backends=["cpu"])
try:
    get_backend("neuron")
except BackendUnavailable as e:
    apple = "workers.devices.backends.vendors.apple"
    before, told, after = apple in sys.modules, str(e), apple in sys.modules
    print(before, "available here: cpu" in told, after)
"""


def test_what_can_be_used_is_looked_up_when_an_error_is_shown_and_not_for_one_that_a_fallback_covers():
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True", "True"]


def test_an_error_that_goes_to_another_process_takes_the_list_of_this_one_along():
    sent = pickle.dumps(BackendUnavailable("neuron", "no device", ()))
    code = "import sys, pickle; print(pickle.loads(sys.stdin.buffer.read())); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    said, with_torch = done.stdout.decode().splitlines()
    assert said.endswith(f"disabled by the configuration: {', '.join(backends.available())}")
    assert with_torch == "False"


def test_a_configuration_may_be_a_dict_of_options_and_nothing_else():
    for made in (get_backend("cpu", {"cpu": {"threads": 3}}), CPUBackend({"cpu": {"threads": 3}})):
        assert made.config.threads == 3
    assert get_backend("cpu", config={}).BACKEND_NAME == CPUBackend(config={}).BACKEND_NAME == "cpu"
    assert detect_best_backend(config={"priority": ["cpu"]}) == "cpu"
    for make in (CPUBackend, lambda config: get_backend("cpu", config), lambda config: get_backend(config=config)):
        with pytest.raises(UserError, match=r"cpu\.thread: unknown option 'thread'; did you mean 'threads'\?"):
            make({"cpu": {"thread": 3}})
        for wrong in (0, "", [], "fast", object()):
            with pytest.raises(UserError, match=f"config is a {type(wrong).__name__}; pass a workers.PolyfleetConfig"):
                make(wrong)
    with pytest.raises(UserError, match="config is a NVIDIAConfig, but the back end is cpu"):
        CPUBackend(PolyfleetConfig().nvidia)


def test_every_name_of_the_fallbacks_is_looked_at_before_the_first_choice_is_made():
    for wrong, said in (
        (["nvidai"], "unknown backend 'nvidai'; did you mean 'nvidia'"),
        ("nvidai", "unknown backend 'nvidai'"),
        (3, "fallback_backends is 3; give names in order"),
        ([None], r"fallback_backends is \[None\]; give names in order"),
    ):
        with pytest.raises(UserError, match=said):
            get_backend("cpu", fallback_backends=wrong)
    assert get_backend(ABSENT, fallback_backends="cpu").fallback_from == ABSENT


def test_an_argument_that_no_back_end_takes_is_refused_with_the_nearest():
    for name in ("cpu", None):
        with pytest.raises(UserError, match=r"has no argument 'device'; did you mean 'device_id'\?"):
            get_backend(name, device=0)


@pytest.mark.parametrize(
    ("workload", "said"),
    [
        ("llm_training", "workload is 'llm_training'; give measured throughput by kind, such as"),
        (["cpu"], r"workload is \['cpu'\]; give measured throughput by kind"),
        ({"llm_training": 3.0}, "unknown backend 'llm_training'"),
        ({"nvidai:H100-80GB": 3.0}, "unknown backend 'nvidai:H100-80GB'; did you mean 'nvidia'"),
        ({"cpu": "fast"}, r"workload\['cpu'\] is 'fast'; give items per second"),
        ({"cpu": float("nan")}, r"workload\['cpu'\] is nan"),
        ({"cpu": -1}, r"workload\['cpu'\] is -1"),
    ],
)
def test_a_workload_is_measured_throughput_by_kind_and_anything_else_is_refused(workload, said):
    with pytest.raises(UserError, match=said):
        detect_best_backend(workload=workload)


def test_a_priority_is_names_in_order_or_one_string_of_them():
    assert detect_best_backend(priority="cpu") == "cpu"
    assert detect_best_backend(priority=" nvidia, cpu ") == detect_best_backend(priority=["nvidia", "cpu"])
    for wrong in (3, [3], {"cpu": 1}):
        with pytest.raises(UserError, match=r"priority is .*; give names in order"):
            detect_best_backend(priority=wrong)


def test_what_is_known_of_every_back_end_is_told():
    told = BackendFactory.get_all_backend_info()
    assert tuple(told) == backends.names()
    cpu = told["cpu"]
    assert (cpu["available"], cpu["class"], cpu["reason"]) == (True, "CPUBackend", "")
    assert cpu["devices"][0].backend == "cpu"
    assert cpu["version"]["torch"]
    assert told[ABSENT]["reason"]
    assert get_backend_info("CPU")["type"] == "cpu"
    assert is_backend_available("cpu")
    assert not BackendFactory.is_available(ABSENT)
    assert "cpu" in list_available_backends()


def test_the_first_preferred_back_end_with_room_is_created():
    assert create_with_memory_check([ABSENT, "cpu"], 1 << 20).BACKEND_NAME == "cpu"
    assert detect_best_backend() == create_with_memory_check("auto", 0).BACKEND_NAME


def test_without_room_anywhere_each_device_is_told_with_what_is_missing():
    with pytest.raises(NotEnoughMemory) as caught:
        create_with_memory_check([ABSENT, "cpu"], 1 << 60)
    assert "1073741824.00 GiB are needed" in caught.value.message
    assert f"{ABSENT}: " in caught.value.message
    assert "GiB free" in caught.value.message
    assert "missing" in caught.value.message
    for size in (-1, "1 GiB", None, 1 << 63):
        with pytest.raises(UserError, match="is not a size in bytes"):
            create_with_memory_check("cpu", size)


def test_every_row_of_the_summary_has_devices_or_a_reason_and_one_is_recommended():
    rows = backend_rows()
    assert {row["backend"] for row in rows} == set(backends.names())
    assert all(row["available"] or row["reason"] for row in rows)
    assert [row["backend"] for row in rows if row["recommended"]] == [detect_best_backend()]
    cpu = next(row for row in rows if row["backend"] == "cpu")["devices"][0]
    assert 0 < cpu["free_bytes"] <= cpu["total_bytes"]


TWICE = """
import sys
from workers.devices.selection.__main__ import main
main()
sys.stdout.reconfigure(encoding="utf-8")
main()
"""


def test_the_summary_is_read_by_people_with_or_without_utf8():
    """In one process: some vendors' libraries take it five seconds to import."""
    given = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    done = subprocess.run([sys.executable, "-c", TWICE], capture_output=True, env=given, check=True)
    ascii_only, unicode = re.split(r"^(?=Backends of)", done.stdout.decode(), flags=re.MULTILINE)[1:]
    assert "yes cpu" in ascii_only and "✓ cpu" in unicode
    assert ascii_only.isascii() and ascii_only.count("GiB free") == unicode.count("GiB free") > 0


def test_importing_the_package_imports_no_torch_and_its_names_come_when_used():
    code = "import sys, workers; print('torch' in sys.modules, len(dir(workers)) > 20); workers.BackendType"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    for name in workers.__all__:
        assert getattr(workers, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = workers.nothing
