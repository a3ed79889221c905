"""Decide which files of a submitted folder are left out: those that .gitignore names, those that look like credentials,
and those that `.polyfleetignore` names, whose lines count last and can include any file again with `!`.

.gitignore is read as git does: only within a repository, in every folder, deeper ones first, and in the folders above
up to the repository's root. Settings of this user alone (core.excludesFile, .git/info/exclude) are not read, so that
the same commit gives the same archive for every user. As with git, nothing below a folder that is left out can be
included again.
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from cluster.errors import SpecError
from cluster.input import untrusted_files
from orchestrator.code_archives.ignore_patterns import Rules, parse_rules

FILE = ".polyfleetignore"
GIT_FILE = ".gitignore"
MAX_LINES, MAX_GIT_LINES = 1000, 10_000
MAX_LINE_BYTES = 64
"""Average per line, for the limit on the file's size."""
CREDENTIALS = parse_rules(
    ".env .env.* !.env.example !.env.sample !.env.template "
    ".netrc _netrc .pgpass .pypirc .git-credentials *.pem *.p12 *.pfx "
    "id_rsa id_dsa id_ecdsa id_ecdsa_sk id_ed25519 id_ed25519_sk "
    ".aws/ .azure/ .config/gcloud/ .docker/config.json .gnupg/ .kube/ .ssh/".replace(" ", "\n")
)


class ExclusionReason(Enum):
    """Why a file is left out."""

    IGNORE_FILE = FILE
    CREDENTIALS = "credentials"
    GIT = GIT_FILE


@dataclass(frozen=True, slots=True)
class IgnoreRules:
    """Rules that apply in one folder. `own`: the user's .polyfleetignore. `git`: each .gitignore with the path of its
    folder, deepest first. That path ends in a slash and is relative to the submitted folder; for a folder above, it is
    `../` and the prefix that a name gets there, e.g. `../sub/`. `in_repository`: the folder is in a git repository.
    """

    own: Rules
    git: tuple[tuple[str, Rules], ...] = ()
    in_repository: bool = False

    def exclusion_reason(self, name: str, is_folder: bool, is_link: bool = False) -> ExclusionReason | None:
        """Why `name`, relative to the submitted folder, is left out; None if it is sent."""
        if rule := self.own.match(name, is_folder):
            return None if rule.is_negated else ExclusionReason.IGNORE_FILE
        if (rule := CREDENTIALS.match(name, is_folder)) and not rule.is_negated:
            return ExclusionReason.CREDENTIALS
        for where, rules in self.git:
            if rule := rules.match(_relative_name(where, name), is_folder and not is_link):
                return None if rule.is_negated else ExclusionReason.GIT
        return None

    def inside(self, folder: Path, prefix: str) -> "IgnoreRules":
        """The rules in `folder`, which is at `prefix` (`a/b/`) in the submitted folder. Raises SpecError."""
        in_repository = self.in_repository or (folder / ".git").exists()
        rules = _git_file(folder) if in_repository else Rules()
        git = ((prefix, rules), *self.git) if rules.rules else self.git
        return IgnoreRules(self.own, git, in_repository)


def load_rules(folder: Path) -> IgnoreRules:
    """Rules from the .polyfleetignore of the submitted folder and .gitignore of the folders above. Raises SpecError for
    a file that cannot be read.
    """
    resolved = folder.resolve()
    in_repository = any((one / ".git").exists() for one in (resolved, *resolved.parents))
    return IgnoreRules(_own_file(folder), tuple(_rules_above(resolved)), in_repository)


def _relative_name(where: str, name: str) -> str:
    """`name` relative to the folder of a .gitignore."""
    return where.removeprefix("../") + name if where.startswith("../") else name[len(where) :]


def _rules_above(folder: Path) -> list[tuple[str, Rules]]:
    """Rules of .gitignore in the folders above, up to the repository's root; empty outside of a repository."""
    rules_above: list[tuple[str, Rules]] = []
    current = folder
    for parent in folder.parents:
        if (current / ".git").exists():
            return rules_above
        current = parent
        if (rules := _git_file(parent)).rules:
            rules_above.append((f"../{folder.relative_to(parent).as_posix()}/", rules))
    return rules_above if (current / ".git").exists() else []


def _git_file(folder: Path) -> Rules:
    """Rules of the .gitignore in `folder`. As in git, a link or a folder is ignored, and non-UTF-8 is read as bytes."""
    path = folder / GIT_FILE
    if path.is_symlink() or not path.is_file():
        return Rules()
    return parse_rules(_lines(path, MAX_GIT_LINES).decode(errors="surrogateescape"))


def _own_file(folder: Path) -> Rules:
    try:
        return parse_rules(_lines(folder / FILE, MAX_LINES).decode())
    except FileNotFoundError:
        return Rules()
    except UnicodeDecodeError:
        raise SpecError("working_dir", f"{folder / FILE} is not UTF-8 text", "save it as UTF-8") from None


def _lines(path: Path, max_lines: int) -> bytes:
    """Content of an ignore file. Raises SpecError, FileNotFoundError."""
    try:
        data = untrusted_files.read_bytes(path, max_lines * MAX_LINE_BYTES)
    except untrusted_files.UnreadableFile as e:
        raise SpecError("working_dir", e.message, e.remedy) from None
    if data.count(b"\n") > max_lines:
        raise SpecError("working_dir", f"{path} has more than {max_lines:,} lines", "name folders, not files")
    return data
