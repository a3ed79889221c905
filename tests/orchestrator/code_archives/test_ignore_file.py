"""What of a submitted folder stays behind: .gitignore as git reads it, then `.polyfleetignore`; compared with git."""

import subprocess
import zipfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.errors import SpecError
from orchestrator.code_archives import code_archive, excluded_files, ignore_file, submitted_folder
from orchestrator.code_archives.ignore_patterns import escape_name, parse_rules

LINES = r"""
# a comment, then what looks like one
\#odd
\!odd
*.log
!keep.log
/only-here.txt
build/
data/**/*.bin
docs/**
**/cache
a/**/z
b/***/z
q**
deep/*/x
**/
!**/
!/*/
name[0-9].txt
set[]x-z].c
neg[!a-c]
neg2[^a-c]
class[[:digit:][:upper:]].t
wrong[[:nope:]]
bracket[:a]
open[a
rev[z-a]
dash[a-]
esc[\]\-]q
sl[/]ash
back\slash
star\*
tail\
sp ace
a?c
//twice
mid//dle
end//
!
/
?
foo.*.bar
*a*b*c*
é*
/anchored/*
!/anchored/back
x/y/../z
./dot
"""
LINES = [*LINES.strip("\n").split("\n"), "trail   ", "kept\\ ", "tab\t"]
PATHS = (
    *("#odd", "!odd", "a.log", "x/keep.log", "only-here.txt", "x/only-here.txt", "build/a", "x/build/b", "builder/c"),
    *("data/1.bin", "data/a/b/2.bin", "x/data/3.bin", "docs/a/b", "x/docs/c", "cache", "y/cache/z", "a/z", "a/b/c/z"),
    *("b/z", "b/m/n/z", "b/m/y", "qx", "w/qx/y", "deep/x", "deep/1/x", "deep/1/2/x", "name1.txt", "namex.txt"),
    *("set].c", "sety.c", "setw.c", "nega", "negd", "neg2a", "neg2d", "class7.t", "classQ.t", "classr.t", "wrong1"),
    *("bracket:", "bracketa", "bracketb", "open[a", "opena", "revz", "reva", "dash-", "dasha", "dashb"),
    *("esc]q", "esc-q", "escaq"),
    *("sl/ash", "slash", "backslash", "star*", "starx", "sp ace", "trail", "kept ", "kept", "tab", "abc", "abbc"),
    *("x/abc", "twice", "mid/dle", "end/x", "1", "x/2", "foo.x.bar", "foo.bar", "1a2b3c4", "aabbc", "cba"),
    *("éa", "eé"),
    *("anchored/gone", "anchored/back", "anchored/in/gone", "x/z", "dot", "train.py"),
)  # fmt: skip


def write(folder, files):
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "project"
    (made / ".git").mkdir(parents=True)
    return write(made, {"train.py": "def train(ctx): ..."})


def pack(folder):
    return code_archive.pack(folder, "run", folder.parent / "package.zip")


def names(package):
    with zipfile.ZipFile(package.path) as z:
        return [name for name in z.namelist() if not name.endswith("/")]


def told_beside_history(package):
    """The lines for the user but for that about `.git`."""
    return [line for line in package.left_out.messages if "they are not part of the code: .git/" not in line]


def git(folder, *words, **options):
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, check=True, **options).stdout


def kept_by_git(folder):
    if not (folder / ".git" / "HEAD").exists():
        git(folder, "init", "-q")
        git(folder, "config", "core.excludesFile", "/dev/null")
    listed = git(folder, "ls-files", "--others", "--exclude-standard", "-z").decode()
    return sorted(listed.strip("\0").split("\0")) if listed else []


def test_each_line_alone_leaves_out_what_git_leaves_out(folder):
    write(folder, dict.fromkeys(PATHS, ""))
    wrong = {}
    for line in LINES:
        (folder / ".gitignore").write_text(f"{line}\n")
        ours, theirs = names(pack(folder)), kept_by_git(folder)
        if ours != theirs:
            wrong[line] = {*ours} ^ {*theirs}
    assert not wrong


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("file", [".gitignore", ignore_file.FILE])
def test_all_lines_together_mean_in_either_file_what_they_mean_to_git(folder, file, end):
    lines = [line for line in LINES if line not in ("**/", "?")]
    write(folder, dict.fromkeys(PATHS, ""))
    (folder / ".gitignore").write_text("\ufeff" + end.join(lines), newline="")
    kept = kept_by_git(folder)
    if file != ".gitignore":
        (folder / ".gitignore").rename(folder / file)
        kept = sorted({*kept, file} - {".gitignore"})
    assert names(pack(folder)) == kept
    assert 20 < len(kept) < len(PATHS)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.text("ab*?/[]!-\\^ .#", min_size=1, max_size=8), max_size=4),
    st.lists(st.text("ab-. ", min_size=1, max_size=4), min_size=1, max_size=6, unique=True),
)
def test_whatever_is_written_git_agrees(tmp_path_factory, lines, parts):
    """Names of one and of two parts, asked of git without a file behind them."""
    if any("**" in part and part.strip("*") for line in lines for part in line.removeprefix("!").split("/")):
        return  # foo**/bar: see ignore_patterns
    folder = tmp_path_factory.getbasetemp() / "asked"
    if not folder.exists():
        folder.mkdir()
        kept_by_git(folder)
    (folder / ".gitignore").write_text("\n".join(lines))
    whole = [part for part in parts if part.strip(".")]
    asked = [*whole, *(f"{a}/{b}" for a in whole for b in whole)]
    if not asked:
        return
    told = subprocess.run(
        ["git", "check-ignore", "--no-index", "--stdin", "-z"], cwd=folder, capture_output=True,
        input="\0".join(asked).encode(),
    ).stdout.decode()  # fmt: skip
    rules = ignore_file.load_rules(folder).inside(folder, "")
    ours = [name for name in asked if stays(rules, name)]
    assert ours == [name for name in told.split("\0") if name]


def stays(rules, name):
    """Itself or, as the walk has it, the folder it is in."""
    above, slash, _ = name.rpartition("/")
    return bool(slash and rules.exclusion_reason(above, True)) or rules.exclusion_reason(name, False) is not None


def test_deeper_files_win_and_folders_above_count_up_to_the_repositorys(tmp_path):
    top = write(
        tmp_path / "repository",
        {
            ".gitignore": "*.bin\n/sub/project/gone\nbuild/\n",
            "sub/.gitignore": "*.txt\n!keep.bin\nproject/lib/*.c\n",
            "sub/project/.gitignore": "!good.txt\n/local\n",
            "sub/project/lib/.gitignore": "*\n!*.py\n!.gitignore\n!deeper/\n",
            **dict.fromkeys(
                (
                    *("sub/project/a.bin", "sub/project/keep.bin", "sub/project/gone", "sub/project/good.txt"),
                    *("sub/project/bad.txt", "sub/project/local", "sub/project/lib/local", "sub/project/lib/x.py"),
                    *("sub/project/lib/deeper/y.py", "sub/project/lib/deeper/y.c", "sub/project/build/z.py"),
                    *("sub/project/train.py", "sub/project/lib/q.c"),
                ),
                "",
            ),
        },
    )
    (tmp_path / ".gitignore").write_text("*.py\n")
    git(top, "init", "-q")
    kept = [name.removeprefix("sub/project/") for name in kept_by_git(top) if name.startswith("sub/project/")]
    project = top / "sub" / "project"
    assert names(pack(project)) == kept == [
        ".gitignore", "good.txt", "keep.bin", "lib/.gitignore", "lib/deeper/y.py", "lib/x.py", "train.py",
    ]  # fmt: skip
    assert names(pack(top / "sub" / "project" / "build")) == ["z.py"]  # a folder that is named itself is meant


def test_without_a_repository_folders_above_say_nothing(folder):
    (folder.parent / ".gitignore").write_text("*\n")
    assert names(pack(folder)) == ["train.py"]


def test_the_users_own_file_comes_last_and_brings_files_back(folder):
    write(
        folder,
        {
            ".gitignore": "data/\n*.so\nlib/.hidden\n",
            ".polyfleetignore": "!/data/\n!fast.so\ndocs/\n",
            **dict.fromkeys(("data/1.npy", "lib/fast.so", "lib/slow.so", "docs/a.md", "data/deep/2.npy"), ""),
        },
    )
    assert names(pack(folder)) == [
        *(".gitignore", ".polyfleetignore", "data/1.npy", "data/deep/2.npy", "lib/fast.so", "train.py"),
    ]


def test_what_git_leaves_out_is_counted_named_and_said_how_to_bring_along(folder):
    write(folder, {".gitignore": "data/\n*.[oa]\n", **dict.fromkeys(("data/1", "data/x/2", "data/x/3", "m [1].o"), "")})
    (told,) = told_beside_history(pack(folder))
    assert told == (
        "left out of the submitted folder, because .gitignore names them: 4 files (data/, m [1].o)."
        " To send data/ anyway, write !/data/ into .polyfleetignore"
    )
    (folder / ".polyfleetignore").write_text(f"!/data/\n!{escape_name('m [1].o')}\n")
    package = pack(folder)
    assert {"data/x/3", "m [1].o"} <= set(names(package))
    assert told_beside_history(package) == []


def test_a_data_set_that_stays_behind_is_not_counted_to_its_end(folder, monkeypatch):
    for module in (excluded_files, submitted_folder):
        monkeypatch.setattr(module, "MAX_COUNT", 3)
    write(folder, {".gitignore": "data/\n", **dict.fromkeys((f"data/{n}/x" for n in range(5)), "")})
    (told,) = told_beside_history(pack(folder))
    assert "at least 3 files (data/)" in told


def test_gitignore_can_name_credentials_but_not_have_them_sent(folder):
    write(folder, {".gitignore": "!.env\n*.key\n", ".env": "TOKEN=1", "a.key": "k"})
    package = pack(folder)
    assert names(package) == [".gitignore", "train.py"]
    assert (package.left_out.credentials, package.left_out.by_git) == ((".env",), ("a.key",))


def test_outside_of_a_repository_gitignore_leaves_out_nothing_as_for_git(folder):
    write(folder, {".gitignore": "*.ckpt\n", "keep.ckpt": "", "module/.gitignore": "*.log\n", "module/a.log": ""})
    assert names(pack(folder)) == [".gitignore", "module/.gitignore", "train.py"]
    (folder / ".git").rmdir()
    everything = [".gitignore", "keep.ckpt", "module/.gitignore", "module/a.log", "train.py"]
    assert (names(pack(folder)), pack(folder).left_out.messages) == (everything, ())
    (folder / "module" / ".git").mkdir()  # a repository inside of a folder that is none
    assert names(pack(folder)) == [name for name in everything if name != "module/a.log"]


def test_git_itself_is_never_sent_be_it_a_folder_or_a_file(folder):
    write(folder, {".git/config": "", "module/.git": "gitdir: /elsewhere", ".polyfleetignore": "!.git\n!.git/\n"})
    assert names(pack(folder)) == [".polyfleetignore", "train.py"]


def test_a_gitignore_that_is_a_link_does_not_count_and_one_of_other_bytes_does(folder):
    write(folder, {"elsewhere": "train.py\n", "lib/x.log": "", "lib/y.py": ""})
    (folder / ".gitignore").symlink_to("elsewhere")
    (folder / "lib" / ".gitignore").write_bytes(b"# \xe9\n*.log\n")
    assert names(pack(folder)) == [".gitignore", "elsewhere", "lib/.gitignore", "lib/y.py", "train.py"]


@pytest.mark.parametrize(("file", "most"), [(".gitignore", 10_000), (".polyfleetignore", 1000)])
def test_a_file_of_very_many_lines_is_named(folder, file, most):
    (folder / file).write_text("x\n" * (most + 1))
    with pytest.raises(SpecError, match=rf"working_dir: .*/{file} has more than {most:,} lines"):
        pack(folder)


def test_a_pattern_made_to_take_long_takes_no_time():
    rules = parse_rules("*a" * 60 + "b\n" + "**/" * 60 + "x\n")
    assert rules.match("a" * 5000, False) is None
    assert rules.match("a/" * 60 + "y", False) is None
