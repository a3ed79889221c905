"""Real compilers build real libraries; compilers that fail or hang are real programs that do."""

import ctypes
import os
import pickle
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from workers import native
from workers.errors import NativeUnavailable
from workers.native import compiler, store

ROOT = Path(__file__).parents[3]
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, compiler.COMPILERS)), reason="no C++ compiler is installed here"
)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    """Each test is a process that has built nothing yet, on a node that has not either."""
    monkeypatch.setenv("POLYFLEET_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("POLYFLEET_NATIVE", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(native, "_libraries", {})
    return tmp_path / "home"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "twice.cpp"
    path.write_text('extern "C" int twice(int x) { return 2 * x; }\n')
    return path


def another_process(monkeypatch):
    monkeypatch.setattr(native, "_libraries", {})


def program(path: Path, lines: str) -> str:
    path.write_text(f"#!/bin/sh\n{lines}\n")
    path.chmod(0o700)
    return str(path)


def kept(home: Path) -> list[Path]:
    return sorted((home / "native").glob("*.so"))


@needs_compiler
def test_a_source_is_built_once_and_kept_where_only_this_user_can_write(home, source, monkeypatch):
    assert native.library("twice", [source]).twice(21) == 42
    (built,) = kept(home)
    assert stat.S_IMODE((home / "native").stat().st_mode) == 0o700
    assert stat.S_IMODE(built.stat().st_mode) == 0o700
    before = built.stat().st_mtime_ns
    another_process(monkeypatch)
    assert native.library("twice", [source]).twice(4) == 8
    assert kept(home) == [built] and built.stat().st_mtime_ns == before


@needs_compiler
def test_a_process_loads_a_library_once(source):
    assert native.library("twice", [source]) is native.library("twice", [source])


@needs_compiler
def test_another_source_flag_header_or_processor_is_another_library(home, source, monkeypatch):
    source.with_name("factor.h").write_text("#define FACTOR 2\n")
    source.write_text('#include "factor.h"\nextern "C" int twice(int x) { return FACTOR * x; }\n')
    assert native.library("twice", [source]).twice(5) == 10
    source.with_name("factor.h").write_text("#define FACTOR 3\n")
    another_process(monkeypatch)
    assert native.library("twice", [source]).twice(5) == 15
    assert native.library("twice", [source], ["-UFACTOR", "-g"]).twice(5) == 15
    another_process(monkeypatch)
    monkeypatch.setattr(compiler, "cpu_features", lambda: "a processor of another node")
    assert native.library("twice", [source]).twice(5) == 15
    assert len(kept(home)) == 4


@needs_compiler
def test_the_compilers_version_is_part_of_the_key(home, source, tmp_path, monkeypatch):
    real = shutil.which("g++") or shutil.which("c++")
    for version in ("one 1.0", "one 2.0"):
        command = program(tmp_path / "cxx", f'[ "$1" = --version ] && echo "{version}" && exit 0\nexec {real} "$@"')
        compiler._version.cache_clear()
        another_process(monkeypatch)
        monkeypatch.setenv("CXX", command)
        native.library("twice", [source])
    assert len(kept(home)) == 2


@needs_compiler
def test_a_cut_or_changed_library_is_built_again(home, source, monkeypatch):
    native.library("twice", [source])
    (built,) = kept(home)
    whole = built.read_bytes()
    built.unlink()  # the mapped file of this process stays
    built.write_bytes(whole[: len(whole) // 2])
    built.chmod(0o700)
    another_process(monkeypatch)
    assert native.library("twice", [source]).twice(21) == 42
    (again,) = kept(home)
    assert len(again.read_bytes()) == len(whole)


@needs_compiler
def test_a_library_that_others_could_write_is_not_loaded_but_built_again(home, source, monkeypatch):
    native.library("twice", [source])
    (built,) = kept(home)
    inode = built.stat().st_ino
    built.chmod(0o777)
    link = built.with_name(built.name.replace("twice-", "thrice-"))
    link.symlink_to("/usr/lib")
    another_process(monkeypatch)
    native.library("twice", [source])
    (again,) = [path for path in kept(home) if path.name.startswith("twice")]
    assert stat.S_IMODE(again.stat().st_mode) == 0o700 and again.stat().st_ino != inode


@needs_compiler
def test_a_folder_that_others_can_write_is_closed_first(home, source):
    (home / "native").mkdir(parents=True, mode=0o777)
    (home / "native").chmod(0o777)
    assert native.library("twice", [source]).twice(1) == 2
    assert stat.S_IMODE((home / "native").stat().st_mode) == 0o700


@needs_compiler
def test_without_a_folder_to_keep_it_the_library_is_built_for_this_process_alone(home, source):
    home.write_text("a file where the folder should be")
    assert native.library("twice", [source]).twice(21) == 42
    assert home.is_file()


@needs_compiler
def test_with_no_folder_at_all_there_is_a_reason(home, source, tmp_path, monkeypatch):
    home.write_text("a file where the folder should be")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(NativeUnavailable, match="twice cannot be built or loaded") as raised:
        native.library("twice", [source])
    assert "nothing can be stored" in str(raised.value)


@needs_compiler
def test_a_user_without_a_home_has_libraries_for_this_process_alone(source, monkeypatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(store.paths, "home", no_home)
    assert native.library("twice", [source]).twice(21) == 42


@needs_compiler
def test_what_is_not_there_yet_is_not_built_where_nobody_waits_for_it(home, source, monkeypatch):
    with pytest.raises(NativeUnavailable, match="twice has not been built on this node yet"):
        native.library("twice", [source], build=False)
    assert native.library("twice", [source]).twice(2) == 4
    another_process(monkeypatch)
    assert native.library("twice", [source], build=False).twice(2) == 4


@needs_compiler
def test_two_processes_may_build_the_same_at_once(home, source):
    code = f"from workers import native; assert native.library('twice', [{str(source)!r}]).twice(21) == 42"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    begun = [subprocess.Popen([sys.executable, "-c", code], env=environment) for _ in range(3)]
    assert [process.wait() for process in begun] == [0, 0, 0]
    assert [p for p in (home / "native").iterdir() if p.suffix != ".so"] == []
    assert native.library("twice", [source]).twice(3) == 6


@needs_compiler
def test_threads_that_ask_at_once_get_the_same_library(source):
    found: list[ctypes.CDLL] = []
    threads = [threading.Thread(target=lambda: found.append(native.library("twice", [source]))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 4 and len({id(one) for one in found}) == 1


@needs_compiler
def test_a_source_that_does_not_compile_says_what_the_compiler_said(source):
    source.write_text("int twice(int x) { return y; }\n")
    with pytest.raises(NativeUnavailable, match=r"exit code 1: .*error: .*y"):
        native.library("twice", [source])


@needs_compiler
def test_a_source_that_is_not_there_is_a_reason():
    with pytest.raises(NativeUnavailable, match=r"source nowhere\.cpp cannot be read"):
        native.library("nowhere")


@pytest.mark.parametrize(
    "command, reason",
    [
        ("/nowhere/cxx", "/nowhere/cxx cannot be run: No such file"),
        ("'unclosed", "CXX='unclosed cannot be parsed"),
    ],
)
def test_a_compiler_that_is_not_there_is_a_reason(command, reason, source, monkeypatch):
    monkeypatch.setenv("CXX", command)
    with pytest.raises(NativeUnavailable, match=reason):
        native.library("twice", [source])
    assert reason in native.unavailable_reason()


def test_without_any_compiler_the_reason_names_those_looked_for(source, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NativeUnavailable, match=r"no C\+\+ compiler is installed \(searched for g\+\+, c\+\+, clang"):
        native.library("twice", [source])


def test_a_compiler_that_hangs_is_ended_with_all_it_started(source, tmp_path, monkeypatch):
    alive = tmp_path / "alive"  # open for writing in all that was started
    os.mkfifo(alive)
    descriptor = os.open(alive, os.O_RDONLY | os.O_NONBLOCK)
    hanging = f'[ "$1" = --version ] && echo 1 && exit 0\nexec 9> {alive}\necho started >&9\nsleep 600 &\nwait'
    monkeypatch.setenv("CXX", program(tmp_path / "hanging", hanging))
    monkeypatch.setattr(compiler, "BUILD_LIMIT_S", 1.0)
    with os.fdopen(descriptor, "rb", buffering=0) as told:
        with pytest.raises(NativeUnavailable, match="did not end within 1 s"):
            native.library("twice", [source])
        os.set_blocking(descriptor, True)
        assert told.read() in (b"started\n", b"")  # ends only once nobody holds it open


def test_a_compiler_that_writes_nothing_or_nonsense_is_a_reason(source, tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", program(tmp_path / "silent", "exit 0"))
    with pytest.raises(NativeUnavailable, match="wrote nothing"):
        native.library("twice", [source])
    nonsense = 'while [ "$1" != -o ] && [ $# -gt 0 ]; do shift; done; [ -n "$2" ] && echo nonsense > "$2"; exit 0'
    monkeypatch.setenv("CXX", program(tmp_path / "nonsense", nonsense))
    with pytest.raises(NativeUnavailable, match="cannot be built or loaded"):
        native.library("twice", [source])


def test_what_failed_is_not_tried_again_in_the_same_process(source, tmp_path, monkeypatch):
    calls = tmp_path / "calls"
    command = program(tmp_path / "failing", f'[ "$1" = --version ] && exit 0\necho x >> {calls}\nexit 1')
    monkeypatch.setenv("CXX", command)
    for _ in range(3):
        with pytest.raises(NativeUnavailable, match="exit code 1: it printed nothing"):
            native.library("twice", [source])
    assert calls.read_text() == "x\n"


@pytest.mark.parametrize("value", ["off", "0", "no", " OFF "])
def test_it_can_be_turned_off(value, source, monkeypatch):
    monkeypatch.setenv("POLYFLEET_NATIVE", value)
    with pytest.raises(NativeUnavailable, match="turns compiled code off"):
        native.library("twice", [source])
    assert "turns compiled code off" in native.unavailable_reason()


@pytest.mark.parametrize("flag", ["-ffast-math", "-Ofast", "-funsafe-math-optimizations"])
def test_flags_that_change_arithmetic_everywhere_are_refused(flag, source):
    with pytest.raises(ValueError, match="flush subnormal numbers"):
        native.library("twice", [source], [flag])


@pytest.mark.parametrize("name", ["", "../twice", "a b", "a*"])
def test_a_name_that_would_be_a_path_or_a_pattern_is_refused(name, source):
    with pytest.raises(ValueError, match="cannot be the name of a library"):
        native.library(name, [source])


@needs_compiler
def test_what_is_built_here_leaves_subnormal_numbers_alone():
    assert native.unavailable_reason() == ""
    native.library("probe")
    assert float.fromhex("0x1p-1074") != 0.0 and float.fromhex("0x1p-1073") / 2 != 0.0


def test_the_error_survives_pickling():
    error = NativeUnavailable("no compiler")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) and again.reason == "no compiler" and error.args == ("no compiler",)


def test_nothing_of_it_imports_torch():
    code = "import sys, workers.native as n; n.unavailable_reason(); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False)
    assert done.returncode == 0
