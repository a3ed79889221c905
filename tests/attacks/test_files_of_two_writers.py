"""Files that several threads replace, and what a server that was killed leaves behind."""

import subprocess
import sys
import threading

import pytest
from patience import LIMIT_S, wait_for

from cluster.paths import write_private
from orchestrator.home import server_record
from workers.protocol.folders import replace_text


@pytest.mark.parametrize("replace", [replace_text, write_private])
def test_two_threads_may_replace_the_same_file(tmp_path, replace):
    """With one temporary name per process, the second rename found nothing, or half of the other's text."""
    errors, target, texts = [], tmp_path / "f", [letter * 5000 for letter in "abcd"]

    def write(text):
        try:
            for _ in range(100):
                replace(target, text)
                assert target.read_text() in texts
        except (OSError, AssertionError) as e:
            errors.append(e)

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert errors == []
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_an_upload_that_a_killed_server_was_receiving_goes_when_the_next_one_starts(tmp_path):
    """Its name is what `kill -9` in the middle of PUT /v1/code-archives leaves."""
    folder = tmp_path / "packages"
    folder.mkdir()
    (folder / ".incoming-edplyiz3").write_bytes(b"half")
    (folder / f"{'1' * 64}.zip").write_bytes(b"complete")
    command = [sys.executable, "-m", "orchestrator.server", "--home", str(tmp_path), "--port", "0"]
    with (tmp_path / "said").open("wb") as said, subprocess.Popen(command, stderr=said) as server:
        wait_for(lambda: server_record.read(tmp_path) or server.poll() is not None, (tmp_path / "said").read_text)
        assert server.poll() is None, (tmp_path / "said").read_text()
        server.terminate()
    assert [path.name for path in folder.iterdir()] == [f"{'1' * 64}.zip"]
