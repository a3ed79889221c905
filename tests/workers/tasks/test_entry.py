import functools
import sys

import pytest

from cluster.errors import NotFound, UserError
from workers.tasks.entry import check_call, load_function, sibling


@pytest.fixture(autouse=True)
def _forget_modules():
    modules, path = dict(sys.modules), list(sys.path)
    yield
    for name in set(sys.modules) - set(modules):
        del sys.modules[name]
    sys.path[:] = path


def write(folder, name, source):
    file = folder / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(source)


def test_a_file_and_a_module_name_the_same_function_and_run_once(tmp_path):
    write(tmp_path, "one.py", "runs = []\nruns.append(1)\ndef go(): return len(runs)\n")
    function = load_function("one.py:go", folder=tmp_path)
    assert function() == 1
    assert load_function("one.py:go", folder=tmp_path) is function
    assert load_function("one:go", folder=tmp_path) is function


def test_a_file_in_a_folder_finds_its_neighbours(tmp_path):
    write(tmp_path, "jobs/neighbour_of_a.py", "value = 5\n")
    write(tmp_path, "jobs/a.py", "from neighbour_of_a import value\ndef train(ctx): return value + ctx\n")
    assert load_function("jobs/a.py", default="train", folder=tmp_path)(1) == 6


def test_a_file_called_like_a_loaded_module_does_not_get_that_module(tmp_path):
    write(tmp_path, "json.py", "def train(): return 'mine'\n")
    assert load_function("json.py:train", folder=tmp_path)() == "mine"
    assert hasattr(sys.modules["json"], "dumps")


def test_a_missing_file_lists_those_that_are_there(tmp_path):
    write(tmp_path, "tarin.py", "")
    with pytest.raises(NotFound, match=r"no file train\.py in the working folder; it has tarin\.py"):
        load_function("train.py:train", folder=tmp_path)


def test_a_path_that_leads_nowhere_is_named_as_it_was_written(tmp_path):
    for where in ("../nowhere.py", "/nowhere/at/all.py"):
        with pytest.raises(NotFound, match=f"no file {where} in the working folder"):
            load_function(f"{where}:f", folder=tmp_path)


def test_a_missing_module_is_told_from_a_module_that_it_imports(tmp_path):
    write(tmp_path, "imports_missing.py", "import surely_not_installed\n")
    with pytest.raises(NotFound, match="no module 'absent_here' here"):
        load_function("absent_here:f", folder=tmp_path)
    with pytest.raises(ModuleNotFoundError, match="surely_not_installed"):
        load_function("imports_missing:f", folder=tmp_path)


def test_a_missing_function_is_answered_with_the_nearest(tmp_path):
    write(tmp_path, "two.py", "def make_model(): pass\nsize = 3\n")
    with pytest.raises(NotFound, match=r"two\.py has no function 'make_modle'; did you mean 'make_model'"):
        load_function("two.py:make_modle", folder=tmp_path)
    with pytest.raises(UserError, match=r"two\.py:size is int, not a function"):
        load_function("two.py:size", folder=tmp_path)


def test_an_entry_without_a_function_is_refused_where_there_is_no_default(tmp_path):
    with pytest.raises(UserError, match=r"entry 'two\.py' does not name a function"):
        load_function("two.py", folder=tmp_path)


def test_what_a_users_module_raises_comes_through_and_leaves_no_half_module(tmp_path):
    write(tmp_path, "broken_one.py", "raise KeyError('mine')\n")
    with pytest.raises(KeyError, match="mine"):
        load_function("broken_one.py:f", folder=tmp_path)
    assert "broken_one" not in sys.modules


def test_a_sibling_is_the_other_function_of_the_same_file():
    assert sibling("a/model.py:make", "sample_input") == "a/model.py:sample_input"


def test_a_function_that_cannot_be_called_is_said_with_the_call_and_one_that_can_be_is_let_through():
    def wrapper(*given): ...

    @functools.wraps(lambda ctx, settings: None)
    def injecting(*given): ...

    for fits in (lambda ctx: 0, lambda ctx, lr=1: 0, wrapper, injecting, print, dict):
        check_call(fits, "a.py:f", "ctx")
    with pytest.raises(UserError, match=r"^a\.py:f cannot be called as f\(ctx\): too many .*; write `def f\(ctx\):`"):
        check_call(lambda: 0, "a.py:f", "ctx")
    with pytest.raises(UserError, match=r"^a\.py:f cannot be called as f\(\): missing a required argument: 'size'"):
        check_call(lambda size: 0, "a.py:f")


async def later(ctx): ...


def piecewise(ctx):
    yield ctx


@pytest.mark.parametrize(("function", "kind"), [(later, "async"), (piecewise, "a generator")])
def test_a_function_that_a_call_does_not_run_is_refused(function, kind):
    with pytest.raises(UserError, match=f"is {kind}: calling it does not run it"):
        check_call(function, "a.py:f", "ctx")
