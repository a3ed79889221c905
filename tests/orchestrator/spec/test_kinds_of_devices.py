"""Whatever kind discovery can call a device, and whatever name the catalogue has for one, a job can ask for."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.catalogue import matches_pattern, resolve_name
from cluster.catalogue.tables import models, vendors
from cluster.errors import UserError
from orchestrator.spec.job_spec import JobSpec
from orchestrator.spec.resource_syntax import accelerators
from workers.devices.discovery.vendors import apple, nvidia

MIG_PROFILES = (
    "1g.5gb", "1g.10gb", "1g.10gb+me", "1g.12gb.me", "1g.24gb+gfx", "1g.24gb+me.all", "1g.24gb-me", "2g.48gb+gfx",
    "1c.3g.40gb", "7g.80gb",
)  # fmt: skip


def asked(text, kind):
    """Whether a job that writes `text` takes devices of `kind`, and the patterns that it is told can be typed again."""
    [wanted] = accelerators(text)
    assert JobSpec(command="true", resources={"accelerators": text})
    again = [pattern for kind_ in wanted.kinds for pattern in accelerators(kind_)[0].kinds]
    return any(matches_pattern(pattern, kind) for pattern in wanted.kinds) and any(
        matches_pattern(pattern, kind) for pattern in again
    )


def discovered(name, total_bytes=80 << 30, profile=""):
    part = {"name": f"{name} MIG {profile}", "uuid": "MIG-1"}
    card = {"index": 0, "name": name, "uuid": "GPU-1", "total_bytes": total_bytes, "mig": bool(profile)}
    [found] = nvidia.devices({"cards": [card | ({"slices": [part]} if profile else {})]}, None)[0]
    return found.kind


def test_every_kind_and_every_name_in_the_catalogue_can_be_asked_for():
    wrong = []
    for kind, row in models().items():
        backend, _, model = kind.partition(":")
        names = [model, row.model, *row.spellings, *row.tool_names] if model else []
        typed = [f"{of}:{name}" for of in (backend, *vendors()[backend].aliases) for name in names]
        for text in (kind, kind.lower(), *typed):
            try:
                wrong += [] if asked(f"{text}:1", kind) else [(text, kind)]
            except UserError as e:
                wrong.append((text, e.message))
    assert wrong == []


@pytest.mark.parametrize("profile", MIG_PROFILES)
@pytest.mark.parametrize("name", ["NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB", "NVIDIA Never Listed (rev. A)"])
def test_every_mig_slice_can_be_asked_for(name, profile):
    kind = discovered(name, profile=profile)
    assert kind.endswith(f"-MIG-{profile}")
    assert asked(f"{kind}:1", kind) and asked(f"cuda:{kind.partition(':')[2].upper()}:2", kind)
    other = "7g.80gb" if profile != "7g.80gb" else "1g.10gb"
    assert not asked(f"{kind}:1", discovered(name, profile=other))


@given(st.text(min_size=1, max_size=96), st.sampled_from((None, 4 << 30, 47 << 30)), st.sampled_from(("", "1g.5gb+me")))
@settings(max_examples=150, deadline=None)
def test_a_card_that_nobody_lists_has_a_kind_that_can_be_typed_whatever_its_driver_calls_it(name, total_bytes, profile):
    apples = apple.devices({"SPHardwareDataType": [{"chip_type": f"Apple {name}"}]})
    for kind in [discovered(name, total_bytes, profile), *(device.kind for device in apples)]:
        vendor, _, model = kind.partition(":")
        listed = resolve_name(model, vendor)
        is_taken = listed and kind not in listed  # "P" with 48 GB reads as the P4-8GB, "M:1" as the M1
        assert is_taken or asked(f"{kind}:1", kind)


def test_what_no_driver_says_is_still_refused():
    for model in ("H100 ; rm -rf /", "A" * 500, "-", "H/100", "\n", "-".join("a" * 400)):
        with pytest.raises(UserError):
            accelerators(f"nvidia:{model}")
