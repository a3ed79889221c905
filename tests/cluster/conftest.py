"""Package indexes of our own on this machine: real pages, real wheels, and the list of what was asked for."""

import os
import threading
import zipfile
from collections.abc import Callable, Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest


class Index:
    """Serves the wheels added to it. `asked` has the paths of every request."""

    def __init__(self, root: Path):
        self.root, self.asked = root, list[str]()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Pages, self.asked, directory=str(root)))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server.server_port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def add(self, package: str, version: str = "1.0", ballast_bytes: int = 0) -> None:
        name = package.replace("-", "_")
        folder = self.root / package
        folder.mkdir(parents=True, exist_ok=True)
        made = f"{name}-{version}.dist-info"
        with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
            archive.writestr(f"{name}.py", f"version = {version!r}\n")
            archive.writestr(f"{name}.ballast", b"\0" * ballast_bytes)
            archive.writestr(f"{made}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
            archive.writestr(f"{made}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{made}/RECORD", f"{name}.py,,\n{name}.ballast,,\n")
        links = "".join(f'<a href="{p.name.replace("+", "%2B")}">{p.name}</a>\n' for p in folder.glob("*.whl"))
        (folder / "index.html").write_text(f"<!DOCTYPE html><html><body>\n{links}</body></html>")


class _Pages(SimpleHTTPRequestHandler):
    def __init__(self, asked: list[str], *given: object, **named: object):
        self.asked = asked
        super().__init__(*given, **named)

    def do_GET(self) -> None:
        self.asked.append(self.path)
        super().do_GET()

    def log_message(self, *words: object) -> None:
        """What was asked for is in `asked`."""


@pytest.fixture
def new_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Index]]:
    """Makes indexes by name. pip reads no other settings than those of the test."""
    for variable in [v for v in os.environ if v.startswith("PIP_")]:
        monkeypatch.delenv(variable)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    made: list[Index] = []

    def index(name: str) -> Index:
        (tmp_path / name).mkdir()
        made.append(Index(tmp_path / name))
        return made[-1]

    yield index
    for one in made:
        one.server.shutdown()
        one.server.server_close()
