"""Read users' text files, with a limit on their size."""

from pathlib import Path

from cluster.errors import UserError


def read_text(path: Path, form: str, max_bytes: int) -> str:
    """Read a file.

    `form`: its format for messages, e.g. "CSV". Raises UserError if it cannot be read, is larger than `max_bytes`, or
    is not UTF-8 text.
    """
    try:
        with path.open("rb") as file:
            content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise UserError(f"{path} has more than {max_bytes >> 20} MiB", f"name a smaller {form} file")
        text = content.decode("utf-8-sig")
    except OSError as e:
        raise UserError(f"{path} cannot be read: {e.strerror}", f"name a {form} file") from None
    except UnicodeDecodeError:
        raise UserError(f"{path.name} is not a {form} file: it is not text in UTF-8", f"name a {form} file") from None
    if "\0" in text:
        raise UserError(f"{path.name} is not a {form} file: it has NUL bytes", f"name a {form} file")
    return text
