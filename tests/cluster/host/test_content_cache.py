"""Data kept by its hash: whole or not at all, for reading only, removed when nobody uses it."""

import hashlib
import os
import subprocess
import time
from pathlib import Path

import pytest

from cluster.errors import FleetError, NotFound, UserError
from cluster.host.content_cache import ContentCache, source_key
from cluster.host.content_hash import content_of


@pytest.fixture
def kept(tmp_path):
    return ContentCache(tmp_path / "kept")


def folder(path: Path, **files: str) -> Path:
    for name, text in files.items():
        target = path / name.replace("_", "/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return path


def test_hashes_are_those_that_sha256sum_prints(tmp_path):
    made = folder(tmp_path / "data", b="2", a_z="1", a_b_c="3")
    (made / "empty").mkdir()
    (made / "a-1").write_text("4")
    listed = "find . -type f -printf '%P\\0' | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum"
    told = subprocess.run(["sh", "-c", listed], cwd=made, capture_output=True, text=True, check=True).stdout
    found = content_of(made)
    assert (found.sha256, found.bytes, found.files) == (told.split()[0], 4, 4)
    assert content_of(made / "b").sha256 == hashlib.sha256(b"2").hexdigest()


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "b"])
def test_links_are_refused_wherever_they_lead(tmp_path, target):
    made = folder(tmp_path / "data", b="2")
    (made / "link").symlink_to(target)
    with pytest.raises(UserError, match="is a link, and data must not contain links"):
        content_of(made)


def test_links_to_files_count_as_the_files_in_what_a_user_names(tmp_path):
    plain = folder(tmp_path / "plain", a="1", b="2")
    cache = folder(tmp_path / "cache", a="1")
    (cache / "b").symlink_to(plain / "b")
    assert content_of(cache, follow=True) == content_of(plain)
    for target in (tmp_path, "nowhere"):
        (cache / "b").unlink()
        (cache / "b").symlink_to(target)
        with pytest.raises(UserError, match=f"is a link to {target}, which is not a file"):
            content_of(cache, follow=True)


def test_pipes_and_empty_folders_are_no_data(tmp_path, kept):
    made = folder(tmp_path / "data", b="2")
    os.mkfifo(made / "pipe")
    with pytest.raises(UserError, match="it is not a file, folder or link"):
        kept.add(made)
    (tmp_path / "nothing").mkdir()
    with pytest.raises(UserError, match="contains no file"):
        content_of(tmp_path / "nothing")
    assert kept.keys() == []


def test_what_is_kept_is_found_by_hash_and_source_and_nobody_has_the_right_to_write_it(tmp_path, kept):
    made = folder(tmp_path / "data", b="2", a_run="x")
    (made / "a/run").chmod(0o755)
    key = source_key("s3://bucket/p", "version 1")
    found = kept.add(made, key=key)
    assert not made.exists() and kept.find(found.sha256).bytes == 2 and kept.source_sha256(key) == found.sha256
    assert kept.source_sha256(source_key("s3://bucket/p", "version 2")) == ""
    assert kept.keys() == [found.sha256[:16], source_key("s3://bucket/p")]
    with kept.use(found.sha256) as (content, _):
        modes = {path.name: oct(path.stat().st_mode & 0o777) for path in [content, *content.rglob("*")]}
    assert modes == {"content": "0o555", "a": "0o555", "run": "0o555", "b": "0o444"}


def test_what_is_not_as_expected_is_not_kept(tmp_path, kept):
    made = folder(tmp_path / "data", b="2")
    found = kept.add(made, "0" * 64)
    assert found.sha256 == content_of(folder(tmp_path / "again", b="2")).sha256
    assert kept.find(found.sha256) is None and list(kept.root.iterdir()) == []


def test_the_same_twice_is_kept_once(tmp_path, kept):
    first, second = (kept.add(folder(tmp_path / name, b="2")) for name in ("one", "two"))
    assert first.sha256 == second.sha256
    assert [path.name for path in kept.root.iterdir()] == [first.sha256]


def test_what_a_job_changed_in_spite_of_it_is_noticed_and_fetched_anew(tmp_path, kept):
    found = kept.add(folder(tmp_path / "data", b="2", c="3"))
    content = kept.root / found.sha256 / "content"
    times = (content / "b").stat()
    (content / "b").chmod(0o644)
    (content / "b").write_text("x")
    os.utime(content / "b", ns=(times.st_atime_ns, times.st_mtime_ns))
    (content / "b").chmod(0o444)
    with kept.use(found.sha256), pytest.raises(FleetError, match="another job still uses it"):
        kept.find(found.sha256)
    assert kept.find(found.sha256) is None and list(kept.root.iterdir()) == []


def test_times_alone_may_change_as_a_restored_backup_does(tmp_path, kept):
    found = kept.add(folder(tmp_path / "data", b="2"))
    os.utime(kept.root / found.sha256 / "content/b", (1, 1))
    assert kept.find(found.sha256).bytes == 1 and kept.find(found.sha256).bytes == 1


def three(tmp_path, kept) -> list[str]:
    """Kept one after the other, of 10 bytes each."""
    names = []
    for number in range(3):
        names.append(kept.add(folder(tmp_path / str(number), x=str(number) * 10)).sha256)
        os.utime(kept.root / names[-1] / "lock", (1000 + number, 1000 + number))
    return names


def test_the_one_that_was_not_used_for_longest_goes_first_and_never_one_in_use(tmp_path, kept):
    oldest, middle, newest = three(tmp_path, kept)
    with kept.use(oldest):
        os.utime(kept.root / oldest / "lock", (1000, 1000))
        kept.free_space(5, 34)
        assert [kept.find(one) is not None for one in (oldest, middle, newest)] == [True, False, True]
        with kept.use(newest), pytest.raises(FleetError, match="running attempts use 20 of 25"):
            kept.free_space(10, 25)
    kept.free_space(10, 15)
    assert kept.find(oldest) is None and kept.find(newest) is None


def test_room_is_made_on_a_full_disk_too_and_what_can_never_fit_is_refused(tmp_path, kept):
    oldest, middle, newest = three(tmp_path, kept)
    kept.free_space(15, 10**6, free_bytes=8)
    assert [kept.find(one) is not None for one in (oldest, middle, newest)] == [False, True, True]
    with pytest.raises(UserError, match="the data has 50 bytes; the cache is limited to 40"):
        kept.free_space(50, 40)
    with pytest.raises(FleetError, match="30 are free"):
        kept.free_space(100, 10**6, free_bytes=10)


def test_an_entry_that_is_gone_cannot_be_used(tmp_path, kept):
    with pytest.raises(NotFound, match="fetches it again"), kept.use("0" * 64):
        pass
    with pytest.raises(UserError, match="not a SHA-256"):
        kept.find("../../etc")


def test_what_a_killed_process_began_counts_for_nothing_and_goes(tmp_path, kept):
    found = kept.add(folder(tmp_path / "data", b="2"))
    half, gone = kept.root / "new-1", kept.root / "gone-1"
    for left in (half, gone):
        folder(left / "content", b="half")
    assert kept.keys() == [found.sha256[:16]]
    kept.remove_unused({found.sha256}, 0.0)
    assert half.exists() and not gone.exists()
    os.utime(half, (1, 1))
    assert kept.remove_unused(set(), time.time()) == [] and not half.exists()
    os.utime(kept.root / found.sha256 / "lock", (1, 1))
    assert kept.remove_unused(set(), 3600.0) == [found.sha256]
