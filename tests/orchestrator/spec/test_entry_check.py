"""An entry that is not in the folder is refused before anything is sent; one that only may be there is let through."""

import pytest

from cluster.errors import SpecError
from orchestrator.spec import entry_check

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
        entry_check.check(there, folder)
    with pytest.raises(SpecError, match=r"no file smal.json in .*; did you mean 'small.json'"):
        entry_check.check("transformers:smal.json", folder)
    entries = ("m.py:make", "transformers:a.json", "transformers:bert", "m:make")
    assert [entry_check.is_in_folder(e) for e in entries] == [True, True, False, False]
    assert entry_check.needs_no_folder("transformers:bert") and not entry_check.needs_no_folder("m:make")


@pytest.mark.parametrize(
    "there",
    [
        *("train.py", "train.py:train", "train.py:nested", "train.py:Net", "train.py:made", "train.py:borrowed"),
        *("star.py:anything", "made.py:train", "lazy.py:train", "package:make", "package.inner:make"),
        *("package/inner.py:make", "torchvision.models:resnet18", "package.absent:make"),
    ],
)
def test_what_is_there_or_may_be_is_let_through(folder, there):
    entry_check.check(there, folder, default="train")


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        ("tain.py", r"there is no file tain\.py in .*; did you mean 'train\.py'\? valid: broken\.py, "),
        ("package/absent.py:make", r"there is no file package/absent\.py"),
        ("train.py:tain", r"train\.py has no function 'tain'; did you mean 'train'\? valid: Net, train"),
        ("package.inner:mak", r"package\.inner has no function 'mak'; did you mean 'make'"),
        ("broken.py", r"broken\.py:2: not valid Python: invalid syntax; correct the file"),
        ("zero.py", r"zero\.py.*: not valid Python: "),
        ("latin.py", r"latin\.py.*: not valid Python: "),
    ],
)
def test_what_cannot_be_there_is_named_with_what_is(folder, absent, message):
    with pytest.raises(SpecError, match=rf"^entry: {message}") as caught:
        entry_check.check(absent, folder, default="train")
    assert caught.value.field == "entry"


@pytest.mark.parametrize(
    ("text", "why"),
    {
        "no parameter": (
            "def train(): ...",
            r"def train\(\) cannot be called as train\(ctx\); write `def train\(ctx\):`",
        ),
        "two": ("def train(model, data): ...", r"def train\(model, data\) cannot be called as train\(ctx\)"),
        "a keyword alone": ("def train(ctx, *, lr): ...", r"def train\(ctx, \*, lr\) cannot"),
        "only keywords": ("def train(**more): ...", r"def train\(\*\*more\) cannot"),
        "async": ("async def train(ctx): ...", r"def train\(ctx\) is async: calling it does not run it"),
        "a generator": ("def train(ctx):\n    for x in ctx:\n        yield x", r"def train\(ctx\) has a `yield`"),
        "beside a method": ("class A:\n    def train(self, x): ...\ndef train(): ...", r"def train\(\) cannot"),
    }.values(),
)
def test_a_function_that_cannot_be_called_as_its_task_calls_it_is_refused(tmp_path, text, why):
    (tmp_path / "it.py").write_text(text)
    with pytest.raises(SpecError, match=rf"^entry: it\.py:\d+: {why}"):
        entry_check.check("it.py", tmp_path, default="train", call=("ctx",))
    entry_check.check("it.py", tmp_path, default="train")


@pytest.mark.parametrize(
    "text",
    [
        *(
            "def train(ctx): ...",
            "def train(ctx, lr=0.1, *more, seed=0): ...",
            "def train(*all): ...",
            "class train: ...",
        ),
        *("@wrapped\ndef train(): ...", "if True:\n    def train(): ...", "def train(): ...\ntrain = wrapped(train)"),
        *("from elsewhere import *\ndef train(): ...", "def train(): ...\ndef set():\n    global train"),
        *("def train(ctx):\n    def inner():\n        yield 1", "def train(ctx, /): ...", "train = lambda: 0"),
    ],
)
def test_one_that_can_be_called_or_may_be_replaced_is_let_through(tmp_path, text):
    (tmp_path / "it.py").write_text(text)
    entry_check.check("it.py", tmp_path, default="train", call=("ctx",))


def test_factories_of_models_and_inputs_are_called_without_and_with_the_batch_size(tmp_path):
    (tmp_path / "m.py").write_text("def make(size): ...\ndef sample(): ...")
    with pytest.raises(SpecError, match=r"def make\(size\) cannot be called as make\(\); write `def make\(\):`"):
        entry_check.check("m.py:make", tmp_path, call=())
    with pytest.raises(
        SpecError, match=r"^arguments\.sample_input: m\.py:2: def sample\(\) cannot .* sample\(batch_size\)"
    ):
        entry_check.check("m.py:sample", tmp_path, "arguments.sample_input", call=("batch_size",))


def test_nothing_of_the_file_runs(folder, tmp_path):
    (folder / "acts.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef train(ctx): ...")
    entry_check.check("acts.py:train", folder)
    assert not (tmp_path / "ran").exists()
