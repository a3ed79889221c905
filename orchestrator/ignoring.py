"""Which files of a submitted folder stay behind: those `.polyfleetignore` names, and those that look like credentials.

The file has the form of .gitignore: the last line that matches decides, `!` takes a file back, a line that ends in `/`
matches folders only, one with a `/` elsewhere is relative to the submitted folder. As with git, nothing below a folder
that is left out can be taken back. .gitignore itself is not read: jobs often need what a repository leaves out, such as
generated data or compiled extensions.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from cluster import untrusted
from cluster.errors import SpecError

FILE = ".polyfleetignore"
LARGEST_BYTES = 256 << 10
CREDENTIALS = (
    ".env", ".env.*", "!.env.example", "!.env.sample", "!.env.template",
    ".netrc", "_netrc", ".pgpass", ".pypirc", ".git-credentials", "*.pem", "*.p12", "*.pfx",
    "id_rsa", "id_dsa", "id_ecdsa", "id_ecdsa_sk", "id_ed25519", "id_ed25519_sk",
    ".aws/", ".azure/", ".config/gcloud/", ".docker/config.json", ".gnupg/", ".kube/", ".ssh/",
)  # fmt: skip
"""Patterns of the same form, before those of the user's file."""


@dataclass(frozen=True, slots=True)
class Rule:
    pattern: re.Pattern[str]
    takes_back: bool
    folders_only: bool
    ours: bool


@dataclass(frozen=True, slots=True)
class Rules:
    """In the order in which they were written."""

    rules: tuple[Rule, ...]

    def match(self, name: str, is_folder: bool) -> Rule | None:
        """The rule by which the file or folder `name`, relative to the submitted one, is left out."""
        for rule in reversed(self.rules):
            if (is_folder or not rule.folders_only) and rule.pattern.fullmatch(name):
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
    return Rules((*_parsed(CREDENTIALS, ours=True), *_parsed(lines, ours=False)))


def _parsed(lines: Iterable[str], ours: bool) -> tuple[Rule, ...]:
    written = (line if line.endswith("\\ ") else line.rstrip() for line in lines)
    return tuple(_rule(line, ours) for line in written if line.strip("/! ") and not line.startswith("#"))


def _rule(line: str, ours: bool) -> Rule:
    takes_back = line.startswith("!")
    text = line[1:] if takes_back else line
    folders_only = text.endswith("/")
    text = text.rstrip("/")
    anchored = "/" in text
    anywhere = "" if anchored else "(?:.*/)?"
    try:
        pattern = re.compile(anywhere + _expression(text.lstrip("/")), re.DOTALL)
    except re.error:  # a set such as [z-a], which matches nothing in git either
        pattern = re.compile(r"(?!)")
    return Rule(pattern, takes_back, folders_only, ours)


_TOKEN = re.compile(
    r"(?P<above>(?:^|(?<=/))\*\*/)|(?P<below>(?<=/)\*\*$)|(?P<any>\*+)|(?P<one>\?)"
    r"|\[(?P<not>[!^]?)(?P<set>\]?[^\]]*)\]|\\(?P<plain>.)|(?P<other>.)",
    re.DOTALL,
)


def _expression(pattern: str) -> str:
    """A regular expression for git's wildcards; no wildcard but `**` matches a `/`."""
    return "".join(_translated(token) for token in _TOKEN.finditer(pattern))


def _translated(token: "re.Match[str]") -> str:
    if token["set"]:
        inside = re.sub(r"([\\\[\]&~|^])", r"\\\1", token["set"])
        return f"(?!/)[{'^' if token['not'] else ''}{inside}]"
    fixed = {"above": "(?:.*/)?", "below": ".*", "any": "[^/]*", "one": "[^/]"}
    kind = token.lastgroup or ""
    return fixed.get(kind) or re.escape(token["plain"] or token["other"] or token[0])
