"""Back ends by name or by worth, in this process; test_other_environment.py runs it beside torch-xla too."""

import logging
import os
import subprocess
import sys

import pytest

import workers
from cluster.errors import UserError
from workers import (
    BackendFactory,
    BackendType,
    BackendUnavailable,
    PolyfleetConfig,
    backends,
    detect_best_backend,
    get_backend,
    get_backend_info,
    is_backend_available,
    list_available_backends,
)
from workers.errors import NotEnoughMemory
from workers.selection.memory_check import create_with_memory_check
from workers.selection.summary import backend_rows

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
    assert f"cpu takes the place of {ABSENT}" in caplog.text


def test_fallbacks_that_are_absent_too_are_all_named():
    with pytest.raises(BackendUnavailable, match="nor any of its fallbacks"):
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
    for size in (-1, "1 GiB", None):
        with pytest.raises(UserError, match="is no size in bytes"):
            create_with_memory_check("cpu", size)


def test_every_row_of_the_summary_has_devices_or_a_reason_and_one_is_recommended():
    rows = backend_rows()
    assert {row["backend"] for row in rows} == set(backends.names())
    assert all(row["available"] or row["reason"] for row in rows)
    assert [row["backend"] for row in rows if row["recommended"]] == [detect_best_backend()]
    cpu = next(row for row in rows if row["backend"] == "cpu")["devices"][0]
    assert 0 < cpu["free_bytes"] <= cpu["total_bytes"]


def test_the_summary_is_read_by_people_with_or_without_utf8():
    for encoding, mark in (("utf-8", "✓ cpu"), ("ascii", "yes cpu")):
        command = [sys.executable, "-m", "workers.selection"]
        given = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}
        done = subprocess.run(command, capture_output=True, env=given, check=True)
        assert mark in done.stdout.decode(encoding)
        assert "GiB free" in done.stdout.decode(encoding)


def test_importing_the_package_imports_no_torch_and_its_names_come_when_used():
    code = "import sys, workers; print('torch' in sys.modules, len(dir(workers)) > 20); workers.BackendType"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
    for name in workers.__all__:
        assert getattr(workers, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = workers.nothing
