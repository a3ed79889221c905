"""Files that people name, as text: small enough to be one, and nothing but text."""

from pathlib import Path

from cluster.errors import UserError


def text_of(path: Path, form: str, most_bytes: int) -> str:
    """Of a file in this form ("CSV"). Raises UserError for what cannot be read, is larger, or is not text in UTF-8."""
    try:
        with path.open("rb") as file:
            content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise UserError(f"{path} has more than {most_bytes >> 20} MiB", f"name a smaller {form} file")
        text = content.decode("utf-8-sig")
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}", f"name a {form} file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path.name} is not a {form} file: it is not text in UTF-8", f"name a {form} file") from None
    if "\0" in text:
        raise UserError(f"{path.name} is not a {form} file: it has NUL bytes", f"name a {form} file")
    return text
