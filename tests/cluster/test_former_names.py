"""Former names lead to the present objects, with a warning, and nothing of ours uses them."""

from importlib import import_module
from pkgutil import resolve_name

import pytest

FORMER = {
    "cluster.vocabulary:NodeFacts": "cluster.types:NodeFacts",
    "orchestrator.core.fit:refusal": "orchestrator.core.plan.options.fit:refusal_reason",
    "orchestrator.core.fit:RULES": "orchestrator.core.plan.options.fit:RULES",
    "orchestrator.core.nodes:groups": "orchestrator.core.controller.nodes:device_groups",
    "workers.discovery:discover": "workers.devices.discovery:discover",
    "workers.discovery.nvidia:ask": "workers.devices.discovery.vendors.nvidia:query_nvml",
    "workers.discovery.nvidia:devices": "workers.devices.discovery.vendors.nvidia:devices",
}
MODULES = sorted({name.partition(":")[0] for name in FORMER})


@pytest.mark.parametrize("former", FORMER)
def test_a_former_name_is_the_present_object_and_warns_with_the_present_name(former):
    module, _, name = former.partition(":")
    present = FORMER[former].replace(":", ".")
    with pytest.warns(DeprecationWarning) as warned:
        value = getattr(import_module(module), name)
    assert value is resolve_name(FORMER[former])
    message = f"{module}.{name} is deprecated and will be removed in version 0.2.0: use {present}"
    assert [(str(w.message), w.filename) for w in warned] == [(message, __file__)]


def test_a_vendors_file_is_imported_from_the_former_folder_without_a_warning():
    from workers.discovery import nvidia

    assert nvidia.__name__ == "workers.discovery.nvidia"


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("name", ["no_such_name", "_private", "__all__"])
def test_what_the_present_module_does_not_offer_is_missing_in_the_former_one_too(module, name):
    with pytest.raises(AttributeError, match=name):
        getattr(import_module(module), name)
