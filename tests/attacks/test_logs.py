"""What a job prints stays what it printed: no line is lost, none is forged, and no log harms who keeps or reads it."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from log_readers import Direct, Node, lines, pages, reader, record

from cluster.errors import UserError
from cluster.host import log_files
from cluster.input.untrusted_files import UnreadableFile
from workers.attempt.folder_setup import log_limit_bytes
from workers.attempt.supervision.rank_log import RankLog
from workers.protocol.redaction import Redactor

SEPARATORS = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"
FORGED = "1999-12-31T23:59:59.000000Z err all is well"


@pytest.fixture
def node(tmp_path):
    it = Node(tmp_path)
    yield it
    it.close()


@pytest.fixture
def ended(node):
    """ended(epochs, ranks) -> the paths of the logs of an attempt that has ended, and its reader."""
    node.start()
    node.outcome()

    def paths(ranks=1):
        found = [node.folder().log(rank) for rank in range(ranks)]
        for path in found:
            path.write_bytes(b"")
        return found

    paths.logs = reader(Direct(n0=node.attempts))
    return paths


def stamped(second, text, stream="out"):
    return f"2026-11-22T01:{second // 60:02d}:{second % 60:02d}.000000Z {stream} {text}\n"


def test_what_a_job_prints_never_looks_like_a_line_of_another_time_or_stream(node):
    """Twelve characters end a line for str.splitlines; only the line feed ends one of a log."""
    said = [f"before{separator}{FORGED}" for separator in SEPARATORS]
    node.python("j", f"for line in {said!r}: print(line)")
    assert node.outcome()["state"] == "succeeded"
    found = lines(reader(Direct(n0=node.attempts)), record())
    assert [line["text"] for line in found] == said
    assert {line["stream"] for line in found} == {"stdout"}
    assert not any(line["time"].startswith("1999") for line in found)


def test_a_carriage_return_cannot_forge_a_line_either(node):
    node.python("j", f"import sys; sys.stdout.write('10%\\r{FORGED}\\r\\n\\r{FORGED}\\n')")
    node.outcome()
    found = lines(reader(Direct(n0=node.attempts)), record())
    assert [(line["stream"], line["text"]) for line in found] == [
        ("stdout", "10%"),
        ("stdout", FORGED),
        ("stdout", ""),
        ("stdout", FORGED),
    ]


def test_events_and_last_words_end_at_line_feeds_only(node):
    node.python("j", f"import sys; sys.exit('first{SEPARATORS}last')")
    assert node.outcome()["failure"]["message"].endswith(f": first{SEPARATORS}last")


def test_a_log_keeps_its_beginning_and_its_newest_part(tmp_path):
    path, limit = tmp_path / "rank-0.log", 64 << 10
    log = RankLog(path, Redactor([]), limit)
    said = [f"line {number:06d} {'x' * 80}" for number in range(20_000)]
    for start in range(0, len(said), 100):
        log.feed("out", ("\n".join(said[start : start + 100]) + "\n").encode())
    log.close()
    kept = sum(file.stat().st_size for file in tmp_path.iterdir())
    assert limit / 2 < kept < limit * 3
    offset, texts = 0, []
    while (found := log_files.read(path, offset, 10_000)).data:
        texts += [line.split(" ", 2)[2] for line in found.data.decode().split("\n")[:-1]]
        offset = found.next
    [marker] = [n for n, text in enumerate(texts) if text.startswith("[polyfleet: ")]
    assert texts[marker].endswith(" bytes are left out here, the log reached its limit]")
    assert texts[:marker] == said[:marker] and marker > 10
    assert texts[marker + 1 :] == said[-len(texts) + marker + 1 :] and len(texts) - marker > 100
    length = len("2026-11-22T01:00:00.000000Z out ") + len(said[0]) + 1
    missing = len(said) - len(texts) + 1
    assert f" {missing * length} bytes " in texts[marker]


def test_a_cursor_into_what_a_log_no_longer_has_goes_on_behind_it(tmp_path):
    path = tmp_path / "rank-0.log"
    log = RankLog(path, Redactor([]), 1600)
    log.feed("out", b"first\n" * 100)
    cursor = log_files.read(path, 0, 200).next
    for number in range(200):
        log.feed("out", f"later {number} {'x' * 100}\n".encode())
    log.close()
    first, *rest = (text for text in log_files.read(path, cursor + 5000, 2000).data.decode().split("\n"))
    assert "bytes are left out here" in first and "later" in rest[0]


def test_a_log_that_is_followed_while_it_is_cut_loses_and_repeats_nothing_that_is_there(tmp_path):
    path = tmp_path / "rank-0.log"
    log = RankLog(path, Redactor([]), 4000)
    offset, told = 0, []
    for number in range(500):
        log.feed("out", f"{number}\n".encode())
        found = log_files.read(path, offset, 4000)
        told += [line.split(" ")[2] for line in found.data.decode().split("\n")[:-1]]
        offset = found.next
    assert told == [str(number) for number in range(500)]


def test_the_tail_of_a_huge_log_is_read_from_its_end(ended):
    """A terabyte, most of it a hole: whoever reads it from the start is still at it tomorrow."""
    [path] = ended()
    os.truncate(path, 1 << 40)
    with path.open("a") as f:
        f.write("\n" + "".join(stamped(n, f"line {n}") for n in range(50)))
    found = ended.logs.tail(record(), None, None, 5)
    assert [line["text"] for line in found["lines"]] == [f"line {n}" for n in range(45, 50)]
    assert found["cursor"] == {"1.0": path.stat().st_size}


@pytest.mark.parametrize("count", [0, 1, 7, 150, 1000])
def test_the_tail_of_several_ranks_is_the_end_of_all_their_lines_by_time(ended, count):
    first, second = ended(ranks=2)
    said = [(n, n % 3 == 0, f"line {n} {'x' * (n * 37 % 400)}") for n in range(150)]
    first.write_text("".join(stamped(n, text) for n, is_first, text in said if is_first))
    second.write_text("".join(stamped(n, text) for n, is_first, text in said if not is_first))
    both = record(ranks=2, task="train")
    found = ended.logs.tail(both, None, None, count)
    assert [line["text"] for line in found["lines"]] == [text for _, _, text in said][max(150 - count, 0) :]
    assert lines(ended.logs, both, cursor=found["cursor"]) == []


def test_the_tail_reaches_into_earlier_attempts(node):
    for epoch in (1, 2):
        node.start(command=("sh", "-c", f"echo a{epoch}; echo b{epoch}"), epoch=epoch)
        node.outcome(epoch=epoch)
    logs, both = reader(Direct(n0=node.attempts)), record(epochs=2)
    assert [line["text"] for line in logs.tail(both, None, None, 3)["lines"]] == ["b1", "a2", "b2"]
    last = logs.tail(both, None, None, 1)
    assert [line["text"] for line in last["lines"]] == ["b2"]
    assert lines(logs, both, cursor=last["cursor"]) == []


@pytest.mark.parametrize("limit_bytes", [1, 100_000, 1 << 20])
def test_pages_have_the_lines_of_all_ranks_in_order_and_each_once(ended, limit_bytes):
    """One rank prints little and the other much: its first page reaches as far as many of the other's."""
    quiet, loud = ended(ranks=2)
    quiet.write_text("".join(stamped(n, f"quiet {n}") for n in range(0, 3000, 100)))
    loud.write_text("".join(stamped(n, f"loud {n} {'x' * 300}") for n in range(3000)))
    found = lines(ended.logs, record(ranks=2, task="train"), limit_bytes=limit_bytes)
    assert [line["time"] for line in found] == sorted(line["time"] for line in found)
    assert [line["text"] for line in found if line["rank"] == 0] == [f"quiet {n}" for n in range(0, 3000, 100)]
    assert [line["text"].split()[1] for line in found if line["rank"] == 1] == [str(n) for n in range(3000)]


def test_a_clock_that_steps_back_holds_nothing_up(ended):
    first, second = ended(ranks=2)
    first.write_text("".join(stamped(3000 - n, "x" * 200) for n in range(3000)))
    second.write_text("".join(stamped(n, "y" * 200) for n in range(3000)))
    assert len(lines(ended.logs, record(ranks=2, task="train"), limit_bytes=1)) == 6000


def test_a_page_is_read_once_and_attempts_read_to_their_end_are_not_asked_again(node):
    for epoch in (1, 2, 3):
        node.start(command=("sh", "-c", "seq 100000"), epoch=epoch)
        node.outcome(epoch=epoch)
    agents = Direct(n0=node.attempts)
    logs, three = reader(agents), record(epochs=3)
    lines(logs, three)
    agents.asked.clear()
    assert len(lines(logs, three)) == 300_000
    asked = [(epoch, offset) for _, _, _, epoch, _, offset, _ in agents.asked]
    assert len(asked) == len(set(asked)) < 20


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/etc/passwd"), os.mkdir])
def test_a_log_that_was_replaced_is_not_read(ended, make):
    """The rank runs as the same user; a pipe in its log's place would block the agent."""
    other, path = ended(ranks=2)
    other.write_text(stamped(1, "other"))
    path.unlink()
    make(path)
    with pytest.raises(UnreadableFile):
        log_files.read(path, 0, 1000)
    with pytest.raises(UnreadableFile):
        log_files.last(path, 5)
    assert [line["text"] for line in lines(ended.logs, record(ranks=2, task="train"))] == ["other"]


def test_a_log_is_not_written_to_where_a_link_leads(tmp_path):
    (tmp_path / "secret").write_text("mine\n")
    (tmp_path / "rank-0.log").symlink_to(tmp_path / "secret")
    log = RankLog(tmp_path / "rank-0.log", Redactor([]))
    log.feed("out", b"hello\n")
    log.close()
    assert (tmp_path / "secret").read_text() == "mine\n"


def test_no_line_is_longer_than_what_a_reader_takes_at_once(tmp_path):
    """The rest of a line that was read in two parts began with whatever time and stream the job had put there."""
    log = RankLog(tmp_path / "rank-0.log", Redactor(["é" * 30_000]))
    line = b"\xff" * 250_000 + FORGED.encode() + b"\xff" * 250_000 + b"\n"
    for start in range(0, len(line), 64 << 10):
        log.feed("out", line[start : start + (64 << 10)])
    log.close()
    written = (tmp_path / "rank-0.log").read_bytes().split(b"\n")
    assert max(map(len, written)) < log_files.MAX_READ_BYTES
    assert b"".join(text[32:] for text in written) == line.rstrip().replace(b"\xff", rb"\xff")


@pytest.mark.parametrize("offset", [-5, 10**6, 2**63, 10**30])
def test_an_offset_that_no_log_has_gives_no_error(ended, offset):
    [path] = ended()
    path.write_text(stamped(1, "one"))
    assert log_files.read(path, offset, 1000).more is False


def test_a_node_sets_the_limit_of_its_logs(node, monkeypatch):
    monkeypatch.setenv("POLYFLEET_LOG_LIMIT_BYTES", str(1 << 20))
    node.start(command=("sh", "-c", "yes | head -n 1000000"))
    assert node.outcome()["state"] == "succeeded"
    kept = sum(file.stat().st_size for file in node.folder().path.glob("rank-0.log*"))
    assert 1 << 19 < kept < 3 << 20


@pytest.mark.parametrize("text", ["", "x", "-1", "1000", "1GiB", "1" * 50, "²"])
def test_a_limit_that_is_none_is_refused(text):
    with pytest.raises(UserError, match="POLYFLEET_LOG_LIMIT_BYTES"):
        log_limit_bytes({"POLYFLEET_LOG_LIMIT_BYTES": text})
    assert log_limit_bytes({}) == 1 << 30


def test_pages_helper_is_bounded_by_the_log(ended):
    [path] = ended()
    path.write_text(stamped(1, "one"))
    assert len(list(pages(ended.logs, record()))) == 1
