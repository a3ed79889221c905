"""Client side of a run: upload the code archive, start the run, wait for its end, read its lines."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cluster.errors import NotFound, UserError
from orchestrator.benchmark import suite
from orchestrator.code_archives import code_archive
from orchestrator.spec import entry_check

if TYPE_CHECKING:
    from orchestrator.client.client import Client
    from orchestrator.views.benchmarks import RunView

Data = dict[str, Any]
Progress = Callable[[str], None]
POLL_S = 1.0
"""Seconds between polls. A poll wakes the server, which may share its CPUs with the measurement."""
ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")


def start_run(client: "Client", request: Data, working_dir: str = "", key: str = "") -> "RunView":
    """Start a run and return its view. The same `key` returns the same run. Raises SpecError, NotFound."""
    benchmark = suite.request(request)
    if not benchmark.entry or entry_check.needs_no_folder(benchmark.entry):
        return client.benchmarks.start(request, key=key)
    if not working_dir and entry_check.is_in_folder(benchmark.entry):
        raise UserError(f"{benchmark.entry} is a file in a folder", "give the folder with --working-dir")
    with code_archive.scratch() as folder:
        working_folder = Path(working_dir or ".").expanduser().absolute()
        archive = code_archive.pack(working_folder, "benchmark", folder / "package.zip")
        for line in archive.left_out.messages:
            client.notify(line)
        entry_check.check(benchmark.entry, working_folder, call=())
        if benchmark.sample_input:
            entry_check.check(benchmark.sample_input, working_folder, "sample_input", call=("batch_size",))
        client.upload_code_archive(archive.sha, archive.path)
    return client.benchmarks.start(request, code_archive=archive.sha, key=key)


def wait_for_run(client: "Client", run: str, progress: Progress) -> "RunView":
    """Wait until a run has ended and return its view. An interrupt does not stop the run."""
    last_status = ""
    while True:
        view = client.benchmarks.show(run)
        if view["state"] in ENDED:
            return view
        if last_status != (last_status := status_line(view)):
            progress(last_status)
        time.sleep(POLL_S)


def status_line(view: "RunView") -> str:
    """Describe a run's progress in one line."""
    progress = view["progress"]
    if view["state"] == "WAITING" or not progress:
        return f"{view['run']}: {view['reason'] or 'waiting for its nodes'}"
    return f"{view['run']}: {progress['case']} ({progress['number']} of {progress['of']})"


def fetch_lines(client: "Client", run: str) -> list[Data]:
    """Lines of a run as plain data, as `read_lines` returns them."""
    return cast(list[Data], client.benchmarks.lines(run))


def is_file(ref: str) -> bool:
    return ref.endswith((".jsonl", ".json")) or Path(ref).is_file()


def read_lines(path: Path) -> list[Data]:
    """Read the lines of a run from a file. Raises UserError naming an invalid line, or for another format."""
    import json

    from orchestrator.benchmark.results import LINE_FORMAT

    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as e:
        raise NotFound(f"{path} cannot be read: {e}", "name a file that `benchmark report -f jsonl` wrote") from None
    lines = []
    for number, line in enumerate(text.splitlines(), 1):
        try:
            parsed = json.loads(line)
        except ValueError:
            parsed = None
        if not isinstance(parsed, dict) or not isinstance(parsed.get("line"), str):
            raise UserError(
                f"{path}:{number} is not a line of a benchmark run",
                "give a file in which each line is a JSON object with the key `line`",
            )
        lines.append(parsed)
    if not lines or lines[0].get("format") != LINE_FORMAT:
        raise UserError(
            f"{path} does not begin with a line `started` of format {LINE_FORMAT}; another version of Polyfleet may"
            " have written it",
            "measure again with `polyfleet benchmark run --save FILE`",
        )
    return lines
