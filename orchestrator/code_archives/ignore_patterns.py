"""Match names against patterns of .gitignore as git does.

Source: gitignore(5), and git's dir.c (parse_path_pattern, last_matching_pattern) and wildmatch.c. One case follows the
manual, not the program: in `foo**/bar` the asterisks count as single ones. Patterns are not translated to regular
expressions, because some would take exponential time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

P = TypeVar("P")
ANY, ONE, ANY_FOLDERS = "*", "?", "**"
CLASSES = {
    "alnum": ("09", "AZ", "az"), "alpha": ("AZ", "az"), "blank": ("  ", "\t\t"), "cntrl": ("\0\x1f", "\x7f\x7f"),
    "digit": ("09",), "graph": ("!~",), "lower": ("az",), "print": (" ~",), "punct": ("!/", ":@", "[`", "{~"),
    "space": ("\t\r", "  "), "upper": ("AZ",), "xdigit": ("09", "AF", "af"),
}  # fmt: skip
"""First and last character of each range in the C locale."""


@dataclass(frozen=True, slots=True)
class CharacterSet:
    """Matches a character in one of `ranges` of code points, or, if `negated`, in none of them."""

    ranges: tuple[tuple[str, str], ...]
    negated: bool = False

    def matches(self, char: str) -> bool:
        return any(first <= char <= last for first, last in self.ranges) is not self.negated


Piece = str | CharacterSet
Part = tuple[Piece, ...] | str


@dataclass(frozen=True, slots=True)
class Rule:
    """One pattern. `parts`: one for each name of the path, as pieces that match its characters; ANY_FOLDERS matches any
    number of names. If not `anchored`, only the last name counts. `exact` and `suffix` are shortcuts for the most
    common patterns.
    """

    parts: tuple[Part, ...]
    is_negated: bool
    folders_only: bool
    anchored: bool
    exact: str = ""
    suffix: str = ""

    def matches(self, name: str) -> bool:
        """Return whether the rule matches `name`, relative to the folder of the pattern's file."""
        subject = name if self.anchored else name.rpartition("/")[2]
        if self.exact:
            return subject == self.exact
        if self.suffix:
            return subject.endswith(self.suffix)
        return _matches_all(self.parts, subject.split("/"), ANY_FOLDERS, _matches_name)


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of one file, in its order."""

    rules: tuple[Rule, ...] = ()

    def match(self, name: str, is_folder: bool) -> Rule | None:
        """The last rule that matches: it decides, and may include the name again."""
        for rule in reversed(self.rules):
            if (is_folder or not rule.folders_only) and rule.matches(name):
                return rule
        return None


def parse_rules(text: str) -> Rules:
    """Parse the text of an ignore file."""
    lines = (line.removesuffix("\r") for line in text.removeprefix("\ufeff").split("\n"))
    return Rules(tuple(rule for line in lines if line and line[0] != "#" if (rule := _rule(_strip_spaces(line)))))


def escape_name(name: str) -> str:
    """A pattern that matches only this name, relative to the folder of the pattern's file."""
    return "/" + "".join(f"\\{char}" if char in "\\*?[ " else char for char in name)


def _strip_spaces(line: str) -> str:
    """Remove spaces at the end of a line, except an escaped one."""
    text = line.rstrip(" ")
    slashes = len(text) - len(text.rstrip("\\"))
    return line[: len(text) + slashes % 2]


def _rule(line: str) -> Rule | None:
    """Parse one line; None if it can match nothing."""
    takes_back = line.startswith("!")
    text = line[1:] if takes_back else line
    folders_only = text.endswith("/")
    text = text[:-1] if folders_only else text
    anchored = "/" in text
    pieces = _pieces(text.removeprefix("/"))
    if pieces is None:
        return None
    parts = _parts(pieces) if anchored else [_without_folder_stars(pieces)]
    if parts[-1] == ANY_FOLDERS:  # everything inside, but not the folder itself
        parts.append((ANY,))
    exact, suffix = _simple_pattern(pieces, anchored)
    return Rule(tuple(parts), takes_back, folders_only, anchored, exact, suffix)


def _simple_pattern(pieces: tuple[Piece, ...], anchored: bool) -> tuple[str, str]:
    """(`exact`, `suffix`) of Rule: each "" unless the pattern is that simple."""
    starred = pieces[:1] == (ANY,) and not anchored
    rest = pieces[1:] if starred else pieces
    if not rest or any(piece in (ANY, ONE) or isinstance(piece, CharacterSet) or len(piece) > 1 for piece in rest):
        return "", ""
    text = "".join(map(str, rest))
    return ("", text) if starred else (text, "")


def _parts(pieces: tuple[Piece, ...]) -> list[Part]:
    """Split pieces at slashes. A part that is only two or more asterisks matches any number of folders."""
    names: list[list[Piece]] = [[]]
    for piece in pieces:
        if piece == "/":
            names.append([])
        else:
            names[-1].append(piece)
    return [ANY_FOLDERS if name == [ANY_FOLDERS] else _without_folder_stars(tuple(name)) for name in names]


def _without_folder_stars(part: tuple[Piece, ...]) -> tuple[Piece, ...]:
    return tuple(ANY if piece == ANY_FOLDERS else piece for piece in part)


def _pieces(text: str) -> tuple[Piece, ...] | None:
    """Parse a pattern into pieces: a character that matches itself, ONE (any character), ANY (any number of
    characters), a set, or ANY_FOLDERS for two or more asterisks. None if an escape or a set has no end: in git it
    matches nothing.
    """
    pieces: list[Piece] = []
    at = 0
    while at < len(text):
        char = text[at]
        if char == "*":
            stars = len(text[at:]) - len(text[at:].lstrip("*"))
            pieces.append(ANY if stars == 1 else ANY_FOLDERS)
            at += stars
        elif char == "[":
            if (parsed_set := _Set(text, at + 1).read()) is None:
                return None
            piece, at = parsed_set
            pieces.append(piece)
        elif char == "\\":  # the next character matches itself
            if at + 1 == len(text):
                return None
            escaped = text[at + 1]
            pieces.append(escaped if escaped not in (ANY, ONE) else CharacterSet(((escaped, escaped),)))
            at += 2
        else:
            pieces.append(char)
            at += 1
    return tuple(pieces)


class _Set:
    """Parser of a set such as `[a-z[:digit:]_]`, starting after its bracket, character by character like wildmatch."""

    def __init__(self, text: str, at: int):
        self.text, self.at = text, at
        self.ranges: list[tuple[str, str]] = []
        self.before = ""  # the first character of a range, if a `-` follows

    def read(self) -> tuple[CharacterSet, int] | None:
        """The set, and the position after its end; None if it has no end."""
        negated = self._char() in ("!", "^")
        self.at += negated
        first = True
        while first or self._char() != "]":
            first = False
            if not self._one():
                return None
            self.at += 1
        return CharacterSet(tuple(self.ranges), negated), self.at + 1

    def _char(self, ahead: int = 0) -> str:
        return self.text[self.at + ahead : self.at + ahead + 1]

    def _one(self) -> bool:
        """Parse one character, range or class; return False if the text ends within it."""
        if self._char() == "-" and self.before and self._char(1) not in ("", "]"):
            self.at += 1
            first, last = self.before, self._plain()
            self.before = ""
        elif self.text.startswith("[:", self.at) and (end := self.text.find("]", self.at + 2)) != self.at + 2:
            if end < 0 or self.text[end - 1] == ":":
                return end > 0 and self._class(end)
            first = last = self.before = "["
        else:
            first = last = self.before = self._plain()
        self.ranges.append((first, last))
        return bool(last)

    def _plain(self) -> str:
        """The current character, or the one that a backslash escapes; "" at the end."""
        if self._char() == "\\":
            self.at += 1
        return self._char()

    def _class(self, end: int) -> bool:
        name, self.at, self.before = self.text[self.at + 2 : end - 1], end, ""
        self.ranges += [(two[0], two[1]) for two in CLASSES.get(name, ())]
        return name in CLASSES


def _matches_name(part: Part, text: str) -> bool:
    return _matches_all(part, text, ANY, _matches_character)


def _matches_character(piece: Piece, char: str) -> bool:
    return piece.matches(char) if isinstance(piece, CharacterSet) else piece in (ONE, char)


def _matches_all(pattern: Sequence[P], text: Sequence[str], star: str, fits: Callable[[P, str], bool]) -> bool:
    """Return whether the pattern matches all of `text`; `star` matches any number of its items. Quadratic at worst,
    because backtracking to the last star is enough.
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
