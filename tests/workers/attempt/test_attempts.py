import dataclasses
import hashlib
import json
import os
import shutil
import signal
import threading
import time
import zipfile

import pytest
from patience import LIMIT_S

from cluster.errors import Conflict, FleetError, NotFound, UserError
from workers.attempt import attempt_table
from workers.attempt.attempt_table import AttemptTable
from workers.attempt.supervisor_launcher import SupervisorLauncher
from workers.processes import process_tree
from workers.protocol import lease
from workers.protocol.folders import read_json
from workers.protocol.messages import AttemptStatus

FOREVER = ("sh", "-c", "echo ready; exec sleep 600")


def package(node, tmp_path, **files):
    """Puts an archive of these files on the node; returns its digest."""
    path = tmp_path / "sent.zip"
    with zipfile.ZipFile(path, "w") as z:
        for name, text in files.items():
            z.writestr(f"{name}.py", text)
    data = path.read_bytes()
    node.packages.put(hashlib.sha256(data).hexdigest(), 0, data, True)
    return hashlib.sha256(data).hexdigest()


def test_an_attempt_that_ends_amid_a_look_is_told_at_once(node, tmp_path, monkeypatch):
    rung, ask, ring, go = threading.Event(), AttemptTable._poll_attempt, AttemptTable._notify_waiters, tmp_path / "go"

    def ring_and_note(self):
        ended = node.folder().outcome.exists()
        ring(self)
        if ended:
            rung.set()

    def ends_after(self, *asked):
        found = ask(self, *asked)
        go.touch()
        assert rung.wait(LIMIT_S)
        return found

    monkeypatch.setattr(AttemptTable, "_notify_waiters", ring_and_note)
    attempts = node.reopen()
    node.start(command=("sh", "-c", f"echo ready; while [ ! -e {go} ]; do sleep 0.02; done"))
    node.until_printed("ready")
    monkeypatch.setattr(AttemptTable, "_poll_attempt", ends_after)
    (report,) = attempts.wait_for_changes({}, {"j.1.0": "running"}, 3600.0)  # longer than this test may take
    assert report.phase == "ended"


def test_the_news_of_an_attempt_go_from_starting_to_its_outcome(node):
    node.start(command=("sh", "-c", "exit 0"))
    phases, known = [], {}
    while phases[-1:] != ["ended"]:
        for report in node.attempts.wait_for_changes({}, known, 5.0):
            phases.append(report.phase)
            known["j.1.0"] = report.phase
    assert phases in (["starting", "running", "ended"], ["starting", "ended"], ["running", "ended"])
    assert AttemptStatus.parse(report.to_plain()).outcome.state == "succeeded"
    assert node.attempts.wait_for_changes({}, known, 0.0) == []


def test_starting_twice_starts_once(node):
    node.start(command=FOREVER)
    node.until_printed("ready")
    first = node.supervisor_pid()
    node.start(command=FOREVER)
    assert node.supervisor_pid() == first
    node.attempts.stop("j", 1, "cancel")
    ended = node.outcome()
    node.start(command=FOREVER)
    assert read_json(node.folder().outcome) == ended


def test_many_starts_at_once_start_one_supervisor(node):
    threads = [threading.Thread(target=node.start, args=("j", FOREVER)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    node.until_printed("ready")
    assert node.text() == ["out ready"]


def test_an_epoch_that_is_past_is_refused(node):
    node.start(epoch=4)
    with pytest.raises(Conflict, match=r"attempt 3 of j was superseded: .* received attempt 4"):
        node.start(epoch=3)
    node.outcome(epoch=4)
    node.attempts.remove_rank_files("j", 4)
    with pytest.raises(Conflict):
        node.reopen().start(node.order(epoch=3), {})


def test_a_newer_epoch_ends_the_older_one(node):
    node.start(command=FOREVER, epoch=1)
    node.until_printed("ready")
    node.start(command=("true",), epoch=2)
    assert node.outcome(epoch=1)["state"] == "fenced"
    assert node.outcome(epoch=2)["state"] == "succeeded"


def test_a_restarted_agent_adopts_what_runs_and_reports_its_end(node):
    node.start(command=("sh", "-c", "mkfifo gate; echo ready; read line < gate; echo $line"))
    node.until_printed("ready")
    attempts = node.reopen()
    (report,) = attempts.wait_for_changes({}, {}, 5.0)
    assert report.phase == "running"
    (node.folder().work(0) / "gate").write_text("went on\n")
    assert node.outcome()["state"] == "succeeded"
    assert node.text() == ["out ready", "out went on"]


@pytest.mark.parametrize("text", ["", "{}", '{"lease_s": []}', "\0"])
def test_a_restarted_agent_preempts_an_attempt_whose_order_it_cannot_read(node, text, is_alive):
    """Its devices are not taken for free while it runs, and its job does not fail for what it has not done."""
    node.start(command=("sh", "-c", "echo ready $$; exec sleep 600"))
    node.until_printed("ready")
    pid = int(node.text()[0].split()[-1])
    node.folder().order.write_text(text)
    assert node.reopen().keys() == ["j.1.0"]
    node.outcome()
    (report,) = node.attempts.wait_for_changes({}, {}, 0.0)
    assert (report.outcome.state, report.outcome.failure) == ("preempted", None)
    assert not is_alive(pid)


def test_a_supervisor_killed_by_9_leaves_a_lost_attempt_and_no_process(node, tmp_path, is_alive):
    daemon = f"setsid sh -c 'echo $$ > {tmp_path}/pid; exec sleep 600' >/dev/null 2>&1 &"
    node.start(command=("sh", "-c", f"{daemon} echo ready; exec sleep 600"))
    node.until_printed("ready")
    pid = node.until_file(tmp_path / "pid")
    os.kill(node.supervisor_pid(), signal.SIGKILL)
    ended = node.outcome()
    assert (ended["state"], ended["exit_codes"]) == ("lost", {})
    assert ended["failure"]["message"].startswith("the attempt's supervisor is gone: killed from outside")
    assert not is_alive(pid)
    assert process_tree.attempt_processes([], node.folder().shared) == set()


def test_an_agent_that_died_between_folder_and_supervisor_can_be_asked_again(node):
    order = dataclasses.replace(node.order(), lease_s=600.0)
    folder = node.folder()
    folder.path.mkdir()
    folder.work(0).mkdir(parents=True)
    (folder.work(0) / "half").touch()
    lease.write(folder.lease, order.lease_s)
    assert node.reopen().wait_for_changes({}, {}, 0.0) == []
    node.attempts.start(order, {})
    assert node.outcome()["state"] == "succeeded"
    assert not (folder.work(0) / "half").exists()


def test_the_ranks_of_a_command_find_the_submitted_files_in_one_folder(node, tmp_path):
    sha = package(node, tmp_path, main="import helper", helper="print('helped')")
    node.start(command=("python", "main.py"), code_archive=sha, launch="ranks", ranks=2, world_size=2)
    assert node.outcome()["state"] == "succeeded"
    assert node.text(rank=0) == node.text(rank=1) == ["out helped"]
    assert sorted(path.name for path in node.folder().works.iterdir()) == ["0"]


def test_a_command_may_bring_modules_called_like_ours(node, tmp_path):
    sha = package(node, tmp_path, workers="NAME = 'mine'")
    node.start(command=("python", "-c", "import workers; print(workers.NAME)"), code_archive=sha)
    node.outcome()
    assert node.text() == ["out mine"]


def test_an_order_that_cannot_be_followed_leaves_nothing_behind(node):
    with pytest.raises(NotFound, match="code archive 0000"):
        node.start(code_archive="0" * 64)
    with pytest.raises(UserError, match="not below this pool's storage"):
        node.start(checkpoint_root="../elsewhere")
    with pytest.raises(UserError, match="has no command"):
        node.start(command=())
    with pytest.raises(UserError, match="cannot be a job's id"):
        node.start(job="../j")
    with pytest.raises(UserError, match="protocol 99"):
        node.start(protocol=99)
    assert list(node.root.glob("*/j.1.0")) == []
    assert node.attempts.wait_for_changes({}, {}, 0.0) == []


def test_a_supervisor_that_cannot_start_is_an_error_with_its_last_words(node, monkeypatch):
    monkeypatch.setattr("workers.attempt.rank_environment.CODE", node.root)
    node.starter = SupervisorLauncher()
    node.reopen()
    with pytest.raises(FleetError, match=r"did not start: .*No module named 'workers'"):
        node.start()
    assert not node.folder().path.exists()


def test_checkpoint_folders_are_made_below_the_storage(node):
    node.start(command=("sh", "-c", "echo $POLYFLEET_CHECKPOINT_DIR"), checkpoint_root="jobs/j")
    node.outcome()
    assert node.text() == [f"out {node.root}/storage/jobs/j"]
    assert (node.root / "storage/jobs").is_dir()


def test_a_checkpoint_folder_that_stays_empty_is_gone_before_the_end_is_told(node):
    node.start("empty", ("sh", "-c", "test -d $POLYFLEET_CHECKPOINT_DIR"), checkpoint_root="jobs/empty")
    node.start("full", ("sh", "-c", "touch $POLYFLEET_CHECKPOINT_DIR/kept"), checkpoint_root="jobs/full")
    node.start("gang", checkpoint_root="jobs/gang", nodes=2)
    assert [node.outcome(job)["state"] for job in ("empty", "full", "gang")] == ["succeeded"] * 3
    assert sorted(path.name for path in (node.root / "storage/jobs").iterdir()) == ["full", "gang"]


def test_events_arrive_once_each_in_order_and_garbage_is_skipped(node):
    good = [(time.time(), 0, "report", {"step": step, "loss": 0.5}) for step in (1, 2, 3)]
    bad = ["not json", [1], {}, {"t": "now", "rank": 0, "type": "report"}, {"t": 1, "rank": 0, "type": "checkpoint"}]
    first, second, third = (json.dumps({"t": t, "rank": rank, "type": kind, **data}) for t, rank, kind, data in good)
    lines = [first, *map(json.dumps, bad), "{", second, third[:20]]
    (node.root / "lines").write_text("\n".join(lines))
    node.start(command=("sh", "-c", f"cp {node.root}/lines $POLYFLEET_ATTEMPT_DIR/events.jsonl; echo ready; sleep 600"))
    node.until_printed("ready")
    (told,) = node.attempts.wait_for_changes({}, {}, 5.0)
    assert [(e.t, e.rank, e.type, e.data) for e in told.events] == good[:2]
    assert [e.at for e in told.events] == [len(first) + 1, len("\n".join(lines[:-1])) + 1]
    with node.folder().events.open("a") as f:
        f.write(third[20:] + "\n")
    (told,) = node.attempts.wait_for_changes({"j.1.0": told.cursor}, {"j.1.0": told.phase}, 5.0)
    assert [(e.t, e.rank, e.type, e.data) for e in told.events] == good[2:]
    assert told.events[0].at == told.cursor == node.folder().events.stat().st_size
    assert node.attempts.unusable_data()["j.1.0"]["count"] == len(bad) + 1


def test_waiting_for_news_ends_as_soon_as_an_attempt_is_started(node):
    found = []
    waiting = threading.Thread(target=lambda: found.extend(node.attempts.wait_for_changes({}, {}, 600.0)))
    waiting.start()
    node.start()
    waiting.join(timeout=LIMIT_S)
    assert found[0].job == "j"


def test_a_forgotten_attempt_keeps_its_log_and_loses_its_folders(node):
    node.start(command=("echo", "hello"))
    with pytest.raises(NotFound):
        node.attempts.log("other", 1, 0, 0, 100)
    node.outcome()
    node.attempts.remove_rank_files("j", 1)
    assert not node.folder().shared.exists()
    assert node.reopen().wait_for_changes({}, {}, 0.0) == []
    assert node.text() == ["out hello"]


def test_a_running_attempt_is_not_forgotten(node):
    node.start(command=FOREVER)
    with pytest.raises(UserError, match="has not ended"):
        node.attempts.remove_rank_files("j", 1)


def test_a_log_is_read_in_pieces_of_whole_lines(node):
    node.start(command=("sh", "-c", "for i in 1 2 3 4 5; do echo line $i; done"))
    node.outcome()
    told, offset, ended = "", 0, False
    while not ended:
        piece = node.attempts.log("j", 1, 0, offset, 80)
        assert piece["data"].endswith("\n")
        told, offset, ended = told + piece["data"], piece["next"], piece["ended"]
    assert told == node.folder().log(0).read_text()
    with pytest.raises(NotFound, match="no rank 7"):
        node.attempts.log("j", 1, 7, 0, 80)


def test_a_stop_in_words_we_do_not_know_is_refused(node):
    node.start(command=FOREVER)
    with pytest.raises(UserError, match="choose from preempt, cancel"):
        node.attempts.stop("j", 1, "please")
    node.attempts.stop("unknown", 1, "cancel")


def test_the_epochs_told_are_those_of_the_newest_jobs_and_none_of_a_job_that_was_removed(node, monkeypatch):
    monkeypatch.setattr(attempt_table, "MAX_REPORTED_EPOCHS", 2)
    for job, epoch in (("old", 1), ("b", 1), ("c", 1), ("old", 2)):
        node.start(job, epoch=epoch)
        assert node.outcome(job, epoch)["state"] == "succeeded"
    assert node.attempts.epochs() == {"old": 2, "c": 1}
    assert node.attempts.remove([("old", 1)]) == [("old", 1)]
    assert node.attempts.epochs() == {"old": 2, "c": 1}
    assert node.attempts.remove([("old", 2), ("c", 1), ("never", 1)]) == [("old", 2), ("c", 1), ("never", 1)]
    assert node.attempts.epochs() == node.reopen().epochs() == {"b": 1}
    node.attempts.stop("b", 3, "cancel")
    node.attempts.remove([("b", 1), ("b", 3)])
    assert node.attempts.epochs() == node.reopen().epochs() == {"b": 3}, "what was stopped is remembered"


def test_the_folder_of_a_log_is_found_without_a_look_at_all_there_are(node, monkeypatch):
    records = node.root / "attempts"
    node.start("a", ("echo", "1"))
    node.start("a.1", ("echo", "2"), epoch=0)
    assert {node.outcome("a")["state"], node.outcome("a.1", 0)["state"]} == {"succeeded"}
    for attempts in (node.attempts, node.reopen()):
        with monkeypatch.context() as listing:
            listing.setattr(
                os, "scandir", lambda path, scan=os.scandir: scan(path) if path != records else pytest.fail()
            )
            assert attempts.log("a", 1, 0, 0, 100)["data"].endswith("out 1\n")
            assert attempts.log("a.1", 0, 0, 0, 100)["data"].endswith("out 2\n")
    node.attempts.remove([("a", 1)])
    with pytest.raises(NotFound, match="never ran attempt 1 of a"):
        node.attempts.log("a", 1, 0, 0, 100)
    assert node.attempts.log_tail("a.1", 0, 0, 1)["start"] == 0


def test_the_folder_that_a_rank_is_told_of_holds_no_record_of_the_agent(node):
    node.start(command=("sh", "-c", "ls -A $POLYFLEET_ATTEMPT_DIR; env"))
    node.outcome()
    said = [line.removeprefix("out ") for line in node.text()]
    assert said[:3] == [".result.json.reserve", "order.json", "work"]
    assert f"POLYFLEET_ATTEMPT_DIR={node.folder().shared}" in said
    assert not [line for line in said if str(node.folder().path) in line]


def test_an_outcome_that_user_code_made_up_does_not_count(node):
    ended = node.order(command=FOREVER)
    made_up = json.dumps({"job": ended.job, "epoch": 1, "node_rank": 0, "state": "succeeded", "exit_codes": {}})
    node.start(command=("sh", "-c", f"echo '{made_up}' > $POLYFLEET_ATTEMPT_DIR/outcome.json; echo ready; sleep 600"))
    node.until_printed("ready")
    assert node.attempts.wait_for_changes({}, {}, 0.0)[0].phase == "running"
    node.attempts.stop("j", 1, "cancel")
    assert node.outcome()["state"] == "cancelled"


def test_an_attempt_whose_folder_somebody_removed_is_known_no_more(node):
    node.start()
    node.outcome()
    attempts = node.reopen()
    shutil.rmtree(node.folder().path)
    node.until(lambda: (attempts.wait_for_changes({}, {}, 0.0), attempts.keys())[1] == [], "it is dropped")


def test_an_attempt_that_is_stopped_in_the_moment_it_starts_ends_as_asked(node):
    """A supervisor that does not yet listen to signals would die of ours, and the attempt be lost."""
    jobs = [f"j{i}" for i in range(12)]
    for job in jobs:
        node.start(job, ("sleep", "600"))
        node.attempts.stop(job, 1, "preempt")
    assert {node.outcome(job)["state"] for job in jobs} == {"preempted"}


@pytest.mark.parametrize("call", [lambda a: a.stop("j", 2, "cancel"), lambda a: a.remove_rank_files("j", 2)])
def test_a_start_that_arrives_after_its_stop_is_refused_also_by_the_next_agent(node, call):
    call(node.attempts)
    for attempts in (node.attempts, node.reopen()):
        for epoch in (1, 2):
            with pytest.raises(Conflict):
                attempts.start(node.order(epoch=epoch), {})
    assert not list((node.root / "attempts").glob("j.*"))
    node.start(epoch=3)
    assert node.outcome(epoch=3)["state"] == "succeeded"


def test_an_epoch_that_ran_and_was_forgotten_does_not_run_again(node):
    node.start()
    node.outcome()
    node.attempts.remove_rank_files("j", 1)
    with pytest.raises(Conflict, match="has already run on node n0"):
        node.start()


def test_leases_are_given_from_when_the_controller_spoke(node):
    """A call that lay in a frozen agent must stretch no lease."""
    node.start(command=FOREVER, lease_s=600.0)
    before = lease.deadline_s(node.folder().lease)
    node.attempts.renew(before - 601.0)
    assert lease.deadline_s(node.folder().lease) == before
    spoken_s = lease.now_s()
    node.reopen().renew(spoken_s)
    assert lease.deadline_s(node.folder().lease) == pytest.approx(spoken_s + 600.0, abs=0.002)  # in milliseconds
    node.reopen().renew(before + 1e6)
    assert lease.deadline_s(node.folder().lease) <= lease.now_s() + 600.002


def test_an_attempt_whose_agent_was_killed_amid_its_start_ends_as_lost_and_never_starts_again(node):
    """Whoever heard that it was lost may have started the next one."""
    folder = node.folder()
    folder.path.mkdir(parents=True)
    folder.order.write_text(json.dumps(node.order().to_plain()))
    node.reopen()
    assert node.outcome()["state"] == "lost"
    for attempts in (node.attempts, node.reopen()):
        with pytest.raises(Conflict, match="ended on node n0 before its ranks started"):
            attempts.start(node.order(command=("touch", str(node.root / "ran"))), {})
    assert not folder.supervisor.exists() and not (node.root / "ran").exists()


def test_files_of_older_attempts_disturb_no_newer_one(node):
    """All that an attempt can leave in its folders, each with a word that would end or spoil the newer one."""
    node.start(command=("sh", "-c", "echo old > $POLYFLEET_ATTEMPT_DIR/events.jsonl; exit 3"), epoch=1)
    node.outcome(epoch=1)
    older = node.folder(epoch=1)
    for left in (older.stop, older.unreadable, older.result, older.failure(0)):
        left.write_text("cancel")
    node.start(command=("sh", "-c", "ls $POLYFLEET_ATTEMPT_DIR; echo fine"), epoch=2)
    ended = node.outcome(epoch=2)
    assert (ended["state"], ended["epoch"], ended["exit_codes"]) == ("succeeded", 2, {"0": 0})
    assert "j.2.0" not in node.attempts.unusable_data()
    assert node.outcome(epoch=1)["exit_codes"] == {"0": 3}


def test_a_newer_attempt_starts_once_the_older_one_has_ended(node):
    node.start(command=("sh", "-c", "trap '' TERM; echo ready; while :; do sleep 1; done"), epoch=1)
    node.until(lambda: node.folder(epoch=1).log(0).exists() and "ready" in node.folder(epoch=1).log(0).read_text(), "1")
    node.start(epoch=2)
    assert node.folder(epoch=1).outcome.exists(), "two attempts of a job never run at once"
    assert node.outcome(epoch=2)["state"] == "succeeded"


def test_removed_attempts_leave_nothing_and_one_that_lives_stays(node):
    node.start("old")
    node.start("kept")
    node.start("lives", FOREVER)
    for job in ("old", "kept"):
        node.outcome(job)
    node.attempts.remove_rank_files("old", 1)
    assert node.attempts.remove([("old", 1), ("lives", 1), ("never", 1)]) == [("old", 1), ("never", 1)]
    left = {path.name for parent in ("attempts", "shared") for path in (node.root / parent).iterdir()}
    assert {name for name in left if not name.startswith(".")} == {"kept.1.0", "lives.1.0"}
    with pytest.raises(NotFound):
        node.attempts.log("old", 1, 0, 0, 100)


def test_a_start_and_an_end_are_heard_without_looking(node, monkeypatch):
    """By the bell that the supervisor rings: an agent's looks are as far apart as they can be."""
    monkeypatch.setattr("workers.attempt.attempt_table.POLL_EVERY_S", 600.0)
    known, phases = {}, []
    node.start(command=("sh", "-c", "read line"))
    while phases[-1:] != ["ended"]:
        reports = node.attempts.wait_for_changes({}, known, 60.0)
        assert reports, "nobody heard"
        for report in reports:
            phases.append(report.phase)
            known["j.1.0"] = report.phase
    assert phases[-1] == "ended"


def test_a_bell_that_job_code_has_taken_away_costs_nothing_but_time(node):
    bell = node.root / "attempts/.wakeup"
    node.start("first", ("sh", "-c", f"rm {bell}; mkdir {bell}"))
    assert node.outcome("first")["state"] == "succeeded"
    node.start("second")
    assert node.outcome("second")["state"] == "succeeded"


def test_what_ranks_tell_waits_for_more_of_it_and_an_end_does_not(node):
    node.start(command=FOREVER)
    node.until_printed("ready")

    def tell(step):
        with node.folder().events.open("a") as f:
            f.write(json.dumps({"t": time.time(), "rank": 0, "type": "report", "step": step}) + "\n")

    def ask(gather_s):
        return [
            e.data["step"]
            for r in node.attempts.wait_for_changes({}, {"j.1.0": "running"}, 600.0, gather_s)
            for e in r.events
        ]

    tell(1)
    assert ask(0.0) == [1]
    found = []
    waiting = threading.Thread(target=lambda: found.extend(ask(600.0)))
    waiting.start()
    tell(2)
    node.attempts.stop("j", 1, "cancel")
    waiting.join(timeout=LIMIT_S)
    assert found == [1, 2]
