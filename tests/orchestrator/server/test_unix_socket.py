"""The server's Unix socket: where it lies, who may open it, and what of a dead server is replaced."""

import os
import socket
import tempfile
from pathlib import Path

import pytest
from patience import LIMIT_S

from cluster.errors import FleetError
from orchestrator.home import unix_socket


@pytest.fixture
def home(tmp_path):
    (tmp_path / "home").mkdir(mode=0o700)
    return tmp_path / "home"


def test_it_lies_in_the_home_for_its_owner_only_and_goes_with_the_server(home):
    with unix_socket.listener(home) as (_, path):
        assert path == home / "server.sock"
        assert path.stat().st_mode & 0o777 == 0o600
        unix_socket.connect(path, timeout_s=LIMIT_S).close()
    assert list(home.iterdir()) == []


def test_what_a_dead_server_left_is_replaced(home):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(home / "server.sock"))
    with unix_socket.listener(home) as (_, path):
        unix_socket.connect(path, timeout_s=LIMIT_S).close()


def test_where_the_home_takes_no_socket_a_folder_of_its_own_does(home):
    (home / "server.sock").mkdir()
    with unix_socket.listener(home) as (_, path):
        assert path.parent.parent in (Path(tempfile.gettempdir()), Path("/tmp"))
        assert path.parent.stat().st_mode & 0o777 == 0o700
        unix_socket.connect(path, timeout_s=LIMIT_S).close()
    assert not path.parent.exists()


def test_a_path_longer_than_an_address_is_reached_through_its_folder(tmp_path):
    folder = tmp_path / ("a" * 100)
    folder.mkdir(mode=0o700)
    with unix_socket.listener(folder) as (_, path):
        assert len(os.fsencode(path)) > 107
        unix_socket.connect(path, timeout_s=LIMIT_S).close()


@pytest.mark.parametrize("mode", [0o701, 0o750, 0o777])
def test_a_folder_that_others_may_enter_is_refused_before_anything_is_sent(home, mode):
    with unix_socket.listener(home) as (_, path):
        home.chmod(mode)
        with pytest.raises(FleetError, match=rf"mode {mode:04o}.*chmod 700"):
            unix_socket.connect(path, timeout_s=LIMIT_S)


def test_each_end_knows_the_user_of_the_other(home):
    with unix_socket.listener(home) as (listening, path), unix_socket.connect(path, timeout_s=LIMIT_S) as near:
        far, _ = listening.accept()
        with far:
            assert unix_socket.peer_uid(near) == unix_socket.peer_uid(far) == os.geteuid()
