"""Read variables from .env files: one `KEY=VALUE` a line, in the syntax that shells, docker and dotenv tools share.

`export ` before a name is ignored, `#` begins a comment at a line's start or after a space, blank lines are ignored.
Single quotes take everything literally; in double quotes a backslash escapes `n`, `t`, `r`, `"`, `$` and itself. Both
may span several lines. `$NAME` is not expanded, because tools disagree on that.
"""

import re
from pathlib import Path

from cluster.errors import NotFound, UserError
from cluster.input import untrusted_files
from cluster.input.validation_errors import WrongValueError
from orchestrator.spec.job_spec_fields import variable

MAX_FILE_BYTES = 1 << 20
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", '"': '"', "\\": "\\", "$": "$", "`": "`", "\n": ""}
_BEGINNING = re.compile(r"(?:export[ \t]+)?(?P<name>[^=\s#]*)[ \t]*=")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_DOUBLE = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_SINGLE = re.compile(r"'([^']*)'")
_REST = re.compile(r"[ \t]*(?:#[^\n]*)?(?:\n|\Z)")
_LINE = re.compile(r"[^\n]*")
_SPACE = re.compile(r"[ \t]*")
_COMMENT = re.compile(r"[ \t]+#.*")


def read(path: Path) -> dict[str, str]:
    """Read the variables of a file. Raises UserError with the line number."""
    try:
        text = untrusted_files.read_bytes(path.expanduser().resolve(), MAX_FILE_BYTES).decode("utf-8-sig")
    except FileNotFoundError:
        raise NotFound(f"{path}: no such file", "name a file of KEY=VALUE lines") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text", "save it as UTF-8") from None
    except (RuntimeError, untrusted_files.UnreadableFile) as e:
        raise UserError(f"{path} cannot be read: {e}", "name a file of KEY=VALUE lines") from None
    return parse(text, str(path))


def parse(text: str, what: str) -> dict[str, str]:
    """Parse variables. If a name occurs twice, the last value counts. Raises UserError."""
    text = text.replace("\r\n", "\n")
    variables: dict[str, str] = {}
    at = 0
    while at < len(text):
        line = _LINE.match(text, at)[0]  # type: ignore[index]  # it matches nothing, too
        at += len(line) - len(line.lstrip())
        if not line.strip() or line.lstrip().startswith("#"):
            at = text.find("\n", at) + 1 or len(text)
            continue
        where = f"{what}, line {text.count(chr(10), 0, at) + 1}"
        name, at = _name(text, at, where)
        value, at = _value(text, at, where)
        try:
            variables[name] = variable(name, value)
        except WrongValueError as e:
            raise UserError(f"{where}: {e.message}", e.remedy) from None
    return variables


def _name(text: str, at: int, where: str) -> tuple[str, int]:
    """Parse a name. The error does not quote the line, because it may contain a secret."""
    match = _BEGINNING.match(text, at)
    if match is None:
        raise UserError(f"{where}: not of the form KEY=VALUE", "write e.g. LR=0.1; a comment begins with #")
    return match["name"], match.end()


def _value(text: str, at: int, where: str) -> tuple[str, int]:
    """The value that begins at `at`, and the position where the next line begins."""
    begins = _SPACE.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing, too
    quote = text[begins : begins + 1]
    if quote not in ("'", '"'):
        plain = _LINE.match(text, at)[0]  # type: ignore[index]
        return _COMMENT.sub("", plain).strip(), at + len(plain) + 1
    quoted = (_DOUBLE if quote == '"' else _SINGLE).match(text, begins)
    if quoted is None:
        raise UserError(f"{where}: the value has no closing {quote}", f"write {quote} at its end")
    rest = _REST.match(text, quoted.end())
    if rest is None:
        raise UserError(f"{where}: there is text after the closing {quote}", "put the complete value into the quotes")
    return (_ESCAPE.sub(_unescape, quoted[1]) if quote == '"' else quoted[1]), max(rest.end(), at + 1)


def _unescape(match: "re.Match[str]") -> str:
    """The escaped character. An unknown escape keeps its backslash."""
    return ESCAPES.get(match[1], match[0])
