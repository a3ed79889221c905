"""An entry that is not in the folder is refused before anything is sent; one that only may be there is let through."""

import pytest

from cluster.errors import SpecError
from orchestrator import entry

FILE = """
from elsewhere import other as borrowed
if True:
    def nested(): ...
class Net: ...
made = lambda: None
def train(ctx): ...
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").write_text(FILE)
    (tmp_path / "star.py").write_text("from elsewhere import *")
    (tmp_path / "made.py").write_text("globals()['train'] = print")
    (tmp_path / "lazy.py").write_text("def __getattr__(name): ...")
    (tmp_path / "broken.py").write_text("x = 1\ndef train(:\n")
    (tmp_path / "zero.py").write_bytes(b"x = '\0'")
    (tmp_path / "latin.py").write_bytes("x = 'caf\xe9'".encode("latin-1"))
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("def make(): ...")
    (tmp_path / "package" / "inner.py").write_text("def make(): ...")
    return tmp_path


def test_a_configuration_of_transformers_is_a_file_of_the_folder_and_a_type_is_none(folder):
    (folder / "small.json").write_text("{}")
    for there in ("transformers:bert", "transformers:xlm-roberta", "transformers:small.json"):
        entry.check(there, folder)
    with pytest.raises(SpecError, match=r"no file smal.json in .*; did you mean 'small.json'"):
        entry.check("transformers:smal.json", folder)
    assert [entry.in_folder(e) for e in ("m.py:make", "transformers:a.json", "transformers:bert", "m:make")] == [
        True, True, False, False,
    ]  # fmt: skip
    assert entry.needs_no_folder("transformers:bert") and not entry.needs_no_folder("m:make")


@pytest.mark.parametrize(
    "there",
    [
        *("train.py", "train.py:train", "train.py:nested", "train.py:Net", "train.py:made", "train.py:borrowed"),
        *("star.py:anything", "made.py:train", "lazy.py:train", "package:make", "package.inner:make"),
        *("package/inner.py:make", "torchvision.models:resnet18", "package.absent:make"),
    ],
)
def test_what_is_there_or_may_be_is_let_through(folder, there):
    entry.check(there, folder, default="train")


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        ("tain.py", r"there is no file tain\.py in .*; did you mean 'train\.py'\? valid: broken\.py, "),
        ("package/absent.py:make", r"there is no file package/absent\.py"),
        ("train.py:tain", r"train\.py has no function 'tain'; did you mean 'train'\? valid: Net, train"),
        ("package.inner:mak", r"package\.inner has no function 'mak'; did you mean 'make'"),
        ("broken.py", r"broken\.py:2: not Python: invalid syntax; correct the file"),
        ("zero.py", r"zero\.py.*: not Python: "),
        ("latin.py", r"latin\.py.*: not Python: "),
    ],
)
def test_what_cannot_be_there_is_named_with_what_is(folder, absent, message):
    with pytest.raises(SpecError, match=rf"^entry: {message}") as caught:
        entry.check(absent, folder, default="train")
    assert caught.value.field == "entry"


def test_nothing_of_the_file_runs(folder, tmp_path):
    (folder / "acts.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef train(ctx): ...")
    entry.check("acts.py:train", folder)
    assert not (tmp_path / "ran").exists()
