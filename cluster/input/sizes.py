"""Parse sizes in bytes that people write: `16GB`, `512 MiB`."""

import re

from cluster.errors import UserError

SIZE = re.compile(r"(?P<number>[0-9]{1,12}(\.[0-9]{1,6})?)\s*(?P<prefix>[KMGT])(?P<binary>i?)B\+?", re.IGNORECASE)


def size_bytes(text: object) -> int:
    """`16GB` is 16·10⁹, `16GiB` is 16·2³⁰. Raises UserError for a number without a unit."""
    match = SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if not match:
        raise UserError(f"{text!r} is not a size", "write a number and a unit, e.g. 16GB or 16GiB")
    power = "KMGT".index(match["prefix"].upper()) + 1
    return int(float(match["number"]) * (1024 if match["binary"] else 1000) ** power)
