"""The rows themselves: sorted out, sourced, and of one meaning."""

from dataclasses import fields

import pytest

from cluster import catalogue
from cluster.catalogue.precision import FLOATS, FP8_FN, FP8_FNUZ
from cluster.catalogue.tables import BASE, DeviceModel, normalize_name
from cluster.errors import UserError
from orchestrator.spec.resource_syntax import COUNT

MODELS = list(catalogue.models().values())
NUMBERS = [f.name for f in fields(DeviceModel) if f.type == float | None]
ON_CPUS = {row.kind for row in MODELS if row.tier == "cpu"}


def words_of(row):
    return [row.model, row.kind.partition(":")[2], *row.spellings]


COMMON = """
    P100 V100 T4 A2 A10 A10G A16 A30 A40 A100 A800 L4 L40 L40S L20 H20 H100 H200 H800 GH200 B200 GB200 B300 GB300
    RTX2080-Ti RTX3090 RTX4090 RTX5090 RTXA6000 RTX6000-Ada
    MI100 MI210 MI250 MI250X MI300A MI300X MI308X MI325X MI350X MI355X RX7900XTX RX9070XT W7900
    v2 v3 v4 v5e v5p v6e v7x Max-1100 Max-1550 Flex-170 Arc-A770 Arc-B580 Gaudi2 Gaudi3
    trn1 trn2 trn3 inf1 inf2 M1 M2 M3 M4 M5
"""
STORED = """
    nvidia:V100-16GB nvidia:T4 nvidia:A100-40GB nvidia:A100-80GB nvidia:L4 nvidia:H100-80GB nvidia:H200 nvidia:B200
    amd:MI250X amd:MI300X amd:MI355X tpu:v4 tpu:v5e tpu:v5p tpu:v6e intel:Max-1550 intel:Arc-B580
    neuron:trn1 neuron:trn2 neuron:inf2 apple:M4-Pro cpu cpu:ipex tpu:emulated
"""


def test_the_cards_that_fleets_have_are_listed():
    assert {word for word in COMMON.split() if not catalogue.resolve_name(word)} == set()


def test_kinds_that_are_stored_in_histories_have_kept_their_spelling():
    assert set(STORED.split()) <= set(catalogue.models())


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("nvidia:RTX-4090-24GB", "nvidia:RTX4090"),
        ("nvidia:RTX-3090-24GB", "nvidia:RTX3090"),
        ("nvidia:RTX-5090-32GB", "nvidia:RTX5090"),
        ("nvidia:RTX-A6000-48GB", "nvidia:RTXA6000"),
        ("nvidia:RTX-6000-Ada-48GB", "nvidia:RTX6000-Ada"),
        ("nvidia:RTX-2060-6GB", "nvidia:RTX2060-6GB"),
    ],
)
def test_a_kind_that_has_a_new_name_is_understood_by_its_old_one(before, now):
    backend, _, model = before.partition(":")
    assert catalogue.resolve_name(model, backend) == (now,)


def test_no_word_means_two_things():
    meant = {}
    for row in MODELS:
        if row.kind not in ON_CPUS:
            for word in words_of(row):
                meant.setdefault(normalize_name(word), set()).add(row.family)
    assert {word: families for word, families in meant.items() if len(families) > 1} == {}


def test_no_word_reads_as_a_number_of_devices_or_as_a_back_end():
    words = [word for row in MODELS if row.kind not in ON_CPUS for word in words_of(row)]
    assert [word for word in words if COUNT.fullmatch(word) or catalogue.is_backend(word)] == []


def test_every_number_has_a_source_that_is_listed():
    for row in MODELS:
        whole = [key for key in row.sources if "=" not in key]
        columns = {key.partition("=")[0] for key in row.sources if "=" in key}
        unsourced = [name for name in NUMBERS if getattr(row, name) is not None and not whole and name not in columns]
        assert unsourced == [], row.kind
    keys = [key for row in MODELS for key in row.sources]
    keys += [key for row in catalogue.architectures().values() for key in row.sources]
    keys += [key for row in (*catalogue.vendors().values(), *catalogue.dtype_notes()) for key in row.sources]
    keys += [key for row in catalogue.kubernetes_labels().values() for key in row.sources]
    assert {key.rpartition("=")[2] for key in keys} == set(catalogue.sources())


def test_what_a_source_covers_is_a_column():
    names = {f.name for f in fields(DeviceModel)}
    told = {key.partition("=")[0] for row in MODELS for key in row.sources if "=" in key}
    assert told <= names


def test_a_label_of_kubernetes_is_of_a_listed_model_whose_vendor_has_such_labels():
    for row in catalogue.kubernetes_labels().values():
        assert row.sources and row.kind in catalogue.models()
        assert catalogue.vendor(row.kind.partition(":")[0]).kubernetes_selector
    labelled = [row for row in catalogue.vendors().values() if row.kubernetes_selector]
    assert all(row.kubernetes_resource for row in labelled)


def test_every_architecture_says_what_it_computes_with_in_words_of_torch():
    for row in catalogue.architectures().values():
        assert row.sources, row
        assert row.native | row.emulated <= {*FLOATS, *BASE}, row
        assert not row.native & row.emulated, row
        if row.fp8_flavour == "fnuz":
            assert set(FP8_FNUZ) <= row.native
        assert row.fp8_flavour in ("fn", "fnuz", "none", "")
        if row.native & set(FP8_FN):
            assert row.fp8_flavour == "fn"


def test_every_model_of_a_device_has_an_architecture_a_tier_and_a_name_that_discovery_reads():
    for row in MODELS:
        if row.kind not in ON_CPUS:
            assert (row.backend, row.architecture) in catalogue.architectures(), row.kind
            assert row.tier in catalogue.tiers(), row.kind
            assert row.tool_names or row.pci_ids or row.kind == "amd:MI60", row.kind


def test_all_sizes_of_a_model_have_one_architecture():
    for row in MODELS:
        if row.kind not in ON_CPUS:
            assert catalogue.architecture_of(row.family) == row.architecture


@pytest.mark.parametrize(
    ("word", "patterns"),
    [
        ("a100", ("nvidia:A100",)),
        ("A100-80GB", ("nvidia:A100-80GB",)),
        ("rtx_4090", ("nvidia:RTX4090",)),
        ("GeForce-RTX-4090", ("nvidia:RTX4090",)),
        ("Trainium2", ("neuron:trn2",)),
        ("Max1550", ("intel:Max-1550",)),
        ("M5", ("apple:M5", "apple:M5-Pro", "apple:M5-Max")),
        ("M5-Pro", ("apple:M5-Pro",)),
        ("H100-80GB-MIG-1g.10gb", ("nvidia:H100-80GB-MIG-1g.10gb",)),
        ("A100-57GB", ("nvidia:A100-57GB",)),
        ("emulated", ()),
        ("v99", ()),
        ("H100-PLUS", ()),
    ],
)
def test_words_are_read_as_people_write_them(word, patterns):
    assert catalogue.resolve_name(word) == patterns


def test_a_pattern_takes_the_sizes_of_its_model_and_no_other_model():
    assert catalogue.matches_pattern("nvidia:RTX4000", "nvidia:RTX4000")
    assert not catalogue.matches_pattern("nvidia:RTX4000", "nvidia:RTX4000-Ada")
    assert not catalogue.matches_pattern("nvidia:RTX4070", "nvidia:RTX4070-Ti")
    assert catalogue.matches_pattern("nvidia:RTX4060-Ti", "nvidia:RTX4060-Ti-16GB")
    assert catalogue.matches_pattern("nvidia:H100", "nvidia:H100-80GB-MIG-1g.10gb")


def test_a_mig_slice_is_described_by_its_card_and_an_unlisted_size_by_its_relatives():
    assert catalogue.model("nvidia:H100-80GB-MIG-1g.10gb").kind == "nvidia:H100-80GB"
    assert catalogue.model("nvidia:A100-57GB") is None
    assert catalogue.architecture_of("nvidia:A100-57GB") == "sm_80"
    assert catalogue.tier("nvidia:A100-57GB") == "a100-mi300"
    assert catalogue.tier("nvidia:Unheard-1") == "other-gpu"


@pytest.mark.parametrize(
    ("word", "kind"),
    [
        ("cuda:a100-80gb", "nvidia:A100-80GB"),
        ("H100", "nvidia:H100"),
        ("tpu", "tpu"),
        ("xla", "tpu"),
        ("cpu:ipex", "cpu:ipex"),
        ("tpu:emulated", "tpu:emulated"),
        ("nvidia:A100-80GB-MIG-3g.40gb", "nvidia:A100-80GB-MIG-3g.40gb"),
    ],
)
def test_a_kind_is_known_however_it_is_written(word, kind):
    assert catalogue.resolve_kind(word) == kind


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("tpu:v99", "unknown kind 'tpu:v99'; did you mean 'tpu:v"),
        ("nvidia:A10O", "unknown kind 'nvidia:A10O'; did you mean 'nvidia:A10"),
        ("H10O", "unknown kind 'H10O'; did you mean 'nvidia:H100"),
        ("cpu:ipx", "unknown kind 'cpu:ipx'; did you mean 'cpu:ipex'"),
        ("nvida:H100", "unknown backend 'nvida'; did you mean 'nvidia'"),
        ("intel:Gaudi3", "no back end computes on intel:Gaudi3; Polyfleet has no back end for Gaudi"),
    ],
)
def test_a_kind_nobody_lists_is_refused_with_the_nearest(word, said):
    with pytest.raises(UserError) as raised:
        catalogue.resolve_kind(word)
    assert str(raised.value).startswith(said)


@pytest.mark.parametrize(
    ("backend", "architecture", "dtype", "answer"),
    [
        ("nvidia", "sm_75", "bfloat16", False),
        ("nvidia", "sm_90", "torch.float8_e4m3fn", True),
        ("nvidia", "sm_999", "bfloat16", None),
        ("nvidia", "sm_90", "uint16", None),
        ("amd", "gfx942", "float8_e4m3fn", False),
        ("apple", "", "uint16", False),
        ("apple", "apple-m4", "float64", False),
        ("tpu", "v5e", "bool", True),
    ],
)
def test_whether_an_architecture_computes_with_a_dtype_is_known_or_said_to_be_unknown(
    backend, architecture, dtype, answer
):
    assert catalogue.has_native_dtype(backend, architecture, dtype) is answer
