"""What stays behind of a submitted folder, and how its user is told."""

from dataclasses import dataclass
from pathlib import Path

from orchestrator import ignore_file
from orchestrator.ignore_patterns import quoted

GIT = ".git"
"""A folder, or in a worktree or a submodule a file that names one: no part of the code, and it may hold credentials."""
MOST_NAMED = 5
MOST_COUNTED = 10_000
"""Files in folders that stay behind: a data set of millions is not walked to tell how many it has."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What stays behind and is told of: files and folders (these end in `/`) by the place they have in the folder;
    `files` counts what is in the folders of `by_git` as well, up to MOST_COUNTED. `generated` is what tools make anew;
    `special` are (what it is, where): links to nothing, sockets and the like, which have no content to send.
    """

    credentials: tuple[str, ...] = ()
    by_git: tuple[str, ...] = ()
    files: int = 0
    generated: tuple[str, ...] = ()
    special: tuple[tuple[str, str], ...] = ()

    @property
    def told(self) -> tuple[str, ...]:
        """A line for each reason; none when all of the folder travels."""
        lines = []
        if self.by_git:
            files = f"at least {self.files:,} files" if self.files >= MOST_COUNTED else _count(self.files, "file")
            lines.append(
                f"left out of the submitted folder, because {ignore_file.GIT_FILE} names them: {files}"
                f" ({_named(self.by_git)}). {_take_back(self.by_git[0])}"
            )
        if self.credentials:
            lines.append(
                "left out of the submitted folder, because they may hold credentials:"
                f" {_named(self.credentials)}. {_take_back(self.credentials[0])}"
            )
        if self.generated:
            names = [name for name in self.generated if Path(name).name != GIT]
            how = _take_back(names[0]) if names else f"{GIT} is never sent: a job that needs it clones the repository"
            lines.append(
                "left out of the submitted folder, because they are no part of the code:"
                f" {_named(self.generated)}. {how}"
            )
        if self.special:
            shown = tuple(f"{name} ({what})" for name, what in self.special)
            lines.append(
                f"left out of the submitted folder, because they are no files: {_named(shown)}. To send a file in place"
                f" of {self.special[0][0]}, put one there; to leave it out without this line, write"
                f" {quoted(self.special[0][0])} into {ignore_file.FILE}"
            )
        return tuple(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _named(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _take_back(name: str) -> str:
    return f"To send {name} all the same, write !{quoted(name)} into {ignore_file.FILE}"


def leave_out(name: str) -> str:
    return f"to leave it out, write {quoted(name)} into {ignore_file.FILE}"


def send_as_data(path: Path, mount: str) -> str:
    """How a job reaches what is left out; `mount` is where it lies in the folder."""
    mount += "/" if path.is_dir() else ""
    return (
        f"if the job needs it, also add `data: [{{uri: {path}, mount: {mount}}}]` to the job,"
        " or give its command a path that its nodes have"
    )
