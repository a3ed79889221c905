from dataclasses import fields, replace

import pytest

from orchestrator.core.model import ANY_DEVICES, Candidate, TpuSlice
from orchestrator.core.plan.options.capacity import request_key
from orchestrator.core.plan.options.fit import (
    RULES,
    emulated_only_if_named,
    matches,
    offers_features,
    refusal_reason,
    right_pool,
    supports_dtypes,
)


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [
        ("nvidia:H100-80GB", "nvidia:H100-80GB"),
        ("nvidia:h100-80gb", "nvidia:H100-80GB"),
        ("NVIDIA:H100", "nvidia:H100-80GB"),
        ("nvidia", "nvidia:H100-80GB"),
        ("cuda", "nvidia:H100-80GB"),
        ("any", "nvidia:H100-80GB"),
        ("cpu", "cpu"),
        ("cpu", "cpu:ipex"),
        ("xla", "tpu:v5e"),
    ],
)
def test_a_pattern_matches_its_kind_family_backend_and_any(w, pattern, kind):
    assert matches(pattern, w.devices("n", kind=kind))


@pytest.mark.parametrize(
    ("pattern", "kind"),
    [
        ("nvidia:H100-80GB", "nvidia:H100-94GB"),
        ("nvidia:H10", "nvidia:H100-80GB"),
        ("nvidia:A100", "nvidia:A1000"),
        ("amd", "nvidia:H100-80GB"),
        ("cpu:ipex", "cpu"),
        ("tpu:v5", "tpu:v5e"),
    ],
)
def test_a_pattern_matches_nothing_that_only_looks_like_it(w, pattern, kind):
    assert not matches(pattern, w.devices("n", kind=kind))


def test_every_rule_refuses_with_its_sentence(w):
    have = w.devices("a", 8, free=(6, 7))
    sentences = {
        refusal_reason(w.want("tpu:v5e"), have): "right_kind",
        refusal_reason(w.want("tpu"), w.xla()): "emulated_only_if_named",
        refusal_reason(w.want(pool="other"), have): "right_pool",
        refusal_reason(w.want(node="b"), have): "right_node",
        refusal_reason(w.want(memory_bytes=100 * w.GiB), have): "enough_memory",
        refusal_reason(w.want(count=9), have): "enough_devices",
        refusal_reason(w.want("tpu", count=4, nodes=2), w.v5e(tpu_slice=TpuSlice("s", 4))): "complete_slice",
        refusal_reason(w.want(max_price=2.5), w.devices("c", price_per_hour=4.0)): "within_price_limit",
        refusal_reason(w.want("nvidia", dtypes=("float16",)), w.devices("d", kind="nvidia:Z9")): "supports_dtypes",
        refusal_reason(w.want("cpu", features=("collectives=nccl",)), w.cpu()): "offers_features",
        refusal_reason(w.want(), w.devices("b", schedulable=False, reason="node b is lost: silent")): "node_takes_jobs",
        refusal_reason(w.want(count=4), have): "enough_free",
    }
    assert sentences == {
        "is of kind nvidia:H100-80GB, but the job accepts tpu:v5e": "right_kind",
        "is emulated on the CPU; request tpu:emulated or pool xla to use it": "emulated_only_if_named",
        "is in pool h100, but the job requires pool other": "right_pool",
        "is node a, but the job requires node b": "right_node",
        "has 80 GiB per device, but the job needs 100 GiB": "enough_memory",
        "has 8 devices in all, but the job needs 9": "enough_devices",
        "is one of 4 hosts of TPU slice s, which are used together, but the job needs 2": "complete_slice",
        "costs 4 per device and hour, but the job pays at most 2.5": "within_price_limit",
        "has no documented native support for float16, which the job requires": "supports_dtypes",
        "offers collectives gloo, but the job requires nccl": "offers_features",
        "node b is lost: silent": "node_takes_jobs",
        "has 2 of 8 devices free, but the job needs 4": "enough_free",
    }
    assert [rule.__name__ for rule in RULES] == list(sentences.values())


def test_what_fits_is_refused_by_no_rule(w):
    assert refusal_reason(w.want("tpu:v5e", "nvidia:H100", count=2), w.devices("a", 8, free=(6, 7))) == ""


OTHER_VALUES = {str: "x", int: 7, float: 0.5, bool: True, tuple: ("x",), dict: {"A": "x"}}


@pytest.mark.parametrize("field", fields(Candidate), ids=lambda field: field.name)
def test_candidates_have_equal_keys_only_if_they_differ_in_fields_that_no_rule_reads(w, field):
    candidate = w.want("nvidia:H100")
    other = replace(candidate, **{field.name: OTHER_VALUES[type(getattr(candidate, field.name))]})
    assert (request_key(candidate) == request_key(other)) == (field.metadata == ANY_DEVICES)
    if field.metadata == ANY_DEVICES:
        fleet = [w.devices("a", 8), w.devices("b", 8, free=()), w.cpu(), w.xla(), w.devices("c", memory_gib=0)]
        assert [refusal_reason(candidate, have) for have in fleet] == [refusal_reason(other, have) for have in fleet]


@pytest.mark.parametrize("kinds", [("any",), ("tpu",), ("xla",), ("any", "tpu:v5e")])
def test_an_emulated_device_is_never_chosen_behind_the_users_back(w, kinds):
    assert "is emulated on the CPU" in refusal_reason(w.want(*kinds), w.xla())


@pytest.mark.parametrize(("kinds", "pool"), [(("tpu:emulated",), ""), (("TPU:Emulated",), ""), (("any",), "xla")])
def test_an_emulated_device_is_taken_by_its_full_name_or_its_pool(w, kinds, pool):
    assert refusal_reason(w.want(*kinds, pool=pool), w.xla()) == ""


def test_a_range_needs_only_its_lower_end(w):
    have = w.devices("a", 8, free=(0, 1))
    assert refusal_reason(w.want(count=8, min_count=2), have) == ""
    assert refusal_reason(w.want(count=8, min_count=3), have) == "has 2 of 8 devices free, but the job needs at least 3"


def test_memory_that_nobody_knows_is_not_taken_for_enough(w):
    unknown = w.devices("a", memory_gib=0)
    assert (
        refusal_reason(w.want(memory_bytes=w.GiB), unknown) == "has unknown memory per device, but the job needs 1 GiB"
    )
    assert refusal_reason(w.want(), unknown) == ""


def test_a_sentence_has_fractions_of_a_gib_when_they_matter(w):
    assert (
        refusal_reason(w.want(memory_bytes=17 * 10**9), w.v5e())
        == "is of kind tpu:v5e, but the job accepts nvidia:H100"
    )
    assert (
        refusal_reason(w.want("tpu", memory_bytes=17 * 10**9 + 2**29), w.v5e())
        == "has 16 GiB per device, but the job needs 16.3 GiB"
    )


def test_a_price_up_to_what_a_job_pays_is_taken_and_so_is_a_pool_without_one(w):
    want = w.want("nvidia:H100", max_price=2.5)
    assert refusal_reason(want, w.devices("a", price_per_hour=2.5)) == refusal_reason(want, w.devices("a")) == ""


def test_pools_may_be_listed_and_excluded(w):
    have = w.cpu()
    assert right_pool(w.want("cpu", pools=("a", "cpu")), have) == ""
    assert right_pool(w.want("cpu", pools=("a", "b")), have) == "is in pool cpu, but the job requires pools a, b"
    assert right_pool(w.want("cpu", not_pools=("cpu",)), have) == "is in pool cpu, which the job excludes"
    emulated = w.xla()
    assert emulated_only_if_named(w.want("tpu"), emulated) != ""
    assert emulated_only_if_named(w.want("tpu", pools=("xla", "v5e")), emulated) == ""


def test_features_are_those_that_documents_say_a_kind_offers(w):
    flash, own = w.want("any", features=("flash_attention",)), w.want("any", features=("custom_kernels=pallas",))
    assert offers_features(flash, w.devices("a")) == offers_features(own, w.v5e()) == ""
    assert offers_features(flash, w.xla()) == "does not offer flash_attention, which the job requires"
    apple = w.devices("m", kind="apple:M2-Ultra")
    assert offers_features(flash, apple) == "has no documented support for flash_attention, which the job requires"
    assert offers_features(own, w.devices("a")) == "offers custom_kernels CUDA, Triton, but the job requires pallas"
    assert offers_features(w.want("any"), apple) == ""


def test_dtypes_are_those_that_documents_say_a_kind_computes_with(w):
    h100, v100 = w.devices("a"), w.devices("b", kind="nvidia:V100")
    wants = w.want("nvidia", dtypes=("bfloat16", "float8_e4m3fn"))
    assert supports_dtypes(wants, h100) == ""
    assert supports_dtypes(wants, v100) == "does not compute with bfloat16 natively, which the job requires"
    unknown = w.devices("c", kind="nvidia:Z9")
    assert supports_dtypes(wants, unknown) == "has no documented native support for bfloat16, which the job requires"
    assert supports_dtypes(w.want("nvidia"), unknown) == ""
