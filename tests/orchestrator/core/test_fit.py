import pytest

from orchestrator.core.fit import RULES, matches, refusal


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
        refusal(w.want("tpu:v5e"), have): "right_kind",
        refusal(w.want("tpu"), w.xla()): "not_emulated_unasked",
        refusal(w.want(pool="other"), have): "right_pool",
        refusal(w.want(node="b"), have): "right_node",
        refusal(w.want(memory_bytes=100 * w.GiB), have): "enough_memory",
        refusal(w.want(count=9), have): "enough_devices",
        refusal(w.want(), w.devices("b", schedulable=False, reason="node b is lost: silent")): "node_takes_jobs",
        refusal(w.want(count=4), have): "enough_free",
    }
    assert sentences == {
        "is nvidia:H100-80GB, job accepts tpu:v5e": "right_kind",
        "is emulated on the CPU; ask for tpu:emulated or pool xla to use it": "not_emulated_unasked",
        "is in pool h100, job asks for pool other": "right_pool",
        "is node a, job asks for node b": "right_node",
        "80 GiB per device, job needs 100": "enough_memory",
        "has 8 devices in all, job needs 9": "enough_devices",
        "node b is lost: silent": "node_takes_jobs",
        "2 of 8 devices are free, job needs 4": "enough_free",
    }
    assert [rule.__name__ for rule in RULES] == list(sentences.values())


def test_what_fits_is_refused_by_no_rule(w):
    assert refusal(w.want("tpu:v5e", "nvidia:H100", count=2), w.devices("a", 8, free=(6, 7))) == ""


@pytest.mark.parametrize("kinds", [("any",), ("tpu",), ("xla",), ("any", "tpu:v5e")])
def test_an_emulated_device_is_never_chosen_behind_the_users_back(w, kinds):
    assert "is emulated on the CPU" in refusal(w.want(*kinds), w.xla())


@pytest.mark.parametrize(("kinds", "pool"), [(("tpu:emulated",), ""), (("TPU:Emulated",), ""), (("any",), "xla")])
def test_an_emulated_device_is_taken_by_its_full_name_or_its_pool(w, kinds, pool):
    assert refusal(w.want(*kinds, pool=pool), w.xla()) == ""


def test_a_range_needs_only_its_lower_end(w):
    have = w.devices("a", 8, free=(0, 1))
    assert refusal(w.want(count=8, min_count=2), have) == ""
    assert refusal(w.want(count=8, min_count=3), have) == "2 of 8 devices are free, job needs at least 3"


def test_memory_that_nobody_knows_is_not_taken_for_enough(w):
    unknown = w.devices("a", memory_gib=0)
    assert refusal(w.want(memory_bytes=w.GiB), unknown) == "memory per device is unknown, job needs 1 GiB"
    assert refusal(w.want(), unknown) == ""


def test_a_sentence_has_fractions_of_a_gib_when_they_matter(w):
    assert refusal(w.want(memory_bytes=17 * 10**9), w.v5e()) == "is tpu:v5e, job accepts nvidia:H100"
    assert refusal(w.want("tpu", memory_bytes=17 * 10**9 + 2**29), w.v5e()) == "16 GiB per device, job needs 16.3"
