import hashlib
import io
import shutil
import stat
import zipfile
from pathlib import Path

import pytest

import cluster
from cluster.errors import Conflict, FleetError, NotFound, UserError
from cluster.host import last_used
from cluster.input import archive_checks, archive_unpack
from workers.storage import code_archives
from workers.storage.code_archives import NodeCodeArchives


def archive(*entries, method=zipfile.ZIP_DEFLATED):
    """A zip of (name or ZipInfo, content) pairs, as bytes."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", method) as z:
        for name, content in entries:
            z.writestr(name, content)
    return made.getvalue()


def entry(name, kind=stat.S_IFREG | 0o644, **attributes):
    info = zipfile.ZipInfo(name)
    info.external_attr = kind << 16
    for key, value in attributes.items():
        setattr(info, key, value)
    return info


def sha(data):
    return hashlib.sha256(data).hexdigest()


def given(folder, data):
    path = folder / "given.zip"
    path.write_bytes(data)
    return path


@pytest.fixture
def store(tmp_path):
    return NodeCodeArchives(tmp_path / "packages")


@pytest.fixture
def unpacked(store, tmp_path):
    """unpacked(data) -> {path: content} of what lies in the target then."""

    def put_and_unpack(data):
        store.put(sha(data), 0, data, True)
        target = tmp_path / "work"
        target.mkdir()
        store.unpack(sha(data), target)
        return {str(p.relative_to(target)): p.read_text() for p in target.rglob("*") if p.is_file()}

    return put_and_unpack


def test_a_folder_arrives_as_it_was_sent(unpacked, tmp_path):
    data = archive(
        ("train.py", "x = 1"), ("pkg/", ""), ("pkg/a/b.txt", "é"), (entry("run.sh", stat.S_IFREG | 0o755), "#!")
    )
    assert unpacked(data) == {"train.py": "x = 1", "pkg/a/b.txt": "é", "run.sh": "#!"}
    assert (tmp_path / "work/run.sh").stat().st_mode & 0o777 & ~0o022 == 0o755
    assert not (tmp_path / "work/train.py").stat().st_mode & stat.S_IXUSR


def test_a_package_comes_in_pieces_and_once(store):
    data = archive(("data.bin", bytes(range(256)) * 40), method=zipfile.ZIP_STORED)
    for offset in range(0, len(data), 1000):
        assert not store.has(sha(data))
        store.put(sha(data), offset, data[offset : offset + 1000], offset + 1000 >= len(data))
    assert store.has(sha(data))
    store.put(sha(data), 0, b"anything", True)
    assert store.has(sha(data))


def test_a_piece_out_of_order_is_refused_and_a_new_start_is_not(store):
    data = archive(("a", "a"))
    store.put(sha(data), 0, data[:5], False)
    with pytest.raises(Conflict, match="starts at byte 9, but 5 bytes have arrived"):
        store.put(sha(data), 9, data[9:], True)
    store.put(sha(data), 0, data, True)
    assert store.has(sha(data))


def test_a_node_says_which_bytes_of_an_archive_it_has_also_after_a_restart(store, tmp_path):
    data = archive(("a", "a"))
    assert store.arrived(sha(data)) == {"bytes": 0, "sha256": sha(b"")}
    store.put(sha(data), 0, data[:5], False)
    restarted = NodeCodeArchives(tmp_path / "packages")
    assert restarted.arrived(sha(data)) == {"bytes": 5, "sha256": sha(data[:5])}
    restarted.put(sha(data), 5, data[5:], True)
    assert restarted.has(sha(data)) and restarted.arrived(sha(data))["bytes"] == 0
    with pytest.raises(UserError, match="is not a SHA-256"):
        restarted.arrived("../x")


def test_an_upload_that_nobody_continues_is_removed(store, tmp_path, monkeypatch):
    data = archive(("a", "a"))
    store.has(sha(data))
    store.put(sha(data), 0, data[:5], False)
    assert store.idle() == [] and store.arrived(sha(data))["bytes"] == 5
    monkeypatch.setattr(last_used, "IDLE_S", 0.0)
    assert store.idle() == [] and list((tmp_path / "packages").iterdir()) == []


def test_an_archive_that_was_damaged_on_the_way_is_not_kept(store, tmp_path):
    data = archive(("a", "a"))
    with pytest.raises(UserError, match="arrived with the SHA-256"):
        store.put(sha(data), 0, data[:-1] + b"x", True)
    assert list((tmp_path / "packages").iterdir()) == []


@pytest.mark.parametrize("name", ["../../etc/passwd", "a" * 63, "A" * 64, "", "0" * 64 + "\n"])
def test_a_package_is_named_by_its_digest_only(store, name):
    with pytest.raises(UserError, match="is not a SHA-256"):
        store.has(name)


def test_a_package_this_node_does_not_have_is_not_found(store, tmp_path):
    with pytest.raises(NotFound, match="code archive 000000000000"):
        store.unpack("0" * 64, tmp_path)


def test_links_inside_arrive_as_links(unpacked, tmp_path):
    link = stat.S_IFLNK | 0o777
    data = archive(
        (entry("alias.py", link), "lib/mod.py"), ("lib/mod.py", "x = 1"), (entry("only/links/up", link), "../../lib")
    )
    assert unpacked(data)["alias.py"] == "x = 1"
    assert (tmp_path / "work/alias.py").readlink() == Path("lib/mod.py")
    assert (tmp_path / "work/only/links/up/mod.py").read_text() == "x = 1"


HOSTILE = {
    "an absolute path": [("/etc/cron.d/x", "")],
    "a path that climbs": [("a/../../x", "")],
    "a path that only climbs": [("..", "")],
    "a backslash": [("a\\..\\..\\x", "")],
    "a drive": [("C:x", "")],
    "a dot": [("./x", "")],
    "a double slash": [("a//x", "")],
    "no name": [("/", "")],
    "a newline": [("a\nb", "")],
    "an escape": [("a\x1b[2Jb", "")],
    "a link": [(entry("link", stat.S_IFLNK | 0o777), "/etc/passwd")],
    "a link below which files lie": [(entry("d", stat.S_IFLNK | 0o777), "/tmp"), ("d/x", "")],
    "a link out": [("d/x", ""), (entry("d/l", stat.S_IFLNK | 0o777), "../../x")],
    "a link through a link": [("d/x", ""), (entry("l", stat.S_IFLNK | 0o777), "d"),
                              (entry("m", stat.S_IFLNK | 0o777), "l/../..")],
    "a link in the place of a folder": [("d/x", ""), (entry("D", stat.S_IFLNK | 0o777), "d")],
    "a link to nothing": [(entry("l", stat.S_IFLNK | 0o777), "later")],
    "a device": [(entry("null", stat.S_IFCHR | 0o666), "")],
    "a fifo": [(entry("pipe", stat.S_IFIFO | 0o666), "")],
    "a socket": [(entry("sock", stat.S_IFSOCK | 0o666), "")],
    "a folder called a file": [(entry("d", stat.S_IFDIR | 0o755), "content")],
    "two cases of a name": [("Train.py", "1"), ("train.py", "2")],
    "two forms of a letter": [("caf\u00e9.py", "1"), ("cafe\u0301.py", "2")],
    "a file that is a folder": [("a", ""), ("a/b", "")],
    "a folder that is a file": [("a/b", ""), ("a", "")],
    "folders in two cases around a file": [("A", ""), ("a/b", "")],
    "a very long name": [("x" * 300, "")],
    "a very long path": [("/".join(["x" * 100] * 11), "")],
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_archive_is_refused_as_a_whole(store, tmp_path, what):
    data = archive(("first.txt", "harmless"), *HOSTILE[what])
    with pytest.raises(UserError, match="the submitted archive contains"):
        store.put(sha(data), 0, data, True)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_name_that_is_there_twice_is_refused(store):
    data = archive(("a", "1"), ("a", "2"))
    with pytest.raises(UserError, match="'a' twice"):
        store.put(sha(data), 0, data, True)


def test_a_name_with_a_zero_byte_is_refused(store):
    data = archive(("safe.txt!evil", "")).replace(b"safe.txt!evil", b"safe.txt\0evil")
    with pytest.raises(UserError, match="control character"):
        store.put(sha(data), 0, data, True)


def test_a_bomb_is_refused_by_its_ratio(store):
    data = archive(("zeros", b"\0" * (20 << 20)))
    with pytest.raises(UserError, match=r"unpacks to .* times its size, more than 200"):
        store.put(sha(data), 0, data, True)


def test_a_bomb_of_many_files_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(archive_checks, "MAX_ENTRIES", 10)
    store = NodeCodeArchives(tmp_path / "packages", archive_unpack.read)  # in this process, where the limit is another
    data = archive(*((f"f{i}", "") for i in range(11)))
    with pytest.raises(UserError, match="contains 11 files, more than 10"):
        store.put(sha(data), 0, data, True)


def test_an_archive_that_is_too_large_is_refused_before_it_fills_the_disk(store, monkeypatch, tmp_path):
    monkeypatch.setattr(code_archives, "MAX_ARCHIVE_BYTES", 1 << 20)
    store.put("0" * 64, 0, b"x" * (1 << 20), False)
    with pytest.raises(UserError, match="larger than 1 MiB"):
        store.put("0" * 64, 1 << 20, b"x", False)
    assert list((tmp_path / "packages").iterdir()) == []


def test_an_encrypted_entry_is_refused(store):
    data = bytearray(archive(("a", "secret"), method=zipfile.ZIP_STORED))
    data[data.index(b"PK\x01\x02") + 8] |= 1
    with pytest.raises(UserError, match="uses an unsupported compression method"):
        store.put(sha(bytes(data)), 0, bytes(data), True)


@pytest.mark.parametrize(
    "data",
    [b"", b"not a zip", archive(("a", "a"))[:-4], b"PK\x05\x06" + b"\xff" * 18],
    ids=["nothing", "text", "cut off", "an end that lies"],  # of their own: an archive's bytes hold the time
)
def test_what_is_no_zip_is_refused(store, data):
    with pytest.raises(UserError, match="not a readable zip file"):
        store.put(sha(data), 0, data, True)


def test_an_entry_larger_than_announced_writes_no_more_than_announced(store, tmp_path):
    """The directory says 10 bytes, the stream holds 10,000."""
    honest = archive(("a", "x" * 10_000))
    at = honest.index(b"PK\x01\x02") + 24
    data = honest[:at] + (10).to_bytes(4, "little") + honest[at + 4 :]
    (tmp_path / "work").mkdir()
    with pytest.raises(UserError, match="not a readable zip file"):
        archive_unpack.read(given(tmp_path, data), tmp_path / "work")
    assert sum(p.stat().st_size for p in (tmp_path / "work").iterdir()) <= 10
    with pytest.raises(UserError, match="not a readable zip file"):
        store.put(sha(data), 0, data, True)
    assert not store.has(sha(data)) and list((tmp_path / "packages").iterdir()) == []


def test_the_files_of_packages_are_private(store, tmp_path):
    assert (tmp_path / "packages").stat().st_mode & 0o777 == 0o700


def test_an_archive_is_read_in_a_process_of_its_own_which_ends_with_its_limits(tmp_path, monkeypatch):
    """Where the reader would take more memory than it may, it ends, and whoever asked goes on."""
    path = given(tmp_path, archive(("a", "a")))
    assert archive_unpack.read_in_child(path).names == ["a"]
    greedy = tmp_path / "greedy"
    shutil.copytree(Path(cluster.__file__).parent, greedy / "cluster", ignore=shutil.ignore_patterns("__pycache__"))
    with (greedy / "cluster" / "input" / "archive_checks.py").open("a") as f:
        f.write("\ndef check(archive):\n    return bytearray(1 << 30)\n")
    monkeypatch.setattr(archive_unpack, "CODE", greedy)
    with pytest.raises(UserError, match="more memory than archives of its size do"):
        archive_unpack.read_in_child(path)


def test_what_the_system_refuses_is_no_fault_of_the_archive(tmp_path):
    path = given(tmp_path, archive(("a", "a")))
    with pytest.raises(FleetError, match="could not be unpacked: File name too long"):
        archive_unpack.read_in_child(path, tmp_path / ("y" * 300))
