"""A link is made only where the names in its archive say that it stays inside; whatever is said, nothing leads out."""

import random
import zipfile

import pytest

from cluster.errors import PolyfleetError
from cluster.input import archive_checks, archive_unpack
from cluster.input.archive_links import MAX_HOPS, ArchiveTree

NAMES = ("a", "lib/mod.py", "lib/deep/x", "empty/", "Case/File")
SAFE = {
    "a file beside it": {"l": "a"},
    "a file below": {"l": "lib/mod.py"},
    "a file above": {"lib/deep/l": "../../a"},
    "a folder": {"l": "lib/deep"},
    "a folder with a slash": {"l": "./lib//deep/"},
    "an empty folder": {"l": "empty"},
    "the folder itself": {"lib/l": ".."},
    "there and back": {"l": "lib/deep/../mod.py"},
    "the file of a link": {"so": "so.1", "so.1": "so.1.2", "so.1.2": "lib/mod.py"},
    "as many links as a system follows": {f"l{n}": f"l{n + 1}" for n in range(MAX_HOPS - 1)}
    | {f"l{MAX_HOPS - 1}": "a"},
}
ATTACKS = {
    "an absolute path": {"l": "/etc/passwd"},
    "the root": {"l": "/"},
    "nothing": {"l": ""},
    "above": {"l": ".."},
    "above from below": {"lib/l": "../../a"},
    "above and back": {"l": "../project/a"},
    "above after a way down": {"l": "lib/deep/../../../x"},
    "a name that is not there": {"l": "absent"},
    "a folder that is not there, and back": {"l": "absent/../a"},
    "through a file": {"l": "a/../a"},
    "a file with a slash": {"l": "a/"},
    "in another case": {"l": "case/file"},
    "a letter of another case on the way": {"l": "LIB/mod.py"},
    "itself": {"l": "l"},
    "a circle": {"l": "m", "m": "l"},
    "a link that leads out": {"l": "m", "m": ".."},
    "through a link": {"d": "lib", "l": "d/mod.py"},
    "above by a link to a deep folder": {"d": "lib/deep", "l": "d/../../.."},
    "a chain, each one level up": {"lib/deep/u": "..", "l": "lib/deep/u/../.."},
    "a link that replaces a folder": {"lib": "empty"},
    "through a link that replaces a folder": {"lib": "empty", "l": "lib/mod.py"},
    "below a link": {"lib/deep": "../empty", "lib/deep/l": "../../.."},
    "a backslash": {"l": "lib\\..\\..\\x"},
    "a zero": {"l": "a\0b"},
    "a chain that is too long": {f"l{n}": f"l{n + 1}" for n in range(MAX_HOPS)} | {f"l{MAX_HOPS}": "a"},
}


def refusals(links):
    tree = ArchiveTree((*NAMES, *links), links)
    return [reason for name in links if (reason := tree.link_error(name))]


@pytest.mark.parametrize("links", SAFE.values(), ids=SAFE)
def test_what_stays_inside_may_be_made(links):
    assert refusals(links) == []


@pytest.mark.parametrize("links", ATTACKS.values(), ids=ATTACKS)
def test_what_could_lead_elsewhere_may_not(links):
    assert refusals(links)


def test_a_link_to_a_folder_is_known_as_one():
    links = {"file": "a", "folder": "lib", "second": "folder", "whole": "."}
    tree = ArchiveTree((*NAMES, *links), links)
    assert [name for name in links if tree.leads_to_folder(name)] == ["folder", "second", "whole"]


FILES = ("a", "d/x", "d/e/y", "B", "d/E/z")
LINKS = ("l", "m", "d/l", "d/e/m", "b", "d", "d/x", "e/n")
PARTS = ("a", "b", "d", "e", "x", "y", "l", "m", "..", "..", ".", "")


def made_up(chance):
    """(names, links) as an attacker may choose them: names in two cases, below links, of files; texts of any kind."""
    links = {}
    for name in chance.sample(LINKS, chance.randint(1, 3)):
        text = "/".join(chance.choices(PARTS, k=chance.randint(1, 4)))
        links[name] = "/" * (chance.random() < 0.05) + (text or "a")
    return dict.fromkeys(chance.sample(FILES, chance.randint(1, 4)), "") | links, links


def zipped(path, names, links):
    with zipfile.ZipFile(path, "w") as z:
        for name, text in names.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = (0o120777 if name in links else 0o100644) << 16
            z.writestr(info, text)


def test_no_archive_leads_out_of_its_folder_on_a_real_disk(tmp_path):
    """Of 4,000 archives all that the names allow are unpacked, and some of those that they do not."""
    chance, taken = random.Random(30), 0
    for number in range(4000):
        names, links = made_up(chance)
        tree = ArchiveTree(names, links)
        allowed = not any(map(tree.link_error, links))
        if not allowed and number % 20:
            continue
        archive, folder = tmp_path / "a.zip", tmp_path / f"{number}" / "folder"
        zipped(archive, names, links)
        folder.mkdir(parents=True)
        try:
            archive_unpack.read(archive, folder)
        except PolyfleetError:
            assert not any(path.is_symlink() for path in folder.rglob("*"))
            continue
        assert allowed and list(folder.parent.iterdir()) == [folder]
        taken += 1
        for name in names:
            assert (folder / name).is_symlink() == (name in links)
            assert (folder / name).resolve(strict=True).is_relative_to(folder)
    assert taken > 50


def test_a_disk_that_takes_two_names_for_one_is_not_written_through(tmp_path):
    """As if `D` were made in the place of `d`: the second look is at the disk, and follows no link."""
    (tmp_path / "out").mkdir()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "d").symlink_to(tmp_path / "out")
    with pytest.raises(OSError, match="d"):
        archive_unpack._make_links({"d/l": "x"}, tmp_path / "folder")
    assert not list((tmp_path / "out").iterdir())


def test_a_link_that_leads_out_on_this_disk_is_refused_whatever_the_names_say(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(PolyfleetError, match="a link out of its folder"):
        archive_unpack._make_links({"l": ".."}, tmp_path / "folder")


def test_a_link_has_a_short_text_in_utf8_and_no_slash_behind_its_name(tmp_path):
    for name, text in (("l", "./" * 600 + "a"), ("l/", "a"), ("l", b"\xff")):
        zipped(tmp_path / "a.zip", {"a": "", name: text}, {name: text})
        with pytest.raises(PolyfleetError, match="the submitted archive"):
            archive_checks.check(tmp_path / "a.zip")
