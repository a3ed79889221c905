"""Files of a submitted folder that are left out, and the messages about them."""

from dataclasses import dataclass
from pathlib import Path

from orchestrator.code_archives import ignore_file
from orchestrator.code_archives.ignore_patterns import escape_name

GIT = ".git"
"""A folder, or in a worktree or submodule a file that names one. It is not part of the code and may hold credentials.
"""
MAX_NAMES = 5
MAX_COUNT = 10_000
"""Files counted in folders that are left out: a data set of millions of files is not walked just to count it."""


@dataclass(frozen=True, slots=True)
class ExcludedFiles:
    """Files and folders that are left out and reported, as paths in the submitted folder; folders end in `/`. `files`
    also counts the files in folders of `by_git`, up to MAX_COUNT. `generated`: what tools create again. `special`:
    (path, what it is) of broken links, sockets and the like, which have no content to send.
    """

    credentials: tuple[str, ...] = ()
    by_git: tuple[str, ...] = ()
    files: int = 0
    generated: tuple[str, ...] = ()
    special: tuple[tuple[str, str], ...] = ()

    @property
    def messages(self) -> tuple[str, ...]:
        """One line for each reason; none if the complete folder is sent."""
        lines = []
        if self.by_git:
            files = f"at least {self.files:,} files" if self.files >= MAX_COUNT else _count(self.files, "file")
            lines.append(
                f"left out of the submitted folder, because {ignore_file.GIT_FILE} names them: {files}"
                f" ({_shorten_list(self.by_git)}). {_include_remedy(self.by_git[0])}"
            )
        if self.credentials:
            lines.append(
                "left out of the submitted folder, because they may hold credentials:"
                f" {_shorten_list(self.credentials)}. {_include_remedy(self.credentials[0])}"
            )
        if self.generated:
            names = [name for name in self.generated if Path(name).name != GIT]
            remedy = (
                _include_remedy(names[0])
                if names
                else f"{GIT} is never sent: a job that needs it clones the repository"
            )
            lines.append(
                "left out of the submitted folder, because they are not part of the code:"
                f" {_shorten_list(self.generated)}. {remedy}"
            )
        if self.special:
            descriptions = tuple(f"{name} ({what})" for name, what in self.special)
            lines.append(
                f"left out of the submitted folder, because they are not files: {_shorten_list(descriptions)}."
                f" To send a file instead of {self.special[0][0]}, put one there; to leave it out without this message,"
                f" write {escape_name(self.special[0][0])} into {ignore_file.FILE}"
            )
        return tuple(lines)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


def _shorten_list(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more


def _include_remedy(name: str) -> str:
    return f"To send {name} anyway, write !{escape_name(name)} into {ignore_file.FILE}"


def exclude_remedy(name: str) -> str:
    return f"to leave it out, write {escape_name(name)} into {ignore_file.FILE}"


def data_remedy(path: Path, mount: str) -> str:
    """Explain how a job can read a file that is left out; `mount` is its path in the folder."""
    mount += "/" if path.is_dir() else ""
    return (
        f"if the job needs it, also add `data: [{{uri: {path}, mount: {mount}}}]` to the job,"
        " or give its command a path that its nodes have"
    )
