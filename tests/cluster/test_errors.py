"""Remedies: what somebody may have meant."""

from cluster.errors import nearest


def test_the_closest_word_comes_first_and_then_all_of_them():
    assert nearest("trian", ["run", "train"]) == "did you mean 'train'? valid: run, train"
    assert nearest("x", []) == "valid: none"


def test_of_very_many_valid_words_the_close_ones_are_named():
    said = nearest("brt", [f"word{n}" for n in range(500)] + ["bert", "bart"])
    assert said.startswith("did you mean 'bert'? valid: bert, bart, ") and said.endswith(" and 492 more")
