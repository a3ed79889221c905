"""A run as its user sees it: the folder packed and sent, the run begun, followed to its end, its lines read."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.errors import NotFound, UserError
from orchestrator import code_archive, entry_check
from orchestrator.benchmark import suite

if TYPE_CHECKING:
    from orchestrator.client import Client

Data = dict[str, Any]
Progress = Callable[[str], None]
POLL_S = 1.0
"""Asking wakes the server, which may share its CPUs with what is measured."""
ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")


def start_run(client: "Client", request: Data, working_dir: str = "", key: str = "") -> Data:
    """The run's view; the same `key` gives the same run. Raises SpecError, NotFound before anything is sent."""
    asked = suite.request(request)
    if not asked.entry or entry_check.needs_no_folder(asked.entry):
        return client.benchmark_begin(request, key=key)
    if not working_dir and entry_check.is_in_folder(asked.entry):
        raise UserError(f"{asked.entry} is a file of a folder", "name the folder with --working-dir")
    with code_archive.scratch() as folder:
        where = Path(working_dir or ".").expanduser().absolute()
        package = code_archive.pack(where, "benchmark", folder / "package.zip")
        for line in package.left_out.told:
            client.tell(line)
        entry_check.check(asked.entry, where, call=())
        if asked.sample_input:
            entry_check.check(asked.sample_input, where, "sample_input", call=("batch_size",))
        client.upload(package.sha, package.path)
    return client.benchmark_begin(request, package.sha, key)


def wait_for_run(client: "Client", run: str, progress: Progress) -> Data:
    """The run's view once it has ended. A run goes on when this is interrupted."""
    told = ""
    while True:
        view = client.benchmark(run)
        if view["state"] in ENDED:
            return view
        if told != (told := status_line(view)):
            progress(told)
        time.sleep(POLL_S)


def status_line(view: Data) -> str:
    """What a run is doing, in one line."""
    told = view["progress"]
    if view["state"] == "WAITING" or not told:
        return f"{view['run']}: {view['reason'] or 'waiting for its nodes'}"
    return f"{view['run']}: {told['case']} ({told['number']} of {told['of']})"


def is_file(ref: str) -> bool:
    return ref.endswith((".jsonl", ".json")) or Path(ref).is_file()


def read_lines(path: Path) -> list[Data]:
    """Raises UserError naming the line that is none of a run."""
    import json

    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise NotFound(f"{path} cannot be read: {e}", "name a file that `benchmark report -f jsonl` wrote") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            told = json.loads(line)
        except ValueError:
            told = None
        if not isinstance(told, dict) or not isinstance(told.get("line"), str):
            raise UserError(f"{path}:{number} is no line of a benchmark run", "each line is a JSON object with `line`")
        found.append(told)
    return found
