"""Every kind that `inventory` can print is asked for as it is printed, and `explain` prints it the same way again."""

import pytest

from cluster.catalogue import models, vendors
from cluster.serialization import to_plain
from orchestrator.core.explanation.explain import explain, impossible_reason
from orchestrator.services.views import placement_view
from orchestrator.show.jobs import plan as shown
from orchestrator.spec.job_spec import JobSpec

UNLISTED = (
    "nvidia:H100-80GB-MIG-1g.10gb", "nvidia:H100-80GB-MIG-1g.10gb+me", "nvidia:A100-40GB-MIG-1g.12gb.me",
    "nvidia:RTX-PRO-6000-Blackwell-MIG-1g.24gb+gfx", "nvidia:RTX-PRO-6000-Blackwell-MIG-1g.24gb+me.all",
    "nvidia:RTX-9999-24GB", "nvidia:0x2b99", "amd:gfx942", "amd:gfx1151", "amd:0x1234", "intel:0x56c0", "intel:Gaudi",
    "intel:HL-999", "tpu:0x0f00", "neuron:0x7f64", "neuron:core", "apple:M9-Ultra",
)  # fmt: skip
"""Names that discovery makes of what its tools print, where the catalogue has no row (workers/devices/discovery)."""
USABLE = [row for row in models().values() if not row.unavailable and not row.kind.endswith(":emulated")]


def job_for(text):
    return JobSpec(command="true", resources={"accelerators": text}).to_job("j", 0.0)


@pytest.mark.parametrize("kinds", [UNLISTED, [row.kind for row in USABLE]], ids=["unlisted", "catalogue"])
def test_explain_prints_each_kind_that_a_job_asks_for_as_inventory_does(w, kinds):
    for kind in kinds:
        job = job_for(f"{kind}:1")
        has, other = w.devices("a", 1, kind=kind), w.xla()
        explained = explain(job, w.snapshot([has, other], []))
        [candidate] = explained.candidates
        assert (candidate.fits, explained.impossible) == ((f"a/{kind}",), ""), kind
        assert candidate.kinds[0] == kind and all(printed.startswith(kind) for printed in candidate.kinds)
        for printed in candidate.kinds:  # apple:M1 is also a family
            assert set(job_for(f"{printed}:1").candidates[0].kinds) <= set(candidate.kinds), "it can be typed"
        assert candidate.refused["xla-0/tpu:emulated"].endswith(f"job accepts {', '.join(candidate.kinds)}"), kind
        printed = shown(placement_view(to_plain(explained))).html()
        assert f"1 × {' or '.join(candidate.kinds)}" in printed and f"a/{kind}" in printed


@pytest.mark.parametrize("kind", UNLISTED)
def test_a_kind_that_nobody_has_is_refused_with_its_own_name(w, kind):
    assert impossible_reason(job_for(kind), [w.cpu()]) == f"no pool has {kind}; kinds here: cpu"
    assert impossible_reason(job_for("cpu"), [w.devices("a", kind=kind)]) == f"no pool has cpu; kinds here: {kind}"


def test_each_alias_and_each_name_of_a_model_finds_its_device_and_is_explained_by_kinds_that_can_be_typed(w):
    for row in (row for row in USABLE if ":" in row.kind):
        aliases = [f"{alias}:{row.model}" for alias in (row.backend, *vendors()[row.backend].aliases)]
        for text in (*aliases, *(f"{row.backend}:{name}" for name in (*row.spellings, *row.tool_names))):
            explained = explain(job_for(text), w.snapshot([w.devices("a", 1, kind=row.kind)], []))
            [candidate] = explained.candidates
            assert candidate.fits == (f"a/{row.kind}",), text
            assert all(kind in job_for(kind).candidates[0].kinds for kind in candidate.kinds), text
