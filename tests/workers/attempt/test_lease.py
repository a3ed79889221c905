import subprocess
import sys

import pytest

from workers.protocol import lease


def test_a_lease_holds_until_its_deadline(tmp_path):
    lease.write(tmp_path / "lease", 600)
    assert not lease.is_expired(tmp_path / "lease")
    assert 599 < lease.deadline_s(tmp_path / "lease") - lease.now_s() <= 600.001


def test_a_lease_that_has_passed_is_never_renewed(tmp_path):
    lease.write(tmp_path / "lease", 10, requested_s=lease.now_s() - 11)
    assert not lease.Lease(tmp_path / "lease").renew(600)
    assert lease.is_expired(tmp_path / "lease")


def test_no_lease_at_all_has_passed(tmp_path):
    assert lease.is_expired(tmp_path / "lease")
    (tmp_path / "lease").write_text("soon")
    assert lease.is_expired(tmp_path / "lease")


def test_a_slow_answer_counts_from_when_it_was_asked_for(tmp_path):
    lease.write(tmp_path / "lease", 5)
    asked_s = lease.now_s() - 100
    assert lease.Lease(tmp_path / "lease").renew(120, asked_s)
    assert lease.deadline_s(tmp_path / "lease") < asked_s + 121


def test_an_older_word_does_not_shorten_a_lease(tmp_path):
    lease.write(tmp_path / "lease", 600)
    before = lease.deadline_s(tmp_path / "lease")
    assert lease.Lease(tmp_path / "lease").renew(20)
    assert lease.deadline_s(tmp_path / "lease") == before


def test_a_renewal_writes_into_the_same_file(tmp_path):
    lease.write(tmp_path / "lease", 5)
    before = (tmp_path / "lease").stat()
    lease.Lease(tmp_path / "lease").renew(600)
    after = (tmp_path / "lease").stat()
    assert (before.st_ino, before.st_size, before.st_blocks) == (after.st_ino, after.st_size, after.st_blocks)


@pytest.mark.parametrize("damage", [b"", b"\0" * 37, b"9" * 37, b"99999999999999.000"])
def test_a_damaged_lease_lasts_as_long_as_it_was_given_for_and_is_told_from_one_that_passed(tmp_path, damage):
    lease.write(tmp_path / "lease", 600)
    known = lease.Lease(tmp_path / "lease")
    given_s = known.deadline_s
    (tmp_path / "lease").write_bytes(damage)
    assert known.deadline_s == given_s
    assert lease.is_expired(tmp_path / "lease")
    assert known.renew(1200)
    assert lease.deadline_s(tmp_path / "lease") > given_s


def test_a_lease_of_the_machines_last_run_has_passed(tmp_path, monkeypatch):
    lease.write(tmp_path / "lease", 600)
    monkeypatch.setattr(lease.process_tree, "boot", lambda: "another")
    assert lease.Lease(tmp_path / "lease").is_expired()


def test_a_lock_is_held_by_who_lives_and_let_go_by_who_dies(tmp_path):
    code = "import sys, pathlib; from workers.protocol import lease; lease.try_lock(pathlib.Path(sys.argv[1]))"
    code += "; print('held', flush=True); sys.stdin.read()"
    path = tmp_path / "lock"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, str(path)], **pipes) as holder:
        assert holder.stdout.readline() == "held\n"
        assert lease.is_locked(path)
        assert lease.try_lock(path) is None
        holder.kill()
        holder.wait()
        assert not lease.is_locked(path)
