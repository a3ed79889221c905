"""Text from jobs, files and servers made harmless for a terminal: it may colour nothing, move nothing, ring nothing."""

import re

# Operating-system commands and other strings up to their terminator; control sequences; any other escape.
_SEQUENCES = re.compile(
    r"(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b[ -/]*[0-~]"
)
# What is left of C0 (but tab and newline), delete, C1; marks that reorder text; other line separators.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def escape_control(text: object) -> str:
    """`text` without escape sequences; each other control character shown as `\\x1b` would be written."""
    return _CONTROLS.sub(_written, _SEQUENCES.sub("", str(text)))


def one_line(text: object) -> str:
    """For a table's cell: no line ends either."""
    return " ".join(escape_control(text).split("\n")).replace("\t", " ")


def log_lines(text: str) -> list[str]:
    """One log line as lines to print: carriage returns (progress bars) become line ends: nothing is painted over."""
    if text.isprintable():
        return [text]
    return escape_control(re.sub(r"\r+", "\n", text.rstrip("\r\n"))).split("\n")


def escape_document(document: str) -> str:
    """A JSON document with the control characters JSON itself leaves alone written as `\\u009b`; it means the same."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}" if match[0] > " " else match[0], document)


def _written(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
