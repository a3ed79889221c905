"""Which files of a submitted folder stay behind: those that .gitignore names, those that look like credentials, and
those that `.polyfleetignore` names, whose lines come last and can take anything back with `!`.

.gitignore counts as for git: within a repository only, there in every folder, deeper ones first, and from the folders
above up to the repository's own.
What only this user has told git (core.excludesFile, .git/info/exclude) does not count: the same commit gives the same
archive, whoever submits it. As with git, nothing below a folder that is left out can be taken back.
"""

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from cluster import untrusted_files
from cluster.errors import SpecError
from orchestrator.ignore_patterns import Rules, parsed

FILE = ".polyfleetignore"
GIT_FILE = ".gitignore"
MOST_LINES, MOST_GIT_LINES = 1000, 10_000
LONGEST_LINE_BYTES = 64
"""On average."""
CREDENTIALS = parsed(
    ".env .env.* !.env.example !.env.sample !.env.template "
    ".netrc _netrc .pgpass .pypirc .git-credentials *.pem *.p12 *.pfx "
    "id_rsa id_dsa id_ecdsa id_ecdsa_sk id_ed25519 id_ed25519_sk "
    ".aws/ .azure/ .config/gcloud/ .docker/config.json .gnupg/ .kube/ .ssh/".replace(" ", "\n")
)


class Why(Enum):
    """What leaves a file out."""

    ASKED = FILE
    CREDENTIALS = "credentials"
    GIT = GIT_FILE


@dataclass(frozen=True, slots=True)
class Ignored:
    """The rules that hold in one folder: `own` is the user's file; `git` has each .gitignore with the path of its
    folder, the deepest first. That path ends in a slash and is relative to the submitted folder; one above it is told
    by what is to be put before a name instead, as `../sub/` is. `in_repository`: the folder lies in one.
    """

    own: Rules
    git: tuple[tuple[str, Rules], ...] = ()
    in_repository: bool = False

    def why(self, name: str, is_folder: bool, is_link: bool = False) -> Why | None:
        """What leaves `name`, relative to the submitted folder, out; None: it is sent."""
        if rule := self.own.match(name, is_folder):
            return None if rule.takes_back else Why.ASKED
        if (rule := CREDENTIALS.match(name, is_folder)) and not rule.takes_back:
            return Why.CREDENTIALS
        for where, rules in self.git:
            if rule := rules.match(_seen_from(where, name), is_folder and not is_link):
                return None if rule.takes_back else Why.GIT
        return None

    def inside(self, folder: Path, prefix: str) -> "Ignored":
        """The rules in `folder`, which lies at `prefix` (`a/b/`) of the submitted one. Raises SpecError."""
        in_repository = self.in_repository or (folder / ".git").exists()
        rules = _git_file(folder) if in_repository else Rules()
        git = ((prefix, rules), *self.git) if rules.rules else self.git
        return Ignored(self.own, git, in_repository)


def ignored(folder: Path) -> Ignored:
    """Before the submitted folder is entered: its own file, and what folders above say. Raises SpecError for a file
    that cannot be read.
    """
    here = folder.resolve()
    in_repository = any((one / ".git").exists() for one in (here, *here.parents))
    return Ignored(_own_file(folder), tuple(_above(here)), in_repository)


def _seen_from(where: str, name: str) -> str:
    """`name` relative to the folder of a .gitignore."""
    return where.removeprefix("../") + name if where.startswith("../") else name[len(where) :]


def _above(folder: Path) -> list[tuple[str, Rules]]:
    """.gitignore files of the folders above, up to the repository's; none where there is no repository."""
    found: list[tuple[str, Rules]] = []
    here = folder
    for parent in folder.parents:
        if (here / ".git").exists():
            return found
        here = parent
        if (rules := _git_file(parent)).rules:
            found.append((f"../{folder.relative_to(parent).as_posix()}/", rules))
    return found if (here / ".git").exists() else []


def _git_file(folder: Path) -> Rules:
    """As for git, one that is a link or a folder does not count, and one that is not UTF-8 is read as bytes."""
    path = folder / GIT_FILE
    if path.is_symlink() or not path.is_file():
        return Rules()
    return parsed(_lines(path, MOST_GIT_LINES).decode(errors="surrogateescape"))


def _own_file(folder: Path) -> Rules:
    try:
        return parsed(_lines(folder / FILE, MOST_LINES).decode())
    except FileNotFoundError:
        return Rules()
    except UnicodeDecodeError:
        raise SpecError("working_dir", f"{folder / FILE} is not UTF-8 text", "save it as UTF-8") from None


def _lines(path: Path, most: int) -> bytes:
    """Raises SpecError, FileNotFoundError."""
    try:
        data = untrusted_files.read_bytes(path, most * LONGEST_LINE_BYTES)
    except untrusted_files.UnreadableFile as e:
        raise SpecError("working_dir", e.message, e.remedy) from None
    if data.count(b"\n") > most:
        raise SpecError("working_dir", f"{path} has more than {most:,} lines", "name folders, not files")
    return data
