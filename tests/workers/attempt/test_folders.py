import pytest

from workers.protocol.folders import AttemptId, parse, read_json, replace_text, write_json


@pytest.mark.parametrize(
    "attempt", [AttemptId("digits-3f9a2c", 1, 0), AttemptId("a.b.c", 12, 34), AttemptId("x", 0, 0)]
)
def test_an_attempts_name_reads_back(attempt):
    assert parse(str(attempt)) == attempt


@pytest.mark.parametrize(
    "name", ["", "j", "j.1", "../j.1.0", "j/k.1.0", ".j.1.0", "j.one.0", "j.1.0\n", "é.1.0", "x" * 129 + ".1.0"]
)
def test_other_names_are_no_attempts(name):
    assert parse(name) is None


def test_text_is_replaced_as_a_whole_and_private(tmp_path):
    replace_text(tmp_path / "f", "old")
    replace_text(tmp_path / "f", "new", durable=True)
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_text() == "new"
    assert (tmp_path / "f").stat().st_mode & 0o777 == 0o600


def test_json_that_is_broken_or_absent_is_none(tmp_path):
    assert read_json(tmp_path / "f") is None
    (tmp_path / "f").write_bytes(b"\xff{")
    assert read_json(tmp_path / "f") is None
    write_json(tmp_path / "f", {"a": [1]})
    assert read_json(tmp_path / "f") == {"a": [1]}
