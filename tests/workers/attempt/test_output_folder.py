"""$POLYFLEET_OUTPUT_DIR of real attempts: made, kept, and the end of one over its limit."""

import pytest

from cluster.errors import FleetError, NotFound, UserError
from cluster.host.content_cache import ContentCache
from workers.protocol import output_folder

WRITES = """
import os, pathlib, time
(pathlib.Path(os.environ["POLYFLEET_OUTPUT_DIR"]) / "large").write_bytes(bytes(3 << 20))
time.sleep({pause_s})
"""


def test_what_a_rank_writes_there_is_kept_and_an_empty_folder_is_not(node):
    node.start("kept", ("sh", "-c", "echo 1 > $POLYFLEET_OUTPUT_DIR/a"), checkpoint_root="jobs/kept")
    node.start("empty", ("sh", "-c", "test -d $POLYFLEET_OUTPUT_DIR"), checkpoint_root="jobs/empty")
    assert [node.outcome(job)["state"] for job in ("kept", "empty")] == ["succeeded"] * 2
    storage = node.root / "storage/jobs"
    assert (storage / "kept/output-1/a").read_text() == "1\n" and not (storage / "empty").exists()


def test_a_job_over_the_limit_is_ended_while_it_runs_and_both_sizes_are_named(node, monkeypatch):
    monkeypatch.setenv(output_folder.LIMIT_VARIABLE, str(2 << 20))
    node.python("long", WRITES.format(pause_s=600), checkpoint_root="jobs/long")
    failure = node.outcome("long")["failure"]
    assert (failure["kind"], failure["message"]) == (
        "storage",
        f"its folder POLYFLEET_OUTPUT_DIR has 3.0 MiB, its pool allows 2.0 MiB ({output_folder.LIMIT_VARIABLE})",
    )
    assert (node.root / "storage/jobs/long/output-1/large").exists()


def test_a_job_that_ended_over_the_limit_has_failed_too(node, monkeypatch):
    monkeypatch.setenv(output_folder.LIMIT_VARIABLE, str(2 << 20))
    node.python("short", WRITES.format(pause_s=0), checkpoint_root="jobs/short")
    assert node.outcome("short")["failure"]["kind"] == "storage"
    node.python("small", "", checkpoint_root="jobs/small")
    assert node.outcome("small")["state"] == "succeeded"


def test_the_smaller_limit_of_job_and_pool_counts_and_the_message_says_whose_it_is(node, monkeypatch):
    pool = {output_folder.LIMIT_VARIABLE: "200"}
    assert [output_folder.limit(job_bytes, pool)[0] for job_bytes in (0, 100, 300)] == [200, 100, 200]
    assert output_folder.limit(0, {})[0] == 0 and output_folder.limit(100, {})[0] == 100
    monkeypatch.setenv(output_folder.LIMIT_VARIABLE, str(3 << 20))
    node.python("own", WRITES.format(pause_s=600), checkpoint_root="jobs/own", output_limit_bytes=1 << 20)
    failure = node.outcome("own")["failure"]
    assert (failure["kind"], failure["message"]) == (
        "storage",
        "its folder POLYFLEET_OUTPUT_DIR has 3.0 MiB, its job allows 1.0 MiB (output_limit)",
    )


@pytest.mark.parametrize("text", ["-1", "2GB", "1e9", "٣", "9" * 30])
def test_a_limit_that_is_no_number_of_bytes_is_refused_with_words(text):
    with pytest.raises(UserError, match="write a number of bytes"):
        output_folder.limit_bytes({output_folder.LIMIT_VARIABLE: text})
    assert output_folder.limit_bytes({}) == output_folder.limit_bytes({output_folder.LIMIT_VARIABLE: "0"}) == 0


def test_data_is_seen_in_the_work_folder_and_not_removed_while_the_attempt_lives(node):
    storage = node.root / "storage"
    kept = ContentCache(storage / ".data")
    (storage / "given").mkdir(parents=True)
    (storage / "given/a").write_text("7")
    sha = kept.add(storage / "given").sha256
    code = "import os, time; print(open('in/data/a').read(), flush=True); os.path.exists('go') or time.sleep(600)"
    node.python("reads", code, data=((sha, "in/data", ""),))
    node.until_printed("7", "reads")
    node.reopen()  # an agent that was started again holds nothing itself
    with pytest.raises(FleetError, match="running attempts use"):
        kept.free_space(1, 1)
    supervisor = node.supervisor_pid("reads")
    node.attempts.stop("reads", 1, "cancel")
    assert node.outcome("reads")["state"] == "cancelled"
    node.until_gone(supervisor)  # it holds the data, and ends after it has told the outcome
    kept.free_space(1, 1)
    assert kept.find(sha) is None
    with pytest.raises(NotFound, match="is not on this node"):
        node.start("late", data=((sha, "in/data", ""),))
    with pytest.raises(UserError, match="not a SHA-256"):
        node.start("wrong", data=(("../x", "d", ""),))


def test_links_do_not_count_and_do_not_lead_out(tmp_path):
    (tmp_path / "a/b").mkdir(parents=True)
    (tmp_path / "a/b/f").write_bytes(bytes(100))
    (tmp_path / "a/loop").symlink_to(tmp_path)
    (tmp_path / "a/l").symlink_to("b/f")
    assert output_folder.size_bytes(str(tmp_path / "a")) == 100
    assert output_folder.size_bytes(str(tmp_path / "absent")) == 0
