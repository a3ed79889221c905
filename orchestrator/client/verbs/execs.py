"""Verbs of `execs`, written by docs/generate.py. Change orchestrator/verbs/execs.py instead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestrator.client.link import Link
    from orchestrator.views.logs import EmptyView, ExecInputView


class Execs:
    def __init__(self, link: Link):
        self._link = link

    def start(
        self,
        ref: str,
        command: Sequence[str],
        *,
        rank: int = 0,
        terminal: bool = False,
        takes_input: bool = False,
        rows: int = 24,
        columns: int = 80,
        term: str = "",
        by: str = "",
    ) -> Iterator[tuple[str, Any]]:
        """Run a command beside a rank of a running job, in its folder, with its variables. Server-sent events:
        `started`, `output` as it arrives, then `end`. The command is stopped when the attempt or this connection
        ends.

        - `ref`: job id, unique id prefix, or job name (the newest of that name)
        - `command`: a program and its arguments, at most 32 KiB (empty: a shell)
        - `rank`: rank beside which the command runs
        - `terminal`: run it in a terminal of `rows` and `columns`
        - `takes_input`: it has standard input, sent with `/input`
        - `term`: TERM of the terminal
        - `by`: name of the user for the server's log; not checked
        """
        result: Iterator[tuple[str, Any]] = self._link.stream(
            "POST",
            "/v1/jobs/{ref}/exec",
            {"ref": ref},
            {
                "command": command,
                "rank": rank,
                "terminal": terminal,
                "input": takes_input,
                "rows": rows,
                "columns": columns,
                "term": term,
                "by": by,
            },
        )
        return result

    def write(self, exec_id: str, data: str, offset: int, *, end: bool = False) -> ExecInputView:
        """Send input to the command. The response has the number of bytes accepted so far; send the others again.

        - `data`: base64
        - `offset`: bytes of input before `data`; bytes that were already accepted are skipped
        - `end`: this is the end of the input
        """
        result: ExecInputView = self._link.plain(
            "POST", "/v1/execs/{exec_id}/input", {"exec_id": exec_id}, {"data": data, "offset": offset, "end": end}
        )
        return result

    def resize(self, exec_id: str, *, rows: int = 24, columns: int = 80) -> EmptyView:
        """Set the size of the command's terminal."""
        result: EmptyView = self._link.plain(
            "POST", "/v1/execs/{exec_id}/size", {"exec_id": exec_id}, {"rows": rows, "columns": columns}
        )
        return result

    def end(self, exec_id: str) -> EmptyView:
        """Stop the command: SIGHUP, and SIGKILL 2 s later. A command that has ended is not changed."""
        result: EmptyView = self._link.plain("POST", "/v1/execs/{exec_id}/end", {"exec_id": exec_id})
        return result
