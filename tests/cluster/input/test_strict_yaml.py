from typing import Annotated, Any, Literal

import pytest
import yaml as pyyaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from cluster.errors import SpecError
from cluster.input.strict_yaml import MAX_BYTES, dump, load, load_all
from cluster.input.text_fields import WrittenAs

REFUSED = {
    "an alias": ("a: &x [1]\nb: *x\n", "f.yaml:1: anchor &x"),
    "an anchored key": ("&a a: 1", "f.yaml:1: anchor &a"),
    "a tag": ("a: !!python/object/apply:os.system [x]", "f.yaml:1: tag"),
    "a key twice": ("a: 1\nb:\n  c: 1\n  c: 2\n", "f.yaml:4: key 'c' appears twice"),
    "NaN": ("a: 1\nb: .nan", "f.yaml:2: .nan is not a finite number"),
    "Infinity": ("a: -.inf", "f.yaml:1: -.inf is not a finite number"),
    "a float too large": ("a: 1e999", "f.yaml:1: 1e999 is too large"),
    "an integer too long": ("a: " + "9" * 5000, "is too long for a number"),
    "a list at the top": ("- 1", "f.yaml:1: the top level must be a mapping"),
    "a word at the top": ("just text", "f.yaml:1: the top level must be a mapping"),
    "nothing": ("# only a comment\n", "f.yaml is empty"),
    "two documents": ("a: 1\n---\nb: 2\n", "f.yaml:2: a second document"),
    "a tab": ("a:\n\t- b\n", "f.yaml:2: not YAML: found character that cannot start any token; indent with spaces"),
    "an open bracket": ("a: [1, 2\n", "f.yaml:2: not YAML"),
    "a control character": ("a: 1\nb: \x00", "f.yaml:2: not YAML: control characters are not allowed"),
    "half a surrogate": ("a: \ud800", "f.yaml:1: contains half a surrogate pair"),
    "a list as key": ("? [a]\n: b", "f.yaml:1: a key must be text"),
    "lists 5000 deep": ("a: " + "[" * 5000, "nested deeper than 32"),
    "mappings 5000 deep": ("{a: " * 5000, "nested deeper than 32"),
    "500,000 braces": ("{" * 500_000, "f.yaml:1"),
    "30,000 values": ("a: [" + "1," * 30_000 + "]", "more than 20000 values"),
    "over a mebibyte": ("a: " + "x" * MAX_BYTES, "f.yaml is larger than 1 MiB"),
}


@pytest.mark.parametrize("text, sentence", REFUSED.values(), ids=REFUSED)
def test_what_is_not_small_plain_yaml_is_refused_with_file_and_line(text, sentence):
    with pytest.raises(SpecError) as refused:
        load(text, "f.yaml")
    assert sentence in str(refused.value)


def test_the_306_byte_alias_bomb_is_refused_at_its_first_anchor():
    bomb = "".join(f"{chr(97 + i)}: &{chr(97 + i)} [{', '.join(['*' + chr(96 + i)] * 9)}]\n" for i in range(1, 9))
    with pytest.raises(SpecError, match="anchor"):
        load("a: &a [x, x, x]\n" + bomb, "f.yaml")


def test_32_levels_are_taken():
    assert load("a: " + "[" * 31 + "]" * 31, "f.yaml")


def test_only_true_and_false_are_booleans_and_times_and_dates_stay_text():
    first = "{a: no, b: 1:30, c: 2020-01-01, d: 0o17, e: 1e3, f: .5, g: +1, "
    text = first + "h: ~, i: , j: True, k: 0x1F, l: 010, m: '5', 1: z}"
    assert load(text, "f.yaml") == {
        "a": "no", "b": "1:30", "c": "2020-01-01", "d": 15, "e": 1000.0, "f": 0.5, "g": 1, "h": None, "i": None,
        "j": True, "k": 31, "l": 10, "m": "5", "1": "z",
    }  # fmt: skip


def test_the_order_of_keys_survives():
    assert list(load(dump({"b": 1, "a": 2}), "f.yaml")) == ["b", "a"]


words = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t"), max_size=12)
scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | words
)
plain = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(words, inner, max_size=3), max_leaves=8
)
tricky = st.sampled_from(
    ["no", "1e3", "0o17", "true", "", "~", ".nan", "1_000", "1:30", "a: b", "- x", "#", " x ", "=", "<<"]
)


@settings(deadline=None)
@given(st.dictionaries(words | tricky, plain | tricky, max_size=4))
def test_what_is_dumped_is_loaded_again_by_us_and_by_any_yaml_reader(data):
    text = dump(data)
    assert load(text, "dump") == data
    assert pyyaml.safe_load(text) == data


def test_tuples_and_repeated_values_are_written_out():
    same = [1]
    assert load(dump({"a": (1, 2), "b": same, "c": same}), "dump") == {"a": [1, 2], "b": [1], "c": [1]}


WRITTEN = ["3.10", "02134", "12e4", "1e999", "0x1F", "0o17", "1_000", "on", "no", "true", "False", "2026-11-25",
           "12:30:00", "1.0", "+1", ".5", "-0", ".inf", ".nan", "9" * 60, "1e-3", "0b11", "1.", "=", "<<"]  # fmt: skip


class Inner(BaseModel):
    word: str
    count: int | None = None
    mode: Literal["1", "2"] = "1"


class Outer(BaseModel):
    named: Annotated[dict[str, str], "a note"] = {}
    words: tuple[Annotated[str, "a note"], ...] = ()
    either: Inner | list[str] | None = None
    inner: dict[str, Inner] = {}
    line: Annotated[Any, WrittenAs(str | list[str])] = None
    free: dict[str, Any] = {}
    number: float = 0.0
    both: int | str = 0


@pytest.mark.parametrize("written", WRITTEN)
def test_where_a_model_has_text_a_scalar_arrives_as_it_is_written(written):
    text = f"named: {{a: {written}}}\nwords: [{written}, x]\neither: {{word: {written}}}\n"
    text += f"inner: {{k: {{word: {written}}}}}\n"
    expected = {"named": {"a": written}, "words": [written, "x"], "either": {"word": written}}
    expected |= {"inner": {"k": {"word": written}}, "line": written}
    assert load(text + f"line: {written}\n", "f.yaml", Outer) == expected
    assert load(f"line: [{written}]\neither: [{written}]", "f.yaml", Outer) == {"line": [written], "either": [written]}
    assert load_all(f"line: {written}\n---\nwords: [{written}]", "f.yaml", Outer)[1] == {"words": [written]}


def test_where_a_model_has_no_text_a_scalar_is_what_it_means():
    text = "free: {a: 3.10, b: [true, 0x1F], c: {d: 1e3}}\nnumber: 3.10\nboth: 7\n"
    text += "inner: {k: {count: 010, mode: 1}}\nelse: 1.0"
    assert load(text, "f.yaml", Outer) == {
        "free": {"a": 3.1, "b": [True, 31], "c": {"d": 1000.0}}, "number": 3.1, "both": 7,
        "inner": {"k": {"count": 10, "mode": "1"}}, "else": 1.0,
    }  # fmt: skip
    with pytest.raises(SpecError, match=r"f\.yaml:1: 1e999 is too large"):
        load("number: 1e999", "f.yaml", Outer)


@pytest.mark.parametrize("null", ["", "~", "null"])
def test_a_field_of_text_without_a_value_stays_without_one(null):
    assert load(f"named: {{a: {null}}}\nline: {null}", "f.yaml", Outer) == {"named": {"a": None}, "line": None}
