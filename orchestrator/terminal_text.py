"""Make text from jobs, files and servers safe for a terminal: no colours, no cursor movement, no bell."""

import re

# Operating-system commands and other strings up to their terminator; control sequences; all other escapes.
_SEQUENCES = re.compile(
    r"(?:\x1b[\]PX^_]|[\x9d\x90\x98\x9e\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"
    r"|(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b[ -/]*[0-~]"
)
# The rest of C0 (except tab and newline), delete, C1; marks that reorder text; other line separators.
_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def escape_control(text: object) -> str:
    """Remove escape sequences from `text`; write other control characters as `\\x07`."""
    return _CONTROLS.sub(_written, _SEQUENCES.sub("", str(text)))


def one_line(text: object) -> str:
    """Escape for a table cell: also replaces line ends and tabs by spaces."""
    return " ".join(escape_control(text).split("\n")).replace("\t", " ")


def log_lines(text: str) -> list[str]:
    """Split a log line for printing: carriage returns (progress bars) become line ends, so no text is overwritten."""
    if text.isprintable():
        return [text]
    return escape_control(re.sub(r"\r+", "\n", text.rstrip("\r\n"))).split("\n")


def escape_document(document: str) -> str:
    """Escape control characters that JSON allows unescaped, as `\\u009b`; the document's meaning does not change."""
    return _CONTROLS.sub(lambda match: f"\\u{ord(match[0]):04x}" if match[0] > " " else match[0], document)


def _written(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
