"""Which files of a submitted folder stay behind: those `.polyfleetignore` names, and those that look like credentials.

The file has the form of .gitignore: the last line that matches decides, `!` takes a file back, a line that ends in `/`
matches folders only, one with a `/` elsewhere is relative to the submitted folder. As with git, nothing below a folder
that is left out can be taken back. .gitignore itself is not read: jobs often need what a repository leaves out, such as
generated data or compiled extensions.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cluster import untrusted
from cluster.errors import SpecError

P = TypeVar("P")
FILE = ".polyfleetignore"
LARGEST_BYTES = 64 << 10
MOST_LINES = 1000
CREDENTIALS = (
    ".env", ".env.*", "!.env.example", "!.env.sample", "!.env.template",
    ".netrc", "_netrc", ".pgpass", ".pypirc", ".git-credentials", "*.pem", "*.p12", "*.pfx",
    "id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk",
    ".aws/", ".azure/", ".config/gcloud/", ".docker/config.json", ".gnupg/", ".kube/", ".ssh/",
)  # fmt: skip
"""Patterns of the same form, before those of the user's file."""


ANY, ANY_FOLDERS = "*", "**"
_RANGE = re.compile(r"(.)(?:-(.))?", re.DOTALL)
_TOKEN = re.compile(r"\*+|\?|\[[!^]?\]?[^\]]*\]|\\?.", re.DOTALL)


@dataclass(frozen=True, slots=True)
class OneOf:
    """A character within one of `ranges` of code points, or within none where `negated`."""

    ranges: tuple[tuple[str, str], ...]
    negated: bool = False

    def holds(self, char: str) -> bool:
        return any(first <= char <= last for first, last in self.ranges) is not self.negated


Piece = str | OneOf


@dataclass(frozen=True, slots=True)
class Rule:
    """`parts` are the names on the way, each as what its characters must be; ANY_FOLDERS stands for any number."""

    parts: tuple[tuple[Piece, ...] | str, ...]
    takes_back: bool
    folders_only: bool
    ours: bool

    def matches(self, name: str) -> bool:
        return _fit(self.parts, name.split("/"), ANY_FOLDERS, lambda part, text: _fit(part, text, ANY, _is))


@dataclass(frozen=True, slots=True)
class Rules:
    """In the order in which they were written."""

    rules: tuple[Rule, ...]

    def match(self, name: str, is_folder: bool) -> Rule | None:
        """The rule by which the file or folder `name`, relative to the submitted one, is left out."""
        for rule in reversed(self.rules):
            if (is_folder or not rule.folders_only) and rule.matches(name):
                return None if rule.takes_back else rule
        return None


def rules_of(folder: Path) -> Rules:
    """Raises SpecError for a `.polyfleetignore` that cannot be read."""
    try:
        lines = untrusted.read_bytes(folder / FILE, LARGEST_BYTES).decode().splitlines()
    except FileNotFoundError:
        lines = []
    except UnicodeDecodeError:
        raise SpecError("working_dir", f"{folder / FILE} is not UTF-8 text", "save it as UTF-8") from None
    except untrusted.Unreadable as e:
        raise SpecError("working_dir", e.message, e.remedy) from None
    if len(lines) > MOST_LINES:
        raise SpecError("working_dir", f"{folder / FILE} has more than {MOST_LINES} lines", "name folders, not files")
    return Rules((*_parsed(CREDENTIALS, ours=True), *_parsed(lines, ours=False)))


def _parsed(lines: Iterable[str], ours: bool) -> tuple[Rule, ...]:
    written = (line if line.endswith("\\ ") else line.rstrip() for line in lines)
    return tuple(_rule(line, ours) for line in written if line.strip("/! ") and not line.startswith("#"))


def _rule(line: str, ours: bool) -> Rule:
    takes_back = line.startswith("!")
    text = line[1:] if takes_back else line
    folders_only = text.endswith("/")
    text = text.rstrip("/")
    written = [part for part in text.split("/") if part]
    parts = [part if part == ANY_FOLDERS else _pieces(part) for part in written]
    if "/" not in text:
        parts = [ANY_FOLDERS, *parts]
    if parts[-1:] == [ANY_FOLDERS]:  # everything inside, but not the folder itself
        parts.append((ANY,))
    return Rule(tuple(parts), takes_back, folders_only, ours)


def _pieces(part: str) -> tuple[Piece, ...]:
    """What each character of a name must be: itself, `?` any, ANY any number of any, or one of a set."""
    return tuple(map(_piece, _TOKEN.findall(part)))


def _piece(written: str) -> Piece:
    if written[0] == "*":
        return ANY
    if len(written) > 2 and written[0] == "[":
        negated = written[1] in "!^"
        found = _RANGE.findall(written[1 + negated : -1])
        return OneOf(tuple((first, last or first) for first, last in found), negated)
    if len(written) > 1:  # an escape: what follows stands for itself, a `?` too
        return OneOf(((written[-1], written[-1]),))
    return written


def _is(piece: Piece, char: str) -> bool:
    return piece.holds(char) if isinstance(piece, OneOf) else piece in ("?", char)


def _fit(pattern: Sequence[P], text: Sequence[str], star: str, fits: Callable[[P, str], bool]) -> bool:
    """Whether all of `text` fits, where `star` stands for any number of its items. Quadratic at worst, because going
    back to the last star is enough.
    """
    at = now = back = 0
    starred = -1
    while now < len(text):
        if at < len(pattern) and pattern[at] == star:
            starred, back, at = at, now, at + 1
        elif at < len(pattern) and fits(pattern[at], text[now]):
            at, now = at + 1, now + 1
        elif starred >= 0:
            back += 1
            at, now = starred + 1, back
        else:
            return False
    return all(piece == star for piece in pattern[at:])
